"""From a node's reply to a checked update, or to one sentence that says why not.

A reply holds one `ArrayRecord` (the trained model) and one `MetricRecord` with the
example count. `sap_mod` adds a `ConfigRecord` under ``"sap"`` with the base version
and the work done; replies of unchanged ClientApps come without it.
"""

import math
from dataclasses import dataclass

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flower_sap.errors import UpdateRejected
from flower_sap.payload.dense import Arrays, Manifest, decode, short
from flower_sap.records import records_of
from flower_sap.wire import (
    BASE_VERSION,
    COMPUTE_SECONDS,
    NUM_SAMPLES,
    NUM_STEPS,
    REPORT_KEY,
)

_LARGEST_COUNT = 1e15  # beyond, a weighted sum of float32 arrays overflows


@dataclass(frozen=True, slots=True)
class WorkReport:
    """What a client says about its work; None where it says nothing.

    Attributes
    ----------
    compute_seconds : float or None
        Time spent training (s).
    num_samples, num_steps : int or None
        Samples processed (examples times epochs), and optimizer steps.
    """

    compute_seconds: float | None = None
    num_samples: int | None = None
    num_steps: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ClientUpdate:
    """A reply that passed every check.

    Attributes
    ----------
    arrays : Arrays
        The trained model in the manifest's order; views of the reply's bytes.
    num_examples : float
        Local examples it stands for, > 0.
    metrics : MetricRecord
        The reply's metrics, the example count included.
    work : WorkReport
        The work behind it.
    """

    arrays: Arrays
    num_examples: float
    metrics: MetricRecord
    work: WorkReport


def read_update(
    content: RecordDict, *, manifest: Manifest, base_version: int, weighted_by: str
) -> ClientUpdate:
    """Return the update in a train reply.

    Parameters
    ----------
    content : RecordDict
        The reply's content.
    manifest : Manifest
        What the model is.
    base_version : int
        The version that the message carried.
    weighted_by : str
        Metric that holds the example count.

    Raises
    ------
    UpdateRejected
        With the reason, if any part is missing, malformed or not finite.
    """
    records = records_of(content, ArrayRecord)
    if len(records) != 1:
        raise UpdateRejected(f"{len(records)} ArrayRecords in the reply, expected 1")
    metrics = read_metrics(content)
    num_examples = _num_examples(metrics, weighted_by)
    work = _work(content, metrics, base_version)
    return ClientUpdate(decode(records[0], manifest), num_examples, metrics, work)


def read_evaluation(content: RecordDict, weighted_by: str) -> MetricRecord:
    """Return the metrics in an evaluate reply.

    Raises
    ------
    UpdateRejected
        If they or their example count are missing or malformed.
    """
    metrics = read_metrics(content)
    _num_examples(metrics, weighted_by)
    return metrics


def read_metrics(content: RecordDict) -> MetricRecord:
    """Return the one MetricRecord of a reply.

    Raises
    ------
    UpdateRejected
        If there is none or more than one.
    """
    records = records_of(content, MetricRecord)
    if len(records) != 1:
        raise UpdateRejected(f"{len(records)} MetricRecords in the reply, expected 1")
    return records[0]


def _num_examples(metrics: MetricRecord, key: str) -> float:
    if key not in metrics:
        raise UpdateRejected(f"metric {key!r} is missing; found {short(list(metrics))}")
    value = metrics[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UpdateRejected(f"metric {key!r} must be a number, got {short(value)}")
    if not 0 < value <= _LARGEST_COUNT:  # also rejects NaN
        raise UpdateRejected(f"metric {key!r} must be > 0 and finite, got {value}")
    return float(value)


def _work(content: RecordDict, metrics: MetricRecord, base_version: int) -> WorkReport:
    report = content.get(REPORT_KEY)
    if not isinstance(report, ConfigRecord):
        report = ConfigRecord()
    claimed = report.get(BASE_VERSION, base_version)
    if claimed != base_version:
        raise UpdateRejected(
            f"trained from base version {short(claimed)}, but the message carried "
            f"version {base_version}"
        )
    return WorkReport(
        compute_seconds=_positive(report.get(COMPUTE_SECONDS)),
        num_samples=_count(report.get(NUM_SAMPLES, metrics.get(NUM_SAMPLES))),
        num_steps=_count(report.get(NUM_STEPS, metrics.get(NUM_STEPS))),
    )


def _positive(value: object) -> float | None:
    """Return a usable duration; a client's odd claim is ignored, not trusted."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value < math.inf else None


def _count(value: object) -> int | None:
    number = _positive(value)
    return int(number) if number is not None and 1 <= number <= 1e12 else None
