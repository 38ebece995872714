"""The run's clock: seconds since its start, on the wall or in virtual time.

The engine knows time only through `Clock`. Emulation has another implementation,
`flower_sap.emulation.VirtualClock`, that passes the same tests. This is the only
file that imports `time`.
"""

import math
import time
from typing import Protocol


class Clock(Protocol):
    """A monotone clock that one can also wait on."""

    def now(self) -> float:
        """Return the seconds since the clock was made; never less than before."""
        ...

    def wait_until(self, at: float) -> None:
        """Wait until `at` (s on this clock), or less: look again after each call."""
        ...


class WallClock:
    """Real time, looked at every `poll_seconds`.

    Parameters
    ----------
    poll_seconds : float
        Longest single wait (s), > 0: how soon a reply that has arrived is seen.
    """

    def __init__(self, poll_seconds: float = 0.1) -> None:
        if not 0 < poll_seconds < math.inf:
            raise ValueError(f"poll_seconds must be > 0 s, got {poll_seconds}")
        self._poll_seconds = poll_seconds
        self._started_at = time.monotonic()

    def now(self) -> float:
        """Return the seconds since this clock was made."""
        return time.monotonic() - self._started_at

    def wait_until(self, at: float) -> None:
        """Sleep until `at`, but at most `poll_seconds`."""
        time.sleep(max(0.0, min(at - self.now(), self._poll_seconds)))


def wall_seconds() -> float:
    """Return a monotone wall-clock reading (s) whose zero is arbitrary."""
    return time.perf_counter()
