"""What goes out to a node: the whole model, or what it lacks of it.

With a downlink rule a node that kept the model of its last message is sent a payload:
how the current version differs from what it holds, within a budget of its own. The
server follows what each node holds, bit for bit, and measures the node's update from
that. What one payload does not say is part of the next difference, so no error builds
up. Whenever it is not certain what a node holds (first contact, a lost reply, a new
disk) the whole model goes out.

Source: EF21-P, Gruntkowska, Tyurin, Richtarik 2022, arXiv:2209.15218 (algorithm 1).
There all workers hold one model; here each has its own, since nodes come back after one
merge or after hundreds, and behind links of their own. That costs one model of memory a
node.
"""

from dataclasses import dataclass

from flwr.app import ArrayRecord

from flower_sap.isolation import one_thread
from flower_sap.payload import wire_format
from flower_sap.payload.decoder import check
from flower_sap.payload.dense import Arrays
from flower_sap.payload.encoder import encode
from flower_sap.payload.wire_format import DOWNLINK, Header
from flower_sap.strategies.parts import Parts
from flower_sap.strategies.sizing import Sizing
from flower_sap.strategies.state import NodeState, ServerState

_ORDERS_NBYTES = 640  # of what a message's config says of the reply
_REFRESH = 1000  # messages after which a node's arithmetic is no longer trusted


@dataclass(frozen=True, slots=True, eq=False)
class Outgoing:
    """The model in one message.

    Attributes
    ----------
    base : Arrays
        What the node will train from.
    record : ArrayRecord or None
        A payload that makes it of what the node holds; None: the whole model.
    """

    base: Arrays
    record: ArrayRecord | None


class Broadcast:
    """Chooses what each node is sent.

    Parameters
    ----------
    state : ServerState
        The current model, and what the nodes hold.
    parts : Parts
        The downlink rule.
    sizing : Sizing
        The layout of payloads, and what is known of links.
    """

    def __init__(self, state: ServerState, parts: Parts, sizing: Sizing) -> None:
        self._state = state
        self._parts = parts
        self._sizing = sizing

    @property
    def is_sized(self) -> bool:
        """Return whether nodes are to keep what they receive."""
        return self._parts.downlink is not None and self._parts.payload is not None

    def outgoing(
        self,
        node: NodeState,
        number: int,
        *,
        steps: int | None,
        available: float,
        whole_nbytes: int,
    ) -> Outgoing:
        """Return the model for a node's next message.

        Parameters
        ----------
        node : NodeState
            What is known of it; from now on it is not certain what it holds.
        number : int
            Of the message.
        steps : int or None
            Local steps that it is asked for.
        available : float
            Until its update should be back (s).
        whole_nbytes : int
            Of the message's content with the whole model.
        """
        held, node.held = node.held, None
        whole = Outgoing(self._state.arrays, None)
        if held is None or not self.is_sized or number % _REFRESH == 0:
            return whole
        budget = self._sizing.downlink_budget(node, steps, available)
        layout = self._sizing.layout
        if budget is None or budget >= layout.manifest.nbytes:
            return whole
        beside = whole_nbytes - layout.manifest.nbytes + _ORDERS_NBYTES
        header = Header(layout.digest, held.number, number, flags=DOWNLINK)
        with one_thread():
            payload = encode(
                self._state.arrays,
                held.arrays,
                layout,
                budget=max(budget - beside, wire_format.HEADER_NBYTES),
                header=header,
                seed=(self._parts.seed, node.node_id, number, DOWNLINK),
            )
            base = check(payload.data, layout).arrays(held.arrays)
        return Outgoing(base, wire_format.payload_record(payload.data))
