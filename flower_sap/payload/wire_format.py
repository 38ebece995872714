"""The bytes of a payload: a header, sections, and what stands in each.

`docs/payload.md` is the specification, byte by byte. This file holds the two structures
that everything else stands in; a change of either takes a new version number.
"""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from flwr.app import Array, ArrayRecord

from flower_sap.errors import PayloadError

STYPE = "flower-sap/payload/1"  # of the one `Array` that carries a payload
MAGIC = b"SAPU"
VERSION = 1

# Sections, in the order in which they stand.
STREAM, PROTECTED, STATISTICS, COUNTERS = 1, 2, 3, 4
# Codecs, of a section.
HALF, BLOCK8, LRDZQ, LOSSLESS = 0, 1, 2, 3

HAS_FEEDBACK = 1
DOWNLINK = 2

_HEADER = struct.Struct("<4sBBBB8sQQIfI")
_CRC = struct.Struct("<I")
_SECTION = struct.Struct("<BBHI")
PAYLOAD_KEY = "payload"
HEADER_NBYTES = _HEADER.size + _CRC.size
SECTION_NBYTES = _SECTION.size


def payload_record(data: bytes) -> ArrayRecord:
    """Return the record in which a payload travels."""
    return ArrayRecord({PAYLOAD_KEY: Array("uint8", (len(data),), STYPE, data)})


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before the sections.

    Attributes
    ----------
    digest : bytes
        Of the layout, 8 bytes.
    base_version : int
        Version of the model that the update is measured from.
    number : int
        The dispatch that it answers, of this node.
    relative_error : float
        ``|x - decoded| / |x|`` of the whole update, as the encoder measured it.
    flags : int
        `HAS_FEEDBACK`: a residual was added; `DOWNLINK`: from server to client.
    entropy : int
        Major format of pcodec, 0 where none is used.
    num_elements : int
        Elements of the stream.
    """

    digest: bytes
    base_version: int
    number: int
    relative_error: float = 0.0
    flags: int = 0
    entropy: int = 0
    num_elements: int = 0


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a payload; what `mode` means is the codec's."""

    section: int
    codec: int
    mode: int
    body: bytes

    @property
    def nbytes(self) -> int:
        """Return its bytes on the wire."""
        return SECTION_NBYTES + len(self.body)


def pack(header: Header, sections: Sequence[Section]) -> bytes:
    """Return a payload's bytes."""
    parts = []
    for each in sections:
        parts.append(_SECTION.pack(each.section, each.codec, each.mode, len(each.body)))
        parts.append(each.body)
    head = _HEADER.pack(
        MAGIC,
        VERSION,
        header.entropy,
        header.flags,
        len(sections),
        header.digest,
        header.num_elements,
        header.base_version,
        header.number,
        header.relative_error,
        sum(map(len, parts)),
    )
    crc = zlib.crc32(head)
    for part in parts:
        crc = zlib.crc32(part, crc)
    return b"".join((head, _CRC.pack(crc), *parts))


def unpack(data: bytes) -> tuple[Header, list[Section]]:
    """Return header and sections.

    Raises
    ------
    PayloadError
        If the bytes are not a payload of this version, whole and undamaged. The check
        sum finds accidents, not forgeries.
    """
    if len(data) < HEADER_NBYTES:
        raise PayloadError(
            f"a payload has a header of {HEADER_NBYTES} bytes, found {len(data)} in all"
        )
    (
        magic,
        version,
        entropy,
        flags,
        num_sections,
        digest,
        num_elements,
        base_version,
        number,
        relative_error,
        body_nbytes,
    ) = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise PayloadError(f"a payload begins with {MAGIC!r}, found {magic!r}")
    if version != VERSION:
        raise PayloadError(f"payload format {version}, this side knows {VERSION}")
    if body_nbytes != len(data) - HEADER_NBYTES:
        raise PayloadError(
            f"the payload claims {body_nbytes} bytes after its header, found "
            f"{len(data) - HEADER_NBYTES}"
        )
    (claimed,) = _CRC.unpack_from(data, _HEADER.size)
    found = zlib.crc32(
        memoryview(data)[HEADER_NBYTES:], zlib.crc32(data[: _HEADER.size])
    )
    if claimed != found:
        raise PayloadError(f"check sum {claimed:08x} claimed, {found:08x} found")
    header = Header(
        digest, base_version, number, relative_error, flags, entropy, num_elements
    )
    return header, _sections(data, num_sections)


def _sections(data: bytes, count: int) -> list[Section]:
    sections: list[Section] = []
    start = HEADER_NBYTES
    for _ in range(count):
        if start + SECTION_NBYTES > len(data):
            raise PayloadError(f"{count} sections claimed, found {len(sections)}")
        section, codec, mode, nbytes = _SECTION.unpack_from(data, start)
        start += SECTION_NBYTES
        if nbytes > len(data) - start:
            raise PayloadError(
                f"section {section} claims {nbytes} bytes, found {len(data) - start}"
            )
        if sections and section <= sections[-1].section:
            raise PayloadError(
                f"section {section} stands after section {sections[-1].section}"
            )
        sections.append(Section(section, codec, mode, data[start : start + nbytes]))
        start += nbytes
    if start != len(data):
        raise PayloadError(f"{len(data) - start} bytes after the last section")
    return sections
