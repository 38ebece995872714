"""Several sync policies at once: the first of them decides, or all of them."""

from flower_sap.strategies.sync import Deadline, RoundView, SyncPolicy


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

    def work_until(self, view: RoundView) -> float:
        """Return the earliest end of work; where all start together, a deadline is one.

        Elsewhere a deadline only bounds the wait for others, and an update that comes
        after it is part of the next round.
        """
        until = super().work_until(view)
        if not self.starts_together():
            return until
        deadlines = [p for p in self.policies if isinstance(p, Deadline)]
        ends = [deadline.merge_at(view) for deadline in deadlines]
        return min([until, *(end for end in ends if end > view.now)])


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
