"""What a partitioner deals out as a whole, and the dealing itself.

The idea: examples of one group are one unit. Units are cut into stretches of given
shares by where their middles fall, and a node left short is filled from the richest.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Partition = list[NDArray[np.int64]]


class Units:
    """Examples, or groups of them, in the order of their keys.

    Parameters
    ----------
    labels : NDArray, shape (n,)
        Label of each example.
    groups : NDArray, shape (n,), or None
        Examples with equal entries are one unit; ``None``: each is one.
    num_nodes : int
        In [1, number of units].

    Attributes
    ----------
    label : NDArray, shape (num_units,)
        Label of each unit's first example.
    size : NDArray, shape (num_units,), int64
        Examples of each unit.

    Raises
    ------
    ValueError
        If the lengths differ, or there are fewer units than nodes.
    """

    def __init__(
        self, labels: NDArray[Any], groups: NDArray[Any] | None, num_nodes: int
    ) -> None:
        keys = np.arange(len(labels)) if groups is None else groups
        if len(keys) != len(labels):
            raise ValueError(
                f"groups must have one entry per label, got {len(keys)} "
                f"for {len(labels)} labels"
            )
        _, first, self._of_example, self.size = np.unique(
            keys, return_index=True, return_inverse=True, return_counts=True
        )
        check_num_nodes(num_nodes, len(self.size))
        self.label = np.asarray(labels)[first]
        self._num_nodes = num_nodes

    def partition(
        self, node_of_unit: NDArray[np.int64], min_examples: int
    ) -> Partition:
        """Return the examples of each node, after filling the poor ones."""
        self._fill(node_of_unit, min_examples)
        node_of_example = node_of_unit[self._of_example]
        return [np.flatnonzero(node_of_example == k) for k in range(self._num_nodes)]

    def _fill(self, node_of_unit: NDArray[np.int64], min_examples: int) -> None:
        """Move the smallest unit of the richest node to the poorest, while needed."""
        if not min_examples >= 1:
            raise ValueError(f"min_examples must be >= 1, got {min_examples}")
        num_units = np.bincount(node_of_unit, minlength=self._num_nodes)
        count = np.bincount(node_of_unit, self.size, self._num_nodes).astype(np.int64)
        while (fewest := int(count.min())) < min_examples:
            poor = int(count.argmin())
            rich = int(np.where(num_units > 1, count, 0).argmax())
            members = np.flatnonzero(node_of_unit == rich)
            unit = members[self.size[members].argmin()]
            # Only a move that leaves the giver richer than the taker was ends: each one
            # raises the minimum, or leaves fewer nodes at it.
            if num_units[rich] < 2 or count[rich] - self.size[unit] <= fewest:
                raise ValueError(
                    f"min_examples={min_examples} cannot be met for {self._num_nodes} "
                    f"nodes: {int(count.sum())} examples in {len(self.size)} units "
                    f"that stay whole leave one node with {fewest}; use fewer nodes"
                )
            node_of_unit[unit] = poor
            num_units += np.bincount([poor], minlength=self._num_nodes)
            num_units -= np.bincount([rich], minlength=self._num_nodes)
            count[poor] += self.size[unit]
            count[rich] -= self.size[unit]


def deal(sizes: NDArray[np.int64], share: NDArray[np.float64]) -> NDArray[np.int64]:
    """Cut a row of units into stretches of the given shares; return each unit's."""
    middle = (np.cumsum(sizes) - sizes / 2) / sizes.sum()
    # The last bound is left out: rounding may put it just below 1.
    position: NDArray[np.int64] = np.searchsorted(np.cumsum(share)[:-1], middle)
    return position


def check_num_nodes(num_nodes: int, num_units: int) -> None:
    """Refuse more nodes than units, or none."""
    if not 1 <= num_nodes <= num_units:
        raise ValueError(
            f"num_nodes must be in [1, {num_units}], the number of examples or groups "
            f"that stay whole, got {num_nodes}"
        )
