"""What the nodes learn: a model, its loss, and how an answer is scored.

The idea: a task is a value without data. Paired with `FederatedData` it gives the app
of every node (`flower_sap.clients.app`) and, here, the first model and the global
evaluation.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from flower_sap.clients.weights import ModelArrays
from flower_sap.data import Examples
from flower_sap.isolation import one_thread, torch_seed

_PURPOSE = 3  # keys the generator of a model's first parameters
_EVALUATION_BATCH = 256  # activations of the largest task stay near 30 MB

TensorFn = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Task:
    """A learning task.

    Parameters
    ----------
    model : Callable[[], nn.Module]
        Builds the model; a function of a module, so that it can be sent to workers.
    loss : Callable[[Tensor, Tensor], Tensor]
        Mean loss of ``(output, target)``.
    score : Callable[[Tensor, Tensor], Tensor]
        Score of each example, shape (n,), from ``(output, target)``; the metric is its
        mean.
    metric : str
        Name of the metric, such as ``"mae"``.
    higher_is_better : bool
        Whether a good model has a high metric.
    learning_rate : float
        Of local SGD, > 0.
    momentum : float
        Of local SGD, in [0, 1).
    batch_size : int
        Examples per step, >= 1.

    Raises
    ------
    ValueError
        If a number is out of range.
    """

    model: Callable[[], nn.Module]
    loss: TensorFn
    score: TensorFn
    metric: str
    higher_is_better: bool
    learning_rate: float
    momentum: float
    batch_size: int

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        if not 0 < self.learning_rate < float("inf"):
            raise ValueError(
                f"learning_rate must be finite and > 0, got {self.learning_rate}"
            )
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")
        if not self.batch_size >= 1:
            raise ValueError(f"batch_size must be >= 1 example, got {self.batch_size}")


def parking_task() -> Task:
    """Return the task of `load_parking`: a small network, squared error, "mae"."""
    return Task(
        model=_parking_model,
        loss=functional.mse_loss,
        score=absolute_error,
        metric="mae",
        higher_is_better=False,
        learning_rate=0.1,
        momentum=0.9,
        batch_size=32,
    )


def gtsrb_task() -> Task:
    """Return the task of `load_gtsrb`: a small CNN, cross entropy, "accuracy"."""
    return Task(
        model=_gtsrb_model,
        loss=functional.cross_entropy,
        score=correctness,
        metric="accuracy",
        higher_is_better=True,
        learning_rate=0.05,
        momentum=0.9,
        batch_size=32,
    )


def gtsrb_wide_task() -> Task:
    """Return `gtsrb_task` with a network of 1.2 M parameters, most of them dense."""
    return dataclasses.replace(gtsrb_task(), model=_gtsrb_wide_model)


def digits_task() -> Task:
    """Return the task of `load_digits`: a small network, cross entropy, "accuracy"."""
    return Task(
        model=_digits_model,
        loss=functional.cross_entropy,
        score=correctness,
        metric="accuracy",
        higher_is_better=True,
        learning_rate=0.1,
        momentum=0.9,
        batch_size=16,
    )


def absolute_error(output: Tensor, target: Tensor) -> Tensor:
    """Return ``|output - target|`` per example."""
    return (output - target).abs()


def correctness(output: Tensor, target: Tensor) -> Tensor:
    """Return 1 per example whose largest logit is its class, else 0."""
    return (output.argmax(dim=1) == target).to(torch.float32)


def build_model(task: Task, seed: int) -> nn.Module:
    """Build the task's model with parameters that depend on `seed` alone.

    Raises
    ------
    ValueError
        If `seed` is negative.
    """
    rng = np.random.default_rng([seed, _PURPOSE])
    with torch_seed(int(rng.integers(2**63))):
        return task.model()


def initial_arrays(task: Task, seed: int) -> ArrayRecord:
    """Return the parameters of version 0.

    Parameters
    ----------
    task : Task
    seed : int
        >= 0.

    Examples
    --------
    >>> list(initial_arrays(digits_task(), seed=0))
    ['0.weight', '0.bias', '2.weight', '2.bias']
    """
    return ModelArrays(build_model(task, seed)).store()


def evaluate(
    task: Task, arrays: ArrayRecord, examples: Examples
) -> NDArray[np.float64]:
    """Score a global model on each example.

    Parameters
    ----------
    task : Task
    arrays : ArrayRecord
        With the names and shapes of `initial_arrays`.
    examples : Examples
        Usually ``data.test``; ``data.evaluation.of(scores)`` is then the metric.

    Returns
    -------
    NDArray, shape (n,), float64

    Raises
    ------
    ValueError
        If `arrays` do not fit the model.
    """
    model = build_model(task, seed=0)
    ModelArrays(model).load(arrays)
    return score_examples(task, model, examples)


def score_examples(
    task: Task, model: nn.Module, examples: Examples
) -> NDArray[np.float64]:
    """Score a built model on each example, in evaluation mode and without gradients."""
    x = torch.split(torch.from_numpy(examples.x), _EVALUATION_BATCH)
    y = torch.split(torch.from_numpy(examples.y), _EVALUATION_BATCH)
    model.eval()
    with torch.inference_mode(), one_thread():
        scores = [task.score(model(a), b) for a, b in zip(x, y, strict=True)]
    return torch.cat(scores).numpy().astype(np.float64)


def _parking_model() -> nn.Module:
    # Flatten(0) drops the last axis: (n, 1) against targets of (n,) would broadcast.
    return nn.Sequential(
        nn.Linear(17, 64),
        nn.ReLU(),
        nn.Linear(64, 32),
        nn.ReLU(),
        nn.Linear(32, 1),
        nn.Flatten(0),
    )


def _gtsrb_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 4, 2, 1),
        nn.ReLU(),
        nn.Conv2d(32, 48, 4, 2, 1),
        nn.ReLU(),
        nn.Conv2d(48, 64, 4, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1024, 64),
        nn.ReLU(),
        nn.Linear(64, 43),
    )


def _gtsrb_wide_model() -> nn.Module:
    narrow = list(_gtsrb_model().children())
    return nn.Sequential(
        *narrow[:7], nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 43)
    )


def _digits_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
