"""Federated evaluation: beside training, or between rounds where these start together.

A node evaluates its examples in a third of the time that training them takes: 24
examples at 8 samples a second are 1 s.
"""

from collections import Counter

import pytest
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg

from flower_sap import events as ev
from flower_sap.strategies import (
    Buffered,
    Deadline,
    FirstOf,
    FullyAsync,
    FullySync,
    Interval,
    Tiered,
)
from tests.fakes import Node, emulated, ends, fedavg, merges, model, run

EVALUATING = {"fraction_evaluate": 1.0}


def told_by_clients(events):
    return [
        (e.time, e.round, e.version, e.metrics["loss"])
        for e in events
        if isinstance(e, ev.Evaluated)
    ]


def test_training_goes_on_while_nodes_evaluate():
    nodes = [Node(1.0, examples=24), Node(4.0, examples=24)]

    told = run(nodes, Buffered(1), inner=fedavg(**EVALUATING), rounds=2)

    # Node 0: trains to 1 s, evaluates version 1 to 2 s, trains to 3 s, evaluates
    # version 2 to 4 s. Node 1 trains to 4 s, evaluates version 1 to 5 s; version 2 it
    # is not asked for, since version 1 still waits for it then.
    assert merges(told.events) == [(1.0, 0, 1, 0, 1.0), (3.0, 0, 2, 0, 1.0)]
    assert told_by_clients(told.events) == [(4.0, 2, 2, 2.0), (5.0, 1, 1, 1.0)]
    assert list(told.result.evaluate_metrics_clientapp) == [2, 1]


def test_synchronous_rounds_evaluate_before_the_next_one_starts():
    nodes = [Node(1.0, examples=24), Node(2.0, examples=48)]

    told = run(nodes, FullySync(), inner=fedavg(**EVALUATING), rounds=2)

    assert [e.time for e in told.of(ev.Aggregated)] == [2.0, 6.0]
    assert told_by_clients(told.events) == [(4.0, 1, 1, 1.0), (8.0, 2, 2, 2.0)]


def test_synchronous_rounds_evaluate_as_flowers_fedavg_does():
    nodes = [
        Node(1.0 + n / 8, delta=0.3 * n, noise=0.1, examples=7 * n + 3)
        for n in range(4)
    ]
    settings = {"min_available_nodes": 1}
    plain = FedAvg(**settings).start(
        emulated(nodes), model(), num_rounds=3, train_config=ConfigRecord({})
    )

    told = run(emulated(nodes), FullySync(), inner=FedAvg(**settings), rounds=3)

    assert told.result.evaluate_metrics_clientapp == plain.evaluate_metrics_clientapp
    assert told.result.train_metrics_clientapp == plain.train_metrics_clientapp


@pytest.mark.parametrize("policy", [FullySync(), Buffered(2), Tiered(2)])
def test_a_client_app_without_an_evaluate_function_still_trains_at_full_speed(policy):
    nodes = [Node(1.0), Node(1.5), Node(2.25)]
    silent = emulated(nodes, evaluates=False)

    told = run(silent, policy, inner=fedavg(**EVALUATING), rounds=9)
    plain = run(nodes, policy, rounds=9)

    assert merges(told.events) == merges(plain.events)
    assert told.of(ev.Failed)
    assert {e.purpose for e in told.of(ev.Failed)} == {"evaluate"}
    assert told.of(ev.Evaluated) == []


def test_a_deadline_counts_from_the_start_of_training_not_of_evaluation():
    nodes = [Node(1.0, examples=24), Node(1.5, examples=24)]
    policy = FirstOf(FullySync(), Deadline(2.0))

    told = run(nodes, policy, inner=fedavg(**EVALUATING), rounds=3)

    assert [e.num_updates for e in told.of(ev.Aggregated)] == [2, 2, 2]
    assert told.of(ev.Synchronized)[1].time == 4.0  # 1.5, evaluation 1.0, 1.5


def test_rounds_that_end_faster_than_evaluations_do_not_stop_training():
    nodes = [Node(1.0 + n / 16, examples=24) for n in range(12)]

    told = run(nodes, FullyAsync(), inner=fedavg(**EVALUATING), rounds=60)

    seen = Counter((e.node_id, e.purpose) for e in told.of(ev.Dispatched) if e.time < 9)
    for node_id in {node_id for node_id, _ in seen}:
        assert seen[node_id, "train"] >= seen[node_id, "evaluate"]
    assert told.of(ev.Aggregated)[-1].time < 12


def test_a_failing_node_holds_up_nobodys_evaluation():
    nodes = [Node(1.0, examples=24), Node(1.0, fails=lambda number: True)]

    told = run(nodes, FullySync(), inner=fedavg(**EVALUATING), rounds=6)

    assert [e.time for e in told.of(ev.Aggregated)] == [1, 3, 5, 7, 9, 11]
    assert {e.node_id for e in told.of(ev.Dispatched) if e.purpose == "evaluate"} == {
        1001
    }


def test_the_last_evaluation_is_waited_for_while_another_group_is_complete():
    # The fast group ends the run between the two replies of the slow one, whose buffer
    # is then due and never merged: that must not stop virtual time.
    nodes = [Node(1.0), Node(1.25), Node(4.0), Node(5.5)]

    told = run(nodes, Tiered(2), inner=fedavg(**EVALUATING), rounds=5)

    arrived = [e.time for e in told.of(ev.Arrived) if e.node_id == 1003]
    ended = told.of(ev.Aggregated)[-1].time
    assert arrived[0] < 9 < arrived[2] < ended < told.events[-1].time
    assert 5 in {event.round for event in told.of(ev.Evaluated)}
    assert {len(ended) for ended in ends(told.events).values()} == {1}


def test_only_the_asked_share_of_nodes_evaluates_and_the_seed_chooses_it():
    nodes = [Node(1.0 + n / 8, examples=24) for n in range(6)]

    def asked(seed):
        inner = fedavg(fraction_evaluate=0.5)
        told = run(
            nodes, Interval(merges=2, buffer=3), inner=inner, seed=seed, rounds=3
        )
        return [
            (e.time, e.node_id)
            for e in told.of(ev.Dispatched)
            if e.purpose == "evaluate"
        ]

    first = asked(0)
    assert len(first) == 9
    assert asked(0) == first != asked(1)
    rounds = [{n for _, n in first[i : i + 3]} for i in (0, 3, 6)]
    assert any(chosen != rounds[0] for chosen in rounds)


def spoilt(metrics):
    app_nodes = [Node(1.0, examples=24), Node(1.5, examples=24)]
    grid = emulated(app_nodes)
    pull = grid.pull_messages

    def tamper(message_ids):
        replies = list(pull(message_ids))
        for reply in replies:
            is_evaluation = reply.metadata.message_type == "evaluate"
            if is_evaluation and reply.metadata.src_node_id == 1002:
                reply.content["metrics"].clear()
                reply.content["metrics"].update(metrics)
        return replies

    grid.pull_messages = tamper
    return grid


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"loss": 1.0}, "metric 'num-examples' is missing; found ['loss']"),
        ({"num-examples": 0, "loss": 1.0}, "must be > 0 and finite, got 0"),
    ],
)
def test_a_bad_evaluation_is_rejected_and_the_others_count(metrics, reason):
    told = run(spoilt(metrics), FullySync(), inner=fedavg(**EVALUATING), rounds=1)

    (rejected,) = told.of(ev.Rejected)
    assert (rejected.purpose, rejected.node_id) == ("evaluate", 1002)
    assert reason in rejected.reason
    assert told.result.evaluate_metrics_clientapp[1]["loss"] == 1.0


def test_odd_metric_names_leave_the_common_ones():
    grid = spoilt({"num-examples": 24, "top-1": 1.0})

    told = run(grid, FullySync(), inner=fedavg(**EVALUATING), rounds=1)

    assert told.of(ev.Rejected) == []
    assert "loss" not in told.result.evaluate_metrics_clientapp[1]
