"""Federated evaluation: its messages, and the metrics that come back.

Evaluate messages of a round wait in the `EvaluationQueue` until their node is idle, and
go before its next train message.
"""

from collections.abc import Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from flower_sap._flower import num_content_bytes
from flower_sap.clock import Clock
from flower_sap.strategies.evaluation_queue import EvaluationQueue, Finished, Request
from flower_sap.strategies.inner import InnerStrategy
from flower_sap.strategies.mailbox import Mailbox, batches
from flower_sap.strategies.parts import Report
from flower_sap.strategies.replies import without_arrays
from flower_sap.strategies.state import Asked, ServerState, Trip
from flower_sap.strategies.updates import read_evaluation


class Evaluation:
    """The federated evaluations of one run.

    Parameters
    ----------
    state : ServerState
        Knows who is idle.
    inner : InnerStrategy
        Says who evaluates, and averages the metrics.
    mailbox : Mailbox
        Carries the messages.
    clock : Clock
        The time.
    config : ConfigRecord
        Sent with each message.
    report : Report
        Told of each round's metrics.
    """

    def __init__(
        self,
        state: ServerState,
        inner: InnerStrategy,
        *,
        mailbox: Mailbox,
        clock: Clock,
        config: ConfigRecord,
        report: Report,
    ) -> None:
        self._state = state
        self._inner = inner
        self._mailbox = mailbox
        self._clock = clock
        self._config = config
        self._report = report
        self._queue = EvaluationQueue()

    @property
    def is_empty(self) -> bool:
        """Return whether every evaluation has ended."""
        return self._queue.is_empty

    def occupies(self, group: int) -> bool:
        """Return whether a node of this group is evaluating, or about to."""
        return not self._queue.is_empty and any(
            self._queue.waits_for(node.node_id)
            or (node.is_busy and node.has_just_evaluated)
            for node in self._state.nodes.values()
            if node.group == group
        )

    # --- sending ----------------------------------------------------------------

    def ask(self, released: ArrayRecord, node_ids: list[int]) -> None:
        """Queue the messages that evaluate the round which has just ended."""
        state = self._state
        requests = self._inner.evaluate_messages(
            state.round, released, self._config, node_ids
        )
        self._queue.add(
            Request(state.round, state.version, node_id, message_type, content)
            for node_id, message_type, content in requests
        )

    def send(self, *, comes_first: bool) -> None:
        """Send what waits for idle nodes.

        Parameters
        ----------
        comes_first : bool
            Ask also those that have just evaluated. Where rounds end faster than
            evaluations, a node that evaluated whenever it is asked would never train
            again.
        """
        if self._queue.is_empty:
            return
        state = self._state
        asked = [
            n
            for n in state.idle
            if self._queue.waits_for(n)
            and (comes_first or not state.nodes[n].has_just_evaluated)
        ]
        taken = set(asked)
        state.idle = [n for n in state.idle if n not in taken]
        for batch in batches(asked):
            self._push([self._queue.take(node_id) for node_id in batch])

    def _push(self, requests: list[Request]) -> None:
        messages = [
            Message(
                self._inner.fresh_content(request.content, {}),
                dst_node_id=request.node_id,
                message_type=request.message_type,
            )
            for request in requests
        ]
        nbytes = num_content_bytes(requests[0].content)
        asked = [Asked(nbytes=nbytes)] * len(messages)
        sent = self._mailbox.push(messages, "evaluate", asked)
        for request, message_id in zip(requests, sent, strict=True):
            if message_id:
                self._queue.sent(request, message_id)
            else:
                self._close(self._queue.give_up(request))

    # --- receiving --------------------------------------------------------------

    def take(self, trip: Trip, reply: Message) -> None:
        """Take in the reply to an evaluate message."""
        metrics = self._mailbox.read(trip, reply, self._read)
        if metrics is None:
            self.lose(trip)
            return
        num_examples: Any = metrics[self._inner.weighted_by]
        self._mailbox.accept(trip, reply, float(num_examples))
        slim = without_arrays(reply, metrics)
        self._close(self._queue.ended(trip.message_id, slim))

    def _read(self, content: RecordDict) -> MetricRecord:
        return read_evaluation(content, self._inner.weighted_by)

    def lose(self, trip: Trip) -> None:
        """Note an evaluation that came to nothing."""
        self._close(self._queue.ended(trip.message_id, None))

    def forget_nodes(self, gone: list[int]) -> None:
        """Give up on what waits for nodes that are gone."""
        self._close(self._queue.forget_nodes(set(gone)))

    def _close(self, rounds: Iterable[Finished]) -> None:
        for finished in rounds:
            self._state.progressed_at = self._clock.now()
            if finished.replies:
                metrics = self._inner.aggregate_evaluate(
                    finished.round, finished.replies
                )
                self._report.end_evaluation(finished, metrics)
