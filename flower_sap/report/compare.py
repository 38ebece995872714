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

from flower_sap.data import (
    Examples,
    FederatedData,
    by_speed,
)
from flower_sap.emulation import Fleet
from flower_sap.emulation.fleet import mbit_per_s
from flower_sap.errors import SapError
from flower_sap.report.contenders import Contender
from flower_sap.report.job import Job, TrialResult
from flower_sap.report.problems import Problem, fleet_of
from flower_sap.report.trial import run_trial

_BY_SPEED = 5  # keys the generator of that partition


class TrialError(SapError):
    """A trial's process ended without a result."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All trials of a comparison."""

    problem: Problem
    jobs: tuple[Job, ...]
    contenders: tuple[Contender, ...]
    folder: Path

    def folder_of(self, job: Job, contender: Contender) -> Path:
        """Return where a trial's files go."""
        name = contender.name.translate(str.maketrans("+ /,", "----"))
        return self.folder / f"seed-{job.seed}" / name


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
    uplinks: str | None = None,
) -> Plan:
    """Return the trials of every contender on every seed.

    Parameters
    ----------
    chosen : Problem
        What is learned.
    fleet, num_nodes : str, int
        See `fleet_of`.
    seeds : sequence of int
        One job each.
    num_rounds : int or None
        Of the synchronous baseline; None: the problem's.
    contenders : tuple of Contender
        Who is compared.
    folder : Path
        For results; made if missing.
    speed_strength : float, optional
        How far classes follow device speed, 0 to 1.
    uplinks : str, optional
        ``"from:to"`` (Mbit/s), on which the fleet's uplinks are spread anew.

    Raises
    ------
    ValueError
        If the fleet, the number of nodes or the speed strength do not fit the data.
    """
    jobs = []
    for seed in seeds:
        its_fleet = fleet_of(fleet, num_nodes, seed)
        if uplinks is not None:
            its_fleet = its_fleet.with_uplinks(*_rates(uplinks))
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


def _rates(text: str) -> tuple[float, float]:
    try:
        slowest, fastest = map(float, text.split(":"))
    except ValueError as error:
        raise ValueError(
            f"uplinks must be from:to in Mbit/s, such as 0.2:5, got {text!r}"
        ) from error
    return mbit_per_s(slowest), mbit_per_s(fastest)


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
