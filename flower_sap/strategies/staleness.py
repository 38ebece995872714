r"""How much an update counts: by its age, and by who sent it.

A *staleness weight* :math:`s(\tau)` is any function from an update's staleness
(versions between the model it was trained from and the one it joins) to a factor for
its delta, with :math:`s(0) = 1`. A *contribution weight* :math:`c` is a function of
the facts about an update and its sender; it corrects for work and for participation.
The delta is multiplied by :math:`s(\tau)\,c`.

Sources: Polynomial, Hinge, Constant: FedAsync (Xie et al., arXiv:1903.03934, section
5.2); the square root: FedBuff (Nguyen et al., arXiv:2106.06639). Progress and
Participation: ours, after the aims of FedNova (arXiv:2007.07481) and FAVANO
(arXiv:2305.16099).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from flower_sap.checks import check_count, check_not_negative

StalenessWeight: TypeAlias = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Constant:
    r"""Age does not matter: :math:`s(\tau) = 1`.

    Examples
    --------
    >>> Constant()(7)
    1.0
    """

    def __call__(self, staleness: int) -> float:
        """Return the weight of an update `staleness` versions old."""
        return 1.0


@dataclass(frozen=True, slots=True)
class Polynomial:
    r"""Decay from the first version on: :math:`s(\tau) = (1 + \tau)^{-a}`.

    Parameters
    ----------
    exponent : float
        :math:`a \ge 0`; 0 is `Constant`, 0.5 is FedBuff's, 1 is harmonic.

    Examples
    --------
    >>> weight = Polynomial(0.5)
    >>> [round(weight(staleness), 3) for staleness in (0, 1, 3, 8)]
    [1.0, 0.707, 0.5, 0.333]
    """

    exponent: float = 0.5

    def __post_init__(self) -> None:
        """Refuse a negative exponent, which would reward staleness."""
        check_not_negative("exponent", self.exponent)

    def __call__(self, staleness: int) -> float:
        """Return the weight of an update `staleness` versions old."""
        return _at_least_positive((1.0 + staleness) ** -self.exponent)


@dataclass(frozen=True, slots=True)
class Hinge:
    r"""Full weight up to `free`, then :math:`s(\tau) = 1 / (a(\tau - b) + 1)`.

    Parameters
    ----------
    slope : float
        :math:`a \ge 0`, per version.
    free : int
        :math:`b \ge 0`, the last staleness that costs nothing (versions).

    Examples
    --------
    >>> [round(Hinge(10, 4)(staleness), 4) for staleness in (4, 5, 8)]
    [1.0, 0.0909, 0.0244]
    """

    slope: float = 10.0
    free: int = 4

    def __post_init__(self) -> None:
        """Refuse negative parameters."""
        check_not_negative("slope", self.slope, unit="per version")
        check_count("free", self.free, least=0, unit="versions")

    def __call__(self, staleness: int) -> float:
        """Return the weight of an update `staleness` versions old."""
        late = max(0, staleness - self.free)
        return _at_least_positive(1.0 / (self.slope * late + 1.0))


@dataclass(frozen=True, slots=True)
class Exponential:
    r"""A constant factor a version: :math:`s(\tau) = \gamma^\tau`.

    Parameters
    ----------
    decay : float
        :math:`\gamma \in (0, 1]`.

    Examples
    --------
    >>> Exponential(0.5)(3)
    0.125
    """

    decay: float = 0.9

    def __post_init__(self) -> None:
        """Refuse a decay that grows or kills."""
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must be in (0, 1], got {self.decay}")

    def __call__(self, staleness: int) -> float:
        """Return the weight of an update `staleness` versions old."""
        return _at_least_positive(self.decay**staleness)


def _at_least_positive(weight: float) -> float:
    """Return a weight that may have underflowed, far beyond any real staleness."""
    return max(float(weight), math.ulp(0.0))


@dataclass(frozen=True, slots=True)
class Contribution:
    """The facts about an update that a contribution weight may use.

    Attributes
    ----------
    staleness : int
        Versions between its base and the current model.
    num_examples : float
        Local examples behind it.
    num_steps : float or None
        Local steps it took, where the client or the work rule tells.
    mean_steps : float
        Mean of `num_steps` over the updates so far; 1 when unknown.
    node_updates : int
        Updates taken from this node so far, this one included.
    mean_updates : float
        The same, averaged over the nodes of the run.
    relative_error : float
        Of its payload, as the encoder measured it, >= 0; 0 for plain arrays.
    """

    staleness: int
    num_examples: float
    num_steps: float | None
    mean_steps: float
    node_updates: int
    mean_updates: float
    relative_error: float = 0.0


ContributionWeight: TypeAlias = Callable[[Contribution], float]


@dataclass(frozen=True, slots=True)
class Equal:
    """Every update counts by its examples and its age alone: c = 1."""

    def __call__(self, contribution: Contribution) -> float:
        """Return 1."""
        return 1.0


@dataclass(frozen=True, slots=True)
class Progress:
    r"""Count the work done: :math:`c = (e_i / \bar e)^p`.

    :math:`e_i` are the local steps of the update and :math:`\bar e` their mean over
    the run; an update whose steps are unknown counts 1.

    Parameters
    ----------
    power : float
        :math:`p \ge 0`; 0 is `Equal`, 1 is proportional.
    limit : float
        Largest weight, >= 1: the steps are the client's own claim.
    """

    power: float = 1.0
    limit: float = 100.0

    def __post_init__(self) -> None:
        """Refuse a negative power, which would reward idleness, or a limit below 1."""
        check_not_negative("power", self.power)
        _check_limit(self.limit)

    def __call__(self, contribution: Contribution) -> float:
        """Return the weight of the update."""
        if contribution.num_steps is None:
            return 1.0
        ratio = contribution.num_steps / contribution.mean_steps
        return _bounded_power(ratio, self.power, self.limit)


@dataclass(frozen=True, slots=True)
class Participation:
    r"""Raise nodes that are heard rarely: :math:`c = (\bar u / u_i)^p`, bounded.

    :math:`u_i` are the updates taken from the node so far and :math:`\bar u` their
    mean over all nodes. With p = 1 each node's total influence is the same whatever
    its speed, so classes that live on slow vehicles are not lost.

    Parameters
    ----------
    power : float
        :math:`p \ge 0`; 0 is `Equal`, 1 removes the bias towards fast nodes.
    limit : float
        Largest weight, >= 1; the smallest is its inverse.
    """

    power: float = 0.5
    limit: float = 4.0

    def __post_init__(self) -> None:
        """Refuse a power below 0 and a limit below 1."""
        check_not_negative("power", self.power)
        _check_limit(self.limit)

    def __call__(self, contribution: Contribution) -> float:
        """Return the weight of the update."""
        rarity = contribution.mean_updates / max(1, contribution.node_updates)
        return max(1 / self.limit, _bounded_power(rarity, self.power, self.limit))


@dataclass(frozen=True, slots=True)
class Fidelity:
    r"""Count what a payload says of its update: :math:`c = (1 - \epsilon^2)^p`.

    :math:`\epsilon` is the relative error that the encoder measured, so that
    :math:`1 - \epsilon^2` is the share of the update's energy that arrived; plain
    arrays count 1. What did not arrive is said later, by error feedback. Ours.

    Parameters
    ----------
    power : float
        :math:`p \ge 0`; 0 is `Equal`.
    least : float
        Smallest weight, in (0, 1]: the error is the client's own claim.
    """

    power: float = 1.0
    least: float = 0.1

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        check_not_negative("power", self.power)
        if not 0 < self.least <= 1:
            raise ValueError(f"least must be in (0, 1], got {self.least}")

    def __call__(self, contribution: Contribution) -> float:
        """Return the weight of the update."""
        said = 1 - min(1.0, contribution.relative_error) ** 2
        return float(max(self.least, said**self.power))


def _check_limit(limit: float) -> None:
    if not 1 <= limit < math.inf:
        raise ValueError(f"limit must be >= 1 and finite, got {limit}")


def _bounded_power(ratio: float, power: float, limit: float) -> float:
    """Return ratio ** power, at most `limit`; the power itself might overflow."""
    if ratio > 1 and power * math.log(ratio) >= math.log(limit):
        return limit
    return float(min(limit, ratio**power))
