r"""The low-rank part of an update, one matrix at a time.

Local training moves each layer within few directions. With
:math:`M \approx U\Sigma V^T` the scaled factors :math:`U\Sigma` and :math:`V\Sigma` are
quantized by the same step as everything else, and :math:`M` is rebuilt as
:math:`\hat A\,\Sigma^{-1}\hat B^T`. What the quantized factors do not say stays in the
vector, and is coded with it.

Sources: Halko, Martinsson, Tropp 2011 (randomized subspace iteration); Gavish and
Donoho 2014 and Marchenko-Pastur for the noise edge. Coding factors and residual with
one step, and the rule that keeps a rank, are ours.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from flower_sap.payload.deadzone import LARGEST_LEVEL, Floats, Levels, quantize
from flower_sap.payload.layout import Matrix

MOST_RANKS = 64  # that a payload may have
# What an encoder looks for. 32 instead of 16 take a quarter off the error of a warm
# update in 1/16 or 1/32 of its bytes, for a tenth more time.
RANKS = 32
_MORE = 4  # columns beyond the ranks, for accuracy
_NOISE = 1.5  # how far above the edge of pure noise a direction must stand
_WORTH = 0.3  # energy a rank must bring, in squared steps per bit of its factors


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    r"""Scaled singular vectors of one matrix, strongest first.

    Attributes
    ----------
    left, right : Tensor, float32
        :math:`U\Sigma` of shape (rows, r) and :math:`V\Sigma` of shape (columns, r).
    strengths : NDArray, float64, shape (r,)
        :math:`\sigma_i`, falling; only those that stand out of noise.
    energy : float
        Sum of squares of the whole matrix.
    """

    left: torch.Tensor
    right: torch.Tensor
    strengths: NDArray[np.float64]
    energy: float


def factorize(
    x: Floats,
    matrices: Sequence[Matrix],
    generator: torch.Generator,
    *,
    ranks: int = RANKS,
) -> list[Factors]:
    """Return the strongest directions of each matrix in the stream `x`.

    Parameters
    ----------
    x : NDArray, float32, shape (n,)
        The stream.
    matrices : sequence of Matrix
        Its matrices.
    generator : torch.Generator
        Of the random directions that the iteration begins with.
    ranks : int
        Most directions of a matrix, up to `MOST_RANKS`.
    """
    flat = torch.from_numpy(x)
    return [_factorize(flat, matrix, generator, ranks) for matrix in matrices]


def _factorize(
    flat: torch.Tensor, matrix: Matrix, generator: torch.Generator, ranks: int
) -> Factors:
    m = flat[matrix.start : matrix.stop].view(matrix.rows, matrix.columns)
    num_columns = min(ranks + _MORE, matrix.rows, matrix.columns)
    total = float(torch.dot(m.reshape(-1), m.reshape(-1)))
    if not total > 0:
        return Factors(m[:, :0], m.t()[:, :0], np.empty(0), 0.0)
    q = torch.randn(matrix.columns, num_columns, generator=generator)
    # Twice: after one iteration the error of the whole codec is 40 % larger.
    for _ in range(2):
        p = torch.linalg.qr(m @ q).Q
        q = m.t() @ p
    squares, w = torch.linalg.eigh((q.t() @ q).double())
    strengths = squares.flip(0).clamp_min(0).sqrt().numpy()
    w = w.flip(1).float()
    rank = _above_noise(strengths[:ranks], total, matrix)
    strengths = strengths[:rank]
    scale = torch.from_numpy(strengths).float()
    return Factors((p @ w[:, :rank]) * scale, q @ w[:, :rank], strengths, total)


def _above_noise(strengths: NDArray[np.float64], total: float, matrix: Matrix) -> int:
    """Return how many directions noise of the same energy would not have."""
    edge = (math.sqrt(matrix.rows) + math.sqrt(matrix.columns)) ** 2
    rest = total
    for rank, strength in enumerate(strengths.tolist()):
        rest = max(0.0, rest - strength**2)
        noise = rest / (matrix.rows * matrix.columns)
        if not strength**2 > _NOISE * noise * edge:
            return rank
    return len(strengths)


def useful_rank(factors: Factors, matrix: Matrix, step: float) -> int:
    """Return how many ranks bring more than the bits of their factors cost."""
    ratio = (factors.strengths / step) ** 2
    sides = (matrix.rows, matrix.columns)
    bits = sum(n / 2 * np.log2(1 + 6 * ratio / n) for n in sides)
    # Where the rest is coded finely, taking a direction out of it saves bits in
    # proportion to the direction's share of the rest; where it is hardly coded at all,
    # what counts is the error, at the price that the step puts on it.
    rest = factors.energy - np.cumsum(factors.strengths**2)
    rest = np.maximum(rest, 0) / (matrix.rows * matrix.columns * step**2)
    price = np.maximum(_WORTH, 2 * math.log(2) * rest)
    # Those before the first that is not worth it.
    return int(np.logical_and.accumulate(ratio > price * bits).sum())


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedFactors:
    """The factors of all matrices as they travel.

    Attributes
    ----------
    ranks : list of int
        One a matrix.
    strengths : NDArray, float32, shape (sum of ranks,)
        As bfloat16 holds them, matrix after matrix.
    levels : NDArray, int16
        Of the left and right factor of each matrix in turn, row-major.
    coarser : int
        Their step is that of the stream times 2 to this power: strong directions have
        larger values than levels can count. What a coarse factor does not say stays in
        the stream.
    """

    ranks: list[int]
    strengths: Floats
    levels: Levels
    coarser: int


def quantize_factors(
    factors: Sequence[Factors],
    matrices: Sequence[Matrix],
    step: float,
    theta: float,
) -> tuple[QuantizedFactors, Floats]:
    """Return the useful factors as levels, and the values behind the levels."""
    ranks = [
        useful_rank(each, matrix, step)
        for each, matrix in zip(factors, matrices, strict=True)
    ]
    parts = [
        side[:, :rank].reshape(-1)
        for each, rank in zip(factors, ranks, strict=True)
        for side in (each.left, each.right)
        if rank
    ]
    strengths = [
        each.strengths[:rank] for each, rank in zip(factors, ranks, strict=True)
    ]
    values = torch.cat(parts).numpy() if parts else np.empty(0, np.float32)
    rounded = np.concatenate([*strengths, np.empty(0)]).astype(np.float32)
    held = torch.from_numpy(rounded).to(torch.bfloat16).float().numpy()
    largest = float(np.abs(values).max(initial=0.0)) / step
    coarser = max(0, math.ceil(math.log2(max(largest / LARGEST_LEVEL, 1e-9))))
    levels = quantize(values, step * 2**coarser, theta)
    return QuantizedFactors(ranks, held, levels, coarser), values


def num_factor_values(ranks: Sequence[int], matrices: Sequence[Matrix]) -> int:
    """Return the elements of all factors."""
    return sum(
        rank * (matrix.rows + matrix.columns)
        for rank, matrix in zip(ranks, matrices, strict=True)
    )


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """The low-rank part of one matrix: ``left @ right.T``."""

    matrix: int
    left: torch.Tensor
    right: torch.Tensor


def products(
    ranks: Sequence[int], strengths: Floats, values: Floats, matrices: Sequence[Matrix]
) -> list[Product]:
    """Return the factors of each matrix from decoded values, strengths divided out."""
    flat, found = torch.from_numpy(values), []
    start = first = 0
    for index, (rank, matrix) in enumerate(zip(ranks, matrices, strict=True)):
        if not rank:
            continue
        middle = start + rank * matrix.rows
        end = middle + rank * matrix.columns
        inverse = 1 / torch.from_numpy(strengths[first : first + rank])
        left = flat[start:middle].view(matrix.rows, rank) * inverse
        right = flat[middle:end].view(matrix.columns, rank)
        found.append(Product(index, left, right))
        start, first = end, first + rank
    return found


def add_products(
    x: Floats, parts: Sequence[Product], matrices: Sequence[Matrix], scale: float
) -> None:
    """Add ``scale * left @ right.T`` of each part to the stream `x`, in place."""
    flat = torch.from_numpy(x)
    for part in parts:
        matrix = matrices[part.matrix]
        target = flat[matrix.start : matrix.stop].view(matrix.rows, matrix.columns)
        target.addmm_(part.left, part.right.t(), alpha=scale)


def energy(parts: Sequence[Product]) -> float:
    """Return the sum of squares of all products, without forming them."""
    return sum(
        float(((p.left.t() @ p.left) * (p.right.t() @ p.right)).sum()) for p in parts
    )
