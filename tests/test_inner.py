"""Flower's strategies inside `SemiAsync`: what they are asked, given and believed."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedXgbCyclic,
    FedYogi,
    Krum,
)

from flower_sap import events as ev
from flower_sap.errors import InnerStrategyError, NoNodesError, PayloadError
from flower_sap.strategies import (
    Buffered,
    Constant,
    Discounted,
    FullyAsync,
    SemiAsync,
    Tiered,
)
from tests.fakes import Node, emulated, ends, fedavg, merges, model, run

BARE = {
    "fraction_evaluate": 0.0,
    "min_train_nodes": 1,
    "min_available_nodes": 1,
    "min_evaluate_nodes": 1,
}
INNER = {
    "FedAvg": lambda: FedAvg(**BARE),
    "FedAvgM": lambda: FedAvgM(**BARE, server_momentum=0.9),
    "FedAdam": lambda: FedAdam(**BARE),
    "FedYogi": lambda: FedYogi(**BARE),
    "FedAdagrad": lambda: FedAdagrad(**BARE),
    "FedProx": lambda: FedProx(**BARE, proximal_mu=0.1),
    "FedMedian": lambda: FedMedian(**BARE),
    "FedTrimmedAvg": lambda: FedTrimmedAvg(**BARE, beta=0.2),
    "Krum": lambda: Krum(**BARE, num_malicious_nodes=0),
}


def network():
    """Return a model with a weight and what a BatchNorm layer keeps."""
    return ArrayRecord(
        {
            "w": Array(np.zeros(3, np.float32)),
            "bn.running_var": Array(np.full(2, 1e-6, np.float32)),
            "bn.num_batches_tracked": Array(np.array(5, np.int64)),
        }
    )


@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_a_model_with_buffers_stays_finite_and_keeps_its_dtypes(inner):
    nodes = [
        Node(1.0 + n / 4, delta=-1e-7 if n % 2 else 1e-3, shrink=0.5 + n / 10)
        for n in range(5)
    ]

    told = run(nodes, Buffered(4), inner=inner(), rounds=8, initial=network())

    arrays = {name: array.numpy() for name, array in told.result.arrays.items()}
    assert [(n, str(a.dtype), a.shape) for n, a in arrays.items()] == [
        ("w", "float32", (3,)),
        ("bn.running_var", "float32", (2,)),
        ("bn.num_batches_tracked", "int64", ()),
    ]
    assert all(np.isfinite(a).all() for a in arrays.values())
    assert 5 < arrays["bn.num_batches_tracked"] <= 5 + 8
    assert len(told.of(ev.Aggregated)) == 8


@pytest.mark.parametrize("inner", [FedAvgM, FedAdam, FedYogi, FedAdagrad])
def test_a_server_optimizer_leaves_variances_between_the_clients_and_its_own(inner):
    nodes = [Node(1.0 + n / 2, delta=0.0, shrink=0.1) for n in range(2)]
    variances = []

    def note(round_, arrays):
        variances.extend(arrays["bn.running_var"].numpy().tolist())

    run(
        nodes,
        Buffered(2),
        inner=inner(**BARE),
        rounds=9,
        initial=network(),
        start={"evaluate_fn": note},
    )

    assert len(variances) == 20
    assert variances == sorted(variances, reverse=True)  # each client shrinks its own
    assert variances[-1] > 0


@pytest.mark.parametrize("beta", [(0.9, 0.99), (0.5, 0.9)])
def test_three_steps_of_fedadam_are_those_of_adam_by_hand(beta):
    eta, tau = 0.1, 1e-3
    inner = FedAdam(**BARE, eta=eta, beta_1=beta[0], beta_2=beta[1], tau=tau)

    told = run(
        [Node(1.0, delta=0.5)],
        Buffered(1),
        inner=inner,
        rounds=3,
        initial=model(1, "float64"),
    )

    weight = momentum = square = 0.0
    for step in (1, 2, 3):
        delta = 0.5  # trained minus received, from whatever model
        momentum = beta[0] * momentum + (1 - beta[0]) * delta
        square = beta[1] * square + (1 - beta[1]) * delta**2
        # Flower's bias correction is one step ahead of Kingma and Ba's.
        rate = eta * np.sqrt(1 - beta[1] ** (step + 1)) / (1 - beta[0] ** (step + 1))
        weight += rate * momentum / (np.sqrt(square) + tau)
    assert told.weights == pytest.approx([weight], rel=1e-12)


class Counting(FedAvg):
    """A FedAvg that notes what it aggregates."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.seen = []

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        self.seen.append(
            [
                (r.metadata.src_node_id, float(r.content["arrays"]["w"].numpy()[0]))
                for r in replies
            ]
        )
        return super().aggregate_train(server_round, replies)


def test_a_strategy_that_aggregates_in_its_own_way_gets_every_update_rebased():
    inner = Counting(**BARE)

    run(
        [Node(1.0, delta=1), Node(2.25, delta=8)],
        Buffered(2),
        inner=inner,
        rounds=2,
        staleness=Constant(),
    )

    # Node 1 trained from version 0 and is seen as the current model, 1, plus 8.
    assert inner.seen == [[(1001, 1.0), (1001, 1.0)], [(1002, 9.0), (1001, 2.0)]]


def test_the_inner_strategys_config_reaches_the_nodes():
    seen = []

    class Looking(FedProx):
        def configure_train(self, server_round, arrays, config, grid):
            seen.append(server_round)
            return super().configure_train(server_round, arrays, config, grid)

    told = run(
        [Node(1.0)], Buffered(1), inner=Looking(**BARE, proximal_mu=0.1), rounds=2
    )

    assert seen == [1, 2]
    plain = run([Node(1.0)], Buffered(1), rounds=2)
    assert told.of(ev.Dispatched)[0].nbytes > plain.of(ev.Dispatched)[0].nbytes


@pytest.mark.parametrize("inner", [fedavg, INNER["FedAdam"], INNER["FedMedian"]])
def test_train_metrics_are_averaged_by_examples_whatever_the_staleness(inner):
    nodes = [
        Node(1.0, examples=1, metrics={"loss": 1.0}),
        Node(2.5, examples=3, metrics={"loss": 5.0}),
    ]

    told = run(nodes, Buffered(3), rounds=1, inner=inner())

    # Merged at 2.5 s: node 0 twice with a loss of 1, node 1 once with 5.
    assert merges(told.events)[-1][:2] == (2.5, 1)
    metrics = told.result.train_metrics_clientapp[1]
    assert metrics["loss"] == pytest.approx((1 + 1 + 3 * 5) / 5)


def test_stale_updates_report_metrics_like_fresh_ones():
    nodes = [
        Node(1.0, metrics={"loss": 1.0}),
        Node(3.5, metrics={"loss": 5.0}),
    ]

    told = run(nodes, FullyAsync(), rounds=4)

    assert [told.result.train_metrics_clientapp[r]["loss"] for r in (3, 4)] == [1, 5]
    assert merges(told.events)[3] == (3.5, 1, 4, 3, 0.5)


@pytest.mark.parametrize(
    "odd",
    [{"top-1": 0.5}, {"loss": [1.0, 2.0]}, {"loss": float("nan")}, {"": 1.0}],
    ids=["another name", "a list", "NaN", "no name"],
)
@pytest.mark.parametrize("inner", [fedavg, INNER["FedMedian"], INNER["FedAdam"]])
def test_odd_metrics_of_one_node_do_not_end_the_run(odd, inner):
    nodes = [Node(1.0, metrics={"loss": 1.0}), Node(1.5, metrics=odd)]

    told = run(nodes, Buffered(2), inner=inner(), rounds=4)

    assert len(told.of(ev.Aggregated)) == 4
    assert told.of(ev.Rejected) == []


# --- what cannot be wrapped ----------------------------------------------------------


def test_a_strategy_that_passes_one_model_round_is_refused():
    with pytest.raises(ValueError, match="passes one model from client to client"):
        SemiAsync(FedXgbCyclic())


@pytest.mark.parametrize("inner", [object(), FedAvg, "FedAvg"])
def test_what_is_no_strategy_is_refused(inner):
    with pytest.raises(TypeError, match=r"inner must be a flwr\.serverapp\.strategy"):
        SemiAsync(inner)


class Sending(FedAvg):
    """A strategy that asks the nodes something before each round."""

    call = "send_and_receive"

    def configure_train(self, server_round, arrays, config, grid):
        getattr(grid, self.call)([])
        return super().configure_train(server_round, arrays, config, grid)


@pytest.mark.parametrize(
    "call",
    ["send_and_receive", "push_messages", "pull_messages", "create_message", "set_run"],
)
def test_a_strategy_that_sends_while_it_configures_is_refused_when_it_does(call):
    inner = Sending(**BARE)
    inner.call = call

    with pytest.raises(InnerStrategyError, match=f"called grid.{call} while"):
        run([Node()], Buffered(1), inner=inner)


def test_a_strategy_that_trains_nobody_is_told_so():
    with pytest.raises(InnerStrategyError, match=r"is fraction_train 0\?"):
        run([Node()], Buffered(1), inner=FedAvg(**{**BARE, "fraction_train": 0.0}))


class Wrong(FedAvg):
    """A strategy that answers with something else than the model."""

    answer = None

    def aggregate_train(self, server_round, replies):
        return type(self).answer, None


def test_each_message_ends_once_also_where_the_strategy_ends_the_run():
    events = []

    with pytest.raises(InnerStrategyError, match="returned no model for 2 updates"):
        run([Node()] * 2, Tiered(2), inner=Wrong(**BARE), events=events)

    assert {len(ended) for ended in ends(events).values()} == {1}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "Odd.aggregate_train returned no model for 1 updates"),
        (model(3), r"Odd returned 'w' as \[3\], expected \[2\]"),
        (ArrayRecord({"v": Array(np.zeros(2))}), r"Odd returned arrays \['v'\]"),
        (ArrayRecord({"w": Array(np.full(2, np.nan))}), "Odd returned a bad model"),
    ],
    ids=["nothing", "a shape", "a name", "NaN"],
)
def test_a_strategy_that_returns_another_model_ends_the_run(answer, message):
    odd = type("Odd", (Wrong,), {"answer": answer})

    with pytest.raises(InnerStrategyError, match=message):
        run([Node()], Buffered(1), inner=odd(**BARE))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_a_model_that_would_overflow_is_not_published():
    nodes = [Node(1.0, delta=1e17)]

    with pytest.raises(InnerStrategyError, match="version 1 would not be finite"):
        run(nodes, Buffered(1), merge=Discounted(server_lr=1e3))


@pytest.mark.parametrize(
    ("initial", "message"),
    [
        (ArrayRecord(), "the model has no arrays"),
        (ArrayRecord({"w": Array(np.array([1, np.nan]))}), "1 of 2 values NaN"),
    ],
)
def test_a_first_model_that_cannot_be_trained_is_refused(initial, message, tmp_path):
    with pytest.raises(PayloadError, match=message):
        SemiAsync(fedavg()).start(emulated([Node()]), initial)

    assert not (tmp_path / "events.jsonl").exists()


def test_a_strategy_that_waits_for_more_nodes_gives_up_in_time():
    grid = emulated([Node()])

    with pytest.raises(NoNodesError, match="1 nodes connected after 30"):
        run(grid, Buffered(1), inner=FedAvg(), timeout=30.0)

    assert grid.clock.now() == 30.0


def test_one_node_is_enough_where_the_strategy_says_so():
    # FedAvg of Flower 1.42 would wait for ever for its two min_train_nodes.
    told = run(
        [Node()],
        Buffered(1),
        inner=FedAvg(min_available_nodes=1),
        rounds=1,
        start={"evaluate_config": ConfigRecord()},
    )

    assert len(told.of(ev.Merged)) == 1


def test_the_methods_of_flowers_interface_are_the_inner_strategys():
    class Noting(FedAvg):
        def configure_train(self, *arguments):
            return ["configure_train", *arguments]

        def aggregate_train(self, *arguments):
            return ["aggregate_train", *arguments]

        def configure_evaluate(self, *arguments):
            return ["configure_evaluate", *arguments]

        def aggregate_evaluate(self, *arguments):
            return MetricRecord({"round": arguments[0]})

    strategy = SemiAsync(Noting())

    assert strategy.configure_train(1, 2, 3, 4) == ["configure_train", 1, 2, 3, 4]
    assert strategy.aggregate_train(1, 2) == ["aggregate_train", 1, 2]
    assert strategy.configure_evaluate(1, 2, 3, 4) == ["configure_evaluate", 1, 2, 3, 4]
    assert strategy.aggregate_evaluate(7, []) == MetricRecord({"round": 7})
