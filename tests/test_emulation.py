"""Virtual time, fleets, and the nodes behind them."""

import math
import os
import random

import numpy as np
import pytest
import torch
from flwr.app import (
    Array,
    ConfigRecord,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from flower_sap._flower import CLIENT_APP_CRASHED, CLIENT_APP_RAISED_EXCEPTION
from flower_sap.emulation import (
    DEVICES,
    Device,
    EmulatedGrid,
    Fleet,
    Link,
    LocalGrid,
    NodeProfile,
    VirtualClock,
    mbit_per_s,
)
from flower_sap.errors import EmulationError
from tests.fakes import NO_LINK, Node, emulated, fleet, model, scripted

# --- the clock -----------------------------------------------------------------------


def test_time_passes_only_by_waiting():
    clock = VirtualClock()

    assert clock.now() == 0.0
    clock.wait_until(2.5)
    assert clock.now() == 2.5


def test_time_never_goes_back():
    clock = VirtualClock()
    clock.wait_until(2.5)

    clock.wait_until(1.0)
    clock.wait_until(-math.inf)

    assert clock.now() == 2.5


def test_a_wait_ends_at_the_earliest_event_of_all_sources():
    clock = VirtualClock()
    clock.attach(lambda limit: min(limit, 4.0))
    clock.attach(lambda limit: min(limit, 3.0))

    clock.wait_until(10.0)
    assert clock.now() == 3.0
    clock.wait_until(2.0)
    assert clock.now() == 3.0


def test_a_wait_without_end_or_event_is_refused():
    clock = VirtualClock()
    clock.wait_until(1.0)

    with pytest.raises(EmulationError, match=r"nothing will ever happen after 1\.0 s"):
        clock.wait_until(math.inf)


# --- devices, links, fleets ----------------------------------------------------------


def test_rates_are_converted_at_the_edge():
    assert mbit_per_s(8.0) == 1e6


def test_a_transfer_takes_the_latency_and_the_bytes_over_the_rate():
    link = Link(uplink=100.0, downlink=200.0, latency=0.5)

    assert link.up_seconds(1000) == 10.5
    assert link.down_seconds(1000) == 5.5
    assert NO_LINK.up_seconds(10**9) == 0.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Device("d", 0.0), "samples_per_second must be > 0 samples/s, got 0"),
        (lambda: Device("d", math.nan), "samples_per_second must be > 0 samples/s"),
        (lambda: Device("d", math.inf), "samples_per_second must be > 0 samples/s"),
        (lambda: Device("d", 1.0, -0.1), r"jitter must be >= 0, got -0\.1"),
        (lambda: Link(0.0, 1.0), "uplink must be > 0 B/s, got 0"),
        (lambda: Link(1.0, math.nan), "downlink must be > 0 B/s, got nan"),
        (lambda: Link(1.0, 1.0, -1.0), "latency must be >= 0 s, got -1"),
        (lambda: Fleet(()), "a fleet needs >= 1 node, got 0"),
        (lambda: Fleet.ratio(3, 0.5), r"ratio must be >= 1, got 0\.5"),
    ],
)
def test_impossible_devices_links_and_fleets_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("make", [Fleet.mixed, Fleet.mild])
def test_a_fleet_follows_from_its_seed(make):
    assert make(20, seed=3) == make(20, seed=3)
    assert make(20, seed=3) != make(20, seed=4)
    assert len(make(20, seed=3)) == 20


@pytest.mark.parametrize("seed", range(5))
def test_a_mixed_fleet_has_every_device_as_often_as_the_others(seed):
    nodes = Fleet.mixed(2 * len(DEVICES) + 3, seed=seed).nodes

    counts = [sum(n.device.name == name for n in nodes) for name, _ in DEVICES]
    assert sorted(counts) == [2] * (len(DEVICES) - 3) + [3] * 3


@pytest.mark.parametrize("seed", range(5))
def test_a_fleet_of_a_ratio_has_that_ratio_whatever_the_seed(seed):
    speeds = Fleet.ratio(7, 30.0, seed=seed).speeds

    assert speeds.min() == pytest.approx(16.0)
    assert speeds.max() / speeds.min() == pytest.approx(30.0)


def test_tiers_are_of_like_size_and_slowest_first():
    speeds = [5.0, 1.0, 4.0, 2.0, 3.0]
    nodes = tuple(NodeProfile(Device("d", speed), NO_LINK) for speed in speeds)

    assert Fleet(nodes).tiers(2) == [[1, 3, 4], [2, 0]]


@pytest.mark.parametrize(
    "fleet_",
    [
        Fleet.mixed(5, seed=1, jitter=0.25),
        Fleet((NodeProfile(Device("d", 3), NO_LINK),), name="no end"),
        Fleet(
            (
                NodeProfile(
                    Device('a "b" \\ c\n\x7f\u00e9', np.float64(0.1)), Link(1e-7, 1e30)
                ),
            ),
            name='say "fleet"',
        ),
    ],
    ids=["mixed", "inf", "odd text"],
)
def test_a_fleet_survives_its_file(fleet_, tmp_path):
    path = tmp_path / "fleet.toml"
    path.write_text(fleet_.to_toml(), encoding="utf-8")

    assert Fleet.from_toml(path) == fleet_


def test_a_fleet_file_counts_its_nodes_and_knows_defaults(tmp_path):
    path = tmp_path / "cars.toml"
    path.write_text(
        "[[node]]\ncount = 2\nsamples_per_second = 4\nuplink = 1\ndownlink = 2.5\n"
    )

    assert Fleet.from_toml(path) == Fleet(
        (NodeProfile(Device("device", 4.0), Link(1.0, 2.5)),) * 2, name="cars"
    )


GOOD = "[[node]]\nsamples_per_second = 4\nuplink = 1\ndownlink = 2\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[node", "fleet.toml is not a TOML file"),
        ("", r"fleet.toml: expected \[\[node\]\] entries"),
        ("node = []", "fleet.toml: a fleet needs >= 1 node, got 0"),
        ("[node]\n", r"fleet.toml: expected \[\[node\]\] entries"),
        ("nodes = 3\n" + GOOD, r"found also \['nodes'\]"),
        ("name = 3\n" + GOOD, "fleet.toml: name must be a text in quotes, got 3"),
        ("node = [1]", "fleet.toml, node 1: expected a table of keys and values"),
        (GOOD + "[[node]]\nuplink = 1\n", r"node 2: missing keys \['downlink', 'sam"),
        (GOOD + "speed = 1\n", r"node 1: missing keys \[\], unknown keys \['speed'\]"),
        (GOOD + "count = 0\n", "node 1: count must be a whole number >= 1, got 0"),
        (GOOD + "count = true\n", "count must be a whole number >= 1, got True"),
        (GOOD + "count = 1.5\n", r"count must be a whole number >= 1, got 1\.5"),
        (GOOD + "name = 1\n", "node 1: name must be a text in quotes, got 1"),
        (GOOD + 'latency = "long"\n', "node 1: latency must be a number, got 'long'"),
        (GOOD + "latency = -1\n", "node 1: latency must be >= 0 s"),
        (GOOD + "jitter = nan\n", "node 1: jitter must be >= 0, got nan"),
        (GOOD + "jitter = true\n", "node 1: jitter must be a number, got True"),
        (GOOD.replace("= 4", "= 0"), "node 1: samples_per_second must be > 0"),
        (GOOD.replace("= 4", "= '4'"), "node 1: samples_per_second must be a number"),
        (GOOD.replace("= 1", "= 1" + "0" * 400), "node 1: int too large"),
    ],
)
def test_a_bad_fleet_file_is_refused_where_it_is_bad(text, message, tmp_path):
    path = tmp_path / "fleet.toml"
    path.write_text(text)

    with pytest.raises(ValueError, match=message):
        Fleet.from_toml(path)


def test_a_fleet_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "fleet.toml"
    path.write_bytes(b"\xff\xfe")

    with pytest.raises(ValueError, match=r"fleet\.toml is not a TOML file"):
        Fleet.from_toml(path)


# --- timing --------------------------------------------------------------------------


def to(node_id, message_type="train", **config):
    return Message(
        RecordDict({"arrays": model(), "config": ConfigRecord(config)}),
        dst_node_id=node_id,
        message_type=message_type,
    )


def times(grid, messages):
    """Push messages and return (arrival, node, message id) of the replies."""
    open_ids = list(grid.push_messages(messages))
    arrived = []
    while open_ids:
        grid.clock.wait_until(1e6)
        for reply in grid.pull_messages(open_ids):
            open_ids.remove(reply.metadata.reply_to_message_id)
            arrived.append(
                (
                    grid.clock.now(),
                    reply.metadata.src_node_id,
                    reply.metadata.reply_to_message_id,
                )
            )
    return arrived


def behind(link, nodes, device=None):
    profile = NodeProfile(device or Device("d", 8.0), link)
    return EmulatedGrid(
        LocalGrid(scripted(nodes), len(nodes)), Fleet((profile,) * len(nodes))
    )


def test_a_trip_is_download_computing_and_upload():
    grid = behind(Link(uplink=64.0, downlink=256.0, latency=0.25), [Node(2.0)])

    ((time, *_),) = times(grid, [to(1001)])

    down = 0.25 + grid.bytes_down / 256
    up = 0.25 + grid.bytes_up / 64
    assert time == down + 2.0 + up
    assert (grid.samples, grid.busy_seconds()) == (16.0, [2.0])


def test_a_node_downloads_while_it_computes_but_computes_one_by_one():
    grid = behind(Link(math.inf, math.inf, latency=0.5), [Node(2.0)])

    arrived = times(grid, [to(1001), to(1001), to(1001)])

    assert [time for time, *_ in arrived] == [3.0, 5.0, 7.0]
    assert [message_id for *_, message_id in arrived] == [
        "message-0",
        "message-1",
        "message-2",
    ]


def test_declared_work_is_the_least_that_a_training_takes():
    grid = emulated([Node(1.0)])

    arrived = times(grid, [to(1001, **{"local-steps": 4, "batch-size": 6})])

    assert arrived[0][0] == 3.0  # 24 samples, of which the node says it did 8


def test_a_failure_takes_the_declared_work_too():
    grid = emulated([Node(fails=lambda number: True), Node(1.5)])

    arrived = times(grid, [to(1001, **{"local-steps": 16}), to(1002)])

    assert [arrival[:2] for arrival in arrived] == [(1.5, 1002), (2.0, 1001)]


def test_evaluating_takes_a_third_of_training():
    grid = emulated([Node(examples=24)])

    assert times(grid, [to(1001, "evaluate")])[0][0] == pytest.approx(1.0)


def test_without_a_report_the_examples_and_epochs_count():
    app = ClientApp()

    @app.train()
    def _train(message, context):
        metrics = MetricRecord({"num-examples": 8})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    grid = EmulatedGrid(LocalGrid(app, 1), fleet(1))

    assert times(grid, [to(1001, **{"local-epochs": 3})])[0][0] == 3.0


@pytest.mark.parametrize(
    "claim", [-1, 0, float("nan"), float("inf"), 1e300, [1.0]], ids=str
)
def test_an_odd_claim_of_work_cannot_stop_or_turn_time(claim):
    grid = emulated([Node(metrics={"samples-processed": claim}, examples=8)])

    assert times(grid, [to(1001)])[0][0] == 1.0


def test_an_uplink_carries_one_reply_after_the_other():
    grid = behind(Link(uplink=64.0, downlink=math.inf, latency=0.5), [Node(0.25)])

    arrived = times(grid, [to(1001), to(1001)])

    seconds = grid.bytes_up / 2 / 64  # of one reply, longer than it is computed
    assert [time for time, *_ in arrived] == [
        0.5 + 0.25 + seconds + 0.5,
        0.5 + 0.25 + 2 * seconds + 0.5,
    ]


def test_ties_are_broken_by_the_order_of_dispatch():
    grid = emulated([Node(1.0)] * 4)

    arrived = times(grid, [to(1003), to(1001), to(1004), to(1002)])

    assert [node for _, node, _ in arrived] == [1003, 1001, 1004, 1002]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("workers", [0, 2])
def test_replies_come_in_order_of_time_whatever_the_jitter(seed, workers):
    nodes = [Node(1.0 + n / 2, fails=lambda number: number % 5 == 4) for n in range(6)]
    profile = NodeProfile(Device("d", 8.0, jitter=0.8), Link(1e3, 1e4, 0.125))
    local = LocalGrid(scripted(nodes), 6, workers=workers)
    grid = EmulatedGrid(local, Fleet((profile,) * 6), seed=seed)

    try:
        messages = [
            to(
                1001 + n % 6,
                **{"local-steps": 1 + n % 3, "dispatch-number": 1 + n // 6},
            )
            for n in range(24)
        ]
        arrived = times(grid, messages)
    finally:
        local.close()

    assert [time for time, *_ in arrived] == sorted(time for time, *_ in arrived)
    assert len(arrived) == 24
    for node_id in grid.get_node_ids():  # a node's replies do not overtake each other
        of_node = [int(m.split("-")[1]) for _, node, m in arrived if node == node_id]
        assert of_node == sorted(of_node)


def test_the_jitter_follows_from_the_seed():
    profile = NodeProfile(Device("d", 8.0, jitter=0.5), NO_LINK)

    def arrival(seed):
        grid = EmulatedGrid(
            LocalGrid(scripted([Node(1.0)]), 1), Fleet((profile,)), seed=seed
        )
        return times(grid, [to(1001), to(1001)])

    assert arrival(1) == arrival(1) != arrival(2)
    first, second = arrival(1)
    assert second[0] - first[0] != first[0]


def test_a_timeout_returns_what_has_come_by_then():
    grid = emulated([Node(1.0), Node(2.0), Node(3.0)])

    replies = grid.send_and_receive([to(1001), to(1002), to(1003)], timeout=2.0)

    assert [r.metadata.src_node_id for r in replies] == [1001, 1002]
    assert grid.clock.now() == 2.0


def test_without_a_timeout_all_are_waited_for_in_order_of_arrival():
    grid = emulated([Node(3.0), Node(1.0)])

    replies = grid.send_and_receive([to(1001), to(1002)])

    assert [r.metadata.src_node_id for r in replies] == [1002, 1001]
    assert grid.clock.now() == 3.0


def test_busy_time_ahead_of_now_is_not_counted_yet():
    grid = emulated([Node(4.0), Node(1.0)])
    message_ids = grid.push_messages([to(1001), to(1002)])

    grid.clock.wait_until(9.0)

    assert grid.clock.now() == 1.0
    assert list(grid.pull_messages(message_ids))
    assert grid.busy_seconds() in ([1.0, 1.0], [0.0, 1.0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: EmulatedGrid(LocalGrid(ClientApp(), 2), fleet(3)),
            "the fleet has 3 profiles for 2 nodes",
        ),
        (
            lambda: EmulatedGrid(LocalGrid(ClientApp(), 1), fleet(1), seed=-1),
            "seed must be >= 0, got -1",
        ),
        (lambda: LocalGrid(ClientApp(), 0), "num_nodes must be >= 1, got 0"),
        (lambda: LocalGrid(ClientApp(), 1, workers=-1), "workers must be >= 0, got -1"),
        (lambda: LocalGrid(ClientApp(), 1, seed=-1), "seed must be >= 0, got -1"),
    ],
)
def test_impossible_grids_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_what_is_no_client_app_is_refused():
    with pytest.raises(TypeError, match="app must be a ClientApp, got str"):
        LocalGrid("app", 1)


def test_flowers_fedavg_runs_unchanged_in_virtual_time_and_without_it():
    nodes = [Node(1.0, delta=1.0), Node(2.5, delta=3.0, examples=3)]
    grids = [emulated(nodes), LocalGrid(scripted(nodes), 2)]

    results = [
        FedAvg().start(g, model(), num_rounds=3, train_config=ConfigRecord({}))
        for g in grids
    ]

    assert [r.arrays["w"].numpy().tolist() for r in results] == [[7.5, 7.5]] * 2
    assert [r.evaluate_metrics_clientapp[3]["loss"] for r in results] == [7.5, 7.5]
    assert grids[0].clock.now() == pytest.approx(3 * (2.5 + 3 / 24))


# --- the nodes -----------------------------------------------------------------------


def answering(make_metrics):
    """Return an app that answers each message with metrics made of it."""
    app = ClientApp()

    @app.train()
    def _train(message, context):
        metrics = MetricRecord(make_metrics(message, context))
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


@pytest.fixture(params=[0, 2], ids=["here", "workers"])
def open_grid(request):
    """Return a function that opens a grid, with and without workers."""
    opened = []

    def open_(app, num_nodes=1, **settings):
        grid = LocalGrid(app, num_nodes, workers=request.param, **settings)
        opened.append(grid)
        return grid

    yield open_
    for grid in opened:
        grid.close()


def answers(grid, *messages):
    return [
        {} if r.has_error() else dict(r.content["metrics"])
        for r in grid.send_and_receive(list(messages))
    ]


def test_a_message_to_an_unknown_node_is_not_accepted(open_grid):
    grid = open_grid(answering(lambda message, context: {"x": 1}))

    accepted = list(grid.push_messages([to(7), to(1001), to(1002)]))

    assert accepted == ["message-1"]
    assert len(list(grid.send_and_receive([to(7)]))) == 0


def test_a_client_does_not_see_what_the_sender_changes_after_the_push(open_grid):
    grid = open_grid(
        answering(
            lambda message, context: {
                "w": float(message.content["arrays"]["w"].numpy()[0]),
                "list": message.content["config"]["list"],
            }
        )
    )
    message = to(1001, list=[1, 2])

    message_ids = list(grid.push_messages([message]))
    message.content["arrays"]["w"] = Array(np.ones(2, np.float32))
    message.content["config"]["list"].append(3)

    reply = grid.wait_for(message_ids[0])
    assert dict(reply.content["metrics"]) == {"w": 0.0, "list": [1, 2]}


def test_the_sender_does_not_see_what_a_client_changes(open_grid):
    def change(message, context):
        message.content["config"]["list"].append(9)
        message.content["arrays"].clear()
        return {"x": 1}

    message = to(1001, list=[1, 2])
    answers(open_grid(answering(change)), message)

    assert message.content["config"]["list"] == [1, 2]
    assert list(message.content["arrays"]) == ["w"]


def test_each_node_keeps_its_own_state(open_grid):
    def count(message, context):
        kept = context.state.setdefault("kept", MetricRecord({"n": 0}))
        kept["n"] += 1
        return {"n": kept["n"], "partition": context.node_config["partition-id"]}

    grid = open_grid(answering(count), 2)

    assert answers(grid, to(1001), to(1002), to(1001), to(1001)) == [
        {"n": 1, "partition": 0},
        {"n": 1, "partition": 1},
        {"n": 2, "partition": 0},
        {"n": 3, "partition": 0},
    ]


def test_an_exception_becomes_an_error_with_its_traceback_and_undoes_the_state(
    open_grid,
):
    def fail(message, context):
        kept = context.state.setdefault("kept", MetricRecord({"n": [0]}))
        kept["n"].append(1)
        if message.content["config"]["fail"]:
            raise ZeroDivisionError("no batch")
        return {"n": kept["n"]}

    grid = open_grid(answering(fail))

    replies = list(
        grid.send_and_receive(
            [to(1001, fail=False), to(1001, fail=True), to(1001, fail=False)]
        )
    )

    assert replies[1].error.code == CLIENT_APP_RAISED_EXCEPTION
    assert replies[1].error.reason.startswith("Traceback")
    assert "ZeroDivisionError: no batch" in replies[1].error.reason
    assert replies[1].metadata.src_node_id == 1001
    assert dict(replies[2].content["metrics"]) == {"n": [0, 1, 1]}


def test_a_client_finds_its_run_config_and_metadata(open_grid):
    def tell(message, context):
        return {
            "lr": context.run_config["lr"],
            "node": context.node_id,
            "partitions": context.node_config["num-partitions"],
            "ttl": message.metadata.ttl,
            "group": int(message.metadata.group_id),
        }

    grid = open_grid(answering(tell), 3, run_config={"lr": 0.5})
    message = Message(
        RecordDict(), dst_node_id=1002, message_type="train", ttl=60.0, group_id="17"
    )

    assert answers(grid, message) == [
        {"lr": 0.5, "node": 1002, "partitions": 3, "ttl": 60.0, "group": 17}
    ]


def test_global_generators_are_the_messages_own(open_grid):
    def draw(message, context):
        return {
            "python": random.random(),
            "numpy": float(np.random.random()),  # noqa: NPY002
            "torch": float(torch.rand(1)),
        }

    def drawn(seed, *node_ids):
        return answers(
            open_grid(answering(draw), 2, seed=seed), *(to(n) for n in node_ids)
        )

    first = drawn(1, 1001, 1002, 1001)
    assert drawn(1, 1001, 1001, 1002) == [first[0], first[2], first[1]]
    assert drawn(2, 1001) != first[:1]
    assert len({d["numpy"] for d in first}) == 3


def test_the_callers_generators_go_on_where_they_were():
    def draw():
        return random.random(), np.random.random(), float(torch.rand(1))  # noqa: NPY002

    def reseed(message, context):
        np.random.seed(7)  # noqa: NPY002  # as many ClientApps do
        first = float(np.random.random())  # noqa: NPY002
        if message.content["config"].get("nested"):
            inner = LocalGrid(answering(reseed), 2)
            assert answers(inner, to(1001)) == [{"first": first, "second": second}]
        return {"first": first, "second": float(np.random.random())}  # noqa: NPY002

    second = float(np.random.RandomState(7).random_sample(2)[1])
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)
    torch.manual_seed(1)
    expected = [draw(), draw()]
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)
    torch.manual_seed(1)

    found = [draw()]
    told = answers(LocalGrid(answering(reseed), 2), to(1001, nested=True), to(1002))
    found.append(draw())

    assert found == expected
    assert [answer["second"] for answer in told] == [second, second]


def test_the_same_draws_are_made_here_and_in_workers():
    app = answering(
        lambda message, context: {
            "numpy": float(np.random.random()),  # noqa: NPY002
            "torch": float(torch.rand(1)),
        }
    )
    told = []
    for workers in (0, 1):
        grid = LocalGrid(app, 2, workers=workers, seed=5)
        told.append(answers(grid, to(1001), to(1002), to(1001)))
        grid.close()

    assert told[0] == told[1]


def test_a_worker_that_dies_costs_one_message():
    def die(message, context):
        if message.content["config"]["die"]:
            os._exit(3)
        return {"x": 1}

    grid = LocalGrid(answering(die), 3, workers=2)
    replies = list(
        grid.send_and_receive(
            [
                to(1001, die=False),
                to(1002, die=True),
                to(1003, die=False),
                to(1002, die=True),
                to(1002, die=False),
            ]
        )
    )
    grid.close()

    assert [r.has_error() for r in replies] == [False, True, False, True, False]
    assert replies[1].error.code == CLIENT_APP_CRASHED
    assert replies[1].error.reason == "the worker process died (exit code 3)"


def test_a_pull_takes_any_iterable_of_ids(open_grid):
    grid = open_grid(answering(lambda message, context: {"x": 1}), 2)
    message_ids = list(grid.push_messages([to(1001), to(1002)]))

    pulled = []
    while len(pulled) < 2:
        pulled += [
            r.metadata.reply_to_message_id
            for r in grid.pull_messages(m for m in message_ids)
        ]

    assert sorted(pulled) == message_ids


def test_replies_that_nobody_asked_for_stay_where_they_are(open_grid):
    grid = open_grid(answering(lambda message, context: {"x": 1}), 2)
    first, second = grid.push_messages([to(1001), to(1002)])

    assert grid.wait_for(second).metadata.reply_to_message_id == second
    assert grid.wait_for(first).metadata.reply_to_message_id == first
    assert list(grid.pull_messages([first, second, "never"])) == []


def test_flowers_deprecated_way_to_build_a_message_is_refused():
    for grid in (LocalGrid(ClientApp(), 1), emulated([Node()])):
        with pytest.raises(NotImplementedError, match="create_message is deprecated"):
            grid.create_message()


def test_a_grid_keeps_the_run_that_it_is_given():
    grid = emulated([Node()])

    grid.set_run("run")

    assert grid.run == "run"


def test_uplinks_spread_anew_keep_their_order_and_all_else():
    fleet = Fleet.mixed(20, seed=3)

    spread = fleet.with_uplinks(25_000.0, 625_000.0)

    rates = [node.link.uplink for node in spread.nodes]
    assert min(rates) == pytest.approx(25_000)
    assert max(rates) == pytest.approx(625_000)
    assert (
        np.argsort(rates).tolist()
        == np.argsort([node.link.uplink for node in fleet.nodes]).tolist()
    )
    for old, new in zip(fleet.nodes, spread.nodes, strict=True):
        assert (old.device, old.link.downlink) == (new.device, new.link.downlink)
    with pytest.raises(ValueError, match="0 < slowest <= fastest"):
        fleet.with_uplinks(2.0, 1.0)
