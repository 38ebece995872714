"""The plain payload: numpy's own bytes, read without copies and without trust."""

import io
import math
import struct

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flower_sap.errors import PayloadError
from flower_sap.payload.dense import (
    LARGE,
    LARGEST_VALUE,
    STYPE,
    ArraySpec,
    Manifest,
    as_tensor,
    decode,
    encode,
    npy_header,
)

DTYPES = ["f2", "f4", "f8", "i1", "u1", "i2", "i4", "i8", "u8", "?"]
arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(
        dtype,
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
        elements={"min_value": -60000, "max_value": 60000} if "f" in dtype else {},
    )
)


def saved(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def manifest(**arrays: np.ndarray) -> Manifest:
    return Manifest(
        tuple(ArraySpec(name, a.shape, a.dtype) for name, a in arrays.items())
    )


def record(data: bytes, stype: str = STYPE) -> ArrayRecord:
    return ArrayRecord({"w": Array(dtype="", shape=(), stype=stype, data=data)})


def header(text: str, version: int = 1) -> bytes:
    body = text.encode("latin1")
    size = struct.pack("<H" if version == 1 else "<I", len(body))
    return b"\x93NUMPY" + bytes([version, 0]) + size + body


def claim(*, descr="'<f4'", fortran="False", shape="(3,)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}}}"


THREE = np.array([1.0, 2.0, 3.0], np.float32)
EXPECTED = manifest(w=THREE)


@pytest.mark.slow
@given(arrays)
@example(np.zeros((70_000, 0), np.float32))
@example(np.array(7))
def test_encoding_is_what_numpy_saves_byte_for_byte(array):
    encoded = encode([array], manifest(w=array))["w"]

    assert encoded.data == saved(np.ascontiguousarray(array).reshape(array.shape))
    assert (encoded.dtype, tuple(encoded.shape)) == (str(array.dtype), array.shape)


@given(arrays)
def test_an_array_comes_back_as_it_was_without_a_copy(array):
    spec = manifest(w=array)
    encoded = encode([array], spec)

    (decoded,) = decode(encoded, spec)

    assert decoded.tobytes() == array.tobytes()
    assert (decoded.dtype, decoded.shape) == (array.dtype, array.shape)
    assert not decoded.flags.writeable
    if array.size:
        assert np.shares_memory(decoded, np.frombuffer(encoded["w"].data, np.uint8))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0).reshape(3, 4).T,
        np.arange(12.0)[::2],
        np.arange(12.0)[::-1],
        np.arange(12.0).reshape(3, 4)[:, 1:2],
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.broadcast_to(np.float64(3.0), (4, 2)),
    ],
)
def test_any_layout_in_memory_is_encoded_by_value(array):
    spec = manifest(w=array)

    (decoded,) = decode(encode([array], spec), spec)

    assert np.array_equal(decoded, array)


def test_fortran_order_is_read_by_value():
    array = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))

    (decoded,) = decode(record(saved(array)), manifest(w=array))

    assert b"'fortran_order': True" in saved(array)
    assert np.array_equal(decoded, array)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_every_version_of_numpys_header_is_read(version):
    data = header(claim(), version) + THREE.tobytes()

    assert np.array_equal(decode(record(data), EXPECTED)[0], THREE)


def test_a_manifest_is_read_off_a_record():
    initial = ArrayRecord({"w": Array(THREE), "n": Array(np.array(4))})

    found = Manifest.of(initial)

    assert found == manifest(w=THREE, n=np.array(4))
    assert found.names == ["w", "n"]
    assert found.nbytes == 20
    assert str(found.arrays[0]) == "'w' float32[3]"


def test_a_dimension_beyond_16_bits_fits_the_header():
    assert b"'shape': (70000, 5000000000)" in npy_header(
        np.dtype("f4"), (70_000, 5_000_000_000)
    )
    assert ArraySpec("w", (70_000, 5_000_000_000), np.dtype("f4")).nbytes == 14 * 10**14


def test_a_model_without_arrays_is_refused():
    with pytest.raises(PayloadError, match="the model has no arrays"):
        Manifest.of(ArrayRecord())


@pytest.mark.parametrize("dtype", [">f4", ">i8", "g", "c8", "U3", "M8[s]"])
def test_a_model_of_values_that_cannot_be_averaged_is_refused(dtype):
    if dtype == "g" and np.dtype("g").itemsize == 8:
        pytest.skip("long double is double on this machine")

    with pytest.raises(PayloadError, match=r"array 'w' (has|is not a numpy array: )"):
        Manifest.of(record(saved(np.zeros(2, dtype))))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a"], r"missing: \['b'\]; not of this model: \[\]"),
        (["a", "b", "c"], r"missing: \[\]; not of this model: \['c'\]"),
        (["a", "c"], r"missing: \['b'\]; not of this model: \['c'\]"),
        (["b", "a"], r"another order: \['b', 'a'\], expected \['a', 'b'\]"),
        ([], r"missing: \['a', 'b'\]"),
        (list("acdefg"), r"not of this model: \['c', 'd', 'e', ...\]"),
    ],
)
def test_arrays_of_another_model_are_refused_by_name(names, message):
    expected = manifest(a=THREE, b=THREE)
    found = ArrayRecord({name: Array(THREE) for name in names})

    with pytest.raises(PayloadError, match=message):
        decode(found, expected)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(4, np.float32), r"'w' is float32\[4\], expected float32\[3\]"),
        (np.zeros((3, 1), np.float32), r"is float32\[3, 1\], expected float32\[3\]"),
        (np.zeros((1, 3), np.float32), r"is float32\[1, 3\], expected float32\[3\]"),
        (np.zeros((), np.float32), r"is float32\[\], expected float32\[3\]"),
        (np.zeros(1, np.float32), r"is float32\[1\], expected float32\[3\]"),
        (np.zeros(3, np.float64), r"is float64\[3\], expected float32\[3\]"),
        (np.zeros(3, np.int32), r"is int32\[3\], expected float32\[3\]"),
        (np.zeros(3, ">f4"), "has dtype >f4, expected .* byte order"),
        (np.zeros(3, "c8"), "dtype '<c8' is no plain number"),
        (np.zeros(3, "U1"), "dtype '<U1' is no plain number"),
        (np.zeros(3, [("a", "<f4")]), r"dtype \[\('a', '<f4'\)\] is no plain number"),
        (np.array([None] * 3), r"dtype '\|O' is no plain number"),
    ],
)
def test_an_array_of_another_shape_or_dtype_is_refused(array, message):
    with pytest.raises(PayloadError, match=message):
        decode(record(saved(array)), EXPECTED)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 1000, pytest.param(LARGE, id="large")])
def test_one_value_that_is_not_finite_is_found(value, dtype, size):
    array = np.zeros(size, dtype)
    array[size // 2] = value

    with pytest.raises(PayloadError, match=f"'w' holds 1 of {size} values NaN or inf"):
        decode(record(saved(array)), manifest(w=array))


def test_a_bad_value_in_a_buffer_alone_is_found():
    spec = manifest(w=THREE, running_var=THREE)
    found = ArrayRecord(
        {"w": Array(THREE), "running_var": Array(THREE * np.float32(math.nan))}
    )

    with pytest.raises(PayloadError, match="'running_var' holds 3 of 3 values NaN"):
        decode(found, spec)


@pytest.mark.parametrize("size", [100, LARGE])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_large_values_are_good_even_where_their_squares_add_up_to_too_much(size, dtype):
    array = np.full(size, LARGEST_VALUE, dtype)

    assert np.array_equal(decode(record(saved(array)), manifest(w=array))[0], array)


@pytest.mark.parametrize("size", [100, LARGE])
def test_all_values_of_half_precision_are_good(size):
    array = np.full(size, np.finfo(np.float16).max)

    assert np.array_equal(decode(record(saved(array)), manifest(w=array))[0], array)


@pytest.mark.parametrize("size", [100, LARGE])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_value_that_would_overflow_a_mean_is_refused(size, dtype):
    array = np.zeros(size, dtype)
    array[size // 2] = -1e30

    with pytest.raises(PayloadError, match=r"'w' holds values up to 1e\+30, beyond"):
        decode(record(saved(array)), manifest(w=array))


@pytest.mark.parametrize("change", [-3, -1, 1, 4, -12, -13])
def test_bytes_too_few_or_too_many_are_refused_with_their_number(change):
    data = (saved(THREE) + b"\0" * 8)[: len(saved(THREE)) + change]

    with pytest.raises(
        PayloadError, match=f"claims 12 bytes .* found {12 + change}|not a numpy array"
    ):
        decode(record(data), EXPECTED)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("(1099511627776,)", "claims 4398046511104 bytes .*, found 12"),
        ("(2147483648, 2147483648, 2147483648)", "claims .* found 12"),
        ("(" + "9" * 3000 + ",)", "is no tuple of sizes"),
        ("(" + "9223372036854775807, " * 150 + ")", "claims .* found 12|header too"),
        ("(-3,)", r"shape \(-3,\) is no tuple of sizes"),
        ("(-1, -3)", r"shape \(-1, -3\) is no tuple of sizes"),
        ("(True, 3)", r"shape \(True, 3\) is no tuple of sizes"),
        ("(3.0,)", r"shape \(3.0,\) is no tuple of sizes"),
        ("(1e400,)", r"shape \(inf,\) is no tuple of sizes"),
        ("('3',)", r"shape \('3',\) is no tuple of sizes"),
        ("'3'", "shape '3' is no tuple of sizes"),
        ("[3]", r"shape \[3\] is no tuple of sizes"),
        ("{3: 1}", r"shape \{3: 1\} is no tuple of sizes"),
        ("3", "shape 3 is no tuple of sizes"),
        ("None", "shape None is no tuple of sizes"),
        ("(" + "1, " * 70 + "3)", "claims shape .* dimension|is float32"),
    ],
)
def test_a_claimed_shape_that_cannot_be_is_refused(shape, message):
    with pytest.raises(PayloadError, match=message):
        decode(record(header(claim(shape=shape)) + THREE.tobytes()), EXPECTED)


def test_nothing_times_too_much_is_refused():
    data = header(claim(shape="(0, 9223372036854775807, 9223372036854775807)"))

    with pytest.raises(PayloadError, match=r"claims shape \(0, 9223"):
        decode(record(data), EXPECTED)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "[]",
        "{}",
        "None",
        "\0",
        "é" * 100,
        "(" * 3000,
        "-" * 3900 + "1",
        "__import__('os').getcwd()",
        claim(descr="None"),
        claim(descr="'|O'"),
        claim(descr="'V4'"),
        claim(descr="'(2,3)f4'"),
        claim(descr="'f4,f4'"),
        claim(descr="[('a', '<f4')]"),
        claim(descr="{'names': [[]]}"),
        claim(descr="(1, 2, 3)"),
        claim(descr="'a4'"),
        claim(descr="'<f3'"),
        claim(fortran="'yes'"),
        claim(fortran="1"),
        "{'descr': '<f4', 'shape': (3,)}",
        "{'descr': '<f4', 'fortran_order': False}",
        claim().replace("}", "") + " " * 5000 + "}",
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_a_header_that_says_anything_else_is_refused(text, version):
    with pytest.raises(PayloadError, match="array 'w' is not a numpy array: "):
        decode(record(header(text, version) + THREE.tobytes()), EXPECTED)


@pytest.mark.parametrize("size", range(13))
def test_bytes_that_end_within_the_header_are_refused(size):
    for version in (1, 2, 9):
        data = header(claim(), version)[:size]
        with pytest.raises(PayloadError, match="array 'w' is not a numpy array"):
            decode(record(data), EXPECTED)


def test_a_header_that_claims_gigabytes_is_refused_unread():
    data = b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b" " * 100

    with pytest.raises(PayloadError, match="header too long"):
        decode(record(data), EXPECTED)


def test_a_payload_of_another_codec_is_named():
    with pytest.raises(PayloadError, match=r"stype 'other', expected 'numpy\.ndarray'"):
        decode(record(saved(THREE), "other"), EXPECTED)


def test_a_complaint_does_not_grow_with_what_a_client_sends():
    long = "n" * 100_000
    for found in (
        record(saved(THREE), long),
        ArrayRecord({long: Array(THREE)}),
        record(header(claim(descr=repr("f" * 3900))) + THREE.tobytes()),
        record(header(claim(shape="(" + "1, " * 1200 + ")")) + THREE.tobytes()),
    ):
        with pytest.raises(PayloadError, match=r"\.\.\.") as caught:
            decode(found, EXPECTED)
        assert len(str(caught.value)) < 400


def survives(data: bytes) -> None:
    """Decode to the expected array or to the one typed error."""
    try:
        (decoded,) = decode(record(data), EXPECTED)
    except PayloadError:
        return
    assert (decoded.dtype, decoded.shape) == (THREE.dtype, THREE.shape)
    assert np.isfinite(decoded).all()


@settings(max_examples=300)
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_meet_one_typed_error(noise, begins_well):
    survives(b"\x93NUMPY\x01\x00" * begins_well + noise)


@pytest.mark.slow
@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(st.integers(0, 139), st.binary(max_size=4), st.integers(0, 4)),
        min_size=1,
        max_size=4,
    )
)
def test_random_changes_of_a_good_payload_meet_one_typed_error(changes):
    data = saved(THREE)
    for place, inserted, removed in changes:
        data = data[:place] + inserted + data[place + removed :]

    survives(data)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["<f4", "f4", "|O", "U", "m8[s]", ">f8", "V"]),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
), st.sampled_from(["descr", "shape", "fortran"]))  # fmt: skip
def test_any_value_in_a_header_meets_one_typed_error(value, field):
    text = claim(**{field: repr(value)}).encode("ascii", "backslashreplace")

    survives(header(text.decode("latin1")) + THREE.tobytes())


def test_a_tensor_borrows_the_memory_of_a_read_only_array():
    for view in (np.frombuffer(THREE.tobytes(), np.float32), THREE.copy()):
        tensor = as_tensor(view)

        assert np.shares_memory(tensor.numpy(), view)
        assert tensor.tolist() == view.tolist()
