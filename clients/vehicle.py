"""ClientApp of a vehicle: trains on the car parks of its partition."""

from functools import lru_cache

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flower_sap import sap_mod
from flower_sap.clients.app import Learner
from flower_sap.clients.task import parking_task
from flower_sap.data import load_parking

app = ClientApp()


@lru_cache(maxsize=1)
def _learner(num_nodes: int, seed: int) -> Learner:
    return Learner(parking_task(), load_parking(num_nodes, seed=seed), seed)


def _learner_of(context: Context) -> Learner:
    num_nodes = int(context.node_config["num-partitions"])
    return _learner(num_nodes, int(context.run_config["seed"]))


@app.train(mods=[sap_mod])
def train(message: Message, context: Context) -> Message:
    """Train from the model received."""
    return _learner_of(context).train(message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the model received on the node's own later weeks."""
    return _learner_of(context).evaluate(message, context)
