"""From a payload's bytes to an update: everything is checked, then something is added.

The bytes of a client are hostile until they have passed. Sizes come from the server's
own layout, never from the bytes; a payload that claims anything else ends as one
`PayloadError`, before the accumulator is touched.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flower_sap.errors import PayloadError
from flower_sap.payload import fixed_rate, low_rank, lrdzq, wire_format
from flower_sap.payload.deadzone import Floats
from flower_sap.payload.dense import LARGEST_VALUE, Arrays
from flower_sap.payload.layout import Layout, Place, length
from flower_sap.payload.low_rank import Product
from flower_sap.payload.lrdzq import StreamUpdate
from flower_sap.payload.wire_format import (
    BLOCK8,
    COUNTERS,
    HALF,
    LOSSLESS,
    LRDZQ,
    PROTECTED,
    STATISTICS,
    STREAM,
    Header,
    Section,
)


@dataclass(frozen=True, slots=True, eq=False)
class CodedUpdate:
    """A payload that passed every check; its stream is still levels and factors.

    Attributes
    ----------
    layout : Layout
        Of the model.
    header : Header
        Of the payload.
    stream : StreamUpdate, NDArray or None
        Of shape (n,) where it came at a fixed rate; None: nothing changes.
    protected, statistics : NDArray or None
        Differences, float32; None: nothing changes.
    counters : dict
        Index to new values of the counters that changed.
    """

    layout: Layout
    header: Header
    stream: StreamUpdate | Floats | None
    protected: Floats | None
    statistics: Floats | None
    counters: dict[int, NDArray[np.generic]]

    @property
    def num_parameters(self) -> int:
        """Return the elements of stream and protected parameters."""
        return length(self.layout.stream) + length(self.layout.protected)

    def accumulate(self, x: Floats, weight: float) -> list[Product]:
        """Add the update times `weight` to `x`; return the products that are left.

        Parameters
        ----------
        x : NDArray, float32, shape (parameters,)
            Stream, then protected parameters.
        weight : float
            Finite.

        Returns
        -------
        list of Product
            Low-rank parts without the weight, for `low_rank.add_products`: those of
            several updates are cheaper in one.
        """
        num_stream = length(self.layout.stream)
        if self.protected is not None:
            x[num_stream:] += np.float32(weight) * self.protected
        if self.stream is None:
            return []
        if isinstance(self.stream, StreamUpdate):
            self.stream.accumulate(x[:num_stream], weight)
            return self.stream.parts
        x[:num_stream] += np.float32(weight) * self.stream
        return []

    def vector(self) -> Floats:
        """Return the decoded update, float32, shape (parameters,)."""
        x = np.zeros(self.num_parameters, np.float32)
        parts = self.accumulate(x, 1.0)
        low_rank.add_products(x, parts, self.layout.matrices, 1.0)
        return x

    def arrays(self, base: Arrays) -> Arrays:
        """Return the client's whole model: `base` moved by the update."""
        model = self.beside(base)
        if self.stream is None and self.protected is None:
            return model
        vector = self.vector()
        num_stream = length(self.layout.stream)
        _move(model, base, self.layout.stream, vector[:num_stream])
        _move(model, base, self.layout.protected, vector[num_stream:])
        return model

    def beside(self, base: Arrays) -> Arrays:
        """Return `base` with the client's statistics and counters."""
        model = list(base)
        if self.statistics is not None:
            _move(model, base, self.layout.statistics, self.statistics)
            for place in self.layout.statistics:
                if self.layout.manifest.arrays[place.index].name.endswith("_var"):
                    # Rounding may push a variance below zero, and its root to NaN.
                    model[place.index] = np.maximum(model[place.index], 0)
        for index, values in self.counters.items():
            model[index] = values
        return model


def _move(model: Arrays, base: Arrays, places: Sequence[Place], by: Floats) -> None:
    for place in places:
        old = base[place.index]
        wide = np.result_type(old.dtype, np.float32)
        step = by[place.start : place.stop].reshape(place.shape)
        with np.errstate(over="ignore"):
            moved = np.asarray(old.astype(wide, copy=False) + step)
            model[place.index] = moved.astype(old.dtype, copy=False)


def check(
    data: bytes,
    layout: Layout,
    *,
    base_version: int | None = None,
    number: int | None = None,
    largest_nbytes: int | None = None,
) -> CodedUpdate:
    """Return the update in a payload.

    Parameters
    ----------
    data : bytes
        As they came.
    layout : Layout
        The server's own.
    base_version, number : int, optional
        What the payload must answer; a replay of an older one answers something else.
    largest_nbytes : int, optional
        The budget that was granted.

    Raises
    ------
    PayloadError
        If any claim of the bytes does not hold.
    """
    if largest_nbytes is not None and len(data) > largest_nbytes:
        raise PayloadError(
            f"payload of {len(data)} bytes, {largest_nbytes} were granted"
        )
    header, sections = wire_format.unpack(data)
    _check_header(header, layout, base_version, number)
    bodies = {each.section: each for each in sections}
    unknown = [name for name in bodies if name not in _SECTIONS]
    if unknown:
        raise PayloadError(f"unknown sections {unknown}")
    stream = _stream(bodies.get(STREAM), layout)
    update = CodedUpdate(
        layout,
        header,
        stream,
        _floats(bodies.get(PROTECTED), length(layout.protected)),
        _floats(bodies.get(STATISTICS), length(layout.statistics)),
        _counters(bodies.get(COUNTERS), layout),
    )
    _check_energy(update)
    return update


_SECTIONS = (STREAM, PROTECTED, STATISTICS, COUNTERS)


def _check_header(
    header: Header, layout: Layout, base_version: int | None, number: int | None
) -> None:
    if header.digest != layout.digest:
        raise PayloadError(
            f"payload of another model: digest {header.digest.hex()}, expected "
            f"{layout.digest.hex()} (names, shapes, dtypes and treatment must agree)"
        )
    if header.num_elements != length(layout.stream):
        raise PayloadError(
            f"payload of {header.num_elements} elements, the model has "
            f"{length(layout.stream)}"
        )
    for name, claimed, expected in (
        ("base version", header.base_version, base_version),
        ("number", header.number, number),
    ):
        if expected is not None and claimed != expected:
            raise PayloadError(
                f"payload with {name} {claimed}, expected {expected}: it answers "
                "another message"
            )
    if not 0 <= header.relative_error < math.inf:
        raise PayloadError(
            f"relative error must be >= 0 and finite, found {header.relative_error}"
        )


def _stream(section: Section | None, layout: Layout) -> StreamUpdate | Floats | None:
    if section is not None and section.codec == LRDZQ:
        return lrdzq.decode(section.body, layout.matrices, length(layout.stream))
    return _floats(section, length(layout.stream))


def _floats(section: Section | None, count: int) -> Floats | None:
    if section is None:
        return None
    if section.codec == HALF:
        return fixed_rate.decode_half(section.body, count, section.mode)
    if section.codec == BLOCK8:
        return fixed_rate.decode_block8(section.body, count)
    raise PayloadError(f"section {section.section} in codec {section.codec}")


def _counters(
    section: Section | None, layout: Layout
) -> dict[int, NDArray[np.generic]]:
    if section is None:
        return {}
    if section.codec != LOSSLESS:
        raise PayloadError(f"counters in codec {section.codec}, expected {LOSSLESS}")
    body, found = section.body, {}
    num_bits = len(layout.counters)
    start = -(-num_bits // 8)
    if len(body) < start:
        raise PayloadError(f"{num_bits} counters need {start} bytes of bits")
    bits = np.unpackbits(np.frombuffer(body, np.uint8, start))
    if bits[num_bits:].any():
        raise PayloadError(f"bits are set beyond the {num_bits} counters")
    for index, has_changed in zip(layout.counters, bits[:num_bits], strict=True):
        if has_changed:
            found[index], start = _counter(body, start, layout, index)
    if start != len(body):
        raise PayloadError(f"{len(body) - start} bytes after the counters")
    return found


def _counter(
    body: bytes, start: int, layout: Layout, index: int
) -> tuple[NDArray[np.generic], int]:
    spec = layout.manifest.arrays[index]
    count = math.prod(spec.shape)
    is_bool = spec.dtype.kind == "b"
    nbytes = -(-count // 8) if is_bool else spec.nbytes
    if nbytes > len(body) - start:
        raise PayloadError(f"counter {spec} needs {nbytes} bytes, found fewer")
    if is_bool:
        bits = np.frombuffer(body, np.uint8, nbytes, start)
        values = np.unpackbits(bits, count=count).astype(np.bool_)
    else:
        little = spec.dtype.newbyteorder("<")
        values = np.frombuffer(body, little, count, start).astype(spec.dtype)
    return values.reshape(spec.shape), start + nbytes


def _check_energy(update: CodedUpdate) -> None:
    """Refuse what is not finite, or would become so in a sum."""
    for name in ("stream", "protected", "statistics"):
        part = getattr(update, name)
        if part is None:
            continue
        with np.errstate(over="ignore", invalid="ignore"):
            energy = (
                part.energy()
                if isinstance(part, StreamUpdate)
                else float(np.dot(part, part))
            )
        if not energy < LARGEST_VALUE:
            raise PayloadError(
                f"the {name} decodes to an energy of {energy:.3g}, expected a finite "
                f"one below {LARGEST_VALUE:g}"
            )
