"""A Flower `Grid` in this process: it calls a ClientApp directly, without Flower.

Without workers a pull runs one queued message, in order of arrival; with workers they
run beside the server. A node answers its messages one after the other, as a SuperNode
does, whatever the number of workers.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from flower_sap._flower import ensure_task_identity, set_message_id
from flower_sap.emulation.client_process import (
    NodeIdentity,
    Outcome,
    run_client_app,
)
from flower_sap.emulation.workers import Job, WorkerPool
from flower_sap.records import copy_records

_FIRST_NODE_ID = 1001  # nodes are not numbered like partitions, as in Flower


class LocalGrid(Grid):
    """In-process nodes.

    Parameters
    ----------
    app : ClientApp
        What every node runs.
    num_nodes : int
        Nodes, >= 1; each has its ``partition-id`` in its node config.
    workers : int
        Processes that run it; 0: this one.
    run_config : mapping, optional
        The run config that the ClientApp sees.
    seed : int
        Of the generators that the ClientApp finds (see `client_process`), >= 0.
    """

    def __init__(
        self,
        app: ClientApp,
        num_nodes: int,
        *,
        workers: int = 0,
        run_config: Mapping[str, bool | int | float | str] | None = None,
        seed: int = 0,
    ) -> None:
        if not isinstance(app, ClientApp):
            raise TypeError(f"app must be a ClientApp, got {type(app).__name__}")
        if not num_nodes >= 1:
            raise ValueError(f"num_nodes must be >= 1, got {num_nodes}")
        if not workers >= 0:
            raise ValueError(f"workers must be >= 0, got {workers}")
        if not seed >= 0:
            raise ValueError(f"seed must be >= 0, got {seed}")
        ensure_task_identity()
        self._app = app
        self._seed = seed
        self._nodes = {
            _FIRST_NODE_ID + i: NodeIdentity(
                _FIRST_NODE_ID + i, i, num_nodes, dict(run_config or {})
            )
            for i in range(num_nodes)
        }
        self._states = {node_id: RecordDict() for node_id in self._nodes}
        self._counts = dict.fromkeys(self._nodes, 0)
        self._queues: dict[int, deque[Message]] = {}
        self._jobs: dict[str, int] = {}
        self._replies: dict[str, Message] = {}
        self._num_pushed = 0
        self._run: Any = None
        self._pool = WorkerPool(app, workers) if workers else None

    # --- Flower's Grid ----------------------------------------------------------

    @property
    def run(self) -> Any:
        """Return what `set_run` was given."""
        return self._run

    def set_run(self, run: Any) -> None:
        """Take the run's description."""
        self._run = run

    def create_message(self, *_: Any, **__: Any) -> Message:
        """Refuse: deprecated by Flower in favour of `Message(...)`."""
        raise NotImplementedError("Grid.create_message is deprecated: use Message(...)")

    def get_node_ids(self) -> Iterable[int]:
        """Return all node ids, in partition order."""
        return list(self._nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue messages; those to unknown nodes are left out, as Flower does."""
        message_ids = []
        for message in messages:
            node_id = message.metadata.dst_node_id
            set_message_id(message, f"message-{self._num_pushed}")
            self._num_pushed += 1
            if node_id not in self._nodes:
                continue
            message_ids.append(message.metadata.message_id)
            self._jobs[message.metadata.message_id] = node_id
            queue = self._queues.setdefault(node_id, deque())
            queue.append(_detached(message))
            if self._pool is not None and len(queue) == 1:
                self._pool.submit(self._job(node_id))
        return message_ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there; without workers, one is made first."""
        message_ids = list(message_ids)
        if self._pool is not None:
            self._collect(timeout=0.0)
        elif self._replies.keys().isdisjoint(message_ids):
            waiting = next((m for m in message_ids if m in self._jobs), None)
            if waiting is not None:
                self._run_next(self._jobs[waiting])
        return self._hand_out(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push and wait for all replies; returned in the order of the messages.

        There is no clock here, so `timeout` is not looked at: wrap the grid in an
        `EmulatedGrid` to give its nodes a speed.
        """
        message_ids = list(self.push_messages(messages))
        return [self.wait_for(message_id) for message_id in message_ids]

    # --- for the emulation ------------------------------------------------------

    def wait_for(self, message_id: str) -> Message:
        """Return the reply to a pushed message, waiting until it is there.

        Raises
        ------
        KeyError
            If no such message is open.
        """
        while message_id not in self._replies:
            node_id = self._jobs[message_id]
            if self._pool is None:
                self._run_next(node_id)
            else:
                self._collect(timeout=None)
        return self._replies.pop(message_id)

    def close(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            self._pool.close()

    # --- inside -----------------------------------------------------------------

    def _hand_out(self, message_ids: Iterable[str]) -> list[Message]:
        asked = [m for m in message_ids if m in self._replies]
        return [self._replies.pop(message_id) for message_id in asked]

    def _job(self, node_id: int) -> Job:
        self._counts[node_id] += 1
        return Job(
            self._queues[node_id][0],
            self._nodes[node_id],
            self._states[node_id],
            (self._seed, self._counts[node_id]),
        )

    def _run_next(self, node_id: int) -> None:
        job = self._job(node_id)
        self._finish(
            job, run_client_app(self._app, job.message, job.node, job.state, job.seeds)
        )

    def _collect(self, timeout: float | None) -> None:
        assert self._pool is not None
        for job, outcome in self._pool.results(timeout=timeout):
            self._finish(job, outcome)
            if self._queues[job.node.node_id]:
                self._pool.submit(self._job(job.node.node_id))

    def _finish(self, job: Job, outcome: Outcome) -> None:
        """Note the end of the oldest message of a node."""
        self._queues[job.node.node_id].popleft()
        self._states[job.node.node_id] = outcome.state
        message_id = job.message.metadata.message_id
        del self._jobs[message_id]
        reply = (
            Message(outcome.content, reply_to=job.message)
            if outcome.error is None and outcome.content is not None
            else Message(outcome.error, reply_to=job.message)  # type: ignore[arg-type]
        )
        set_message_id(reply, f"reply-to-{message_id}")
        self._replies[message_id] = reply


def _detached(message: Message) -> Message:
    """Return a message that the sender cannot change any more."""
    copied = Message(
        copy_records(message.content),
        dst_node_id=message.metadata.dst_node_id,
        message_type=message.metadata.message_type,
        group_id=message.metadata.group_id,
        ttl=message.metadata.ttl,
    )
    set_message_id(copied, message.metadata.message_id)
    return copied
