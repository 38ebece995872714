"""Run a ClientApp for one message, as a device's own process would.

The app gets its own context, and random generators seeded for this node and message;
the caller's generators are put back. So a run does not depend on which process trains
whom, even with a ClientApp that shuffles with global generators.
"""

import contextlib
import random
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from flower_sap._flower import CLIENT_APP_RAISED_EXCEPTION
from flower_sap.records import copy_records

_spare_generators: list[np.random.MT19937] = []


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """What a node's context says of it."""

    node_id: int
    partition_id: int
    num_partitions: int
    run_config: dict[str, bool | int | float | str]


@dataclass(slots=True)
class Outcome:
    """What came of one message: content or an error, and the node's next state."""

    content: RecordDict | None
    error: Error | None
    state: RecordDict


def run_client_app(
    app: ClientApp,
    message: Message,
    node: NodeIdentity,
    state: RecordDict,
    seeds: tuple[int, int],
) -> Outcome:
    """Answer one message.

    An exception becomes an error as in Flower's simulation: with the traceback, and
    the state as it was before.

    Parameters
    ----------
    app : ClientApp
        The client program.
    message : Message
        What it is sent; its records are the app's own from now on.
    node : NodeIdentity
        Who it runs on.
    state : RecordDict
        The node's state before.
    seeds : tuple of int
        Run seed, and the number of this message at this node.
    """
    context = Context(
        run_id=message.metadata.run_id,
        node_id=node.node_id,
        node_config={
            "partition-id": node.partition_id,
            "num-partitions": node.num_partitions,
        },
        state=copy_records(state),
        run_config=dict(node.run_config),
    )
    with _own_generators(seeds[0], node.partition_id, seeds[1]):
        try:
            reply = app(message, context)
        # Standing in for Flower, which answers any exception with an error reply.
        except Exception:
            return Outcome(None, _raised(traceback.format_exc()), state)
    if not isinstance(reply, Message):
        reason = f"the ClientApp returned {type(reply).__name__}, expected a Message"
        return Outcome(None, _raised(reason), state)
    if reply.has_error():
        return Outcome(None, reply.error, context.state)
    return Outcome(reply.content, None, context.state)


def _raised(reason: str) -> Error:
    return Error(CLIENT_APP_RAISED_EXCEPTION, reason)


@contextlib.contextmanager
def _own_generators(seed: int, partition_id: int, number: int) -> Iterator[None]:
    python, torch_ = random.getstate(), torch.random.get_rng_state()
    numpy_ = np.random.get_bit_generator()  # type: ignore[attr-defined]
    sequence = np.random.SeedSequence([seed, partition_id, number])
    first, second, third = (int(word) for word in sequence.generate_state(3))
    random.seed(first)
    # Another generator in numpy's place: copying the state of the old one out and in
    # would take 30 times longer, and so would a new one. A Mersenne twister, for an app
    # that calls np.random.seed; a list, for an app that runs others in itself.
    own = _spare_generators.pop() if _spare_generators else np.random.MT19937()
    np.random.set_bit_generator(own)  # type: ignore[attr-defined]
    np.random.seed(second)  # noqa: NPY002
    torch.default_generator.manual_seed(third)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_bit_generator(numpy_)  # type: ignore[attr-defined]
        _spare_generators.append(own)
        torch.random.set_rng_state(torch_)
