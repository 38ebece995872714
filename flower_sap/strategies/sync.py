"""When to merge, when to synchronize, and whether an idle node may start.

A sync policy answers with a *time*: "when should the buffer be merged if nothing more
comes?" ``-inf`` is at once, ``inf`` is "wait for more". So *or* is `min`
(`FirstOf`), *and* is `max` (`AllOf`), the engine knows how long it may sleep, and
virtual time jumps exactly there. Policies are pure functions of a `RoundView`. SAP's
own is `Interval`, in a file of its own.

Sources: FullyAsync: FedAsync, arXiv:1903.03934. Buffered: FedBuff, arXiv:2106.06639.
BoundedStaleness: SSP (Ho et al. 2013). Tiered: Gsyn (INFOCOM 2024) and FedAT
(arXiv:2010.05958).
"""

import math
from dataclasses import dataclass
from typing import Protocol

from flower_sap.checks import check_count, check_positive

AT_ONCE = -math.inf
WAIT = math.inf


@dataclass(frozen=True, slots=True)
class RoundView:
    """What a policy may know when it decides.

    Counts are of the nodes of one `group` (all nodes, unless the policy groups them).
    Messages that are still out after a synchronization are *late* and not counted.

    Attributes
    ----------
    now, opened_at, synced_at : float
        Now, the last merge (or, where nothing was out or waiting after it, the next
        start of a node), and the last synchronization (s on the run's clock).
    version, oldest_base_version : int
        The current version, and the oldest one that a message in flight carries.
    merges_since_sync : int
        Merges since the last synchronization.
    num_buffered, num_in_flight : int
        Updates waiting, and messages out.
    """

    now: float
    opened_at: float
    synced_at: float
    version: int
    oldest_base_version: int
    merges_since_sync: int
    num_buffered: int
    num_in_flight: int

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is buffered and nothing in flight."""
        return self.num_buffered == 0 and self.num_in_flight == 0


class SyncPolicy(Protocol):
    """The questions that the engine asks; the answers here are the defaults."""

    def merge_at(self, view: RoundView) -> float:
        """Return when to merge if nothing more arrives (s)."""
        ...

    def may_start(self, view: RoundView) -> bool:
        """Return whether an idle node may start now."""
        return True

    def opens_at(self, view: RoundView) -> float:
        """Return when `may_start` may turn true by time alone (s); inf: never."""
        return math.inf

    def synchronizes(self, view: RoundView) -> bool:
        """Return whether a merge now continues everybody from one version."""
        return False

    def ends_round(self, view: RoundView) -> bool:
        """Return whether a merge now completes one of Flower's rounds."""
        return True

    def work_until(self, view: RoundView) -> float:
        """Return when an update started now should be back (s); inf: any time."""
        return math.inf

    def drops_late(self) -> bool:
        """Return whether an update that missed its synchronization is left out."""
        return False

    def num_groups(self) -> int:
        """Return how many speed groups have a buffer of their own."""
        return 1

    def starts_together(self) -> bool:
        """Return whether a round's nodes start at once, so evaluation goes first."""
        return False


@dataclass(frozen=True, slots=True)
class FullySync(SyncPolicy):
    """Merge when all dispatched nodes have answered: the inner strategy unwrapped."""

    def merge_at(self, view: RoundView) -> float:
        """Return at once when nobody is out."""
        return AT_ONCE if view.num_in_flight == 0 else WAIT

    def may_start(self, view: RoundView) -> bool:
        """Start a round's nodes together."""
        return view.is_empty

    def synchronizes(self, view: RoundView) -> bool:
        """Every merge is a synchronization."""
        return True

    def starts_together(self) -> bool:
        """Nobody may miss the start."""
        return True


@dataclass(frozen=True, slots=True)
class Buffered(SyncPolicy):
    """Merge every `k` updates (FedBuff).

    Parameters
    ----------
    k : int
        Updates a merge waits for, >= 1.
    """

    k: int = 10

    def __post_init__(self) -> None:
        """Refuse an empty buffer."""
        check_count("k", self.k, least=1, unit="update")

    def merge_at(self, view: RoundView) -> float:
        """Return at once when `k` updates wait."""
        return AT_ONCE if view.num_buffered >= self.k else WAIT


@dataclass(frozen=True, slots=True)
class FullyAsync(SyncPolicy):
    """Merge every update as it arrives (FedAsync)."""

    def merge_at(self, view: RoundView) -> float:
        """Return at once when an update waits."""
        return AT_ONCE if view.num_buffered >= 1 else WAIT


@dataclass(frozen=True, slots=True)
class BoundedStaleness(SyncPolicy):
    r"""Merge every `k` updates, but never let :math:`\tau` exceed `limit` (SSP).

    While the slowest message in flight is `limit` versions behind, merging and
    dispatching wait for it.

    Parameters
    ----------
    limit : int
        S >= 0 (versions).
    k : int
        Updates a merge waits for, >= 1.
    """

    limit: int
    k: int = 1

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        check_count("limit", self.limit, least=0, unit="versions")
        check_count("k", self.k, least=1, unit="update")

    def _is_at_limit(self, view: RoundView) -> bool:
        behind = view.version - view.oldest_base_version
        return view.num_in_flight > 0 and behind >= self.limit

    def merge_at(self, view: RoundView) -> float:
        """Return at once when `k` wait and nobody would fall too far behind."""
        if self.limit == 0:  # nobody restarts before the merge, so k may not be met
            return AT_ONCE if view.num_in_flight == 0 else WAIT
        if view.num_buffered < self.k or self._is_at_limit(view):
            return WAIT
        return AT_ONCE

    def may_start(self, view: RoundView) -> bool:
        """Hold the fast nodes while the slowest is at the limit."""
        if self.limit == 0:
            return view.is_empty
        return not self._is_at_limit(view)


@dataclass(frozen=True, slots=True)
class Tiered(SyncPolicy):
    """Synchronize within groups of like speed, not across them (Gsyn, FedAT).

    Nodes are sorted by their observed seconds per update into `num_tiers` groups of
    equal size; until all are known, they are one group.

    Parameters
    ----------
    num_tiers : int
        Groups, >= 1.
    """

    num_tiers: int = 3

    def __post_init__(self) -> None:
        """Refuse no group."""
        check_count("num_tiers", self.num_tiers, least=1)

    def merge_at(self, view: RoundView) -> float:
        """Return at once when the whole group has answered."""
        return AT_ONCE if view.num_in_flight == 0 else WAIT

    def may_start(self, view: RoundView) -> bool:
        """Start a group's nodes together."""
        return view.is_empty

    def num_groups(self) -> int:
        """Return the number of tiers."""
        return self.num_tiers

    def starts_together(self) -> bool:
        """Nobody may miss the start."""
        return True


@dataclass(frozen=True, slots=True)
class Deadline(SyncPolicy):
    """Merge whatever came `seconds` after the last merge; meant for `FirstOf`.

    Parameters
    ----------
    seconds : float
        Longest round (s), > 0.
    drop_late : bool
        Where the round is a synchronization: leave out what comes after it.
    """

    seconds: float
    drop_late: bool = False

    def __post_init__(self) -> None:
        """Refuse no time at all."""
        check_positive("seconds", self.seconds, unit="s")

    def merge_at(self, view: RoundView) -> float:
        """Return the deadline."""
        return view.opened_at + self.seconds

    def drops_late(self) -> bool:
        """Return what the late rule says."""
        return self.drop_late
