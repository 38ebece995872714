"""One strategy, one fleet, one seed: train in virtual time, note what happened.

A trial is a pure function of its description. It writes `events.jsonl` and
`trial.json` to its folder; the comparison reads only those, so trials can run in any
process.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import Strategy

from flower_sap.clients.app import client_app
from flower_sap.clients.task import Task, evaluate, initial_arrays
from flower_sap.data import FederatedData
from flower_sap.emulation import EmulatedGrid, Fleet, LocalGrid
from flower_sap.events import (
    Aggregated,
    Dropped,
    Evaluated,
    Event,
    Expired,
    Failed,
    JsonLines,
    Merged,
    Rejected,
    RunEnded,
    RunStarted,
)
from flower_sap.payload.dense import Manifest
from flower_sap.report.contenders import Contender, Setting, round_seconds
from flower_sap.strategies import RunOptions, RunResult, SemiAsync

# Evaluations are this far apart, as a share of the baseline's time and of the time that
# has passed: fine enough for a thirtieth of that time, and some 250 in all.
_FINEST = 1 / 2400
_COARSEST = 0.02


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained, where, and for how long.

    Attributes
    ----------
    task, data, fleet : Task, FederatedData, Fleet
        The model, the examples and the nodes.
    seed : int
        Of the first model, the partition, the fleet and every draw.
    local_epochs, num_rounds : int
        Of the synchronous baseline.
    more_samples : float
        How many times the baseline's samples the others may process: where devices do
        not wait for one another, more of them compute in the same time.
    """

    task: Task
    data: FederatedData
    fleet: Fleet
    seed: int
    local_epochs: int
    num_rounds: int
    more_samples: float = 1.5

    @property
    def num_samples(self) -> list[int]:
        """Return the samples that each node processes in a synchronous round."""
        return [len(part) * self.local_epochs for part in self.data.train]

    @property
    def budget(self) -> int:
        """Return the samples of the whole synchronous run."""
        return self.num_rounds * sum(self.num_samples)

    @property
    def longest(self) -> float:
        """Return the virtual time of the whole synchronous run, about (s)."""
        return self.num_rounds * max(round_seconds(self.fleet, self.num_samples, 0))

    def fingerprint(self) -> str:
        """Return a digest of what is trained: 64 hexadecimal digits."""
        task = self.task
        numbers = (
            task.metric, task.learning_rate, task.momentum, task.batch_size,
            self.seed, self.local_epochs, self.num_rounds, self.more_samples,
            self.data.name, self.fleet.to_toml(),
        )  # fmt: skip
        digest = hashlib.sha256(repr(numbers).encode())
        for part in (*self.data.train, self.data.test):
            digest.update(np.ascontiguousarray(part.x).data)
            digest.update(np.ascontiguousarray(part.y).data)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Point:
    """The global model at one time: its metric, and that of each speed tier."""

    time: float
    version: int
    metric: float
    tiers: tuple[float, ...]


@dataclass(slots=True)
class TrialResult:
    """What one trial came to.

    Attributes
    ----------
    name, seed, job : str, int, str
        Which trial, and the fingerprint of its job.
    points : list of Point
        Metric over virtual time.
    num_merges, num_updates : int
        New versions, and updates in them.
    mean_staleness, max_staleness : float, int
        Over the merged updates (versions).
    bytes_down, bytes_up : int
        On all links.
    idle : float
        Share of device time not spent computing.
    utilization : float
        Samples processed over what the fleet could have in the same time.
    num_lost : int
        Messages that ended otherwise than merged.
    end_time : float
        Virtual time at the end (s).
    """

    name: str
    seed: int
    job: str
    points: list[Point]
    num_merges: int
    num_updates: int
    mean_staleness: float
    max_staleness: int
    bytes_down: int
    bytes_up: int
    idle: float
    utilization: float
    num_lost: int
    end_time: float

    def save(self, path: Path) -> None:
        """Write the result as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "TrialResult":
        """Read what `save` wrote."""
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        fields["points"] = [
            Point(p["time"], p["version"], p["metric"], tuple(p["tiers"]))
            for p in fields["points"]
        ]
        return cls(**fields)


def run_trial(
    job: Job,
    contender: Contender,
    folder: Path,
    *,
    workers: int = 0,
    progress: Callable[[float], None] = lambda _: None,
) -> TrialResult:
    """Train once and return (and write to `folder`) what it came to.

    Parameters
    ----------
    job : Job
        What to train.
    contender : Contender
        With which strategy.
    folder : Path
        For `events.jsonl` and `trial.json`; made if missing.
    workers : int
        Processes that train the clients; 0: this one. The result is the same.
    progress : callable
        Told the share of the budget that is used up.
    """
    folder.mkdir(parents=True, exist_ok=True)
    app = client_app(job.task, job.data, seed=job.seed)
    local = LocalGrid(app, len(job.fleet), workers=workers, seed=job.seed)
    grid = EmulatedGrid(local, job.fleet, seed=job.seed)
    try:
        watch = _Watch(job, grid, progress)
        initial = initial_arrays(job.task, job.seed)
        setting = _setting(job, initial)
        strategy = contender.build(
            setting, RunOptions(job.seed, folder / "events.jsonl", (watch.note,), False)
        )
        config = contender.train_config(setting, job.task.batch_size)
        _start(strategy, job, grid, initial, config, watch, folder)
    finally:
        local.close()
    result = watch.result(contender.name)
    result.save(folder / "trial.json")
    return result


def _setting(job: Job, initial: ArrayRecord) -> Setting:
    nbytes = sum(len(array.data) for array in initial.values())
    seconds = round_seconds(job.fleet, job.num_samples, nbytes)
    return Setting(len(job.fleet), job.local_epochs, seconds)


def _start(
    strategy: Strategy,
    job: Job,
    grid: EmulatedGrid,
    initial: ArrayRecord,
    config: ConfigRecord,
    watch: "_Watch",
    folder: Path,
) -> None:
    if isinstance(strategy, SemiAsync):
        watch.follow(strategy)
        strategy.start(
            grid,
            initial,
            num_rounds=10**9,
            timeout=1e9,
            train_config=config,
            evaluate_fn=watch.evaluate,
            should_stop=watch.should_stop,
        )
        return
    # Flower's own strategies write no events; what the grid and the evaluation see
    # stands for them.
    log = JsonLines(folder / "events.jsonl")
    nbytes = Manifest.of(initial).nbytes
    log(RunStarted(0.0, type(strategy).__name__, job.num_rounds, nbytes))
    watch.log = log
    strategy.start(
        grid,
        initial,
        num_rounds=job.num_rounds,
        timeout=1e9,
        train_config=config,
        evaluate_fn=watch.evaluate,
    )
    log(RunEnded(grid.clock.now(), job.num_rounds, "finished"))


class _Watch:
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
        self._multiple = 1.0
        self._strategy: SemiAsync | None = None
        self._last: tuple[int, ArrayRecord] | None = None

    def note(self, event: Event) -> None:
        match event:
            case Merged(version=version, staleness=staleness):
                self._staleness.append(staleness)
                self._versions = version
            case Aggregated(version=version) if self._strategy is not None:
                if self._is_due:
                    self._measure(version, self._strategy.released())
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
        )
