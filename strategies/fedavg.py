"""ServerApp of Flower's own FedAvg on the embedded data, to compare with."""

from flwr.app import ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from flower_sap.clients.task import initial_arrays, parking_task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for the configured number of rounds."""
    config = context.run_config
    FedAvg().start(
        grid=grid,
        initial_arrays=initial_arrays(parking_task(), int(config["seed"])),
        num_rounds=int(config["num-server-rounds"]),
        train_config=ConfigRecord(
            {
                "learning-rate": float(config["learning-rate"]),
                "local-epochs": int(config["local-epochs"]),
            }
        ),
    )
