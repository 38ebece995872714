r"""How many bits a dead-zone quantizer takes, before anything is quantized.

A tensor of rms :math:`\sigma` under a step :math:`\Delta` takes about the entropy of a
quantized Gaussian of :math:`\sigma/\Delta`; real updates are a little more peaked, so
the model is a first guess that the solver corrects by what it measures.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flower_sap.payload.deadzone import threshold
from flower_sap.payload.layout import Matrix
from flower_sap.payload.low_rank import Factors, useful_rank

_BISECTIONS = 12  # to half a percent of the step: more than the model knows
_RATIOS = np.geomspace(1e-3, 3e4, 160)


@functools.cache
def _entropies() -> NDArray[np.float64]:
    """Return bits a value for each ratio of rms to step."""
    return np.array([_entropy(ratio) for ratio in _RATIOS.tolist()])


def _entropy(ratio: float) -> float:
    if ratio > 8:  # fine steps: h(x) - log2(step)
        return math.log2(ratio * math.sqrt(2 * math.pi * math.e))
    theta = threshold(max(0.0, math.log2(max(ratio, 1e-9) * 4.13)))
    edges = (theta + np.arange(0, 9 * max(1.0, ratio) + 2)) / ratio
    tails = np.array([math.erfc(edge / math.sqrt(2)) / 2 for edge in edges])
    cells = np.concatenate([[1 - 2 * tails[0]], tails[:-1] - tails[1:], tails[-1:]])
    cells = np.maximum(cells, 1e-300)
    weights = np.concatenate([[1.0], np.full(cells.size - 1, 2.0)])
    # The sign of each level that is not zero is in the doubled cells.
    return float(-(weights * cells * np.log2(cells)).sum())


def bits_per_value(ratio: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the entropy (bits) for each ratio of rms to step."""
    found = np.interp(np.log(np.maximum(ratio, 1e-300)), np.log(_RATIOS), _entropies())
    return np.where(ratio < _RATIOS[0], 0.0, found)


def predicted_nbytes(
    step: float,
    energies: NDArray[np.float64],
    sizes: NDArray[np.float64],
    factors: Sequence[Factors],
    matrices: Sequence[tuple[int, Matrix]],
) -> float:
    """Return the bytes of a stream at one step, by the model.

    Parameters
    ----------
    step : float
        > 0.
    energies, sizes : NDArray, float64, shape (pieces,)
        Sum of squares and number of elements of each piece of the stream.
    factors : sequence of Factors
        Of the matrices.
    matrices : sequence of (int, Matrix)
        The piece that each matrix is, and the matrix.
    """
    left, bits = energies.copy(), 0.0
    for each, (piece, matrix) in zip(factors, matrices, strict=True):
        rank = useful_rank(each, matrix, step)
        kept = each.strengths[:rank] ** 2
        left[piece] = max(0.0, left[piece] - float(kept.sum()))
        for n in (matrix.rows, matrix.columns):
            bits += n * float(bits_per_value(np.sqrt(kept / n) / step).sum())
    rms = np.sqrt(left / np.maximum(sizes, 1))
    bits += float((sizes * bits_per_value(rms / step)).sum())
    return bits / 8


def first_step(
    budget: float,
    energies: NDArray[np.float64],
    sizes: NDArray[np.float64],
    factors: Sequence[Factors],
    matrices: Sequence[tuple[int, Matrix]],
) -> float:
    """Return the step at which the model takes `budget` bytes."""
    scale = math.sqrt(float(energies.sum()) / max(1.0, float(sizes.sum())))
    low, high = math.log(scale) - 14, math.log(scale) + 8
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        nbytes = predicted_nbytes(math.exp(middle), energies, sizes, factors, matrices)
        low, high = (middle, high) if nbytes > budget else (low, middle)
    return math.exp(high)
