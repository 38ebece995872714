"""What a run leaves behind: its result, and what its observers are told."""

from collections.abc import Callable

from flwr.app import ArrayRecord, MetricRecord

from flower_sap import events as ev
from flower_sap.clock import Clock
from flower_sap.strategies.engine import Engine
from flower_sap.strategies.evaluation_queue import Finished
from flower_sap.strategies.result import HistoryPoint, RunResult, copy_record, numbers
from flower_sap.strategies.state import ServerState

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
StopFn = Callable[[int, RunResult], bool]


class RunReport:
    """Keeps the result of a run and tells the observers."""

    def __init__(
        self,
        clock: Clock,
        evaluate_fn: EvaluateFn | None,
        should_stop: StopFn | None,
    ) -> None:
        self._clock = clock
        self._observers: list[ev.Observer] = []
        self._evaluate_fn = evaluate_fn
        self._should_stop = should_stop
        self._version = 0
        self.result = RunResult()

    def open(self, observers: list[ev.Observer]) -> None:
        """Tell these from now on."""
        self._observers = observers

    def tell(self, event: ev.Event) -> None:
        """Tell all observers of an event."""
        if isinstance(event, ev.Aggregated):
            self._version = event.version
        for observer in self._observers:
            observer(event)

    def end_round(
        self, state: ServerState, arrays: ArrayRecord, metrics: MetricRecord | None
    ) -> None:
        """Keep the model and the metrics of a round, and evaluate centrally."""
        self.result.arrays = arrays
        if metrics is not None:
            self.result.train_metrics_clientapp[state.round] = metrics
        self._evaluate(state.round, state, arrays)

    def _evaluate(self, round_: int, state: ServerState, arrays: ArrayRecord) -> None:
        metrics = None
        if self._evaluate_fn is not None:
            metrics = self._evaluate_fn(round_, copy_record(arrays))
        if metrics is not None:
            self.result.evaluate_metrics_serverapp[round_] = metrics
            self.tell(
                ev.Evaluated(
                    self._clock.now(), state.version, round_, "server", numbers(metrics)
                )
            )
        self.result.history.append(
            HistoryPoint(
                self._clock.now(),
                round_,
                state.version,
                state.num_merged,
                state.bytes_down,
                state.bytes_up,
                numbers(metrics),
            )
        )

    def end_evaluation(self, finished: Finished, metrics: MetricRecord | None) -> None:
        """Keep the metrics of a federated evaluation."""
        if metrics is None:
            return
        self.result.evaluate_metrics_clientapp[finished.round] = metrics
        self.tell(
            ev.Evaluated(
                self._clock.now(),
                finished.version,
                finished.round,
                "clients",
                numbers(metrics),
            )
        )

    def should_stop(self, round_: int) -> bool:
        """Ask the user after a round."""
        return self._should_stop is not None and self._should_stop(round_, self.result)

    def close_over(
        self, engine: Engine, started: ev.RunStarted, arrays: ArrayRecord
    ) -> RunResult:
        """Run the engine; whatever happens, the log ends with a reason."""
        reason = "interrupted"
        self.tell(started)
        try:
            self.result.arrays = arrays
            self._evaluate(0, ServerState([]), arrays)
            self.result.arrays = engine.run()
            reason = "finished"
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.tell(ev.RunEnded(self._clock.now(), self._version, reason))
        return self.result
