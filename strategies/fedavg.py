"""ServerApp of Flower's own FedAvg on the embedded data, to compare with."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from strategies.parking import train_parking

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for the configured number of rounds."""
    train_parking(FedAvg(), grid, context)
