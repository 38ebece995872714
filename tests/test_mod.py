"""`sap_mod`: what a train reply tells besides the model."""

import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from flower_sap import events as ev
from flower_sap import sap_mod
from flower_sap._flower import ensure_task_identity
from flower_sap.strategies import Buffered
from tests.fakes import Node, emulated, model, run

CONTEXT = Context(0, 1001, {}, RecordDict(), {})


def call(metrics, config=None, message_type="train"):
    """Return the report that the mod adds to a reply with these metrics."""
    ensure_task_identity()
    message = Message(
        RecordDict({"config": ConfigRecord(config or {})}),
        dst_node_id=1001,
        message_type=message_type,
    )

    def answer(message, context):
        return Message(RecordDict({"m": MetricRecord(metrics)}), reply_to=message)

    return sap_mod(message, CONTEXT, answer).content.get("sap")


@pytest.mark.parametrize(
    ("metrics", "config", "told"),
    [
        (
            {"num-examples": 5},
            {"base-version": 3},
            {"base-version": 3, "samples-processed": 5},
        ),
        ({"num-examples": 5}, {"local-epochs": 4}, {"samples-processed": 20}),
        ({"num-examples": 5, "samples-processed": 7}, {}, {"samples-processed": 7}),
        ({"num-examples": 5.0, "num-steps": 9.0}, {}, {"num-steps": 9}),
        ({}, {"base-version": "three"}, {}),
        ({"num-steps": float("nan"), "samples-processed": float("inf")}, {}, {}),
        ({"num-steps": [1, 2]}, {"local-epochs": 0.5}, {}),
    ],
)
def test_the_report_repeats_what_server_and_app_said(metrics, config, told):
    report = call(metrics, config)

    assert report.pop("compute-seconds") >= 0
    assert dict(report) == told


@pytest.mark.parametrize("message_type", ["evaluate", "query", "evaluate.train"])
def test_only_train_replies_get_a_report(message_type):
    assert call({"num-examples": 5}, message_type=message_type) is None


def test_a_train_message_with_an_action_of_its_own_gets_one_too():
    assert call({"num-examples": 5}, message_type="train.distill") is not None


@pytest.mark.parametrize("answer", [None, "done"])
def test_what_is_no_reply_is_passed_on(answer):
    ensure_task_identity()
    message = Message(RecordDict(), dst_node_id=1001, message_type="train")

    assert sap_mod(message, CONTEXT, lambda message, context: answer) is answer


def test_flowers_fedavg_ignores_the_report():
    nodes = [Node(1.0), Node(1.5, delta=3.0, examples=3)]
    models = [
        FedAvg(fraction_evaluate=0.0)
        .start(
            emulated(nodes, mods=mods),
            model(),
            num_rounds=2,
            train_config=ConfigRecord({}),
        )
        .arrays["w"]
        .data
        for mods in ([], [sap_mod])
    ]

    assert models[0] == models[1]


def test_emulation_restates_the_computing_time_as_the_devices():
    told = run(emulated([Node(1.5), Node(2.25)], mods=[sap_mod]), Buffered(1), rounds=3)

    assert [(e.compute_seconds, e.num_samples) for e in told.of(ev.Arrived)] == [
        (1.5, 12),
        (2.25, 18),
        (1.5, 12),
    ]


def test_the_echoed_version_is_checked():
    told = run(emulated([Node(1.0)], mods=[sap_mod]), Buffered(1), rounds=3)

    assert told.of(ev.Rejected) == []
    assert [e.base_version for e in told.of(ev.Merged)] == [0, 1, 2]
