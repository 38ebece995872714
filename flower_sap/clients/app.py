"""The Flower `ClientApp` that trains a task on a node's examples.

The idea: a reply is a pure function of the message, the node's partition id and the
seed. What is kept between messages, one model's memory, is overwritten by each; so
replies do not depend on which process answers, nor on what it answered before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any, TypeAlias

import numpy as np
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp

from flower_sap.clients.local_sgd import LocalSgd
from flower_sap.clients.task import Task, build_model, score_examples
from flower_sap.clients.weights import ModelArrays
from flower_sap.data import FederatedData
from flower_sap.isolation import one_thread, torch_seed
from flower_sap.wire import DISPATCH_NUMBER

Mod: TypeAlias = Callable[
    [Message, Context, Callable[[Message, Context], Message]], Message
]
_PURPOSE = 4  # keys the generator of one local training


@dataclass(frozen=True, slots=True)
class LocalWork:
    """The work that a train message asks for.

    Parameters
    ----------
    num_steps : int
        SGD steps, >= 1.
    learning_rate : float
        > 0.
    draw : int
        Which shuffle: the dispatch number, or else the round, >= 0.
    """

    num_steps: int
    learning_rate: float
    draw: int

    @classmethod
    def from_config(
        cls, config: ConfigRecord, task: Task, num_examples: int
    ) -> "LocalWork":
        """Read a message's config; see `client_app` for its keys."""
        if "local-steps" in config:
            num_steps = _whole(config, "local-steps", 1)
        else:
            epochs = (
                _whole(config, "local-epochs", 1) if "local-epochs" in config else 1
            )
            num_steps = epochs * -(-num_examples // task.batch_size)
        counter = DISPATCH_NUMBER if DISPATCH_NUMBER in config else "server-round"
        return cls(num_steps, _learning_rate(config, task), _whole(config, counter, 0))


class Learner:
    """Answers the messages of all nodes in one process.

    Parameters
    ----------
    task : Task
    data : FederatedData
    seed : int
        >= 0.
    """

    def __init__(self, task: Task, data: FederatedData, seed: int) -> None:
        self._task = task
        self._data = data
        self._seed = seed

    def __reduce__(self) -> tuple[type["Learner"], tuple[Any, ...]]:
        """Copy what it was made of."""
        # Backends with worker processes send copies; a model's views into shared memory
        # would arrive as separate tensors, so each process builds its own.
        return Learner, (self._task, self._data, self._seed)

    def train(self, message: Message, context: Context) -> Message:
        """Train from the arrays received; reply with arrays and metrics."""
        node = self._node(context)
        examples = self._data.train[node]
        work = LocalWork.from_config(_config(message), self._task, len(examples))
        rng = np.random.default_rng([self._seed, node, _PURPOSE, work.draw])
        workshop = self._workshop
        with workshop.lock, one_thread(), torch_seed(int(rng.integers(2**63))):
            workshop.arrays.load(_arrays(message))
            run = workshop.sgd.run(
                examples,
                num_steps=work.num_steps,
                learning_rate=work.learning_rate,
                rng=rng,
            )
            arrays = workshop.arrays.store()
        metrics = MetricRecord(
            {
                "train-loss": run.loss,
                "num-examples": len(examples),
                "num-steps": run.num_steps,
                "samples-processed": run.num_samples,
            }
        )
        content = RecordDict({"arrays": arrays, "metrics": metrics})
        return Message(content, reply_to=message)

    def evaluate(self, message: Message, context: Context) -> Message:
        """Score the arrays received on the node's test rows; reply with metrics."""
        examples = self._data.test_of(self._node(context))
        # Without a row the metric is 0, which num-examples 0 weights away, unlike NaN.
        value = 0.0
        if len(examples):
            workshop = self._workshop
            with workshop.lock:
                workshop.arrays.load(_arrays(message))
                scores = score_examples(self._task, workshop.model, examples)
            value = float(scores.mean())
        metrics = MetricRecord(
            {self._task.metric: value, "num-examples": len(examples)}
        )
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    @cached_property
    def _workshop(self) -> "_Workshop":
        return _Workshop(self._task)

    def _node(self, context: Context) -> int:
        num_nodes = self._data.num_nodes
        node = context.node_config.get("partition-id")
        if not isinstance(node, int) or not 0 <= node < num_nodes:
            raise ValueError(
                f"node_config must hold partition-id in [0, {num_nodes - 1}] for data "
                f"spread over {num_nodes} nodes, got {node!r}"
            )
        return node


class _Workshop:
    """The model that a process reuses, and the lock that one training holds."""

    def __init__(self, task: Task) -> None:
        self.lock = Lock()
        self.model = build_model(task, seed=0)
        self.sgd = LocalSgd(
            self.model,
            loss=task.loss,
            momentum=task.momentum,
            batch_size=task.batch_size,
        )
        # After LocalSgd, which moves the parameters.
        self.arrays = ModelArrays(self.model)


def client_app(
    task: Task, data: FederatedData, *, seed: int, mods: Sequence[Mod] = ()
) -> ClientApp:
    """Return the app of every node.

    A train message carries ``"arrays"`` and ``"config"``:

    =================  =====  ====================================================
    ``local-steps``    int    exactly so many SGD steps, >= 1, through freshly
                              shuffled epochs; else
    ``local-epochs``   int    so many epochs, >= 1; 1 if absent
    ``learning-rate``  float  > 0; the task's if absent
    ``dispatch-number`` int   which shuffle, >= 0; else
    ``server-round``   int    the same, as Flower's strategies send it
    =================  =====  ====================================================

    The reply carries ``"arrays"`` and ``"metrics"``: ``train-loss`` (mean per example),
    ``num-examples``, ``num-steps``, ``samples-processed``. An evaluate message carries
    ``"arrays"``; the reply's ``"metrics"`` are the task's metric and ``num-examples``.

    Parameters
    ----------
    task : Task
    data : FederatedData
        ``partition-id`` of a node's config is the position in ``data.train``.
    seed : int
        >= 0; with the partition id and the version it keys every draw.
    mods : sequence of callable
        Flower's mods around training, such as `sap_mod`.

    Raises
    ------
    ValueError
        If `seed` is negative; from the app, if a message or a node is not as above.
    """
    if seed < 0:
        raise ValueError(f"seed must be >= 0, got {seed}")
    learner = Learner(task, data, seed)
    app = ClientApp()
    app.train(mods=list(mods))(learner.train)
    app.evaluate()(learner.evaluate)
    return app


def _whole(config: ConfigRecord, key: str, least: int) -> int:
    value = config.get(key)
    # bool is an int in Python.
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"config {key!r} must be an int >= {least}, got {value!r}")
    return value


def _learning_rate(config: ConfigRecord, task: Task) -> float:
    value = config.get("learning-rate", task.learning_rate)
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not 0 < value < float("inf")
    ):
        raise ValueError(
            f"config 'learning-rate' must be a finite number > 0, got {value!r}"
        )
    return float(value)


def _config(message: Message) -> ConfigRecord:
    record = message.content.get("config", ConfigRecord())
    if not isinstance(record, ConfigRecord):
        raise ValueError(
            f"a message's 'config' must be a ConfigRecord, got {type(record).__name__}"
        )
    return record


def _arrays(message: Message) -> ArrayRecord:
    record = message.content.get("arrays")
    if not isinstance(record, ArrayRecord):
        raise ValueError(
            "a message must carry the model as an ArrayRecord under 'arrays', "
            f"got {type(record).__name__}"
        )
    return record
