"""The plain payload: a Flower `ArrayRecord` of numpy arrays, checked before use.

This is what an unchanged ClientApp sends and what the server broadcasts. Decoding
copies nothing: each array is a view of the reply's bytes. Every claim of the bytes is
held against the server's own `Manifest` first.
"""

import ast
import functools
import math
import re
import reprlib
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from flower_sap.errors import PayloadError

Arrays: TypeAlias = list[NDArray[Any]]

STYPE = "numpy.ndarray"  # Flower's name for bytes written by `numpy.save`
_MAGIC = b"\x93NUMPY"
_PLAIN_DTYPE = re.compile(r"[<>|=]?(f(2|4|8|16)|[iu][1248]|b1|\?)")
# From here on torch's fused, parallel loops are faster than numpy's; below, waking
# its threads costs more than the work (70 times more on a busy machine).
LARGE = 1 << 17
LARGEST_VALUE = 2.0**60  # about 1e18, exact in any dtype; its square fits in float32


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Name, shape and dtype of one array of the model."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Return the bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        """Return a short form for error messages."""
        return f"{self.name!r} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the model's arrays are; all that a reply may contain."""

    arrays: tuple[ArraySpec, ...]

    @classmethod
    def of(cls, record: ArrayRecord) -> "Manifest":
        """Return the manifest of a record of numpy arrays.

        Raises
        ------
        PayloadError
            If the record is empty or holds an array that numpy cannot read.
        """
        if not record:
            raise PayloadError("the model has no arrays; pass its state to `start`")
        parsed = [(name, _parse(name, array)) for name, array in record.items()]
        return cls(
            tuple(ArraySpec(name, view.shape, view.dtype) for name, view in parsed)
        )

    @property
    def names(self) -> list[str]:
        """Return the names in order."""
        return [spec.name for spec in self.arrays]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all values."""
        return sum(spec.nbytes for spec in self.arrays)


def encode(arrays: Iterable[NDArray[Any]], manifest: Manifest) -> ArrayRecord:
    """Return the arrays as the record that `numpy.save` would give, copied once."""
    return ArrayRecord(
        {
            spec.name: _save(array)
            for spec, array in zip(manifest.arrays, arrays, strict=True)
        }
    )


def decode(record: ArrayRecord, manifest: Manifest) -> Arrays:
    """Return read-only views of the record's arrays, in the manifest's order.

    Raises
    ------
    PayloadError
        If keys, their order, a shape, a dtype or the number of bytes differ from the
        manifest, or a float is NaN or infinite.
    """
    if list(record) != manifest.names:
        raise PayloadError(_key_mismatch(list(record), manifest.names))
    views = [
        _check(_parse(spec.name, record[spec.name]), spec) for spec in manifest.arrays
    ]
    for spec, view in zip(manifest.arrays, views, strict=True):
        _check_finite(view, spec)
    return views


def _save(array: NDArray[Any]) -> Array:
    # numpy.save through BytesIO copies three times and takes 20 times longer.
    values = np.ascontiguousarray(array).reshape(array.shape)
    return Array(
        dtype=str(array.dtype),
        shape=array.shape,
        stype=STYPE,
        data=b"".join((npy_header(array.dtype, array.shape), values.data)),
    )


def npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return the header (version 1.0) that `numpy.save` writes for C order."""
    text = (
        f"{{'descr': {np.lib.format.dtype_to_descr(dtype)!r}, "
        f"'fortran_order': False, 'shape': {shape!r}, }}"
    ).encode("latin1")
    # numpy 1.26 and 2 leave room for the first dimension to grow in place.
    text += b" " * (21 - len(repr(shape[0])) if shape else 0)
    padding = -(len(_MAGIC) + 4 + len(text) + 1) % 64
    text += b" " * padding + b"\n"
    return _MAGIC + b"\x01\x00" + struct.pack("<H", len(text)) + text


def _parse(name: str, array: Array) -> NDArray[Any]:
    """Return a view of the values after reading the numpy header defensively."""
    if array.stype != STYPE:
        raise PayloadError(
            f"array {name!r} has stype {short(array.stype)}, expected {STYPE!r}: this "
            "server does not know that payload"
        )
    data = array.data
    try:
        start = _header_end(data)
        dtype, shape, fortran = _read_header(data[:start])
    except (
        ValueError,
        SyntaxError,
        KeyError,
        TypeError,
        IndexError,
        struct.error,
        RecursionError,
        MemoryError,
        OverflowError,
    ) as error:
        raise PayloadError(f"array {name!r} is not a numpy array: {error}") from error
    return _view(name, data, start, dtype, shape, fortran)


def _header_end(data: bytes) -> int:
    if data[:6] != _MAGIC or data[6] not in (1, 2, 3):
        raise ValueError("no numpy header")
    width, layout = (2, "<H") if data[6] == 1 else (4, "<I")
    end = 8 + width + int(struct.unpack_from(layout, data, 8)[0])
    if end > min(len(data), 8 + width + 4096):
        raise ValueError("header too long")
    return end


# Every reply of a run repeats the same few headers; parsing one takes 0.1 ms.
@functools.lru_cache(maxsize=4096)
def _read_header(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    fields = ast.literal_eval(header[10 if header[6] == 1 else 12 :].decode("latin1"))
    descr, shape, fortran = fields["descr"], fields["shape"], fields["fortran_order"]
    # Only plain numbers: numpy reads a page of other things into a dtype.
    if not (isinstance(descr, str) and _PLAIN_DTYPE.fullmatch(descr)):
        raise ValueError(f"dtype {short(descr)} is no plain number")
    if not (isinstance(shape, tuple) and all(_is_dimension(n) for n in shape)):
        raise ValueError(f"shape {short(shape)} is no tuple of sizes")
    if not isinstance(fortran, bool):
        raise ValueError(f"fortran_order is {short(fortran)}")
    return np.dtype(descr), shape, fortran


def _is_dimension(size: object) -> bool:
    return type(size) is int and 0 <= size <= sys.maxsize  # a bool is no size


def _view(
    name: str,
    data: bytes,
    start: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    fortran: bool,
) -> NDArray[Any]:
    # What torch has no dtype for could not be summed once it is large.
    if not dtype.isnative or dtype.itemsize > 8:
        raise PayloadError(
            f"array {name!r} has dtype {dtype.str}, expected at most 8 bytes a value "
            f"in this machine's byte order ({sys.byteorder})"
        )
    claimed = math.prod(shape) * dtype.itemsize
    if len(data) - start != claimed:
        raise PayloadError(
            f"array {name!r} claims {claimed} bytes ({dtype}{short(list(shape))}), "
            f"found {len(data) - start}"
        )
    values = np.frombuffer(data, dtype, math.prod(shape), start)
    try:
        return values.reshape(shape, order="F" if fortran else "C")
    except ValueError as error:  # too many dimensions, or one times 0 too large
        raise PayloadError(
            f"array {name!r} claims shape {short(shape)}: {error}"
        ) from error


def _check(view: NDArray[Any], spec: ArraySpec) -> NDArray[Any]:
    if view.shape != spec.shape or view.dtype != spec.dtype:
        raise PayloadError(
            f"array {spec.name!r} is {view.dtype}{list(view.shape)}, "
            f"expected {spec.dtype}{list(spec.shape)}"
        )
    return view


def _check_finite(view: NDArray[Any], spec: ArraySpec) -> None:
    """Refuse NaN, infinity, and what would become infinite in a weighted mean."""
    if view.dtype.kind != "f" or view.size == 0:
        return
    # A sum of squares reads the values once and makes no array of flags. NaN and
    # infinity show in it, and so does any value too large to be squared.
    if _energy(view) < LARGEST_VALUE**2:
        return
    good = np.isfinite(view)
    num_bad = view.size - int(np.count_nonzero(good))
    if num_bad:
        raise PayloadError(
            f"array {spec.name!r} holds {num_bad} of {view.size} values NaN or infinite"
        )
    largest = float(np.abs(view).max())
    if largest > LARGEST_VALUE:
        raise PayloadError(
            f"array {spec.name!r} holds values up to {largest:.3g}, beyond the "
            f"{LARGEST_VALUE:g} that a mean can hold"
        )


def _energy(view: NDArray[Any]) -> float:
    """Return the sum of squares, or something no smaller that is not finite."""
    values = view.reshape(-1)
    if view.dtype.itemsize < 4:
        values = values.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.dot(values, values))


class _Borrowed:
    """Memory of a read-only array, lent to torch, which knows no read-only tensors."""

    def __init__(self, view: NDArray[Any]) -> None:
        interface = view.__array_interface__
        self._owner = view
        self.__array_interface__ = {
            **interface,
            "data": (interface["data"][0], False),
        }


def as_tensor(view: NDArray[Any]) -> torch.Tensor:
    """Return a tensor on the memory of `view`, which must not be written to."""
    return torch.from_numpy(
        view if view.flags.writeable else np.asarray(_Borrowed(view))
    )


def _key_mismatch(found: Sequence[str], expected: Sequence[str]) -> str:
    present, known = set(found), set(expected)
    missing = [name for name in expected if name not in present]
    extra = [name for name in found if name not in known]
    if not missing and not extra:
        return f"arrays in another order: {_few(found)}, expected {_few(expected)}"
    return f"arrays missing: {_few(missing)}; not of this model: {_few(extra)}"


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(short(name) for name in names[:3])
    return f"[{shown}{', ...' if len(names) > 3 else ''}]"


def short(value: object) -> str:
    """Return a client's words in so few that they cannot fill a log."""
    return reprlib.repr(value)
