r"""Which model a run releases: the latest version, or an average of recent ones.

A semi-asynchronous version is made of few updates, so it carries their noise. The
average of recent versions does not, and costs the nodes nothing: they train from the
latest version, while evaluation and the result see the average :math:`\bar w`,

.. math:: \bar w \leftarrow \bar w + a\,(w_{t+1} - \bar w).

Averaging iterates: Polyak and Juditsky 1992; with exponential weights in asynchronous
federated learning: ours.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from flower_sap.payload.dense import Arrays, Manifest
from flower_sap.payload.layout import Kind, kind_of
from flower_sap.strategies.streaming_mean import step_mean


class ReleaseRule(Protocol):
    """Says how much of the released model the newest version is."""

    def share(self, num_updates: int, num_nodes: int, version: int) -> float:
        """Return :math:`a` in (0, 1] for a version made of `num_updates` updates."""
        ...


@dataclass(frozen=True, slots=True)
class Latest(ReleaseRule):
    """Release the latest version, as Flower's strategies do."""

    def share(self, num_updates: int, num_nodes: int, version: int) -> float:
        """Return 1."""
        return 1.0


@dataclass(frozen=True, slots=True)
class Averaged(ReleaseRule):
    """Release an exponential average over the last `passes` updates of each node.

    Parameters
    ----------
    passes : float
        Span of the average, in updates per node, > 0.
    """

    passes: float = 2.0

    def __post_init__(self) -> None:
        """Refuse no span."""
        if not 0 < self.passes < math.inf:
            raise ValueError(f"passes must be > 0 updates per node, got {self.passes}")

    def share(self, num_updates: int, num_nodes: int, version: int) -> float:
        """Return the share; larger at first, so that the start is soon forgotten."""
        settled = num_updates / (self.passes * num_nodes)
        return min(1.0, max(settled, 3.0 / (version + 2)))


class Released:
    """The released model, moved along with each version.

    Parameters
    ----------
    rule : ReleaseRule
        How far it moves.
    arrays : Arrays
        The first model.
    manifest : Manifest
        What the model is; counters are always the latest.
    """

    def __init__(self, rule: ReleaseRule, arrays: Arrays, manifest: Manifest) -> None:
        self._rule = rule
        self._kinds = [kind_of(spec) for spec in manifest.arrays]
        self._dtypes = [spec.dtype for spec in manifest.arrays]
        self._latest = arrays
        self._mean: Arrays | None = None

    def follow(
        self, arrays: Arrays, *, num_updates: int, num_nodes: int, version: int
    ) -> None:
        """Take in a new version."""
        share = self._rule.share(num_updates, num_nodes, version)
        if share >= 1.0:
            self._mean = None
        else:
            start = self._mean or [
                np.array(a, np.result_type(a.dtype, np.float32)) for a in self._latest
            ]
            self._mean = [
                mean if kind is Kind.COUNTER else step_mean(mean, array, share)
                for kind, mean, array in zip(self._kinds, start, arrays, strict=True)
            ]
        self._latest = arrays

    @property
    def arrays(self) -> Arrays:
        """Return the released model in the model's own dtypes."""
        if self._mean is None:
            return self._latest
        return [
            latest if kind is Kind.COUNTER else mean.astype(dtype, copy=False)
            for kind, mean, latest, dtype in zip(
                self._kinds, self._mean, self._latest, self._dtypes, strict=True
            )
        ]
