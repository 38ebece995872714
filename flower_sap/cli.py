"""The `flower-sap` command."""

import json
import logging
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from flower_sap.report.compare import Plan, make_plan, run_plan
from flower_sap.report.contenders import choose
from flower_sap.report.figure import draw_figure
from flower_sap.report.job import TrialResult
from flower_sap.report.problems import problem
from flower_sap.report.table import draw, final_point, make_rows, to_plain

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Semi-asynchronous federated learning for Flower.",
)


@app.callback()
def main() -> None:
    """Semi-asynchronous federated learning for Flower."""


class DataName(StrEnum):
    """The data sets that are known by name."""

    parking = "parking"
    gtsrb = "gtsrb"
    gtsrb_wide = "gtsrb-wide"
    digits = "digits"


@app.command()
def compare(
    data: Annotated[
        DataName, typer.Option(help="What is learned: parking is embedded.")
    ] = DataName.parking,
    data_file: Annotated[
        Path | None,
        typer.Option(help="GTSRB as an .npz file, instead of torchvision's."),
    ] = None,
    fleet: Annotated[
        str,
        typer.Option(help="mixed, mild, a speed ratio such as 1:4, or a TOML file."),
    ] = "mixed",
    nodes: Annotated[int, typer.Option(min=2, help="Vehicles and edge boxes.")] = 20,
    uplinks: Annotated[
        str | None,
        typer.Option(help="Spread the uplinks from:to in Mbit/s, such as 0.2:5."),
    ] = None,
    payload: Annotated[
        list[str] | None,
        typer.Option(
            help="Compare SAP also with sized messages: adaptive, or shares of the "
            "model such as 1/32 (uploads) or 1/64,1/16 (both); may be repeated."
        ),
    ] = None,
    by_speed: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Let the data follow device speed: 0 not, 1 fully."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Repeat with seeds 0, 1, ...")] = 3,
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="Compare only this one with FedAvg; may be repeated."),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Synchronous rounds of FedAvg."),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="Processes side by side; same results.")
    ] = 2,
    out: Annotated[
        Path, typer.Option(help="Folder for table, figure and event logs.")
    ] = Path("compare"),
    resume: Annotated[
        bool, typer.Option(help="Go on: keep the finished trials in the folder.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of the table.")
    ] = False,
) -> None:
    """Train with FedAvg, FedAsync, FedBuff, M-replies and SAP, and compare.

    Same model, data, fleet and seeds for all, in virtual time; one table, a figure and
    the event logs.
    """
    # Flower logs every round; what matters of it is in the table and the event logs.
    logging.getLogger("flwr").setLevel(logging.ERROR)
    try:
        plan = make_plan(
            problem(data.value, data_file),
            fleet=fleet,
            num_nodes=nodes,
            seeds=range(seeds),
            num_rounds=rounds,
            contenders=choose(strategy or [], payload or []),
            folder=out,
            speed_strength=by_speed,
            uplinks=uplinks,
        )
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    results = _run(plan, workers, resume=resume)
    _report(plan, results, title=_title(data.value, fleet, plan), as_json=as_json)


def _run(plan: Plan, workers: int, *, resume: bool) -> list[TrialResult]:
    count = len(plan.jobs) * len(plan.contenders)
    with Progress(
        TextColumn(f"{count} trials"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        transient=True,
    ) as progress:
        task = progress.add_task("", total=1.0)
        return run_plan(
            plan,
            workers=workers,
            resume=resume,
            progress=lambda share: progress.update(task, completed=share),
        )


def _title(data: str, fleet: str, plan: Plan) -> str:
    job = plan.jobs[0]
    return (
        f"{data} on {len(job.fleet)} nodes, fleet {fleet}, {len(plan.jobs)} seeds; "
        f"FedAvg {job.num_rounds} rounds of {job.local_epochs} epochs, "
        f"others at most {job.more_samples:g} times its samples"
    )


def _report(
    plan: Plan, results: list[TrialResult], *, title: str, as_json: bool
) -> None:
    chosen = plan.problem
    rows = make_rows(chosen, results)
    targets = [
        chosen.target(final_point(result.points).metric)
        for result in results[: len(plan.jobs)]
    ]
    target = sorted(targets)[len(targets) // 2]
    plain = {"title": title, "target": target, "rows": to_plain(rows)}
    (plan.folder / "compare.json").write_text(json.dumps(plain, indent=1))
    figure = plan.folder / "compare.png"
    has_figure = draw_figure(
        results, metric=chosen.task.metric, target=target, title=title, path=figure
    )
    if as_json:
        typer.echo(json.dumps(plain, indent=1))
        return
    console = Console(width=None if sys.stdout.isatty() else 190)
    console.print(draw(rows, chosen.task.metric, title))
    baselines = [job.data.evaluation.of(job.data.baseline.score) for job in plan.jobs]
    console.print(
        f"Target: FedAvg's final {chosen.task.metric} with a margin; median "
        f"{target:.4f}. Reference ({plan.jobs[0].data.baseline.name}): "
        f"{sorted(baselines)[len(baselines) // 2]:.4f}. Medians (smallest-largest) "
        "over seeds; 'of bound': samples processed over what all devices could have "
        "processed in that time."
    )
    shown = f"{figure}, " if has_figure else "(install matplotlib for the figure) "
    console.print(f"Written: {shown}{plan.folder / 'compare.json'} and the event logs.")


if __name__ == "__main__":
    app()
