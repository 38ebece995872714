"""Codecs whose size is known beforehand: HALF, 16 or 32 bits a value, and BLOCK8, 8.06.

BLOCK8 gives each block of 256 values a scale of its own (bfloat16) and a signed byte a
value. Source of the block scales: Dettmers et al. 2022, arXiv:2110.02861, section 2.1.
"""

import numpy as np
import torch

from flower_sap.errors import PayloadError
from flower_sap.payload.deadzone import Floats

BFLOAT16, FLOAT16, FLOAT32 = 0, 1, 2
_WIDTHS = {BFLOAT16: 2, FLOAT16: 2, FLOAT32: 4}
_TORCH = {BFLOAT16: torch.bfloat16, FLOAT16: torch.float16}
BLOCK = 256


def half_nbytes(count: int, mode: int = BFLOAT16) -> int:
    """Return the bytes of `count` values."""
    return count * _WIDTHS[mode]


def encode_half(x: Floats, mode: int = BFLOAT16) -> bytes:
    """Return the values of `x`, shape (n,), in 16 or 32 bits each."""
    if mode == FLOAT32:
        return x.tobytes()
    # torch's casts are eight times faster than numpy's, which knows no bfloat16.
    narrow = torch.from_numpy(np.ascontiguousarray(x)).to(_TORCH[mode])
    return narrow.view(torch.int16).numpy().tobytes()


def decode_half(data: bytes, count: int, mode: int) -> Floats:
    """Return `count` values.

    Raises
    ------
    PayloadError
        If the mode is unknown or the bytes are more or fewer.
    """
    if mode not in _WIDTHS:
        raise PayloadError(f"values in mode {mode}, expected 0, 1 or 2")
    if len(data) != half_nbytes(count, mode):
        raise PayloadError(
            f"{count} values need {half_nbytes(count, mode)} bytes, found {len(data)}"
        )
    if mode == FLOAT32:
        return np.frombuffer(data, np.float32)
    if not count:
        return np.empty(0, np.float32)
    bits = torch.from_numpy(np.frombuffer(data, np.int16).copy())
    return bits.view(_TORCH[mode]).float().numpy()


def block8_nbytes(count: int) -> int:
    """Return the bytes of `count` values: one each, and two a block."""
    return count + 2 * _num_blocks(count)


def encode_block8(x: Floats) -> bytes:
    """Return a signed byte for each value of `x`, behind the scales of the blocks."""
    blocks = np.zeros((_num_blocks(x.size), BLOCK), np.float32)
    blocks.reshape(-1)[: x.size] = x
    largest = torch.from_numpy(np.abs(blocks).max(axis=1, initial=0.0) / 127)
    # Rounded up, so that no value needs a larger byte than 127.
    raised = (largest * (1 + 2.0**-7)).to(torch.bfloat16)
    scale = raised.float().numpy()[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        levels = np.rint(np.where(scale > 0, blocks / scale, 0)).astype(np.int8)
    return raised.view(torch.int16).numpy().tobytes() + (
        levels.reshape(-1)[: x.size].tobytes()
    )


def decode_block8(data: bytes, count: int) -> Floats:
    """Return `count` values.

    Raises
    ------
    PayloadError
        If the bytes are more or fewer, or a scale is not finite.
    """
    if len(data) != block8_nbytes(count):
        raise PayloadError(
            f"{count} values in blocks need {block8_nbytes(count)} bytes, found "
            f"{len(data)}"
        )
    num_blocks = _num_blocks(count)
    scales = decode_half(data[: 2 * num_blocks], num_blocks, BFLOAT16)
    if not np.isfinite(scales).all():
        raise PayloadError("the scale of a block is not finite")
    levels = np.frombuffer(data, np.int8, offset=2 * num_blocks)
    x = levels.astype(np.float32)
    whole = count // BLOCK * BLOCK
    x[:whole].reshape(-1, BLOCK)[...] *= scales[: whole // BLOCK, None]
    if whole < count:
        x[whole:] *= scales[-1]
    return x


def _num_blocks(count: int) -> int:
    return -(-count // BLOCK)
