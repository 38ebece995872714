"""One data set spread over nodes, with the test set that all of them are judged by.

The idea: a global model is scored once, on `test`; who stands for which part of it is
`evaluation`, and `owner` says which node reports on which row when asked by message.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_sap.data.examples import Baseline, Evaluation, Examples


@dataclass(frozen=True, slots=True, eq=False)
class FederatedData:
    """Training examples per node, one test set, and how to score on it.

    Build it with `with_own_test` or `with_shared_test`.

    Parameters
    ----------
    name : str
        For the report, such as ``"parking"``.
    train : tuple[Examples, ...]
        One per node, none of them empty; the position is the node's partition id.
    test : Examples
        The whole test set.
    owner : NDArray, shape (num_test,), int64
        The node that reports on each test row; every row has one.
    evaluation : Evaluation
        How scores on `test` become the metric of all, or of a group of nodes.
    baseline : Baseline
        What learning nothing scores on `test`.

    Raises
    ------
    ValueError
        If there is no node, or a node has no training examples.
    """

    name: str
    train: tuple[Examples, ...]
    test: Examples
    owner: NDArray[np.int64]
    evaluation: Evaluation
    baseline: Baseline

    def __post_init__(self) -> None:
        """Refuse empty nodes."""
        empty = [node for node, part in enumerate(self.train) if len(part) == 0]
        if not self.train or empty:
            raise ValueError(
                f"every node needs training examples: of {len(self.train)} nodes, "
                f"{empty} have none; use fewer nodes or repair the partition"
            )

    @classmethod
    def with_own_test(
        cls,
        name: str,
        train: Sequence[Examples],
        *,
        test: Sequence[Examples],
        baseline: Baseline,
    ) -> "FederatedData":
        """Judge each node by held-out examples of its own.

        Raises
        ------
        ValueError
            If `train` and `test` differ in their number of nodes.
        """
        if len(train) != len(test):
            raise ValueError(
                f"train and test must have one entry per node, "
                f"got {len(train)} and {len(test)}"
            )
        owner = np.repeat(np.arange(len(test)), [len(part) for part in test])
        return cls(
            name,
            tuple(train),
            test=Examples.concatenate(test),
            owner=owner,
            evaluation=Evaluation.per_node(owner, len(test)),
            baseline=baseline,
        )

    @classmethod
    def with_shared_test(
        cls, name: str, train: Sequence[Examples], *, test: Examples
    ) -> "FederatedData":
        """Judge all nodes by one labelled test set, each by the classes it holds.

        The baseline always answers with the commonest class of the training examples.

        Examples
        --------
        The digits again, but with low digits on slow nodes:

        >>> from flower_sap.data import by_speed, load_digits
        >>> digits = load_digits(4)
        >>> whole = Examples.concatenate(digits.train)
        >>> rng = np.random.default_rng(0)
        >>> cut = by_speed(whole.y, [1.0, 2.0, 3.0, 4.0], rng=rng, strength=1.0)
        >>> slow_low = FederatedData.with_shared_test(
        ...     "digits by speed", [whole.take(i) for i in cut], test=digits.test
        ... )
        >>> np.unique(slow_low.train[0].y).tolist()
        [0, 1, 2]
        """
        labels = [part.y for part in train]
        evaluation = Evaluation.per_class(test.y, labels)
        commonest = int(evaluation.mix.sum(axis=0).argmax())
        return cls(
            name,
            tuple(train),
            test=test,
            owner=_owners(test.y, evaluation.mix),
            evaluation=evaluation,
            baseline=Baseline("commonest class", (test.y == commonest).astype(float)),
        )

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes."""
        return len(self.train)

    def test_of(self, node: int) -> Examples:
        """Return the test rows that partition `node` reports on; they may be none."""
        return self.test.take(self.owner == node)


def _owners(test_y: NDArray[Any], mix: NDArray[np.float64]) -> NDArray[np.int64]:
    """Deal the rows of each class out in proportion to who trained on it."""
    owner = np.zeros(len(test_y), dtype=np.int64)
    for label in np.unique(test_y):
        rows = np.flatnonzero(test_y == label)
        # A class that nobody trained on is everybody's.
        counts = mix[:, label] if mix[:, label].any() else np.ones(len(mix))
        position = (np.arange(len(rows)) + 0.5) / len(rows)
        owner[rows] = np.searchsorted(np.cumsum(counts) / counts.sum(), position)
    return owner
