"""LRDZQ: low-rank factors and what they leave, quantized with one step.

Body of the section (little-endian)::

    step        float32   distance of levels
    c           int8 x 2  offsets of the factors' and of the other levels, in 256ths
    mode        uint8     of the levels: 0 none, 1 all, 2 gaps and values
    coarser     uint8     the factors' step is 2 to this power times step
    num_factors uint32    bytes of the factors' levels
    ranks       uint8     x matrices of the layout
    strengths   bfloat16  x sum of ranks
    factors     pcodec(int16)
    levels      by mode, see `entropy`

Ours; rank 0 everywhere is the plain dead-zone quantizer.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from flower_sap.errors import PayloadError
from flower_sap.payload import deadzone, entropy, fixed_rate, low_rank
from flower_sap.payload.deadzone import Floats, Levels
from flower_sap.payload.dense import LARGEST_VALUE
from flower_sap.payload.entropy import SparseLevels
from flower_sap.payload.layout import Matrix
from flower_sap.payload.low_rank import Factors, Product

_MOST_COARSER = 40
_PARAMETERS = struct.Struct("<fbbBBI")


def parameters_nbytes(matrices: Sequence[Matrix]) -> int:
    """Return the bytes of a body that says nothing."""
    return _PARAMETERS.size + len(matrices)


@dataclass(frozen=True, slots=True, eq=False)
class FactorCode:
    """The factors of a stream at one step.

    Attributes
    ----------
    step, theta : float
        Of the quantizer.
    c : float
        Offset of the factors' levels.
    coarser : int
        Their step is 2 to this power times `step`.
    shape : bytes
        Ranks and strengths.
    coded : bytes
        The factors' levels.
    parts : list of Product
        What is decoded from them.
    """

    step: float
    theta: float
    c: float
    coarser: int
    shape: bytes
    coded: bytes
    parts: list[Product]

    @property
    def nbytes(self) -> int:
        """Return their bytes in a body."""
        return len(self.shape) + len(self.coded)


def encode_factors(
    factors: Sequence[Factors], matrices: Sequence[Matrix], step: float, theta: float
) -> FactorCode:
    """Return the factors that are worth their bytes at this step."""
    quantized, values = low_rank.quantize_factors(factors, matrices, step, theta)
    coarse = step * 2**quantized.coarser
    c = deadzone.offset(values, quantized.levels, coarse)
    coded, parts = b"", []
    if quantized.levels.size:
        decoded = deadzone.dequantize(quantized.levels, coarse, c)
        parts = low_rank.products(
            quantized.ranks, quantized.strengths, decoded, matrices
        )
        coded = entropy.pack(quantized.levels)
    strengths = fixed_rate.encode_half(quantized.strengths)
    shape = bytes(quantized.ranks) + strengths
    return FactorCode(step, theta, c, quantized.coarser, shape, coded, parts)


def rest_of(
    x: Floats, parts: Sequence[Product], matrices: Sequence[Matrix]
) -> Iterator[tuple[int, Floats]]:
    """Yield (start, values) of what the parts leave of `x`, piece by piece.

    A piece is a view of `x`, or of memory that the next piece may use again: the rest
    is never formed as a whole.
    """
    largest = max((m.rows * m.columns for m in matrices), default=0)
    memory = torch.empty(largest)
    flat, start = torch.from_numpy(x), 0
    for part in parts:
        matrix = matrices[part.matrix]
        if matrix.start > start:
            yield start, x[start : matrix.start]
        values = memory[: matrix.rows * matrix.columns]
        torch.addmm(
            flat[matrix.start : matrix.stop].view(matrix.rows, matrix.columns),
            part.left,
            part.right.t(),
            alpha=-1,
            out=values.view(matrix.rows, matrix.columns),
        )
        yield matrix.start, values.numpy()
        start = matrix.stop
    if start < x.size:
        yield start, x[start:]


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """A stream at one step: its bytes, and what they decode to.

    Attributes
    ----------
    body : bytes
        Of the section.
    parts : list of Product
        The low-rank parts.
    levels : NDArray, int16, shape (n,)
        Of what they leave.
    step, c : float
        That decode the levels.
    """

    body: bytes
    parts: list[Product]
    levels: Levels
    step: float
    c: float

    def subtract_from(self, x: Floats, matrices: Sequence[Matrix]) -> None:
        """Take the decoded stream away from `x`, in place."""
        low_rank.add_products(x, self.parts, matrices, -1.0)
        deadzone.accumulate(x, self.levels, -self.step, self.c)


def assemble(
    x: Floats, factors: FactorCode, matrices: Sequence[Matrix], *, largest: float
) -> Coded:
    """Return the stream `x`, of values up to `largest`, coded with these factors."""
    step = factors.step
    levels = np.empty(x.size, np.int16)
    found = deadzone.Offset(x.size)
    # What factors leave may be larger than what they were taken from.
    largest = 4 * largest if factors.parts else largest
    for start, values in rest_of(x, factors.parts, matrices):
        into = levels[start : start + values.size]
        deadzone.quantize(values, step, factors.theta, out=into, largest=largest)
        found.observe(values, into, step)
    mode, coded = entropy.encode(levels)
    head = _PARAMETERS.pack(
        step,
        deadzone.offset_to_byte(factors.c),
        deadzone.offset_to_byte(found.value),
        mode,
        factors.coarser,
        len(factors.coded),
    )
    body = b"".join((head, factors.shape, factors.coded, coded))
    return Coded(body, factors.parts, levels, step, found.value)


@dataclass(frozen=True, slots=True, eq=False)
class StreamUpdate:
    """A decoded stream, still as levels and factors.

    Attributes
    ----------
    step, c : float
        Of its levels.
    levels : NDArray int16 of shape (n,), or SparseLevels
        Of what the factors leave.
    parts : list of Product
        The low-rank parts.
    """

    step: float
    c: float
    levels: Levels | SparseLevels
    parts: list[Product] = field(default_factory=list)

    def accumulate(self, x: Floats, weight: float) -> None:
        """Add the levels' values times `weight` to `x`; the parts are left out."""
        if isinstance(self.levels, SparseLevels):
            kept = self.levels.levels.astype(np.float32)
            values = kept * np.float32(self.step)
            values += np.sign(kept) * np.float32(self.c * self.step)
            values *= np.float32(weight)
            x[self.levels.positions] += values
        else:
            deadzone.accumulate(x, self.levels, self.step * weight, self.c)

    def energy(self) -> float:
        """Return an upper bound of the sum of squares."""
        levels = self.levels
        kept = levels.levels if isinstance(levels, SparseLevels) else levels
        bound = deadzone.largest_energy(kept, self.step)
        return 2 * (bound + low_rank.energy(self.parts))


def decode(body: bytes, matrices: Sequence[Matrix], count: int) -> StreamUpdate:
    """Return the stream of `count` elements in a section's body.

    Raises
    ------
    PayloadError
        If the body is anything else.
    """
    shape_end = parameters_nbytes(matrices)
    if len(body) < shape_end:
        raise PayloadError(
            f"a stream of {len(matrices)} matrices begins with {shape_end} bytes, "
            f"found {len(body)}"
        )
    step, factor_c, c, mode, coarser, num_factors = _PARAMETERS.unpack_from(body)
    if coarser > _MOST_COARSER:
        raise PayloadError(
            f"factors coarser by 2^{coarser}, expected at most 2^{_MOST_COARSER}"
        )
    if not 0 < step < math.inf or step * 2**15 > LARGEST_VALUE:
        raise PayloadError(f"step must be > 0 and small enough, found {step}")
    ranks = list(body[_PARAMETERS.size : shape_end])
    _check_ranks(ranks, matrices)
    strengths_end = shape_end + 2 * sum(ranks)
    factors_end = strengths_end + num_factors
    if factors_end > len(body):
        raise PayloadError(
            f"factors claim {factors_end} bytes of a stream of {len(body)}"
        )
    strengths = fixed_rate.decode_half(
        body[shape_end:strengths_end], sum(ranks), fixed_rate.BFLOAT16
    )
    # A strength divides: near 0 it would blow its direction up.
    if not (np.isfinite(strengths).all() and (strengths >= step / 64).all()):
        raise PayloadError("a strength is not finite, or far below the step")
    num_values = low_rank.num_factor_values(ranks, matrices)
    factor_levels = _factor_levels(body[strengths_end:factors_end], num_values)
    values = deadzone.dequantize(
        factor_levels, step * 2**coarser, deadzone.offset_from_byte(factor_c)
    )
    return StreamUpdate(
        step,
        deadzone.offset_from_byte(c),
        entropy.decode(mode, body[factors_end:], count),
        low_rank.products(ranks, strengths, values, matrices),
    )


def _check_ranks(ranks: Sequence[int], matrices: Sequence[Matrix]) -> None:
    for rank, matrix in zip(ranks, matrices, strict=True):
        most = min(low_rank.MOST_RANKS, matrix.rows, matrix.columns)
        if rank > most:
            raise PayloadError(f"rank {rank} of a matrix, expected at most {most}")


def _factor_levels(data: bytes, count: int) -> Levels:
    if count:
        return entropy.unpack(data, count, np.int16)
    if data:
        raise PayloadError(f"no factors claimed, found {len(data)} bytes of them")
    return np.empty(0, np.int16)
