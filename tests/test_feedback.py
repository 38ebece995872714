"""Error feedback: nothing that was learned is lost, whatever becomes of a payload."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_sap.payload import decoder, encoder
from flower_sap.payload.dense import ArraySpec, Manifest
from flower_sap.payload.feedback import (
    DECAY,
    Sent,
    carried_over,
    largest_scale,
    load_sent,
    save_sent,
)
from flower_sap.payload.kept import KeptFile
from flower_sap.payload.layout import Layout, Treatment
from flower_sap.payload.wire_format import Header

LAYOUT = Layout(
    Manifest(
        (
            ArraySpec("a", (150, 120), np.dtype("float32")),
            ArraySpec("b", (7,), np.dtype("float32")),
        )
    ),
    Treatment(protect=("b",)),
)
ZEROS = [np.zeros(spec.shape, spec.dtype) for spec in LAYOUT.manifest.arrays]


def delta(number):
    rng = np.random.default_rng([5, number])
    return [
        rng.standard_normal(spec.shape).astype(np.float32)
        for spec in LAYOUT.manifest.arrays
    ]


def flat(arrays):
    return np.concatenate([array.reshape(-1) for array in arrays])


def encode(number, residual=None, budget=6000):
    return encoder.encode(
        delta(number), ZEROS, LAYOUT, budget=budget,
        header=Header(b"", 0, number), seed=(0, number), residual=residual,
    )  # fmt: skip


def kept(tmp_path, series="s"):
    return KeptFile(tmp_path, node="n", purpose="sent", series=series)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(["merged", "lost", "restart"]), min_size=1, max_size=8))
def test_what_was_merged_and_what_is_carried_over_is_all_that_was_learned(
    tmp_path_factory, outcomes
):
    folder = tmp_path_factory.mktemp("kept")
    file, acked = kept(folder), 0
    merged = np.zeros(LAYOUT.num_stream + 7)
    for number, outcome in enumerate(outcomes, 1):
        sent = load_sent(file, LAYOUT)  # each time from the disk, as after a restart
        carried = carried_over(sent, LAYOUT, acked=acked, number=number)
        payload = encode(number, carried)
        save_sent(file, Sent(number, payload.data, payload.error), LAYOUT)
        if outcome != "lost":
            acked = number
            merged += decoder.check(payload.data, LAYOUT).vector()
    rest = carried_over(
        load_sent(file, LAYOUT), LAYOUT, acked=acked, number=len(outcomes) + 1
    )

    learned = sum(
        flat(delta(n)).astype(np.float64) for n in range(1, len(outcomes) + 1)
    )
    np.testing.assert_allclose(merged + rest, learned, atol=2e-4)


def test_a_merged_payload_leaves_its_error_and_a_lost_one_all_of_itself():
    payload = encode(1)
    sent = Sent(1, payload.data, payload.error)

    committed = carried_over(sent, LAYOUT, acked=1, number=2)
    rolled_back = carried_over(sent, LAYOUT, acked=0, number=2)

    np.testing.assert_array_equal(committed, payload.error)
    np.testing.assert_allclose(rolled_back, flat(delta(1)), atol=1e-5)


def test_an_exact_payload_leaves_nothing_once_it_is_merged():
    sent = Sent(1, encode(1, budget=10**6).data, None)

    assert carried_over(sent, LAYOUT, acked=1, number=2) is None
    lost = carried_over(sent, LAYOUT, acked=0, number=2)
    np.testing.assert_allclose(lost, flat(delta(1)), atol=1e-3)  # 16 bits at the end


def test_what_is_carried_over_fades_with_each_message_missed():
    sent = Sent(1, encode(1).data, encode(1).error)

    fresh, faded = (carried_over(sent, LAYOUT, acked=1, number=n) for n in (2, 5))

    np.testing.assert_allclose(faded, fresh * DECAY**3, rtol=1e-6)
    assert carried_over(sent, LAYOUT, acked=1, number=12) is not None
    assert carried_over(sent, LAYOUT, acked=1, number=13) is None


def test_nothing_is_carried_over_from_a_later_message():
    sent = Sent(4, encode(4).data, encode(4).error)

    assert carried_over(sent, LAYOUT, acked=4, number=4) is None
    assert carried_over(None, LAYOUT, acked=0, number=1) is None


def test_a_residual_is_shortened_to_four_updates():
    assert largest_scale(16.0, 1.0) == 1.0
    assert largest_scale(64.0, 1.0) == 0.5
    residual = np.full(LAYOUT.num_stream + 7, 1e3, np.float32)

    update = decoder.check(encode(1, residual, 10**6).data, LAYOUT).vector()

    size = np.linalg.norm(flat(delta(1)))
    assert np.linalg.norm(update - flat(delta(1))) == pytest.approx(4 * size, rel=1e-3)


def test_a_kept_payload_of_another_model_is_not_used(tmp_path):
    payload = encode(1)
    save_sent(kept(tmp_path), Sent(1, payload.data, payload.error), LAYOUT)
    other = Layout(LAYOUT.manifest)

    assert load_sent(kept(tmp_path), LAYOUT).number == 1
    assert load_sent(kept(tmp_path), other) is None


@pytest.mark.parametrize("damage", [b"", b"x", b"\xff" * 64])
def test_a_damaged_file_is_as_good_as_none(tmp_path, damage):
    file = kept(tmp_path)
    save_sent(file, Sent(1, b"abc", None), LAYOUT)
    whole = file.path.read_bytes()

    file.path.write_bytes(damage + whole[: len(whole) // 2])

    assert load_sent(file, LAYOUT) is None


def test_a_file_is_replaced_whole(tmp_path):
    file = kept(tmp_path)
    save_sent(file, Sent(1, b"one", None), LAYOUT)
    save_sent(file, Sent(2, b"two", np.ones(3, np.float32)), LAYOUT)

    sent = load_sent(file, LAYOUT)

    assert (sent.number, sent.data) == (2, b"two")
    assert [path.name for path in tmp_path.iterdir()] == [file.path.name]


def test_files_of_old_runs_do_not_pile_up(tmp_path):
    for series in range(9):
        save_sent(kept(tmp_path, f"s{series}"), Sent(1, b"x", None), LAYOUT)

    assert len(list(tmp_path.iterdir())) == 4
    assert load_sent(kept(tmp_path, "s8"), LAYOUT) is not None
