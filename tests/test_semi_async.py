"""Whole stories in virtual time, each checked by hand.

Node 0, 1, ... are partitions; times are seconds. A merge is told as (time, node,
version, staleness, weight).
"""

from math import sqrt

import numpy as np
import pytest
from flwr.serverapp.strategy import FedAvg

from flower_sap import events as ev
from flower_sap.strategies import (
    BoundedStaleness,
    Buffered,
    Constant,
    Deadline,
    FirstOf,
    FixedWork,
    FullyAsync,
    FullySync,
    Interval,
    ModelMixing,
    RunOptions,
    SemiAsync,
    Tiered,
)
from tests.fakes import Node, emulated, fedavg, merges, model, run


def syncs(events):
    return [
        (e.time, e.version, e.num_late)
        for e in events
        if isinstance(e, ev.Synchronized)
    ]


def test_a_late_update_joins_the_version_that_is_open_when_it_arrives():
    told = run([Node(1.0, delta=1), Node(2.5, delta=8)], Buffered(1), rounds=4)

    assert merges(told.events) == [
        (1.0, 0, 1, 0, 1.0),
        (2.0, 0, 2, 0, 1.0),
        (2.5, 1, 3, 2, 3**-0.5),
        (3.0, 0, 4, 1, 2**-0.5),
    ]
    assert told.weights == pytest.approx([2 + 8 / sqrt(3) + 1 / sqrt(2)] * 2)


def test_the_log_of_a_run_tells_everything_in_order():
    told = run([Node(1.0), Node(2.5, examples=3)], Buffered(1), rounds=2)

    (sent, *_) = told.of(ev.Dispatched)
    (back, *_) = told.of(ev.Arrived)
    size, up = sent.nbytes, back.nbytes
    assert told.events == [
        ev.RunStarted(
            0.0,
            "SemiAsync(FedAvg(), sync=Buffered(k=1), "
            "staleness=Polynomial(exponent=0.5), contribution=Equal(), "
            "merge=Discounted(server_lr=1.0), work=FixedWork(steps=None), "
            "release=Latest(), concurrency=None, seed=0)",
            2,
            8,
        ),
        ev.Dispatched(0.0, "message-0", 1001, "train", 0, size),
        ev.Dispatched(0.0, "message-1", 1002, "train", 0, size),
        ev.Arrived(1.0, "message-0", 1001, "train", 0, up, 1.0, 8, None),
        ev.Merged(1.0, "message-0", 1001, 1, 0, 0, 1.0, 1.0),
        ev.Aggregated(1.0, 1, 1),
        ev.Dispatched(1.0, "message-2", 1001, "train", 1, size),
        ev.Arrived(2.0, "message-2", 1001, "train", 1, up, 1.0, 8, None),
        ev.Merged(2.0, "message-2", 1001, 2, 1, 0, 1.0, 1.0),
        ev.Aggregated(2.0, 2, 1),
        ev.Dropped(2.0, "message-1", 1002, "train", 0, "the run is over"),
        ev.RunEnded(2.0, 2, "finished"),
    ]


def test_buffered_merges_every_k_updates_whoever_sent_them():
    nodes = [Node(1.0), Node(2.25, delta=4, examples=3), Node(3.125, delta=16)]

    told = run(nodes, Buffered(2), rounds=3)

    assert merges(told.events) == [
        (2.0, 0, 1, 0, 1.0),
        (2.0, 0, 1, 0, 1.0),
        (3.0, 1, 2, 1, 2**-0.5),
        (3.0, 0, 2, 0, 1.0),
        (4.0, 2, 3, 2, 3**-0.5),
        (4.0, 0, 3, 0, 1.0),
    ]
    second = (3 * 4 / sqrt(2) + 1) / 4
    third = (16 / sqrt(3) + 1) / 2
    assert told.weights == pytest.approx([1 + second + third] * 2)


def test_fully_async_mixes_each_model_in_as_it_arrives():
    told = run(
        [Node(1.0, delta=1), Node(1.5, delta=8)],
        FullyAsync(),
        rounds=3,
        merge=ModelMixing(0.5),
        staleness=Constant(),
    )

    assert merges(told.events) == [
        (1.0, 0, 1, 0, 0.5),
        (1.5, 1, 2, 1, 0.5),
        (2.0, 0, 3, 1, 0.5),
    ]
    # 0 -> half way to 1 -> half way to 8 -> half way to 0.5 + 1
    assert told.weights == pytest.approx([(4.25 + 1.5) / 2] * 2)


def test_an_interval_of_merges_ends_with_everybody_at_one_version():
    told = run([Node(1.0), Node(2.25)], Interval(merges=3, buffer=1), rounds=2)

    assert merges(told.events) == [
        (1.0, 0, 1, 0, 1.0),
        (2.0, 0, 2, 0, 1.0),
        (2.25, 1, 3, 2, 3**-0.5),
        (3.25, 0, 4, 0, 1.0),
        (4.25, 0, 5, 0, 1.0),
        (4.5, 1, 6, 2, 3**-0.5),
    ]
    assert syncs(told.events) == [(2.25, 3, 0), (4.5, 6, 0)]
    assert [e.base_version for e in told.of(ev.Dispatched)] == [0, 0, 1, 3, 3, 4]


def test_an_interval_of_seconds_waits_for_those_who_are_out_at_its_end():
    told = run([Node(0.75), Node(1.625)], Interval(seconds=2, buffer=None), rounds=1)

    assert merges(told.events) == [
        (3.25, 0, 1, 0, 1.0),
        (3.25, 0, 1, 0, 1.0),
        (3.25, 1, 1, 0, 1.0),
        (3.25, 0, 1, 0, 1.0),
        (3.25, 1, 1, 0, 1.0),
    ]
    assert syncs(told.events) == [(3.25, 1, 0)]


def test_an_interval_without_grace_goes_on_at_its_end_with_what_came():
    told = run(
        [Node(0.75), Node(1.625)],
        Interval(seconds=2, buffer=None, grace=0.0),
        rounds=1,
    )

    assert merges(told.events) == [
        (2.0, 0, 1, 0, 1.0),
        (2.0, 0, 1, 0, 1.0),
        (2.0, 1, 1, 0, 1.0),
    ]
    assert syncs(told.events) == [(2.0, 1, 2)]


GRACE = [Node(1.0), Node(1.5), Node(4.0, delta=10)]


def test_a_late_update_is_rebased_on_the_current_version_and_discounted():
    told = run(GRACE, Interval(merges=2, buffer=1, grace=1.0), rounds=3)

    assert merges(told.events) == [
        (1.0, 0, 1, 0, 1.0),
        (2.0, 1, 2, 1, 2**-0.5),  # waited for its grace, in vain
        (3.0, 0, 3, 0, 1.0),
        (3.5, 1, 4, 1, 2**-0.5),  # nobody else is out but the late one
        (4.0, 2, 5, 4, 5**-0.5),
        (5.0, 0, 6, 1, 2**-0.5),
        (5.0, 1, 6, 1, 2**-0.5),  # just in time
    ]
    assert syncs(told.events) == [(2.0, 2, 1), (3.5, 4, 0), (5.0, 6, 0)]


def test_a_late_update_is_dropped_where_the_rule_says_so():
    told = run(GRACE, Interval(merges=2, buffer=1, grace=1.0, drop_late=True), rounds=3)

    assert told.of(ev.Dropped)[0] == ev.Dropped(
        4.0, "message-2", 1003, "train", 0, "arrived after the synchronization's grace"
    )
    assert [m[:4] for m in merges(told.events)[:5]] == [
        (1.0, 0, 1, 0),
        (2.0, 1, 2, 1),
        (3.0, 0, 3, 0),
        (3.5, 1, 4, 1),
        (4.5, 0, 5, 0),
    ]


def test_bounded_staleness_holds_the_fast_node_until_the_slow_one_is_back():
    told = run([Node(1.0), Node(3.5)], BoundedStaleness(limit=1), rounds=3)

    assert merges(told.events) == [
        (1.0, 0, 1, 0, 1.0),
        (3.5, 1, 2, 1, 2**-0.5),
        (4.5, 0, 3, 0, 1.0),
    ]
    assert [e.time for e in told.of(ev.Dispatched)] == [0.0, 0.0, 3.5, 3.5]


def test_tiers_synchronize_within_themselves_and_not_with_each_other():
    nodes = [Node(4.0), Node(1.0), Node(4.5), Node(1.25)]

    told = run(nodes, Tiered(2), rounds=5)

    first = [(4.5, node, 1, 0, 1.0) for node in (1, 3, 0, 2)]
    fast = [
        (time, node, version, 0, 1.0)
        for version, time in ((2, 5.75), (3, 7.0), (4, 8.25))
        for node in (1, 3)
    ]
    slow = [(9.0, node, 5, 3, 0.5) for node in (0, 2)]
    assert merges(told.events) == first + fast + slow


def test_tiers_form_although_one_node_always_fails():
    nodes = [Node(4.0), Node(1.0), Node(1.0, fails=lambda number: True), Node(1.25)]

    told = run(nodes, Tiered(2), rounds=5)

    fast = {node for _, node, version, *_ in merges(told.events) if version in (3, 4)}
    assert fast == {1, 3}


def test_a_deadline_goes_on_without_the_straggler_and_takes_it_in_later():
    told = run([Node(1.0), Node(5.0)], FirstOf(FullySync(), Deadline(2.0)), rounds=4)

    assert merges(told.events) == [
        (2.0, 0, 1, 0, 1.0),
        (3.0, 0, 2, 0, 1.0),
        (4.0, 0, 3, 0, 1.0),
        (5.0, 1, 4, 3, 0.5),
        (5.0, 0, 4, 0, 1.0),
    ]
    assert syncs(told.events) == [(2.0, 1, 1), (3.0, 2, 0), (4.0, 3, 0), (5.0, 4, 0)]


def test_all_who_are_there_at_the_deadline_are_merged_together():
    told = run([Node(2.0), Node(2.0)], FirstOf(FullySync(), Deadline(2.0)), rounds=1)

    assert merges(told.events) == [(2.0, 0, 1, 0, 1.0), (2.0, 1, 1, 0, 1.0)]
    assert syncs(told.events) == [(2.0, 1, 0)]


def test_updates_of_one_instant_are_still_merged_k_at_a_time():
    told = run([Node(1.0)] * 4, Buffered(2), rounds=2)

    assert merges(told.events) == [
        (1.0, 0, 1, 0, 1.0),
        (1.0, 1, 1, 0, 1.0),
        (1.0, 2, 2, 1, 2**-0.5),
        (1.0, 3, 2, 1, 2**-0.5),
    ]


def test_fully_sync_repeats_rounds_of_everybody():
    told = run([Node(1.0), Node(2.0, delta=3)], FullySync(), rounds=2)

    assert merges(told.events) == [
        (2.0, 0, 1, 0, 1.0),
        (2.0, 1, 1, 0, 1.0),
        (4.0, 0, 2, 0, 1.0),
        (4.0, 1, 2, 0, 1.0),
    ]
    assert told.weights.tolist() == [4.0, 4.0]


def test_concurrency_limits_how_many_train_at_once():
    told = run([Node(1.0)] * 5, Buffered(1), rounds=6, concurrency=2)

    out = most = 0
    for event in told.of(ev.Dispatched, ev.Arrived):
        out += 1 if isinstance(event, ev.Dispatched) else -1
        most = max(most, out)
    assert most == 2


def test_the_work_asked_for_reaches_the_node():
    told = run([Node(1.0)], Buffered(1), rounds=2, work=FixedWork(16))

    # 16 steps of at least a sample each are declared, 8 are reported: it takes 2 s.
    assert [(e.time, e.local_steps) for e in told.of(ev.Dispatched)] == [
        (0.0, 16),
        (2.0, 16),
    ]


def test_zero_deltas_move_nothing_however_stale():
    nodes = [Node(1.0, delta=0), Node(2.5, delta=0), Node(3.125, delta=0)]

    told = run(nodes, Buffered(2), rounds=40, initial=None)

    assert told.weights.tolist() == [0.0, 0.0]


def test_the_history_has_a_point_for_the_start_and_one_for_each_round():
    told = run([Node(1.0), Node(2.5)], Buffered(1), rounds=3)

    assert [
        (p.time, p.round, p.version, p.num_updates) for p in told.result.history
    ] == [(0.0, 0, 0, 0), (1.0, 1, 1, 1), (2.0, 2, 2, 2), (2.5, 3, 3, 3)]


def test_a_run_stops_where_the_user_says():
    told = run(
        [Node(1.0)],
        Buffered(1),
        rounds=9,
        start={"should_stop": lambda round_, result: round_ == 2},
    )

    assert [e.version for e in told.of(ev.Aggregated)] == [1, 2]
    assert told.events[-1] == ev.RunEnded(2.0, 2, "finished")


def test_an_error_before_the_first_round_still_closes_the_log():
    def broken(round_, arrays):
        raise OSError("no test data")

    events = []
    with pytest.raises(OSError, match="no test data"):
        run([Node()], Buffered(1), events=events, start={"evaluate_fn": broken})

    assert events[-1] == ev.RunEnded(0.0, 0, "OSError: no test data")


def test_an_error_in_the_middle_still_ends_every_message_in_the_log():
    def broken(round_, arrays):
        if round_ == 2:
            raise OSError("no test data")

    events = []
    with pytest.raises(OSError, match="no test data"):
        run(
            [Node(1.0), Node(2.5)],
            Buffered(1),
            events=events,
            start={"evaluate_fn": broken},
        )

    assert events[-2:] == [
        ev.Dropped(2.0, "message-1", 1002, "train", 0, "the run is over"),
        ev.RunEnded(2.0, 2, "OSError: no test data"),
    ]


def test_a_run_writes_its_log_beside_the_caller(tmp_path):
    SemiAsync(fedavg(), sync=Buffered(1)).start(
        emulated([Node()]), model(), num_rounds=1
    )

    logged = list(ev.read_events(tmp_path / "events.jsonl"))
    assert isinstance(logged[0], ev.RunStarted)
    assert logged[-1] == ev.RunEnded(1.0, 1, "finished")


def test_the_initial_arrays_stay_as_they_were():
    initial = model(counter=True)
    before = {name: array.data for name, array in initial.items()}

    run([Node(1.0), Node(2.5)], Buffered(1), initial=initial)

    assert {name: array.data for name, array in initial.items()} == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_rounds": 0}, "num_rounds must be >= 1, got 0"),
        ({"timeout": 0.0}, "timeout must be > 0 s, got 0.0"),
        ({"timeout": float("nan")}, "timeout must be > 0 s, got nan"),
    ],
)
def test_a_run_without_rounds_or_time_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        SemiAsync(fedavg()).start(emulated([Node()]), model(), **change)


def test_a_strategy_prints_as_the_expression_that_builds_its_parts():
    assert repr(SemiAsync(FedAvg(), sync=Buffered(3), concurrency=4)) == (
        "SemiAsync(FedAvg(), sync=Buffered(k=3), staleness=Polynomial(exponent=0.5), "
        "contribution=Equal(), merge=Discounted(server_lr=1.0), "
        "work=FixedWork(steps=None), release=Latest(), concurrency=4, seed=0)"
    )


def test_odd_options_are_refused():
    with pytest.raises(ValueError, match="concurrency must be >= 1 node, got 0"):
        SemiAsync(concurrency=0)
    with pytest.raises(ValueError, match="seed must be >= 0, got -1"):
        RunOptions(seed=-1)


def test_a_run_leaves_the_model_it_returns_as_plain_arrays():
    told = run([Node()], Buffered(1), rounds=1, initial=model(counter=True))

    returned = {name: array.numpy() for name, array in told.result.arrays.items()}
    assert {name: (a.dtype, a.shape) for name, a in returned.items()} == {
        "w": (np.dtype("float32"), (2,)),
        "bn.num_batches_tracked": (np.dtype("int64"), ()),
    }


def test_a_policy_that_opens_in_the_past_does_not_stop_virtual_time():
    class OpenedLongAgo(Buffered):
        num_asked = 0

        def opens_at(self, view):
            OpenedLongAgo.num_asked += 1
            if OpenedLongAgo.num_asked > 100:  # else this would never end
                raise AssertionError("virtual time stands still")
            return 0.0

    told = run([Node(1.0)], OpenedLongAgo(1), rounds=3)

    assert [time for time, *_ in merges(told.events)] == [1.0, 2.0, 3.0]
