"""From trials to the one table, its JSON, and the sentence below it.

Time to target is that of the first evaluation that reaches the target and is confirmed
by the next one, so that a lucky spike does not count. The final metric is the mean of
the last three evaluations. Medians and spreads (smallest to largest) are over seeds;
ratios are taken seed by seed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np
from rich.table import Table

from flower_sap.report.job import Point, TrialResult
from flower_sap.report.problems import Problem

_LAST = 3  # evaluations that the final metric is the mean of


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, smallest and largest over seeds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of some values."""
        return cls(float(np.median(values)), min(values), max(values))

    def show(self, number: Callable[[float], str]) -> str:
        """Return ``median (low-high)``, or the median alone where all agree."""
        if math.isinf(self.median):
            return "not reached"
        middle = number(self.median)
        if number(self.low) == number(self.high):
            return middle
        high = "never" if math.isinf(self.high) else number(self.high)
        return f"{middle} ({number(self.low)}-{high})"


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy over all seeds.

    Attributes
    ----------
    seconds_to_target : Spread
        Virtual time (s); inf where a seed never reached it.
    speed_up : Spread
        The baseline's time over this one's; 0 where never.
    final : Spread
        Final metric.
    tiers : tuple of Spread
        Final metric of each speed tier, slowest first.
    worst_tier : float
        Largest loss of a tier against its own figure under the baseline, median over
        seeds; negative is a gain.
    """

    name: str
    seconds_to_target: Spread
    speed_up: Spread
    final: Spread
    tiers: tuple[Spread, ...]
    worst_tier: float
    merges: Spread
    mean_staleness: Spread
    max_staleness: int
    mbytes_up: Spread
    mbytes_down: Spread
    idle: Spread
    utilization: Spread
    lost: Spread
    kbytes_per_update: Spread
    relative_error: Spread


def final_point(points: Sequence[Point]) -> Point:
    """Return the mean of the last three evaluations."""
    last = points[-_LAST:]
    return Point(
        last[-1].time,
        last[-1].version,
        float(np.mean([point.metric for point in last])),
        tuple(np.mean([point.tiers for point in last], axis=0).tolist()),
    )


def seconds_to_target(
    problem: Problem, points: Sequence[Point], target: float
) -> float:
    """Return when the target is reached, twice in a row (s); inf if it never is."""
    return next(
        (
            first.time
            for first, second in pairwise(points)
            if problem.reaches(first.metric, target)
            and problem.reaches(second.metric, target)
        ),
        math.inf,
    )


def make_rows(problem: Problem, results: Sequence[TrialResult]) -> list[Row]:
    """Return one row per strategy, in the order of the results.

    The first strategy is the baseline: its final metric sets each seed's target.
    """
    baseline = {r.seed: r for r in results if r.name == results[0].name}
    return [
        _row(problem, [r for r in results if r.name == name], baseline)
        for name in dict.fromkeys(result.name for result in results)
    ]


def _row(
    problem: Problem, mine: list[TrialResult], baseline: dict[int, TrialResult]
) -> Row:
    finals = [final_point(result.points) for result in mine]
    theirs = [final_point(baseline[result.seed].points) for result in mine]
    targets = [problem.target(final.metric) for final in theirs]
    times, ratios = [], []
    for result, target in zip(mine, targets, strict=True):
        time = seconds_to_target(problem, result.points, target)
        reference = seconds_to_target(problem, baseline[result.seed].points, target)
        times.append(time)
        ratios.append(reference / time if time > 0 else 1.0)
    sign = 1.0 if problem.task.higher_is_better else -1.0
    losses = [
        max(sign * (b - a) for a, b in zip(final.tiers, other.tiers, strict=True))
        for final, other in zip(finals, theirs, strict=True)
    ]
    return Row(
        name=mine[0].name,
        seconds_to_target=Spread.of(times),
        speed_up=Spread.of(ratios),
        final=Spread.of([final.metric for final in finals]),
        tiers=tuple(
            Spread.of([final.tiers[tier] for final in finals])
            for tier in range(len(finals[0].tiers))
        ),
        worst_tier=float(np.median(losses)),
        merges=Spread.of([r.num_merges for r in mine]),
        mean_staleness=Spread.of([r.mean_staleness for r in mine]),
        max_staleness=max(r.max_staleness for r in mine),
        mbytes_up=Spread.of([r.bytes_up / 1e6 for r in mine]),
        mbytes_down=Spread.of([r.bytes_down / 1e6 for r in mine]),
        idle=Spread.of([r.idle for r in mine]),
        utilization=Spread.of([r.utilization for r in mine]),
        lost=Spread.of([r.num_lost for r in mine]),
        kbytes_per_update=Spread.of([r.bytes_up / 1e3 / r.num_updates for r in mine]),
        relative_error=Spread.of([r.relative_error for r in mine]),
    )


def draw(rows: Sequence[Row], metric: str, title: str) -> Table:
    """Return the table for a terminal."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading in (
        "time to target",
        "speed-up",
        f"final {metric}",
        "tiers slow/mid/fast",
        "merges",
        "staleness mean/max",
        "MB up",
        "MB down",
        "idle",
        "of bound",
    ):
        table.add_column(heading, justify="right")
    # Without sized messages these two would say nothing, and crowd the others.
    is_sized = any(row.relative_error.high > 0 for row in rows)
    if is_sized:
        table.add_column("kB/update", justify="right")
        table.add_column("rel. error", justify="right")
    for row in rows:
        table.add_row(*_cells(row), *(_payload_cells(row) if is_sized else ()))
    return table


def _payload_cells(row: Row) -> list[str]:
    error = row.relative_error.median
    return [f"{row.kbytes_per_update.median:.0f}", f"{error:.2f}" if error else "-"]


def _cells(row: Row) -> list[str]:
    return [
        row.name,
        row.seconds_to_target.show(lambda s: f"{s:.0f} s"),
        row.speed_up.show(lambda x: f"{x:.1f}x") if row.speed_up.median else "-",
        row.final.show(lambda m: f"{m:.4f}"),
        "/".join(f"{tier.median:.3f}" for tier in row.tiers),
        f"{row.merges.median:.0f}",
        f"{row.mean_staleness.median:.1f}/{row.max_staleness}",
        f"{row.mbytes_up.median:.1f}",
        f"{row.mbytes_down.median:.1f}",
        f"{row.idle.median:.0%}",
        f"{row.utilization.median:.0%}",
    ]


def to_plain(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Return the rows as JSON can hold them; a time never reached is null."""
    plain: list[dict[str, object]] = []
    for row in rows:
        fields = asdict(row)
        spread = fields["seconds_to_target"]
        fields["seconds_to_target"] = {
            name: None if math.isinf(value) else value for name, value in spread.items()
        }
        plain.append(fields)
    return plain
