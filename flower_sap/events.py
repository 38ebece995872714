"""What happened in a run, as small records, and who is told.

One event is one line of `events.jsonl`: a JSON object with ``event`` (the record's
name in lower case) and its fields. The first line is `RunStarted` with ``schema``,
the version of this format; a reader refuses another one. Times are seconds on the
run's clock, sizes are bytes.

Every dispatched message ends exactly once. A train message ends as `Merged`,
`Rejected`, `Failed`, `Expired` or `Dropped`; an evaluate message ends as `Arrived`
(its metrics then count) or as one of the last four.
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, TypeAlias

from flower_sap.checks import check_count
from flower_sap.errors import EventLogError

SCHEMA = 2
_READABLE = (1, 2)  # schema 1 lacks `ResidualLost`, `budget` and `relative_error`


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The run began; `strategy` is the expression that builds its strategy."""

    time: float
    strategy: str
    num_rounds: int
    model_nbytes: int
    schema: int = SCHEMA


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A message with the model of `base_version` went to a node."""

    time: float
    message_id: str
    node_id: int
    purpose: str
    base_version: int
    nbytes: int
    local_steps: int | None = None
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class Arrived:
    """A good reply came back."""

    time: float
    message_id: str
    node_id: int
    purpose: str
    base_version: int
    nbytes: int
    num_examples: float
    num_samples: int | None
    compute_seconds: float | None
    relative_error: float | None = None


@dataclass(frozen=True, slots=True)
class Merged:
    """An update became part of `version`; `weight` multiplied its delta."""

    time: float
    message_id: str
    node_id: int
    version: int
    base_version: int
    staleness: int
    weight: float
    num_examples: float


@dataclass(frozen=True, slots=True)
class Aggregated:
    """A new model version was made of `num_updates` updates."""

    time: float
    version: int
    num_updates: int


@dataclass(frozen=True, slots=True)
class Synchronized:
    """All nodes continue from `version`; `num_late` are still out past their grace."""

    time: float
    version: int
    num_late: int


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Metrics of `version` at the end of `round`, from the server or the clients."""

    time: float
    version: int
    round: int
    where: str
    metrics: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Failed:
    """A message was refused or answered with an error."""

    time: float
    message_id: str
    node_id: int
    purpose: str
    base_version: int
    reason: str


@dataclass(frozen=True, slots=True)
class Expired:
    """No reply came within the time allowed; a later one will not be asked for."""

    time: float
    message_id: str
    node_id: int
    purpose: str
    base_version: int
    waited: float


@dataclass(frozen=True, slots=True)
class Rejected:
    """A reply came, but cannot be used; `reason` says why."""

    time: float
    message_id: str
    node_id: int
    purpose: str
    base_version: int
    reason: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """A message or its good reply was left out by a stated rule."""

    time: float
    message_id: str
    node_id: int
    purpose: str
    base_version: int
    reason: str


@dataclass(frozen=True, slots=True)
class ResidualLost:
    """A node no longer has what its payload number `expected` did not say.

    It went on from the payload `found` instead; 0 is from nothing.
    """

    time: float
    message_id: str
    node_id: int
    expected: int
    found: int


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run is over; `reason` is "finished" or the error that ended it."""

    time: float
    version: int
    reason: str


Event: TypeAlias = (
    RunStarted
    | Dispatched
    | Arrived
    | Merged
    | Aggregated
    | Synchronized
    | Evaluated
    | Failed
    | Expired
    | Rejected
    | Dropped
    | ResidualLost
    | RunEnded
)
_KINDS = {
    kind.__name__.lower(): kind
    for kind in (
        RunStarted,
        Dispatched,
        Arrived,
        Merged,
        Aggregated,
        Synchronized,
        Evaluated,
        Failed,
        Expired,
        Rejected,
        Dropped,
        ResidualLost,
        RunEnded,
    )
}


class Observer(Protocol):
    """Whoever wants to hear of events, in the order in which they happen."""

    def __call__(self, event: Event) -> None:
        """Take note of `event`."""
        ...


def to_json(event: Event) -> str:
    """Return the event as one line of JSON, without the newline."""
    fields = {
        field.name: getattr(event, field.name) for field in dataclasses.fields(event)
    }
    return json.dumps({"event": type(event).__name__.lower(), **fields})


def from_json(line: str) -> Event:
    """Return the event that `to_json` wrote.

    Raises
    ------
    EventLogError
        If the line is not an event of this schema.
    """
    try:
        fields = json.loads(line)
        return _KINDS[fields.pop("event")](**fields)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise EventLogError(
            f"not an event of schema {SCHEMA}: {line[:120]!r} ({error})"
        ) from error


class JsonLines:
    """An `Observer` that appends each event to a file.

    A file that is already there belongs to an earlier run: it is kept, renamed to
    ``<name>.1``, ``<name>.2``, ... Lines are buffered and on disk at the end of the
    run, and at the latest after `flush_every` events.
    """

    def __init__(self, path: Path, *, flush_every: int = 256) -> None:
        check_count("flush_every", flush_every, least=1, unit="event")
        path.parent.mkdir(parents=True, exist_ok=True)
        _keep_earlier(path)
        self.path = path
        self._flush_every = flush_every
        self._unflushed = 0
        self._file: IO[str] = path.open("x", encoding="utf-8")

    def __call__(self, event: Event) -> None:
        """Write `event`; close the file after `RunEnded`."""
        self._file.write(to_json(event) + "\n")
        self._unflushed += 1
        if isinstance(event, RunEnded):
            self._file.close()
        elif self._unflushed >= self._flush_every:
            self._file.flush()
            self._unflushed = 0


def _keep_earlier(path: Path) -> None:
    if not path.exists():
        return
    number = 1
    while path.with_name(f"{path.name}.{number}").exists():
        number += 1
    os.replace(path, path.with_name(f"{path.name}.{number}"))


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of a log, as far as it was written.

    A last line without its newline, as a killed process leaves it, is skipped.

    Raises
    ------
    EventLogError
        If the file is not an event log of this schema.
    """
    # What is no text is no event either, and is refused as one.
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines):
            if not line.endswith("\n"):
                return
            if number == 0:
                _check_header(line, path)
            yield from_json(line)


def _check_header(line: str, path: Path) -> None:
    event = from_json(line)
    if not isinstance(event, RunStarted) or event.schema not in _READABLE:
        found = event.schema if isinstance(event, RunStarted) else "no header"
        raise EventLogError(
            f"{path} is not an event log of schema {SCHEMA} (found: {found}). "
            "Read it with the release of flower-sap that wrote it."
        )
