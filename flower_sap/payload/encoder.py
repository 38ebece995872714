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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flower_sap.errors import PayloadError
from flower_sap.payload import entropy, fixed_rate, wire_format
from flower_sap.payload.deadzone import Floats
from flower_sap.payload.dense import LARGEST_VALUE, Arrays
from flower_sap.payload.feedback import largest_scale
from flower_sap.payload.layout import Layout, Place, length
from flower_sap.payload.solver import StreamEncoder
from flower_sap.payload.wire_format import (
    BLOCK8,
    COUNTERS,
    HALF,
    LOSSLESS,
    LRDZQ,
    PROTECTED,
    SECTION_NBYTES,
    STATISTICS,
    STREAM,
    Header,
    Section,
)

PCODEC_FORMAT = 4  # major version of pcodec's bytes
_FINE_STATISTICS = 0.1  # of the budget
_MOST_BESIDE = 0.5
# Where 16-bit floats resolve an update better than bfloat16 and hold its largest value.
_SMALLEST_FLOAT16_RMS = 2e-5
_LARGEST_FLOAT16 = 6e4


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


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a budget is good for.

    Attributes
    ----------
    codec : int or None
        Of the stream, as in `wire_format`; None: it is not sent.
    bits_per_value : float
        Of the stream.
    relative_error : float
        Of noise, the worst there is to code; real updates have less.
    """

    codec: int | None
    bits_per_value: float
    relative_error: float


def estimate(
    layout: Layout, budget: int, *, has_entropy_coder: bool | None = None
) -> Estimate:
    r"""Return what `encode` would do with a budget, without an update.

    The error of noise is that of its rate-distortion function, :math:`2^{-R}` at
    :math:`R` bits a value, and no less than what the codec resolves.

    Parameters
    ----------
    layout : Layout
        Of the model.
    budget : int
        Bytes of the payload.
    has_entropy_coder : bool, optional
        Default: if pcodec is there.

    Examples
    --------
    >>> from flower_sap.payload import ArraySpec, Layout, Manifest
    >>> model = Manifest((ArraySpec("w", (1000, 1000), np.dtype("float32")),))
    >>> estimate(Layout(model), 125_000).bits_per_value
    0.999552
    """
    if has_entropy_coder is None:
        has_entropy_coder = entropy.is_available()
    size = length(layout.stream)
    beside = sum(
        SECTION_NBYTES + fixed_rate.half_nbytes(length(places))
        for places in (layout.protected, layout.statistics)
        if places
    )
    room = budget - wire_format.HEADER_NBYTES - SECTION_NBYTES
    room -= min(beside, int(_MOST_BESIDE * room))
    bits = 8 * room / size if size else 0.0
    if room <= 0 or not size:
        return Estimate(None, 0.0, 1.0)
    if bits >= 32:
        return Estimate(HALF, 32.0, 0.0)
    if bits >= 16:
        return Estimate(HALF, 16.0, 2.0**-12)
    if has_entropy_coder:
        return Estimate(LRDZQ, bits, 2.0**-bits)
    if fixed_rate.block8_nbytes(size) <= room:
        return Estimate(BLOCK8, 8 * fixed_rate.block8_nbytes(size) / size, 0.01)
    return Estimate(None, 0.0, 1.0)


def difference(
    trained: Arrays, base: Arrays, layout: Layout, places: Sequence[Place]
) -> Floats:
    """Return trained minus base over a section, float32, end to end.

    Raises
    ------
    PayloadError
        If a value is not finite, or too large to be squared.
    """
    vector = np.empty(length(places), np.float32)
    for place in places:
        new, old = trained[place.index], base[place.index]
        part = vector[place.start : place.stop].reshape(place.shape)
        if new.dtype == np.float32:
            np.subtract(new, old, out=part)
        else:
            wide = np.result_type(new.dtype, np.float32)
            # A difference beyond float32 becomes infinite, and is refused below.
            with np.errstate(over="ignore", invalid="ignore"):
                part[...] = new.astype(wide) - old.astype(wide)
    with np.errstate(over="ignore", invalid="ignore"):
        energy = float(np.dot(vector, vector))
    if not energy < LARGEST_VALUE:
        names = layout.manifest.names
        bad = next(
            (
                names[p.index]
                for p in places
                if not np.isfinite(vector[p.start : p.stop]).all()
            ),
            "all arrays together",
        )
        raise PayloadError(
            f"the update is not finite, or of energy above {LARGEST_VALUE:g} "
            f"({bad}); lower the learning rate of the client"
        )
    return vector


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
    sections = _beside(trained, base, layout, room, protected)
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
    for mode in (fixed_rate.FLOAT32, _half_mode(x)):
        if fixed_rate.half_nbytes(x.size, mode) <= room:
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


def _half_mode(x: Floats) -> int:
    rms = math.sqrt(float(np.dot(x, x)) / x.size)
    fits = float(np.abs(x).max()) < _LARGEST_FLOAT16
    return (
        fixed_rate.FLOAT16
        if fits and rms >= _SMALLEST_FLOAT16_RMS
        else fixed_rate.BFLOAT16
    )


def _beside(
    trained: Arrays, base: Arrays, layout: Layout, room: int, protected: Floats
) -> list[Section]:
    """Return the sections beside the stream, as far as there is room for them."""
    sections: list[Section] = []
    if protected.size and protected.any():
        mode = _half_mode(protected)
        body = fixed_rate.encode_half(protected, mode)
        sections.append(Section(PROTECTED, HALF, mode, body))
    statistics = difference(trained, base, layout, layout.statistics)
    if statistics.size and statistics.any():
        sections.append(_statistics(statistics, room))
    changed = _changed_counters(trained, base, layout)
    if changed:
        sections.append(Section(COUNTERS, LOSSLESS, 0, changed))
    most = room if not length(layout.stream) else int(_MOST_BESIDE * room)
    for given_up in (STATISTICS, PROTECTED, COUNTERS):
        if sum(section.nbytes for section in sections) <= most:
            break
        sections = [each for each in sections if each.section != given_up]
    return sections


def _statistics(x: Floats, room: int) -> Section:
    if fixed_rate.half_nbytes(x.size) <= _FINE_STATISTICS * room:
        return Section(STATISTICS, HALF, fixed_rate.BFLOAT16, fixed_rate.encode_half(x))
    return Section(STATISTICS, BLOCK8, 0, fixed_rate.encode_block8(x))


def _changed_counters(trained: Arrays, base: Arrays, layout: Layout) -> bytes:
    """Return a bit for each counter, and the values of those that changed."""
    changed = [
        not np.array_equal(trained[index], base[index]) for index in layout.counters
    ]
    if not any(changed):
        return b""
    values = [
        counter_bytes(trained[index])
        for index, has_changed in zip(layout.counters, changed, strict=True)
        if has_changed
    ]
    return np.packbits(changed).tobytes() + b"".join(values)


def counter_bytes(values: NDArray[Any]) -> bytes:
    """Return an integer array's bytes; booleans take a bit each."""
    if values.dtype.kind == "b":
        return np.packbits(values.reshape(-1)).tobytes()
    return values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
