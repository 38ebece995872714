"""From a node's reply to a checked update, or to one sentence that says why not.

A reply holds one `ArrayRecord` (the trained model) and one `MetricRecord` with the
example count. `sap_mod` adds a `ConfigRecord` under ``"sap"`` with the base version
and the work done; replies of unchanged ClientApps come without it.
"""

import math
from dataclasses import dataclass

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flower_sap.errors import UpdateRejected
from flower_sap.payload import decoder
from flower_sap.payload.decoder import CodedUpdate
from flower_sap.payload.dense import Arrays, Manifest, decode, short
from flower_sap.payload.layout import Layout
from flower_sap.payload.wire_format import STYPE
from flower_sap.records import records_of
from flower_sap.wire import (
    BASE_VERSION,
    COMPUTE_SECONDS,
    NUM_SAMPLES,
    NUM_STEPS,
    PAYLOAD_ENTROPY,
    PAYLOAD_HOLDS,
    PAYLOAD_RESIDUAL,
    REPORT_KEY,
    UPLINK,
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
    uplink : float or None
        Rate that the node measured (B/s).
    residual : int or None
        The dispatch that the residual in its payload is from; 0: there was none.
    holds : int or None
        The dispatch whose model the node keeps.
    has_entropy_coder : bool
        Whether it can make payloads of any size.
    """

    compute_seconds: float | None = None
    num_samples: int | None = None
    num_steps: int | None = None
    uplink: float | None = None
    residual: int | None = None
    holds: int | None = None
    has_entropy_coder: bool = True


@dataclass(frozen=True, slots=True)
class Expected:
    """What the reply to one message may be.

    Attributes
    ----------
    manifest : Manifest
        Of the model, for plain arrays.
    base_version : int
        That the message carried.
    weighted_by : str
        Metric that holds the example count.
    layout : Layout or None
        Of a payload, where one was asked for.
    number : int
        The dispatch's, of its node.
    budget : int or None
        Most bytes that were granted.
    """

    manifest: Manifest
    base_version: int
    weighted_by: str
    layout: Layout | None = None
    number: int = 0
    budget: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ClientUpdate:
    """A reply that passed every check.

    Attributes
    ----------
    arrays : Arrays or CodedUpdate
        The trained model in the manifest's order, as views of the reply's bytes; or the
        checked payload that says how it differs from the one received.
    num_examples : float
        Local examples it stands for, > 0.
    metrics : MetricRecord
        The reply's metrics, the example count included.
    work : WorkReport
        The work behind it.
    """

    arrays: Arrays | CodedUpdate
    num_examples: float
    metrics: MetricRecord
    work: WorkReport


def read_update(content: RecordDict, expected: Expected) -> ClientUpdate:
    """Return the update in a train reply.

    Parameters
    ----------
    content : RecordDict
        The reply's content.
    expected : Expected
        What it may be.

    Raises
    ------
    UpdateRejected
        With the reason, if any part is missing, malformed or not finite.
    """
    records = records_of(content, ArrayRecord)
    if len(records) != 1:
        raise UpdateRejected(f"{len(records)} ArrayRecords in the reply, expected 1")
    metrics = read_metrics(content)
    num_examples = _num_examples(metrics, expected.weighted_by)
    work = _work(content, metrics, expected.base_version)
    return ClientUpdate(_arrays(records[0], expected), num_examples, metrics, work)


def _arrays(record: ArrayRecord, expected: Expected) -> Arrays | CodedUpdate:
    arrays = list(record.values())
    if len(arrays) != 1 or arrays[0].stype != STYPE or expected.layout is None:
        # A client that knows no payloads answers with plain arrays.
        return decode(record, expected.manifest)
    return decoder.check(
        arrays[0].data,
        expected.layout,
        base_version=expected.base_version,
        number=expected.number,
        largest_nbytes=expected.budget,
    )


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
        uplink=_positive(report.get(UPLINK)),
        residual=_number(report.get(PAYLOAD_RESIDUAL)),
        holds=_number(report.get(PAYLOAD_HOLDS)),
        has_entropy_coder=report.get(PAYLOAD_ENTROPY) != 0,
    )


def _number(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 2**63 else None


def _positive(value: object) -> float | None:
    """Return a usable duration; a client's odd claim is ignored, not trusted."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value < math.inf else None


def _count(value: object) -> int | None:
    number = _positive(value)
    return int(number) if number is not None and 1 <= number <= 1e12 else None


def relative_error_of(update: ClientUpdate) -> float | None:
    """Return the error that a payload's encoder measured; None for plain arrays."""
    if isinstance(update.arrays, CodedUpdate):
        return update.arrays.header.relative_error
    return None
