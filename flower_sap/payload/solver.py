"""The step at which a stream just fits its bytes.

The step is the only knob of the rate. It is guessed from a model, corrected on a sample
of the stream, and then by what whole encodings really take, until one fits and leaves
little unused. What does not fit is never cut: a coarser step is tried.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from flower_sap.payload import deadzone, entropy, low_rank, rate_model
from flower_sap.payload.deadzone import LARGEST_LEVEL, Floats
from flower_sap.payload.layout import Layout, Matrix
from flower_sap.payload.lrdzq import (
    Coded,
    FactorCode,
    assemble,
    encode_factors,
    parameters_nbytes,
    rest_of,
)

_LARGE = 1 << 20  # elements from which a sample pays
_SAMPLE = 16  # one block in so many stands for the stream
_BLOCK = 1 << 12
_GOOD_FILL = 0.987  # of the budget; nearer is not worth another encoding
_AIM = 0.9945
_NEAR = 0.25  # of the logarithm of a step: what the factors leave is then as before
_MOST_TRIALS = 50  # only until one fits
_TRIALS = 4  # whole encodings of a large stream; a small one gets more


@dataclass(slots=True)
class _Search:
    """A monotone search for the step, in logarithms, from what was measured."""

    budget: float
    finest: float
    too_fine: tuple[float, float] | None = None  # (log step, log bytes)
    fits: tuple[float, float] | None = None

    def note(self, step: float, nbytes: int) -> None:
        """Take in a measurement."""
        point = (math.log(step), math.log(max(1, nbytes)))
        if nbytes > self.budget:
            if self.too_fine is None or point[0] > self.too_fine[0]:
                self.too_fine = point
        elif self.fits is None or point[0] < self.fits[0]:
            self.fits = point

    def next_step(self, slope: float) -> float:
        """Return the step to try next; `slope` is of log bytes over log step."""
        goal = math.log(self.budget * _AIM)
        fine, fits = self.too_fine, self.fits
        if fine is None or fits is None:
            known = fine or fits
            assert known is not None
            log_step = known[0] + (goal - known[1]) / slope
            if fits is None:  # surely coarser, for the slope may be anything
                log_step = max(log_step, known[0] + 1e-3)
        else:
            share = (fine[1] - goal) / max(1e-12, fine[1] - fits[1])
            share = min(0.97, max(0.03, share))
            log_step = fine[0] + share * (fits[0] - fine[0])
        return max(self.finest, math.exp(min(80.0, log_step)))


class StreamEncoder:
    """One stream, to be coded in a given number of bytes.

    Parameters
    ----------
    x : NDArray, float32, shape (n,)
        The stream, finite.
    layout : Layout
        Its matrices.
    generator : torch.Generator
        Of the factorization's random matrices.
    """

    def __init__(self, x: Floats, layout: Layout, generator: torch.Generator) -> None:
        self._x = x
        self._matrices = layout.matrices
        self._factors = low_rank.factorize(x, layout.matrices, generator)
        pieces = [x[place.start : place.stop] for place in layout.stream]
        self._energies = np.array([float(np.dot(p, p)) for p in pieces])
        self._sizes = np.array([float(p.size) for p in pieces])
        # An empty array starts where the next one does: the later of them counts.
        starts = {place.start: i for i, place in enumerate(layout.stream)}
        self._where = [(starts[m.start], m) for m in layout.matrices]
        self.energy = float(self._energies.sum())
        # Two passes that form nothing: the magnitudes would be a vector of their own.
        self._largest = max(float(x.max(initial=0.0)), -float(x.min(initial=0.0)))

    @property
    def finest_step(self) -> float:
        """Return the step below which a level would not fit."""
        return 1.05 * self._largest / LARGEST_LEVEL

    def encode(self, budget: int) -> Coded | None:
        """Return the finest encoding found in at most `budget` bytes, if any."""
        if budget <= parameters_nbytes(self._matrices):
            return None
        finest = self.finest_step
        search = _Search(budget, finest)
        step = max(finest, self._first_step(budget))
        is_large = self._x.size >= _LARGE
        if is_large:
            step = max(finest, self._refined_on_sample(step, budget))
        best: Coded | None = None
        enough = _TRIALS if is_large else 3 * _TRIALS
        for trial in range(_MOST_TRIALS):
            if trial >= enough and best is not None:
                break
            factors = self._factors_at(step, budget)
            coded = assemble(self._x, factors, self._matrices, largest=self._largest)
            nbytes = len(coded.body)
            search.note(step, nbytes)
            if nbytes <= budget:
                if best is None or nbytes > len(best.body):
                    best = coded
                if nbytes >= _GOOD_FILL * budget or step <= finest:
                    break
            step = search.next_step(self._slope(step))
        return best

    def _theta(self, budget: float) -> float:
        return deadzone.threshold(8 * budget / max(1, self._x.size))

    def _factors_at(self, step: float, budget: int) -> FactorCode:
        return encode_factors(
            self._factors, self._matrices, float(np.float32(step)), self._theta(budget)
        )

    def _first_step(self, budget: int) -> float:
        return rate_model.first_step(
            budget, self._energies, self._sizes, self._factors, self._where
        )

    def _slope(self, step: float) -> float:
        """Return the model's slope of log bytes over log step, < 0."""
        near, far = self._predict(step), self._predict(step * 1.1)
        if near <= 1 or far <= 0.5:
            return -1.0
        return min(-0.05, math.log(far / near) / math.log(1.1))

    def _predict(self, step: float) -> float:
        return rate_model.predicted_nbytes(
            step, self._energies, self._sizes, self._factors, self._where
        )

    def _refined_on_sample(self, step: float, budget: int) -> float:
        """Correct a step by coding a sample of what the factors leave."""
        for _ in range(2):
            factors = self._factors_at(step, budget)
            sample = _Sample(self._x, factors, self._matrices)
            moved = _solve(sample.nbytes, step, _AIM * budget)
            is_near = abs(math.log(moved / step)) < _NEAR
            step = moved
            if is_near:
                break
        return step


class _Sample:
    """Some of what factors leave of a stream, to foretell what all of it takes."""

    def __init__(
        self, x: Floats, factors: FactorCode, matrices: Sequence[Matrix]
    ) -> None:
        apart = _BLOCK * _SAMPLE
        # The same places of the stream whatever its pieces: from each piece one, the
        # small arrays would count for more than their share.
        self._values = np.concatenate(
            [
                values[start : start + _BLOCK].copy()  # the memory is used again
                for at, values in rest_of(x, factors.parts, matrices)
                for start in range((apart // 2 - at) % apart, values.size, apart)
            ]
        )
        self._scale = x.size / self._values.size
        self._beside = factors.nbytes
        self._theta = factors.theta

    def nbytes(self, step: float) -> float:
        """Return the bytes of the whole stream at a step, about."""
        levels = deadzone.quantize(self._values, step, self._theta)
        return self._beside + self._scale * len(entropy.encode(levels)[1])


def _solve(nbytes: Callable[[float], float], step: float, goal: float) -> float:
    """Return the step at which a falling function of it is `goal`, by secants."""
    points: list[tuple[float, float]] = []
    for _ in range(4):
        found = max(1.0, nbytes(step))
        points.append((math.log(step), math.log(found)))
        if abs(found / goal - 1) < 0.002:
            break
        slope = -1.0
        if len(points) >= 2 and points[-1][0] != points[-2][0]:
            rise = points[-1][1] - points[-2][1]
            slope = min(-0.1, rise / (points[-1][0] - points[-2][0]))
        change = (math.log(goal) - points[-1][1]) / slope
        step = math.exp(points[-1][0] + min(1.5, max(-1.5, change)))
    return step
