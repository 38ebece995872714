"""What can go wrong in a run, as exceptions that carry their facts.

::

    SapError
    ├── StalledError          no new model version within the time allowed
    ├── NoNodesError          too few nodes ever connected
    ├── AllClientsFailedError every node failed again and again
    ├── InnerStrategyError    the wrapped strategy did not answer as its interface says
    ├── UpdateRejected        one reply cannot become an update (an event, not an end)
    │   └── PayloadError      its bytes are not what they claim to be
    ├── EmulationError        a ClientApp or worker broke the emulation's rules
    └── EventLogError         an event log cannot be read or written

Wrong constructor arguments raise `ValueError` or `TypeError` where they are made.
"""

from collections.abc import Mapping


class SapError(Exception):
    """Everything that flower-sap raises for a run, as one catchable class."""


class StalledError(SapError):
    """The sync policy was not met within the time allowed for one model version."""

    def __init__(
        self, *, policy: object, num_buffered: int, num_in_flight: int, waited: float
    ) -> None:
        self.policy = policy
        self.num_buffered = num_buffered
        self.num_in_flight = num_in_flight
        self.waited = waited
        super().__init__(
            f"no new model version for {waited:.1f} s: {policy} is not met by "
            f"{num_buffered} buffered updates ({num_in_flight} messages in flight). "
            "Connect more nodes, ask for fewer updates, raise `timeout`, or bound the "
            "wait with FirstOf(..., Deadline(seconds))."
        )


class NoNodesError(SapError):
    """Fewer nodes than needed were connected within the time allowed."""

    def __init__(self, *, found: int, needed: int, waited: float) -> None:
        self.found = found
        self.needed = needed
        self.waited = waited
        super().__init__(
            f"{found} nodes connected after {waited:.1f} s, but the run needs "
            f"{needed}. Start SuperNodes (or raise the number of simulated ones), "
            "lower `min_available_nodes` of the inner strategy, or raise `timeout`."
        )


class AllClientsFailedError(SapError):
    """Every connected node failed several times in a row and none succeeded."""

    def __init__(self, *, failures: int, reasons: Mapping[int, str]) -> None:
        self.failures = failures
        self.reasons = dict(reasons)
        shown = "; ".join(
            f"node {node}: {_last_line(reason)}"
            for node, reason in list(self.reasons.items())[:3]
        )
        super().__init__(
            f"all {len(self.reasons)} connected nodes failed {failures} times in a row "
            f"({shown}). Look at the ClientApp's log; the event log holds every reason."
        )


def _last_line(reason: str) -> str:
    """Return the end of a traceback, where its cause stands."""
    lines = reason.strip().splitlines() or ["?"]
    return lines[-1][:200]


class InnerStrategyError(SapError):
    """The wrapped strategy did not do what Flower's interface says."""


class UpdateRejected(SapError):
    """One reply cannot be merged; `reason` says why, in numbers."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class PayloadError(UpdateRejected):
    """The bytes of a reply are not what they claim to be."""


class EmulationError(SapError):
    """A ClientApp or a worker process broke the rules of the emulation."""


class EventLogError(SapError):
    """An event log cannot be read (schema, syntax) or written."""
