"""Partitioners cover all examples once, leave no node empty, and repeat themselves."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flower_sap.data import (
    Partition,
    by_group,
    by_speed,
    dirichlet,
    from_flwr_datasets,
    iid,
)

Labels = NDArray[np.int64]
Cut = Callable[[np.random.Generator], Partition]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng([seed])


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Cut, int, int, Labels | None]:
    """Return a partitioner on drawn data, the numbers of examples and nodes, groups."""
    n = draw(st.integers(1, 40))
    numbers = st.lists(st.integers(0, 9), min_size=n, max_size=n)
    labels = np.array(draw(numbers))
    groups = np.array(draw(numbers)) if draw(st.booleans()) else None
    num_units = n if groups is None else len(np.unique(groups))
    nodes = draw(st.integers(1, num_units))
    alpha = draw(st.floats(1e-6, 1e6))
    strength = draw(st.floats(0, 1))
    speeds = draw(st.lists(st.floats(0.1, 9), min_size=nodes, max_size=nodes))
    cut: Cut = draw(
        st.sampled_from(
            [
                lambda r: dirichlet(labels, nodes, rng=r, alpha=alpha, groups=groups),
                lambda r: by_speed(
                    labels, speeds, rng=r, strength=strength, groups=groups
                ),
                lambda r: (
                    iid(n, nodes, rng=r)
                    if groups is None
                    else by_group(groups, nodes, rng=r)
                ),
            ]
        )
    )
    return cut, n, nodes, groups


@settings(deadline=None, max_examples=40)
@given(cuts(), st.integers(0, 9))
def test_every_example_is_on_exactly_one_node_and_no_node_is_empty(case, seed):
    cut, n, nodes, _ = case

    parts = cut(rng(seed))

    assert len(parts) == nodes
    assert all(len(part) > 0 for part in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(n))


@settings(deadline=None, max_examples=40)
@given(cuts(), st.integers(0, 9))
def test_examples_of_one_group_are_on_one_node(case, seed):
    cut, n, _, groups = case
    groups = np.arange(n) if groups is None else groups

    parts = cut(rng(seed))

    assert sum(len(np.unique(groups[part])) for part in parts) == len(np.unique(groups))


@settings(deadline=None, max_examples=40)
@given(cuts(), st.integers(0, 9))
def test_the_same_generator_gives_the_same_partition(case, seed):
    cut, *_ = case

    first, second = cut(rng(seed)), cut(rng(seed))

    assert [part.tolist() for part in first] == [part.tolist() for part in second]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 9), st.floats(0.01, 10))
def test_dirichlet_fills_every_node_to_the_minimum(nodes, least, seed, alpha):
    labels = np.arange(nodes * least) % 3

    parts = dirichlet(labels, nodes, rng=rng(seed), alpha=alpha, min_examples=least)

    assert min(len(part) for part in parts) >= least


def test_a_small_alpha_gives_nodes_fewer_classes_than_a_large_one():
    labels = np.repeat(np.arange(10), 100)

    def mean_classes(alpha: float) -> float:
        parts = dirichlet(labels, 10, rng=rng(), alpha=alpha)
        return float(np.mean([len(np.unique(labels[part])) for part in parts]))

    assert mean_classes(0.05) < 5
    assert mean_classes(100.0) == 10


def test_another_seed_gives_another_partition():
    labels = np.arange(100) % 10

    first = dirichlet(labels, 5, rng=rng(0), alpha=1.0)
    second = dirichlet(labels, 5, rng=rng(1), alpha=1.0)

    assert [part.tolist() for part in first] != [part.tolist() for part in second]


def test_by_group_balances_the_number_of_examples():
    groups = np.repeat(np.arange(6), [10, 10, 10, 10, 20, 20])

    parts = by_group(groups, 4, rng=rng())

    assert sorted(len(part) for part in parts) == [20, 20, 20, 20]


def test_by_group_does_not_give_the_largest_groups_to_the_first_nodes():
    groups = np.repeat(np.arange(8), np.arange(8) + 1)

    sizes = [len(part) for part in by_group(groups, 8, rng=rng())]

    assert sizes != sorted(sizes, reverse=True)
    assert sorted(sizes) == list(range(1, 9))


def test_at_full_strength_low_classes_live_on_slow_nodes():
    labels = np.array([2, 0, 1, 2, 0, 1])

    parts = by_speed(labels, [10.0, 0.5, 3.0], rng=rng(), strength=1.0)

    assert [labels[part].tolist() for part in parts] == [[2, 2], [0, 0], [1, 1]]


@pytest.mark.parametrize(
    ("strength", "low", "high"), [(0.0, -0.1, 0.1), (0.5, 0.5, 0.9), (1.0, 0.99, 1.0)]
)
def test_strength_sets_how_closely_the_class_follows_the_speed(strength, low, high):
    labels = np.repeat(np.arange(20), 50)

    parts = by_speed(labels, list(range(20)), rng=rng(), strength=strength)

    node = np.repeat(np.arange(20), [len(part) for part in parts])
    correlation = np.corrcoef(node, labels[np.concatenate(parts)])[0, 1]
    # 1,000 examples: the standard error at no correlation is 0.03.
    assert low <= correlation <= high


@pytest.mark.parametrize("nodes", [0, 4])
def test_more_nodes_than_examples_or_none_are_refused(nodes):
    with pytest.raises(ValueError, match=rf"in \[1, 3\].*got {nodes}"):
        iid(3, nodes, rng=rng())


def test_more_nodes_than_groups_are_refused():
    with pytest.raises(ValueError, match=r"in \[1, 2\].*got 3"):
        by_group(np.array([0, 0, 1, 1]), 3, rng=rng())


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_an_alpha_that_is_not_positive_and_finite_is_refused(alpha):
    with pytest.raises(ValueError, match="alpha must be finite and > 0, got"):
        dirichlet(np.zeros(4), 2, rng=rng(), alpha=alpha)


def test_a_minimum_that_whole_groups_cannot_meet_is_refused_with_the_numbers():
    groups = np.array([0, 0, 0, 1])

    with pytest.raises(
        ValueError, match=r"min_examples=2 .* 4 examples in 2 units .* node with 1"
    ):
        dirichlet(np.zeros(4), 2, rng=rng(), alpha=1.0, groups=groups, min_examples=2)


def test_a_minimum_of_no_examples_is_refused():
    with pytest.raises(ValueError, match="min_examples must be >= 1, got 0"):
        dirichlet(np.zeros(4), 2, rng=rng(), alpha=1.0, min_examples=0)


@pytest.mark.parametrize("strength", [-0.1, 1.1, float("nan")])
def test_a_strength_outside_0_to_1_is_refused(strength):
    with pytest.raises(ValueError, match=r"strength must be in \[0, 1\], got"):
        by_speed(np.zeros(4), [1.0, 2.0], rng=rng(), strength=strength)


def test_groups_of_another_length_than_the_labels_are_refused():
    with pytest.raises(ValueError, match="got 3 for 4 labels"):
        dirichlet(np.zeros(4), 2, rng=rng(), alpha=1.0, groups=np.zeros(3))


class EvenPartitioner:
    """A data set of 4 rows in two halves, as flwr-datasets would give it."""

    def __init__(self, **columns: list[object]) -> None:
        self._columns = columns

    @property
    def dataset(self) -> list[None]:
        return [None] * 4

    @property
    def num_partitions(self) -> int:
        return 2

    def load_partition(self, partition_id: int) -> "Rows":
        rows = slice(2 * partition_id, 2 * partition_id + 2)
        return Rows({key: value[rows] for key, value in self._columns.items()})


class Rows:
    def __init__(self, columns: dict[str, list[object]]) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, name: str) -> list[object]:
        return self._columns[name]


def test_a_flower_datasets_partition_becomes_the_examples_of_its_node():
    images = [np.full((2, 3), 85 * i, dtype=np.uint8) for i in range(4)]

    parts = from_flwr_datasets(EvenPartitioner(image=images, label=[3, 1, 4, 1]))

    assert [part.y.tolist() for part in parts] == [[3, 1], [4, 1]]
    assert [part.x.shape for part in parts] == [(2, 1, 2, 3), (2, 1, 2, 3)]


def test_numbers_of_a_flower_datasets_partition_stay_as_they_are():
    rows = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]

    _, second = from_flwr_datasets(
        EvenPartitioner(a=rows, b=[0.1, 0.2, 0.3, 0.4]), x="a", y="b"
    )

    assert second.x.tolist() == [[5.0, 6.0], [7.0, 8.0]]
    assert second.y.dtype == np.float32
    assert second.x.dtype == np.float32


def test_a_missing_column_is_named():
    with pytest.raises(ValueError, match="no column 'image'; name the columns"):
        from_flwr_datasets(EvenPartitioner(img=[1, 2, 3, 4], label=[1, 2, 3, 4]))


def test_an_empty_flower_datasets_partition_is_refused():
    with pytest.raises(ValueError, match=r"partitions \[1\] of 2 are empty \(4 rows"):
        from_flwr_datasets(EvenPartitioner(image=[1, 2], label=[1, 2]))


def test_a_flower_datasets_partitioner_without_a_data_set_is_refused():
    class Unassigned(EvenPartitioner):
        @property
        def dataset(self) -> list[None]:
            raise AttributeError("The dataset is not set.")

    with pytest.raises(ValueError, match=r"assign partitioner\.dataset first"):
        from_flwr_datasets(Unassigned(image=[1, 2, 3, 4], label=[1, 2, 3, 4]))
