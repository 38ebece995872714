"""The sizes that replies are asked to have, and what is learned of links from them."""

from functools import cached_property
from typing import TypeAlias

from flwr.app import Message

from flower_sap._flower import num_content_bytes
from flower_sap.payload import fixed_rate
from flower_sap.payload.budget import LinkView
from flower_sap.payload.decoder import CodedUpdate
from flower_sap.payload.dense import Manifest
from flower_sap.payload.layout import Layout, length
from flower_sap.strategies.parts import Parts
from flower_sap.strategies.state import NodeState, ServerState, Trip
from flower_sap.strategies.updates import ClientUpdate
from flower_sap.wire import (
    PAYLOAD_ACKED,
    PAYLOAD_BUDGET,
    PAYLOAD_LOCAL_KEYS,
    PAYLOAD_PROTECT,
    PAYLOAD_SEED,
    PAYLOAD_SERIES,
    PAYLOAD_STATISTICS,
)

ConfigValue: TypeAlias = int | str | list[str]
_USUAL = 0.5  # quantile of the fleet's trips that stands for a deadline
_MESSAGE_NBYTES = 4096  # beside the values, for a peer that has fixed sizes alone


class Sizing:
    """Asks the budget rule, and tells nodes what it said.

    Parameters
    ----------
    state : ServerState
        Knows the nodes.
    parts : Parts
        The budget rule, and the treatment of arrays.
    manifest : Manifest
        The model.
    """

    def __init__(self, state: ServerState, parts: Parts, manifest: Manifest) -> None:
        self._state = state
        self._parts = parts
        self._manifest = manifest

    @cached_property
    def layout(self) -> Layout:
        """Return the layout of every payload of the run."""
        return Layout(self._manifest, self._parts.treatment)

    def budget(
        self, node: NodeState, steps: int | None, available: float, nbytes: int
    ) -> int | None:
        """Return the most bytes of a node's next reply; None: plain arrays.

        Parameters
        ----------
        node : NodeState
            What is known of it.
        steps : int or None
            Local steps that it is asked for.
        available : float
            Until its update should be back (s).
        nbytes : int
            Of the message that goes to it.
        """
        rule = self._parts.payload
        if rule is None:
            return None
        besides = _seconds_before_upload(node, steps, nbytes)
        budget = rule.budget(self._view(node, besides, available, node.last_budget))
        if budget is not None and not node.has_entropy_coder:
            least = fixed_rate.block8_nbytes(length(self.layout.stream))
            budget = max(budget, least + _MESSAGE_NBYTES)
        node.last_budget = budget
        return budget

    def downlink_budget(
        self, node: NodeState, steps: int | None, available: float
    ) -> int | None:
        """Return the most bytes of the model in a node's next message; None: whole."""
        rule = self._parts.downlink
        if rule is None:
            return None
        last = node.last_downlink_budget
        besides = _seconds_computing(node, steps)
        budget = rule.budget(self._view(node, besides, available, last))
        node.last_downlink_budget = budget
        return budget

    def _view(
        self, node: NodeState, besides: float, available: float, last: int | None
    ) -> LinkView:
        return LinkView(
            model_nbytes=self._manifest.nbytes,
            rate=node.link.uplink,
            compute_seconds=besides,
            available=available,
            usual_seconds=self._usual_seconds(),
            last_budget=last,
        )

    def _usual_seconds(self) -> float | None:
        if not self._parts.sync.starts_together():
            return None
        trips = sorted(
            node.trip_seconds
            for node in self._state.nodes.values()
            if node.trip_seconds is not None
        )
        return trips[int(_USUAL * (len(trips) - 1))] if trips else None

    def orders(self, node: NodeState, budget: int) -> dict[str, ConfigValue]:
        """Return what a message's config says of the reply's payload."""
        treatment = self._parts.treatment
        orders: dict[str, ConfigValue] = {
            PAYLOAD_BUDGET: budget,
            PAYLOAD_ACKED: node.acked_payload,
            PAYLOAD_SERIES: self._parts.series,
            PAYLOAD_SEED: self._parts.seed,
        }
        if treatment.protect:
            orders[PAYLOAD_PROTECT] = list(treatment.protect)
        if treatment.local_keys:
            orders[PAYLOAD_LOCAL_KEYS] = list(treatment.local_keys)
        if treatment.statistics != "sent":
            orders[PAYLOAD_STATISTICS] = treatment.statistics
        return orders

    def observe(
        self, trip: Trip, update: ClientUpdate, reply: Message, now: float
    ) -> None:
        """Learn a node's link from a trip that has ended well."""
        node, work = self._state.nodes[trip.node_id], update.work
        node.has_entropy_coder = work.has_entropy_coder
        if work.uplink is not None:
            node.link.report(work.uplink)
        elif work.compute_seconds is not None:
            seconds = now - trip.sent_at - work.compute_seconds
            nbytes = trip.nbytes + num_content_bytes(reply.content)
            node.link.observe(nbytes, max(0.0, seconds))

    def last_kept(self, trip: Trip, update: ClientUpdate) -> tuple[int, int] | None:
        """Return which payload a node went on from, and which it should have."""
        if not isinstance(update.arrays, CodedUpdate) or update.work.residual is None:
            return None
        node = self._state.nodes[trip.node_id]
        expected, node.last_payload = node.last_payload, trip.number
        return update.work.residual, expected

    def commit(self, trip: Trip, update: ClientUpdate) -> None:
        """Remember that a payload was taken in: its node may commit what it kept."""
        if isinstance(update.arrays, CodedUpdate):
            self._state.nodes[trip.node_id].acked_payload = trip.number


def _seconds_before_upload(node: NodeState, steps: int | None, nbytes: int) -> float:
    """Return the time that download and computing will take, as far as is known (s)."""
    rate = node.link.uplink
    return _seconds_computing(node, steps) + (nbytes / rate if rate else 0.0)


def _seconds_computing(node: NodeState, steps: int | None) -> float:
    """Return the time that computing will take, as far as is known (s)."""
    if steps is not None and node.seconds_per_step is not None:
        return node.seconds_per_step * steps
    return node.computing_seconds or 0.0
