"""From updates to models: means, statistics, counters, against float64 by hand."""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_sap.payload.dense import LARGE, ArraySpec, Manifest
from flower_sap.payload.layout import Kind, kind_of
from flower_sap.strategies.aggregation import KeepAll, largest_counters
from flower_sap.strategies.streaming_mean import StreamingMean

SPECS = Manifest(
    tuple(
        ArraySpec(name, shape, np.dtype(dtype))
        for name, shape, dtype in [
            ("half", (5,), np.float16),
            ("single", (2, 3), np.float32),
            ("double", (4,), np.float64),
            ("scalar", (), np.float32),
            ("empty", (0, 3), np.float32),
            ("bn.running_mean", (3,), np.float32),
            ("bn.running_var", (3,), np.float32),
            ("bn.num_batches_tracked", (), np.int64),
            ("mask", (2,), np.bool_),
        ]
    )
)


def model(seed: int) -> list[np.ndarray]:
    """Draw a model of all dtypes; variances are positive."""
    rng = np.random.default_rng(seed)
    arrays = []
    for spec in SPECS.arrays:
        if spec.dtype.kind == "f":
            values = rng.normal(size=spec.shape)
            if spec.name.endswith("var"):
                values = np.abs(values)
        else:
            values = rng.integers(0, 2 if spec.dtype == bool else 1 << 40, spec.shape)
        arrays.append(np.asarray(values).astype(spec.dtype))
    return arrays


def single(*values: float, dtype=np.float32, name="w") -> tuple[Manifest, list]:
    array = np.array(values, dtype)
    return Manifest((ArraySpec(name, array.shape, array.dtype),)), [array]


def frozen(arrays):
    for array in arrays:
        array.flags.writeable = False
    return arrays


# How an update arrives: seed, age (0: measured from the current model), n, gain, share.
updates = st.lists(
    st.tuples(
        st.integers(10, 99),
        st.integers(0, 2),
        st.integers(1, 1000),
        st.just(1.0) | st.floats(0.01, 4),
    ),
    min_size=1,
    max_size=6,
)


def fill(aggregator, current, taken) -> None:
    for seed, age, n, gain in taken:
        base = current if age == 0 else frozen(model(age))
        aggregator.add(
            frozen(model(seed)), base=base, num_examples=n, gain=gain,
            share=min(1.0, gain),
        )  # fmt: skip


def reference(current, taken, scale, index):
    """Return the mean by the formulas of the module, in float64."""
    kind = kind_of(SPECS.arrays[index])
    news = [model(seed)[index] for seed, *_ in taken]
    if kind is Kind.COUNTER:
        return np.max([current[index], *news], axis=0)
    w, total = current[index].astype(np.float64), sum(n for *_, n, _ in taken)
    moved = np.zeros_like(w)
    for x, (_, age, n, gain) in zip(news, taken, strict=True):
        if kind is Kind.STATISTIC:
            moved += n * min(1.0, gain) * (x - w)
        else:
            base = w if age == 0 else model(age)[index].astype(np.float64)
            moved += n * gain * (x.astype(np.float64) - base)
    return w + (min(1.0, scale) if kind is Kind.STATISTIC else scale) * moved / total


@pytest.mark.slow
@settings(deadline=None)
@given(updates, st.just(1.0) | st.floats(0.01, 2))
def test_the_mean_of_any_mixture_is_the_formula_in_every_dtype(taken, scale):
    current = frozen(model(0))
    aggregator = StreamingMean(current, SPECS)

    fill(aggregator, current, taken)
    ((merged, total),) = aggregator.models(scale)

    assert total == sum(n for *_, n, _ in taken)
    for index, spec in enumerate(SPECS.arrays):
        expected = reference(current, taken, scale, index)
        assert merged[index].dtype == spec.dtype
        assert merged[index].shape == spec.shape
        if spec.dtype.kind != "f":
            assert np.array_equal(merged[index], expected)
            continue
        # Twenty roundings of values below 5 * 4 * 2, in float32 at the least; then
        # one to the array's own dtype.
        added_in = np.finfo(np.result_type(spec.dtype, np.float32)).eps
        slack = 20 * 40 * added_in + np.finfo(spec.dtype).eps * np.abs(expected)
        assert np.all(np.abs(merged[index] - expected) <= slack)


@pytest.mark.slow
@settings(deadline=None)
@given(updates, st.just(1.0) | st.floats(0.01, 2))
def test_a_model_for_each_update_averages_to_the_mean(taken, scale):
    current = frozen(model(0))
    streamed, kept = StreamingMean(current, SPECS), KeepAll(current, SPECS)

    fill(streamed, current, taken)
    fill(kept, current, taken)
    ((merged, total),) = streamed.models(scale)
    singles = kept.models(scale)

    for index, spec in enumerate(SPECS.arrays):
        if spec.dtype.kind != "f":
            continue
        mean = sum(n * m[index].astype(np.float64) for m, n in singles) / total
        # As above, and each single model is rounded to its dtype first.
        slack = 20 * 40 * np.finfo(np.float32).eps + 200 * np.finfo(spec.dtype).eps
        assert np.all(np.abs(merged[index] - mean) <= slack)


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=9))
def test_equal_fresh_models_give_that_model_to_the_last_bit(examples):
    current = frozen(model(0))
    aggregator = StreamingMean(current, SPECS)

    for n in examples:
        aggregator.add(
            frozen(model(1)), base=current, num_examples=n, gain=1.0, share=1.0
        )
    ((merged, _),) = aggregator.models(1.0)

    for index, spec in enumerate(SPECS.arrays):
        if spec.dtype.kind == "f":
            assert merged[index].tobytes() == model(1)[index].tobytes()


def test_a_hundred_merges_of_the_unchanged_model_do_not_move_it():
    current = model(3)

    for number in range(100):
        aggregator = StreamingMean(frozen(current), SPECS)
        for n, gain in ((3, 1.0), (7, 0.3), (0.1, 1.0), (number + 1, 0.7)):
            aggregator.add(
                copy.deepcopy(current), base=copy.deepcopy(current), num_examples=n,
                gain=gain, share=min(1.0, gain),
            )  # fmt: skip
        ((current, _),) = aggregator.models(0.9)

    for ours, first in zip(current, model(3), strict=True):
        assert np.array_equal(ours, first)


@pytest.mark.parametrize("make", [StreamingMean, KeepAll])
@given(st.floats(0.01, 4), st.floats(0.01, 4))
def test_a_stale_update_that_changed_nothing_is_a_no_op(make, gain, scale):
    # The mean of stale *models* would pull the model back to the update's base.
    manifest, current = single(1.5, -2.25, 1e-30)
    base = [np.array([7.0, 3.3, 1e30], np.float32)]
    aggregator = make(current, manifest)

    aggregator.add(
        [base[0].copy()], base=base, num_examples=3, gain=gain, share=min(1, gain)
    )
    ((merged, _),) = aggregator.models(scale)

    assert np.array_equal(merged[0], current[0])


def test_deltas_are_added_to_the_current_model_not_put_in_its_place():
    manifest, current = single(10.0)
    aggregator = StreamingMean(current, manifest)

    aggregator.add([np.float32([3.0])], base=[np.float32([1.0])], num_examples=5,
                   gain=0.5, share=0.5)  # fmt: skip
    ((merged, _),) = aggregator.models(1.0)

    assert merged[0].tolist() == [11.0]


@pytest.mark.slow
@settings(deadline=None)
@given(updates, st.just(1.0) | st.floats(0.01, 2))
def test_nothing_that_came_in_is_written_to(taken, scale):
    for make in (StreamingMean, KeepAll):
        current = model(0)
        ours = [(model(seed), model(age), n, gain) for seed, age, n, gain in taken]
        arrays = current + [a for new, base, *_ in ours for a in (*new, *base)]
        before = [array.tobytes() for array in arrays]
        aggregator = make(current, SPECS)

        for update, base, n, gain in ours:
            aggregator.add(
                update, base=current if gain == 1.0 else base, num_examples=n,
                gain=gain, share=min(1.0, gain),
            )  # fmt: skip
        aggregator.models(scale)

        assert [array.tobytes() for array in arrays] == before


def test_folding_one_at_a_time_equals_folding_in_groups_bit_for_bit():
    current = frozen(model(0))
    results = []

    for group in (1, 2, 5):
        aggregator = StreamingMean(current, SPECS)
        aggregator._GROUP = group
        fill(aggregator, current, [(s, 0, s, 1.0) for s in range(10, 17)])
        ((merged, _),) = aggregator.models(1.0)
        results.append([array.tobytes() for array in merged])

    assert results[0] == results[1] == results[2]


def test_large_arrays_take_another_path_to_the_same_mean():
    rng = np.random.default_rng(5)
    size = LARGE + 3
    arrays = [rng.normal(size=size).astype(np.float32) for _ in range(4)]
    current, fresh, stale, base = arrays
    manifests = [
        Manifest((ArraySpec("w", (n,), np.dtype(np.float32)),)) for n in (size, 64)
    ]
    results = []

    for manifest, part in zip(manifests, (slice(None), slice(64)), strict=True):
        now = frozen([current[part].copy()])
        aggregator = StreamingMean(now, manifest)
        for n in (1, 3, 5):
            aggregator.add([fresh[part] * n], base=now, num_examples=n, gain=1.0,
                           share=1.0)  # fmt: skip
        aggregator.add([stale[part]], base=[base[part]], num_examples=2, gain=0.5,
                       share=0.5)  # fmt: skip
        results.append(aggregator.models(0.9)[0][0][0][:64])

    # A dozen float32 roundings of values below 25.
    assert np.allclose(results[0], results[1], rtol=0, atol=12 * 25 * 1.2e-7)


def test_a_renewed_mean_starts_anew_in_the_same_memory():
    current = frozen(model(0))
    used = StreamingMean(current, SPECS)
    fill(used, current, [(10, 0, 3, 1.0), (11, 1, 5, 0.5), (12, 0, 1, 1.0)])
    used.models(0.5)
    taken = [(13, 0, 3, 1.0), (14, 1, 5, 0.5)]
    other = frozen(model(4))

    renewed, new = used.renewed(other), StreamingMean(other, SPECS)
    fill(renewed, other, taken)
    fill(new, other, taken)
    ours, expected = (a.models(0.7)[0] for a in (renewed, new))

    assert ours[1] == expected[1]
    assert [a.tobytes() for a in ours[0]] == [a.tobytes() for a in expected[0]]


def test_a_kept_fresh_update_is_passed_on_untouched():
    current, update = frozen(model(0)), frozen(model(1))
    aggregator = KeepAll(current, SPECS)

    aggregator.add(update, base=current, num_examples=2, gain=1.0, share=1.0)

    assert aggregator.models(1.0)[0][0] is update
    assert aggregator.renewed(current).models(1.0) == []


def test_kept_half_precision_is_moved_in_single_precision():
    # The difference, 120 000, is more than half precision can hold.
    manifest, current = single(-60000.0, dtype=np.float16)
    aggregator = KeepAll(current, manifest)

    aggregator.add([np.float16([60000.0])], base=[np.float16([-60000.0])],
                   num_examples=1, gain=0.5, share=0.5)  # fmt: skip

    assert aggregator.models(1.0)[0][0][0].tolist() == [0.0]


@pytest.mark.parametrize("make", [StreamingMean, KeepAll])
@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 100, width=32), st.floats(1, 99), st.floats(0, 1)),
        min_size=1,
        max_size=5,
    ),
    st.floats(0.01, 50),
)
def test_a_statistic_stays_within_the_values_it_is_made_of(make, facts, scale):
    # Were variances treated as parameters, 10 + 50 * (0 - 10) would be negative.
    manifest, current = single(10.0, name="bn.running_var")
    aggregator = make(current, manifest)

    for value, n, share in facts:
        aggregator.add([np.float32([value])], base=[np.float32([99.0])],
                       num_examples=n, gain=50.0, share=share)  # fmt: skip

    low, high = min(10, *[v for v, *_ in facts], 10), max([10, *[v for v, *_ in facts]])
    for merged, _ in aggregator.models(scale):
        assert low - 1e-5 * high <= merged[0][0] <= high + 1e-5 * high
        assert merged[0][0] >= 0


@pytest.mark.parametrize("make", [StreamingMean, KeepAll])
def test_a_statistic_keeps_its_discount_under_a_scale_above_one(make):
    manifest, current = single(0.0, name="bn.running_mean")
    aggregator = make(current, manifest)

    aggregator.add([np.float32([8.0])], base=[np.float32([5.0])], num_examples=1,
                   gain=0.05, share=0.25)  # fmt: skip

    assert aggregator.models(10.0)[0][0][0].tolist() == [2.0]


@pytest.mark.parametrize("dtype", [np.int64, np.int8, np.uint8, np.bool_])
def test_a_counter_is_the_largest_and_keeps_its_dtype_and_shape(dtype):
    manifest = Manifest((ArraySpec("n", (), np.dtype(dtype)),))
    current, low, high = (np.array(v, dtype) for v in (1, 0, 100))
    aggregator = StreamingMean([current], manifest)

    for value in (high, low):
        aggregator.add([value], base=[current], num_examples=1, gain=0.5, share=0.5)
    (((merged,), _),) = aggregator.models(1.0)

    assert (merged.dtype, merged.shape) == (np.dtype(dtype), ())
    assert merged == high
    assert current == np.array(1, dtype)


def test_counters_beyond_the_integers_of_float64_are_exact():
    manifest = Manifest((ArraySpec("n", (), np.dtype(np.int64)),))
    current, update = np.array(2**53), np.array(2**53 + 1)
    aggregator = StreamingMean([current], manifest)

    aggregator.add([update], base=[current], num_examples=1, gain=1.0, share=1.0)

    assert int(aggregator.models(1.0)[0][0][0]) == 2**53 + 1


def test_the_largest_counters_leave_the_rest_alone():
    manifest = Manifest(
        (ArraySpec("w", (), np.dtype("f4")), ArraySpec("n", (), np.dtype("i8")))
    )
    current = [np.float32(1).reshape(()), np.array(3)]

    largest = largest_counters(
        [[np.array(9, "f4"), np.array(n)] for n in (2, 7, 5)], current, manifest
    )

    assert largest[0] is current[0]
    assert int(largest[1]) == 7


def test_a_mean_of_nothing_is_the_current_model():
    current = model(0)

    ((merged, total),) = StreamingMean(current, SPECS).models(1.0)

    assert total == 0
    assert all(a is b for a, b in zip(merged, current, strict=True))


@pytest.mark.parametrize(
    ("name", "dtype", "kind"),
    [
        ("layer.weight", "f4", Kind.PARAMETER),
        ("running_mean_of_things", "f4", Kind.PARAMETER),
        ("running_var", "f8", Kind.STATISTIC),
        ("a.b.running_mean", "f2", Kind.STATISTIC),
        ("a.num_batches_tracked", "i8", Kind.COUNTER),
        ("a.running_mean", "u1", Kind.COUNTER),
        ("mask", "?", Kind.COUNTER),
    ],
)
def test_the_kind_follows_from_dtype_and_name(name, dtype, kind):
    assert kind_of(ArraySpec(name, (2,), np.dtype(dtype))) is kind
