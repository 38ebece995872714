"""ServerApp of FedAsync on the embedded data."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from flower_sap import RunOptions, fedasync
from strategies.parking import train_parking

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for the configured number of rounds."""
    options = RunOptions(seed=int(context.run_config["seed"]))
    train_parking(fedasync(FedAvg(), options=options), grid, context)
