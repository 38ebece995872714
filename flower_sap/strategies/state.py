"""All that changes while a run goes on, in one record.

`ServerState` is shared by the engine and its pieces; nothing else writes to it. Old
versions are kept only while a message in flight was trained from them.
"""

from dataclasses import dataclass, field

from flwr.app import Message

from flower_sap.payload.budget import LinkEstimate
from flower_sap.payload.dense import Arrays
from flower_sap.strategies.aggregation import Aggregator
from flower_sap.strategies.merging import Totals
from flower_sap.strategies.sync import RoundView
from flower_sap.strategies.updates import ClientUpdate, WorkReport
from flower_sap.strategies.work import NodePace

_SMOOTHING = 0.3  # weight of the newest observation of a node's speed
# A step takes no less (s): a client may claim any time, and virtual time may stand
# still, but speeds are divided by it.
_SHORTEST_STEP = 1e-9


@dataclass(slots=True)
class Trip:
    """One message on its way: to a node, through its training, and back.

    Attributes
    ----------
    message_id : str
        Flower's id, by which its reply is matched.
    node_id, group : int
        Where it went, and the speed group that its node was in.
    purpose : str
        ``"train"`` or ``"evaluate"``.
    base_version : int
        Version of the model it carries.
    sent_at, expires_at : float
        On the run's clock (s).
    local_steps : int or None
        Steps that the work rule asked for.
    number : int
        Of this message at its node, from 1.
    budget : int or None
        Most bytes of the reply; None: plain arrays were asked for.
    nbytes : int
        Of the message (B).
    base : Arrays or None
        The model that this node alone was sent; None: the version's.
    is_late : bool
        Whether a synchronization went on without it.
    """

    message_id: str
    node_id: int
    group: int
    purpose: str
    base_version: int
    sent_at: float
    expires_at: float
    local_steps: int | None = None
    number: int = 0
    budget: int | None = None
    nbytes: int = 0
    base: Arrays | None = None
    is_late: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """What one message asks of its node, and what it carries; see `Trip`."""

    local_steps: int | None = None
    number: int = 0
    budget: int | None = None
    nbytes: int = 0
    base: Arrays | None = None


@dataclass(frozen=True, slots=True, eq=False)
class HeldModel:
    """The model that a node keeps: that of its message `number`."""

    number: int
    arrays: Arrays


@dataclass(slots=True)
class NodeState:
    """What the server knows of one node."""

    node_id: int
    group: int = 0
    num_dispatched: int = 0
    num_updates: int = 0
    failures_in_row: int = 0
    last_reason: str = ""
    seconds_per_step: float | None = None
    overhead_seconds: float = 0.0
    trip_seconds: float | None = None
    computing_seconds: float | None = None
    is_busy: bool = False
    has_just_evaluated: bool = False
    link: LinkEstimate = field(default_factory=LinkEstimate)
    acked_payload: int = 0
    last_payload: int = 0
    last_budget: int | None = None
    last_downlink_budget: int | None = None
    has_entropy_coder: bool = True
    held: HeldModel | None = None

    def observe(self, trip: Trip, work: WorkReport, now: float) -> None:
        """Learn the node's pace from a finished trip."""
        steps = work.num_steps or trip.local_steps or 1
        seconds = now - trip.sent_at
        # Without a report the whole trip counts as computing, so that a node behind a
        # slow link is asked for less, not more.
        computing = min(work.compute_seconds or seconds, seconds)
        self.trip_seconds = _smooth(self.trip_seconds, seconds)
        self.computing_seconds = _smooth(self.computing_seconds, computing)
        self.seconds_per_step = _smooth(
            self.seconds_per_step, max(_SHORTEST_STEP, computing / steps)
        )
        self.overhead_seconds = max(
            0.0,
            _smooth(
                self.overhead_seconds if self.num_updates else None, seconds - computing
            ),
        )


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else old + _SMOOTHING * (new - old)


@dataclass(slots=True)
class Taken:
    """One update in a buffer, without its arrays."""

    trip: Trip
    staleness: int
    gain: float
    num_examples: float
    reply: Message


@dataclass(slots=True)
class Held:
    """One update that waits, arrays and all, for its group's merge."""

    trip: Trip
    update: ClientUpdate
    base: Arrays
    reply: Message


@dataclass(slots=True)
class Buffer:
    """Updates of one speed group that wait for their merge."""

    aggregator: Aggregator
    totals: Totals = field(default_factory=Totals)
    taken: list[Taken] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    opened_at: float = 0.0
    num_in_flight: int = 0


@dataclass(slots=True)
class ServerState:
    """The whole state of a run.

    Attributes
    ----------
    arrays : Arrays
        The current model.
    version, round : int
        Merges so far, and Flower's rounds completed.
    synced_at, merged_at, progressed_at : float
        The last synchronization, the last merge, and the last merge or end of an
        evaluation (s on the run's clock).
    base_arrays : dict
        Version to model, for each version that a train message in flight carries.
    num_flying : dict
        Version to train messages in flight, oldest first.
    trips : dict
        Message id to trip, in order of dispatch.
    nodes : dict
        Node id to what is known of it.
    idle : list of int
        Connected nodes that may be sent a message.
    buffers : list of Buffer
        One per speed group.
    """

    arrays: Arrays
    version: int = 0
    round: int = 0
    merges_since_sync: int = 0
    synced_at: float = 0.0
    merged_at: float = 0.0
    progressed_at: float = 0.0
    num_dispatched: int = 0
    base_arrays: dict[int, Arrays] = field(default_factory=dict)
    num_flying: dict[int, int] = field(default_factory=dict)
    trips: dict[str, Trip] = field(default_factory=dict)
    nodes: dict[int, NodeState] = field(default_factory=dict)
    idle: list[int] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    speed_sum: float = 0.0
    num_speeds: int = 0
    steps_sum: float = 0.0
    num_merged: int = 0
    bytes_down: int = 0
    bytes_up: int = 0

    def pace(self, node: NodeState) -> NodePace:
        """Return what a work rule may know of `node`."""
        mean = self.speed_sum / self.num_speeds if self.num_speeds else 0.0
        return NodePace(node.seconds_per_step, node.overhead_seconds, mean)

    def observe(self, trip: Trip, work: WorkReport, now: float) -> None:
        """Learn from a finished train trip, and keep the mean speed up to date."""
        node = self.nodes[trip.node_id]
        if node.seconds_per_step is not None:
            self.speed_sum -= 1 / node.seconds_per_step
            self.num_speeds -= 1
        node.observe(trip, work, now)
        if node.seconds_per_step is not None:
            self.speed_sum += 1 / node.seconds_per_step
            self.num_speeds += 1

    def take_off(self, trip: Trip) -> None:
        """Note a message that was sent."""
        self.trips[trip.message_id] = trip
        node = self.nodes[trip.node_id]
        node.is_busy = True
        node.has_just_evaluated = trip.purpose == "evaluate"
        if trip.purpose == "train":
            self.base_arrays[trip.base_version] = self.arrays
            flying = self.num_flying.get(trip.base_version, 0)
            self.num_flying[trip.base_version] = flying + 1
            buffer = self.buffers[trip.group]
            if not (buffer.num_in_flight or buffer.taken or buffer.held):
                buffer.opened_at = trip.sent_at
            buffer.num_in_flight += 1

    def land(self, trip: Trip) -> Arrays | None:
        """Note a message that ended; return the model it carried, if it was to train.

        Its version is forgotten when no other message in flight carries it.
        """
        self.nodes[trip.node_id].is_busy = False
        if trip.purpose != "train":
            return None
        if not trip.is_late:
            self.buffers[trip.group].num_in_flight -= 1
        base = self.base_arrays[trip.base_version]
        self.num_flying[trip.base_version] -= 1
        if self.num_flying[trip.base_version] == 0:
            del self.num_flying[trip.base_version]
            del self.base_arrays[trip.base_version]
        return base if trip.base is None else trip.base

    @property
    def oldest_base_version(self) -> int:
        """Return the oldest version in flight; the current one if nothing is."""
        # Versions enter in rising order, so the first key is the oldest.
        return next(iter(self.num_flying), self.version)

    def view(self, group: int, now: float) -> RoundView:
        """Return what a sync policy may know of a speed group."""
        buffer = self.buffers[group]
        return RoundView(
            now=now,
            opened_at=buffer.opened_at,
            synced_at=self.synced_at,
            version=self.version,
            oldest_base_version=self.oldest_base_version,
            merges_since_sync=self.merges_since_sync,
            num_buffered=len(buffer.taken) + len(buffer.held),
            num_in_flight=buffer.num_in_flight,
        )
