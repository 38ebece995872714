"""A client's reply as a payload of the size that the server asked for.

What stays on the node between messages is one file, written before the reply: Flower
1.42 loses a large `context.state` without a word, and all of it at a restart. The state
holds the number of the last payload alone, by which an outdated file is known.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
)

from flower_sap._flower import num_message_bytes
from flower_sap.errors import PayloadError
from flower_sap.payload import entropy, feedback
from flower_sap.payload.deadzone import Floats
from flower_sap.payload.dense import Arrays, Manifest, decode
from flower_sap.payload.encoder import PCODEC_FORMAT, difference, encode
from flower_sap.payload.feedback import ResidualFile, Sent
from flower_sap.payload.layout import Layout, Treatment
from flower_sap.payload.wire_format import HAS_FEEDBACK, STYPE, Header
from flower_sap.records import config_of, records_of
from flower_sap.wire import (
    BASE_VERSION,
    DISPATCH_NUMBER,
    PAYLOAD_ACKED,
    PAYLOAD_BUDGET,
    PAYLOAD_ENTROPY,
    PAYLOAD_LOCAL_KEYS,
    PAYLOAD_PROTECT,
    PAYLOAD_RESIDUAL,
    PAYLOAD_SEED,
    PAYLOAD_SERIES,
    PAYLOAD_STATISTICS,
    REPORT_KEY,
)

PAYLOAD_KEY = "payload"
_STATE_KEY = "sap"
_NUMBER = "payload-number"
# What the envelope gains after the size is taken: the message id and time stamps when
# it is sent, and longer lengths around the payload.
_GROWTH = 192


@dataclass(frozen=True, slots=True)
class UploadOrder:
    """What a train message asks of its reply.

    Attributes
    ----------
    budget : int
        Most bytes of the whole reply message.
    base_version, number, acked, seed : int
        See `flower_sap.wire`.
    series : str
        See there.
    treatment : Treatment
        What is sent otherwise.
    """

    budget: int
    base_version: int
    number: int
    acked: int
    seed: int
    series: str
    treatment: Treatment

    @classmethod
    def of(cls, config: ConfigRecord) -> "UploadOrder | None":
        """Return the order in a message's config; None: plain arrays are wanted."""
        budget = config.get(PAYLOAD_BUDGET)
        if not isinstance(budget, int):
            return None
        return cls(
            budget,
            _whole(config, BASE_VERSION),
            _whole(config, DISPATCH_NUMBER),
            _whole(config, PAYLOAD_ACKED),
            _whole(config, PAYLOAD_SEED),
            _plain_name(str(config.get(PAYLOAD_SERIES, "run"))),
            Treatment(
                _patterns(config, PAYLOAD_PROTECT),
                _patterns(config, PAYLOAD_LOCAL_KEYS),
                str(config.get(PAYLOAD_STATISTICS, "sent")),
            ),
        )


def _whole(config: ConfigRecord, key: str) -> int:
    value = config.get(key, 0)
    return value if isinstance(value, int) and value >= 0 else 0


def _patterns(config: ConfigRecord, key: str) -> tuple[str, ...]:
    value = config.get(key, [])
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _plain_name(text: str) -> str:
    """Return a text that is part of a file's name and of no path."""
    return "".join(c for c in text if c.isalnum() or c in "-_")[:64] or "run"


def default_folder() -> Path:
    """Return where residuals are kept: $FLOWER_SAP_HOME, or the user's cache."""
    home = os.environ.get("FLOWER_SAP_HOME")
    if home:
        return Path(home) / "residuals"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "flower-sap" / "residuals"


def as_payload(
    reply: Message,
    received: ArrayRecord,
    context: Context,
    order: UploadOrder,
    folder: Path,
) -> None:
    """Replace the arrays of a reply by a payload within the order's budget.

    Parameters
    ----------
    reply : Message
        With the trained model in one `ArrayRecord`; changed in place.
    received : ArrayRecord
        The model that was trained from.
    context : Context
        Of the node; its state notes the payload's number.
    order : UploadOrder
        What the server asked for.
    folder : Path
        For the file that is kept.

    Raises
    ------
    PayloadError
        If the reply holds another model than was received, or one that is not finite,
        or the budget is too small for the reply without any model.
    """
    key, trained = _trained(reply)
    layout = Layout(Manifest.of(received), order.treatment)
    base = decode(received, layout.manifest)
    model = decode(trained, layout.manifest)
    file = ResidualFile(folder, series=order.series, node=_node_name(context))
    sent = _last_sent(file, layout, context)
    carried = feedback.carried_over(
        sent, layout, acked=order.acked, number=order.number
    )
    report = reply.content[REPORT_KEY]
    assert isinstance(report, ConfigRecord)
    report[PAYLOAD_RESIDUAL] = sent.number if sent is not None else 0
    report[PAYLOAD_ENTROPY] = PCODEC_FORMAT if entropy.is_available() else 0
    if carried is not None:
        carried = feedback.capped(carried, _norm(model, base, layout))
    reply.content[key] = _record(b"")
    room = order.budget - num_message_bytes(reply) - _GROWTH
    header = Header(
        layout.digest,
        order.base_version,
        order.number,
        flags=0 if carried is None else HAS_FEEDBACK,
    )
    payload = encode(
        model,
        base,
        layout,
        budget=room,
        header=header,
        seed=(order.seed, context.node_id, order.number),
        residual=carried,
    )
    is_exact = payload.relative_error < feedback.NEGLIGIBLE_ERROR
    error = None if is_exact else payload.error
    file.save(Sent(order.number, payload.data, error), layout)
    context.state[_STATE_KEY] = ConfigRecord({_NUMBER: order.number})
    reply.content[key] = _record(payload.data)


def _trained(reply: Message) -> tuple[str, ArrayRecord]:
    found = [
        (key, record)
        for key, record in reply.content.items()
        if isinstance(record, ArrayRecord)
    ]
    if len(found) != 1:
        raise PayloadError(f"{len(found)} ArrayRecords in the reply, expected 1")
    return found[0]


def _record(data: bytes) -> ArrayRecord:
    return ArrayRecord({PAYLOAD_KEY: Array("uint8", (len(data),), STYPE, data)})


def _node_name(context: Context) -> str:
    partition = context.node_config.get("partition-id")
    return f"node-{context.node_id}" if partition is None else f"partition-{partition}"


def _last_sent(file: ResidualFile, layout: Layout, context: Context) -> Sent | None:
    sent, noted = file.load(layout), context.state.get(_STATE_KEY)
    if sent is not None and isinstance(noted, ConfigRecord):
        number = noted.get(_NUMBER)
        if isinstance(number, int) and number > sent.number:
            return None  # the file of the last payload was not written, or is gone
    return sent


def _norm(model: Arrays, base: Arrays, layout: Layout) -> float:
    parts: list[Floats] = [
        difference(model, base, layout, places)
        for places in (layout.stream, layout.protected)
    ]
    return float(np.sqrt(sum(float(np.dot(part, part)) for part in parts)))


def received_model(message: Message) -> ArrayRecord | None:
    """Return the model in a train message, if there is exactly one."""
    records = records_of(message.content, ArrayRecord)
    # A record of its own: the app may put the trained arrays into the one it got.
    return ArrayRecord(dict(records[0])) if len(records) == 1 else None


def order_of(message: Message) -> UploadOrder | None:
    """Return what a train message asks of its reply."""
    return UploadOrder.of(config_of(message.content))
