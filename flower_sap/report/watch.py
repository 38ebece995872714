"""Looks at the global model now and then while a trial runs, and counts."""

from collections.abc import Callable

import numpy as np
from flwr.app import ArrayRecord, MetricRecord

from flower_sap.clients.task import evaluate
from flower_sap.emulation import EmulatedGrid
from flower_sap.events import (
    Aggregated,
    Arrived,
    Dropped,
    Evaluated,
    Event,
    Expired,
    Failed,
    Merged,
    Rejected,
)
from flower_sap.report.job import Job, Point, TrialResult
from flower_sap.strategies import RunResult, SemiAsync

# Evaluations are this far apart, as a share of the baseline's time and of the time that
# has passed: fine enough for a thirtieth of that time, and some 250 in all.
_FINEST = 1 / 2400
_COARSEST = 0.02


class Watch:
    """Evaluates the global model now and then, and counts."""

    def __init__(
        self, job: Job, grid: EmulatedGrid, progress: Callable[[float], None]
    ) -> None:
        self._job = job
        self._grid = grid
        self._progress = progress
        self._tiers = job.fleet.tiers()
        self.points: list[Point] = []
        self.log: Callable[[Event], None] | None = None
        self._staleness: list[int] = []
        self._versions = 0
        self._lost = 0
        self._errors: list[float] = []
        self._multiple = 1.0
        self._strategy: SemiAsync | None = None
        self._last: tuple[int, ArrayRecord] | None = None

    def note(self, event: Event) -> None:
        """Count an event, and look at each version that is due."""
        match event:
            case Merged(version=version, staleness=staleness):
                self._staleness.append(staleness)
                self._versions = version
            case Aggregated(version=version) if self._strategy is not None:
                if self._is_due:
                    self._measure(version, self._strategy.released())
            case Arrived(relative_error=float(error)):
                self._errors.append(error)
            case Failed() | Rejected() | Expired() | Dropped():
                self._lost += 1
            case _:
                pass

    def follow(self, strategy: SemiAsync) -> None:
        """Look at every version, not only at the ends of rounds."""
        self._strategy = strategy
        self._multiple = self._job.more_samples

    def evaluate(self, round_: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Evaluate if enough virtual time has passed since the last time."""
        self._last = (round_, arrays)
        return self._measure(round_, arrays) if self._is_due else None

    @property
    def _is_due(self) -> bool:
        if not self.points:
            return True
        last = self.points[-1].time
        apart = max(_FINEST * self._job.longest, _COARSEST * last)
        return self._grid.clock.now() >= last + apart

    def _measure(self, round_: int, arrays: ArrayRecord) -> MetricRecord:
        job, now = self._job, self._grid.clock.now()
        score = evaluate(job.task, arrays, job.data.test)
        point = Point(
            now,
            self._versions or round_,
            job.data.evaluation.of(score),
            tuple(job.data.evaluation.of(score, nodes=t) for t in self._tiers),
        )
        self.points.append(point)
        samples = self._grid.samples / job.budget
        self._progress(min(1.0, samples / self._multiple))
        if self.log is not None:
            metrics = {job.task.metric: point.metric}
            self.log(Evaluated(now, point.version, round_, "server", metrics))
        return MetricRecord({job.task.metric: point.metric})

    def should_stop(self, round_: int, result: RunResult) -> bool:
        """End a run that has used its samples, or the baseline's time."""
        job, grid = self._job, self._grid
        return (
            grid.samples >= job.more_samples * job.budget
            or grid.clock.now() >= job.longest
        )

    def result(self, name: str) -> TrialResult:
        """Return what came of the run, with a last evaluation."""
        if self._last is not None and self._grid.clock.now() > self.points[-1].time:
            self._measure(*self._last)
        grid, end = self._grid, self._grid.clock.now()
        busy = np.array(grid.busy_seconds())
        speeds = self._job.fleet.speeds
        staleness = np.array(self._staleness or [0])
        is_ours = bool(self._staleness)
        return TrialResult(
            name=name,
            seed=self._job.seed,
            job=self._job.fingerprint(),
            points=self.points,
            num_merges=self._versions if is_ours else self._job.num_rounds,
            num_updates=len(self._staleness)
            if is_ours
            else self._job.num_rounds * len(speeds),
            mean_staleness=float(staleness.mean()),
            max_staleness=int(staleness.max()),
            bytes_down=grid.bytes_down,
            bytes_up=grid.bytes_up,
            idle=float(1 - busy.mean() / end),
            utilization=float((busy @ speeds) / (speeds.sum() * end)),
            num_lost=self._lost,
            end_time=end,
            relative_error=float(np.mean(self._errors)) if self._errors else 0.0,
        )
