r"""How many bytes a node's next update may take: rules, and what they may know.

A budget is that of the whole reply message as Flower serializes it. From bandwidth:

.. math:: B_i = \eta\, r_i\, (T - c_i - l_i)

with the node's uplink rate :math:`r_i` (B/s), computing time :math:`c_i` and latency
:math:`l_i` (s), and a deadline :math:`T` that is the same for all, so that all uploads
end together. Sources: Heter-Train (DOI 10.1109/TITS.2023.3286400) for sizing by
bandwidth; BCRS (arXiv:2408.14736) for one deadline instead of one ratio. The floor, the
hysteresis and the deadline of policies without one are ours.
"""

import fractions
import math
from dataclasses import dataclass
from typing import Protocol

from flower_sap.checks import check_count, check_positive

SMALLEST_BUDGET = 2048  # bytes: an empty update in its message, with some metrics


@dataclass(frozen=True, slots=True)
class LinkView:
    """What a budget rule may know of a node and its link.

    Attributes
    ----------
    model_nbytes : int
        Of an update that is not coded.
    rate : float or None
        Estimated rate of the transfer (B/s); None before the node's first answer.
    compute_seconds : float
        Expected time that the dispatch takes besides this transfer (s).
    available : float
        Until the sync policy wants the update (s); inf when it names no time.
    usual_seconds : float or None
        A typical trip of the fleet (s), where all start together: a quantile of the
        arrival times is then a deadline. None where nobody waits for anybody.
    last_budget : int or None
        The node's budget before.
    """

    model_nbytes: int
    rate: float | None = None
    compute_seconds: float = 0.0
    available: float = math.inf
    usual_seconds: float | None = None
    last_budget: int | None = None


class BudgetRule(Protocol):
    """Chooses the bytes of one reply."""

    def budget(self, link: LinkView) -> int | None:
        """Return the most bytes of the reply, or None for plain arrays."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed(BudgetRule):
    """The same number of bytes for every node.

    Parameters
    ----------
    nbytes : int
        >= 2048 B.
    """

    nbytes: int

    def __post_init__(self) -> None:
        """Refuse what an empty update would not fit in."""
        check_count("nbytes", self.nbytes, least=SMALLEST_BUDGET, unit="bytes")

    def budget(self, link: LinkView) -> int:
        """Return the fixed number."""
        return self.nbytes


@dataclass(frozen=True, slots=True)
class Fraction(BudgetRule):
    """The same share of the model's size for every node.

    Parameters
    ----------
    share : float
        Of the bytes of a plain reply, > 0.

    Examples
    --------
    >>> Fraction(1 / 32).budget(LinkView(model_nbytes=32_000_000))
    1000000
    """

    share: float

    def __post_init__(self) -> None:
        """Refuse a share that is none."""
        check_positive("share", self.share)

    def budget(self, link: LinkView) -> int:
        """Return the share, but at least `SMALLEST_BUDGET`."""
        return max(SMALLEST_BUDGET, math.floor(self.share * link.model_nbytes))


@dataclass(frozen=True, slots=True)
class BandwidthAdaptive(BudgetRule):
    """What the node's uplink carries in the time that is left after computing.

    Parameters
    ----------
    use : float
        Share of the estimated rate that is planned with, in (0, 1].
    least, most : float
        Bounds, as shares of the bytes of a plain reply; 0 < least <= most. Below
        `least` an update says so little that it is better sent late.
    first : float
        Share asked of a node whose link has not been seen yet.
    beside : float
        A transfer may always take this share of the rest of the trip (s/s), >= 0; where
        nobody waits for a deadline, it takes no more. A slow device has time to send,
        and what it learned is rare.
    hysteresis : float
        A budget stays as it was while it differs by less than this share, in [0, 1).

    Examples
    --------
    >>> link = LinkView(8_000_000, rate=25_000.0, compute_seconds=4.0, available=10.0)
    >>> BandwidthAdaptive(use=0.8).budget(link)
    120000
    """

    use: float = 0.8
    least: float = 1 / 256
    most: float = 1 / 32
    first: float = 1 / 64
    beside: float = 0.5
    hysteresis: float = 0.1

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if not 0 < self.use <= 1:
            raise ValueError(f"use must be in (0, 1], got {self.use}")
        if not 0 < self.least <= self.first <= self.most < math.inf:
            raise ValueError(
                "needs 0 < least <= first <= most, got "
                f"least={self.least}, first={self.first}, most={self.most}"
            )
        if not 0 <= self.beside < math.inf:
            raise ValueError(f"beside must be >= 0, got {self.beside}")
        if not 0 <= self.hysteresis < 1:
            raise ValueError(f"hysteresis must be in [0, 1), got {self.hysteresis}")

    def budget(self, link: LinkView) -> int:
        """Return the bytes that can be sent in time, within the bounds."""
        if link.rate is None:
            return self._bounded(self.first * link.model_nbytes, link)
        deadline = link.available
        if deadline == math.inf:
            deadline = link.usual_seconds or 0.0
        seconds = max(
            deadline - link.compute_seconds, self.beside * link.compute_seconds
        )
        # A rate may be infinite, and no time left: the bounds then decide.
        fits = self.use * link.rate * seconds if seconds > 0 else 0.0
        asked = self._bounded(fits, link)
        last = link.last_budget
        if last is not None and abs(asked - last) < self.hysteresis * last:
            return last
        return asked

    def _bounded(self, nbytes: float, link: LinkView) -> int:
        least = max(SMALLEST_BUDGET, self.least * link.model_nbytes)
        return math.floor(max(least, min(nbytes, self.most * link.model_nbytes)))


def budget_rule(text: str) -> BudgetRule:
    """Return the rule that a command line or a run config names.

    Parameters
    ----------
    text : str
        ``"adaptive"``, a share of the model such as ``"1/32"`` or ``"0.05"``, or bytes
        such as ``"100000B"``.

    Raises
    ------
    ValueError
        If it is none of these.

    Examples
    --------
    >>> budget_rule("1/32")
    Fraction(share=0.03125)
    """
    if text == "adaptive":
        return BandwidthAdaptive()
    try:
        if text.endswith("B"):
            return Fixed(int(text[:-1]))
        share = float(fractions.Fraction(text))
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(
            f"no payload rule {text!r}: choose adaptive, a share such as 1/32, or "
            f"bytes such as 100000B ({error})"
        ) from error
    return Fraction(share)


@dataclass(slots=True)
class LinkEstimate:
    """A node's rates, from what each trip took beside computing.

    One trip tells one number, so both directions are taken to be equally fast until the
    node reports its uplink. A slow-down is believed at once, for planning with a rate
    that is gone misses a deadline; a speed-up by halves.

    Attributes
    ----------
    seconds_per_byte : float or None
        Inverse of the rate; None before the first answer.
    """

    seconds_per_byte: float | None = None

    def observe(self, nbytes: int, seconds: float) -> None:
        """Learn from a trip: `nbytes` both ways in `seconds` beside computing."""
        if nbytes <= 0 or not 0 <= seconds < math.inf:
            return
        new, old = seconds / nbytes, self.seconds_per_byte
        self.seconds_per_byte = new if old is None or new > old else (new + old) / 2

    def report(self, bytes_per_second: float) -> None:
        """Take the node's own word for its uplink."""
        self.seconds_per_byte = 1 / bytes_per_second

    @property
    def uplink(self) -> float | None:
        """Return the rate (B/s); inf where no time was seen to pass."""
        if self.seconds_per_byte is None:
            return None
        return 1 / self.seconds_per_byte if self.seconds_per_byte > 0 else math.inf
