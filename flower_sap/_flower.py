"""The one file that touches what Flower does not promise to keep.

Each use is pinned by `tests/test_flower_internals.py`, which names the release.
"""

import contextlib
import logging
import random
from collections.abc import Iterator

from flwr.app import Message, RecordDict
from flwr.common import log as log
from flwr.common.serde import (
    message_to_proto,
    recorddict_from_proto,
    recorddict_to_proto,
)
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.supercore.task_identity import TaskIdentity

# flwr.common.constant.ErrorCode of 1.42 (the wire knows only the numbers)
CLIENT_APP_RAISED_EXCEPTION = 2
CLIENT_APP_CRASHED = 8

_SERVER_NODE_ID = 1


def ensure_task_identity(run_id: int = 0) -> None:
    """Let `Message(...)` be built outside a Flower process (1.42 refuses otherwise).

    An identity that is already set, as inside a Flower run, is left alone.
    """
    try:
        _ = TaskIdentity.run_id
    except RuntimeError:
        TaskIdentity.run_id = run_id
        TaskIdentity.node_id = _SERVER_NODE_ID
        TaskIdentity.task_id = 0


@contextlib.contextmanager
def quiet_sampling(key: str) -> Iterator[None]:
    """Ask an inner strategy for its messages without its side effects.

    Flower 1.42 draws its sample from Python's global generator and logs a line for
    each. Here the draw depends on `key` alone, the generator is as before afterwards,
    and the line is held back.
    """
    logger = logging.getLogger("flwr")
    state = random.getstate()
    random.seed(key)
    logger.addFilter(_is_warning)
    try:
        yield
    finally:
        random.setstate(state)
        logger.removeFilter(_is_warning)


def _is_warning(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING


def num_content_bytes(content: RecordDict) -> int:
    """Return the bytes of all records, as Flower counts them (no envelope)."""
    return sum(record.count_bytes() for record in content.values())


def num_message_bytes(message: Message) -> int:
    """Return the bytes of a message as Flower serializes it, envelope included."""
    return int(message_to_proto(message).ByteSize())


def set_message_id(message: Message, message_id: str) -> None:
    """Give a message its id, as Flower's own grids do when it is pushed."""
    message.metadata.__dict__["_message_id"] = message_id


def content_to_bytes(content: RecordDict) -> bytes:
    """Return the content in Flower's own wire format."""
    data: bytes = recorddict_to_proto(content).SerializeToString()
    return data


def content_from_bytes(data: bytes) -> RecordDict:
    """Return the content that `content_to_bytes` wrote."""
    return recorddict_from_proto(ProtoRecordDict.FromString(data))
