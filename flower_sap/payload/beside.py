"""What stands beside the stream: protected parameters, statistics, counters."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_sap.errors import PayloadError
from flower_sap.payload import fixed_rate
from flower_sap.payload.deadzone import Floats
from flower_sap.payload.dense import LARGEST_VALUE, Arrays
from flower_sap.payload.layout import Layout, Place, length
from flower_sap.payload.wire_format import (
    BLOCK8,
    COUNTERS,
    HALF,
    LOSSLESS,
    PROTECTED,
    STATISTICS,
    Section,
)

MOST_BESIDE = 0.5  # of the budget; the stream has the rest
_FINE_STATISTICS = 0.1  # of the budget
# Where 16-bit floats resolve an update better than bfloat16 and hold its largest value.
_SMALLEST_FLOAT16_RMS = 2e-5
_LARGEST_FLOAT16 = 6e4


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


def half_mode(x: Floats) -> int:
    """Return the 16-bit format that loses least of `x`."""
    rms = math.sqrt(float(np.dot(x, x)) / x.size)
    fits = float(np.abs(x).max()) < _LARGEST_FLOAT16
    return (
        fixed_rate.FLOAT16
        if fits and rms >= _SMALLEST_FLOAT16_RMS
        else fixed_rate.BFLOAT16
    )


def sections_beside(
    trained: Arrays, base: Arrays, layout: Layout, room: int, protected: Floats
) -> list[Section]:
    """Return the sections beside the stream, as far as there is room for them."""
    sections: list[Section] = []
    if protected.size and protected.any():
        mode = half_mode(protected)
        body = fixed_rate.encode_half(protected, mode)
        sections.append(Section(PROTECTED, HALF, mode, body))
    statistics = difference(trained, base, layout, layout.statistics)
    if statistics.size and statistics.any():
        sections.append(_statistics(statistics, room))
    changed = _changed_counters(trained, base, layout)
    if changed:
        sections.append(Section(COUNTERS, LOSSLESS, 0, changed))
    most = room if not length(layout.stream) else int(MOST_BESIDE * room)
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
