"""What the event log says of a trip, from its dispatch to its end."""

from typing import TypeAlias

from flwr.app import Message

from flower_sap import events as ev
from flower_sap.strategies.parts import World
from flower_sap.strategies.state import Trip
from flower_sap.strategies.updates import WorkReport

BadEnd: TypeAlias = type[ev.Failed] | type[ev.Rejected] | type[ev.Dropped]


class TripLog:
    """Tells the observers of trips.

    Parameters
    ----------
    world : World
        The time, and who is told.
    """

    def __init__(self, world: World) -> None:
        self._clock, self._tell = world.clock, world.tell

    def dispatched(self, trip: Trip, nbytes: int) -> None:
        """Tell that a message was sent, or refused by the grid."""
        self._tell(
            ev.Dispatched(
                trip.sent_at,
                trip.message_id,
                trip.node_id,
                trip.purpose,
                trip.base_version,
                nbytes,
                trip.local_steps,
                trip.budget,
            )
        )

    def arrived(
        self,
        trip: Trip,
        nbytes: int,
        num_examples: float,
        work: WorkReport | None,
        relative_error: float | None,
    ) -> None:
        """Tell that a good reply is there."""
        self._tell(
            ev.Arrived(
                self._clock.now(),
                trip.message_id,
                trip.node_id,
                trip.purpose,
                trip.base_version,
                nbytes,
                num_examples,
                work.num_samples if work else None,
                work.compute_seconds if work else None,
                relative_error,
            )
        )

    def ended(self, trip: Trip, kind: BadEnd, reason: str) -> None:
        """Tell that a trip came to nothing."""
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

    def expired(self, trip: Trip, now: float) -> None:
        """Tell that a trip was given up on."""
        self._tell(
            ev.Expired(
                now,
                trip.message_id,
                trip.node_id,
                trip.purpose,
                trip.base_version,
                now - trip.sent_at,
            )
        )

    def residual_lost(self, trip: Trip, found: int, expected: int) -> None:
        """Tell that a node's payload was made without what it should have kept."""
        self._tell(
            ev.ResidualLost(
                self._clock.now(), trip.message_id, trip.node_id, expected, found
            )
        )

    def unasked(self, reply: Message) -> None:
        """Tell of a reply that belongs to no trip."""
        self._tell(
            ev.Rejected(
                self._clock.now(),
                reply.metadata.reply_to_message_id,
                reply.metadata.src_node_id,
                "train",
                -1,
                "answers no open message: a duplicate, or never asked",
            )
        )
