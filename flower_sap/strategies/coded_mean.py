"""Sums of coded updates, for a mean that also has plain ones."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_sap.payload.decoder import CodedUpdate
from flower_sap.payload.delta_sum import DeltaSum
from flower_sap.strategies.aggregation import wide


class CodedMean:
    """Sums of payloads' parameters and statistics, in units of the first's examples.

    The unit keeps the sums in float32's range whatever the clients claim.
    """

    def __init__(self, first: CodedUpdate, unit: float) -> None:
        self.unit = unit
        self._sum = DeltaSum(first.layout)
        layout = first.layout
        behind = layout.stream[-1].stop if layout.stream else 0
        self._places = {place.index: (place, 0) for place in layout.stream}
        self._places |= {place.index: (place, behind) for place in layout.protected}
        self._statistics: dict[int, NDArray[Any]] = {}
        self._is_empty = True

    def fits(self, update: CodedUpdate) -> bool:
        """Return whether an update has the layout of this sum."""
        return update.layout is self._sum.layout

    def clear(self) -> None:
        """Begin again from zero."""
        if not self._is_empty:
            self._sum.clear()
        self._statistics.clear()
        self._is_empty = True

    def add(self, update: CodedUpdate, num_examples: float, gain: float) -> None:
        """Add an update's parameters."""
        if self._is_empty:
            self.unit = num_examples
        self._is_empty = False
        self._sum.add(update, gain * num_examples / self.unit)

    def add_statistic(
        self, index: int, delta: NDArray[Any], num_examples: float
    ) -> None:
        """Add what an update changes in one statistic."""
        sum_ = self._statistics.setdefault(index, np.zeros(delta.shape, wide(delta)))
        sum_ += delta * (num_examples / self.unit)

    def of(self, index: int) -> NDArray[Any] | None:
        """Return the sum of one array's deltas, or None where there is none."""
        if self._is_empty:
            return None
        if index in self._statistics:
            return self._statistics[index]
        if index not in self._places:
            return None
        place, behind = self._places[index]
        flat = self._sum.total()[behind + place.start : behind + place.stop]
        return flat.reshape(place.shape)
