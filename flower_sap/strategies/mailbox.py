"""Messages out and replies in: each message ends once, and the log tells how.

A *trip* is one message on its way. It ends when its reply is taken, refused or dropped,
when its node fails, or when it has waited too long; its node is then idle again, or
rests.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from flwr.app import Message, RecordDict

from flower_sap import events as ev
from flower_sap._flower import num_content_bytes
from flower_sap.errors import UpdateRejected
from flower_sap.strategies.parts import World
from flower_sap.strategies.roster import Roster
from flower_sap.strategies.state import Asked, ServerState, Trip
from flower_sap.strategies.trip_log import BadEnd, TripLog
from flower_sap.strategies.updates import WorkReport

_PUSH_BATCH = 20  # nodes of 1.42 back off when a huge batch is still uploading

_Read = TypeVar("_Read")


def batches(node_ids: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield the nodes in groups whose messages are pushed together."""
    for start in range(0, len(node_ids), _PUSH_BATCH):
        yield node_ids[start : start + _PUSH_BATCH]


class Mailbox:
    """The messages of one run.

    Parameters
    ----------
    state : ServerState
        Holds the trips.
    roster : Roster
        Where a node goes when its trip has ended.
    world : World
        The grid that carries the messages, the time, and who is told.
    timeout : float
        Longest trip (s).
    """

    def __init__(
        self, state: ServerState, roster: Roster, world: World, timeout: float
    ) -> None:
        self._state = state
        self._roster = roster
        self._grid, self._clock = world.grid, world.clock
        self._log = TripLog(world)
        self._timeout = timeout
        self._expiries: deque[tuple[float, str]] = deque()

    # --- sending ----------------------------------------------------------------

    def push(
        self,
        messages: list[Message],
        purpose: str,
        asked: list[Asked],
    ) -> list[str]:
        """Push messages; return the id of each, or "" where it was refused.

        Parameters
        ----------
        messages : list of Message
            One batch.
        purpose : str
            ``"train"`` or ``"evaluate"``.
        asked : list of Asked
            What each message asks for.
        """
        refusal = "the grid refused the message"
        try:
            accepted = {m for m in self._grid.push_messages(messages) if m}
        except Exception as error:  # a push may fail in any way (1.42)
            accepted, refusal = set(), f"push failed: {type(error).__name__}: {error}"
        message_ids = []
        for message, order in zip(messages, asked, strict=True):
            is_sent = message.metadata.message_id in accepted
            trip = self._new_trip(message, purpose, order, is_sent=is_sent)
            self._log.dispatched(trip, trip.nbytes)
            if is_sent:
                self._send_off(trip)
            else:
                self._fail(trip, ev.Failed, refusal)
            message_ids.append(trip.message_id if is_sent else "")
        return message_ids

    def _new_trip(
        self, message: Message, purpose: str, asked: Asked, *, is_sent: bool
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
            expires_at=now + self._timeout,
            local_steps=asked.local_steps,
            number=asked.number,
            budget=asked.budget,
            nbytes=asked.nbytes,
            base=asked.base,
        )

    def _send_off(self, trip: Trip) -> None:
        self._state.take_off(trip)
        self._state.bytes_down += trip.nbytes
        self._expiries.append((trip.expires_at, trip.message_id))

    # --- receiving --------------------------------------------------------------

    def pull(self) -> list[Message]:
        """Return the replies that are there."""
        if not self._state.trips:
            return []
        # Keys, not a list: with ten thousand nodes in flight a list per look is slow.
        return list(self._grid.pull_messages(self._state.trips.keys()))

    def open(self, reply: Message) -> Trip | None:
        """Return the trip that a reply ends; None if it answers no open message."""
        # By message id, not by sender: a reply that Flower makes up for a lost message
        # carries the server's own node id.
        trip = self._state.trips.pop(reply.metadata.reply_to_message_id, None)
        if trip is None:
            self._log.unasked(reply)
        return trip

    def read(
        self, trip: Trip, reply: Message, read_fn: Callable[[RecordDict], _Read]
    ) -> _Read | None:
        """Return what `read_fn` reads in a reply; None if the trip ended badly."""
        if reply.has_error():
            reason = reply.error.reason or f"error code {reply.error.code}"
            self._fail(trip, ev.Failed, reason)
            return None
        try:
            _check_sender(trip, reply)
            return read_fn(reply.content)
        except UpdateRejected as rejection:
            self._fail(trip, ev.Rejected, rejection.reason)
            return None

    def accept(
        self,
        trip: Trip,
        reply: Message,
        num_examples: float,
        work: WorkReport | None = None,
        relative_error: float | None = None,
    ) -> None:
        """Note a good reply; its node is idle again."""
        nbytes = num_content_bytes(reply.content)
        self._state.bytes_up += nbytes
        self._log.arrived(trip, nbytes, num_examples, work, relative_error)
        self._roster.make_idle(trip.node_id)

    def residual_lost(self, trip: Trip, *, found: int, expected: int) -> None:
        """Note that a node lost what it kept from its payload number `expected`."""
        self._log.residual_lost(trip, found, expected)

    # --- other ends -------------------------------------------------------------

    def drop(self, trip: Trip, reason: str) -> None:
        """End a trip whose update is not wanted any more."""
        self._log.ended(trip, ev.Dropped, reason)

    def expire(self) -> Iterator[Trip]:
        """End the trips that took too long, and yield each when it has ended."""
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
            self._log.expired(trip, now)
            waited = now - trip.sent_at
            self._roster.rest(trip.node_id, f"no reply in {waited:.1f} s")
            yield trip

    def next_expiry(self) -> float:
        """Return when the next trip is given up on (s)."""
        return self._expiries[0][0] if self._expiries else math.inf

    def _fail(self, trip: Trip, kind: BadEnd, reason: str) -> None:
        self._log.ended(trip, kind, reason)
        if trip.purpose == "train":
            self._roster.rest(trip.node_id, reason)
        else:  # it may not know how to evaluate, and yet train well
            self._roster.make_idle(trip.node_id)


def _check_sender(trip: Trip, reply: Message) -> None:
    sender = reply.metadata.src_node_id
    if sender != trip.node_id:
        raise UpdateRejected(
            f"came from node {sender}, but was asked of node {trip.node_id}"
        )
