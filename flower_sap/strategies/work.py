r"""How many local steps a node is asked for, from how fast it was seen to be.

The answer travels in the message's config as ``local-steps``; a ClientApp that does
not read it trains as it always does. Source of the balanced rule: DLB (Ye et al., DOI
10.1109/TETCI.2022.3220224): shares in proportion to observed speed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from flower_sap.checks import check_count


@dataclass(frozen=True, slots=True)
class NodePace:
    """What the server has seen of a node's speed.

    Attributes
    ----------
    seconds_per_step : float or None
        Computing time of one local step (s), > 0; None before the first answer.
    overhead_seconds : float
        The rest of a trip: both transfers and waiting (s); 0 when unknown.
    mean_steps_per_second : float
        Mean speed of the nodes seen so far (steps/s); 0 when none was.
    """

    seconds_per_step: float | None
    overhead_seconds: float
    mean_steps_per_second: float


class WorkRule(Protocol):
    """Chooses local steps for one dispatch."""

    def local_steps(self, pace: NodePace, available: float) -> int | None:
        """Return the steps to ask for, or None to leave it to the client.

        Parameters
        ----------
        pace : NodePace
            What is known of the node.
        available : float
            Seconds until its update should be back; inf when any time will do.
        """
        ...


@dataclass(frozen=True, slots=True)
class FixedWork(WorkRule):
    """The same for all.

    Parameters
    ----------
    steps : int or None
        Local steps, >= 1. None: the client decides (epochs in its own config).
    """

    steps: int | None = None

    def __post_init__(self) -> None:
        """Refuse no work."""
        if self.steps is not None:
            check_count("steps", self.steps, least=1)

    def local_steps(self, pace: NodePace, available: float) -> int | None:
        """Return the fixed number."""
        return self.steps


@dataclass(frozen=True, slots=True)
class BalancedWork(WorkRule):
    r"""Steps in proportion to speed, so that all compute for the same time (DLB).

    A node with speed :math:`v_i` (steps/s) gets :math:`\bar e\,v_i/\bar v` steps,
    within bounds; an unknown one gets `steps`. Where the interval's end is known, no
    node gets more than it can finish by then.

    Parameters
    ----------
    steps : int
        :math:`\bar e \ge 1`, the mean over nodes.
    least, most : int
        Bounds, 1 <= least <= steps <= most.
    """

    steps: int = 12
    least: int = 1
    most: int = 200

    def __post_init__(self) -> None:
        """Refuse bounds that exclude the mean."""
        if not 1 <= self.least <= self.steps <= self.most:
            raise ValueError(
                "needs 1 <= least <= steps <= most, got "
                f"least={self.least}, steps={self.steps}, most={self.most}"
            )
        for name in ("least", "steps", "most"):
            check_count(name, getattr(self, name), least=1)

    def local_steps(self, pace: NodePace, available: float) -> int | None:
        """Return the node's share."""
        # The mean is kept as a running sum: rounding can leave nothing of it.
        if pace.seconds_per_step is None or not pace.mean_steps_per_second > 0:
            return self.steps
        # Bounded before it is rounded: next to a mean near 0 a share has no limit.
        product = pace.seconds_per_step * pace.mean_steps_per_second
        share = self.steps / product if product > 0 else math.inf
        asked = round(min(share, self.most))
        return max(self.least, min(asked, steps_within(pace, available)))


@dataclass(frozen=True, slots=True)
class FillInterval(WorkRule):
    """As many steps as fit before the interval's end, so that nobody idles.

    The idea of ESync (DOI 10.1109/TSC.2020.3044043) and TimelyFL (arXiv:2304.06947).
    Needs a sync policy that knows its end: `Interval(seconds=...)`.

    Parameters
    ----------
    first : int
        Steps of a node that has not been seen yet, >= 1.
    least, most : int
        Bounds, 1 <= least <= first <= most.
    """

    first: int = 4
    least: int = 1
    most: int = 200

    def __post_init__(self) -> None:
        """Refuse bounds that exclude the first guess."""
        if not 1 <= self.least <= self.first <= self.most:
            raise ValueError(
                "needs 1 <= least <= first <= most, got "
                f"least={self.least}, first={self.first}, most={self.most}"
            )
        for name in ("least", "first", "most"):
            check_count(name, getattr(self, name), least=1)

    def local_steps(self, pace: NodePace, available: float) -> int | None:
        """Return what the node can do in the time available."""
        if pace.seconds_per_step is None:
            return self.first
        return max(self.least, min(self.most, steps_within(pace, available)))


_ANY_NUMBER = 1 << 30


def steps_within(pace: NodePace, available: float) -> int:
    """Return the steps a seen node can finish and send back in `available` seconds."""
    if pace.seconds_per_step is None:
        return _ANY_NUMBER
    steps = (available - pace.overhead_seconds) / pace.seconds_per_step
    return math.floor(min(_ANY_NUMBER, max(0.0, steps + 1e-9)))


def dlb_shares(shares: Sequence[float], seconds: Sequence[float]) -> list[float]:
    r"""Return DLB's next shares: :math:`p_i' = (p_i/t_i) / \sum_j (p_j/t_j)`.

    Parameters
    ----------
    shares : sequence of float
        Shares of the work done last, summing to 1.
    seconds : sequence of float
        Time each took, communication excluded (s), > 0.

    Examples
    --------
    >>> [round(p, 4) for p in dlb_shares([0.25] * 4, [1, 1, 2, 4])]
    [0.3636, 0.3636, 0.1818, 0.0909]
    """
    if len(shares) != len(seconds):
        raise ValueError(
            f"needs a time for each share, got {len(shares)} shares and "
            f"{len(seconds)} times"
        )
    if not all(0 < t < math.inf for t in seconds):
        raise ValueError(f"seconds must be > 0 s and finite, got {list(seconds)}")
    if not (all(p >= 0 for p in shares) and 0 < sum(shares) < math.inf):
        raise ValueError(f"shares must be >= 0 with a sum > 0, got {list(shares)}")
    speeds = [p / t for p, t in zip(shares, seconds, strict=True)]
    total = sum(speeds)
    return [speed / total for speed in speeds]
