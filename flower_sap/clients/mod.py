"""`sap_mod`: what a client tells the server, and in how many bytes.

One line on any ClientApp::

    app = ClientApp(mods=[sap_mod])

The mod adds a `ConfigRecord` under ``"sap"`` to each train reply: the base version that
the message carried (``base-version``), the seconds that training took
(``compute-seconds``), and the examples that it processed (``samples-processed``) and
optimizer steps (``num-steps``) where the app reports them. The server then weights by
version and balances work without guessing. Where the server asks for a size
(``SemiAsync(payload=...)``), the trained arrays travel as one payload of at most that
many bytes, with error feedback. Strategies that do not know of the record, Flower's own
included, ignore it and get plain arrays.
"""

import math
from collections.abc import Callable
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, MetricRecord

from flower_sap.clients.upload import Exchange, default_folder, order_of
from flower_sap.clock import wall_seconds
from flower_sap.isolation import one_thread
from flower_sap.records import config_of, records_of
from flower_sap.wire import (
    BASE_VERSION,
    COMPUTE_SECONDS,
    NUM_SAMPLES,
    NUM_STEPS,
    REPORT_KEY,
)


class SapMod:
    """The mod with a folder of its own; `sap_mod` is the one with the default.

    Parameters
    ----------
    folder : Path, optional
        Where what payloads did not say is kept between messages. Default:
        ``$FLOWER_SAP_HOME/residuals``, else ``~/.cache/flower-sap/residuals``.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def __call__(
        self,
        message: Message,
        context: Context,
        call_next: Callable[[Message, Context], Message],
    ) -> Message:
        """Add the report to a train reply, and code its arrays if asked to.

        Parameters
        ----------
        message : Message
            What the server sent; passed on with plain arrays.
        context : Context
            The node's context; passed on.
        call_next : callable
            The next mod, or the app.

        Raises
        ------
        PayloadError
            If a payload was asked for and cannot be made of the reply.
        """
        if message.metadata.message_type.partition(".")[0] != "train":
            return call_next(message, context)
        config, order = config_of(message.content), order_of(message)
        exchange = None
        if order is not None:
            with one_thread():
                exchange = Exchange(
                    message, context, order, self._folder or default_folder()
                )
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
        if exchange is not None:
            with one_thread():
                exchange.answer(reply)
        return reply


sap_mod = SapMod()


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
