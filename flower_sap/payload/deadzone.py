r"""The dead-zone quantizer: one step for a whole vector, zero widened, means restored.

With step :math:`\Delta` and threshold :math:`\theta \in (1/2, 1)` a value becomes

.. math:: l = \mathrm{sign}(x)\,\lfloor |x|/\Delta + 1 - \theta \rfloor,\qquad
          \hat x = \mathrm{sign}(l)\,(|l| + c)\,\Delta

so what is smaller than :math:`\theta\Delta` is zero, and :math:`c` puts each decoded
value at the mean of those that share its level. With entropy-coded levels this is near
the rate-distortion function of a memoryless source, and one step over sources of
different variance is reverse water-filling.

Sources: Sullivan 1996 (dead-zone quantizers of Laplacian sources), Cover and Thomas
2006, section 10.3.3. Choosing :math:`\theta` by rate is ours, by measurement.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Levels = NDArray[np.int16]

PIECE = 1 << 16  # elements that stay in the cache through all operations on them
LARGEST_LEVEL = 32_000
_OFFSETS = 256  # the offset c travels as a signed byte in this many parts
_SAMPLES = 24


def threshold(bits_per_value: float) -> float:
    """Return theta for a rate (bits a value), in 256ths; wider where bits are few.

    Examples
    --------
    >>> threshold(4.0), threshold(0.1)
    (0.55078125, 0.75)
    """
    theta = np.interp(bits_per_value, (0.35, 0.7, 1.4, 2.2, 3.2), _THETAS)
    return round(float(theta) * 256) / 256


_THETAS = (0.75, 0.70, 0.65, 0.60, 0.55)


def quantize(
    x: Floats,
    step: float,
    theta: float,
    *,
    out: Levels | None = None,
    largest: float = 0.0,
) -> Levels:
    """Return the levels of `x`, shape (n,).

    Parameters
    ----------
    x : NDArray, float32, shape (n,)
        Values.
    step, theta : float
        Of the quantizer.
    out : NDArray, int16, shape (n,), optional
        Memory for the levels.
    largest : float
        What values may reach: where levels could not count that, they end at
        LARGEST_LEVEL. Default: all are known to be countable.
    """
    clips = largest > step * LARGEST_LEVEL
    levels = np.empty(x.size, np.int16) if out is None else out
    scaled = np.empty(min(PIECE, x.size), np.float32)
    rounding = np.empty_like(scaled)
    inverse = np.float32(1 / step)
    shift = np.float32(1 - theta)
    for start in range(0, x.size, PIECE):
        piece = x[start : start + PIECE]
        moved, up = scaled[: piece.size], rounding[: piece.size]
        np.multiply(piece, inverse, out=moved)
        np.copysign(shift, moved, out=up)
        moved += up
        if clips:
            np.clip(moved, -LARGEST_LEVEL, LARGEST_LEVEL, out=moved)
        # The cast cuts towards zero, which is the floor of the magnitude.
        np.copyto(levels[start : start + PIECE], moved, casting="unsafe")
    return levels


@dataclass(slots=True)
class Offset:
    """The mean of ``|x| / step - |l|`` over the levels that are not 0.

    A bounded number of pieces stands for the whole, so that nothing large is formed.

    Parameters
    ----------
    num_values : int
        Of the whole.
    """

    num_values: int
    total: float = 0.0
    count: int = 0
    _seen: int = 0

    def observe(self, x: Floats, levels: Levels, step: float) -> None:
        """Take in a part of the values."""
        every = max(1, self.num_values // (PIECE * _SAMPLES))
        for start in range(0, x.size, PIECE):
            self._seen += 1
            if (self._seen - 1) % every:
                continue
            part = slice(start, start + PIECE)
            nonzero = np.flatnonzero(levels[part] != 0)
            share = np.abs(x[part][nonzero]) / np.float32(step)
            share -= np.abs(levels[part][nonzero])
            self.total += float(share.sum(dtype=np.float64))
            self.count += nonzero.size

    @property
    def value(self) -> float:
        """Return c, in 256ths."""
        c = self.total / self.count if self.count else 0.0
        return round(min(0.49, max(-0.49, c)) * _OFFSETS) / _OFFSETS


def offset(x: Floats, levels: Levels, step: float) -> float:
    """Return c for values and their levels."""
    found = Offset(x.size)
    found.observe(x, levels, step)
    return found.value


def offset_to_byte(c: float) -> int:
    """Return c as it travels."""
    return round(c * _OFFSETS)


def offset_from_byte(byte: int) -> float:
    """Return c as it came."""
    return byte / _OFFSETS


def dequantize(levels: Levels, step: float, c: float) -> Floats:
    """Return the decoded values, shape (n,), in new memory."""
    x = np.zeros(levels.size, np.float32)
    accumulate(x, levels, step, c)
    return x


def accumulate(x: Floats, levels: Levels, step: float, c: float) -> None:
    """Add the decoded values to `x` in place; a negative step takes them away."""
    values = np.empty(min(PIECE, x.size), np.float32)
    offsets = np.empty_like(values)
    reach = np.float32(abs(c * step))
    move = np.add if c > 0 else np.subtract
    for start in range(0, x.size, PIECE):
        piece = levels[start : start + PIECE]
        value, apart = values[: piece.size], offsets[: piece.size]
        np.multiply(piece, np.float32(step), out=value)
        if c:
            # No level but 0 is within the offset of 0, so clipping gives its sign.
            np.clip(value, -reach, reach, out=apart)
            move(value, apart, out=value)
        x[start : start + PIECE] += value


def largest_energy(levels: Levels, step: float) -> float:
    """Return a bound of the decoded values' sum of squares, without decoding them."""
    largest = 2.0**15
    if levels.size * (step * largest) ** 2 > 1.0:  # then it is worth a look
        largest = float(max(levels.max(initial=0), -int(levels.min(initial=0))))
    return levels.size * (step * (largest + 0.5)) ** 2
