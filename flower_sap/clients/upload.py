"""A client's reply as a payload of the size that the server asked for.

What stays on the node between messages are files, written before the reply. The state
of Flower's context holds the number of the last payload alone, by which an outdated
file is known.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from flower_sap._flower import num_message_bytes
from flower_sap.errors import PayloadError
from flower_sap.payload import entropy, feedback
from flower_sap.payload.decoder import check
from flower_sap.payload.dense import Arrays, ArraySpec, Manifest, decode
from flower_sap.payload.dense import encode as encode_plain
from flower_sap.payload.encoder import PCODEC_FORMAT, Encoded, encode
from flower_sap.payload.feedback import Sent
from flower_sap.payload.kept import KeptFile
from flower_sap.payload.layout import Layout, Treatment
from flower_sap.payload.wire_format import (
    HAS_FEEDBACK,
    STYPE,
    Header,
    payload_record,
)
from flower_sap.records import config_of
from flower_sap.wire import (
    BASE_VERSION,
    DISPATCH_NUMBER,
    PAYLOAD_ACKED,
    PAYLOAD_BUDGET,
    PAYLOAD_ENTROPY,
    PAYLOAD_HOLD,
    PAYLOAD_HOLDS,
    PAYLOAD_LOCAL_KEYS,
    PAYLOAD_PROTECT,
    PAYLOAD_RESIDUAL,
    PAYLOAD_SEED,
    PAYLOAD_SERIES,
    PAYLOAD_STATISTICS,
    REPORT_KEY,
)

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
    holds : bool
        Whether to keep the model received, for a later message to build on.
    """

    budget: int
    base_version: int
    number: int
    acked: int
    seed: int
    series: str
    treatment: Treatment
    holds: bool = False

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
            config.get(PAYLOAD_HOLD) is True,
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


class Exchange:
    """One message and its reply, as far as their arrays travel as payloads.

    Parameters
    ----------
    message : Message
        A train message; its payload, if it carries one, becomes plain arrays.
    context : Context
        Of the node; its state notes the payload's number.
    order : UploadOrder
        What the server asked for.
    folder : Path
        For the files that are kept.

    Raises
    ------
    PayloadError
        If the message's payload is damaged, or builds on a model that this node does
        not have (any more).
    """

    def __init__(
        self, message: Message, context: Context, order: UploadOrder, folder: Path
    ) -> None:
        self._context = context
        self._order = order
        name = _node_name(context)
        self._sent_file = KeptFile(
            folder, node=name, purpose="sent", series=order.series
        )
        self._model_file = KeptFile(
            folder, node=name, purpose="model", series=order.series
        )
        key, record = _only_arrays(message.content)
        array = next(iter(record.values()), None)
        if len(record) == 1 and array is not None and array.stype == STYPE:
            record = self._rebuilt(array.data)
            message.content[key] = record
        # A record of its own: the app may put the trained arrays into the one it got.
        self._received = ArrayRecord(dict(record))
        self._layout = Layout(Manifest.of(self._received), order.treatment)
        self._base = decode(self._received, self._layout.manifest)

    def _rebuilt(self, data: bytes) -> ArrayRecord:
        """Return the model that a payload makes of the one kept here."""
        kept = load_model(self._model_file)
        if kept is None:
            raise PayloadError(
                "the message builds on a model that this node does not have: a new "
                "disk or a new run; the whole model has to be sent again"
            )
        held, number, manifest = kept
        layout = Layout(manifest, self._order.treatment)
        update = check(data, layout, base_version=number, number=self._order.number)
        return encode_plain(update.arrays(held), manifest)

    def answer(self, reply: Message) -> None:
        """Replace the arrays of a reply by a payload within the order's budget.

        Parameters
        ----------
        reply : Message
            With the trained model in one `ArrayRecord`; changed in place.

        Raises
        ------
        PayloadError
            If the reply holds another model than was received, or one that is not
            finite, or the budget is too small for the reply without any model.
        """
        order, layout = self._order, self._layout
        key, trained = _only_arrays(reply.content)
        model = decode(trained, layout.manifest)
        sent = self._last_sent()
        carried = feedback.carried_over(
            sent, layout, acked=order.acked, number=order.number
        )
        self._report(reply, sent)
        reply.content[key] = payload_record(b"")
        payload = encode(
            model,
            self._base,
            layout,
            budget=order.budget - num_message_bytes(reply) - _GROWTH,
            header=Header(
                layout.digest,
                order.base_version,
                order.number,
                flags=0 if carried is None else HAS_FEEDBACK,
            ),
            seed=(order.seed, self._context.node_id, order.number),
            residual=carried,
        )
        self._keep(payload)
        reply.content[key] = payload_record(payload.data)

    def _report(self, reply: Message, sent: Sent | None) -> None:
        report = reply.content[REPORT_KEY]
        assert isinstance(report, ConfigRecord)
        report[PAYLOAD_RESIDUAL] = sent.number if sent is not None else 0
        report[PAYLOAD_ENTROPY] = PCODEC_FORMAT if entropy.is_available() else 0
        if self._order.holds:
            report[PAYLOAD_HOLDS] = self._order.number

    def _keep(self, payload: Encoded) -> None:
        """Write what the next message will build on, before the reply is sent."""
        number, layout = self._order.number, self._layout
        is_exact = payload.relative_error < feedback.NEGLIGIBLE_ERROR
        error = None if is_exact else payload.error
        feedback.save_sent(self._sent_file, Sent(number, payload.data, error), layout)
        if self._order.holds:
            save_model(self._model_file, self._base, number, layout.manifest)
        self._context.state[_STATE_KEY] = ConfigRecord({_NUMBER: number})

    def _last_sent(self) -> Sent | None:
        sent = feedback.load_sent(self._sent_file, self._layout)
        noted = self._context.state.get(_STATE_KEY)
        if sent is not None and isinstance(noted, ConfigRecord):
            number = noted.get(_NUMBER)
            if isinstance(number, int) and number > sent.number:
                return None  # the last payload's file was not written, or is gone
        return sent


def _only_arrays(content: RecordDict) -> tuple[str, ArrayRecord]:
    found = [
        (key, record)
        for key, record in content.items()
        if isinstance(record, ArrayRecord)
    ]
    if len(found) != 1:
        raise PayloadError(f"{len(found)} ArrayRecords in a message, expected 1")
    return found[0]


def _node_name(context: Context) -> str:
    partition = context.node_config.get("partition-id")
    return f"node-{context.node_id}" if partition is None else f"partition-{partition}"


def order_of(message: Message) -> UploadOrder | None:
    """Return what a train message asks of its reply."""
    return UploadOrder.of(config_of(message.content))


# safetensors sorts by name, and the order of a model's arrays is part of what it is.
def save_model(file: KeptFile, arrays: Arrays, number: int, manifest: Manifest) -> None:
    """Keep the model that message `number` carried."""
    named = zip(manifest.names, arrays, strict=True)
    file.save(
        {f"{i:06d} {name}": a for i, (name, a) in enumerate(named)},
        {"number": str(number)},
    )


def load_model(file: KeptFile) -> tuple[Arrays, int, Manifest] | None:
    """Return a kept model, the number of its message and its manifest, or None."""
    kept = file.load()
    if kept is None or not kept[1].get("number", "").isdigit():
        return None
    arrays = dict(sorted(kept[0].items()))
    manifest = Manifest(
        tuple(ArraySpec(key[7:], a.shape, a.dtype) for key, a in arrays.items())
    )
    return list(arrays.values()), int(kept[1]["number"]), manifest
