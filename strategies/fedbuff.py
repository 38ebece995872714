"""ServerApp of FedBuff on the embedded data."""

from flwr.app import ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from flower_sap import RunOptions, fedbuff
from flower_sap.clients.task import initial_arrays, parking_task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for the configured number of rounds."""
    config = context.run_config
    seed = int(config["seed"])
    strategy = fedbuff(FedAvg(), options=RunOptions(seed=seed))
    strategy.start(
        grid=grid,
        initial_arrays=initial_arrays(parking_task(), seed),
        num_rounds=int(config["num-server-rounds"]),
        train_config=ConfigRecord(
            {
                "learning-rate": float(config["learning-rate"]),
                "batch-size": int(config["batch-size"]),
            }
        ),
    )
