"""`sap_mod`: what a client tells the server besides its model.

One line on any ClientApp::

    app = ClientApp(mods=[sap_mod])

The mod adds a `ConfigRecord` under ``"sap"`` to each train reply: the base version that
the message carried (``base-version``), the seconds that training took
(``compute-seconds``), and the examples that it processed (``samples-processed``) and
optimizer steps (``num-steps``) where the app reports them. The server then weights by
version and balances work without guessing. Strategies that do not know of the record,
Flower's own included, ignore it.
"""

import math
from collections.abc import Callable

from flwr.app import ConfigRecord, Context, Message, MetricRecord

from flower_sap.clock import wall_seconds
from flower_sap.records import config_of, records_of
from flower_sap.wire import (
    BASE_VERSION,
    COMPUTE_SECONDS,
    NUM_SAMPLES,
    NUM_STEPS,
    REPORT_KEY,
)


def sap_mod(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Add the base version and the work done to a train reply.

    Parameters
    ----------
    message : Message
        What the server sent; passed on unchanged.
    context : Context
        The node's context; passed on.
    call_next : callable
        The next mod, or the app.
    """
    if message.metadata.message_type.partition(".")[0] != "train":
        return call_next(message, context)
    config = config_of(message.content)
    started = wall_seconds()
    reply = call_next(message, context)
    # Flower passes on whatever an app returns.
    if not isinstance(reply, Message) or not reply.has_content():  # type: ignore[redundant-expr]
        return reply
    report = ConfigRecord({COMPUTE_SECONDS: wall_seconds() - started})
    if isinstance(config.get(BASE_VERSION), int):
        report[BASE_VERSION] = config[BASE_VERSION]
    for metrics in records_of(reply.content, MetricRecord):
        _add_work(report, metrics, config)
    reply.content[REPORT_KEY] = report
    return reply


def _add_work(
    report: ConfigRecord, metrics: MetricRecord, config: ConfigRecord
) -> None:
    num_examples, epochs = metrics.get("num-examples"), config.get("local-epochs", 1)
    if isinstance(num_examples, int) and isinstance(epochs, int):
        report[NUM_SAMPLES] = num_examples * epochs
    for name in (NUM_SAMPLES, NUM_STEPS):
        value = metrics.get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            report[name] = int(value)
