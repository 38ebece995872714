"""Images over nodes: German traffic signs, and the small digits of scikit-learn.

The idea: a vehicle sees few signs and each of them in several frames, so whole tracks
(one physical sign) go to one node and the mix of classes differs from node to node. The
test set is common; a node is judged by the classes it holds.

Sources
-------
Stallkamp et al. 2012, "Man vs. computer: Benchmarking machine learning algorithms for
traffic sign recognition", Neural Networks 32 (GTSRB). Alpaydin and Kaynak 1998,
"Optical Recognition of Handwritten Digits", UCI Machine Learning Repository (digits).
"""

from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_sap.data.examples import Examples, standardise_images
from flower_sap.data.federated import FederatedData
from flower_sap.data.partition import dirichlet

_SIDE = 32  # pixels
_PURPOSE = 2  # keys the generator that deals out the examples
# A track's number is unique within its class only.
_TRACKS_PER_CLASS = 100_000
_DIGITS_TRAIN_SHARE = 0.8
_KEYS = ("train", "train_off", "train_y", "train_track", "test", "test_off", "test_y")

_Pixels = NDArray[np.uint8]
_Labels = NDArray[np.int64]


def load_gtsrb(
    num_nodes: int,
    *,
    seed: int = 0,
    data_file: Path | None = None,
    alpha: float = 0.5,
    root: Path = Path("datasets"),
) -> FederatedData:
    """Load the German Traffic Sign Recognition Benchmark, 43 classes, 32 x 32 pixels.

    Parameters
    ----------
    num_nodes : int
        >= 1, at most the number of tracks.
    seed : int
        >= 0; decides which node gets which tracks.
    data_file : Path or None
        A NumPy ``.npz`` of encoded images: image i is the bytes
        ``train[train_off[i]:train_off[i + 1]]``, in any format that Pillow reads, with
        class ``train_y[i]`` and track ``train_track[i]`` within its class; ``test``,
        ``test_off``, ``test_y`` likewise. ``None``: through torchvision.
    alpha : float
        > 0; concentration of the class mix, see `dirichlet`.
    root : Path
        Where torchvision keeps the data set, about 0.6 GB; it is downloaded if absent.

    Returns
    -------
    FederatedData
        ``x`` (n, 3, 32, 32) float32, see `standardise_images`; ``y`` the class;
        ``group`` the track.

    Raises
    ------
    ValueError
        If `data_file` has another layout, or a number is out of range.
    ImportError
        If Pillow or torchvision is missing.
    OSError
        If `data_file` cannot be read, or the download fails.
    """
    if data_file is None:
        train, train_y, track, test, test_y = _read_torchvision(root)
    else:
        train, train_y, track, test, test_y = _read_file(data_file)
    group = train_y * _TRACKS_PER_CLASS + track
    return _spread(
        "gtsrb",
        Examples(standardise_images(train), train_y, group),
        Examples(standardise_images(test), test_y, np.arange(len(test_y))),
        num_nodes=num_nodes,
        seed=seed,
        alpha=alpha,
    )


def load_digits(num_nodes: int, *, seed: int = 0, alpha: float = 0.5) -> FederatedData:
    """Load scikit-learn's handwritten digits, 10 classes, 8 x 8 pixels.

    The last fifth of the data set, in its own order, is the test set.

    Parameters
    ----------
    num_nodes : int
        In [1, 1437].
    seed : int
        >= 0; decides which node gets which examples.
    alpha : float
        > 0; concentration of the class mix, see `dirichlet`.

    Returns
    -------
    FederatedData
        ``x`` (n, 64) float32 in [0, 1], ``y`` the digit.

    Raises
    ------
    ValueError
        If a number is out of range.
    ImportError
        If scikit-learn is missing.
    """
    try:
        from sklearn import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(
            "load_digits needs scikit-learn: pip install 'flower-sap[digits]'"
        ) from error
    pixels, labels = datasets.load_digits(return_X_y=True)
    x = (pixels / 16.0).astype(np.float32)  # values are 0 to 16
    examples = Examples(x, labels.astype(np.int64), np.arange(len(x)))
    cut = int(_DIGITS_TRAIN_SHARE * len(x))
    return _spread(
        "digits",
        examples.take(np.arange(cut)),
        examples.take(np.arange(cut, len(x))),
        num_nodes=num_nodes,
        seed=seed,
        alpha=alpha,
    )


def _spread(
    name: str,
    train: Examples,
    test: Examples,
    *,
    num_nodes: int,
    seed: int,
    alpha: float,
) -> FederatedData:
    rng = np.random.default_rng([seed, _PURPOSE])
    partition = dirichlet(train.y, num_nodes, rng=rng, alpha=alpha, groups=train.group)
    parts = [train.take(index) for index in partition]
    return FederatedData.with_shared_test(name, parts, test=test)


def _read_file(path: Path) -> tuple[_Pixels, _Labels, _Labels, _Pixels, _Labels]:
    """Decode an ``.npz`` of encoded images."""
    with np.load(path, allow_pickle=False) as stored:
        missing = [key for key in _KEYS if key not in stored.files]
        if missing:
            raise ValueError(
                f"{path} lacks {missing}: it must hold the arrays {list(_KEYS)}"
            )
        return (
            _decode(stored["train"], stored["train_off"]),
            stored["train_y"].astype(np.int64),
            stored["train_track"].astype(np.int64),
            _decode(stored["test"], stored["test_off"]),
            stored["test_y"].astype(np.int64),
        )


def _decode(encoded: NDArray[np.uint8], offset: NDArray[Any]) -> _Pixels:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "load_gtsrb needs Pillow: pip install 'flower-sap[vision]'"
        ) from error
    pixels = np.empty((len(offset) - 1, _SIDE, _SIDE, 3), dtype=np.uint8)
    data = encoded.tobytes()
    for i, (start, stop) in enumerate(pairwise(offset.tolist())):
        with Image.open(BytesIO(data[start:stop])) as image:
            pixels[i] = _resized(image)
    return pixels


def _resized(image: Any) -> _Pixels:
    rgb = image.convert("RGB")
    return np.asarray(rgb if rgb.size == (_SIDE, _SIDE) else rgb.resize((_SIDE, _SIDE)))


def _read_torchvision(root: Path) -> tuple[_Pixels, _Labels, _Labels, _Pixels, _Labels]:
    """Read both splits with torchvision, and the tracks from the file names."""
    train, train_y = _read_split(root, "train")
    test, test_y = _read_split(root, "test")
    # torchvision tells image and class only. Its order is that of the sorted paths
    # <class>/<track>_<frame>.ppm.
    paths = sorted((root / "gtsrb" / "GTSRB" / "Training").glob("*/*.ppm"))
    classes = np.array([int(path.parent.name) for path in paths])
    if not np.array_equal(classes, train_y):
        raise ValueError(
            f"{len(paths)} training files under {root} do not match the "
            f"{len(train_y)} images that torchvision lists: "
            f"delete {root / 'gtsrb'} and load again"
        )
    track = np.array([int(path.name.split("_")[0]) for path in paths])
    return train, train_y, track, test, test_y


def _read_split(root: Path, split: str) -> tuple[_Pixels, _Labels]:
    try:
        from torchvision.datasets import GTSRB  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(
            "load_gtsrb needs torchvision: pip install 'flower-sap[vision]', "
            "or give data_file="
        ) from error
    try:
        samples = GTSRB(root, split=split, download=True)
    except (OSError, RuntimeError) as error:
        raise OSError(
            f"the {split} split of GTSRB is not complete under {root} and could not be "
            f"downloaded ({error}): connect to the network, copy the folder gtsrb "
            "there, or give data_file="
        ) from error
    pixels = np.empty((len(samples), _SIDE, _SIDE, 3), dtype=np.uint8)
    labels = np.empty(len(samples), dtype=np.int64)
    for i in range(len(samples)):
        image, labels[i] = samples[i]
        pixels[i] = _resized(image)
    return pixels, labels
