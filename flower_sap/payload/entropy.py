"""Levels as bytes: pcodec over all, or over gaps and values of the non-zero ones.

pcodec (Apache-2.0, https://github.com/pcodec/pcodec) fits its tables to each chunk, and
so follows the density from layer to layer. Where few levels are not zero, two streams
are smaller and decode faster: the gaps between non-zero levels, and their values.

Decoding never makes an array that is larger than the caller's own count, and every
defect of the bytes is a `PayloadError`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_sap.errors import PayloadError
from flower_sap.payload.deadzone import Levels

try:
    import pcodec
    from pcodec import standalone
except ImportError:  # a platform without its wheel: fixed-rate codecs are left
    pcodec = None

NONE, DENSE, SPARSE = 0, 1, 2
SPARSE_BELOW = 0.12  # share of non-zero levels from which two streams can be smaller
_SURELY_SPARSE = 0.02  # below, two streams were never larger
_LOOKED_AT = 1 << 20  # levels that are coded both ways to choose
_COUNTS = struct.Struct("<II")
_CHUNK = 1 << 16  # values that share one table
_FLAGS = 1 << 20
_EFFORT = 10  # of pcodec; at its level 4 sizes grow by up to 40 %


def is_available() -> bool:
    """Return whether levels can be coded here."""
    return pcodec is not None


@dataclass(frozen=True, slots=True)
class SparseLevels:
    """The non-zero levels of a vector: rising positions, and the level at each."""

    positions: NDArray[np.int64]
    levels: Levels


def encode(levels: Levels) -> tuple[int, bytes]:
    """Return mode and bytes of some levels, in the smaller of the two forms."""
    num_nonzero = int(np.count_nonzero(levels))
    if num_nonzero == 0:
        return NONE, b""
    if num_nonzero > SPARSE_BELOW * levels.size:
        return DENSE, pack(levels)
    if num_nonzero > _SURELY_SPARSE * levels.size and _is_denser(levels):
        return DENSE, pack(levels)
    return SPARSE, _encode_sparse(levels)


def _is_denser(levels: Levels) -> bool:
    """Return whether the dense form is smaller, by a sample of the levels."""
    apart = max(1, levels.size // _LOOKED_AT)
    block = _CHUNK // 4
    sample = np.concatenate(
        [
            levels[start : start + block]
            for start in range(0, levels.size, apart * block)
        ]
    )
    return len(pack(sample)) < len(_encode_sparse(sample))


def _encode_sparse(levels: Levels) -> bytes:
    positions = _positions(levels)
    gaps = np.empty(positions.size, np.uint32)
    gaps[0] = positions[0]
    np.subtract(positions[1:], positions[:-1], out=gaps[1:], casting="unsafe")
    gaps[1:] -= 1
    kept = levels[positions]
    coded = pack(gaps)
    return _COUNTS.pack(kept.size, len(coded)) + coded + pack(kept)


def _positions(levels: Levels) -> NDArray[np.int64]:
    """Return where levels are not 0."""
    # numpy looks for true among flags several times faster than for non-zero integers.
    found = [
        np.flatnonzero(levels[start : start + _FLAGS] != 0) + start
        for start in range(0, levels.size, _FLAGS)
    ]
    return np.concatenate(found)


def decode(mode: int, data: bytes, count: int) -> Levels | SparseLevels:
    """Return `count` levels, or the non-zero ones of them.

    Raises
    ------
    PayloadError
        If the bytes are not levels of that many values.
    """
    if mode == NONE:
        if data:
            raise PayloadError(f"no levels claimed, found {len(data)} bytes of them")
        return SparseLevels(np.empty(0, np.int64), np.empty(0, np.int16))
    if mode == DENSE:
        return unpack(data, count, np.int16)
    if mode != SPARSE:
        raise PayloadError(f"levels in mode {mode}, expected {NONE}, {DENSE}, {SPARSE}")
    return _decode_sparse(data, count)


def _decode_sparse(data: bytes, count: int) -> SparseLevels:
    if len(data) < _COUNTS.size:
        raise PayloadError(f"sparse levels of {len(data)} bytes have no counts")
    num_nonzero, num_gap_bytes = _COUNTS.unpack_from(data)
    if not 0 < num_nonzero <= count or num_gap_bytes > len(data) - _COUNTS.size:
        raise PayloadError(
            f"sparse levels claim {num_nonzero} of {count} values and {num_gap_bytes} "
            f"bytes of gaps in {len(data)} bytes"
        )
    middle = _COUNTS.size + num_gap_bytes
    gaps = unpack(data[_COUNTS.size : middle], num_nonzero, np.uint32)
    # Gaps are >= 0, so positions rise, and the last one bounds them all. The sum of
    # 2^32 gaps of 2^32 still fits.
    positions = np.cumsum(gaps, dtype=np.int64)
    positions += np.arange(num_nonzero)
    if positions[-1] >= count:
        raise PayloadError(f"a level stands at {positions[-1]} of {count} values")
    return SparseLevels(positions, unpack(data[middle:], num_nonzero, np.int16))


def pack(values: NDArray[Any]) -> bytes:
    """Return pcodec's bytes of some integers."""
    config = pcodec.ChunkConfig(
        compression_level=_EFFORT,
        mode_spec=pcodec.ModeSpec.classic(),
        delta_spec=pcodec.DeltaSpec.no_op(),
        paging_spec=pcodec.PagingSpec.equal_pages_up_to(_CHUNK),
    )
    data: bytes = standalone.simple_compress(values, config)
    return data


def unpack(data: bytes, count: int, dtype: type[Any]) -> NDArray[Any]:
    """Return exactly `count` integers from pcodec's bytes.

    Raises
    ------
    PayloadError
        If there are more or fewer, of another dtype, or the bytes are damaged.
    """
    if pcodec is None:
        raise PayloadError("levels need pcodec, which is not installed here")
    values = np.empty(count, dtype)
    try:
        progress = standalone.simple_decompress_into(data, values)
    # What a damaged stream raises is pcodec's choice, and a panic of its Rust side is
    # no `Exception`; the process itself must not be asked to stop here.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise PayloadError(f"levels cannot be read: {error}") from error
    if progress.n_processed != count or not progress.finished:
        raise PayloadError(
            f"levels end after {progress.n_processed} of {count} values"
            if progress.n_processed < count
            else f"levels go on after {count} values"
        )
    return values
