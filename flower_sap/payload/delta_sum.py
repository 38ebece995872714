"""The weighted sum of many coded updates, in the memory of one."""

import numpy as np
import torch

from flower_sap.payload import low_rank
from flower_sap.payload.deadzone import Floats
from flower_sap.payload.decoder import CodedUpdate
from flower_sap.payload.layout import Layout, length
from flower_sap.payload.low_rank import Product

_MOST_COLUMNS = 128  # of stacked factors: bounds their memory, whatever the clients do


class DeltaSum:
    """Sums updates over stream and protected parameters.

    Levels are added as they come. Low-rank parts wait, and are multiplied out together:
    one product of stacked factors a matrix costs half of one for each update.

    Parameters
    ----------
    layout : Layout
        Of the model.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        size = length(layout.stream) + length(layout.protected)
        self._sum = np.zeros(size, np.float32)
        self._waiting: dict[int, list[Product]] = {}

    def add(self, update: CodedUpdate, weight: float) -> None:
        """Add an update times `weight` (finite)."""
        for part in update.accumulate(self._sum, weight):
            waiting = self._waiting.setdefault(part.matrix, [])
            waiting.append(Product(part.matrix, part.left * weight, part.right))
            if sum(each.left.shape[1] for each in waiting) >= _MOST_COLUMNS:
                self._multiply_out(part.matrix)

    def total(self) -> Floats:
        """Return the sum, float32, shape (parameters,): this object's own memory."""
        for matrix in list(self._waiting):
            self._multiply_out(matrix)
        return self._sum

    def clear(self) -> None:
        """Begin again from zero, in the same memory."""
        self._sum.fill(0)
        self._waiting.clear()

    def _multiply_out(self, matrix: int) -> None:
        parts = self._waiting.pop(matrix)
        stacked = Product(
            matrix,
            torch.cat([part.left for part in parts], dim=1),
            torch.cat([part.right for part in parts], dim=1),
        )
        low_rank.add_products(self._sum, [stacked], self.layout.matrices, 1.0)
