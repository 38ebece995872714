"""A model's state as Flower arrays, with one copy each way.

The idea: the ``.npy`` header that Flower puts in front of a tensor's bytes is the same
in every message, so it is built once. Bytes that start with it are read in place,
without a parser; all others take numpy's own way.
"""

from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from torch import nn

_STYPE = "numpy.ndarray"  # Flower's name for the bytes of ``np.save``


class ModelArrays:
    """Loads a model from an `ArrayRecord` and stores it as one.

    It works on the memory of the model's tensors, which must not be replaced afterwards
    (``tensor.data = ...``, ``model.to(...)``).

    Parameters
    ----------
    model : nn.Module
        On the CPU, with dtypes that numpy knows.
    """

    def __init__(self, model: nn.Module) -> None:
        self._targets: dict[str, NDArray[Any]] = {
            key: tensor.numpy() for key, tensor in model.state_dict().items()
        }
        self._headers = {key: _header(value) for key, value in self._targets.items()}
        # Kept: numpy takes longer to name a dtype than to copy a small tensor.
        self._dtypes = {key: str(value.dtype) for key, value in self._targets.items()}

    def load(self, arrays: ArrayRecord) -> None:
        """Copy `arrays` into the model.

        Raises
        ------
        ValueError
            If names or shapes are not those of the model, or bytes are missing.
        TypeError
            If values would lose their kind (a float into an integer buffer).
        """
        if arrays.keys() != self._targets.keys():
            missing = [key for key in self._targets if key not in arrays]
            unknown = [key for key in arrays if key not in self._targets]
            raise ValueError(
                f"arrays do not fit the model: {missing} are missing and {unknown} are "
                f"unknown, of {len(self._targets)} names; send the arrays of "
                "initial_arrays with the same task"
            )
        for key, target in self._targets.items():
            value = _values(arrays[key], self._headers[key], target)
            _check_fit(key, value, target)
            np.copyto(target, value, casting="same_kind")

    def store(self) -> ArrayRecord:
        """Return a copy of the model's state, in its key order and dtypes."""
        record = ArrayRecord()
        for key, target in self._targets.items():
            # One copy: join reads the tensor's memory as it is.
            data = b"".join((self._headers[key], np.ascontiguousarray(target).data))
            record[key] = Array(self._dtypes[key], target.shape, _STYPE, data)
        return record


def _header(value: NDArray[Any]) -> bytes:
    """Return what ``np.save`` writes before the values."""
    file = BytesIO()
    description = {
        "descr": np.lib.format.dtype_to_descr(value.dtype),
        "fortran_order": False,
        "shape": value.shape,
    }
    np.lib.format.write_array_header_1_0(file, description)
    return file.getvalue()


def _values(array: Array, header: bytes, target: NDArray[Any]) -> NDArray[Any]:
    data = array.data
    expected = len(header) + target.nbytes
    if array.stype == _STYPE and len(data) == expected and data.startswith(header):
        flat = np.frombuffer(data, target.dtype, offset=len(header))
        return flat.reshape(target.shape)
    return array.numpy()


def _check_fit(key: str, value: NDArray[Any], target: NDArray[Any]) -> None:
    # Refused here: copyto would broadcast (1,) to (5,) without a word.
    if value.shape != target.shape:
        raise ValueError(
            f"array {key!r} has shape {value.shape}, the model wants {target.shape}"
        )
    same_dtype = value.dtype == target.dtype
    if not same_dtype and not np.can_cast(value.dtype, target.dtype, "same_kind"):
        raise TypeError(
            f"array {key!r} has dtype {value.dtype}, the model wants {target.dtype}: "
            "cast it back before sending"
        )
