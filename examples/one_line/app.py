"""FedAvg and SemiAsync(FedAvg) on the same emulated vehicles."""

import logging

from flwr.app import MetricRecord
from flwr.serverapp.strategy import FedAvg, Strategy

from flower_sap import EmulatedGrid, Fleet, LocalGrid, RunOptions, heter_train
from flower_sap.clients.app import client_app
from flower_sap.clients.task import evaluate, initial_arrays, parking_task
from flower_sap.data import load_parking

logging.getLogger("flwr").setLevel(logging.ERROR)
task, data = parking_task(), load_parking(10)


def run(strategy: Strategy, num_rounds: int) -> tuple[float, float]:
    """Train in virtual time; return the mean absolute error and the seconds taken."""
    grid = EmulatedGrid(LocalGrid(client_app(task, data, seed=0), 10), Fleet.mixed(10))
    result = strategy.start(
        grid=grid,
        initial_arrays=initial_arrays(task, seed=0),
        num_rounds=num_rounds,
        evaluate_fn=lambda _, arrays: MetricRecord(
            {"mae": float(evaluate(task, arrays, data.test).mean())}
        ),
    )
    last = max(result.evaluate_metrics_serverapp)
    error = result.evaluate_metrics_serverapp[last]["mae"]
    return float(error), grid.clock.now()  # type: ignore[arg-type]


for name, strategy, num_rounds in (
    ("FedAvg", FedAvg(fraction_evaluate=0.0), 20),
    (
        "SAP",
        heter_train(FedAvg(fraction_evaluate=0.0), options=RunOptions(events=None)),
        10,
    ),
):
    error, seconds = run(strategy, num_rounds)
    print(f"{name:7s} error {error:.3f} after {seconds:.0f} s")
