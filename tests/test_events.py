"""The event log: one line an event, forever readable, never overwritten."""

import dataclasses
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_sap import events as ev
from flower_sap.errors import EventLogError

GOLDEN = Path(__file__).parent / "golden" / "events.jsonl"
STARTED = ev.RunStarted(0.0, "SemiAsync(FedAvg())", 2, 12)
ALL = [
    STARTED,
    ev.Dispatched(0.5, "a", 7, "train", 0, 140, 12, 2048),
    ev.Arrived(1.5, "a", 7, "train", 0, 141, 5.0, 10, 0.25, 0.125),
    ev.Merged(1.5, "a", 7, 1, 0, 0, 1.0, 5.0),
    ev.Aggregated(1.5, 1, 1),
    ev.Synchronized(1.5, 1, 0),
    ev.Evaluated(1.5, 1, 1, "server", {"accuracy": 0.5, "per-class": [0.25, 0.75]}),
    ev.Failed(2.0, "b", 8, "train", 1, 'out of "memory"\nat line 3 ü'),
    ev.Expired(3.0, "c", 9, "evaluate", 1, 1.5),
    ev.Rejected(3.0, "d", 7, "train", 1, "1 of 3 values NaN"),
    ev.Dropped(3.0, "e", 7, "train", 1, "the run is over"),
    ev.ResidualLost(3.25, "e", 7, 4, 0),
    ev.RunEnded(3.5, 1, "finished"),
]

FIELDS = {
    "float": st.floats(allow_nan=False),
    "int": st.integers(),
    "str": st.text(),
    "float | None": st.none() | st.floats(allow_nan=False),
    "int | None": st.none() | st.integers(),
    "Mapping": st.dictionaries(st.text(), st.floats(allow_nan=False) | st.integers()),
}


def any_of(kind) -> st.SearchStrategy:
    def named(annotation) -> str:
        if "Mapping" in str(annotation):
            return "Mapping"
        return getattr(annotation, "__name__", str(annotation))

    return st.builds(
        kind, **{f.name: FIELDS[named(f.type)] for f in dataclasses.fields(kind)}
    )


def write(path: Path, *events) -> Path:
    log = ev.JsonLines(path)
    for event in (*events, ev.RunEnded(9.0, 0, "finished")):
        log(event)
    return path


def test_the_format_is_the_one_of_schema_2():
    written = "".join(ev.to_json(event) + "\n" for event in ALL)

    assert written == GOLDEN.read_text(encoding="utf-8")


def test_a_log_comes_back_as_it_was():
    assert list(ev.read_events(GOLDEN)) == ALL


def test_a_log_of_schema_1_stays_readable():
    events = list(ev.read_events(GOLDEN.with_name("events-1.jsonl")))

    assert events[0] == dataclasses.replace(STARTED, schema=1)
    assert events[1] == ev.Dispatched(0.5, "a", 7, "train", 0, 140)
    assert len(events) == len(ALL) - 1


def test_every_kind_of_event_is_in_the_golden_log():
    assert {type(event) for event in ALL} == set(get_args(ev.Event))


@given(st.one_of([any_of(kind) for kind in get_args(ev.Event)]))
def test_an_event_comes_back_from_its_line_as_it_was(event):
    line = ev.to_json(event)

    assert ev.from_json(line) == event
    assert "\n" not in line


@pytest.mark.parametrize(
    "line",
    [
        "",
        "null",
        "[]",
        "3",
        "{",
        "{}",
        '{"event": "landed", "time": 1.0}',
        '{"event": []}',
        '{"event": "aggregated"}',
        '{"event": "aggregated", "time": 1, "version": 1, "num_updates": 1, "x": 1}',
        "[" * 100_000,
    ],
)
def test_a_line_that_is_no_event_is_refused(line):
    with pytest.raises(EventLogError, match="not an event of schema 2: ") as caught:
        ev.from_json(line)

    assert len(str(caught.value)) < 400


def test_a_log_holds_what_happened_in_order(tmp_path):
    path = write(tmp_path / "deep" / "events.jsonl", *ALL[:-1])

    assert list(ev.read_events(path)) == [*ALL[:-1], ev.RunEnded(9.0, 0, "finished")]


@given(cut=st.integers(1, 200))
def test_a_torn_last_line_is_skipped(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("torn") / "events.jsonl"
    whole = GOLDEN.read_bytes()
    path.write_bytes(whole[:-cut])

    assert list(ev.read_events(path)) == ALL[: whole[:-cut].count(b"\n")]


def test_a_log_that_was_never_written_to_holds_nothing(tmp_path):
    (tmp_path / "events.jsonl").touch()

    assert list(ev.read_events(tmp_path / "events.jsonl")) == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (ev.to_json(dataclasses.replace(STARTED, schema=3)), "found: 3"),
        (ev.to_json(ALL[1]), "found: no header"),
    ],
)
def test_a_log_of_another_schema_is_refused(tmp_path, line, found):
    path = tmp_path / "events.jsonl"
    path.write_text(line + "\n", encoding="utf-8")

    with pytest.raises(EventLogError, match=rf"not an event log of schema 2 \({found}"):
        list(ev.read_events(path))


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"\xff\xfe\x00\n")

    with pytest.raises(EventLogError, match="not an event of schema 2"):
        list(ev.read_events(path))


def test_a_damaged_line_in_the_middle_is_refused(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text(f"{ev.to_json(STARTED)}\ntorn\n{ev.to_json(ALL[-1])}\n")

    events = ev.read_events(path)

    assert next(events) == STARTED
    with pytest.raises(EventLogError, match="not an event of schema 2: 'torn"):
        next(events)


def test_earlier_logs_are_kept_under_numbers(tmp_path):
    path = tmp_path / "events.jsonl"

    for rounds in (1, 2, 3):
        write(path, ev.RunStarted(0.0, "s", rounds, 1))

    found = {p.name: next(ev.read_events(p)).num_rounds for p in tmp_path.iterdir()}
    assert found == {"events.jsonl.1": 1, "events.jsonl.2": 2, "events.jsonl": 3}


def test_events_are_on_disk_after_so_many(tmp_path):
    path = tmp_path / "events.jsonl"
    log = ev.JsonLines(path, flush_every=2)

    counts = []
    for event in ALL[:5]:
        log(event)
        counts.append(len(list(ev.read_events(path))))
    log(ALL[-1])

    assert counts == [0, 2, 2, 4, 4]
    assert len(list(ev.read_events(path))) == 6


@pytest.mark.parametrize("count", [0, -1, float("nan")])
def test_a_log_that_never_reaches_the_disk_is_refused(tmp_path, count):
    with pytest.raises(
        ValueError, match=f"flush_every must be >= 1 event, got {count}"
    ):
        ev.JsonLines(tmp_path / "events.jsonl", flush_every=count)

    assert list(tmp_path.iterdir()) == []
