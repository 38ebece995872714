"""Who is still to evaluate: the order that does not stop training.

Evaluate messages of a round wait until their node is idle and go before its next
train message. The round's metrics are made when the last of them has ended. A node
that still has one waiting from an earlier round is not asked again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from flwr.app import Message, RecordDict


@dataclass(slots=True)
class Request:
    """One evaluate message that waits for its node."""

    round: int
    version: int
    node_id: int
    message_type: str
    content: RecordDict


@dataclass(slots=True)
class _Open:
    version: int
    num_out: int = 0
    replies: list[Message] = field(default_factory=list)


@dataclass(slots=True)
class Finished:
    """A round whose evaluate messages have all ended."""

    round: int
    version: int
    replies: list[Message]


class EvaluationQueue:
    """Who is still to be asked, and which rounds are still open."""

    def __init__(self) -> None:
        self._waiting: dict[int, Request] = {}
        self._rounds: dict[int, _Open] = {}
        self._round_of: dict[str, int] = {}

    @property
    def is_empty(self) -> bool:
        """Return whether every round is finished."""
        return not self._rounds

    def add(self, requests: Iterable[Request]) -> None:
        """Queue a round's messages."""
        for request in requests:
            if request.node_id not in self._waiting:
                self._waiting[request.node_id] = request
                opened = self._rounds.setdefault(request.round, _Open(request.version))
                opened.num_out += 1

    def waits_for(self, node_id: int) -> bool:
        """Return whether a message waits for this node."""
        return node_id in self._waiting

    def take(self, node_id: int) -> Request:
        """Return the message that waits for this node, to be sent now."""
        return self._waiting.pop(node_id)

    def sent(self, request: Request, message_id: str) -> None:
        """Remember which round a sent message belongs to."""
        self._round_of[message_id] = request.round

    def forget_nodes(self, gone: set[int]) -> list[Finished]:
        """Give up on messages that wait for nodes which are gone."""
        in_vain = [node for node in self._waiting if node in gone]
        rounds = [self._waiting.pop(node).round for node in in_vain]
        return [done for number in rounds for done in self._close_one(number, None)]

    def give_up(self, request: Request) -> list[Finished]:
        """Note a message that could not be sent."""
        return self._close_one(request.round, None)

    def ended(self, message_id: str, reply: Message | None) -> list[Finished]:
        """Note the end of a sent message; return the round if it was its last."""
        return self._close_one(self._round_of.pop(message_id), reply)

    def _close_one(self, number: int, reply: Message | None) -> list[Finished]:
        opened = self._rounds[number]
        opened.num_out -= 1
        if reply is not None:
            opened.replies.append(reply)
        if opened.num_out:
            return []
        del self._rounds[number]
        return [Finished(number, opened.version, opened.replies)]
