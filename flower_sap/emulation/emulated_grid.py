"""Virtual time around a grid whose nodes train for real.

`EmulatedGrid` is a Flower `Grid`, so any Flower strategy runs on it unchanged. A
message takes as long as its node's profile says::

    download (latency + bytes / downlink), then, when the node is free,
    computing (samples processed / (samples per second * jitter)), then
    upload   (latency + bytes / uplink), while the node may compute again

It is a conservative discrete-event simulation: a reply is released only when no
message whose training is still going on could arrive earlier. The bound for those is
known at dispatch (download, both latencies, and the work that the message declares),
so nodes train in parallel while the order of events depends on the seed alone. Ties
are broken by the order of dispatch.

Samples processed are what the client reports (``samples-processed``), else its
example count times the config's ``local-epochs``. Evaluation computes only forward,
which costs a third of training. A device that does less than the message declared, or
fails, still takes the declared time.
"""

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from flower_sap._flower import num_content_bytes
from flower_sap.emulation.fleet import Fleet, NodeProfile
from flower_sap.emulation.local_grid import LocalGrid
from flower_sap.emulation.virtual_clock import VirtualClock
from flower_sap.records import config_of, records_of
from flower_sap.wire import COMPUTE_SECONDS, LOCAL_STEPS, NUM_SAMPLES, REPORT_KEY

_EVALUATE_COST = 1 / 3  # forward only, of forward and backward
_JITTER = 3  # purpose of a random draw, in its generator's key


@dataclass(slots=True)
class _Flight:
    """A message on its way, in virtual time."""

    number: int
    message: Message
    node_id: int
    profile: NodeProfile
    ready_at: float  # the node has the message
    declared: float  # seconds of computing that the message asks for, at least
    pace: float  # seconds per sample of this node for this message


@dataclass(slots=True)
class _NodeQueue:
    """The messages of one node that are not trained yet, oldest first."""

    free_at: float = 0.0
    arrived_at: float = 0.0  # its last reply at the server
    busy_seconds: float = 0.0
    flights: list[_Flight] = field(default_factory=list)


class EmulatedGrid(Grid):
    """A grid whose nodes have the speeds and links of a fleet.

    Parameters
    ----------
    grid : LocalGrid
        Where the nodes really train.
    fleet : Fleet
        A profile for each node, in partition order.
    seed : int
        Of the speed's jitter, >= 0.

    Attributes
    ----------
    clock : VirtualClock
        The run's clock; `SemiAsync` finds it here.
    bytes_down, bytes_up : int
        Payload bytes sent, and arrived by now.
    samples : float
        Samples processed by all nodes, also for replies that are still on their way.

    Raises
    ------
    ValueError
        If the fleet has not exactly one profile per node, or the seed is negative.
    """

    def __init__(self, grid: LocalGrid, fleet: Fleet, *, seed: int = 0) -> None:
        node_ids = list(grid.get_node_ids())
        if len(node_ids) != len(fleet):
            raise ValueError(
                f"the fleet has {len(fleet)} profiles for {len(node_ids)} nodes"
            )
        if not seed >= 0:
            raise ValueError(f"seed must be >= 0, got {seed}")
        self.clock = VirtualClock()
        self.clock.attach(self._next_arrival)
        self._grid = grid
        self._seed = seed
        self._profiles = dict(zip(node_ids, fleet.nodes, strict=True))
        self._queues = {node_id: _NodeQueue() for node_id in node_ids}
        self._counts = dict.fromkeys(node_ids, 0)
        self._num_pushed = 0
        self._training: list[tuple[float, int, str]] = []
        self._flights: dict[str, _Flight] = {}
        self._coming: list[tuple[float, int, str, Message, int]] = []
        self._arrived: dict[str, Message] = {}
        self.bytes_down = 0
        self.bytes_up = 0
        self.samples = 0.0

    # --- Flower's Grid ----------------------------------------------------------

    @property
    def run(self) -> Any:
        """Return the inner grid's run."""
        return self._grid.run

    def set_run(self, run: Any) -> None:
        """Set the inner grid's run."""
        self._grid.set_run(run)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Refuse, as the inner grid does."""
        return self._grid.create_message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        """Return all node ids, in partition order."""
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages now, in virtual time."""
        messages = list(messages)
        message_ids = set(self._grid.push_messages(messages))
        sizes: dict[int, int] = {}
        accepted = []
        for message in messages:
            if message.metadata.message_id in message_ids:
                self._take_off(message, _size(message, sizes))
                accepted.append(message.metadata.message_id)
        return accepted

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have arrived by now, in order of arrival."""
        self._land_until(self.clock.now())
        if not self._arrived:
            return []
        asked = message_ids if hasattr(message_ids, "__contains__") else {*message_ids}
        found = [m for m in self._arrived if m in asked]
        return [self._arrived.pop(message_id) for message_id in found]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push, wait in virtual time, and return the replies in order of arrival."""
        open_ids = set(self.push_messages(messages))
        give_up_at = self.clock.now() + (math.inf if timeout is None else timeout)
        replies: list[Message] = []
        while open_ids and self.clock.now() < give_up_at:
            self.clock.wait_until(give_up_at)
            for reply in self.pull_messages(open_ids):
                open_ids.discard(reply.metadata.reply_to_message_id)
                replies.append(reply)
        return replies

    def busy_seconds(self) -> list[float]:
        """Return how long each node has computed by now (s), in partition order."""
        now = self.clock.now()
        return [
            # What is timed already may lie ahead of now.
            max(0.0, queue.busy_seconds - max(0.0, queue.free_at - now))
            for queue in self._queues.values()
        ]

    # --- time -------------------------------------------------------------------

    def _take_off(self, message: Message, nbytes: int) -> None:
        node_id = message.metadata.dst_node_id
        profile = self._profiles[node_id]
        self._counts[node_id] += 1
        number = self._num_pushed
        self._num_pushed += 1
        self.bytes_down += nbytes
        pace = self._seconds_per_sample(node_id, profile)
        flight = _Flight(
            number,
            message,
            node_id,
            profile,
            ready_at=self.clock.now() + profile.link.down_seconds(nbytes),
            declared=_declared_samples(message) * pace,
            pace=pace,
        )
        queue = self._queues[node_id]
        queue.flights.append(flight)
        message_id = message.metadata.message_id
        self._flights[message_id] = flight
        bound = max(flight.ready_at, queue.free_at) + flight.declared
        bound += profile.link.latency
        heapq.heappush(self._training, (bound, number, message_id))

    def _seconds_per_sample(self, node_id: int, profile: NodeProfile) -> float:
        device = profile.device
        if device.jitter == 0:
            return 1 / device.samples_per_second
        key = [self._seed, node_id, _JITTER, self._counts[node_id]]
        draw = np.random.default_rng(key).normal(0, device.jitter)
        return float(np.exp(-draw)) / device.samples_per_second

    def _next_arrival(self, limit: float) -> float:
        """Return when the next reply arrives, if before `limit`, else `limit`."""
        self._settle(limit)
        return min(limit, self._coming[0][0]) if self._coming else limit

    def _settle(self, limit: float) -> None:
        """Make sure that nothing in training can arrive before what is known."""
        while self._training:
            bound, number, message_id = self._training[0]
            is_behind = self._coming and (bound, number) > self._coming[0][:2]
            if bound > limit or is_behind:
                return
            heapq.heappop(self._training)
            if message_id in self._flights:
                self._finish_training(self._flights[message_id])

    def _finish_training(self, flight: _Flight) -> None:
        """Wait for a node's messages up to this one, and time their replies."""
        queue = self._queues[flight.node_id]
        while queue.flights and queue.flights[0].number <= flight.number:
            first = queue.flights.pop(0)
            message_id = first.message.metadata.message_id
            del self._flights[message_id]
            reply = self._grid.wait_for(message_id)
            nbytes = num_content_bytes(reply.content) if reply.has_content() else 0
            arrives_at = self._time(first, reply, nbytes, queue)
            heapq.heappush(
                self._coming, (arrives_at, first.number, message_id, reply, nbytes)
            )

    def _time(
        self, flight: _Flight, reply: Message, nbytes: int, queue: _NodeQueue
    ) -> float:
        """Return when the reply arrives; the node is busy until it has computed."""
        computing = flight.declared  # less would break the bound of the dispatch
        if reply.has_content():
            samples = _samples(flight.message, reply)
            computing = max(computing, samples * flight.pace)
            self.samples += samples
            _restate(reply, computing)
        starts_at = max(flight.ready_at, queue.free_at)
        queue.free_at = starts_at + computing
        queue.busy_seconds += computing
        link = flight.profile.link
        # The uplink carries one reply after the other, so none overtakes another.
        uploads_at = max(queue.free_at, queue.arrived_at - link.latency)
        queue.arrived_at = max(queue.arrived_at, uploads_at + link.up_seconds(nbytes))
        return queue.arrived_at

    def _land_until(self, now: float) -> None:
        self._settle(now)
        while self._coming and self._coming[0][0] <= now:
            _, _, message_id, reply, nbytes = heapq.heappop(self._coming)
            self._arrived[message_id] = reply
            self.bytes_up += nbytes


def _size(message: Message, sizes: dict[int, int]) -> int:
    """Return the content's bytes, counted once where messages share it."""
    key = id(message.content)
    if key not in sizes:
        sizes[key] = num_content_bytes(message.content)
    return sizes[key]


def _number(value: object, default: float) -> float:
    """Return a positive finite number, or the default: clients may say anything."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return default
    return float(value) if 0 < value < 1e15 else default


def _declared_samples(message: Message) -> float:
    """Return the least that the message asks for: a step takes at least a sample."""
    config = config_of(message.content)
    steps = _number(config.get(LOCAL_STEPS), 0.0)
    return steps * _number(config.get("batch-size"), 1.0)


def _samples(message: Message, reply: Message) -> float:
    """Return the samples that the reply stands for, in units of training."""
    metrics = next(iter(records_of(reply.content, MetricRecord)), MetricRecord())
    report = reply.content.get(REPORT_KEY, ConfigRecord())
    if message.metadata.message_type.startswith("evaluate"):
        return _number(metrics.get("num-examples"), 0.0) * _EVALUATE_COST
    reported = report.get(NUM_SAMPLES, metrics.get(NUM_SAMPLES))
    epochs = _number(config_of(message.content).get("local-epochs"), 1.0)
    return _number(reported, _number(metrics.get("num-examples"), 0.0) * epochs)


def _restate(reply: Message, computing: float) -> None:
    """Replace the time that the client measured, on this machine, by the device's."""
    report = reply.content.get(REPORT_KEY)
    if isinstance(report, ConfigRecord) and COMPUTE_SECONDS in report:
        report[COMPUTE_SECONDS] = computing
