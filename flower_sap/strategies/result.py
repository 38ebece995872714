"""What a run returns: Flower's `Result`, and how it got there."""

from dataclasses import dataclass, field

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """The run at the end of one round.

    Attributes
    ----------
    time : float
        Seconds on the run's clock.
    round, version : int
        Flower's round, and the model version it ended with.
    num_updates : int
        Updates merged so far.
    bytes_down, bytes_up : int
        Payload bytes sent and received so far.
    metrics : dict
        Metrics of the server's `evaluate_fn`; empty without one.
    """

    time: float
    round: int
    version: int
    num_updates: int
    bytes_down: int
    bytes_up: int
    metrics: dict[str, float | list[float]]


@dataclass(repr=False)
class RunResult(Result):
    """Flower's result, with the history and the times of the run.

    Attributes
    ----------
    history : list of HistoryPoint
        One point per round, and one before the first.
    """

    history: list[HistoryPoint] = field(default_factory=list)


def numbers(record: MetricRecord | None) -> dict[str, float | list[float]]:
    """Return a metric record as plain numbers."""
    if record is None:
        return {}
    return {
        name: [float(v) for v in value] if isinstance(value, list) else float(value)
        for name, value in record.items()
    }


def copy_record(arrays: ArrayRecord) -> ArrayRecord:
    """Return a record of the same arrays that a callback may change."""
    return ArrayRecord(dict(arrays))
