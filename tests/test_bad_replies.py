"""Replies that cannot be used, nodes that fail, grids that refuse: the run goes on.

Unless a test says otherwise three nodes train for one synchronous round; the second one
is at fault, and the others add 1 to a model of zeros.
"""

import copy

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flower_sap import events as ev
from flower_sap.emulation import EmulatedGrid, VirtualClock
from flower_sap.errors import AllClientsFailedError, NoNodesError, StalledError
from flower_sap.strategies import AllOf, Buffered, Deadline, FullyAsync, FullySync
from tests.fakes import Node, emulated, ends, fedavg, merges, model, run


def with_arrays(**arrays):
    def spoil(reply):
        reply.content["arrays"] = ArrayRecord(
            {name: Array(np.asarray(values)) for name, values in arrays.items()}
        )
        return reply

    return spoil


def with_metrics(**metrics):
    def spoil(reply):
        reply.content["metrics"] = MetricRecord(
            {name.replace("_", "-"): value for name, value in metrics.items()}
        )
        return reply

    return spoil


def with_report(**report):
    def spoil(reply):
        reply.content["sap"] = ConfigRecord(
            {name.replace("_", "-"): value for name, value in report.items()}
        )
        return reply

    return spoil


def without(key):
    def spoil(reply):
        reply.content = RecordDict(
            {name: record for name, record in reply.content.items() if name != key}
        )
        return reply

    return spoil


W, B = np.ones(2, np.float32), np.ones(1, np.float32)
BAD = {
    "a missing array": (with_arrays(w=W), "arrays missing: ['b']"),
    "an extra array": (with_arrays(w=W, b=B, head=B), "not of this model: ['head']"),
    "another order": (with_arrays(b=B, w=W), "arrays in another order"),
    "another shape": (with_arrays(w=W[:1], b=B), "'w' is float32[1], expected"),
    "another rank": (with_arrays(w=W[:, None], b=B), "'w' is float32[2, 1]"),
    "another dtype": (with_arrays(w=W.astype("f8"), b=B), "'w' is float64[2]"),
    "a NaN": (with_arrays(w=W * np.float32([1, np.nan]), b=B), "1 of 2 values NaN"),
    "an infinity": (with_arrays(w=W, b=B * np.float32(np.inf)), "1 of 1 values NaN"),
    "no arrays": (without("arrays"), "0 ArrayRecords in the reply"),
    "no metrics": (without("metrics"), "0 MetricRecords in the reply"),
    "no examples": (with_metrics(num_examples=0), "must be > 0 and finite, got 0"),
    "fewer than none": (with_metrics(num_examples=-1), "must be > 0 and finite"),
    "NaN examples": (with_metrics(num_examples=float("nan")), "finite, got nan"),
    "endless examples": (with_metrics(num_examples=float("inf")), "finite, got inf"),
    "a list of examples": (with_metrics(num_examples=[1, 2]), "must be a number"),
    "uncounted examples": (with_metrics(loss=0.5), "'num-examples' is missing"),
    "a version to come": (with_report(base_version=7), "base version 7"),
    "a version before all": (with_report(base_version=-1), "base version -1"),
    "a version in words": (with_report(base_version="new"), "base version 'new'"),
}


def two_arrays():
    zeros = {"w": np.zeros(2, np.float32), "b": np.zeros(1, np.float32)}
    return ArrayRecord({name: Array(values) for name, values in zeros.items()})


@pytest.mark.parametrize(("spoil", "reason"), BAD.values(), ids=BAD)
def test_a_bad_reply_is_rejected_with_its_reason_and_the_others_count(spoil, reason):
    nodes = [Node(1.0), Node(1.5, spoil=spoil), Node(2.0)]

    told = run(nodes, FullySync(), rounds=1, initial=two_arrays())

    (rejected,) = told.of(ev.Rejected)
    assert (rejected.message_id, rejected.node_id) == ("message-1", 1002)
    assert reason in rejected.reason
    assert merges(told.events) == [(2.0, 0, 1, 0, 1.0), (2.0, 2, 1, 0, 1.0)]
    assert told.weights.tolist() == [1.0, 1.0]
    assert all(len(ended) == 1 for ended in ends(told.events).values())


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (Node(fails=lambda number: True), "RuntimeError: no training today (1)"),
        (Node(spoil=lambda reply: None), "returned NoneType, expected a Message"),
        (Node(spoil=lambda reply: "done"), "returned str, expected a Message"),
    ],
    ids=["an exception", "nothing", "a string"],
)
def test_a_client_that_does_not_answer_fails_alone(node, reason):
    told = run([Node(1.0), node, Node(2.0)], FullySync(), rounds=1)

    (failed,) = told.of(ev.Failed)
    assert (failed.message_id, failed.node_id) == ("message-1", 1002)
    assert reason in failed.reason
    assert merges(told.events) == [(2.0, 0, 1, 0, 1.0), (2.0, 2, 1, 0, 1.0)]


# --- replies that nobody asked for ---------------------------------------------------


class Tampering(EmulatedGrid):
    """A grid that changes what is pulled."""

    change = staticmethod(lambda replies: replies)

    def pull_messages(self, message_ids):
        return type(self).change(list(super().pull_messages(message_ids)))


def tampered(change, nodes):
    kind = type("Changed", (Tampering,), {"change": staticmethod(change)})
    return emulated(nodes, kind=kind)


def test_a_reply_that_comes_twice_counts_once():
    grid = tampered(lambda replies: [*replies, *replies], [Node(1.0)] * 2)

    told = run(grid, FullySync(), rounds=1)

    assert merges(told.events) == [(1.0, 0, 1, 0, 1.0), (1.0, 1, 1, 0, 1.0)]
    assert told.of(ev.Rejected) == [
        ev.Rejected(
            1.0,
            f"message-{n}",
            1001 + n,
            "train",
            -1,
            "answers no open message: a duplicate, or never asked",
        )
        for n in (0, 1)
    ]


def test_a_reply_to_a_message_that_was_never_sent_is_rejected():
    def invent(replies):
        invented = [copy.deepcopy(reply) for reply in replies]
        for reply in invented:
            reply.metadata.__dict__["_reply_to_message_id"] = "never"
        return invented + replies

    told = run(tampered(invent, [Node(1.0)]), FullySync(), rounds=1)

    assert told.of(ev.Rejected, ev.Merged) == [
        ev.Rejected(
            1.0,
            "never",
            1001,
            "train",
            -1,
            "answers no open message: a duplicate, or never asked",
        ),
        ev.Merged(1.0, "message-0", 1001, 1, 0, 0, 1.0, 1.0),
    ]


def test_a_reply_from_a_node_that_was_not_asked_is_rejected():
    def foreign(replies):
        for reply in replies:
            if reply.metadata.src_node_id == 1002:
                reply.metadata.__dict__["_src_node_id"] = 77
        return replies

    told = run(tampered(foreign, [Node(1.0)] * 3), FullySync(), rounds=1)

    assert told.of(ev.Rejected) == [
        ev.Rejected(
            1.0,
            "message-1",
            1002,
            "train",
            0,
            "came from node 77, but was asked of node 1002",
        )
    ]
    assert len(told.of(ev.Merged)) == 2


# --- failing and recovering ----------------------------------------------------------


def test_a_node_that_fails_rests_longer_each_time_and_is_used_when_it_recovers():
    nodes = [Node(4.0), Node(0.5, fails=lambda number: number <= 3)]

    told = run(nodes, Buffered(1), rounds=4)

    of_second = [e.time for e in told.of(ev.Dispatched) if e.node_id == 1002]
    assert of_second[:4] == [0.0, 1.0, 3.0, 7.0]
    assert [(t, n) for t, n, *_ in merges(told.events)] == [
        (4.0, 0),
        (7.5, 1),
        (8.0, 0),
        (8.0, 1),
    ]


def test_a_success_forgives_earlier_failures():
    nodes = [Node(0.5, fails=lambda number: number % 2 == 1)]

    told = run(nodes, Buffered(1), rounds=8)

    times = [e.time for e in told.of(ev.Dispatched)]
    assert times == [1.5 * n + wait for n in range(8) for wait in (0.0, 1.0)]


def test_a_run_in_which_all_clients_fail_ends_soon():
    events = []

    with pytest.raises(AllClientsFailedError, match="all 2 connected nodes failed 5"):
        run([Node(fails=lambda number: True)] * 2, Buffered(1), events=events)

    failures = [e.time for e in events if isinstance(e, ev.Failed)]
    assert failures == [0.0, 0.0, 1.0, 1.0, 3.0, 3.0, 7.0, 7.0, 15.0, 15.0]
    assert events[-1].time == 15.0


def test_a_run_in_which_all_replies_are_bad_ends_soon():
    nodes = [Node(1.0, spoil=with_metrics(num_examples=0))] * 2

    with pytest.raises(AllClientsFailedError, match="must be > 0 and finite, got 0"):
        run(nodes, FullySync())


def test_one_good_node_among_failing_ones_is_enough():
    nodes = [Node(fails=lambda number: True)] * 4 + [Node(1.0)]

    told = run(nodes, Buffered(3), rounds=10)

    assert len(told.of(ev.Aggregated)) == 10
    assert told.weights.tolist() == pytest.approx([told.weights[0]] * 2)


def test_fewer_nodes_than_updates_wanted_answer_more_than_once():
    told = run([Node(1.0), Node(1.5)], Buffered(5), rounds=1)

    assert [(t, n) for t, n, *_ in merges(told.events)] == [
        (3.0, 0),
        (3.0, 1),
        (3.0, 0),
        (3.0, 1),
        (3.0, 0),
    ]


# --- nodes that are not there --------------------------------------------------------


class Deserted(EmulatedGrid):
    """A grid to which nobody is connected."""

    def get_node_ids(self):
        return []


def deserted():
    grid = emulated([Node()])
    grid.__class__ = Deserted
    return grid


def test_a_run_without_nodes_gives_up_when_its_time_is_over():
    grid = deserted()

    with pytest.raises(NoNodesError, match=r"0 nodes connected after 60\.0 s.*needs 1"):
        run(grid, Buffered(1), timeout=60.0)

    assert grid.clock.now() == 60.0


def test_a_strategy_that_wants_more_nodes_than_there_are_gives_up_too():
    grid = emulated([Node()] * 2)

    with pytest.raises(NoNodesError, match=r"2 nodes connected .* but the run needs 3"):
        run(grid, Buffered(1), inner=fedavg(min_available_nodes=3), timeout=60.0)

    assert grid.clock.now() == 60.0


class Coming(EmulatedGrid):
    """A grid whose second node is connected from 3 s to 10 s and from 20 s on."""

    def get_node_ids(self):
        now = self.clock.now()
        everybody = list(super().get_node_ids())
        return everybody if 3 <= now < 10 or now >= 20 else everybody[:1]


def test_nodes_may_come_and_go():
    told = run(emulated([Node(2.0)] * 2, kind=Coming), Buffered(1), rounds=22)

    of_second = [e.time for e in told.of(ev.Dispatched) if e.node_id == 1002]
    assert (of_second[0], max(t for t in of_second if t < 20)) == (6.0, 10.0)
    # Seen at the first look, at least 5 s after the last one, from 20 s on.
    assert min(t for t in of_second if t > 10) == 24.0


class Silent(EmulatedGrid):
    """A grid on which the second node's replies are lost until 30 s."""

    def pull_messages(self, message_ids):
        replies = super().pull_messages(message_ids)
        lost = self.clock.now() < 30
        return [r for r in replies if not (lost and r.metadata.src_node_id == 1002)]


def test_a_message_without_a_reply_expires_and_its_node_is_tried_again():
    told = run(
        emulated([Node(4.0)] * 2, kind=Silent), Buffered(1), rounds=12, timeout=16.0
    )

    assert [(e.time, e.node_id, e.waited) for e in told.of(ev.Expired)] == [
        (16.0, 1002, 16.0),
        (33.0, 1002, 16.0),
    ]
    of_second = [e.time for e in told.of(ev.Dispatched) if e.node_id == 1002]
    assert of_second == [0.0, 17.0, 35.0, 39.0]
    assert all(len(ended) == 1 for ended in ends(told.events).values())


def test_a_synchronous_round_goes_on_without_a_lost_node_even_after_an_evaluation():
    told = run(
        emulated([Node(4.0, examples=24)] * 2, kind=Silent),
        FullySync(),
        inner=fedavg(fraction_evaluate=1.0),
        rounds=2,
        timeout=16.0,
    )

    # 16 s for the lost node, 1 s to evaluate without it, 16 s for it again
    assert [e.time for e in told.of(ev.Aggregated)] == [16.0, 33.0]


def test_a_policy_that_is_never_met_ends_the_run_with_what_it_waited_for():
    class Never(Buffered):
        def merge_at(self, view):
            return float("inf")

    with pytest.raises(StalledError, match=r"no new model version for 60\.0 s"):
        run([Node(1.0)], Never(1), timeout=60.0)


def test_looking_for_more_nodes_does_not_stop_virtual_time():
    # (0.7 + 5) - 0.7 and its like may round to less than 5.
    starts = [k / 10 for k in range(400) if (k / 10 + 5.0) - k / 10 < 5.0][:3]
    assert starts

    for start in starts:
        grid = emulated([Node(8.0)])
        grid.clock.wait_until(start)
        told = run(grid, Buffered(1), rounds=1, concurrency=2)
        assert told.events[-1].time == start + 8.0


# --- grids that refuse ---------------------------------------------------------------


class Refusing(EmulatedGrid):
    """A grid that does not take the second node's first message."""

    refusals = 1

    def push_messages(self, messages):
        messages = list(messages)
        taken = [m for m in messages if self.takes(m)]
        accepted = iter(list(super().push_messages(taken)))
        return self.answer([next(accepted) if m in taken else "" for m in messages])

    def takes(self, message):
        if message.metadata.dst_node_id != 1002 or not self.refusals:
            return True
        self.refusals -= 1
        return False


class Blanking(Refusing):
    """It says so with "" in its place, as a SuperLink does."""

    def answer(self, accepted):
        return accepted


class Omitting(Refusing):
    """It leaves the entry out, as the simulation does."""

    def answer(self, accepted):
        return [message_id for message_id in accepted if message_id]


@pytest.mark.parametrize("kind", [Blanking, Omitting])
def test_a_refused_message_fails_and_the_node_is_asked_again_later(kind):
    told = run(
        emulated([Node(4.0), Node(1.0), Node(4.0)], kind=kind), Buffered(1), rounds=1
    )

    assert told.of(ev.Failed) == [
        ev.Failed(0.0, "refused-2", 1002, "train", 0, "the grid refused the message")
    ]
    assert merges(told.events) == [(2.0, 1, 1, 0, 1.0)]


class Raising(EmulatedGrid):
    """A grid whose first push raises."""

    raised = False

    def push_messages(self, messages):
        if not self.raised:
            self.raised = True
            raise ConnectionError("the server is away")
        return super().push_messages(messages)


def test_a_push_that_raises_fails_its_messages_and_the_run_goes_on():
    told = run(emulated([Node(1.0)] * 2, kind=Raising), FullyAsync(), rounds=1)

    assert told.of(ev.Failed) == [
        ev.Failed(
            0.0,
            f"refused-{n}",
            1000 + n,
            "train",
            0,
            "push failed: ConnectionError: the server is away",
        )
        for n in (1, 2)
    ]
    assert merges(told.events) == [(2.0, 0, 1, 0, 1.0)]


def test_a_deadline_without_updates_makes_no_version():
    told = run([Node(5.0)], AllOf(Buffered(1), Deadline(2.0)), rounds=1)

    assert [(e.time, e.version) for e in told.of(ev.Aggregated)] == [(5.0, 1)]


def test_a_clock_without_events_is_told_that_nothing_will_happen():
    grid = deserted()
    grid.clock = VirtualClock()

    with pytest.raises(NoNodesError, match="0 nodes connected"):
        run(grid, Buffered(1), timeout=9.0, initial=model())
