"""From arriving updates to what the inner strategy aggregates.

`StreamingMean` folds each update into one accumulator, so that memory does not grow
with the number of clients; `KeepAll` keeps every update for strategies that compare
them (Krum, median, trimmed mean). Both give *rebased* models: the current model plus
the weighted delta. Each kind of array has its rule:

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

from enum import Enum
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from flower_sap.payload.dense import LARGE, Arrays, ArraySpec, Manifest, as_tensor

_PIECE = 1 << 19  # elements
_STATISTICS = ("running_mean", "running_var")


class Kind(Enum):
    """How an array is aggregated."""

    PARAMETER = "parameter"
    STATISTIC = "statistic"
    COUNTER = "counter"


def kind_of(spec: ArraySpec) -> Kind:
    """Return the kind of an array, by dtype and by torch's names for statistics."""
    if spec.dtype.kind in "iub":
        return Kind.COUNTER
    if spec.name.rpartition(".")[2] in _STATISTICS:
        return Kind.STATISTIC
    return Kind.PARAMETER


class Aggregator(Protocol):
    """Takes updates one by one and gives rebased models."""

    def add(
        self,
        update: Arrays,
        *,
        base: Arrays,
        num_examples: float,
        gain: float,
        share: float,
    ) -> None:
        """Take an update trained from `base`.

        Parameters
        ----------
        update, base : Arrays
            The client's model and the one its delta is measured from. An update
            measured from the current model itself is recognised by identity.
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


class StreamingMean:
    r"""The weighted mean of all updates, in the memory of one or two models.

    Updates of full weight measured from the current model enter a *running mean*
    (West 1979), :math:`m \leftarrow m + (n_i / N)(x_i - m)`: equal models give that
    model to the last bit. The others enter a running mean of weighted deltas; there
    :math:`x - b` is exact where the two are close (Sterbenz), so a zero delta adds
    nothing. float32 suffices for both: errors are of the last place of the mean, or
    relative to the delta, and no sum outgrows what it is the mean of.

    Parameters
    ----------
    current : Arrays
        The current model; never written to.
    manifest : Manifest
        Names, shapes and dtypes.
    """

    # Folding two updates per pass over the accumulator halves its memory traffic and
    # holds no more than one reply back.
    _GROUP = 2

    def __init__(self, current: Arrays, manifest: Manifest) -> None:
        self._manifest = manifest
        # Memory for the mean and for the deltas, from an aggregator used up.
        self._spare: list[NDArray[Any] | None] = [None] * len(current)
        self._spare_delta: list[NDArray[Any] | None] = [None] * len(current)
        self._current = current
        self._kinds = [kind_of(spec) for spec in manifest.arrays]
        self._pending: list[tuple[Arrays, float]] = []
        self._mean: list[NDArray[Any] | None] = [None] * len(current)
        self._delta: list[NDArray[Any] | None] = [None] * len(current)
        self._peak: Arrays | None = None
        self._fresh = 0.0
        self._stale = 0.0
        self._folded = 0.0
        self._total = 0.0

    def add(
        self,
        update: Arrays,
        *,
        base: Arrays,
        num_examples: float,
        gain: float,
        share: float,
    ) -> None:
        """Fold one update in; see `Aggregator.add`."""
        self._total += num_examples
        self._take_counters(update)
        if gain == 1.0 and share == 1.0 and base is self._current:
            self._fresh += num_examples
            self._pending.append((update, num_examples))
            if len(self._pending) >= self._GROUP:
                self._fold()
            return
        self._stale += num_examples
        part = num_examples / self._stale
        for index, kind in enumerate(self._kinds):
            if kind is Kind.PARAMETER:
                mean = self._mean_delta(index)
                step_mean_delta(mean, update[index], base[index], gain, part)
            elif kind is Kind.STATISTIC:
                mean = self._mean_delta(index)
                current = self._current[index]
                step_mean_delta(mean, update[index], current, share, part)

    def models(self, scale: float) -> list[tuple[Arrays, float]]:
        """Return the one mean model and the sum of examples; uses the sums up."""
        self._fold()
        merged = [self._merged(index, scale) for index in range(len(self._kinds))]
        return [(merged, self._total)]

    def renewed(self, current: Arrays) -> "StreamingMean":
        """Return an empty mean that works in this one's memory.

        Touching fresh memory for every merge costs more than the sums.
        """
        renewed = StreamingMean(current, self._manifest)
        renewed._spare = _first(self._mean, self._spare)
        renewed._spare_delta = _first(self._delta, self._spare_delta)
        return renewed

    def _take_counters(self, update: Arrays) -> None:
        if Kind.COUNTER not in self._kinds:
            return
        self._peak = _largest(self._peak or self._current, update, self._kinds)

    def _fold(self) -> None:
        """Move the pending updates into the running mean, in order of arrival."""
        shares = []
        for _, num_examples in self._pending:
            self._folded += num_examples
            shares.append(num_examples / self._folded)
        for index, kind in enumerate(self._kinds):
            if kind is not Kind.COUNTER:
                for (update, _), share in zip(self._pending, shares, strict=True):
                    self._fold_one(index, update[index], share)
        self._pending.clear()

    def _fold_one(self, index: int, x: NDArray[Any], share: float) -> None:
        mean, spare = self._mean[index], self._spare[index]
        if mean is None and spare is not None:
            np.copyto(spare, x)
            self._mean[index] = spare
        else:
            self._mean[index] = step_mean(mean, x, share)

    def _mean_delta(self, index: int) -> NDArray[Any]:
        """Return the running mean of deltas, zero at first."""
        mean = self._delta[index]
        if mean is not None:
            return mean
        spare, current = self._spare_delta[index], self._current[index]
        if spare is None:
            spare = np.zeros(current.shape, _wide(current))
        else:
            spare.fill(0)
        self._delta[index] = spare
        return spare

    def _merged(self, index: int, scale: float) -> NDArray[Any]:
        current, kind = self._current[index], self._kinds[index]
        if kind is Kind.COUNTER:
            return current if self._peak is None else self._peak[index]
        if kind is Kind.STATISTIC:
            scale = min(scale, 1.0)
        mean, delta = self._mean[index], self._delta[index]
        if delta is None and mean is None:
            return current
        if delta is None and scale == 1.0 and mean is not None:
            return mean.astype(current.dtype, copy=False)
        # In place, for a model may be most of the memory there is: first the mean's
        # pull, then the deltas, then the current model below both.
        total = np.zeros(current.shape, _wide(current)) if delta is None else delta
        total *= scale * self._stale / self._total
        if mean is not None:
            mean -= current
            mean *= scale * self._fresh / self._total
            total += mean
        total += current
        return total.astype(current.dtype, copy=False)


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
        update: Arrays,
        *,
        base: Arrays,
        num_examples: float,
        gain: float,
        share: float,
    ) -> None:
        """Keep one update; see `Aggregator.add`."""
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
        largest = _largest(largest, model, kinds)
    return largest


def _first(
    arrays: list[NDArray[Any] | None], others: list[NDArray[Any] | None]
) -> list[NDArray[Any] | None]:
    return [b if a is None else a for a, b in zip(arrays, others, strict=True)]


def _largest(left: Arrays, right: Arrays, kinds: list[Kind]) -> Arrays:
    return [
        np.asarray(np.maximum(a, b)) if kind is Kind.COUNTER else a
        for a, b, kind in zip(left, right, kinds, strict=True)
    ]


def _moved(
    current: NDArray[Any], x: NDArray[Any], base: NDArray[Any], factor: float
) -> NDArray[Any]:
    """Return current + factor (x - base), in the dtype of `current`."""
    delta = x.astype(_wide(x), copy=False) - base
    return np.asarray(current + factor * delta).astype(current.dtype)


def _wide(array: NDArray[Any]) -> np.dtype[Any]:
    """Return the dtype to add in: half precision would lose small deltas."""
    return np.result_type(array.dtype, np.float32)


def step_mean(mean: NDArray[Any] | None, x: NDArray[Any], share: float) -> NDArray[Any]:
    """Move `mean` towards `x` by `share`, in place; None starts at a copy of `x`."""
    if mean is None:
        return np.array(x, _wide(x))
    if mean.size >= LARGE and mean.dtype == x.dtype:
        as_tensor(mean).lerp_(as_tensor(x), share)
    else:
        mean += (x - mean) * share
    return mean


def step_mean_delta(
    mean: NDArray[Any], x: NDArray[Any], base: NDArray[Any], gain: float, share: float
) -> None:
    """Move `mean` towards ``gain * (x - base)`` by `share`, in place."""
    if mean.size < LARGE or mean.dtype != x.dtype:
        delta = (x.astype(mean.dtype, copy=False) - base) * gain
        mean += (delta - mean) * share
        return
    # In pieces that stay in the cache: a difference as large as the array would go
    # out to memory and back.
    flat = [as_tensor(array).reshape(-1) for array in (mean, x, base)]
    piece = flat[0].new_empty(_PIECE)
    for start in range(0, mean.size, _PIECE):
        to, new, old = (tensor[start : start + _PIECE] for tensor in flat)
        delta_piece = piece[: len(to)]
        torch.sub(new, old, out=delta_piece)
        to.lerp_(delta_piece.mul_(gain), share)
