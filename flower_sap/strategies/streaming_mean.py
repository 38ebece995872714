"""The mean of all updates in the memory of one or two models, however many come."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flower_sap.payload.decoder import CodedUpdate
from flower_sap.payload.dense import LARGE, Arrays, Manifest, as_tensor
from flower_sap.payload.layout import Kind, kind_of
from flower_sap.strategies.aggregation import largest_of, wide
from flower_sap.strategies.coded_mean import CodedMean

_PIECE = 1 << 19  # elements


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
        self._coded: CodedMean | None = None
        self._fresh = 0.0
        self._stale = 0.0
        self._folded = 0.0
        self._total = 0.0

    def add(
        self,
        update: Arrays | CodedUpdate,
        *,
        base: Arrays,
        num_examples: float,
        gain: float,
        share: float,
    ) -> None:
        """Fold one update in; see `Aggregator.add`."""
        self._total += num_examples
        if isinstance(update, CodedUpdate):
            self._add_coded(update, base, num_examples, gain, share)
            return
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

    def _add_coded(
        self,
        update: CodedUpdate,
        base: Arrays,
        num_examples: float,
        gain: float,
        share: float,
    ) -> None:
        """Add a payload without forming the model that it stands for."""
        if self._coded is None or not self._coded.fits(update):
            self._coded = CodedMean(update, num_examples)
        beside = update.beside(base)
        self._take_counters(beside)
        self._coded.add(update, num_examples, gain)
        for index, kind in enumerate(self._kinds):
            if kind is Kind.STATISTIC:
                delta = beside[index] - self._current[index]
                self._coded.add_statistic(index, delta, num_examples * share)

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
        if self._coded is not None:
            renewed._coded = self._coded
            self._coded.clear()
        return renewed

    def _take_counters(self, update: Arrays) -> None:
        if Kind.COUNTER not in self._kinds:
            return
        self._peak = largest_of(self._peak or self._current, update, self._kinds)

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
            spare = np.zeros(current.shape, wide(current))
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
        coded = None if self._coded is None else self._coded.of(index)
        if delta is None and mean is None and coded is None:
            return current
        if coded is None and delta is None and scale == 1.0 and mean is not None:
            return mean.astype(current.dtype, copy=False)
        # In place, for a model may be most of the memory there is: first the mean's
        # pull, then the deltas, then the current model below both.
        total = np.zeros(current.shape, wide(current)) if delta is None else delta
        total *= scale * self._stale / self._total
        if mean is not None:
            mean -= current
            mean *= scale * self._fresh / self._total
            total += mean
        if coded is not None and self._coded is not None:
            # The memory of the sums stays theirs.
            total += coded * (scale * self._coded.unit / self._total)
        total += current
        return total.astype(current.dtype, copy=False)


def _first(
    arrays: list[NDArray[Any] | None], others: list[NDArray[Any] | None]
) -> list[NDArray[Any] | None]:
    return [b if a is None else a for a, b in zip(arrays, others, strict=True)]


def step_mean(mean: NDArray[Any] | None, x: NDArray[Any], share: float) -> NDArray[Any]:
    """Move `mean` towards `x` by `share`, in place; None starts at a copy of `x`."""
    if mean is None:
        return np.array(x, wide(x))
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
