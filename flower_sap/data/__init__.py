"""Data sets spread over nodes, and the partitioners that spread them."""

from flower_sap.data.examples import Baseline, Evaluation, Examples, standardise_images
from flower_sap.data.federated import FederatedData
from flower_sap.data.flwr_datasets import DatasetPartitioner, from_flwr_datasets
from flower_sap.data.images import load_digits, load_gtsrb
from flower_sap.data.parking import load_parking
from flower_sap.data.partition import by_group, by_speed, dirichlet, iid
from flower_sap.data.units import Partition

__all__ = [
    "Baseline",
    "DatasetPartitioner",
    "Evaluation",
    "Examples",
    "FederatedData",
    "Partition",
    "by_group",
    "by_speed",
    "dirichlet",
    "from_flwr_datasets",
    "iid",
    "load_digits",
    "load_gtsrb",
    "load_parking",
    "standardise_images",
]
