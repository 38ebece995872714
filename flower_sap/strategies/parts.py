"""What one run is made of: the algorithm, its bounds, its world and its inputs.

Small records that the engine and its pieces are built from. Nothing here changes while
a run goes on; all that does is in `ServerState`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid

from flower_sap import events as ev
from flower_sap.clock import Clock
from flower_sap.payload.budget import BudgetRule
from flower_sap.payload.dense import Manifest
from flower_sap.payload.layout import Treatment
from flower_sap.strategies.evaluation_queue import Finished
from flower_sap.strategies.merging import MergeRule
from flower_sap.strategies.release import ReleaseRule
from flower_sap.strategies.staleness import ContributionWeight, StalenessWeight
from flower_sap.strategies.state import ServerState
from flower_sap.strategies.sync import SyncPolicy
from flower_sap.strategies.work import WorkRule


@dataclass(frozen=True, slots=True)
class Parts:
    """The choices that make one algorithm; see `SemiAsync`."""

    sync: SyncPolicy
    staleness: StalenessWeight
    contribution: ContributionWeight
    merge: MergeRule
    work: WorkRule
    release: ReleaseRule
    concurrency: int | None
    seed: int
    payload: BudgetRule | None = None
    downlink: BudgetRule | None = None
    treatment: Treatment = field(default_factory=Treatment)
    series: str = "run"


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a run goes on, and how long it waits."""

    num_rounds: int
    timeout: float
    should_stop: Callable[[int], bool]


@dataclass(frozen=True, slots=True)
class World:
    """The nodes, the time, and who is told of each event."""

    grid: Grid
    clock: Clock
    tell: Callable[[ev.Event], None]


@dataclass(frozen=True, slots=True)
class Inputs:
    """The first model, what it is, and the configs of train and evaluate messages."""

    arrays: ArrayRecord
    manifest: Manifest
    train_config: ConfigRecord
    evaluate_config: ConfigRecord


class Report(Protocol):
    """Whoever keeps the results of a run."""

    def end_round(
        self, state: ServerState, arrays: ArrayRecord, metrics: MetricRecord | None
    ) -> None:
        """Take the model and the train metrics at the end of `state.round`."""
        ...

    def end_evaluation(self, finished: Finished, metrics: MetricRecord | None) -> None:
        """Take the metrics of a federated evaluation."""
        ...
