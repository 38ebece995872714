"""What all ServerApps here do: train the embedded data as the run config says."""

from flwr.app import ConfigRecord, Context
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flower_sap.clients.task import initial_arrays, parking_task


def train_parking(strategy: Strategy, grid: Grid, context: Context) -> Result:
    """Run `strategy` on the car parks."""
    config = context.run_config
    return strategy.start(
        grid=grid,
        initial_arrays=initial_arrays(parking_task(), int(config["seed"])),
        num_rounds=int(config["num-server-rounds"]),
        train_config=ConfigRecord(
            {
                "learning-rate": float(config["learning-rate"]),
                "local-epochs": int(config["local-epochs"]),
                "batch-size": int(config["batch-size"]),
            }
        ),
    )
