"""Many seeds, random fleets, policies and failures: what holds in every run."""

import random

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, MetricRecord
from flwr.serverapp.strategy import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedYogi,
    Krum,
)

from flower_sap import SapMod, sap_mod
from flower_sap import events as ev
from flower_sap.payload.budget import Fixed
from flower_sap.payload.dense import Manifest, decode
from flower_sap.strategies import (
    AllOf,
    BoundedStaleness,
    Buffered,
    Deadline,
    FirstOf,
    FullyAsync,
    FullySync,
    Interval,
    Tiered,
)
from flower_sap.strategies.streaming_mean import StreamingMean
from tests.fakes import Node, emulated, ends, fedavg, merges, model, partition, run

SEEDS = range(5)
POLICIES = [
    FullySync(),
    FullyAsync(),
    Buffered(3),
    Interval(merges=3, buffer=2),
    Interval(merges=2, buffer=2, grace=0.5),
    Interval(merges=2, buffer=2, grace=0.0, drop_late=True),
    Interval(seconds=3.0, buffer=2, patience=0.5),
    BoundedStaleness(1, 2),
    Tiered(2),
    FirstOf(FullySync(), Deadline(2.0)),
    FirstOf(Tiered(3), Deadline(2.0)),
    AllOf(Buffered(2), Deadline(1.0)),
]


def fleet_of(seed, *, is_faulty=False, **settings):
    """Return five nodes of random speed and data; some fail or send nonsense."""
    rng = np.random.default_rng([seed, 77])

    def node():
        fails, spoils = rng.uniform(0, 0.3, 2) if is_faulty else (0.0, 0.0)
        key = int(rng.integers(1 << 30))

        def happens(chance, purpose):
            return lambda number: bool(
                np.random.default_rng([key, purpose, number]).random() < chance
            )

        return Node(
            seconds=int(rng.integers(3, 40)) / 8,
            delta=float(rng.normal()),
            shrink=float(rng.uniform(0.5, 1.0)),
            examples=int(rng.integers(1, 50)),
            fails=happens(fails, 1),
            spoils=happens(spoils, 2),
            spoil=(lambda reply: None) if is_faulty else None,
            **settings,
        )

    return [node() for _ in range(5)]


def arrays_of(record):
    return {name: (a.dtype, a.shape, a.data) for name, a in record.items()}


# --- 1: synchronous rounds are the inner strategy's ----------------------------------

BARE = {
    "fraction_evaluate": 0.0,
    "min_train_nodes": 1,
    "min_available_nodes": 1,
    "min_evaluate_nodes": 1,
}
STRATEGIES = {
    "FedAvg": (lambda: FedAvg(**BARE), "float32"),
    "FedProx": (lambda: FedProx(**BARE, proximal_mu=0.1), "float32"),
    "FedAvgM": (
        lambda: FedAvgM(**BARE, server_momentum=0.9, server_learning_rate=0.5),
        "float64",
    ),
    "FedAdam": (lambda: FedAdam(**BARE), "float64"),  # it gives float64 to float32
    "FedYogi": (lambda: FedYogi(**BARE), "float64"),
    "FedAdagrad": (lambda: FedAdagrad(**BARE), "float64"),
    "FedMedian": (lambda: FedMedian(**BARE), "float32"),
    "FedTrimmedAvg": (lambda: FedTrimmedAvg(**BARE, beta=0.2), "float32"),
    "Krum": (lambda: Krum(**BARE, num_malicious_nodes=1), "float32"),
}


@pytest.mark.parametrize(("strategy", "dtype"), STRATEGIES.values(), ids=STRATEGIES)
def test_synchronous_rounds_give_the_inner_strategys_model_to_the_last_bit(
    strategy, dtype
):
    nodes = [
        Node(1.0 + n / 8, delta=0.3 * n, shrink=0.9, noise=0.1, examples=n + 1)
        for n in range(5)
    ]
    initial = model(7, dtype)
    plain = strategy().start(
        emulated(nodes), initial, num_rounds=4, train_config=ConfigRecord({})
    )

    told = run(
        emulated(nodes), FullySync(), inner=strategy(), rounds=4, initial=initial
    )

    assert arrays_of(told.result.arrays) == arrays_of(plain.arrays)
    assert told.result.train_metrics_clientapp == plain.train_metrics_clientapp


# --- 2: an interval bounds the staleness ---------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("merges_", "buffer"), [(1, 1), (2, 1), (3, 2), (4, 3)])
def test_nobody_is_staler_than_the_interval_is_long(seed, merges_, buffer):
    told = run(fleet_of(seed), Interval(merges=merges_, buffer=buffer), rounds=6)

    assert max(e.staleness for e in told.of(ev.Merged)) <= merges_ - 1
    assert len(told.of(ev.Synchronized)) == 6


# --- 3: special cases are equal ------------------------------------------------------


class Endless(Interval):
    """An interval that never ends, whose merges count as rounds."""

    def ends_round(self, view):
        return True


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("general", "special"),
    [
        (Endless(buffer=1), Buffered(1)),
        (Endless(buffer=3), Buffered(3)),
        (Buffered(1), FullyAsync()),
        (FirstOf(Buffered(2), Deadline(1e9)), Buffered(2)),
        (Tiered(1), FullySync()),
    ],
)
def test_a_policy_equals_its_special_case_to_the_last_bit(seed, general, special):
    one = run(fleet_of(seed, noise=0.1), general, rounds=9)
    other = run(fleet_of(seed, noise=0.1), special, rounds=9)

    assert merges(one.events) == merges(other.events)
    assert arrays_of(one.result.arrays) == arrays_of(other.result.arrays)


# --- 4: every message ends once, and the counts add up -------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_every_message_ends_exactly_once_and_the_counts_add_up(seed, policy, fraction):
    inner = fedavg(fraction_evaluate=fraction)

    told = run(fleet_of(seed, is_faulty=True), policy, inner=inner, rounds=5)

    assert {len(ended) for ended in ends(told.events).values()} == {1}
    check_log(told)


def check_log(told):
    times = [event.time for event in told.events]
    made = told.of(ev.Aggregated)
    merged = told.of(ev.Merged)
    assert times == sorted(times)
    assert [e.version for e in made] == list(range(1, len(made) + 1))
    for each in made:
        parts = [e for e in merged if e.version == each.version]
        assert len(parts) == each.num_updates > 0
    assert all(e.staleness == e.version - 1 - e.base_version >= 0 for e in merged)
    last = told.result.history[-1]
    assert (last.version, last.num_updates) == (len(made), len(merged))
    dispatched = told.of(ev.Dispatched)
    assert last.bytes_down <= sum(e.nbytes for e in dispatched)
    assert len({e.message_id for e in dispatched}) == len(dispatched)


# --- 5: the seed decides -------------------------------------------------------------


def noisy_run(seed, policy, workers):
    grid = emulated(
        fleet_of(seed, is_faulty=True, noise=0.5),
        mods=[sap_mod],
        workers=workers,
        seed=seed,
    )
    try:
        return run(
            grid,
            policy,
            inner=fedavg(fraction_evaluate=0.5),
            rounds=4,
            concurrency=4,
            seed=seed,
        )
    finally:
        grid._grid.close()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_number_of_workers_changes_nothing(workers):
    alone = noisy_run(3, Buffered(2), 0)

    helped = noisy_run(3, Buffered(2), workers)

    assert helped.events == alone.events
    assert arrays_of(helped.result.arrays) == arrays_of(alone.result.arrays)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_the_same_seed_gives_the_same_run(policy):
    random.seed(1)
    one = noisy_run(1, policy, 0)
    random.seed(2)
    other = noisy_run(1, policy, 0)

    assert other.events == one.events
    assert arrays_of(other.result.arrays) == arrays_of(one.result.arrays)


def test_another_seed_gives_another_run():
    told = [
        run(fleet_of(0), Buffered(1), concurrency=2, seed=seed, rounds=9).events
        for seed in (0, 1)
    ]

    assert merges(told[0]) != merges(told[1])


@pytest.mark.parametrize("policy", [FullySync(), Buffered(2), Interval(merges=2)])
def test_the_global_generators_are_left_alone(policy):
    before = (
        random.getstate(),
        np.random.get_state()[1].tolist(),  # noqa: NPY002
        torch.random.get_rng_state().tolist(),
    )

    noisy_run(2, policy, 0)

    after = (
        random.getstate(),
        np.random.get_state()[1].tolist(),  # noqa: NPY002
        torch.random.get_rng_state().tolist(),
    )
    assert after == before


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "policy", [p for p in POLICIES if not p.starts_together()], ids=repr
)
def test_replaying_the_log_one_update_at_a_time_gives_the_same_model(seed, policy):
    nodes = fleet_of(seed, is_faulty=True)
    initial = model(5, counter=True)

    told = run(nodes, policy, rounds=6, initial=initial)

    assert replayed(told.events, nodes, initial) == [
        a.tolist() for a in decode(told.result.arrays, Manifest.of(initial))
    ]


def replayed(events, nodes, initial):
    """Return the model that the merges of a log make, each update made anew."""
    manifest = Manifest.of(initial)
    versions = [decode(initial, manifest)]
    for made in (e for e in events if isinstance(e, ev.Aggregated)):
        current = versions[-1]
        mean = StreamingMean(current, manifest)
        for merged in events:
            if isinstance(merged, ev.Merged) and merged.version == made.version:
                base = versions[merged.base_version]
                mean.add(
                    retrained(base, nodes[partition(merged.node_id)]),
                    base=base,
                    num_examples=merged.num_examples,
                    gain=merged.weight,
                    share=min(1.0, merged.weight),
                )
        versions.append(mean.models(1.0)[0][0])
    return [array.tolist() for array in versions[-1]]


def retrained(base, node):
    weights, counter = base
    moved = (weights * node.shrink + node.delta).astype(weights.dtype)
    return [moved, counter + 1]


# --- 10: integer buffers -------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("inner", [fedavg, lambda: FedAdam(**BARE)])
def test_counters_keep_their_dtype_and_count_the_longest_chain(policy, inner):
    initial = model(3, counter=True)

    told = run(fleet_of(4), policy, inner=inner(), rounds=5, initial=initial)

    counters = {0: 0}
    for merged in told.of(ev.Merged):
        trained = counters[merged.base_version] + 1
        before = counters[merged.version - 1]
        counters[merged.version] = max(counters.get(merged.version, before), trained)
    counted = told.result.arrays["bn.num_batches_tracked"].numpy()
    assert (counted.dtype, counted.shape) == (np.dtype("int64"), ())
    assert counted == counters[max(counters)]
    assert told.result.arrays["w"].numpy().dtype == np.float32


def test_an_evaluation_does_not_change_the_model():
    def evaluate(round_, arrays):
        arrays["w"] = model(9)["w"]
        return MetricRecord({"round": round_})

    told = run(fleet_of(0), Buffered(2), start={"evaluate_fn": evaluate})
    plain = run(fleet_of(0), Buffered(2))

    assert arrays_of(told.result.arrays) == arrays_of(plain.result.arrays)


# --- 6: sized messages ---------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_sized_messages_keep_their_budgets_and_end_once(policy, tmp_path):
    size, budget = 3000, 4096

    def log(folder, **local):
        nodes = fleet_of(3, is_faulty=True)
        grid = emulated(nodes, mods=[SapMod(tmp_path / folder)], **local)
        return run(
            grid, policy, rounds=8, initial=model(size), payload=Fixed(budget),
            downlink=Fixed(budget),
        )  # fmt: skip

    told, again = log("a"), log("b", workers=2)

    assert told.events == again.events
    assert arrays_of(told.result.arrays) == arrays_of(again.result.arrays)
    assert all(len(names) == 1 for names in ends(told.events).values())
    arrived = told.of(ev.Arrived)
    assert arrived
    assert all(event.nbytes <= budget for event in arrived)
