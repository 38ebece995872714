"""Sized replies, end to end: a rule, `sap_mod`, and the engine between them."""

from typing import ClassVar

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedMedian,
    Krum,
)

from flower_sap import Buffered, Deadline, FirstOf, FullySync, RunOptions
from flower_sap import events as ev
from flower_sap._flower import num_message_bytes
from flower_sap.clients.mod import SapMod
from flower_sap.emulation import (
    Device,
    EmulatedGrid,
    Fleet,
    Link,
    LocalGrid,
    NodeProfile,
)
from flower_sap.errors import AllClientsFailedError
from flower_sap.payload import entropy
from flower_sap.payload.budget import BandwidthAdaptive, Fixed, Fraction
from flower_sap.payload.layout import Treatment
from flower_sap.strategies import Constant, Fidelity, SemiAsync, fedasync
from tests.fakes import Node, fedavg, fleet, partition, run, scripted

SHAPES = {"a": (120, 200), "b": (200,), "head": (10, 20)}
TARGET = {
    name: np.random.default_rng(5).standard_normal(shape).astype(np.float32)
    for name, shape in SHAPES.items()
}


def zeros():
    return ArrayRecord({k: Array(np.zeros(s, np.float32)) for k, s in SHAPES.items()})


def pulled(*mods, share=0.5, spoil=None, sizes=None, states=None):
    """Return an app whose every training goes part of the way to one target."""
    app = ClientApp()

    def measured(message, context, call_next):
        reply = call_next(message, context)
        if sizes is not None:
            budget = message.content["config"].get("payload-budget")
            sizes.append((budget, num_message_bytes(reply)))
        number = message.content["config"]["dispatch-number"]
        return reply if spoil is None else spoil(reply, context, number)

    @app.train(mods=[measured, *mods])
    def _train(message, context):
        if states is not None:
            states.append(dict(context.state))
        arrays = {
            name: Array((w + share * (TARGET[name] - w)).astype(np.float32))
            for name, w in (
                (name, array.numpy())
                for name, array in message.content["arrays"].items()
            )
        }
        examples = 5 - context.node_config["partition-id"]
        metrics = MetricRecord({"num-examples": examples, "samples-processed": 8})
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def grid_of(app, num_nodes=2, **local):
    return EmulatedGrid(LocalGrid(app, num_nodes, **local), fleet(num_nodes))


def distance(result, names=SHAPES):
    """Return how far the model is from the target, as a share of the way."""
    apart = sum(
        float(((result.arrays[n].numpy() - TARGET[n]) ** 2).sum()) for n in names
    )
    return (apart / sum(float((TARGET[n] ** 2).sum()) for n in names)) ** 0.5


def test_every_reply_is_within_its_budget_as_flower_serializes_it(tmp_path):
    sizes = []
    app = pulled(SapMod(tmp_path), sizes=sizes)

    told = run(
        grid_of(app), Buffered(1), rounds=20, initial=zeros(), payload=Fraction(1 / 16)
    )

    asked = {e.message_id: e.budget for e in told.of(ev.Dispatched)}
    assert set(asked.values()) == {int(sum(v.nbytes for v in TARGET.values()) / 16)}
    for budget, size in sizes:
        assert 0.9 * budget < size <= budget
    for event in told.of(ev.Arrived):
        assert event.nbytes <= asked[event.message_id]
        assert 0 < event.relative_error < 1


def test_with_feedback_few_bytes_lead_to_the_same_model(tmp_path):
    app = pulled(SapMod(tmp_path))

    told = run(
        grid_of(app, 1),
        Buffered(1),
        rounds=60,
        initial=zeros(),
        payload=Fraction(1 / 24),
    )

    assert not told.of(ev.Rejected, ev.Failed, ev.ResidualLost)
    assert distance(told.result) < 0.05


def test_a_rejected_payload_is_carried_over_whole(tmp_path):
    def spoil(reply, context, number):
        if number == 2:  # lost on its way: the server cannot use what comes
            reply.content["metrics"] = MetricRecord({"num-examples": -1})
        return reply

    good = run(
        grid_of(pulled(SapMod(tmp_path / "a")), 1), Buffered(1), rounds=4,
        initial=zeros(), payload=Fixed(8192),
    )  # fmt: skip
    lossy = run(
        grid_of(pulled(SapMod(tmp_path / "b"), spoil=spoil), 1), Buffered(1), rounds=4,
        initial=zeros(), payload=Fixed(8192),
    )  # fmt: skip

    assert len(lossy.of(ev.Rejected)) == 1
    assert not lossy.of(ev.ResidualLost)
    # A training more was done, and what it said was not lost but delayed.
    assert distance(lossy.result) < distance(good.result) + 0.05


def test_a_lost_residual_is_noticed(tmp_path):
    def spoil(reply, context, number):
        if number == 3:
            for path in tmp_path.iterdir():
                path.unlink()
        return reply

    told = run(
        grid_of(pulled(SapMod(tmp_path), spoil=spoil), 1), Buffered(1), rounds=6,
        initial=zeros(), payload=Fixed(8192),
    )  # fmt: skip

    (lost,) = told.of(ev.ResidualLost)
    assert (lost.expected, lost.found) == (3, 0)


def test_an_outdated_file_is_as_good_as_none(tmp_path):
    older = {}

    def spoil(reply, context, number):
        (path,) = tmp_path.iterdir()
        older[number] = path.read_bytes()
        if number == 3:  # a disk that was put back to an earlier state
            path.write_bytes(older[2])
        return reply

    told = run(
        grid_of(pulled(SapMod(tmp_path), spoil=spoil), 1), Buffered(1), rounds=5,
        initial=zeros(), payload=Fixed(8192),
    )  # fmt: skip

    assert [(e.expected, e.found) for e in told.of(ev.ResidualLost)] == [(3, 0)]


def test_a_restarted_client_goes_on_with_its_residual(tmp_path):
    whole = run(
        grid_of(pulled(SapMod(tmp_path / "a")), 1), Buffered(1), rounds=5,
        initial=zeros(), payload=Fixed(8192),
    )  # fmt: skip

    def forget(reply, context, number):
        context.state.clear()  # as a SuperNode does that is started again
        return reply

    again = run(
        grid_of(pulled(SapMod(tmp_path / "b"), spoil=forget), 1), Buffered(1), rounds=5,
        initial=zeros(), payload=Fixed(8192),
    )  # fmt: skip

    for name in SHAPES:
        np.testing.assert_array_equal(
            whole.result.arrays[name].numpy(), again.result.arrays[name].numpy()
        )


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(tmp_path, workers):
    def result(folder, **local):
        grid = grid_of(pulled(SapMod(folder)), 3, **local)
        return run(grid, Buffered(2), rounds=6, initial=zeros(), payload=Fixed(8192))

    alone, together = result(tmp_path / "a"), result(tmp_path / "b", workers=workers)

    assert alone.events == together.events
    for name in SHAPES:
        np.testing.assert_array_equal(
            alone.result.arrays[name].numpy(), together.result.arrays[name].numpy()
        )


@pytest.mark.parametrize(
    "inner",
    [
        lambda: FedAdam(min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0),
        lambda: FedMedian(
            min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0
        ),
        lambda: Krum(min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0),
    ],
)
def test_inner_strategies_see_models_whatever_came(tmp_path, inner):
    told = run(
        grid_of(pulled(SapMod(tmp_path)), 4), Buffered(3), rounds=5, initial=zeros(),
        inner=inner(), payload=Fixed(20_000),
    )  # fmt: skip

    assert not told.of(ev.Rejected, ev.Failed)
    assert distance(told.result) < 0.99


def test_streamed_and_densified_payloads_give_the_same_mean(tmp_path):
    streamed = run(
        grid_of(pulled(SapMod(tmp_path / "a")), 3), Buffered(3), rounds=3,
        initial=zeros(), payload=Fixed(20_000),
    )  # fmt: skip
    dense = run(
        grid_of(pulled(SapMod(tmp_path / "b")), 3), FullySync(), rounds=3,
        initial=zeros(), payload=Fixed(20_000),
    )  # fmt: skip

    for name in SHAPES:
        np.testing.assert_allclose(
            streamed.result.arrays[name].numpy(),
            dense.result.arrays[name].numpy(),
            atol=1e-5,
        )


def test_payloads_can_be_mixed_in_as_whole_models(tmp_path):
    strategy = fedasync(fedavg(), options=RunOptions(events=None, progress=False))
    sized = run(
        grid_of(pulled(SapMod(tmp_path)), 2), strategy.parts.sync, rounds=8,
        initial=zeros(), merge=strategy.parts.merge, payload=Fraction(1 / 4),
    )  # fmt: skip
    plain = run(
        grid_of(pulled(), 2), strategy.parts.sync, rounds=8, initial=zeros(),
        merge=strategy.parts.merge,
    )  # fmt: skip

    assert distance(sized.result) == pytest.approx(distance(plain.result), abs=0.02)


def test_a_client_without_the_mod_answers_with_plain_arrays():
    told = run([Node(1.0), Node(2.0)], Buffered(1), rounds=4, payload=Fraction(1 / 16))

    assert not told.of(ev.Rejected, ev.Failed)
    assert all(event.relative_error is None for event in told.of(ev.Arrived))
    assert told.weights[0] > 0


def test_plain_and_sized_replies_average_in_one_buffer(tmp_path):
    mod = SapMod(tmp_path)

    def only_the_first(message, context, call_next):
        if context.node_config["partition-id"] == 0:
            return mod(message, context, call_next)
        return call_next(message, context)

    told = run(
        grid_of(pulled(only_the_first, share=1.0), 2), Buffered(2), rounds=1,
        initial=zeros(), payload=Fraction(0.6),
    )  # fmt: skip

    assert {e.relative_error is None for e in told.of(ev.Arrived)} == {True, False}
    assert distance(told.result) < 1e-3


def test_local_arrays_never_leave_a_client_and_protected_ones_are_exact(tmp_path):
    told = run(
        grid_of(pulled(SapMod(tmp_path), share=1.0), 2), Buffered(2), rounds=1,
        initial=zeros(), payload=Fixed(8192),
        treatment=Treatment(protect=("b",), local_keys=("head",)),
    )  # fmt: skip

    assert not told.result.arrays["head"].numpy().any()
    assert distance(told.result, ["b"]) < 1e-3
    assert distance(told.result, ["a"]) > 0.1


def test_a_client_that_sends_more_than_it_was_granted_is_refused(tmp_path):
    def greedy(message, context, call_next):
        config = message.content["config"]
        config["payload-budget"] = 2 * config["payload-budget"]
        return SapMod(tmp_path)(message, context, call_next)

    with pytest.raises(AllClientsFailedError, match="bytes, 8192 were granted"):
        run(
            grid_of(pulled(greedy), 1), Buffered(1), initial=zeros(),
            payload=Fixed(8192),
        )  # fmt: skip


def test_the_numbers_of_payloads_are_in_the_state(tmp_path):
    states = []

    run(
        grid_of(pulled(SapMod(tmp_path), states=states), 1), Buffered(1), rounds=3,
        initial=zeros(), payload=Fixed(8192),
    )  # fmt: skip

    assert [dict(s.get("sap", ConfigRecord())) for s in states] == [
        {},
        {"payload-number": 1},
        {"payload-number": 2},
    ]


def test_a_run_with_plain_messages_sends_no_word_of_payloads():
    keys = []

    def note(message, context, call_next):
        keys.extend(message.content["config"])
        return call_next(message, context)

    app = scripted([Node()], mods=[note])
    run(EmulatedGrid(LocalGrid(app, 1), fleet(1)), Buffered(1), rounds=1)

    assert not [key for key in keys if key.startswith("payload")]


# --- what goes out ------------------------------------------------------------------


def test_what_goes_out_shrinks_once_a_node_holds_a_model(tmp_path):
    told = run(
        grid_of(pulled(SapMod(tmp_path)), 1), Buffered(1), rounds=6, initial=zeros(),
        payload=Fraction(1 / 8), downlink=Fraction(1 / 8),
    )  # fmt: skip

    first, *later = [event.nbytes for event in told.of(ev.Dispatched)]
    whole = sum(values.nbytes for values in TARGET.values())
    assert first > whole
    assert all(nbytes < whole / 6 for nbytes in later)
    assert not told.of(ev.Rejected, ev.Failed)


def test_a_coarse_model_that_goes_out_still_leads_to_the_target(tmp_path):
    told = run(
        grid_of(pulled(SapMod(tmp_path)), 1), Buffered(1), rounds=60, initial=zeros(),
        payload=Fraction(1 / 16), downlink=Fraction(1 / 16),
    )  # fmt: skip

    # Nodes and server would drift apart if they did not agree on what is held.
    assert not told.of(ev.Rejected, ev.Failed)
    assert distance(told.result) < 0.05


def test_a_node_with_a_new_disk_is_sent_the_whole_model_again(tmp_path):
    def spoil(reply, context, number):
        if number == 3:
            for path in tmp_path.iterdir():
                path.unlink()
        return reply

    told = run(
        grid_of(pulled(SapMod(tmp_path), spoil=spoil), 1), Buffered(1), rounds=6,
        initial=zeros(), payload=Fixed(8192), downlink=Fixed(8192),
    )  # fmt: skip

    (failed,) = told.of(ev.Failed)
    assert "does not have" in failed.reason
    whole = sum(values.nbytes for values in TARGET.values())
    sizes = [event.nbytes for event in told.of(ev.Dispatched)]
    assert [nbytes > whole for nbytes in sizes[:6]] == [
        True, False, False, False, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize("workers", [2])
def test_workers_change_nothing_where_both_directions_are_sized(tmp_path, workers):
    def result(folder, **local):
        return run(
            grid_of(pulled(SapMod(folder)), 3, **local), Buffered(2), rounds=6,
            initial=zeros(), payload=Fixed(8192), downlink=Fixed(8192),
        )  # fmt: skip

    alone, together = result(tmp_path / "a"), result(tmp_path / "b", workers=workers)

    assert alone.events == together.events


def test_a_downlink_rule_needs_sized_replies():
    with pytest.raises(ValueError, match="downlink needs payload"):
        SemiAsync(downlink=Fixed(8192))


def test_what_goes_out_is_within_its_budget(tmp_path):
    told = run(
        grid_of(pulled(SapMod(tmp_path)), 2), Buffered(1), rounds=8, initial=zeros(),
        payload=Fixed(8192), downlink=Fixed(8192),
    )  # fmt: skip

    sizes = [event.nbytes for event in told.of(ev.Dispatched)][2:]
    assert all(6000 < nbytes <= 8192 for nbytes in sizes)


@pytest.mark.parametrize(
    "wrapper",
    [
        DifferentialPrivacyServerSideFixedClipping,
        DifferentialPrivacyServerSideAdaptiveClipping,
    ],
)
def test_privacy_wrappers_clip_and_noise_what_payloads_decode_to(tmp_path, wrapper):
    settings = (
        {"clipping_norm": 5.0}
        if wrapper is DifferentialPrivacyServerSideFixedClipping
        else {"initial_clipping_norm": 5.0}
    )
    inner = wrapper(fedavg(), 1e-4, num_sampled_clients=3, **settings)

    told = run(
        grid_of(pulled(SapMod(tmp_path)), 3), FullySync(), rounds=3, initial=zeros(),
        inner=inner, payload=Fixed(20_000),
    )  # fmt: skip

    assert not told.of(ev.Rejected, ev.Failed)
    moved = np.concatenate([a.numpy().ravel() for a in told.result.arrays.values()])
    assert 0 < np.linalg.norm(moved) < 3 * 5.1


def test_what_a_payload_could_not_say_can_lower_its_weight(tmp_path):
    told = run(
        grid_of(pulled(SapMod(tmp_path)), 1), Buffered(1), rounds=2, initial=zeros(),
        payload=Fixed(4096), contribution=Fidelity(), staleness=Constant(),
    )  # fmt: skip

    errors = [event.relative_error for event in told.of(ev.Arrived)]
    weights = [event.weight for event in told.of(ev.Merged)]
    assert weights == [pytest.approx(max(0.1, 1 - error**2)) for error in errors[:2]]


# --- bandwidth ----------------------------------------------------------------------


class Falling(Link):
    """A link whose rates fall to a tenth after so many uploads."""

    uploads: ClassVar[dict[int, int]] = {}

    def _share(self) -> float:
        return 0.1 if self.uploads.get(id(self), 0) > 5 else 1.0

    def down_seconds(self, nbytes):
        return nbytes / (self.downlink * self._share())

    def up_seconds(self, nbytes):
        self.uploads[id(self)] = self.uploads.get(id(self), 0) + 1
        return nbytes / (self.uplink * self._share())


def test_a_budget_follows_a_link_that_falls_to_a_tenth_within_three_messages(tmp_path):
    steady, falling = Link(4000.0, 4000.0), Falling(4000.0, 4000.0)
    nodes = tuple(NodeProfile(Device("d", 8.0), link) for link in (steady, falling))
    grid = EmulatedGrid(LocalGrid(pulled(SapMod(tmp_path)), 2), Fleet(nodes))
    rule = BandwidthAdaptive(most=1.0, least=1 / 64, first=1 / 16)

    told = run(
        grid, FirstOf(FullySync(), Deadline(20.0)), rounds=30, initial=zeros(),
        payload=rule, downlink=Fixed(4096),
    )  # fmt: skip

    sent = {e.message_id: e for e in told.of(ev.Dispatched)}
    trips = [
        (sent[e.message_id].budget, e.time - sent[e.message_id].time)
        for e in told.of(ev.Arrived)
        if partition(e.node_id) == 1
    ]
    before, after = trips[2:5], trips[8:]
    assert len(after) >= 4
    assert all(seconds <= 20.0 for _, seconds in before + after)
    assert min(b for b, _ in before) > 8 * max(b for b, _ in after)
    # What is granted is used: neither side leaves the deadline far away.
    assert all(seconds > 10.0 for _, seconds in before)


def test_a_client_without_the_entropy_coder_is_granted_what_blocks_take(tmp_path):
    mod = SapMod(tmp_path)

    def without(message, context, call_next):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(entropy, "pcodec", None)
            return mod(message, context, call_next)

    told = run(
        grid_of(pulled(without), 1), Buffered(1), rounds=4, initial=zeros(),
        payload=Fixed(4096),
    )  # fmt: skip

    errors = [event.relative_error for event in told.of(ev.Arrived)]
    assert errors[0] == 1.0  # nobody knew yet, and no levels could be sent
    assert all(error < 0.05 for error in errors[1:])
    budgets = [event.budget for event in told.of(ev.Dispatched)]
    assert budgets[0] == 4096
    assert all(24_200 < budget < 32_000 for budget in budgets[1:])
