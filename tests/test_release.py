"""The released model: the latest version, or an average that the nodes never see."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_sap.payload.dense import ArraySpec, Manifest
from flower_sap.strategies import Averaged, Latest
from flower_sap.strategies.release import Released

MANIFEST = Manifest(
    (
        ArraySpec("weight", (2,), np.dtype(np.float32)),
        ArraySpec("bn.num_batches_tracked", (), np.dtype(np.int64)),
    )
)


def model(value, count=0):
    return [np.full(2, value, np.float32), np.array(count)]


def follow(released, arrays, version, num_updates=1):
    released.follow(arrays, num_updates=num_updates, num_nodes=10, version=version)


def test_the_latest_version_is_released_untouched():
    released = Released(Latest(), model(0.0), MANIFEST)
    newest = model(3.0)

    follow(released, newest, version=1)

    assert released.arrays is newest


@given(st.floats(0.01, 100), st.integers(1, 50), st.integers(1, 50), st.integers(1, 99))
def test_a_share_is_in_the_unit_interval(passes, num_updates, num_nodes, version):
    share = Averaged(passes).share(num_updates, num_nodes, version)

    assert 0 < share <= 1


def test_a_late_version_moves_the_average_by_its_part_of_the_span():
    released = Released(Averaged(passes=2.0), model(0.0), MANIFEST)

    # 1 update of 2 x 10: a share of 1/20, long after the start.
    follow(released, model(20.0), version=1000)

    np.testing.assert_allclose(released.arrays[0], 1.0, rtol=1e-6)


def test_the_first_model_is_soon_forgotten():
    released = Released(Averaged(passes=100.0), model(1.0), MANIFEST)

    for version in range(1, 21):
        follow(released, model(0.0), version)

    assert released.arrays[0].max() < 0.01


def test_an_average_of_one_model_is_that_model_to_the_last_bit():
    start = [np.array([0.1, 1e-30], np.float32), np.array(0)]
    released = Released(Averaged(), start, MANIFEST)

    for version in range(1, 50):
        follow(released, [a.copy() for a in start], version)

    assert released.arrays[0].tobytes() == start[0].tobytes()


def test_counters_are_the_latest_and_dtypes_the_models_own():
    released = Released(Averaged(), model(0.0), MANIFEST)

    follow(released, model(4.0, count=7), version=90)

    assert released.arrays[1] == 7
    assert [a.dtype for a in released.arrays] == [np.float32, np.int64]


def test_averaging_never_writes_to_a_version():
    first, second = model(0.0), model(4.0)
    released = Released(Averaged(), first, MANIFEST)

    follow(released, second, version=90)
    follow(released, model(8.0), version=91)

    assert first[0].tolist() == [0.0, 0.0]
    assert second[0].tolist() == [4.0, 4.0]


@pytest.mark.parametrize("passes", [0, -1, float("nan"), float("inf")])
def test_a_span_without_length_is_refused(passes):
    with pytest.raises(ValueError, match="passes must be > 0"):
        Averaged(passes)
