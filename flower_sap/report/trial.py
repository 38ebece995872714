"""One strategy, one fleet, one seed: train in virtual time, note what happened.

A trial is a pure function of its description. It writes `events.jsonl` and
`trial.json` to its folder; the comparison reads only those, so trials can run in any
process.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp.strategy import Strategy

from flower_sap.clients.app import client_app
from flower_sap.clients.mod import SapMod
from flower_sap.clients.task import initial_arrays
from flower_sap.emulation import EmulatedGrid, LocalGrid
from flower_sap.events import (
    JsonLines,
    RunEnded,
    RunStarted,
)
from flower_sap.payload.dense import Manifest
from flower_sap.report.contenders import Contender, Setting, round_seconds
from flower_sap.report.job import Job, TrialResult
from flower_sap.report.watch import Watch
from flower_sap.strategies import RunOptions, SemiAsync


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
    residuals = folder / "residuals"
    shutil.rmtree(residuals, ignore_errors=True)
    mods = [SapMod(residuals)] if contender.is_sized else []
    app = client_app(job.task, job.data, seed=job.seed, mods=mods)
    local = LocalGrid(app, len(job.fleet), workers=workers, seed=job.seed)
    grid = EmulatedGrid(local, job.fleet, seed=job.seed)
    try:
        watch = Watch(job, grid, progress)
        initial = initial_arrays(job.task, job.seed)
        setting = _setting(job, initial)
        strategy = contender.build(
            setting, RunOptions(job.seed, folder / "events.jsonl", (watch.note,), False)
        )
        config = contender.train_config(setting, job.task.batch_size)
        _start(strategy, job, grid, initial, config, watch, folder)
    finally:
        local.close()
        shutil.rmtree(residuals, ignore_errors=True)
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
    watch: Watch,
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
