"""Payloads: within their budget, exact in what they claim, hostile until checked."""

import itertools
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flower_sap.errors import PayloadError
from flower_sap.payload import beside, decoder, encoder, wire_format
from flower_sap.payload.dense import ArraySpec, Manifest
from flower_sap.payload.layout import Layout, Treatment, length
from flower_sap.payload.wire_format import HEADER_NBYTES, Header

HEADER = Header(b"", base_version=7, number=3)


def layout_of(specs, treatment=None):
    arrays = tuple(ArraySpec(n, s, np.dtype(d)) for n, s, d in specs)
    return Layout(Manifest(arrays), treatment or Treatment())


MIXED = [
    ("conv.weight", (64, 40, 3, 3), "float32"),
    ("conv.bias", (64,), "float32"),
    ("bn.running_mean", (64,), "float32"),
    ("bn.running_var", (64,), "float32"),
    ("bn.num_batches_tracked", (), "int64"),
    ("mask", (9,), "bool"),
    ("half", (33,), "float16"),
    ("double", (4, 5), "float64"),
    ("scalar", (), "float32"),
    ("empty", (0, 3), "float32"),
    ("head.weight", (10, 64), "float32"),
]


def model(layout, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    arrays = []
    for spec in layout.manifest.arrays:
        if spec.dtype.kind == "f":
            values = rng.standard_normal(spec.shape) * scale
            if spec.name.endswith("running_var"):
                values = np.abs(values) + 1
        else:
            values = rng.integers(0, 2 if spec.dtype.kind == "b" else 100, spec.shape)
        arrays.append(np.asarray(values).astype(spec.dtype))
    return arrays


def trained_from(base, layout, seed=1, scale=0.01):
    """Return a model near the base; counters go up."""
    moves = model(layout, seed, scale)
    return [
        (b + m).astype(b.dtype) if b.dtype.kind != "b" else ~b
        for b, m in zip(base, moves, strict=True)
    ]


def flat(trained, base, layout):
    return np.concatenate(
        [
            beside.difference(trained, base, layout, layout.stream),
            beside.difference(trained, base, layout, layout.protected),
        ]
    )


def encoded(layout, budget, *, trained=None, base=None, **more):
    base = model(layout) if base is None else base
    trained = trained_from(base, layout) if trained is None else trained
    return encoder.encode(
        trained, base, layout, budget=budget, header=HEADER, seed=(0, 1, 7), **more
    )


@pytest.mark.parametrize("share", [1.2, 1, 0.5, 0.3, 1 / 4, 1 / 8, 1 / 32, 1 / 256])
def test_what_is_decoded_and_the_error_add_up_to_the_update(share):
    layout = layout_of(MIXED, Treatment(protect=("head.*",)))
    base = model(layout)
    trained = trained_from(base, layout)
    budget = int(share * layout.manifest.nbytes)

    payload = encoded(layout, budget, trained=trained, base=base)
    update = decoder.check(payload.data, layout, base_version=7, number=3)

    truth = flat(trained, base, layout)
    assert len(payload.data) <= budget
    np.testing.assert_allclose(update.vector() + payload.error, truth, atol=1e-6)
    found = np.linalg.norm(payload.error) / np.linalg.norm(truth)
    assert payload.relative_error == pytest.approx(found, rel=1e-4)


def test_more_bytes_never_make_a_much_larger_error():
    layout = layout_of(MIXED)
    shares = [1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 0.4, 0.52, 1.1]

    errors = [
        encoded(layout, int(share * layout.manifest.nbytes)).relative_error
        for share in shares
    ]

    # 16-bit floats, from 1/2 on, are allowed to be no better than the levels before.
    for coarse, fine in itertools.pairwise(errors):
        assert fine < 1.2 * coarse
    assert errors[-1] == 0.0


@pytest.mark.parametrize("share", [1 / 4, 1 / 8, 1 / 16, 1 / 32])
def test_nearly_all_of_the_budget_is_used(share):
    layout = layout_of([("a", (400, 300), "float32"), ("b", (300, 500), "float32")])
    budget = int(share * layout.manifest.nbytes)

    payload = encoded(layout, budget)

    assert len(payload.data) >= 0.985 * budget


def test_a_low_rank_update_takes_far_fewer_bytes_than_noise_of_its_size():
    layout = layout_of([("a", (256, 512), "float32")])
    base = model(layout)
    rng = np.random.default_rng(3)
    left, right = rng.standard_normal((256, 4)), rng.standard_normal((4, 512))
    low = [(base[0] + 0.01 * left @ right).astype(np.float32)]
    noise = [(base[0] + 0.02 * rng.standard_normal((256, 512))).astype(np.float32)]
    budget = layout.manifest.nbytes // 64

    assert encoded(layout, budget, trained=low, base=base).relative_error < 0.1
    assert encoded(layout, budget, trained=noise, base=base).relative_error > 0.7


def test_a_payload_is_a_pure_function_of_its_inputs_and_changes_none():
    layout = layout_of(MIXED)
    base = model(layout)
    trained = trained_from(base, layout)
    residual = np.full(length(layout.stream), 1e-3, np.float32)
    before = [a.copy() for a in (*base, *trained, residual)]

    first = encoded(layout, 3000, trained=trained, base=base, residual=residual)
    again = encoded(layout, 3000, trained=trained, base=base, residual=residual)

    assert first.data == again.data
    for old, new in zip(before, (*base, *trained, residual), strict=True):
        np.testing.assert_array_equal(old, new)


def test_counters_travel_unharmed_and_statistics_nearly_so():
    layout = layout_of(MIXED)
    base = model(layout)
    trained = trained_from(base, layout)

    payload = encoded(layout, layout.manifest.nbytes // 4, trained=trained, base=base)
    arrays = decoder.check(payload.data, layout).arrays(base)

    for spec, new, old, truth in zip(
        layout.manifest.arrays, arrays, base, trained, strict=True
    ):
        assert (new.dtype, new.shape) == (spec.dtype, spec.shape)
        if spec.dtype.kind != "f":
            np.testing.assert_array_equal(new, truth)
        elif "running" in spec.name:
            np.testing.assert_allclose(new - old, truth - old, rtol=0.01, atol=1e-6)


def test_arrays_that_are_kept_local_do_not_travel():
    treatment = Treatment(local_keys=("head.*",), statistics="local")
    layout = layout_of(MIXED, treatment)
    base = model(layout)

    payload = encoded(layout, 10**6, base=base)
    arrays = decoder.check(payload.data, layout).arrays(base)

    names = layout.manifest.names
    for name in ("head.weight", "bn.running_mean", "bn.running_var"):
        np.testing.assert_array_equal(
            arrays[names.index(name)], base[names.index(name)]
        )


def test_an_update_of_nothing_is_a_header_alone():
    layout = layout_of(MIXED)
    base = model(layout)

    payload = encoded(layout, 10**6, trained=base, base=base)

    assert len(payload.data) == HEADER_NBYTES
    assert payload.relative_error == 0.0


def test_frozen_arrays_cost_next_to_nothing():
    layout = layout_of(
        [("a", (300, 300), "float32"), ("frozen", (3000, 300), "float32")]
    )
    base = model(layout)
    trained = [trained_from(base, layout)[0], base[1]]
    alone = layout_of([("a", (300, 300), "float32")])

    together = encoded(layout, 20_000, trained=trained, base=base).relative_error
    single = encoded(alone, 20_000, trained=trained[:1], base=base[:1]).relative_error

    assert together < 1.05 * single


def test_a_tiny_budget_ends_in_a_header_and_what_was_not_said_is_the_error():
    layout = layout_of(MIXED)
    base = model(layout)
    trained = trained_from(base, layout)

    payload = encoded(layout, HEADER_NBYTES, trained=trained, base=base)

    assert len(payload.data) == HEADER_NBYTES
    assert payload.relative_error == 1.0
    np.testing.assert_allclose(payload.error, flat(trained, base, layout))


def test_a_budget_below_a_header_is_refused():
    with pytest.raises(PayloadError, match="47 bytes is below the 48"):
        encoded(layout_of(MIXED), HEADER_NBYTES - 1)


def test_an_update_that_is_not_finite_is_refused_by_name():
    layout = layout_of(MIXED)
    trained = trained_from(model(layout), layout)
    trained[1][3] = np.nan

    with pytest.raises(PayloadError, match=r"not finite.*conv\.bias"):
        encoded(layout, 3000, trained=trained)


def test_without_an_entropy_coder_a_block_has_eight_bits():
    layout = layout_of([("a", (300, 300), "float32")])
    large, small = int(0.27 * 360_000), int(0.2 * 360_000)

    blocks = encoded(layout, large, has_entropy_coder=False)
    nothing = encoded(layout, small, has_entropy_coder=False)

    assert 0.001 < blocks.relative_error < 0.02
    assert nothing.relative_error == 1.0


DTYPES = st.sampled_from(["float32", "float16", "float64", "int64", "int8", "bool"])
SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    arrays=st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=6),
    budget=st.integers(HEADER_NBYTES, 40_000),
    scale=st.sampled_from([0.0, 1e-9, 1e-3, 1.0, 1e3]),
    protects=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_model_fits_any_budget_and_comes_back_as_it_was(
    arrays, budget, scale, protects, seed
):
    specs = [(f"w{i}", shape, dtype) for i, (shape, dtype) in enumerate(arrays)]
    treatment = Treatment(protect=("w0",) if protects else ())
    layout = layout_of(specs, treatment)
    base = model(layout, seed)
    trained = trained_from(base, layout, seed + 1, scale)

    payload = encoded(layout, budget, trained=trained, base=base)
    update = decoder.check(payload.data, layout, largest_nbytes=budget)

    assert len(payload.data) <= budget
    truth = flat(trained, base, layout)
    size = float(np.abs(truth).max(initial=0.0))
    np.testing.assert_allclose(update.vector() + payload.error, truth, atol=4e-6 * size)
    for spec, new in zip(layout.manifest.arrays, update.arrays(base), strict=True):
        assert (new.dtype, new.shape) == (spec.dtype, spec.shape)


# --- hostile bytes ------------------------------------------------------------------


def restated(data, **fields):
    """Return the payload with another header, its check sum renewed."""
    header, sections = wire_format.unpack(data)
    changed = {name: getattr(header, name) for name in header.__slots__}
    return wire_format.pack(Header(**{**changed, **fields}), sections)


GOOD = layout_of([("a", (160, 120), "float32"), ("n", (), "int64")])


def good_payload(budget=3000):
    return encoded(GOOD, budget).data


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "header of 48 bytes, found 0"),
        (good_payload()[:-3], "claims .* bytes after its header"),
        (good_payload() + b"x", "claims .* bytes after its header"),
        (b"X" + good_payload()[1:], "begins with b'SAPU'"),
        (good_payload()[:4] + b"\x09" + good_payload()[5:], "payload format 9"),
        (good_payload()[:60] + b"\0\0\0\0" + good_payload()[64:], "check sum"),
        (restated(good_payload(), digest=b"12345678"), "another model"),
        (restated(good_payload(), num_elements=2**60), "the model has 19200"),
        (restated(good_payload(), base_version=6), "base version 6, expected 7"),
        (restated(good_payload(), number=2), "number 2, expected 3"),
        (restated(good_payload(), relative_error=float("nan")), "relative error"),
    ],
)
def test_bytes_that_lie_are_refused_with_what_they_claim(data, reason):
    with pytest.raises(PayloadError, match=reason):
        decoder.check(data, GOOD, base_version=7, number=3)


def test_a_payload_larger_than_its_budget_is_refused():
    with pytest.raises(PayloadError, match="2000 were granted"):
        decoder.check(good_payload(), GOOD, largest_nbytes=2000)


def test_mutated_payloads_end_in_payload_errors_alone():
    rng = np.random.default_rng(0)
    sources = [good_payload(budget) for budget in (200, 3000, 20_000, 50_000, 10**6)]
    num_refused = 0
    for round_ in range(1500):
        data = bytearray(sources[round_ % len(sources)])
        for _ in range(int(rng.integers(1, 4))):
            data[int(rng.integers(HEADER_NBYTES, len(data)))] = int(rng.integers(256))
        renewed = with_check_sum(bytes(data))
        try:
            update = decoder.check(renewed, GOOD)
            assert np.isfinite(update.vector()).all()
        except PayloadError:
            num_refused += 1
    assert num_refused > 100


def with_check_sum(data):
    """Return the bytes with the check sum that they need."""
    crc = zlib.crc32(data[HEADER_NBYTES:], zlib.crc32(data[: HEADER_NBYTES - 4]))
    return data[: HEADER_NBYTES - 4] + struct.pack("<I", crc) + data[HEADER_NBYTES:]


# --- the bytes themselves -----------------------------------------------------------

GOLDEN = Path(__file__).parent / "golden"


def exact_update():
    """Return an update whose bytes do not depend on a platform's arithmetic."""
    layout = layout_of(
        [
            ("w", (3, 5), "float32"),
            ("p", (3,), "float32"),
            ("bn.running_mean", (2,), "float32"),
            ("n", (), "int64"),
            ("flags", (9,), "bool"),
        ],
        Treatment(protect=("p",)),
    )
    base = [np.zeros(s.shape, s.dtype) for s in layout.manifest.arrays]
    trained = [
        (np.arange(15, dtype=np.float32).reshape(3, 5) - 7) / 8,
        np.array([0.5, -2.0, 1.0], np.float32),
        np.array([1.0, -0.25], np.float32),
        np.array(12, np.int64),
        np.array([True, False] * 4 + [True]),
    ]
    return layout, base, trained


@pytest.mark.parametrize(("name", "budget"), [("float32", 400), ("float16", 150)])
def test_the_bytes_are_those_of_format_1(name, budget):
    layout, base, trained = exact_update()

    payload = encoded(layout, budget, trained=trained, base=base)

    assert payload.data == (GOLDEN / f"payload-{name}.bin").read_bytes()


@pytest.mark.parametrize("name", ["float32", "float16", "lrdzq", "block8"])
def test_payloads_of_format_1_stay_readable(name):
    layout, base, trained = exact_update()
    data = (GOLDEN / f"payload-{name}.bin").read_bytes()

    update = decoder.check(data, layout, base_version=7, number=3)

    atol = {"lrdzq": 0.26, "block8": 0.01}.get(name, 0.0)
    for new, truth in zip(update.arrays(base), trained, strict=True):
        np.testing.assert_allclose(
            new, truth, atol=0 if truth.dtype.kind != "f" else atol
        )


def test_a_scale_that_is_not_finite_is_refused():
    data = encoded(GOOD, 30_000, has_entropy_coder=False).data
    header, sections = wire_format.unpack(data)
    assert sections[0].codec == wire_format.BLOCK8
    body = b"\x80\x7f" + sections[0].body[2:]  # infinity in bfloat16
    spoilt = wire_format.Section(1, wire_format.BLOCK8, 0, body)

    with pytest.raises(PayloadError, match="scale of a block is not finite"):
        decoder.check(wire_format.pack(header, [spoilt, *sections[1:]]), GOOD)


@pytest.mark.parametrize("part", [4, 64])
def test_the_order_of_memory_makes_no_difference(part):
    layout = layout_of([("a", (160, 120), "float32"), ("b", (7, 9), "float64")])
    base = model(layout)
    trained = trained_from(base, layout)
    budget = layout.manifest.nbytes // part

    plain = encoded(layout, budget, trained=trained, base=base)
    turned = encoded(
        layout,
        budget,
        trained=[np.asfortranarray(a) for a in trained],
        base=[a[::-1].copy()[::-1] for a in base],
    )

    assert plain.data == turned.data
    rebuilt = decoder.check(plain.data, layout).arrays(
        [np.asfortranarray(a) for a in base]
    )
    for new, spec in zip(rebuilt, layout.manifest.arrays, strict=True):
        assert (new.shape, new.dtype) == (spec.shape, spec.dtype)


def test_complex_models_are_refused_by_name():
    with pytest.raises(PayloadError, match="array 'z' complex64"):
        layout_of([("z", (3,), "complex64")])


@pytest.mark.parametrize("treatment", [{"protect": "head"}, {"local_keys": (1,)}])
def test_patterns_that_are_no_tuple_of_texts_are_refused(treatment):
    with pytest.raises(TypeError, match="must be a tuple of patterns"):
        Treatment(**treatment)


def test_another_word_for_statistics_is_refused():
    with pytest.raises(ValueError, match="'sent' or 'local', got 'none'"):
        Treatment(statistics="none")
