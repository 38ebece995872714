"""From updates to versions: weigh each, gather them in buffers, merge, synchronize."""

from flwr.app import MetricRecord

from flower_sap import events as ev
from flower_sap.payload.decoder import CodedUpdate
from flower_sap.strategies.inner import InnerStrategy
from flower_sap.strategies.parts import Parts, World
from flower_sap.strategies.staleness import Contribution
from flower_sap.strategies.state import Buffer, Held, NodeState, ServerState, Taken
from flower_sap.strategies.sync import RoundView
from flower_sap.strategies.updates import relative_error_of
from flower_sap.strategies.versions import Versions


class Merger:
    """The buffers of one run, one per speed group, and their merges.

    Parameters
    ----------
    state : ServerState
        Holds the buffers.
    world : World
        The time, and who is told.
    parts : Parts
        How updates are weighed and merged, and when all synchronize.
    inner : InnerStrategy
        Aggregates.
    versions : Versions
        Where a merge's model goes.
    """

    def __init__(
        self,
        state: ServerState,
        world: World,
        parts: Parts,
        *,
        inner: InnerStrategy,
        versions: Versions,
    ) -> None:
        self._state = state
        self._clock, self._tell = world.clock, world.tell
        self._parts = parts
        self._inner = inner
        self._versions = versions

    # --- updates ----------------------------------------------------------------

    def open_buffers(self) -> None:
        """Start with an empty buffer for each group."""
        sync, now = self._parts.sync, self._clock.now()
        self._state.buffers = [
            Buffer(
                self._inner.aggregator(
                    self._state.arrays, exact=sync.starts_together()
                ),
                opened_at=now,
            )
            for _ in range(sync.num_groups())
        ]

    def take(self, held: Held) -> None:
        """Take in an update."""
        buffer = self._state.buffers[held.trip.group]
        if len(self._state.buffers) == 1:
            self._add(buffer, held)
        else:  # another group may merge first, and the staleness grow until then
            buffer.held.append(held)

    def _add(self, buffer: Buffer, held: Held) -> None:
        """Add an update to a buffer, weighted by its version."""
        parts, update = self._parts, held.update
        num_steps = update.work.num_steps or held.trip.local_steps
        staleness = self._state.version - held.trip.base_version
        weight = self._weight(held, staleness, num_steps)
        gain = parts.merge.gain(weight, float(num_steps or 1))
        arrays = update.arrays
        if parts.merge.mixes_models and isinstance(arrays, CodedUpdate):
            # Mixed in as a whole model: what the payload says is relative to its base.
            arrays = arrays.arrays(held.base)
        buffer.aggregator.add(
            arrays,
            base=self._state.arrays if parts.merge.mixes_models else held.base,
            num_examples=update.num_examples,
            gain=gain,
            share=min(1.0, weight),
        )
        buffer.totals.examples += update.num_examples
        buffer.totals.weighted += update.num_examples * weight
        buffer.totals.steps += update.num_examples * (num_steps or 1)
        buffer.taken.append(
            Taken(held.trip, staleness, gain, update.num_examples, held.reply)
        )

    def _weight(self, held: Held, staleness: int, num_steps: int | None) -> float:
        """Count an update, and weigh it against all that were counted."""
        state, node_id = self._state, held.trip.node_id
        node = state.nodes.get(node_id, NodeState(node_id))
        node.num_updates += 1
        state.num_merged += 1
        state.steps_sum += num_steps or 1
        return self._parts.staleness(staleness) * self._parts.contribution(
            Contribution(
                staleness=staleness,
                num_examples=held.update.num_examples,
                num_steps=num_steps,
                mean_steps=state.steps_sum / state.num_merged,
                node_updates=node.num_updates,
                mean_updates=state.num_merged / max(1, len(state.nodes)),
                relative_error=relative_error_of(held.update) or 0.0,
            )
        )

    # --- merges -----------------------------------------------------------------

    def merge(self, group: int, view: RoundView) -> MetricRecord | None:
        """Make the next version of a group's updates; return their train metrics."""
        state, buffer = self._state, self._state.buffers[group]
        for held in buffer.held:
            self._add(buffer, held)
        buffer.held = []
        # An inner optimizer learns the current model from it.
        self._versions.train_template()
        scale = self._parts.merge.scale(buffer.totals)
        arrays, metrics = self._inner.aggregate(
            state.version + 1,
            buffer.aggregator,
            scale,
            state.arrays,
            [taken.reply for taken in buffer.taken],
        )
        self._versions.publish(arrays, len(buffer.taken))
        state.merges_since_sync += 1
        state.merged_at = state.progressed_at = self._clock.now()
        self._tell_merged(buffer, scale)
        self._renew(group)
        if self._parts.sync.synchronizes(view):
            self._synchronize()
        return metrics

    def _renew(self, group: int) -> None:
        """Empty a merged buffer, and let all go on from the new version."""
        state, buffer = self._state, self._state.buffers[group]
        state.buffers[group] = Buffer(
            buffer.aggregator,
            opened_at=state.merged_at,
            num_in_flight=buffer.num_in_flight,
        )
        for each in state.buffers:  # what waits in other groups is not added yet
            each.aggregator = each.aggregator.renewed(state.arrays)

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
