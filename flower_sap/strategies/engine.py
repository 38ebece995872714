"""The one loop: take what arrived, merge what is due, start who is idle, wait.

The loop knows time by its `Clock` and nodes by Flower's `Grid`, and runs unchanged on
a SuperLink, in Flower's simulation runtime and in virtual time. All that changes is in
`ServerState`, which the pieces share; all that happens is told to the observers. The
pieces return what they found out, and the engine decides what follows.
"""

from flwr.app import ArrayRecord, Message, MetricRecord

from flower_sap.errors import StalledError
from flower_sap.payload.dense import decode
from flower_sap.strategies.evaluation import Evaluation
from flower_sap.strategies.inner import InnerStrategy
from flower_sap.strategies.mailbox import Mailbox
from flower_sap.strategies.merger import Merger
from flower_sap.strategies.parts import Inputs, Limits, Parts, Report, World
from flower_sap.strategies.roster import Roster
from flower_sap.strategies.state import ServerState
from flower_sap.strategies.sync import AT_ONCE
from flower_sap.strategies.training import Training
from flower_sap.strategies.versions import Versions


class Engine:
    """One run of `SemiAsync`.

    Parameters
    ----------
    parts, limits : Parts, Limits
        The algorithm and its bounds.
    inner : InnerStrategy
        The wrapped strategy.
    world : World
        The nodes, the time, and who takes each event.
    inputs : Inputs
        The first model, and the configs of the messages.
    report : Report
        Told of the ends of rounds and of evaluations.
    """

    def __init__(
        self,
        parts: Parts,
        limits: Limits,
        inner: InnerStrategy,
        *,
        world: World,
        inputs: Inputs,
        report: Report,
    ) -> None:
        self._sync, self._limits, self._report = parts.sync, limits, report
        self._min_nodes = inner.min_nodes
        self._clock = clock = world.clock
        self._is_stopping = False
        self._state = state = ServerState(decode(inputs.arrays, inputs.manifest))
        self._roster = Roster(state, world, parts)
        self._mailbox = mailbox = Mailbox(state, self._roster, world, limits.timeout)
        self._versions = versions = Versions(state, inner, inputs, parts.release)
        self._merger = Merger(state, world, parts, inner=inner, versions=versions)
        self._training = Training(
            state, parts, versions=versions, inner=inner, mailbox=mailbox, clock=clock
        )
        self._evaluation = Evaluation(
            state,
            inner,
            mailbox=mailbox,
            clock=clock,
            config=inputs.evaluate_config,
            report=report,
        )

    # --- the loop ---------------------------------------------------------------

    def run(self) -> ArrayRecord:
        """Run all rounds and return the final model."""
        try:
            self._run_rounds()
            self._finish_evaluations()
        finally:  # also after an error each message ends once in the log
            self._leave_behind()
        return self.released()

    def released(self) -> ArrayRecord:
        """Return the released model as it is now."""
        return self._versions.released()

    def _run_rounds(self) -> None:
        state = self._state
        self._roster.gather(self._min_nodes, self._limits.timeout)
        state.merged_at = state.synced_at = state.progressed_at = self._clock.now()
        self._merger.open_buffers()
        while not self._is_complete:
            self._look_for_nodes()
            self._start_nodes()
            self._clock.wait_until(self._next_look())
            self._take_replies()
            self._expire_trips()
            self._merge_due(self._clock.now())
            self._check_progress()

    @property
    def _is_complete(self) -> bool:
        return self._is_stopping or self._state.round >= self._limits.num_rounds

    # --- waiting ----------------------------------------------------------------

    def _next_look(self) -> float:
        """Return when something can happen even if nothing arrives (s)."""
        state = self._state
        times = [state.progressed_at + self._limits.timeout, self._next_change()]
        for group, buffer in enumerate(state.buffers):
            view = state.view(group, self._clock.now())
            opens_at = self._sync.opens_at(view)
            if opens_at > view.now:  # what is past would stop virtual time
                times.append(opens_at)
            if buffer.taken or buffer.held:
                times.append(self._sync.merge_at(view))
        return min(times)

    def _next_change(self) -> float:
        """Return when a node may come back, be given up on, or be looked for (s)."""
        return min(self._roster.next_change(), self._mailbox.next_expiry())

    def _check_progress(self) -> None:
        """End a run that cannot go on."""
        state, now = self._state, self._clock.now()
        self._roster.check_failures()
        if self._is_complete or now < state.progressed_at + self._limits.timeout:
            return
        raise StalledError(
            policy=self._sync,
            num_buffered=sum(len(b.taken) + len(b.held) for b in state.buffers),
            num_in_flight=len(state.trips),
            waited=now - state.progressed_at,
        )

    # --- messages out -----------------------------------------------------------

    def _look_for_nodes(self) -> None:
        gone = self._roster.look()
        if gone:
            self._evaluation.forget_nodes(gone)

    def _start_nodes(self) -> None:
        """Send evaluate messages, then train messages where the policy allows it."""
        self._send_evaluations()
        groups = range(len(self._state.buffers))
        chosen = self._roster.choose([self._may_start(group) for group in groups])
        self._training.send(chosen)

    def _send_evaluations(self) -> None:
        self._evaluation.send(
            comes_first=self._is_complete or self._sync.starts_together()
        )

    def _may_start(self, group: int) -> bool:
        if self._sync.starts_together() and self._evaluation.occupies(group):
            return False
        view = self._state.view(group, self._clock.now())
        # A policy cannot stop a run in which nothing is on its way.
        nothing_moves = view.is_empty and not self._state.trips
        return nothing_moves or self._sync.may_start(view)

    # --- replies in -------------------------------------------------------------

    def _take_replies(self) -> None:
        for reply in self._mailbox.pull():
            self._take(reply)
            # A full buffer is merged before the next update is added to it, but a
            # deadline lets in all that is there.
            if not self._is_complete:
                self._merge_due(AT_ONCE)

    def _take(self, reply: Message) -> None:
        """End one trip, well or badly."""
        trip = self._mailbox.open(reply)
        if trip is None:
            return
        base = self._state.land(trip)
        if base is None:
            self._evaluation.take(trip, reply)
        elif self._is_complete:
            self._mailbox.drop(trip, "the run is over")
            self._roster.make_idle(trip.node_id)
        else:
            held = self._training.take(trip, reply, base)
            if held is not None:
                self._merger.take(held)

    def _expire_trips(self) -> None:
        for trip in self._mailbox.expire():
            if trip.purpose == "evaluate":
                self._evaluation.lose(trip)

    # --- merges and rounds ------------------------------------------------------

    def _merge_due(self, by: float) -> None:
        """Merge every buffer that its policy says is due at time `by`."""
        for group in range(len(self._state.buffers)):
            view = self._state.view(group, self._clock.now())
            if view.num_buffered and self._sync.merge_at(view) <= by:
                metrics = self._merger.merge(group, view)
                if self._sync.ends_round(view):
                    self._complete_round(metrics)
                if self._is_complete:
                    return

    def _complete_round(self, metrics: MetricRecord | None) -> None:
        state = self._state
        state.round += 1
        released = self._versions.released()
        # A node that fails or is lost would only hold the others up.
        self._evaluation.ask(released, self._roster.healthy())
        self._report.end_round(state, released, metrics)
        self._is_stopping = self._limits.should_stop(state.round)

    # --- the end ----------------------------------------------------------------

    def _finish_evaluations(self) -> None:
        """Wait for the evaluations of the last rounds."""
        give_up_at = self._clock.now() + self._limits.timeout
        while not self._evaluation.is_empty and self._clock.now() < give_up_at:
            self._look_for_nodes()
            self._send_evaluations()
            self._clock.wait_until(min(self._next_change(), give_up_at))
            self._take_replies()
            self._expire_trips()

    def _leave_behind(self) -> None:
        """End in the log what is still out, or waits for a merge."""
        state, mailbox = self._state, self._mailbox
        for trip in list(state.trips.values()):
            mailbox.drop(trip, "the run is over")
        for buffer in state.buffers:
            trips = [taken.trip for taken in buffer.taken]
            for trip in trips + [held.trip for held in buffer.held]:
                mailbox.drop(trip, "the run ended before its merge")
        state.trips.clear()
