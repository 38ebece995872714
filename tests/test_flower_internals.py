"""What `flower_sap._flower` uses of Flower without a promise, pinned for flwr 1.42.

When one of these fails with a newer flwr, that file is the only one to change.
"""

import inspect
import logging
import random

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
from flwr.common.constant import ErrorCode
from flwr.serverapp.strategy import FedAvg, Strategy
from flwr.supercore.task_identity import TaskIdentity

from flower_sap import _flower
from flower_sap.strategies import SemiAsync
from flower_sap.strategies.stand_in_grid import StandInGrid

CONTENT = RecordDict(
    {
        "arrays": ArrayRecord({"w": Array(np.arange(3, dtype=np.float32))}),
        "metrics": MetricRecord({"loss": 0.5, "per-class": [1, 2]}),
        "config": ConfigRecord(
            {"name": "x", "raw": b"\x00\x01", "flags": [True, False]}
        ),
    }
)


@pytest.fixture
def no_identity(monkeypatch):
    for name in ("_run_id", "_node_id", "_task_id"):
        if hasattr(TaskIdentity, name):
            monkeypatch.setattr(TaskIdentity, name, None)


def test_the_error_codes_are_flowers():
    assert _flower.CLIENT_APP_RAISED_EXCEPTION == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    assert _flower.CLIENT_APP_CRASHED == ErrorCode.CLIENT_APP_CRASHED


def test_a_message_can_be_built_outside_a_flower_process():
    _flower.ensure_task_identity()

    message = Message(RecordDict(), dst_node_id=7, message_type="train")

    assert message.metadata.dst_node_id == 7
    assert message.metadata.message_id == ""


def test_an_identity_that_is_set_stays():
    _flower.ensure_task_identity()
    before = TaskIdentity.run_id

    _flower.ensure_task_identity(run_id=before + 1)

    assert TaskIdentity.run_id == before


def test_a_message_takes_the_id_that_it_is_given():
    _flower.ensure_task_identity()
    message = Message(RecordDict(), dst_node_id=7, message_type="train")

    _flower.set_message_id(message, "message-3")
    reply = Message(RecordDict(), reply_to=message)

    assert message.metadata.message_id == "message-3"
    assert reply.metadata.reply_to_message_id == "message-3"
    assert reply.metadata.src_node_id == 7


def test_contents_survive_the_wire_format():
    read = _flower.content_from_bytes(_flower.content_to_bytes(CONTENT))

    assert read == CONTENT
    assert _flower.content_from_bytes(_flower.content_to_bytes(RecordDict())) == (
        RecordDict()
    )


def test_bytes_are_those_that_flower_counts():
    counted = _flower.num_content_bytes(CONTENT)

    assert counted == sum(record.count_bytes() for record in CONTENT.values())
    assert len(CONTENT["arrays"]["w"].data) <= counted


def test_flowers_log_is_the_logger_that_is_held_back(caplog):
    logger = logging.getLogger("flwr")
    assert _flower.log.__self__ is logger


def test_sampling_is_quiet_keyed_and_leaves_the_generator_alone(caplog, monkeypatch):
    logger = logging.getLogger("flwr")
    monkeypatch.setattr(logger, "propagate", True)
    level = logger.level
    logger.setLevel(logging.INFO)
    before = random.getstate()

    with _flower.quiet_sampling("a"):
        first = random.random()
        logger.info("sampled")
        logger.warning("look")
    with _flower.quiet_sampling("a"):
        again = random.random()
    with _flower.quiet_sampling("b"):
        other = random.random()
    logger.setLevel(level)

    assert [record.message for record in caplog.records] == ["look"]
    assert first == again != other
    assert random.getstate() == before
    assert logger.filters == []


def test_flower_draws_its_sample_from_the_global_generator():
    grid = StandInGrid(range(40))
    strategy = FedAvg(fraction_train=0.5)

    def drawn(key):
        with _flower.quiet_sampling(key):
            messages = strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid)
        return [message.metadata.dst_node_id for message in messages]

    assert drawn("a") == drawn("a") != drawn("b")


def test_start_takes_flowers_arguments_in_flowers_order():
    flowers = list(inspect.signature(Strategy.start).parameters)
    ours = list(inspect.signature(SemiAsync.start).parameters)

    assert ours[: len(flowers)] == flowers
    assert set(ours) - set(flowers) <= {"should_stop"}  # of flwr 1.43
