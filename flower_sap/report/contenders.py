"""Who is compared: each strategy as its users would set it up.

The synchronous baseline is set up as its users would: local epochs tuned as far as
`benchmarks/README.md` says, and a variant with a deadline. All strategies train the
same client with the same optimizer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg, Strategy

from flower_sap.emulation import Fleet
from flower_sap.payload import budget_rule
from flower_sap.strategies import (
    Constant,
    Deadline,
    FirstOf,
    FullySync,
    ModelMixing,
    RoundView,
    RunOptions,
    SemiAsync,
    SyncPolicy,
    fedasync,
    fedbuff,
    heter_train,
)
from flower_sap.strategies.sync import AT_ONCE, WAIT


@dataclass(frozen=True, slots=True)
class Setting:
    """What a contender may know of the job when it is set up.

    Attributes
    ----------
    num_nodes : int
        Nodes that take part.
    local_epochs : int
        Tuned for the synchronous baseline.
    round_seconds : tuple of float
        Time of one synchronous round for each node, by its profile (s).
    """

    num_nodes: int
    local_epochs: int
    round_seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Contender:
    """One row of the comparison.

    Attributes
    ----------
    name : str
        As in the table.
    build : callable
        Returns the strategy for a setting.
    local_epochs : callable
        Returns the epochs that the train config asks for.
    is_sized : bool
        Whether its clients need the mod that makes payloads.
    """

    name: str
    build: Callable[[Setting, RunOptions], Strategy]
    local_epochs: Callable[[Setting], int] = lambda setting: setting.local_epochs
    is_sized: bool = False

    def train_config(self, setting: Setting, batch_size: int) -> ConfigRecord:
        """Return the config of its train messages."""
        return ConfigRecord(
            {"local-epochs": self.local_epochs(setting), "batch-size": batch_size}
        )


@dataclass(frozen=True, slots=True)
class AfterReplies(SyncPolicy):
    """Close a round after `m` replies; nodes that answered wait for the next.

    FedSaSync's rule (arXiv:2606.24230), which Flower's users may know from its pull
    request.
    """

    m: int

    def merge_at(self, view: RoundView) -> float:
        """Return at once when `m` replies wait."""
        return AT_ONCE if view.num_buffered >= self.m else WAIT

    def may_start(self, view: RoundView) -> bool:
        """Start nodes at a round's beginning only."""
        return view.num_buffered == 0


def _inner() -> FedAvg:
    # Central evaluation only: it costs no virtual time, whoever is compared.
    return FedAvg(fraction_evaluate=0.0)


def _deadline(setting: Setting) -> float:
    """Return a deadline that three quarters of the fleet meet."""
    return sorted(setting.round_seconds)[int(0.75 * setting.num_nodes)] * 1.02


def contenders() -> tuple[Contender, ...]:
    """Return all rows, the synchronous baseline first."""
    return (
        Contender("FedAvg", lambda _, __: _inner()),
        Contender(
            "FedAvg+deadline",
            lambda setting, options: SemiAsync(
                _inner(),
                sync=FirstOf(FullySync(), Deadline(_deadline(setting), drop_late=True)),
                staleness=Constant(),
                options=options,
            ),
        ),
        Contender("FedAsync", lambda _, options: fedasync(_inner(), options=options)),
        Contender(
            "FedBuff",
            lambda _, options: fedbuff(_inner(), k=5, local_steps=12, options=options),
        ),
        Contender(
            "M-replies",
            lambda setting, options: SemiAsync(
                _inner(),
                sync=AfterReplies(max(1, setting.num_nodes // 2)),
                staleness=Constant(),
                merge=ModelMixing(1.0),
                options=options,
            ),
        ),
        Contender("SAP", lambda _, options: heter_train(_inner(), options=options)),
    )


def sized(payload: str) -> Contender:
    """Return SAP with sized messages.

    ``"adaptive"`` sizes both directions by bandwidth, ``"1/64"`` uploads alone, and
    ``"1/64,1/16"`` uploads and downloads, as shares of the model.

    Raises
    ------
    ValueError
        If it is neither.
    """
    up, comma, down = payload.partition(",")
    upload = budget_rule(up)
    downlink = budget_rule(down) if comma else None
    if payload == "adaptive":
        downlink = upload
    return Contender(
        f"SAP {payload}",
        lambda _, options: heter_train(
            _inner(), payload=upload, downlink=downlink, options=options
        ),
        is_sized=True,
    )


def choose(names: Sequence[str], payloads: Sequence[str] = ()) -> tuple[Contender, ...]:
    """Return the contenders of these names, and the baseline first of all.

    Parameters
    ----------
    names : sequence of str
        None of them: all.
    payloads : sequence of str
        SAP with each of these budget rules as well.

    Raises
    ------
    ValueError
        If a name is unknown.
    """
    more = tuple(map(sized, payloads))
    known = contenders()
    if not names:
        return known + more
    unknown = [name for name in names if name not in {who.name for who in known}]
    if unknown:
        choice = ", ".join(who.name for who in known)
        raise ValueError(f"no strategy {unknown[0]!r}: choose from {choice}")
    chosen = tuple(who for who in known if who is known[0] or who.name in names)
    return chosen + more


def round_seconds(
    fleet: Fleet, num_samples: list[int], nbytes: int
) -> tuple[float, ...]:
    """Return each node's time for one synchronous round (s)."""
    return tuple(
        node.link.down_seconds(nbytes)
        + samples / node.device.samples_per_second
        + node.link.up_seconds(nbytes)
        for node, samples in zip(fleet.nodes, num_samples, strict=True)
    )
