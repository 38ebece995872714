"""The picture of a comparison: metric against virtual time, one line per strategy."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flower_sap.report.job import TrialResult


def draw_figure(
    results: Sequence[TrialResult],
    *,
    metric: str,
    target: float,
    title: str,
    path: Path,
) -> bool:
    """Write a PNG with the median over seeds and their range.

    Parameters
    ----------
    results : sequence of TrialResult
        All trials.
    metric, title : str
        Labels.
    target : float
        Drawn as a line.
    path : Path
        Of the PNG.

    Returns
    -------
    bool
        False if matplotlib is not installed (extra ``plots``), and nothing is drawn.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(result.name for result in results):
        mine = [result for result in results if result.name == name]
        times = _grid([point.time for result in mine for point in result.points])
        curves = np.array([_sampled(result, times) for result in mine])
        (line,) = axes.plot(times, np.median(curves, axis=0), label=name, linewidth=1.5)
        axes.fill_between(
            times,
            curves.min(axis=0),
            curves.max(axis=0),
            alpha=0.15,
            color=line.get_color(),
            linewidth=0,
        )
    axes.axhline(target, color="0.4", linestyle=":", label="target")
    axes.set_xscale("log")
    axes.set_xlabel("virtual time (s)")
    axes.set_ylabel(metric)
    axes.set_title(title, fontsize=10)
    _zoom(axes, results, target)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    return True


def _grid(times: list[float]) -> NDArray[np.float64]:
    positive = [time for time in times if time > 0]
    return np.geomspace(min(positive), max(positive), 400)


def _sampled(result: TrialResult, times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the metric in force at each time: the last one evaluated before."""
    at = np.array([point.time for point in result.points])
    metric = np.array([point.metric for point in result.points])
    return metric[np.maximum(0, np.searchsorted(at, times, side="right") - 1)]


def _zoom(axes, results: Sequence[TrialResult], target: float) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """Leave the steep start out where it would flatten everything else."""
    metrics = np.array([p.metric for result in results for p in result.points])
    if metrics.min() < target < metrics.max() and metrics.max() > 3 * target:
        axes.set_ylim(metrics.min() * 0.9, target * 3)
