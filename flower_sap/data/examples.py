"""Labelled examples, where they live, and how a global model is scored on them.

The idea: one test set serves every question. It is cut into *strata* (a node's own
rows, or a class), and a group of nodes is described by how much of each stratum it
stands for, so "the metric of the slow vehicles" is a weighted mean of strata, whatever
the task is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


def standardise_images(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Turn pixels into network input, once.

    Each image gets mean 0 and standard deviation 1 over all its pixels and channels, so
    that exposure does not matter.

    Parameters
    ----------
    images : NDArray, shape (n, height, width) or (n, height, width, channels), uint8

    Returns
    -------
    NDArray, shape (n, channels, height, width), float32, C order

    Raises
    ------
    ValueError
        If `images` has another dtype or number of dimensions.
    """
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise ValueError(
            "images must be uint8 of shape (n, height, width[, channels]), "
            f"got {images.dtype} of shape {images.shape}"
        )
    nhwc = images if images.ndim == 4 else images[..., np.newaxis]
    pixels = np.ascontiguousarray(nhwc.transpose(0, 3, 1, 2), dtype=np.float32)
    rows = pixels.reshape(len(pixels), math.prod(pixels.shape[1:]))
    rows -= rows.mean(axis=1, keepdims=True)
    deviation = np.sqrt(np.einsum("ij,ij->i", rows, rows) / np.float32(rows.shape[1]))
    # One grey level at least: an even image has no contrast to bring out.
    rows /= np.maximum(deviation, np.float32(1.0))[:, np.newaxis]
    return pixels


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """Inputs, targets, and the unit that must stay on one node.

    Parameters
    ----------
    x : NDArray, shape (n, ...), float32
        Tabular rows, or images in NCHW order, already standardised.
    y : NDArray, shape (n,)
        float32 for a regression target, int64 for a class.
    group : NDArray, shape (n,), int64
        Site, track, writer; ``arange(n)`` where examples are independent.

    Raises
    ------
    ValueError
        If the three lengths differ.
    """

    x: NDArray[np.float32]
    y: NDArray[Any]
    group: NDArray[np.int64]

    def __post_init__(self) -> None:
        """Refuse different lengths."""
        if not len(self.x) == len(self.y) == len(self.group):
            raise ValueError(
                "x, y and group must have one entry per example, "
                f"got {len(self.x)}, {len(self.y)} and {len(self.group)}"
            )

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.y)

    def take(self, index: NDArray[Any]) -> "Examples":
        """Return the examples at `index` (integers or a mask), copied."""
        return Examples(self.x[index], self.y[index], self.group[index])

    @staticmethod
    def concatenate(parts: Sequence["Examples"]) -> "Examples":
        """Return all examples of `parts`, in that order."""
        return Examples(
            np.concatenate([part.x for part in parts]),
            np.concatenate([part.y for part in parts]),
            np.concatenate([part.group for part in parts]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    r"""How per-example scores on the global test set become one number.

    For nodes :math:`T`, with :math:`m_k(s)` the share of node :math:`k` in stratum
    :math:`s` and :math:`\bar a_s` the mean score of the test rows in :math:`s`,

    .. math:: A(T) = \sum_s p_T(s)\, \bar a_s, \qquad
        p_T(s) = \sum_{k \in T} m_k(s) \Big/ \sum_{s'} \sum_{k \in T} m_k(s').

    A stratum without test rows is left out of both sums.

    Parameters
    ----------
    stratum : NDArray, shape (num_test,), int64
        Stratum of each test row, in [0, num_strata).
    mix : NDArray, shape (num_nodes, num_strata), float64
        :math:`m_k(s) \ge 0`.

    Examples
    --------
    Node 0 trained on class 0 alone, node 1 on both; class 1 is never recognised:

    >>> evaluation = Evaluation.per_class(
    ...     np.array([0, 0, 1, 1]), [np.array([0, 0]), np.array([0, 1])]
    ... )
    >>> correct = np.array([1.0, 1.0, 0.0, 0.0])
    >>> evaluation.of(correct), evaluation.of(correct, nodes=[0])
    (0.5, 1.0)
    >>> evaluation.of(correct, nodes=[1])
    0.5
    """

    stratum: NDArray[np.int64]
    mix: NDArray[np.float64]

    @classmethod
    def per_node(cls, owner: NDArray[np.int64], num_nodes: int) -> "Evaluation":
        """Score a group of nodes by the test rows that belong to them.

        A stratum is a node and :math:`m_k(k)` its number of test rows, so
        :math:`A(T)` is the plain mean over the rows of :math:`T`.
        """
        counts = np.bincount(owner, minlength=num_nodes)
        return cls(owner, np.diag(counts).astype(np.float64))

    @classmethod
    def per_class(
        cls, test_y: NDArray[np.int64], train_y: Sequence[NDArray[np.int64]]
    ) -> "Evaluation":
        r"""Score a group of nodes by the classes it trained on.

        A stratum is a class :math:`c` and :math:`m_k(c)` the number of training
        examples of that class on node :math:`k`, so with correctness as the score
        :math:`A(T) = \sum_c p_T(c)\, \mathrm{acc}_c`.
        """
        num_classes = 1 + max(int(y.max()) for y in (test_y, *train_y))
        counts = [np.bincount(y, minlength=num_classes) for y in train_y]
        return cls(test_y, np.array(counts, dtype=np.float64))

    def of(
        self, score: NDArray[np.floating[Any]], *, nodes: Sequence[int] | None = None
    ) -> float:
        """Return the metric of all, or of a group of nodes.

        Parameters
        ----------
        score : NDArray, shape (num_test,)
            One number per test row: an absolute error, or 0 and 1 for correctness.
        nodes : Sequence[int] or None
            The group; ``None`` is the plain mean over the whole test set.

        Raises
        ------
        ValueError
            If `score` has another length than the test set, or `nodes` stand for none
            of its strata.
        """
        if score.shape != self.stratum.shape:
            raise ValueError(
                f"score must have shape {self.stratum.shape}, one per test row, "
                f"got {score.shape}"
            )
        if nodes is None:
            return float(np.mean(score, dtype=np.float64))
        num_strata = self.mix.shape[1]
        rows = np.bincount(self.stratum, minlength=num_strata)
        total = np.bincount(self.stratum, weights=score, minlength=num_strata)
        share = np.where(rows > 0, self.mix[list(nodes)].sum(axis=0), 0.0)
        if not share.sum() > 0:
            raise ValueError(
                f"nodes {list(nodes)} stand for none of the {len(score)} test rows: "
                "give a larger group of nodes"
            )
        return float(share @ (total / np.maximum(rows, 1)) / share.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Baseline:
    """The score of a rule that learns nothing, to read a result against.

    Parameters
    ----------
    name : str
        The rule, such as ``"persistence"``.
    score : NDArray, shape (num_test,), float64
        Its score per test row, as `Evaluation.of` takes it.
    """

    name: str
    score: NDArray[np.float64]
