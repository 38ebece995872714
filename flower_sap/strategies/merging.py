r"""How buffered deltas move the model: step along them, or mix client models in.

Let :math:`w_t` be the current model, :math:`x_i` a client's model trained from the
version :math:`b_i`, :math:`n_i` its examples, :math:`s_i` its weight (staleness and
contribution) and :math:`e_i` its local steps. Each rule says what a delta is measured
from, which *gain* multiplies it, and which *scale* the weighted mean gets:

.. math:: w_{t+1} = w_t + \mathrm{scale} \cdot
          \frac{\sum_i n_i \, \mathrm{gain}_i \, \delta_i}{\sum_i n_i}

A zero delta is a no-op under every rule.
"""

import math
from dataclasses import dataclass
from typing import Protocol

from flower_sap.checks import check_positive


@dataclass(slots=True)
class Totals:
    """Sums over the updates of one buffer.

    Attributes
    ----------
    examples : float
        Sum of :math:`n_i`.
    weighted : float
        Sum of :math:`n_i s_i`.
    steps : float
        Sum of :math:`n_i e_i`.
    """

    examples: float = 0.0
    weighted: float = 0.0
    steps: float = 0.0


class MergeRule(Protocol):
    """What a delta is, and how much of it counts."""

    @property
    def mixes_models(self) -> bool:
        """Whether a delta is measured from the current model, not from its base."""
        return False

    def gain(self, weight: float, num_steps: float) -> float:
        """Return the factor of one delta, known when it arrives."""
        ...

    def scale(self, totals: Totals) -> float:
        """Return the factor of the mean delta, known when the buffer is merged."""
        ...


@dataclass(frozen=True, slots=True)
class Discounted(MergeRule):
    r"""Stale updates shorten the step: :math:`\eta \sum n_i s_i \delta_i / \sum n_i`.

    FedBuff's rule (arXiv:2106.06639, algorithm 1): the discount is not normalized
    away.

    Parameters
    ----------
    server_lr : float
        :math:`\eta > 0`.
    """

    server_lr: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a rate that stands still or goes back."""
        check_positive("server_lr", self.server_lr)

    def gain(self, weight: float, num_steps: float) -> float:
        """Return the weight."""
        return weight

    def scale(self, totals: Totals) -> float:
        """Return the server learning rate."""
        return self.server_lr


@dataclass(frozen=True, slots=True)
class Normalized(MergeRule):
    r"""Weights share one full step: :math:`\eta\sum n_i s_i\delta_i / \sum n_i s_i`.

    Parameters
    ----------
    server_lr : float
        :math:`\eta > 0`.
    """

    server_lr: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a rate that stands still or goes back."""
        check_positive("server_lr", self.server_lr)

    def gain(self, weight: float, num_steps: float) -> float:
        """Return the weight."""
        return weight

    def scale(self, totals: Totals) -> float:
        """Return the rate over the mean weight; 0 when every weight vanished."""
        if totals.weighted <= 0:
            return 0.0
        scale = self.server_lr * totals.examples / totals.weighted
        # Over a subnormal sum the quotient is inf, and inf times no delta is NaN.
        return scale if scale < math.inf else 0.0


@dataclass(frozen=True, slots=True)
class StepNormalized(MergeRule):
    r"""Clients that did more steps do not pull harder (FedNova).

    :math:`\eta \, \bar e \sum n_i s_i (\delta_i / e_i) / \sum n_i` with the effective
    number of steps :math:`\bar e = \sum n_i e_i / \sum n_i`. FedNova (Wang et al.,
    arXiv:2007.07481, equation 6 with plain SGD clients); the weights s are ours.

    Parameters
    ----------
    server_lr : float
        :math:`\eta > 0`.
    """

    server_lr: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a rate that stands still or goes back."""
        check_positive("server_lr", self.server_lr)

    def gain(self, weight: float, num_steps: float) -> float:
        """Return the weight of one local step."""
        return weight / num_steps

    def scale(self, totals: Totals) -> float:
        """Return the rate times the effective number of steps."""
        if totals.examples <= 0:
            return 0.0
        return self.server_lr * totals.steps / totals.examples


@dataclass(frozen=True, slots=True)
class ModelMixing(MergeRule):
    r"""Move towards the clients' models: :math:`(1-\alpha s)w_t + \alpha s\,x_i`.

    FedAsync's rule (arXiv:1903.03934, algorithm 1), for a buffer of one; a larger
    buffer takes the mean of the clients' pulls. :math:`\alpha s` does not compound
    over the run.

    Parameters
    ----------
    mixing : float
        :math:`\alpha \in (0, 1]`, the share of a fresh client model.
    """

    mixing: float = 0.6

    def __post_init__(self) -> None:
        """Refuse a share outside (0, 1]."""
        if not 0 < self.mixing <= 1:
            raise ValueError(f"mixing must be in (0, 1], got {self.mixing}")

    @property
    def mixes_models(self) -> bool:
        """A delta is the way from the current model to the client's."""
        return True

    def gain(self, weight: float, num_steps: float) -> float:
        """Return the weight, bounded so that nothing overshoots a client's model."""
        return min(weight, 1 / self.mixing)

    def scale(self, totals: Totals) -> float:
        """Return the mixing rate."""
        return self.mixing
