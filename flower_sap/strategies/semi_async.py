"""`SemiAsync`: a Flower strategy that makes any other one semi-asynchronous.

In a ServerApp, one line changes::

    strategy = SemiAsync(FedAvg())      # was: strategy = FedAvg()
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=40)

`SemiAsync` takes over *who trains when*; the inner strategy decorates messages,
aggregates and evaluates as before.
"""

import secrets
from collections.abc import Iterable
from logging import INFO
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy

from flower_sap import events as ev
from flower_sap._flower import ensure_task_identity, log
from flower_sap.clock import WallClock
from flower_sap.payload.budget import BudgetRule
from flower_sap.payload.dense import Manifest
from flower_sap.payload.layout import Treatment
from flower_sap.progress import ProgressLine
from flower_sap.strategies.engine import Engine
from flower_sap.strategies.inner import InnerStrategy
from flower_sap.strategies.merging import Discounted, MergeRule
from flower_sap.strategies.options import RunOptions
from flower_sap.strategies.parts import Inputs, Limits, Parts, World
from flower_sap.strategies.release import Latest, ReleaseRule
from flower_sap.strategies.result import RunResult
from flower_sap.strategies.run_report import EvaluateFn, RunReport, StopFn
from flower_sap.strategies.staleness import (
    ContributionWeight,
    Equal,
    Polynomial,
    StalenessWeight,
)
from flower_sap.strategies.sync import Buffered, SyncPolicy
from flower_sap.strategies.work import FixedWork, WorkRule
from flower_sap.strategies.wrapping import check_wrappable


def _sizing(parts: Parts) -> str:
    if parts.payload is None:
        return ""
    return (
        f"payload={parts.payload!r}, downlink={parts.downlink!r}, "
        f"treatment={parts.treatment!r}, "
    )


class SemiAsync(Strategy):
    """Semi-asynchronous rounds around a Flower strategy.

    Parameters
    ----------
    inner : Strategy, optional
        The strategy that decorates, aggregates and evaluates. Default: `FedAvg()`.
    sync : SyncPolicy
        When to merge and when to synchronize.
    staleness : callable
        Weight of an update by its staleness (versions); s(0) = 1.
    contribution : callable
        Weight of an update by its sender and its work.
    merge : MergeRule
        How weighted deltas move the model.
    work : WorkRule
        How many local steps to ask of a node.
    release : ReleaseRule
        Which model is evaluated and returned.
    payload : BudgetRule, optional
        How many bytes a client's reply may take: `Fixed`, `Fraction`,
        `BandwidthAdaptive`. Clients need `sap_mod`; others answer with plain arrays, as
        all do by default.
    downlink : BudgetRule, optional
        How many bytes the model in a train message may take, for nodes that kept the
        one before. Needs `payload`; costs the server one model of memory a node.
        Default: it is sent whole.
    treatment : Treatment, optional
        Which arrays payloads protect, or leave on the client.
    concurrency : int, optional
        Most nodes training at once, >= 1. Default: all that are connected.
    options : RunOptions, optional
        What does not change the algorithm: seed, event log, observers, clock.
    """

    def __init__(
        self,
        inner: Strategy | None = None,
        *,
        sync: SyncPolicy | None = None,
        staleness: StalenessWeight | None = None,
        contribution: ContributionWeight | None = None,
        merge: MergeRule | None = None,
        work: WorkRule | None = None,
        release: ReleaseRule | None = None,
        payload: BudgetRule | None = None,
        downlink: BudgetRule | None = None,
        treatment: Treatment | None = None,
        concurrency: int | None = None,
        options: RunOptions | None = None,
    ) -> None:
        self.inner = FedAvg() if inner is None else inner
        check_wrappable(self.inner)
        if concurrency is not None and not concurrency >= 1:
            raise ValueError(f"concurrency must be >= 1 node, got {concurrency}")
        if downlink is not None and payload is None:
            raise ValueError(
                "downlink needs payload: nodes tell what they hold in sized replies"
            )
        self.options = options or RunOptions()
        self._engine: Engine | None = None
        self.parts = Parts(
            sync=sync or Buffered(10),
            staleness=staleness or Polynomial(0.5),
            contribution=contribution or Equal(),
            merge=merge or Discounted(),
            work=work or FixedWork(),
            release=release or Latest(),
            concurrency=concurrency,
            seed=self.options.seed,
            payload=payload,
            downlink=downlink,
            treatment=treatment or Treatment(),
            series=self.options.series or secrets.token_hex(8),
        )

    def __repr__(self) -> str:
        """Return the expression that builds this strategy."""
        parts = self.parts
        return (
            f"SemiAsync({type(self.inner).__name__}(), sync={parts.sync!r}, "
            f"staleness={parts.staleness!r}, contribution={parts.contribution!r}, "
            f"merge={parts.merge!r}, work={parts.work!r}, "
            f"release={parts.release!r}, {_sizing(parts)}"
            f"concurrency={parts.concurrency}, seed={parts.seed})"
        )

    def summary(self) -> None:
        """Log the parts of this strategy, then those of the inner one."""
        parts = self.parts
        log(INFO, "\t├──> SemiAsync:")
        log(INFO, "\t│\t├── Sync: %r", parts.sync)
        log(INFO, "\t│\t├── Staleness: %r", parts.staleness)
        log(INFO, "\t│\t├── Contribution: %r", parts.contribution)
        log(INFO, "\t│\t├── Merge: %r", parts.merge)
        log(INFO, "\t│\t├── Work: %r", parts.work)
        log(INFO, "\t│\t├── Release: %r", parts.release)
        log(INFO, "\t│\t├── Payload: %r", parts.payload or "plain arrays")
        log(INFO, "\t│\t└── Concurrency: %s", parts.concurrency or "all nodes")
        self.inner.summary()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        should_stop: StopFn | None = None,
    ) -> RunResult:
        """Train for `num_rounds` rounds; see Flower's `Strategy.start`.

        Parameters
        ----------
        grid : Grid
            The nodes.
        initial_arrays : ArrayRecord
            The first model.
        num_rounds : int
            Intervals where the sync policy has them, else merges; >= 1.
        timeout : float
            Longest wait (s) for one reply, for nodes at the start, and for the next
            merge.
        train_config, evaluate_config : ConfigRecord, optional
            Sent with each train and evaluate message.
        evaluate_fn : callable, optional
            Central evaluation, before the first round and after each.
        should_stop : callable, optional
            Called after each round with (round, result so far); True ends the run.

        Returns
        -------
        RunResult
            Flower's `Result` with the run's history.

        Raises
        ------
        PayloadError
            If `initial_arrays` is empty or not made of numpy arrays.
        NoNodesError, AllClientsFailedError, StalledError, InnerStrategyError
            If the run cannot start or go on.
        """
        if not num_rounds >= 1:
            raise ValueError(f"num_rounds must be >= 1, got {num_rounds}")
        if not timeout > 0:
            raise ValueError(f"timeout must be > 0 s, got {timeout}")
        ensure_task_identity()
        clock = self.options.clock or getattr(grid, "clock", None) or WallClock()
        manifest = Manifest.of(initial_arrays)
        report = RunReport(clock, evaluate_fn, should_stop)
        log(INFO, "Starting SemiAsync strategy:")
        self.summary()
        engine = Engine(
            self.parts,
            Limits(num_rounds, timeout, report.should_stop),
            InnerStrategy(self.inner, manifest, seed=self.options.seed),
            world=World(grid, clock, report.tell),
            inputs=Inputs(
                initial_arrays,
                manifest,
                train_config or ConfigRecord(),
                evaluate_config or ConfigRecord(),
            ),
            report=report,
        )
        self._engine = engine
        report.open(self._open_observers(num_rounds))
        started = ev.RunStarted(clock.now(), repr(self), num_rounds, manifest.nbytes)
        return report.close_over(engine, started, initial_arrays)

    def released(self) -> ArrayRecord:
        """Return the model that the run would return if it ended now.

        For observers that look at more than the ends of rounds.

        Raises
        ------
        RuntimeError
            Before the first `start`.
        """
        if self._engine is None:
            raise RuntimeError("no run has been started, so there is no model yet")
        return self._engine.released()

    def _open_observers(self, num_rounds: int) -> list[ev.Observer]:
        observers = list(self.options.observers)
        if self.options.events is not None:
            observers.append(ev.JsonLines(Path(self.options.events)))
        if self.options.progress:
            observers.append(ProgressLine(num_rounds))
        return observers

    # The rest of Flower's interface, for whoever calls it directly.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the inner strategy."""
        return self.inner.configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Ask the inner strategy."""
        return self.inner.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the inner strategy."""
        return self.inner.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Ask the inner strategy."""
        return self.inner.aggregate_evaluate(server_round, replies)
