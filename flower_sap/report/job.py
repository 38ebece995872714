"""A trial's description and its outcome: values that go to disk and back."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flower_sap.clients.task import Task
from flower_sap.data import FederatedData
from flower_sap.emulation import Fleet
from flower_sap.report.contenders import round_seconds


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained, where, and for how long.

    Attributes
    ----------
    task, data, fleet : Task, FederatedData, Fleet
        The model, the examples and the nodes.
    seed : int
        Of the first model, the partition, the fleet and every draw.
    local_epochs, num_rounds : int
        Of the synchronous baseline.
    more_samples : float
        How many times the baseline's samples the others may process: where devices do
        not wait for one another, more of them compute in the same time.
    """

    task: Task
    data: FederatedData
    fleet: Fleet
    seed: int
    local_epochs: int
    num_rounds: int
    more_samples: float = 1.5

    @property
    def num_samples(self) -> list[int]:
        """Return the samples that each node processes in a synchronous round."""
        return [len(part) * self.local_epochs for part in self.data.train]

    @property
    def budget(self) -> int:
        """Return the samples of the whole synchronous run."""
        return self.num_rounds * sum(self.num_samples)

    @property
    def longest(self) -> float:
        """Return the virtual time of the whole synchronous run, about (s)."""
        return self.num_rounds * max(round_seconds(self.fleet, self.num_samples, 0))

    def fingerprint(self) -> str:
        """Return a digest of what is trained: 64 hexadecimal digits."""
        task = self.task
        numbers = (
            task.metric, task.learning_rate, task.momentum, task.batch_size,
            self.seed, self.local_epochs, self.num_rounds, self.more_samples,
            self.data.name, self.fleet.to_toml(),
        )  # fmt: skip
        digest = hashlib.sha256(repr(numbers).encode())
        for part in (*self.data.train, self.data.test):
            digest.update(np.ascontiguousarray(part.x).data)
            digest.update(np.ascontiguousarray(part.y).data)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Point:
    """The global model at one time: its metric, and that of each speed tier."""

    time: float
    version: int
    metric: float
    tiers: tuple[float, ...]


@dataclass(slots=True)
class TrialResult:
    """What one trial came to.

    Attributes
    ----------
    name, seed, job : str, int, str
        Which trial, and the fingerprint of its job.
    points : list of Point
        Metric over virtual time.
    num_merges, num_updates : int
        New versions, and updates in them.
    mean_staleness, max_staleness : float, int
        Over the merged updates (versions).
    bytes_down, bytes_up : int
        On all links.
    idle : float
        Share of device time not spent computing.
    utilization : float
        Samples processed over what the fleet could have in the same time.
    num_lost : int
        Messages that ended otherwise than merged.
    end_time : float
        Virtual time at the end (s).
    relative_error : float
        Of the payloads, mean over updates; 0 for plain arrays.
    """

    name: str
    seed: int
    job: str
    points: list[Point]
    num_merges: int
    num_updates: int
    mean_staleness: float
    max_staleness: int
    bytes_down: int
    bytes_up: int
    idle: float
    utilization: float
    num_lost: int
    end_time: float
    relative_error: float = 0.0

    def save(self, path: Path) -> None:
        """Write the result as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "TrialResult":
        """Read what `save` wrote."""
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        fields["points"] = [
            Point(p["time"], p["version"], p["metric"], tuple(p["tiers"]))
            for p in fields["points"]
        ]
        return cls(**fields)
