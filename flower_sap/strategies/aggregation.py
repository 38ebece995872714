"""From arriving updates to what the inner strategy aggregates.

`StreamingMean`, in a file of its own, folds each update into one accumulator, so that
memory does not grow with the number of clients; `KeepAll` keeps every update for
strategies that compare them (Krum, median, trimmed mean). Both give *rebased* models:
the current model plus the weighted delta. Each kind of array has its rule:

============  =============================  ======================================
kind          what                           rule
============  =============================  ======================================
`PARAMETER`   floats                         weighted mean of deltas
`STATISTIC`   running means and variances    weighted mean of *models*, weights <= 1:
                                             a convex mix, so no variance turns < 0
`COUNTER`     integers and booleans          largest value; never a mean
============  =============================  ======================================

Values come out in the dtype in which they came in.
"""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flower_sap.payload.decoder import CodedUpdate
from flower_sap.payload.dense import Arrays, Manifest
from flower_sap.payload.layout import Kind, kind_of


class Aggregator(Protocol):
    """Takes updates one by one and gives rebased models."""

    def add(
        self,
        update: Arrays | CodedUpdate,
        *,
        base: Arrays,
        num_examples: float,
        gain: float,
        share: float,
    ) -> None:
        """Take an update trained from `base`.

        Parameters
        ----------
        update : Arrays or CodedUpdate
            The client's model, or a payload that says how it differs from `base`.
        base : Arrays
            The model that its delta is measured from. An update measured from the
            current model itself is recognised by identity.
        num_examples : float
            Its weight in the mean, > 0.
        gain : float
            Factor of its delta.
        share : float
            The same for statistics, in [0, 1].
        """
        ...

    def models(self, scale: float) -> list[tuple[Arrays, float]]:
        """Return rebased models with their examples; `scale` multiplies the deltas."""
        ...

    def renewed(self, current: Arrays) -> "Aggregator":
        """Return an empty one around another model; this one is used up by it."""
        ...


class KeepAll:
    """Every update by itself, rebased; memory grows with their number.

    Parameters
    ----------
    current : Arrays
        The current model; never written to.
    manifest : Manifest
        Names, shapes and dtypes.
    """

    def __init__(self, current: Arrays, manifest: Manifest) -> None:
        self._manifest = manifest
        self._current = current
        self._kinds = [kind_of(spec) for spec in manifest.arrays]
        self._updates: list[tuple[Arrays, Arrays, float, float, float]] = []

    def add(
        self,
        update: Arrays | CodedUpdate,
        *,
        base: Arrays,
        num_examples: float,
        gain: float,
        share: float,
    ) -> None:
        """Keep one update; see `Aggregator.add`."""
        if isinstance(update, CodedUpdate):
            update = update.arrays(base)
        self._updates.append((update, base, num_examples, gain, share))

    def renewed(self, current: Arrays) -> "KeepAll":
        """Return an empty one; what was kept is let go."""
        return KeepAll(current, self._manifest)

    def models(self, scale: float) -> list[tuple[Arrays, float]]:
        """Return one rebased model per update, in order of arrival."""
        convex = min(scale, 1.0)
        return [
            (self._rebased(update, base, gain * scale, share * convex), n)
            for update, base, n, gain, share in self._updates
        ]

    def _rebased(
        self, update: Arrays, base: Arrays, gain: float, share: float
    ) -> Arrays:
        if gain == 1.0 and share == 1.0 and base is self._current:
            return update  # bit for bit what the client sent
        rebased = []
        for kind, x, b, w in zip(self._kinds, update, base, self._current, strict=True):
            if kind is Kind.COUNTER:
                rebased.append(x)
            elif kind is Kind.STATISTIC:
                rebased.append(_moved(w, x, w, share))
            else:
                rebased.append(_moved(w, x, b, gain))
        return rebased


def largest_counters(
    models: list[Arrays], current: Arrays, manifest: Manifest
) -> Arrays:
    """Return `current` with each counter at its largest value over `models`."""
    kinds = [kind_of(spec) for spec in manifest.arrays]
    largest = current
    for model in models:
        largest = largest_of(largest, model, kinds)
    return largest


def largest_of(left: Arrays, right: Arrays, kinds: list[Kind]) -> Arrays:
    """Return `left` with each counter at the larger of both values."""
    return [
        np.asarray(np.maximum(a, b)) if kind is Kind.COUNTER else a
        for a, b, kind in zip(left, right, kinds, strict=True)
    ]


def _moved(
    current: NDArray[Any], x: NDArray[Any], base: NDArray[Any], factor: float
) -> NDArray[Any]:
    """Return current + factor (x - base), in the dtype of `current`."""
    delta = x.astype(wide(x), copy=False) - base
    return np.asarray(current + factor * delta).astype(current.dtype)


def wide(array: NDArray[Any]) -> np.dtype[Any]:
    """Return the dtype to add in: half precision would lose small deltas."""
    return np.result_type(array.dtype, np.float32)
