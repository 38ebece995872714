"""The grid that an inner strategy sees: it knows node ids and sends nothing."""

from collections.abc import Iterable, Sequence
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from flower_sap.errors import InnerStrategyError


class StandInGrid(Grid):
    """A grid that knows node ids and sends nothing.

    Parameters
    ----------
    node_ids : sequence of int
        The nodes.
    at_least : int
        Number of ids to show; missing ones are made up.
    run : Run, optional
        The real grid's run.
    """

    def __init__(
        self, node_ids: Sequence[int], at_least: int = 0, run: Any = None
    ) -> None:
        # `sample_nodes` of Flower 1.42 sleeps for ever when there are fewer.
        missing = max(0, at_least - len(node_ids))
        self._node_ids = [*node_ids, *(-1 - number for number in range(missing))]
        self._run = run

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids."""
        return list(self._node_ids)

    @property
    def run(self) -> Any:
        """Return the real grid's run."""
        return self._run

    def set_run(self, run: Any) -> None:
        """Refuse: only the real grid has a run."""
        raise self._refusal("set_run")

    def create_message(self, *_: Any, **__: Any) -> Message:
        """Refuse: deprecated by Flower."""
        raise self._refusal("create_message")

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Refuse: the engine sends."""
        raise self._refusal("push_messages")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Refuse: the engine receives."""
        raise self._refusal("pull_messages")

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Refuse: the engine does both, and never blocks."""
        raise self._refusal("send_and_receive")

    def _refusal(self, name: str) -> InnerStrategyError:
        return InnerStrategyError(
            f"the inner strategy called grid.{name} while configuring a round; "
            "SemiAsync sends and receives itself, so such a strategy cannot be wrapped"
        )
