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


def quantize(x: Floats, step: float, theta: float) -> Levels:
    """Return the levels of `x`, shape (n,); every ``|x| / step`` <= LARGEST_LEVEL."""
    levels = np.empty(x.size, np.int16)
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
        # The cast cuts towards zero, which is the floor of the magnitude.
        np.copyto(levels[start : start + PIECE], moved, casting="unsafe")
    return levels


def offset(x: Floats, levels: Levels, step: float) -> float:
    """Return c, the mean of ``|x| / step - |l|`` where l is not 0, in 256ths.

    Up to `_SAMPLES` pieces of the vector stand for all of it.
    """
    total, count = 0.0, 0
    num_pieces = -(-x.size // PIECE)
    for piece in range(0, num_pieces, max(1, num_pieces // _SAMPLES)):
        part = slice(piece * PIECE, (piece + 1) * PIECE)
        nonzero = np.flatnonzero(levels[part])
        share = np.abs(x[part][nonzero]) / np.float32(step)
        share -= np.abs(levels[part][nonzero])
        total += float(share.sum(dtype=np.float64))
        count += nonzero.size
    c = total / count if count else 0.0
    return round(min(0.49, max(-0.49, c)) * _OFFSETS) / _OFFSETS


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
    signs = np.empty_like(values)
    for start in range(0, x.size, PIECE):
        piece = levels[start : start + PIECE]
        value, sign = values[: piece.size], signs[: piece.size]
        np.multiply(piece, np.float32(step), out=value)
        if c:
            np.sign(value, out=sign)
            sign *= np.float32(c * abs(step))
            value += sign
        x[start : start + PIECE] += value


def energy(levels: Levels, step: float, c: float) -> float:
    """Return the sum of squares of the decoded values, without decoding them."""
    total = 0.0
    for start in range(0, levels.size, PIECE):
        value = np.abs(levels[start : start + PIECE].astype(np.float32))
        count = float(np.count_nonzero(value))
        first = float(value.sum(dtype=np.float64))
        total += float(np.dot(value, value)) + 2 * c * first + c * c * count
    return step * step * total
