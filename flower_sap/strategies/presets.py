"""Named algorithms: one composition of parts and one citation each.

Each takes the inner strategy first, then its own knobs. What the published rule leaves
open (which nodes, how many local steps) stays with the other arguments of `SemiAsync`.
"""

from flwr.serverapp.strategy import Strategy

from flower_sap.payload.budget import BudgetRule
from flower_sap.strategies.interval import Interval
from flower_sap.strategies.merging import Discounted, ModelMixing
from flower_sap.strategies.options import RunOptions
from flower_sap.strategies.release import Averaged
from flower_sap.strategies.semi_async import SemiAsync
from flower_sap.strategies.staleness import Constant, Participation, Polynomial
from flower_sap.strategies.sync import (
    BoundedStaleness,
    Buffered,
    FullyAsync,
    Tiered,
)
from flower_sap.strategies.work import FixedWork


def fedasync(
    inner: Strategy | None = None,
    *,
    mixing: float = 0.6,
    exponent: float = 0.5,
    options: RunOptions | None = None,
) -> SemiAsync:
    """Return FedAsync: mix each client model in as it arrives.

    Xie, Koyejo, Gupta: Asynchronous Federated Optimization, arXiv:1903.03934; with its
    polynomial staleness function.
    """
    return SemiAsync(
        inner,
        sync=FullyAsync(),
        staleness=Polynomial(exponent),
        merge=ModelMixing(mixing),
        options=options,
    )


def fedbuff(
    inner: Strategy | None = None,
    *,
    k: int = 10,
    server_lr: float = 1.0,
    local_steps: int | None = None,
    options: RunOptions | None = None,
) -> SemiAsync:
    """Return FedBuff: add the mean of k discounted deltas.

    Nguyen et al.: Federated Learning with Buffered Asynchronous Aggregation, AISTATS
    2022, arXiv:2106.06639.
    """
    return SemiAsync(
        inner,
        sync=Buffered(k),
        staleness=Polynomial(0.5),
        merge=Discounted(server_lr),
        work=FixedWork(local_steps),
        options=options,
    )


def ssp(
    inner: Strategy | None = None,
    *,
    limit: int = 3,
    k: int = 1,
    options: RunOptions | None = None,
) -> SemiAsync:
    """Return stale synchronous parallel: nobody runs ahead more than `limit` versions.

    Ho et al.: More Effective Distributed ML via a Stale Synchronous Parallel Parameter
    Server, NIPS 2013.
    """
    return SemiAsync(
        inner, sync=BoundedStaleness(limit, k), staleness=Constant(), options=options
    )


def gsyn(
    inner: Strategy | None = None,
    *,
    num_tiers: int = 3,
    options: RunOptions | None = None,
) -> SemiAsync:
    """Return group synchronization: rounds within a speed group, none across.

    After Li et al.: Gsyn, INFOCOM 2024 (its abstract; the rule for the number of
    groups is not reproduced), and FedAT, arXiv:2010.05958.
    """
    return SemiAsync(
        inner, sync=Tiered(num_tiers), staleness=Polynomial(0.5), options=options
    )


def heter_train(
    inner: Strategy | None = None,
    *,
    merges: int = 16,
    local_steps: int | None = 10,
    payload: BudgetRule | None = None,
    downlink: BudgetRule | None = None,
    options: RunOptions | None = None,
) -> SemiAsync:
    """Return SAP, after Heter-Train: asynchronous merges, interval synchronization.

    Geng et al.: Heter-Train, IEEE T-ITS 25(1), 2024, DOI 10.1109/TITS.2023.3286400.
    The two properties that its abstract states; rules and constants are ours, chosen
    by the trials that `benchmarks/README.md` tells of: small buffers, rarely heard
    nodes raised, and an average of recent versions released. A round is an interval of
    `merges` merges. `payload` sizes uploads and `downlink` what is
    sent to the nodes, as `BandwidthAdaptive()` does.
    """
    return SemiAsync(
        inner,
        sync=Interval(merges, buffer=3, patience=0.05),
        staleness=Polynomial(0.5),
        contribution=Participation(0.5),
        work=FixedWork(local_steps),
        release=Averaged(1.0),
        payload=payload,
        downlink=downlink,
        options=options,
    )
