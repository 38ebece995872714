"""The server side: `SemiAsync`, its parts, and named compositions of them."""

from flower_sap.strategies.composition import AllOf, FirstOf
from flower_sap.strategies.interval import Interval
from flower_sap.strategies.merging import (
    Discounted,
    MergeRule,
    ModelMixing,
    Normalized,
    StepNormalized,
    Totals,
)
from flower_sap.strategies.options import RunOptions
from flower_sap.strategies.presets import fedasync, fedbuff, gsyn, heter_train, ssp
from flower_sap.strategies.release import Averaged, Latest, ReleaseRule
from flower_sap.strategies.result import HistoryPoint, RunResult
from flower_sap.strategies.semi_async import SemiAsync
from flower_sap.strategies.staleness import (
    Constant,
    Contribution,
    ContributionWeight,
    Equal,
    Exponential,
    Fidelity,
    Hinge,
    Participation,
    Polynomial,
    Progress,
    StalenessWeight,
)
from flower_sap.strategies.sync import (
    BoundedStaleness,
    Buffered,
    Deadline,
    FullyAsync,
    FullySync,
    RoundView,
    SyncPolicy,
    Tiered,
)
from flower_sap.strategies.work import (
    BalancedWork,
    FillInterval,
    FixedWork,
    NodePace,
    WorkRule,
    dlb_shares,
)

__all__ = [
    "AllOf",
    "Averaged",
    "BalancedWork",
    "BoundedStaleness",
    "Buffered",
    "Constant",
    "Contribution",
    "ContributionWeight",
    "Deadline",
    "Discounted",
    "Equal",
    "Exponential",
    "Fidelity",
    "FillInterval",
    "FirstOf",
    "FixedWork",
    "FullyAsync",
    "FullySync",
    "Hinge",
    "HistoryPoint",
    "Interval",
    "Latest",
    "MergeRule",
    "ModelMixing",
    "NodePace",
    "Normalized",
    "Participation",
    "Polynomial",
    "Progress",
    "ReleaseRule",
    "RoundView",
    "RunOptions",
    "RunResult",
    "SemiAsync",
    "StalenessWeight",
    "StepNormalized",
    "SyncPolicy",
    "Tiered",
    "Totals",
    "WorkRule",
    "dlb_shares",
    "fedasync",
    "fedbuff",
    "gsyn",
    "heter_train",
    "ssp",
]
