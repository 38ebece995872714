"""ServerApp of SAP: ``flwr run .`` trains the embedded data with it."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from flower_sap import RunOptions, heter_train
from flower_sap.payload import budget_rule
from strategies.parking import train_parking

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for the configured number of rounds."""
    config = context.run_config
    rule = budget_rule(str(config["payload"])) if config["payload"] else None
    strategy = heter_train(
        FedAvg(), payload=rule, options=RunOptions(seed=int(config["seed"]))
    )
    train_parking(strategy, grid, context)
