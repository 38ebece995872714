"""Time that passes only when everybody waits for it.

`VirtualClock` jumps from event to event. Whoever knows of coming events (an
`EmulatedGrid`) registers a function that tells when the next one is.
"""

import math
from collections.abc import Callable

from flower_sap.errors import EmulationError


class VirtualClock:
    """A `Clock` in virtual time, starting at 0 s.

    Examples
    --------
    >>> clock = VirtualClock()
    >>> clock.wait_until(3.5)
    >>> clock.now()
    3.5
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._next_events: list[Callable[[float], float]] = []

    def now(self) -> float:
        """Return the virtual time (s)."""
        return self._now

    def attach(self, next_event: Callable[[float], float]) -> None:
        """Register a source of events.

        Parameters
        ----------
        next_event : callable
            Given a time limit (s), returns when its next event happens if that is
            before the limit, else any time not before the limit.
        """
        self._next_events.append(next_event)

    def wait_until(self, at: float) -> None:
        """Jump to `at`, or to the next event if that is earlier.

        Raises
        ------
        EmulationError
            If `at` is infinite and nothing will ever happen.
        """
        for next_event in self._next_events:
            at = min(at, next_event(at))
        if at == math.inf:
            raise EmulationError(
                f"nothing will ever happen after {self._now} s: no message is in "
                "flight and the wait has no end"
            )
        self._now = max(self._now, at)
