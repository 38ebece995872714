"""From a reply to a checked update, or to a sentence that says why not."""

import math

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from flower_sap.errors import UpdateRejected
from flower_sap.payload.dense import Manifest
from flower_sap.strategies.updates import (
    Expected,
    WorkReport,
    read_evaluation,
    read_metrics,
    read_update,
)

ARRAYS = ArrayRecord({"w": Array(np.array([1.0, 2.0], np.float32))})
MANIFEST = Manifest.of(ARRAYS)


def reply(num_examples=5, *, report=None, **metrics) -> RecordDict:
    records = {
        "arrays": ARRAYS,
        "metrics": MetricRecord(
            {"num-examples": num_examples}
            | {name.replace("_", "-"): value for name, value in metrics.items()}
        ),
    }
    return RecordDict(records | ({} if report is None else {"sap": report}))


def read(content: RecordDict, base_version: int = 3):
    return read_update(content, Expected(MANIFEST, base_version, "num-examples"))


def test_a_good_reply_becomes_an_update():
    content = reply(loss=0.5)

    update = read(content)

    assert update.arrays[0].tolist() == [1.0, 2.0]
    assert update.num_examples == 5.0
    assert dict(update.metrics) == {"num-examples": 5, "loss": 0.5}
    assert update.work == WorkReport()


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (0, "must be > 0 and finite, got 0"),
        (0.0, "must be > 0 and finite, got 0.0"),
        (-1, "must be > 0 and finite, got -1"),
        (math.nan, "must be > 0 and finite, got nan"),
        (math.inf, "must be > 0 and finite, got inf"),
        (1e16, r"must be > 0 and finite, got 1e\+16"),
        ([3], r"must be a number, got \[3\]"),
        ([], r"must be a number, got \[\]"),
    ],
)
def test_an_impossible_number_of_examples_is_rejected(count, message):
    for check in (read, lambda content: read_evaluation(content, "num-examples")):
        with pytest.raises(UpdateRejected, match=f"metric 'num-examples' {message}"):
            check(reply(count))


def test_a_number_of_examples_that_is_a_bool_is_rejected():
    # Flower's records refuse it; a grid that hands records over as they are may not.
    metrics = MetricRecord({"num-examples": 1})
    metrics._data = {"num-examples": True}
    content = RecordDict({"arrays": ARRAYS, "metrics": metrics})

    with pytest.raises(UpdateRejected, match="must be a number, got True"):
        read(content)


@given(st.floats(1e-300, 1e15) | st.integers(1, 10**15))
def test_any_other_number_of_examples_is_taken(count):
    assert read(reply(count)).num_examples == float(count)


def test_a_missing_number_of_examples_names_what_was_found():
    content = RecordDict({"arrays": ARRAYS, "metrics": MetricRecord({"n": 1})})

    with pytest.raises(UpdateRejected, match=r"'num-examples' is missing; found \['n'"):
        read(content)


def test_a_reason_does_not_grow_with_what_a_client_sends():
    wordy = MetricRecord({f"metric-{n}": n for n in range(1000)})
    long_count = reply([1] * 100_000)
    far_version = reply(report=ConfigRecord({"base-version": "v" * 100_000}))

    for content in (
        RecordDict({"a": ARRAYS, "m": wordy}), long_count, far_version
    ):  # fmt: skip
        with pytest.raises(UpdateRejected, match=r"\.\.\.") as caught:
            read(content)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("names", [[], ["a", "b"]])
def test_a_reply_holds_exactly_one_model(names):
    content = RecordDict(dict.fromkeys(names, ARRAYS))
    content["metrics"] = MetricRecord({"num-examples": 1})

    with pytest.raises(
        UpdateRejected, match=f"{len(names)} ArrayRecords .* expected 1"
    ):
        read(content)


@pytest.mark.parametrize("names", [[], ["a", "b"]])
def test_a_reply_holds_exactly_one_record_of_metrics(names):
    content = RecordDict({n: MetricRecord({"num-examples": 1}) for n in names})

    with pytest.raises(
        UpdateRejected, match=f"{len(names)} MetricRecords .* expected 1"
    ):
        read_metrics(content)


@pytest.mark.parametrize("claimed", [2, 4, -1, 10**13, "3", [3], 3.5])
def test_an_update_of_another_base_version_is_rejected(claimed):
    report = ConfigRecord({"base-version": claimed})

    with pytest.raises(UpdateRejected, match="but the message carried version 3"):
        read(reply(report=report))


def test_an_update_that_echoes_its_base_version_or_nothing_is_taken():
    assert read(reply(report=ConfigRecord({"base-version": 3}))).num_examples == 5
    assert read(reply(report=ConfigRecord())).num_examples == 5


def test_the_report_tells_of_the_work_and_goes_before_the_metrics():
    report = ConfigRecord(
        {"compute-seconds": 2.5, "num-steps": 7, "samples-processed": 70}
    )

    update = read(reply(report=report, num_steps=9))

    assert update.work == WorkReport(2.5, num_samples=70, num_steps=7)


def test_the_metrics_tell_of_the_work_where_there_is_no_report():
    update = read(reply(num_steps=9, samples_processed=90))

    assert update.work == WorkReport(None, num_samples=90, num_steps=9)


@pytest.mark.parametrize("odd", [0, -1, math.nan, math.inf, 1e13, "7", True, [7], b"7"])
def test_an_odd_claim_about_work_is_ignored(odd):
    report = ConfigRecord({"num-steps": odd, "samples-processed": odd})

    assert read(reply(report=report)).work == WorkReport()


@pytest.mark.parametrize("odd", [0.0, -1.0, math.nan, math.inf, "7", True, [7.0]])
def test_an_odd_claim_about_time_is_ignored(odd):
    report = ConfigRecord({"compute-seconds": odd})

    assert read(reply(report=report)).work == WorkReport()


def test_a_report_of_another_kind_is_ignored():
    content = RecordDict(
        {"arrays": ARRAYS, "sap": MetricRecord({"num-examples": 5, "num-steps": 4})}
    )

    assert read(content).work == WorkReport(num_steps=4)


def test_a_model_that_does_not_fit_is_rejected():
    content = reply()
    content["arrays"] = ArrayRecord({"w": Array(np.zeros((2, 1), np.float32))})

    with pytest.raises(UpdateRejected, match=r"'w' is float32\[2, 1\], expected"):
        read(content)


def test_an_evaluation_gives_its_metrics():
    content = RecordDict({"m": MetricRecord({"num-examples": 5, "loss": 0.5})})

    assert dict(read_evaluation(content, "num-examples")) == {
        "num-examples": 5,
        "loss": 0.5,
    }
