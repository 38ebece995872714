"""Plan the trials of a comparison, run them side by side, and read the results.

Trials are independent: each runs in a process of its own (a fork, so that data is
shared), at most `workers` at a time, and leaves its result in its folder. The order in
which they finish changes nothing.
"""

import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flower_sap.clients.task import Task, digits_task, gtsrb_task, parking_task
from flower_sap.data import (
    Examples,
    FederatedData,
    by_speed,
    load_digits,
    load_gtsrb,
    load_parking,
)
from flower_sap.emulation import Fleet
from flower_sap.errors import SapError
from flower_sap.report.contenders import Contender
from flower_sap.report.trial import Job, TrialResult, run_trial

_BY_SPEED = 5  # keys the generator of that partition


class TrialError(SapError):
    """A trial's process ended without a result."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A data set and its task, with what is tuned for the synchronous baseline.

    Attributes
    ----------
    task : Task
        What is learned.
    load : callable
        Returns the data for (number of nodes, seed).
    local_epochs, num_rounds : int
        Of the synchronous baseline; `benchmarks/README.md` says what was tried.
    margin : float
        How far below (or, as a share of an error, above) its final metric the target
        is.
    """

    task: Task
    load: Callable[[int, int], FederatedData]
    local_epochs: int
    num_rounds: int
    margin: float

    def target(self, final: float) -> float:
        """Return the metric to reach."""
        if self.task.higher_is_better:
            return final - self.margin
        return final * (1 + self.margin)

    def reaches(self, metric: float, target: float) -> bool:
        """Return whether a metric is as good as the target."""
        better = self.task.higher_is_better
        return metric >= target if better else metric <= target


def problem(name: str, data_file: Path | None = None) -> Problem:
    """Return the problem of a name: ``parking``, ``gtsrb`` or ``digits``.

    Raises
    ------
    ValueError
        If there is none of this name.
    """
    match name:
        case "parking":
            return Problem(
                parking_task(), lambda n, s: load_parking(n, seed=s), 1, 40, 0.02
            )
        case "gtsrb":
            return Problem(
                gtsrb_task(),
                lambda n, s: load_gtsrb(n, seed=s, data_file=data_file),
                2,
                40,
                0.005,
            )
        case "digits":
            return Problem(
                digits_task(), lambda n, s: load_digits(n, seed=s), 1, 40, 0.005
            )
        case _:
            raise ValueError(f"no data set {name!r}: choose parking, gtsrb or digits")


def fleet_of(name: str, num_nodes: int, seed: int) -> Fleet:
    """Return the fleet of a name: ``mixed``, ``mild``, ``1:4``, or a TOML file.

    Raises
    ------
    ValueError
        If it is none of these, or the file has another number of nodes.
    """
    if name == "mixed":
        return Fleet.mixed(num_nodes, seed=seed)
    if name == "mild":
        return Fleet.mild(num_nodes, seed=seed)
    slow, _, fast = name.partition(":")
    if slow == "1" and fast.replace(".", "", 1).isdigit():
        return Fleet.ratio(num_nodes, float(fast), seed=seed)
    path = Path(name)
    if not path.is_file():
        raise ValueError(
            f"no fleet {name!r}: choose mixed, mild, a ratio like 1:4, or a TOML file"
        )
    fleet = Fleet.from_toml(path)
    if len(fleet) != num_nodes:
        raise ValueError(
            f"{path} has {len(fleet)} nodes, the comparison wants {num_nodes}: "
            f"pass --nodes {len(fleet)}"
        )
    return fleet


@dataclass(frozen=True, slots=True)
class Plan:
    """All trials of a comparison."""

    problem: Problem
    jobs: tuple[Job, ...]
    contenders: tuple[Contender, ...]
    folder: Path

    def folder_of(self, job: Job, contender: Contender) -> Path:
        """Return where a trial's files go."""
        return self.folder / f"seed-{job.seed}" / contender.name.replace("+", "-")


def run_plan(
    plan: Plan,
    *,
    workers: int,
    resume: bool = False,
    progress: Callable[[float], None] = lambda _: None,
) -> list[TrialResult]:
    """Run all trials, at most `workers` at a time, and return their results.

    Parameters
    ----------
    plan : Plan
        The trials.
    workers : int
        Processes side by side, >= 1; the results do not depend on it.
    resume : bool
        Take the results of the same job that an earlier run left in the folder. The
        strategies' code must be the same: nobody checks that.
    progress : callable
        Told the share of the work that is done.

    Raises
    ------
    TrialError
        If one of them ends without a result.
    """
    trials = [(job, who) for who in plan.contenders for job in plan.jobs]
    context = multiprocessing.get_context("fork")
    shares = context.Array("d", len(trials))
    waiting = [
        number
        for number, (job, who) in enumerate(trials)
        if not (resume and _has_result(plan.folder_of(job, who) / "trial.json", job))
    ]
    for number in set(range(len(trials))).difference(waiting):
        shares[number] = 1.0
    running: dict[int, BaseProcess] = {}
    while waiting or running:
        while waiting and len(running) < max(1, workers):
            number = waiting.pop(0)
            running[number] = context.Process(
                target=_run_one, args=(plan, *trials[number], shares, number)
            )
            running[number].start()
        time.sleep(0.05)
        for number in [n for n, process in running.items() if not process.is_alive()]:
            _check_ended(running.pop(number), *trials[number])
            shares[number] = 1.0
        progress(sum(shares[:]) / len(trials))
    return [
        TrialResult.load(plan.folder_of(job, who) / "trial.json") for job, who in trials
    ]


def _has_result(path: Path, job: Job) -> bool:
    try:
        return TrialResult.load(path).job == job.fingerprint()
    except (OSError, ValueError, KeyError, TypeError):  # none, cut short, or older
        return False


def _run_one(
    plan: Plan, job: Job, contender: Contender, shares: Any, number: int
) -> None:
    torch.set_num_threads(1)

    def note(share: float) -> None:
        shares[number] = share

    run_trial(job, contender, plan.folder_of(job, contender), progress=note)


def _check_ended(process: BaseProcess, job: Job, contender: Contender) -> None:
    process.join()
    if process.exitcode:
        raise TrialError(
            f"the trial of {contender.name} with seed {job.seed} ended with exit code "
            f"{process.exitcode}; its traceback is above"
        )


def make_plan(
    chosen: Problem,
    *,
    fleet: str,
    num_nodes: int,
    seeds: Sequence[int],
    num_rounds: int | None,
    contenders: tuple[Contender, ...],
    folder: Path,
    speed_strength: float | None = None,
) -> Plan:
    """Return the trials of every contender on every seed.

    Raises
    ------
    ValueError
        If the fleet, the number of nodes or the speed strength do not fit the data.
    """
    jobs = []
    for seed in seeds:
        its_fleet = fleet_of(fleet, num_nodes, seed)
        data = chosen.load(num_nodes, seed)
        if speed_strength is not None:
            data = follow_speed(data, its_fleet, speed_strength, seed)
        jobs.append(
            Job(
                chosen.task,
                data,
                its_fleet,
                seed,
                chosen.local_epochs,
                num_rounds or chosen.num_rounds,
            )
        )
    folder.mkdir(parents=True, exist_ok=True)
    return Plan(chosen, tuple(jobs), contenders, folder)


def follow_speed(
    data: FederatedData, fleet: Fleet, strength: float, seed: int
) -> FederatedData:
    """Return the same examples, dealt so that classes follow device speed.

    Raises
    ------
    ValueError
        If the data has no classes.
    """
    if data.test.y.dtype.kind != "i":
        raise ValueError(f"--by-speed needs classes, and {data.name} has none")
    whole = Examples.concatenate(data.train)
    parts = by_speed(
        whole.y,
        fleet.speeds.tolist(),
        rng=np.random.default_rng([seed, _BY_SPEED]),
        strength=strength,
        groups=whole.group,
    )
    return FederatedData.with_shared_test(
        f"{data.name} by speed", [whole.take(part) for part in parts], test=data.test
    )
