"""Nodes whose work, time and mistakes are written down, and runs of them.

Every emulated device computes 8 samples a second and a node says how many it
processed, so that times are multiples of 1/8 s and exact in binary: what a test
expects can be computed by hand and compared with ``==``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy

from flower_sap import events as ev
from flower_sap.emulation import (
    Device,
    EmulatedGrid,
    Fleet,
    Link,
    LocalGrid,
    NodeProfile,
)
from flower_sap.strategies import RunOptions, RunResult, SemiAsync, SyncPolicy

RATE = 8.0  # samples per second of every device
FIRST = 1001  # node id of partition 0
NO_LINK = Link(float("inf"), float("inf"))


@dataclass(frozen=True)
class Node:
    """What one node does with every message.

    `fails` and `spoils` are asked with the number of the message at this node, from 1;
    a spoilt reply is what `spoil` makes of the good one.
    """

    seconds: float = 1.0
    delta: float = 1.0
    shrink: float = 1.0  # the model is multiplied by this before the delta is added
    noise: float = 0.0  # drawn from numpy's global generator
    examples: int = 1
    fails: Callable[[int], bool] = lambda number: False
    spoils: Callable[[int], bool] = lambda number: True
    spoil: Callable[[Message], Any] | None = None
    metrics: dict[str, Any] = field(default_factory=dict)


def model(
    size: int = 2, dtype: str = "float32", *, counter: bool = False
) -> ArrayRecord:
    """Return a model of zeros, with a batch counter if wanted."""
    arrays = {"w": np.zeros(size, dtype)}
    if counter:
        arrays["bn.num_batches_tracked"] = np.array(0, np.int64)
    return ArrayRecord({name: Array(values) for name, values in arrays.items()})


def train(message: Message, node: Node) -> Message:
    """Return the model moved by the node's delta, counters by one."""
    arrays = {
        name: Array(_moved(array.numpy(), node))
        for name, array in message.content["arrays"].items()
    }
    metrics = MetricRecord(
        {
            "num-examples": node.examples,
            "samples-processed": int(node.seconds * RATE),
            **node.metrics,
        }
    )
    return Message(
        RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}),
        reply_to=message,
    )


def _moved(values: np.ndarray, node: Node) -> np.ndarray:
    if values.dtype.kind in "iu":
        return np.asarray(values + 1)
    moved = values * node.shrink + node.delta
    if node.noise:
        drawn = np.random.standard_normal(values.shape)  # noqa: NPY002
        moved = moved + node.noise * drawn
    return moved.astype(values.dtype)


def scripted(
    nodes: Sequence[Node], *, evaluates: bool = True, mods: Sequence[Any] = ()
) -> ClientApp:
    """Return a ClientApp in which partition i behaves as `nodes[i]`."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def _train(message, context):
        node = nodes[context.node_config["partition-id"]]
        number = message.content["config"].get("dispatch-number", 1)
        if node.fails(number):
            raise RuntimeError(f"no training today ({number})")
        reply = train(message, node)
        if node.spoil is not None and node.spoils(number):
            return node.spoil(reply)
        return reply

    if evaluates:

        @app.evaluate()
        def _evaluate(message, context):
            node = nodes[context.node_config["partition-id"]]
            weights = message.content["arrays"]["w"].numpy()
            metrics = MetricRecord(
                {
                    "num-examples": node.examples,
                    "loss": float(weights[0]),
                }
            )
            return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def fleet(num_nodes: int) -> Fleet:
    """Return equal devices without transfer times."""
    return Fleet((NodeProfile(Device("d", RATE), NO_LINK),) * num_nodes)


def emulated(
    nodes: Sequence[Node],
    *,
    kind: type[EmulatedGrid] = EmulatedGrid,
    evaluates: bool = True,
    mods: Sequence[Any] = (),
    **local: Any,
) -> EmulatedGrid:
    """Return a grid on which `nodes` live."""
    app = scripted(nodes, evaluates=evaluates, mods=mods)
    return kind(LocalGrid(app, len(nodes), **local), fleet(len(nodes)))


def fedavg(**settings: Any) -> FedAvg:
    """Return a FedAvg that runs with one node and does not evaluate."""
    chosen = {
        "fraction_evaluate": 0.0,
        "min_available_nodes": 1,
        "min_train_nodes": 1,
        "min_evaluate_nodes": 1,
        **settings,
    }
    return FedAvg(**chosen)


@dataclass
class Run:
    """A finished run: its result and its whole event log."""

    events: list[ev.Event]
    result: RunResult

    @property
    def weights(self) -> np.ndarray:
        """Return the final ``w``."""
        return self.result.arrays["w"].numpy()

    def of(self, *kinds: type) -> list[ev.Event]:
        """Return the events of some kinds, in order."""
        return [event for event in self.events if isinstance(event, kinds)]


def run(
    grid: Any,
    sync: SyncPolicy,
    *,
    inner: Strategy | None = None,
    rounds: int = 3,
    initial: ArrayRecord | None = None,
    timeout: float = 3600.0,
    seed: int = 0,
    events: list[ev.Event] | None = None,
    start: dict[str, Any] | None = None,
    **parts: Any,
) -> Run:
    """Run `SemiAsync` on a grid, or on a list of nodes, and note all events."""
    if isinstance(grid, list):
        grid = emulated(grid)
    log: list[ev.Event] = [] if events is None else events
    strategy = SemiAsync(
        inner or fedavg(),
        sync=sync,
        options=RunOptions(
            seed=seed, events=None, observers=(log.append,), progress=False
        ),
        **parts,
    )
    result = strategy.start(
        grid,
        model() if initial is None else initial,
        num_rounds=rounds,
        timeout=timeout,
        train_config=ConfigRecord({}),
        **(start or {}),
    )
    return Run(log, result)


def partition(node_id: int) -> int:
    """Return the partition of an emulated node."""
    return node_id - FIRST


def merges(events: Sequence[ev.Event]) -> list[tuple[float, int, int, int, float]]:
    """Return (time, partition, version, staleness, weight) of each merged update."""
    return [
        (e.time, partition(e.node_id), e.version, e.staleness, e.weight)
        for e in events
        if isinstance(e, ev.Merged)
    ]


def ends(events: Sequence[ev.Event]) -> dict[str, list[str]]:
    """Return message id to the names of the events that ended it."""
    ended: dict[str, list[str]] = {
        e.message_id: [] for e in events if isinstance(e, ev.Dispatched)
    }
    for event in events:
        is_answer = isinstance(event, ev.Arrived) and event.purpose == "evaluate"
        if is_answer or isinstance(
            event, ev.Merged | ev.Rejected | ev.Failed | ev.Expired | ev.Dropped
        ):
            ended[event.message_id].append(type(event).__name__)
    return ended
