"""When to merge, when to synchronize, and whether an idle node may start.

A sync policy answers with a *time*: "when should the buffer be merged if nothing more
comes?" ``-inf`` is at once, ``inf`` is "wait for more". So *or* is `min`
(`FirstOf`), *and* is `max` (`AllOf`), the engine knows how long it may sleep, and
virtual time jumps exactly there. Policies are pure functions of a `RoundView`.

Sources: FullyAsync: FedAsync, arXiv:1903.03934. Buffered: FedBuff, arXiv:2106.06639.
Interval: the two properties that the abstract of Heter-Train (DOI
10.1109/TITS.2023.3286400) states; the rule itself is ours. BoundedStaleness: SSP (Ho
et al. 2013). Tiered: Gsyn (INFOCOM 2024) and FedAT (arXiv:2010.05958).
"""

import math
from dataclasses import dataclass
from typing import Protocol

from flower_sap.checks import check_count, check_not_negative, check_positive

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
class Interval(SyncPolicy):
    r"""Merge as updates arrive; bring everybody to one version every interval (SAP).

    Within an interval the buffer is merged every `buffer` updates. An interval ends
    after `merges` merges or `seconds` seconds: dispatching stops, those still out are
    awaited, what came is merged, and all continue from that version; who is out longer
    than that is late. Nobody late, :math:`\tau \le` ``merges`` - 1 at every merge.

    Parameters
    ----------
    merges : int or None
        H >= 1, the synchronizing merge included. None: the time alone decides.
    seconds : float or None
        T > 0 (s). None: the number of merges alone decides.
    buffer : int or None
        K >= 1 updates a merge within the interval. None: merge only at its end.
    grace : float or None
        Longest wait for those still out (s), >= 0; then what came is merged. None: no
        limit.
    patience : float or None
        A softer limit, as a share of the interval's own length so far, >= 0, so that
        it needs no knowledge of the fleet: then dispatching goes on, and the next full
        buffer ends the interval, so that no version is made of one or two updates.
        None: no limit.
    drop_late : bool
        What to do with an update that comes after its grace: leave it out, or
        (default) rebase it on the current version and discount it by its staleness.
    """

    merges: int | None = None
    seconds: float | None = None
    buffer: int | None = 10
    grace: float | None = None
    patience: float | None = None
    drop_late: bool = False

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if self.merges is not None:
            check_count("merges", self.merges, least=1)
        if self.seconds is not None:
            check_positive("seconds", self.seconds, unit="s")
        if self.buffer is not None:
            check_count("buffer", self.buffer, least=1, unit="update")
        if self.buffer is None and self.seconds is None and self.merges != 1:
            raise ValueError(
                "buffer=None merges only at an interval's end, so the interval needs "
                f"seconds (or merges=1), got merges={self.merges}, seconds=None"
            )
        if self.grace is not None:
            check_not_negative("grace", self.grace, unit="s")
        if self.patience is not None:
            check_not_negative("patience", self.patience)

    def _drains_from(self, view: RoundView) -> float:
        """Return since when (s) the interval only waits for those still out."""
        from_merges = (
            view.opened_at
            if self.merges is not None and view.merges_since_sync >= self.merges - 1
            else math.inf
        )
        return min(from_merges, view.synced_at + (self.seconds or math.inf))

    def _ends_by(self, drains_from: float) -> float:
        """Return when the interval ends whoever is still out (s)."""
        return WAIT if self.grace is None else drains_from + self.grace

    def _patient_until(self, view: RoundView, drains_from: float) -> float:
        """Return until when dispatching stays stopped (s)."""
        # Not to be computed for an interval whose end is unknown: inf * 0 is NaN.
        if self.patience is None or drains_from == WAIT:
            return WAIT
        return drains_from + self.patience * (drains_from - view.synced_at)

    def merge_at(self, view: RoundView) -> float:
        """Return when the buffer is full, or when the interval may end."""
        drains_from = self._drains_from(view)
        if drains_from <= view.now:
            if view.num_in_flight == 0:
                return AT_ONCE
            is_full = view.num_buffered >= (self.buffer or 1)
            patient_until = self._patient_until(view, drains_from)
            return min(self._ends_by(drains_from), patient_until if is_full else WAIT)
        if self.buffer is not None and view.num_buffered >= self.buffer:
            return AT_ONCE
        return drains_from if view.num_in_flight == 0 else self._ends_by(drains_from)

    def may_start(self, view: RoundView) -> bool:
        """Stop dispatching while the interval drains, as long as patience lasts."""
        drains_from = self._drains_from(view)
        is_draining = drains_from <= view.now < self._patient_until(view, drains_from)
        return view.is_empty or not is_draining

    def opens_at(self, view: RoundView) -> float:
        """Return the end of patience, while it is still to come."""
        drains_from = self._drains_from(view)
        patient_until = self._patient_until(view, drains_from)
        is_closed = drains_from <= view.now < patient_until
        return patient_until if is_closed else WAIT

    def synchronizes(self, view: RoundView) -> bool:
        """Return whether the interval drains: a merge then ends it."""
        return self._drains_from(view) <= view.now

    def ends_round(self, view: RoundView) -> bool:
        """Return whether the interval ends, for it is a round."""
        return self.synchronizes(view)

    def work_until(self, view: RoundView) -> float:
        """Return the end of the interval."""
        end = view.synced_at + (self.seconds or math.inf)
        # After an interval in which nothing came, work is measured from now.
        return end if end > view.now else view.now + (self.seconds or math.inf)

    def drops_late(self) -> bool:
        """Return what the late rule says."""
        return self.drop_late


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


class _Composition(SyncPolicy):
    """Two or more policies at once; they must agree that a node may start."""

    __slots__ = ("policies",)

    def __init__(self, *policies: SyncPolicy) -> None:
        if len(policies) < 2:
            raise ValueError(
                f"{type(self).__name__} needs >= 2 policies, got {len(policies)}"
            )
        for policy in policies:
            if isinstance(policy, type) or not hasattr(policy, "merge_at"):
                raise TypeError(
                    f"{type(self).__name__} takes sync policies, got {policy!r}"
                )
        if sum(policy.num_groups() > 1 for policy in policies) > 1:
            raise ValueError("only one of the policies may group the nodes")
        self.policies = policies

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.policies))})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.policies == other.policies

    def __hash__(self) -> int:
        return hash((type(self), self.policies))

    def may_start(self, view: RoundView) -> bool:
        """Return whether all allow it."""
        return all(policy.may_start(view) for policy in self.policies)

    def opens_at(self, view: RoundView) -> float:
        """Return when the first of them may."""
        return min(policy.opens_at(view) for policy in self.policies)

    def synchronizes(self, view: RoundView) -> bool:
        """Return whether one of them synchronizes."""
        return any(policy.synchronizes(view) for policy in self.policies)

    def ends_round(self, view: RoundView) -> bool:
        """Return whether all see a round's end."""
        return all(policy.ends_round(view) for policy in self.policies)

    def work_until(self, view: RoundView) -> float:
        """Return the earliest end of work."""
        return min(policy.work_until(view) for policy in self.policies)

    def drops_late(self) -> bool:
        """Return whether one of them drops late updates."""
        return any(policy.drops_late() for policy in self.policies)

    def num_groups(self) -> int:
        """Return the groups of the policy that has them."""
        return max(policy.num_groups() for policy in self.policies)

    def starts_together(self) -> bool:
        """Return whether one of them starts a round's nodes at once."""
        return any(policy.starts_together() for policy in self.policies)


class FirstOf(_Composition):
    """Merge as soon as one of the policies would.

    Examples
    --------
    >>> FirstOf(Buffered(10), Deadline(60.0))
    FirstOf(Buffered(k=10), Deadline(seconds=60.0, drop_late=False))
    """

    __slots__ = ()

    def merge_at(self, view: RoundView) -> float:
        """Return the earliest time."""
        return min(policy.merge_at(view) for policy in self.policies)


class AllOf(_Composition):
    """Merge only when each of the policies would.

    Examples
    --------
    >>> AllOf(Buffered(2), Deadline(5.0))
    AllOf(Buffered(k=2), Deadline(seconds=5.0, drop_late=False))
    """

    __slots__ = ()

    def merge_at(self, view: RoundView) -> float:
        """Return the latest time."""
        return max(policy.merge_at(view) for policy in self.policies)
