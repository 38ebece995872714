"""Examples from Flower Datasets, or from anything that partitions as it does.

The idea: only the interface is used, so the package `flwr-datasets` need not be
installed to use ours, and a partitioner of your own needs two members.
"""

from typing import Any, Protocol

import numpy as np

from flower_sap.data.examples import Examples, standardise_images


class DatasetPartitioner(Protocol):
    """What is used of ``flwr_datasets.partitioner.Partitioner``."""

    @property
    def dataset(self) -> Any:
        """The data set that is partitioned; raises until it has been assigned."""

    @property
    def num_partitions(self) -> int:
        """The number of partitions."""

    def load_partition(self, partition_id: int) -> Any:
        """Return one partition, whose columns are reached by name."""


def from_flwr_datasets(
    partitioner: DatasetPartitioner, *, x: str = "image", y: str = "label"
) -> tuple[Examples, ...]:
    """Load every partition as `Examples`, one per node.

    Parameters
    ----------
    partitioner : DatasetPartitioner
        With its ``dataset`` assigned.
    x : str
        Input column: uint8 images (arrays or PIL), treated as `standardise_images`
        does, or numbers, which become float32 as they are.
    y : str
        Target column; integers become int64 classes, others float32.

    Raises
    ------
    ValueError
        If the partitioner has no data set, a partition is empty, or a column is
        missing.
    """
    try:
        num_rows = len(partitioner.dataset)
    except AttributeError as error:
        raise ValueError(
            "the partitioner has no data set: assign partitioner.dataset first"
        ) from error
    num_nodes = partitioner.num_partitions
    parts = [partitioner.load_partition(node) for node in range(num_nodes)]
    empty = [node for node, part in enumerate(parts) if len(part) == 0]
    if empty:
        raise ValueError(
            f"partitions {empty} of {num_nodes} are empty ({num_rows} rows in all): "
            "use fewer partitions"
        )
    return tuple(_examples(part, x, y) for part in parts)


def _examples(part: Any, x: str, y: str) -> Examples:
    inputs = np.stack([np.asarray(value) for value in _column(part, x)])
    is_image = inputs.dtype == np.uint8 and inputs.ndim >= 3
    targets = np.asarray(_column(part, y))
    is_class = np.issubdtype(targets.dtype, np.integer)
    return Examples(
        x=standardise_images(inputs) if is_image else inputs.astype(np.float32),
        y=targets.astype(np.int64 if is_class else np.float32),
        group=np.arange(len(targets), dtype=np.int64),
    )


def _column(part: Any, name: str) -> list[Any]:
    try:
        return list(part[name])
    except KeyError as error:
        raise ValueError(
            f"the partition has no column {name!r}; name the columns with x= and y="
        ) from error
