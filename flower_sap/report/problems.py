"""What can be compared by name: data sets with their tasks, and fleets."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flower_sap.clients.task import (
    Task,
    digits_task,
    gtsrb_task,
    gtsrb_wide_task,
    parking_task,
)
from flower_sap.data import FederatedData, load_digits, load_gtsrb, load_parking
from flower_sap.emulation import Fleet


@dataclass(frozen=True, slots=True)
class Problem:
    """A data set and its task, with what is tuned for the synchronous baseline.

    Attributes
    ----------
    task : Task
        What is learned.
    load : callable
        Returns the data for (number of nodes, seed).
    local_epochs, num_rounds : int
        Of the synchronous baseline; `benchmarks/README.md` says what was tried.
    margin : float
        How far below (or, as a share of an error, above) its final metric the target
        is.
    """

    task: Task
    load: Callable[[int, int], FederatedData]
    local_epochs: int
    num_rounds: int
    margin: float

    def target(self, final: float) -> float:
        """Return the metric to reach."""
        if self.task.higher_is_better:
            return final - self.margin
        return final * (1 + self.margin)

    def reaches(self, metric: float, target: float) -> bool:
        """Return whether a metric is as good as the target."""
        better = self.task.higher_is_better
        return metric >= target if better else metric <= target


def problem(name: str, data_file: Path | None = None) -> Problem:
    """Return the problem of a name: ``parking``, ``gtsrb``, ``gtsrb-wide``, ``digits``.

    Raises
    ------
    ValueError
        If there is none of this name.
    """
    match name:
        case "parking":
            return Problem(
                parking_task(), lambda n, s: load_parking(n, seed=s), 1, 40, 0.02
            )
        case "gtsrb":
            return Problem(
                gtsrb_task(),
                lambda n, s: load_gtsrb(n, seed=s, data_file=data_file),
                2,
                40,
                0.005,
            )
        case "gtsrb-wide":
            return Problem(
                gtsrb_wide_task(),
                lambda n, s: load_gtsrb(n, seed=s, data_file=data_file),
                2,
                40,
                0.005,
            )
        case "digits":
            return Problem(
                digits_task(), lambda n, s: load_digits(n, seed=s), 1, 40, 0.005
            )
        case _:
            raise ValueError(
                f"no data set {name!r}: choose parking, gtsrb, gtsrb-wide or digits"
            )


def fleet_of(name: str, num_nodes: int, seed: int) -> Fleet:
    """Return the fleet of a name: ``mixed``, ``mild``, ``1:4``, or a TOML file.

    Raises
    ------
    ValueError
        If it is none of these, or the file has another number of nodes.
    """
    if name == "mixed":
        return Fleet.mixed(num_nodes, seed=seed)
    if name == "mild":
        return Fleet.mild(num_nodes, seed=seed)
    slow, _, fast = name.partition(":")
    if slow == "1" and fast.replace(".", "", 1).isdigit():
        return Fleet.ratio(num_nodes, float(fast), seed=seed)
    path = Path(name)
    if not path.is_file():
        raise ValueError(
            f"no fleet {name!r}: choose mixed, mild, a ratio like 1:4, or a TOML file"
        )
    fleet = Fleet.from_toml(path)
    if len(fleet) != num_nodes:
        raise ValueError(
            f"{path} has {len(fleet)} nodes, the comparison wants {num_nodes}: "
            f"pass --nodes {len(fleet)}"
        )
    return fleet
