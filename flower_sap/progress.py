"""One live line about a run, for whoever watches a terminal."""

import sys

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from flower_sap import events as ev


class ProgressLine:
    """An `Observer` that shows rounds, updates and the last metrics.

    Quiet when standard error is not a terminal.

    Parameters
    ----------
    num_rounds : int
        Rounds of the whole run.
    """

    def __init__(self, num_rounds: int) -> None:
        self._num_rounds = num_rounds
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._merged = self._lost = 0
        self._metrics = ""

    def __call__(self, event: ev.Event) -> None:
        """Show what changed."""
        if isinstance(event, ev.RunStarted):
            self._open()
        elif self._progress is not None:
            self._note(event, self._progress)

    def _open(self) -> None:
        console = Console(file=sys.stderr)
        if not console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("round"),
            BarColumn(bar_width=20),
            TextColumn("{task.completed:.0f}/{task.total:.0f} {task.description}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("", total=self._num_rounds)
        self._progress.start()

    def _note(self, event: ev.Event, progress: Progress) -> None:
        match event:
            case ev.Merged():
                self._merged += 1
            case ev.Failed() | ev.Rejected() | ev.Expired():
                self._lost += 1
            case ev.Evaluated(metrics=metrics, round=round_):
                self._metrics = " ".join(
                    f"{name} {value:.4g}"
                    for name, value in metrics.items()
                    if isinstance(value, float)
                )
                progress.update(self._task, completed=round_)
            case ev.Aggregated(time=time, version=version):
                progress.update(
                    self._task,
                    description=f"version {version} at {time:.1f} s, "
                    f"{self._merged} merged, {self._lost} lost {self._metrics}",
                )
            case ev.RunEnded():
                progress.stop()
            case _:
                pass
