"""Partitioners: which example goes to which node.

The idea: a partition is a pure function of labels, groups and a numpy Generator. It
returns one sorted index array per node; every example is in exactly one of them and no
node is left without. Examples of one group (a track, a site) are never separated.

Sources
-------
Yurochkin et al. 2019, arXiv:1905.12022, section 4 (Dirichlet shares of each class).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_sap.data.units import Partition, Units, check_num_nodes, deal


def iid(num_examples: int, num_nodes: int, *, rng: np.random.Generator) -> Partition:
    """Spread examples uniformly at random, in shares that differ by one at most.

    Parameters
    ----------
    num_examples : int
        >= `num_nodes`.
    num_nodes : int
        >= 1.
    rng : np.random.Generator
        Advanced by one permutation.

    Raises
    ------
    ValueError
        If `num_nodes` is not in [1, num_examples].

    Examples
    --------
    >>> iid(5, 2, rng=np.random.default_rng(0))
    [array([2, 3, 4]), array([0, 1])]
    """
    check_num_nodes(num_nodes, num_examples)
    shares = np.array_split(rng.permutation(num_examples), num_nodes)
    return [np.sort(share) for share in shares]


def dirichlet(
    labels: NDArray[Any],
    num_nodes: int,
    *,
    rng: np.random.Generator,
    alpha: float,
    groups: NDArray[Any] | None = None,
    min_examples: int = 1,
) -> Partition:
    r"""Give each node its own mix of classes.

    Of each class, node :math:`k` gets the share :math:`p_k`, with
    :math:`p \sim \mathrm{Dir}(\alpha, \ldots, \alpha)` drawn per class. Nodes short of
    `min_examples` are then filled from the largest one.

    Parameters
    ----------
    labels : NDArray, shape (n,)
        Class of each example. A group counts for the class of its first example.
    num_nodes : int
        >= 1.
    rng : np.random.Generator
        Advanced by one Dirichlet draw and one permutation per class.
    alpha : float
        > 0; small: few classes per node; large: the same mix everywhere.
    groups : NDArray, shape (n,), or None
        Examples with equal entries stay together; ``None``: all independent.
    min_examples : int
        Fewest examples of a node, >= 1.

    Raises
    ------
    ValueError
        If a parameter is out of range, or whole groups cannot fill every node.

    Examples
    --------
    >>> labels = np.array([0, 0, 0, 1, 1, 1])
    >>> dirichlet(labels, 2, rng=np.random.default_rng(0), alpha=0.1)
    [array([0, 1, 2, 3, 5]), array([4])]
    """
    if not 0 < alpha < np.inf:
        raise ValueError(f"alpha must be finite and > 0, got {alpha}")
    units = Units(labels, groups, num_nodes)
    node_of_unit = np.zeros(len(units.size), dtype=np.int64)
    for label in np.unique(units.label):
        share = rng.dirichlet(np.full(num_nodes, alpha))
        members = rng.permutation(np.flatnonzero(units.label == label))
        node_of_unit[members] = deal(units.size[members], share)
    return units.partition(node_of_unit, min_examples)


def by_group(
    groups: NDArray[Any], num_nodes: int, *, rng: np.random.Generator
) -> Partition:
    """Give whole groups to nodes, evenly by number of examples.

    The largest group left goes to the node that has the fewest examples; groups of one
    size come in random order, and so do the nodes, lest the first ones hold the most.

    Parameters
    ----------
    groups : NDArray, shape (n,)
        Group of each example.
    num_nodes : int
        In [1, number of groups].
    rng : np.random.Generator
        Advanced by two permutations.

    Raises
    ------
    ValueError
        If there are fewer groups than nodes.

    Examples
    --------
    >>> by_group(np.array([7, 7, 8, 9]), 2, rng=np.random.default_rng(0))
    [array([2, 3]), array([0, 1])]
    """
    units = Units(groups, groups, num_nodes)
    shuffled = rng.permutation(len(units.size))
    largest_first = shuffled[np.argsort(-units.size[shuffled], kind="stable")]
    nodes = rng.permutation(num_nodes)
    count = np.zeros(num_nodes, dtype=np.int64)
    node_of_unit = np.zeros(len(units.size), dtype=np.int64)
    for unit in largest_first:
        poorest = int(count.argmin())
        node_of_unit[unit] = nodes[poorest]
        count[poorest] += units.size[unit]
    return units.partition(node_of_unit, 1)


def by_speed(
    labels: NDArray[Any],
    speeds: Sequence[float],
    *,
    rng: np.random.Generator,
    strength: float,
    groups: NDArray[Any] | None = None,
) -> Partition:
    """Let the classes follow the speed of the nodes.

    Units (examples, or groups) are ordered by ``strength * rank of the class +
    (1 - strength) * u``, both in [0, 1] and u uniform, and dealt out in equal shares
    from the slowest node to the fastest: low labels live on slow nodes. It is the case
    in which discounting late updates loses classes.

    Parameters
    ----------
    labels : NDArray, shape (n,)
        Class of each example; give the groups here too to let them follow the speed.
    speeds : Sequence[float]
        One per node, any unit; only the rank counts, equal speeds rank by position.
    rng : np.random.Generator
        Advanced by one uniform draw per unit.
    strength : float
        In [0, 1]; 0 is `iid` (by units), 1 sorts by class.
    groups : NDArray, shape (n,), or None
        Examples with equal entries stay together; ``None``: all independent.

    Raises
    ------
    ValueError
        If `strength` is out of range, or there are fewer units than nodes.

    Examples
    --------
    >>> labels, speeds = np.array([2, 0, 1]), [10.0, 0.5, 3.0]
    >>> by_speed(labels, speeds, rng=np.random.default_rng(0), strength=1.0)
    [array([0]), array([1]), array([2])]
    """
    if not 0 <= strength <= 1:
        raise ValueError(f"strength must be in [0, 1], got {strength}")
    num_nodes = len(speeds)
    units = Units(labels, groups, num_nodes)
    num_units = len(units.size)
    position = np.empty(num_units)
    position[np.argsort(units.label, kind="stable")] = np.arange(num_units) / num_units
    key = strength * position + (1 - strength) * rng.random(num_units)
    order = np.argsort(key, kind="stable")
    slowest_first = np.argsort(np.asarray(speeds, dtype=np.float64), kind="stable")
    node_of_unit = np.empty(num_units, dtype=np.int64)
    equal = np.full(num_nodes, 1 / num_nodes)
    node_of_unit[order] = slowest_first[deal(units.size[order], equal)]
    return units.partition(node_of_unit, 1)
