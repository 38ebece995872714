"""Car parks of Birmingham, and how full each of them will be in two hours.

The idea: a node is a roadside box at one or a few car parks. It sees the last eight
half-hourly readings, and predicts the share of occupied spaces four readings ahead,
from those, the time of day and the day of the week.

Sources
-------
Stolfi, Alba and Yao 2017, "Predicting Car Park Occupancy Rates in Smart Cities",
data set "Parking Birmingham" (UCI Machine Learning Repository; Birmingham City
Council, UK Open Government Licence v3; see ``LICENSE-parking.md``).
"""

from importlib.resources import files

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from flower_sap.data.examples import Baseline, Examples
from flower_sap.data.federated import FederatedData
from flower_sap.data.partition import by_group

NUM_READINGS = 8  # half-hourly readings seen
NUM_AHEAD = 4  # half hours from the last reading to the target
NUM_FEATURES = NUM_READINGS + 2 + 7  # readings, time of day, day of the week

_MINUTES_PER_SLOT = 30
_SLOTS_PER_DAY = 48
_FIRST_WEEKDAY = 5  # minute 0 is a Saturday; Monday is 0
_TRAIN_SHARE = 0.75
_PURPOSE = 1  # keys the generator that deals out the sites


def load_parking(num_nodes: int = 30, *, seed: int = 0) -> FederatedData:
    """Load the embedded car-park data.

    Each site is split in time: the first 75 % of the days on which it reported are for
    training, the rest for testing. A node's metric is the one over its own test rows.
    The baseline is persistence: the last reading stays.

    Parameters
    ----------
    num_nodes : int
        In [1, 30]; whole sites are dealt out evenly.
    seed : int
        >= 0; decides which node gets which sites.

    Returns
    -------
    FederatedData
        ``x`` (n, 17) float32: 8 occupancy rates in [0, 1], oldest first; sine and
        cosine of the target's time of day; the day of the week, Monday first, one-hot.
        ``y`` occupancy rate in [0, 1]. ``group`` is the site.

    Raises
    ------
    ValueError
        If `num_nodes` is not in [1, 30].

    Examples
    --------
    >>> data = load_parking(10)
    >>> data.num_nodes, data.train[0].x.shape[1]
    (10, 17)
    """
    train, test = _load_windows()
    num_sites = len(np.unique(train.group))
    if not 1 <= num_nodes <= num_sites:
        raise ValueError(
            f"num_nodes must be in [1, {num_sites}] (whole car parks), got {num_nodes}"
        )
    rng = np.random.default_rng([seed, _PURPOSE])
    train_parts = [
        train.take(index) for index in by_group(train.group, num_nodes, rng=rng)
    ]
    test_parts = [test.take(np.isin(test.group, part.group)) for part in train_parts]
    errors = [np.abs(part.x[:, NUM_READINGS - 1] - part.y) for part in test_parts]
    return FederatedData.with_own_test(
        "parking",
        train_parts,
        test=test_parts,
        baseline=Baseline("persistence", np.concatenate(errors).astype(np.float64)),
    )


def _load_windows() -> tuple[Examples, Examples]:
    """Return the training and the test windows of all sites."""
    path = files("flower_sap.data").joinpath("parking.npz")
    with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
        site = stored["site"].astype(np.int64)
        minute = stored["minute"].astype(np.int64)
        rate = np.clip(stored["occ"] / stored["cap"], 0.0, 1.0).astype(np.float32)
    train: list[Examples] = []
    test: list[Examples] = []
    for number in np.unique(site):
        rows = site == number
        slot, values = _half_hourly(minute[rows], rate[rows])
        windows, target_slot = _windows(slot, values, int(number))
        day = target_slot // _SLOTS_PER_DAY
        days = np.unique(day)
        is_train = day < days[int(_TRAIN_SHARE * len(days))]
        train.append(windows.take(is_train))
        test.append(windows.take(~is_train))
    return Examples.concatenate(train), Examples.concatenate(test)


def _half_hourly(
    minute: NDArray[np.int64], rate: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Round readings to the half hour and keep the first of each slot.

    Readings are taken up to a quarter of an hour off the half hour, and some are stored
    twice.
    """
    order = np.argsort(minute, kind="stable")
    slot = np.round(minute[order] / _MINUTES_PER_SLOT).astype(np.int64)
    slots, first = np.unique(slot, return_index=True)
    return slots, rate[order][first]


def _windows(
    slot: NDArray[np.int64], rate: NDArray[np.float32], site: int
) -> tuple[Examples, NDArray[np.int64]]:
    """Build every window of consecutive readings; return the targets' slots too.

    Car parks are closed at night, so consecutive readings lie within one day.
    """
    length = NUM_READINGS + NUM_AHEAD
    slots = sliding_window_view(slot, length)
    rates = sliding_window_view(rate, length)
    whole = slots[:, -1] - slots[:, 0] == length - 1
    target_slot = slots[whole, -1]
    x = np.concatenate([rates[whole, :NUM_READINGS], _calendar(target_slot)], axis=1)
    group = np.full(len(x), site, dtype=np.int64)
    return Examples(x, rates[whole, -1].copy(), group), target_slot


def _calendar(slot: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return sine and cosine of the time of day, and the one-hot day of the week."""
    angle = 2 * np.pi * (slot % _SLOTS_PER_DAY) / _SLOTS_PER_DAY
    weekday = (slot // _SLOTS_PER_DAY + _FIRST_WEEKDAY) % 7
    columns = [np.sin(angle)[:, None], np.cos(angle)[:, None], np.eye(7)[weekday]]
    return np.concatenate(columns, axis=1).astype(np.float32)
