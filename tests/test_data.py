"""What the loaders give, and how scores become the metric of all or of a group."""

import os
import sys
from functools import cache
from io import BytesIO
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_sap.data import (
    Baseline,
    Evaluation,
    Examples,
    FederatedData,
    load_digits,
    load_gtsrb,
    load_parking,
    standardise_images,
)
from flower_sap.data.parking import NUM_READINGS

GTSRB = Path(
    os.environ.get(
        "FLOWER_SAP_GTSRB",
        Path(__file__).parents[1] / "../shared/data/gtsrb_subset.npz",
    )
)

load_parking_once = cache(load_parking)


def rows(y: list[float], x: float = 0.0) -> Examples:
    return Examples(
        np.full((len(y), 1), x, dtype=np.float32), np.array(y), np.arange(len(y))
    )


# Examples


def test_examples_are_taken_by_mask_or_by_number():
    examples = rows([1, 2, 3])

    by_mask = examples.take(np.array([True, False, True]))
    by_number = examples.take(np.array([2, 2]))

    assert (by_mask.y.tolist(), by_number.y.tolist()) == ([1, 3], [3, 3])
    assert by_number.group.tolist() == [2, 2]


def test_examples_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="got 1, 2 and 1"):
        Examples(np.zeros((1, 1), np.float32), np.zeros(2), np.zeros(1, np.int64))


def test_images_become_channels_first_with_mean_0_and_deviation_1():
    image = np.zeros((1, 2, 4, 3), dtype=np.uint8)
    image[..., 2] = 120

    pixels = standardise_images(image)

    # 0, 0 and 120: mean 40, deviation 40 * sqrt(2).
    low, high = -1 / np.sqrt(2), np.sqrt(2)
    assert (pixels.shape, pixels.dtype) == ((1, 3, 2, 4), np.float32)
    assert pixels[0, :, 0, 0].tolist() == pytest.approx([low, low, high])
    assert pixels.flags.c_contiguous


@given(st.integers(0, 255), st.integers(0, 3))
def test_an_even_image_is_zero_and_none_at_all_is_no_error(level, n):
    images = np.full((n, 4, 4), level, dtype=np.uint8)

    pixels = standardise_images(images)

    assert pixels.shape == (n, 1, 4, 4)
    assert not pixels.any()


def test_images_that_are_already_floats_are_refused():
    with pytest.raises(ValueError, match=r"must be uint8 .* got float64"):
        standardise_images(np.zeros((1, 2, 2, 3)))


# Evaluation

scores = st.lists(st.floats(0, 1), min_size=6, max_size=6).map(np.array)


@given(scores, st.permutations([0, 0, 1, 1, 2, 2]))
def test_with_own_rows_the_metric_of_a_group_is_the_mean_over_its_rows(score, owner):
    owner = np.array(owner)
    evaluation = Evaluation.per_node(owner, 3)

    group = evaluation.of(score, nodes=[0, 2])

    assert group == pytest.approx(score[owner != 1].mean(), abs=1e-12)
    assert evaluation.of(score, nodes=[0, 1, 2]) == pytest.approx(evaluation.of(score))


@given(scores)
def test_per_class_the_accuracies_are_weighted_by_the_mix_in_training(score):
    evaluation = Evaluation.per_class(
        np.array([0, 0, 0, 0, 1, 1]),
        [np.array([1, 1, 1]), np.array([0]), np.array([0, 0, 0, 0, 0])],
    )

    group = evaluation.of(score, nodes=[0, 1])

    expected = 0.75 * score[4:].mean() + 0.25 * score[:4].mean()
    assert group == pytest.approx(expected, abs=1e-12)


def test_a_class_that_is_never_tested_is_left_out():
    evaluation = Evaluation.per_class(np.array([0, 1]), [np.array([0, 2, 2, 2])])

    assert evaluation.of(np.array([0.5, 1.0]), nodes=[0]) == 0.5


def test_a_group_that_stands_for_no_test_row_is_refused():
    evaluation = Evaluation.per_node(np.array([0, 0]), 2)

    with pytest.raises(ValueError, match=r"nodes \[1\] stand for none of the 2 test"):
        evaluation.of(np.array([1.0, 0.0]), nodes=[1])


def test_a_score_of_another_length_is_refused():
    evaluation = Evaluation.per_node(np.array([0, 0]), 1)

    with pytest.raises(ValueError, match=r"shape \(2,\), one per test row, got \(3,\)"):
        evaluation.of(np.zeros(3))


# FederatedData


def test_a_shared_test_set_is_dealt_out_by_the_classes_that_nodes_hold():
    train = [rows([0, 0, 0]), rows([0, 1])]

    data = FederatedData.with_shared_test(
        "two",
        [as_classes(part) for part in train],
        test=as_classes(rows([0] * 4 + [1])),
    )

    assert data.owner.tolist() == [0, 0, 0, 1, 1]
    assert data.test_of(1).y.tolist() == [0, 1]
    assert data.baseline.name == "commonest class"
    assert data.evaluation.of(data.baseline.score) == 0.8


def test_tests_of_a_class_that_nobody_trained_on_are_shared_by_all():
    train = [as_classes(rows([0, 0, 0])), as_classes(rows([0]))]

    data = FederatedData.with_shared_test("two", train, test=as_classes(rows([1] * 4)))

    assert data.owner.tolist() == [0, 0, 1, 1]


def as_classes(examples: Examples) -> Examples:
    return Examples(examples.x, examples.y.astype(np.int64), examples.group)


def test_a_node_without_training_examples_is_refused():
    with pytest.raises(ValueError, match=r"of 2 nodes, \[1\] have none"):
        FederatedData.with_own_test(
            "bad",
            [rows([1.0]), rows([])],
            test=[rows([1.0]), rows([1.0])],
            baseline=Baseline("none", np.zeros(2)),
        )


def test_tests_for_another_number_of_nodes_are_refused():
    with pytest.raises(ValueError, match="one entry per node, got 2 and 1"):
        FederatedData.with_own_test(
            "bad",
            [rows([1.0]), rows([1.0])],
            test=[rows([1.0])],
            baseline=Baseline("none", np.zeros(1)),
        )


# Parking


def test_parking_gives_each_of_30_nodes_one_site_and_tests_of_that_site():
    data = load_parking_once()

    sites = [np.unique(part.group).tolist() for part in data.train]
    assert sorted(sites) == [[site] for site in range(30)]
    assert sites == [np.unique(data.test_of(k).group).tolist() for k in range(30)]


def test_parking_rows_are_rates_a_time_of_day_and_one_day_of_the_week():
    x = load_parking_once().test.x

    assert (x.shape[1], x.dtype) == (17, np.float32)
    assert x[:, :NUM_READINGS].min() >= 0
    assert x[:, :NUM_READINGS].max() <= 1
    assert np.allclose((x[:, 8:10] ** 2).sum(axis=1), 1, atol=1e-6)
    assert (x[:, 10:].sum(axis=1) == 1).all()


def test_parking_is_emptiest_on_sundays():
    x = load_parking_once().test.x

    rate = [x[x[:, 10 + day] == 1, NUM_READINGS - 1].mean() for day in range(7)]

    assert int(np.argmin(rate)) == 6


def test_a_parking_window_is_eight_readings_and_the_one_four_later():
    data = load_parking_once()
    part = data.train[0]

    # Windows of one day overlap: the row that starts four readings later has the
    # first one's target as its last reading.
    same_day = np.array_equal(part.x[0, 4:NUM_READINGS], part.x[4, :4])
    assert same_day
    assert part.x[4, NUM_READINGS - 1] == part.y[0]


def test_parking_persistence_is_the_last_reading():
    data = load_parking_once()

    persistence = np.abs(data.test.x[:, NUM_READINGS - 1] - data.test.y)

    assert data.baseline.name == "persistence"
    assert np.allclose(data.baseline.score, persistence)
    # Golden: every window, the split and the clipping enter this figure.
    assert data.evaluation.of(data.baseline.score) == pytest.approx(0.07491, abs=1e-5)
    assert (sum(len(part) for part in data.train), len(data.test)) == (9609, 3344)


def test_parking_tests_are_about_the_last_quarter():
    data = load_parking_once()

    share = [
        len(data.test_of(k)) / (len(data.test_of(k)) + len(data.train[k]))
        for k in range(30)
    ]

    assert min(share) > 0.2
    assert max(share) < 0.36


def test_a_node_of_few_nodes_holds_whole_sites_and_nothing_is_lost():
    few, many = load_parking_once(7), load_parking_once()

    groups = [np.unique(part.group).tolist() for part in few.train]
    assert sorted(chain.from_iterable(groups)) == list(range(30))
    assert len(few.test) == len(many.test)
    assert few.evaluation.of(few.baseline.score) == pytest.approx(
        many.evaluation.of(many.baseline.score)
    )


def test_the_seed_decides_which_site_is_on_which_node():
    first, again, other = load_parking(), load_parking(), load_parking(seed=1)

    assert sites(first) == sites(again)
    assert sites(first) != sites(other)


def sites(data: FederatedData) -> list[int]:
    return [int(part.group[0]) for part in data.train]


@pytest.mark.parametrize("nodes", [0, 31])
def test_parking_refuses_more_nodes_than_sites_or_none(nodes):
    with pytest.raises(ValueError, match=rf"in \[1, 30\] .*, got {nodes}"):
        load_parking(nodes)


# Digits


def test_digits_are_all_spread_and_the_last_fifth_is_the_common_test_set():
    pytest.importorskip("sklearn")

    data = load_digits(20)

    assert (data.num_nodes, sum(len(part) for part in data.train)) == (20, 1437)
    assert (len(data.test), data.test.x.shape[1]) == (360, 64)
    assert data.test.x.max() == 1.0


def test_without_scikit_learn_digits_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)

    with pytest.raises(ImportError, match=r"pip install 'flower-sap\[digits\]'"):
        load_digits(2)


# Traffic signs


def encoded(images: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    from PIL import Image

    blobs = []
    for image in images:
        file = BytesIO()
        Image.fromarray(image).save(file, "PNG")
        blobs.append(file.getvalue())
    offset = np.cumsum([0, *map(len, blobs)])
    return np.frombuffer(b"".join(blobs), np.uint8), offset


def sign(row: int, side: int = 32) -> np.ndarray:
    """Return a black image with one white row, by which it is known again."""
    image = np.zeros((side, side, 3), dtype=np.uint8)
    image[row] = 255
    return image


def white_row(x: np.ndarray) -> list[int]:
    return x[:, 0, :, 0].argmax(axis=1).tolist()


@pytest.fixture
def sign_file(tmp_path: Path) -> Path:
    """Four tracks of two images in two classes; track numbers repeat in each class."""
    pytest.importorskip("PIL")
    train, train_off = encoded([sign(i) for i in range(8)])
    test, test_off = encoded(
        [np.repeat(np.repeat(sign(9), 2, axis=0), 2, axis=1), sign(4)]
    )
    path = tmp_path / "signs.npz"
    np.savez(
        path,
        train=train,
        train_off=train_off,
        train_y=np.array([0, 0, 0, 0, 1, 1, 1, 1], np.uint8),
        train_track=np.array([0, 0, 1, 1, 0, 0, 1, 1], np.uint8),
        test=test,
        test_off=test_off,
        test_y=np.array([1, 0], np.uint8),
    )
    return path


def test_signs_of_one_track_go_to_one_node(sign_file):
    data = load_gtsrb(4, data_file=sign_file)

    tracks = [white_row(part.x) for part in data.train]
    assert sorted(tracks) == [
        [0, 1], [2, 3], [4, 5], [6, 7],
    ]  # fmt: skip


def test_signs_of_another_size_are_scaled(sign_file):
    data = load_gtsrb(2, data_file=sign_file)

    assert data.test.x.shape == (2, 3, 32, 32)
    assert white_row(data.test.x) == [9, 4]
    assert data.test.y.tolist() == [1, 0]


def test_a_sign_file_of_another_layout_is_refused(tmp_path):
    np.savez(tmp_path / "other.npz", train=np.zeros(1, np.uint8))

    with pytest.raises(ValueError, match=r"lacks \['train_off', .*must hold"):
        load_gtsrb(2, data_file=tmp_path / "other.npz")


def test_signs_on_disk_are_read_through_torchvision_with_their_tracks(tmp_path):
    pytest.importorskip("torchvision")
    write_torchvision_signs(tmp_path / "gtsrb")

    data = load_gtsrb(2, root=tmp_path)

    groups = [np.unique(part.group).tolist() for part in data.train]
    assert sorted(groups) == [[3], [100_003]]
    assert [len(part) for part in data.train] == [2, 2]
    assert data.test.y.tolist() == [1]


def test_signs_on_disk_that_torchvision_lists_otherwise_are_refused(tmp_path):
    pytest.importorskip("torchvision")
    write_torchvision_signs(tmp_path / "gtsrb")
    training = tmp_path / "gtsrb" / "GTSRB" / "Training"
    (training / "00001").rename(training / "00007")

    with pytest.raises(ValueError, match=r"4 training files .* do not match the 4"):
        load_gtsrb(2, root=tmp_path)


def write_torchvision_signs(base: Path) -> None:
    from PIL import Image

    training = base / "GTSRB" / "Training"
    for label in range(2):
        (training / f"{label:05d}").mkdir(parents=True)
        for frame in range(2):
            name = f"00003_{frame:05d}.ppm"
            Image.fromarray(sign(9, side=40)).save(training / f"{label:05d}" / name)
    images = base / "GTSRB" / "Final_Test" / "Images"
    images.mkdir(parents=True)
    Image.fromarray(sign(9)).save(images / "00000.ppm")
    header = "Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId\n"
    table = header + "00000.ppm;32;32;0;0;31;31;1\n"
    (base / "GT-final_test.csv").write_text(table)


def test_without_pillow_signs_name_the_extra(monkeypatch, sign_file):
    monkeypatch.setitem(sys.modules, "PIL", None)

    with pytest.raises(ImportError, match=r"needs Pillow: .*'flower-sap\[vision\]'"):
        load_gtsrb(2, data_file=sign_file)


def test_without_torchvision_signs_name_the_extra_and_the_way_round(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)

    with pytest.raises(ImportError, match=r"'flower-sap\[vision\]', or give data_file"):
        load_gtsrb(2)


def test_a_failed_download_says_what_to_do(monkeypatch, tmp_path):
    datasets = pytest.importorskip("torchvision.datasets")
    monkeypatch.setattr(datasets.gtsrb, "download_and_extract_archive", offline)

    with pytest.raises(OSError, match=r"train split .*no network.*or give data_file="):
        load_gtsrb(2, root=tmp_path)


def offline(*_: object, **__: object) -> None:
    raise OSError("no network")


@pytest.mark.skipif(not GTSRB.exists(), reason=f"no GTSRB subset at {GTSRB}")
def test_the_subset_spreads_its_1307_tracks_over_20_nodes():
    data = load_gtsrb(20, data_file=GTSRB)

    assert sum(len(np.unique(part.group)) for part in data.train) == 1307
    assert sum(len(part) for part in data.train) == 6534
    assert (len(data.test), len(np.unique(data.test.y))) == (3000, 43)
