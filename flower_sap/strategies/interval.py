"""SAP's sync policy: asynchronous merges, and a synchronization every interval.

The two properties are those that the abstract of Heter-Train (DOI
10.1109/TITS.2023.3286400) states; the rule itself is ours.
"""

import math
from dataclasses import dataclass

from flower_sap.checks import check_count, check_not_negative, check_positive
from flower_sap.strategies.sync import AT_ONCE, WAIT, RoundView, SyncPolicy


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
