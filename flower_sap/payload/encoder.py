"""From a trained model to a payload of at most so many bytes.

What is sent, in the order in which it is given up when bytes are short:

1. the header, always;
2. counters that changed, lossless;
3. protected parameters in 16 bits;
4. statistics, in 16 bits where that is at most a tenth of the budget, else in 8;
5. the stream of all other parameters, in what is left.

The side sections together get at most half of the budget: first the statistics are left
out, then the protected parameters, then the counters. A stream that fits in no step is
left out. Parameters that were not sent, or not exactly, are in `Encoded.error`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from flower_sap.errors import PayloadError
from flower_sap.payload import entropy, fixed_rate, wire_format
from flower_sap.payload.beside import difference, half_mode, sections_beside
from flower_sap.payload.deadzone import Floats
from flower_sap.payload.dense import Arrays
from flower_sap.payload.feedback import largest_scale
from flower_sap.payload.layout import Layout, length
from flower_sap.payload.solver import StreamEncoder
from flower_sap.payload.wire_format import (
    BLOCK8,
    HALF,
    LRDZQ,
    PROTECTED,
    SECTION_NBYTES,
    STREAM,
    Header,
    Section,
)

PCODEC_FORMAT = 4  # major version of pcodec's bytes


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A payload, and what it does not say.

    Attributes
    ----------
    data : bytes
        Of the payload.
    relative_error : float
        ``|error| / |parameters|``; 0 where nothing changed.
    error : NDArray, float32, shape (parameters,)
        Update minus decoded update, over stream and protected parameters.
    """

    data: bytes
    relative_error: float
    error: Floats


def encode(
    trained: Arrays,
    base: Arrays,
    layout: Layout,
    *,
    budget: int,
    header: Header,
    seed: Sequence[int],
    residual: Floats | None = None,
    has_entropy_coder: bool | None = None,
) -> Encoded:
    """Return a payload of at most `budget` bytes; the inputs are left as they are.

    Parameters
    ----------
    trained, base : Arrays
        The model after and before training, in the manifest's order.
    layout : Layout
        Of the model.
    budget : int
        Bytes of the payload, >= `wire_format.HEADER_NBYTES`.
    header : Header
        Base version, number and flags; the rest is filled in.
    seed : sequence of int
        Keys the random matrices: (seed, node, version).
    residual : NDArray, float32, optional
        What earlier payloads did not say, added before encoding; shortened where it
        would drown the update.
    has_entropy_coder : bool, optional
        Whether levels may be entropy-coded. Default: if pcodec is there.

    Raises
    ------
    PayloadError
        If the budget does not hold a header, or the update is not finite.
    """
    if budget < wire_format.HEADER_NBYTES:
        raise PayloadError(
            f"a budget of {budget} bytes is below the {wire_format.HEADER_NBYTES} of a "
            "payload that says nothing; raise the smallest budget"
        )
    if has_entropy_coder is None:
        has_entropy_coder = entropy.is_available()
    stream = difference(trained, base, layout, layout.stream)
    protected = difference(trained, base, layout, layout.protected)
    if residual is not None:
        update_energy = float(np.dot(stream, stream) + np.dot(protected, protected))
        factor = largest_scale(float(np.dot(residual, residual)), update_energy)
        if factor < 1:
            residual = residual * np.float32(factor)
        stream += residual[: stream.size]
        protected += residual[stream.size :]
    energy = float(np.dot(stream, stream)) + float(np.dot(protected, protected))
    room = budget - wire_format.HEADER_NBYTES
    sections = sections_beside(trained, base, layout, room, protected)
    if any(section.section == PROTECTED for section in sections):
        sent = next(s for s in sections if s.section == PROTECTED)
        protected -= fixed_rate.decode_half(sent.body, protected.size, sent.mode)
    room -= sum(section.nbytes for section in sections) + SECTION_NBYTES
    generator = torch.Generator().manual_seed(_mixed(seed))
    found = _encode_stream(stream, layout, room, generator, has_entropy_coder)
    if found is not None:
        sections, stream = [found[0], *sections], found[1]
    error = np.concatenate([stream, protected]) if protected.size else stream
    lost = float(np.dot(error, error))
    relative = math.sqrt(lost / energy) if energy > 0 else 0.0
    uses_entropy = any(section.codec == LRDZQ for section in sections)
    header = replace(
        header,
        digest=layout.digest,
        relative_error=relative,
        entropy=PCODEC_FORMAT if uses_entropy else 0,
        num_elements=length(layout.stream),
    )
    data = wire_format.pack(header, sections)
    assert len(data) <= budget, (len(data), budget)
    return Encoded(data, relative, error)


def _mixed(seed: Sequence[int]) -> int:
    return int(np.random.SeedSequence(list(seed)).generate_state(1, np.uint64)[0] >> 1)


def _encode_stream(
    x: Floats,
    layout: Layout,
    room: int,
    generator: torch.Generator,
    has_entropy_coder: bool,
) -> tuple[Section, Floats] | None:
    """Return the stream's section and its error, or None where it is not sent.

    Uses up `x`: the error may be in its memory.
    """
    if not x.size or not x.any():
        return None
    if fixed_rate.half_nbytes(x.size) <= room:
        is_exact = fixed_rate.half_nbytes(x.size, fixed_rate.FLOAT32) <= room
        mode = fixed_rate.FLOAT32 if is_exact else half_mode(x)
        body = fixed_rate.encode_half(x, mode)
        error = x - fixed_rate.decode_half(body, x.size, mode)
        return Section(STREAM, HALF, mode, body), error
    if has_entropy_coder:
        coded = StreamEncoder(x, layout, generator).encode(room)
        if coded is not None:
            coded.subtract_from(x, layout.matrices)
            return Section(STREAM, LRDZQ, 0, coded.body), x
    if fixed_rate.block8_nbytes(x.size) <= room:
        body = fixed_rate.encode_block8(x)
        return (
            Section(STREAM, BLOCK8, 0, body),
            x - fixed_rate.decode_block8(body, x.size),
        )
    return None
