"""The one loop: take what arrived, merge what is due, start who is idle, wait.

The loop knows time by its `Clock` and nodes by Flower's `Grid`, and runs unchanged on
a SuperLink, in Flower's simulation runtime and in virtual time. All that changes is in
`ServerState`; all that happens is told to the observers.
"""

import copy
import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from flower_sap import events as ev
from flower_sap._flower import num_content_bytes
from flower_sap.clock import Clock
from flower_sap.errors import (
    AllClientsFailedError,
    InnerStrategyError,
    NoNodesError,
    PayloadError,
    StalledError,
    UpdateRejected,
)
from flower_sap.payload.dense import Arrays, Manifest, decode, encode
from flower_sap.strategies.evaluation import EvaluationQueue, Finished, Request
from flower_sap.strategies.inner import InnerStrategy
from flower_sap.strategies.merging import MergeRule
from flower_sap.strategies.release import Released, ReleaseRule
from flower_sap.strategies.staleness import (
    Contribution,
    ContributionWeight,
    StalenessWeight,
)
from flower_sap.strategies.state import (
    Buffer,
    Held,
    NodeState,
    ServerState,
    Taken,
    Trip,
)
from flower_sap.strategies.sync import AT_ONCE, RoundView, SyncPolicy
from flower_sap.strategies.updates import read_evaluation, read_update
from flower_sap.strategies.work import WorkRule
from flower_sap.wire import BASE_VERSION, DISPATCH_NUMBER, LOCAL_STEPS

_PUSH_BATCH = 20  # nodes of 1.42 back off when a huge batch is still uploading
_LOOK_SECONDS = 5.0  # how often the grid is asked who is connected
_FIRST_REST = 1.0  # a failed node rests this long (s), then twice as long, ...
_LONGEST_REST = 60.0
_MOST_FAILURES = 5  # of every node in a row: then the run cannot go on


@dataclass(frozen=True, slots=True)
class Parts:
    """The choices that make one algorithm; see `SemiAsync`."""

    sync: SyncPolicy
    staleness: StalenessWeight
    contribution: ContributionWeight
    merge: MergeRule
    work: WorkRule
    release: ReleaseRule
    concurrency: int | None
    seed: int


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a run goes on, and how long it waits."""

    num_rounds: int
    timeout: float
    should_stop: Callable[[int], bool]


class Report(Protocol):
    """Whoever keeps the results of a run."""

    def end_round(
        self, state: ServerState, arrays: ArrayRecord, metrics: MetricRecord | None
    ) -> None:
        """Take the model and the train metrics at the end of `state.round`."""
        ...

    def end_evaluation(self, finished: Finished, metrics: MetricRecord | None) -> None:
        """Take the metrics of a federated evaluation."""
        ...


class Engine:
    """One run of `SemiAsync`.

    Parameters
    ----------
    parts, limits : Parts, Limits
        The algorithm and its bounds.
    inner : InnerStrategy
        The wrapped strategy.
    grid, clock : Grid, Clock
        The nodes, and the time.
    initial_arrays : ArrayRecord
        The first model.
    configs : tuple of ConfigRecord
        For train and for evaluate messages.
    tell : callable
        Takes each event.
    report : Report
        Told of the ends of rounds and of evaluations.
    """

    def __init__(
        self,
        parts: Parts,
        limits: Limits,
        inner: InnerStrategy,
        *,
        grid: Grid,
        clock: Clock,
        initial_arrays: ArrayRecord,
        manifest: Manifest,
        configs: tuple[ConfigRecord, ConfigRecord],
        tell: Callable[[ev.Event], None],
        report: "Report",
    ) -> None:
        self._parts = parts
        self._limits = limits
        self._inner = inner
        self._grid = grid
        self._clock = clock
        self._manifest = manifest
        self._train_config, self._evaluate_config = configs
        self._tell = tell
        self._report = report
        self._record = ArrayRecord(dict(initial_arrays))
        self._state = ServerState(decode(initial_arrays, manifest))
        self._released = Released(parts.release, self._state.arrays, manifest)
        self._evaluations = EvaluationQueue()
        self._resting: list[tuple[float, int]] = []
        self._expiries: deque[tuple[float, str]] = deque()
        self._template: tuple[str, RecordDict, int] | None = None
        self._looked_at = -math.inf
        self._progressed_at = 0.0
        self._is_stopping = False

    # --- the loop ---------------------------------------------------------------

    def run(self) -> ArrayRecord:
        """Run all rounds and return the final model."""
        try:
            self._run_rounds()
            self._finish_evaluations()
        finally:  # also after an error each message ends once in the log
            self._leave_behind()
        return self.released()

    def _run_rounds(self) -> None:
        state = self._state
        self._wait_for_nodes()
        state.merged_at = state.synced_at = self._progressed_at = self._clock.now()
        state.buffers = [
            self._new_buffer() for _ in range(self._parts.sync.num_groups())
        ]
        while not self._is_complete:
            self._look_for_nodes()
            self._start_nodes()
            self._clock.wait_until(self._next_look())
            self._take_replies()
            self._expire_trips()
            self._merge_due(self._clock.now())
            self._check_progress()

    def released(self) -> ArrayRecord:
        """Return the released model as it is now."""
        arrays = self._released.arrays
        if arrays is self._state.arrays:  # the latest version, encoded already
            return self._record
        return encode(arrays, self._manifest)

    @property
    def _is_complete(self) -> bool:
        return self._is_stopping or self._state.round >= self._limits.num_rounds

    def _next_look(self) -> float:
        """Return when something can happen even if nothing arrives (s)."""
        times = [self._progressed_at + self._limits.timeout, self._next_change()]
        for group, buffer in enumerate(self._state.buffers):
            view = self._view(group)
            opens_at = self._parts.sync.opens_at(view)
            if opens_at > view.now:  # what is past would stop virtual time
                times.append(opens_at)
            if buffer.taken or buffer.held:
                times.append(self._parts.sync.merge_at(view))
        return min(times)

    def _next_change(self) -> float:
        """Return when a node may come back, be given up on, or be looked for (s)."""
        times = [math.inf]
        if self._resting:
            times.append(self._resting[0][0])
        if self._expiries:
            times.append(self._expiries[0][0])
        if not self._state.nodes or self._is_short_of_nodes():
            times.append(self._looked_at + _LOOK_SECONDS)
        return min(times)

    def _is_short_of_nodes(self) -> bool:
        wanted = self._parts.concurrency
        return not self._state.trips or (
            wanted is not None and len(self._state.trips) < wanted
        )

    def _view(self, group: int) -> RoundView:
        state, buffer = self._state, self._state.buffers[group]
        return RoundView(
            now=self._clock.now(),
            opened_at=buffer.opened_at,
            synced_at=state.synced_at,
            version=state.version,
            oldest_base_version=state.oldest_base_version,
            merges_since_sync=state.merges_since_sync,
            num_buffered=len(buffer.taken) + len(buffer.held),
            num_in_flight=buffer.num_in_flight,
        )

    def _new_buffer(self) -> Buffer:
        aggregator = self._inner.aggregator(
            self._state.arrays, exact=self._parts.sync.starts_together()
        )
        return Buffer(aggregator, opened_at=self._clock.now())

    # --- nodes ------------------------------------------------------------------

    def _wait_for_nodes(self) -> None:
        give_up_at = self._clock.now() + self._limits.timeout
        while True:
            node_ids = list(self._grid.get_node_ids())
            if len(node_ids) >= self._inner.min_nodes:
                self._take_in(node_ids)
                return
            if self._clock.now() >= give_up_at:
                raise NoNodesError(
                    found=len(node_ids),
                    needed=self._inner.min_nodes,
                    waited=self._limits.timeout,
                )
            self._clock.wait_until(min(self._clock.now() + 1.0, give_up_at))

    def _look_for_nodes(self) -> None:
        now = self._clock.now()
        while self._resting and self._resting[0][0] <= now:
            self._idle(heapq.heappop(self._resting)[1])
        # The same sum as in `_next_change`: a difference may round to just below.
        if now >= self._looked_at + _LOOK_SECONDS:
            self._take_in(list(self._grid.get_node_ids()))

    def _take_in(self, node_ids: list[int]) -> None:
        """Welcome new nodes, let vanished ones go."""
        state = self._state
        self._looked_at = self._clock.now()
        connected = set(node_ids)
        for node_id in sorted(connected - state.nodes.keys()):
            state.nodes[node_id] = NodeState(node_id)
            state.idle.append(node_id)
        gone = [n for n in state.nodes if n not in connected]
        for node_id in gone:
            if not state.nodes[node_id].is_busy:
                self._forget(node_id)
        if gone:
            state.idle = [n for n in state.idle if n in connected]
            self._close(self._evaluations.forget_nodes(connected))

    def _forget(self, node_id: int) -> None:
        node = self._state.nodes.pop(node_id)
        if node.seconds_per_step:
            self._state.speed_sum -= 1 / node.seconds_per_step
            self._state.num_speeds -= 1
        self._resting = [entry for entry in self._resting if entry[1] != node_id]
        heapq.heapify(self._resting)

    def _idle(self, node_id: int) -> None:
        if node_id in self._state.nodes:
            self._state.idle.append(node_id)

    # --- sending ----------------------------------------------------------------

    def _start_nodes(self) -> None:
        """Send evaluate messages, then train messages where the policy allows it."""
        self._send_evaluations()
        state = self._state
        free = len(state.idle)
        if self._parts.concurrency is not None:
            free = min(free, self._parts.concurrency - len(state.trips))
        open_groups = [self._may_start(group) for group in range(len(state.buffers))]
        if free <= 0 or not any(open_groups):
            return
        if len(state.buffers) > 1:
            self._assign_groups()
        ready, waiting = state.idle, []
        if not all(open_groups):
            ready = [n for n in state.idle if open_groups[state.nodes[n].group]]
            waiting = [n for n in state.idle if not open_groups[state.nodes[n].group]]
        chosen = self._choose(ready, free)
        state.idle = ready + waiting
        for start in range(0, len(chosen), _PUSH_BATCH):
            self._push_train(chosen[start : start + _PUSH_BATCH])

    def _may_start(self, group: int) -> bool:
        if self._parts.sync.starts_together() and self._evaluates(group):
            return False
        view = self._view(group)
        # A policy cannot stop a run in which nothing is on its way.
        nothing_moves = view.is_empty and not self._state.trips
        return nothing_moves or self._parts.sync.may_start(view)

    def _evaluates(self, group: int) -> bool:
        """Return whether a node of this group is evaluating, or about to."""
        return not self._evaluations.is_empty and any(
            self._evaluations.waits_for(node.node_id)
            or (node.is_busy and node.has_just_evaluated)
            for node in self._state.nodes.values()
            if node.group == group
        )

    def _choose(self, ready: list[int], free: int) -> list[int]:
        """Take up to `free` nodes out of `ready`: all in order, or some at random."""
        if free >= len(ready):
            chosen = list(ready)
            ready.clear()
            return chosen
        rng = np.random.default_rng([self._parts.seed, self._state.num_dispatched])
        chosen = []
        for _ in range(free):
            index = int(rng.integers(len(ready)))
            ready[index], ready[-1] = ready[-1], ready[index]
            chosen.append(ready.pop())
        return chosen

    def _assign_groups(self) -> None:
        """Sort idle nodes into speed groups of equal size, once all are known."""
        state = self._state
        known = [node for node in state.nodes.values() if node.trip_seconds is not None]
        if len(known) < len(state.nodes):
            return
        ranked = sorted(known, key=lambda node: (node.trip_seconds or 0, node.node_id))
        idle = set(state.idle)
        for rank, node in enumerate(ranked):
            if node.node_id in idle:
                node.group = rank * len(state.buffers) // len(ranked)

    def _push_train(self, node_ids: list[int]) -> None:
        message_type, content, nbytes = self._train_template()
        available = self._parts.sync.work_until(self._view(0)) - self._clock.now()
        steps = [
            self._parts.work.local_steps(
                self._state.pace(self._state.nodes[node_id]), available
            )
            for node_id in node_ids
        ]
        messages = [
            Message(
                self._inner.fresh_content(content, self._orders(node_id, asked)),
                dst_node_id=node_id,
                message_type=message_type,
            )
            for node_id, asked in zip(node_ids, steps, strict=True)
        ]
        self._push(messages, "train", steps, nbytes)

    def _orders(self, node_id: int, local_steps: int | None) -> dict[str, int]:
        node = self._state.nodes[node_id]
        node.num_dispatched += 1
        orders = {
            BASE_VERSION: self._state.version,
            DISPATCH_NUMBER: node.num_dispatched,
        }
        if local_steps is not None:
            orders[LOCAL_STEPS] = local_steps
        return orders

    def _train_template(self) -> tuple[str, RecordDict, int]:
        """Return type, content and bytes of this version's messages."""
        if self._template is None:
            message_type, content = self._inner.train_content(
                self._state.version + 1,
                self._record,
                self._train_config,
                list(self._state.nodes),
            )
            self._template = message_type, content, num_content_bytes(content)
        return self._template

    def _push(
        self,
        messages: list[Message],
        purpose: str,
        steps: list[int | None],
        nbytes: int,
    ) -> list[str]:
        """Push messages; return the id of each, or "" where it was refused."""
        refusal = "the grid refused the message"
        try:
            accepted = {m for m in self._grid.push_messages(messages) if m}
        except Exception as error:  # a push may fail in any way (1.42)
            accepted, refusal = set(), f"push failed: {type(error).__name__}: {error}"
        message_ids = []
        for message, asked in zip(messages, steps, strict=True):
            is_sent = message.metadata.message_id in accepted
            trip = self._new_trip(message, purpose, asked, is_sent=is_sent)
            self._tell(
                ev.Dispatched(
                    trip.sent_at,
                    trip.message_id,
                    trip.node_id,
                    purpose,
                    trip.base_version,
                    nbytes,
                    asked,
                )
            )
            if is_sent:
                self._send_off(trip, nbytes)
            else:
                self._fail(trip, ev.Failed, refusal)
            message_ids.append(trip.message_id if is_sent else "")
        return message_ids

    def _new_trip(
        self, message: Message, purpose: str, asked: int | None, *, is_sent: bool
    ) -> Trip:
        state, now = self._state, self._clock.now()
        node = state.nodes[message.metadata.dst_node_id]
        state.num_dispatched += 1
        number = state.num_dispatched
        return Trip(
            message_id=message.metadata.message_id if is_sent else f"refused-{number}",
            node_id=node.node_id,
            group=node.group,
            purpose=purpose,
            base_version=state.version,
            sent_at=now,
            expires_at=now + self._limits.timeout,
            local_steps=asked,
        )

    def _send_off(self, trip: Trip, nbytes: int) -> None:
        self._state.take_off(trip)
        self._state.bytes_down += nbytes
        self._expiries.append((trip.expires_at, trip.message_id))

    # --- receiving --------------------------------------------------------------

    def _take_replies(self) -> None:
        if not self._state.trips:
            return
        # Keys, not a list: with ten thousand nodes in flight a list per look is slow.
        for reply in list(self._grid.pull_messages(self._state.trips.keys())):
            self._take(reply)
            # A full buffer is merged before the next update is added to it, but a
            # deadline lets in all that is there.
            if not self._is_complete:
                self._merge_due(AT_ONCE)

    def _take(self, reply: Message) -> None:
        """End one trip, well or badly."""
        # By message id, not by sender: a reply that Flower makes up for a lost message
        # carries the server's own node id.
        message_id = reply.metadata.reply_to_message_id
        trip = self._state.trips.pop(message_id, None)
        if trip is None:
            self._refuse_unasked(reply, message_id)
            return
        base = self._state.land(trip)
        if self._is_complete and base is not None:
            self._end(trip, ev.Dropped, "the run is over")
            self._idle(trip.node_id)
        elif reply.has_error():
            reason = reply.error.reason or f"error code {reply.error.code}"
            self._fail(trip, ev.Failed, reason)
        elif base is None:
            self._take_evaluation(trip, reply)
            return
        else:
            self._take_update(trip, reply, base)
        if trip.purpose == "evaluate":
            self._note_evaluation(trip, None)

    def _refuse_unasked(self, reply: Message, message_id: str) -> None:
        self._tell(
            ev.Rejected(
                self._clock.now(),
                message_id,
                reply.metadata.src_node_id,
                "train",
                -1,
                "answers no open message: a duplicate, or never asked",
            )
        )

    def _take_update(self, trip: Trip, reply: Message, base: Arrays) -> None:
        try:
            self._check_sender(trip, reply)
            update = read_update(
                reply.content,
                manifest=self._manifest,
                base_version=trip.base_version,
                weighted_by=self._inner.weighted_by,
            )
        except UpdateRejected as rejection:
            self._fail(trip, ev.Rejected, rejection.reason)
            return
        now = self._clock.now()
        nbytes = num_content_bytes(reply.content)
        self._state.bytes_up += nbytes
        self._tell(
            ev.Arrived(
                now,
                trip.message_id,
                trip.node_id,
                "train",
                trip.base_version,
                nbytes,
                update.num_examples,
                update.work.num_samples,
                update.work.compute_seconds,
            )
        )
        self._state.observe(trip, update.work, now)
        node = self._state.nodes[trip.node_id]
        node.failures_in_row = 0
        self._idle(trip.node_id)
        if trip.is_late and self._parts.sync.drops_late():
            self._end(trip, ev.Dropped, "arrived after the synchronization's grace")
            return
        held = Held(trip, update, base, _without_arrays(reply, update.metrics))
        buffer = self._state.buffers[trip.group]
        if len(self._state.buffers) == 1:
            self._add(buffer, held)
        else:  # another group may merge first, and the staleness grow until then
            buffer.held.append(held)

    def _add(self, buffer: Buffer, held: Held) -> None:
        """Add an update to a buffer, weighted by its version."""
        state, parts, trip, update = self._state, self._parts, held.trip, held.update
        node = state.nodes.get(trip.node_id, NodeState(trip.node_id))
        node.num_updates += 1
        state.num_merged += 1
        asked = update.work.num_steps or trip.local_steps
        state.steps_sum += asked or 1
        staleness = state.version - trip.base_version
        weight = parts.staleness(staleness) * parts.contribution(
            Contribution(
                staleness=staleness,
                num_examples=update.num_examples,
                num_steps=asked,
                mean_steps=state.steps_sum / state.num_merged,
                node_updates=node.num_updates,
                mean_updates=state.num_merged / max(1, len(state.nodes)),
            )
        )
        gain = parts.merge.gain(weight, float(asked or 1))
        buffer.aggregator.add(
            update.arrays,
            base=state.arrays if parts.merge.mixes_models else held.base,
            num_examples=update.num_examples,
            gain=gain,
            share=min(1.0, weight),
        )
        buffer.totals.examples += update.num_examples
        buffer.totals.weighted += update.num_examples * weight
        buffer.totals.steps += update.num_examples * (asked or 1)
        buffer.taken.append(
            Taken(trip, staleness, gain, update.num_examples, held.reply)
        )

    def _check_sender(self, trip: Trip, reply: Message) -> None:
        sender = reply.metadata.src_node_id
        if sender != trip.node_id:
            raise UpdateRejected(
                f"came from node {sender}, but was asked of node {trip.node_id}"
            )

    def _fail(
        self, trip: Trip, kind: type[ev.Failed] | type[ev.Rejected], reason: str
    ) -> None:
        self._end(trip, kind, reason)
        if trip.purpose == "train":
            self._rest(trip.node_id, reason)
        else:  # it may not know how to evaluate, and yet train well
            self._idle(trip.node_id)

    def _end(
        self,
        trip: Trip,
        kind: type[ev.Failed] | type[ev.Rejected] | type[ev.Dropped],
        reason: str,
    ) -> None:
        self._tell(
            kind(
                self._clock.now(),
                trip.message_id,
                trip.node_id,
                trip.purpose,
                trip.base_version,
                reason,
            )
        )

    def _rest(self, node_id: int, reason: str) -> None:
        """Leave a failed node alone for a while, longer each time."""
        node = self._state.nodes[node_id]
        pause = min(_LONGEST_REST, _FIRST_REST * 2.0**node.failures_in_row)
        node.failures_in_row += 1
        node.last_reason = reason
        heapq.heappush(self._resting, (self._clock.now() + pause, node_id))

    def _expire_trips(self) -> None:
        now = self._clock.now()
        # All wait equally long, so they expire in order of dispatch.
        while self._expiries:
            expires_at, message_id = self._expiries[0]
            if message_id in self._state.trips and expires_at > now:
                return
            self._expiries.popleft()
            trip = self._state.trips.pop(message_id, None)
            if trip is None:
                continue
            self._state.land(trip)
            waited = now - trip.sent_at
            self._tell(
                ev.Expired(
                    now,
                    trip.message_id,
                    trip.node_id,
                    trip.purpose,
                    trip.base_version,
                    waited,
                )
            )
            self._rest(trip.node_id, f"no reply in {waited:.1f} s")
            if trip.purpose == "evaluate":
                self._note_evaluation(trip, None)

    # --- merging ----------------------------------------------------------------

    def _merge_due(self, by: float) -> None:
        """Merge every buffer that its policy says is due at time `by`."""
        for group in range(len(self._state.buffers)):
            view = self._view(group)
            if view.num_buffered and self._parts.sync.merge_at(view) <= by:
                self._merge(group, view)
                if self._is_complete:
                    return

    def _merge(self, group: int, view: RoundView) -> None:
        state, parts = self._state, self._parts
        buffer = state.buffers[group]
        for held in buffer.held:
            self._add(buffer, held)
        buffer.held = []
        self._train_template()  # an inner optimizer learns the current model from it
        scale = parts.merge.scale(buffer.totals)
        arrays, metrics = self._inner.aggregate(
            state.version + 1,
            buffer.aggregator,
            scale,
            state.arrays,
            [taken.reply for taken in buffer.taken],
        )
        ends_round = parts.sync.ends_round(view)
        synchronizes = parts.sync.synchronizes(view)
        self._publish(arrays, len(buffer.taken))
        self._tell_merged(buffer, scale)
        state.buffers[group] = Buffer(
            buffer.aggregator,
            opened_at=state.merged_at,
            num_in_flight=buffer.num_in_flight,
        )
        for each in state.buffers:  # what waits in other groups is not added yet
            each.aggregator = each.aggregator.renewed(state.arrays)
        if synchronizes:
            self._synchronize()
        if ends_round:
            self._complete_round(metrics)

    def _publish(self, arrays: Arrays, num_updates: int) -> None:
        """Make `arrays` the next version."""
        state = self._state
        self._record = encode(arrays, self._manifest)
        try:
            state.arrays = decode(self._record, self._manifest)
        except PayloadError as error:
            raise InnerStrategyError(
                f"version {state.version + 1} would not be finite ({error}); lower "
                "the learning rates of clients or server"
            ) from error
        state.version += 1
        state.merges_since_sync += 1
        state.merged_at = self._progressed_at = self._clock.now()
        self._template = None
        self._released.follow(
            state.arrays,
            num_updates=num_updates,
            num_nodes=max(1, len(state.nodes)),
            version=state.version,
        )

    def _tell_merged(self, buffer: Buffer, scale: float) -> None:
        now, version = self._clock.now(), self._state.version
        for taken in buffer.taken:
            trip = taken.trip
            self._tell(
                ev.Merged(
                    now,
                    trip.message_id,
                    trip.node_id,
                    version,
                    trip.base_version,
                    taken.staleness,
                    taken.gain * scale,
                    taken.num_examples,
                )
            )
        self._tell(ev.Aggregated(now, version, len(buffer.taken)))

    def _synchronize(self) -> None:
        """Go on without those still out: from now on they are late."""
        state = self._state
        num_late = 0
        if any(buffer.num_in_flight for buffer in state.buffers):
            for trip in state.trips.values():
                if trip.purpose == "train" and not trip.is_late:
                    trip.is_late = True
                    num_late += 1
            for buffer in state.buffers:
                buffer.num_in_flight = 0
        state.merges_since_sync = 0
        state.synced_at = self._clock.now()
        self._tell(ev.Synchronized(state.synced_at, state.version, num_late))

    def _complete_round(self, metrics: MetricRecord | None) -> None:
        state = self._state
        state.round += 1
        released = self.released()
        # A node that fails or is lost would only hold the others up.
        healthy = [n for n, node in state.nodes.items() if not node.failures_in_row]
        requests = self._inner.evaluate_messages(
            state.round, released, self._evaluate_config, healthy
        )
        self._evaluations.add(
            Request(state.round, state.version, node_id, message_type, content)
            for node_id, message_type, content in requests
        )
        self._report.end_round(state, released, metrics)
        self._is_stopping = self._limits.should_stop(state.round)

    # --- evaluation -------------------------------------------------------------

    def _send_evaluations(self) -> None:
        if self._evaluations.is_empty:
            return
        asked = [n for n in self._state.idle if self._may_evaluate(n)]
        taken = set(asked)
        self._state.idle = [n for n in self._state.idle if n not in taken]
        for start in range(0, len(asked), _PUSH_BATCH):
            requests = [
                self._evaluations.take(node_id)
                for node_id in asked[start : start + _PUSH_BATCH]
            ]
            self._push_evaluations(requests)

    def _may_evaluate(self, node_id: int) -> bool:
        """Return whether an idle node is to evaluate now.

        Where rounds end faster than evaluations, a node that evaluated whenever it is
        asked would never train again.
        """
        if not self._evaluations.waits_for(node_id):
            return False
        return (
            self._is_complete
            or self._parts.sync.starts_together()
            or not self._state.nodes[node_id].has_just_evaluated
        )

    def _push_evaluations(self, requests: list[Request]) -> None:
        messages = [
            Message(
                self._inner.fresh_content(request.content, {}),
                dst_node_id=request.node_id,
                message_type=request.message_type,
            )
            for request in requests
        ]
        nbytes = num_content_bytes(requests[0].content)
        sent = self._push(messages, "evaluate", [None] * len(messages), nbytes)
        for request, message_id in zip(requests, sent, strict=True):
            if message_id:
                self._evaluations.sent(request, message_id)
            else:
                self._close(self._evaluations.give_up(request))

    def _take_evaluation(self, trip: Trip, reply: Message) -> None:
        try:
            self._check_sender(trip, reply)
            metrics = read_evaluation(reply.content, self._inner.weighted_by)
        except UpdateRejected as rejection:
            self._fail(trip, ev.Rejected, rejection.reason)
            self._note_evaluation(trip, None)
            return
        nbytes = num_content_bytes(reply.content)
        self._state.bytes_up += nbytes
        num_examples: Any = metrics[self._inner.weighted_by]
        self._tell(
            ev.Arrived(
                self._clock.now(),
                trip.message_id,
                trip.node_id,
                "evaluate",
                trip.base_version,
                nbytes,
                float(num_examples),
                None,
                None,
            )
        )
        self._idle(trip.node_id)
        self._note_evaluation(trip, _without_arrays(reply, metrics))

    def _note_evaluation(self, trip: Trip, reply: Message | None) -> None:
        self._close(self._evaluations.ended(trip.message_id, reply))

    def _close(self, rounds: Iterable[Finished]) -> None:
        for finished in rounds:
            self._progressed_at = self._clock.now()
            if finished.replies:
                metrics = self._inner.aggregate_evaluate(
                    finished.round, finished.replies
                )
                self._report.end_evaluation(finished, metrics)

    # --- the end ----------------------------------------------------------------

    def _check_progress(self) -> None:
        """End a run that cannot go on."""
        state, now = self._state, self._clock.now()
        nodes = state.nodes.values()
        if (
            nodes
            and not state.trips
            and all(node.failures_in_row >= _MOST_FAILURES for node in nodes)
        ):
            raise AllClientsFailedError(
                failures=_MOST_FAILURES,
                reasons={node.node_id: node.last_reason for node in nodes},
            )
        if self._is_complete or now < self._progressed_at + self._limits.timeout:
            return
        raise StalledError(
            policy=self._parts.sync,
            num_buffered=sum(len(b.taken) + len(b.held) for b in state.buffers),
            num_in_flight=len(state.trips),
            waited=now - self._progressed_at,
        )

    def _finish_evaluations(self) -> None:
        """Wait for the evaluations of the last rounds."""
        give_up_at = self._clock.now() + self._limits.timeout
        while not self._evaluations.is_empty and self._clock.now() < give_up_at:
            self._look_for_nodes()
            self._send_evaluations()
            self._clock.wait_until(min(self._next_change(), give_up_at))
            self._take_replies()
            self._expire_trips()

    def _leave_behind(self) -> None:
        """End in the log what is still out, or waits for a merge."""
        for trip in list(self._state.trips.values()):
            self._end(trip, ev.Dropped, "the run is over")
        for buffer in self._state.buffers:
            trips = [taken.trip for taken in buffer.taken]
            for trip in trips + [held.trip for held in buffer.held]:
                self._end(trip, ev.Dropped, "the run ended before its merge")
        self._state.trips.clear()


def _without_arrays(reply: Message, metrics: MetricRecord) -> Message:
    """Return the reply with its metrics alone, so that its arrays can be freed."""
    slim = copy.copy(reply)
    slim.content = RecordDict({"metrics": metrics})
    return slim
