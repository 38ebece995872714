"""What does not change the algorithm: seed, event log, observers, clock."""

from dataclasses import dataclass
from pathlib import Path

from flower_sap import events as ev
from flower_sap.clock import Clock


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a run is carried out and recorded.

    Parameters
    ----------
    seed : int
        Of the engine's own draws (which idle nodes start, when not all may), >= 0.
    events : path or None
        Where to write the event log; None writes none.
    observers : tuple of callables
        Told of each event.
    progress : bool
        Show a live line when standard error is a terminal.
    series : str, optional
        Key of what clients keep on disk between messages; give a resumed run that of
        the run which it goes on with. Default: a new one.
    clock : Clock, optional
        Default: the grid's own clock where it has one (emulation), else the wall.
    """

    seed: int = 0
    events: Path | str | None = "events.jsonl"
    observers: tuple[ev.Observer, ...] = ()
    progress: bool = True
    clock: Clock | None = None
    series: str | None = None

    def __post_init__(self) -> None:
        """Refuse a negative seed."""
        if not self.seed >= 0:
            raise ValueError(f"seed must be >= 0, got {self.seed}")
