"""Train messages: what they ask of a node, and the updates that come back."""

from collections.abc import Sequence
from dataclasses import replace

from flwr.app import Message, RecordDict

from flower_sap._flower import num_content_bytes
from flower_sap.clock import Clock
from flower_sap.payload.dense import Arrays
from flower_sap.strategies.broadcast import Broadcast
from flower_sap.strategies.inner import InnerStrategy
from flower_sap.strategies.mailbox import Mailbox, batches
from flower_sap.strategies.parts import Parts
from flower_sap.strategies.replies import without_arrays
from flower_sap.strategies.sizing import ConfigValue, Sizing
from flower_sap.strategies.state import Asked, Held, HeldModel, ServerState, Trip
from flower_sap.strategies.updates import (
    ClientUpdate,
    Expected,
    read_update,
    relative_error_of,
)
from flower_sap.strategies.versions import Versions
from flower_sap.wire import BASE_VERSION, DISPATCH_NUMBER, LOCAL_STEPS, PAYLOAD_HOLD


class Training:
    """The train messages of one run.

    Parameters
    ----------
    state : ServerState
        Knows the pace of the nodes.
    parts : Parts
        How many local steps to ask for, and what becomes of late updates.
    versions : Versions
        The model that is sent.
    inner : InnerStrategy
        Decorates the messages.
    mailbox : Mailbox
        Carries them.
    clock : Clock
        The time.
    """

    def __init__(
        self,
        state: ServerState,
        parts: Parts,
        *,
        versions: Versions,
        inner: InnerStrategy,
        mailbox: Mailbox,
        clock: Clock,
    ) -> None:
        self._state = state
        self._sync, self._work = parts.sync, parts.work
        self._sizing = Sizing(state, parts, versions.manifest)
        self._broadcast = Broadcast(state, parts, self._sizing)
        self._versions = versions
        self._inner = inner
        self._mailbox = mailbox
        self._clock = clock

    def send(self, node_ids: list[int]) -> None:
        """Send the current version to these nodes."""
        for batch in batches(node_ids):
            self._push(batch)

    def _push(self, node_ids: Sequence[int]) -> None:
        message_type, content, nbytes = self._versions.train_template()
        state, now = self._state, self._clock.now()
        available = self._sync.work_until(state.view(0, now)) - now
        asked, messages = [], []
        for node_id in node_ids:
            order, own = self._prepare(node_id, available, content, nbytes)
            asked.append(order)
            messages.append(
                Message(own, dst_node_id=node_id, message_type=message_type)
            )
        self._mailbox.push(messages, "train", asked)

    def _prepare(
        self, node_id: int, available: float, content: RecordDict, nbytes: int
    ) -> tuple[Asked, RecordDict]:
        """Return what a node's next message asks, and its content.

        Parameters
        ----------
        node_id : int
            Where it goes.
        available : float
            Until the update should be back (s).
        content, nbytes : RecordDict, int
            Of the version's message with the whole model.
        """
        node = self._state.nodes[node_id]
        node.num_dispatched += 1
        number = node.num_dispatched
        steps = self._work.local_steps(self._state.pace(node), available)
        model = self._broadcast.outgoing(
            node, number, steps=steps, available=available, whole_nbytes=nbytes
        )
        base = None
        if model.record is not None:
            base = model.base
            content = self._inner.with_model(content, model.record)
            nbytes = num_content_bytes(content)
        budget = self._sizing.budget(node, steps, available, nbytes)
        asked = Asked(steps, number, budget, nbytes, base)
        own = self._inner.fresh_content(content, self._orders(node_id, asked))
        if base is not None:
            asked = replace(asked, nbytes=num_content_bytes(own))
        return asked, own

    def _orders(self, node_id: int, asked: Asked) -> dict[str, ConfigValue]:
        orders: dict[str, ConfigValue] = {
            BASE_VERSION: self._state.version,
            DISPATCH_NUMBER: asked.number,
        }
        if asked.local_steps is not None:
            orders[LOCAL_STEPS] = asked.local_steps
        if asked.budget is not None:
            node = self._state.nodes[node_id]
            orders |= self._sizing.orders(node, asked.budget)
            if self._broadcast.is_sized:
                orders[PAYLOAD_HOLD] = True
        return orders

    def take(self, trip: Trip, reply: Message, base: Arrays) -> Held | None:
        """Return the update in a reply; None if it is bad, or dropped for being late.

        Parameters
        ----------
        trip : Trip
            That of the message which the reply answers.
        reply : Message
            What came back.
        base : Arrays
            The model that the message carried.
        """

        def read(content: RecordDict) -> ClientUpdate:
            return read_update(
                content,
                Expected(
                    self._versions.manifest,
                    trip.base_version,
                    self._inner.weighted_by,
                    None if trip.budget is None else self._sizing.layout,
                    trip.number,
                    trip.budget,
                ),
            )

        update = self._mailbox.read(trip, reply, read)
        if update is None:
            return None
        self._state.observe(trip, update.work, self._clock.now())
        self._state.nodes[trip.node_id].failures_in_row = 0
        self._sizing.observe(trip, update, reply, self._clock.now())
        if update.work.holds == trip.number and self._broadcast.is_sized:
            self._state.nodes[trip.node_id].held = HeldModel(trip.number, base)
        kept = self._sizing.last_kept(trip, update)
        if kept is not None and kept[0] < kept[1]:
            self._mailbox.residual_lost(trip, found=kept[0], expected=kept[1])
        self._mailbox.accept(
            trip, reply, update.num_examples, update.work, relative_error_of(update)
        )
        if trip.is_late and self._sync.drops_late():
            self._mailbox.drop(trip, "arrived after the synchronization's grace")
            return None
        self._sizing.commit(trip, update)
        return Held(trip, update, base, without_arrays(reply, update.metrics))
