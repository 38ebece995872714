"""Local training: plain SGD over shuffled epochs, with little else.

The idea: all trainable parameters are views into one flat tensor, and all gradients
into another, so a step is two or three operations whatever the number of layers. One
object is reused for all updates of a process.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flower_sap.data.examples import Examples

LossFn = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LocalRun:
    """What one local training did.

    Parameters
    ----------
    loss : float
        Mean loss per example, each at the parameters it was met with.
    num_steps : int
        SGD steps.
    num_samples : int
        Examples processed, repeated ones counted again.
    """

    loss: float
    num_steps: int
    num_samples: int


class LocalSgd:
    """SGD as ``torch.optim.SGD``: ``v = momentum * v + g``, ``w = w - lr * v``.

    The velocity starts at zero in every run: it is not a parameter, and is not sent.

    Parameters
    ----------
    model : nn.Module
        Its parameters are moved into one tensor; they must have one dtype.
    loss : LossFn
        Mean loss of ``(output, target)``.
    momentum : float
        In [0, 1).
    batch_size : int
        Examples per step, >= 1; the last step of an epoch takes what is left.

    Raises
    ------
    TypeError
        If the trainable parameters differ in dtype.
    """

    def __init__(
        self, model: nn.Module, *, loss: LossFn, momentum: float, batch_size: int
    ) -> None:
        self._model = model
        self._loss = loss
        self._momentum = momentum
        self._batch_size = batch_size
        self._weights = _flatten(model)
        self._gradient = torch.zeros_like(self._weights)
        self._velocity = torch.zeros_like(self._weights)
        _attach_gradients(model, self._gradient)

    def run(
        self,
        examples: Examples,
        *,
        num_steps: int,
        learning_rate: float,
        rng: np.random.Generator,
    ) -> LocalRun:
        """Take exactly `num_steps` steps from the model's present parameters.

        Parameters
        ----------
        examples : Examples
            At least one.
        num_steps : int
            >= 1.
        learning_rate : float
            > 0.
        rng : np.random.Generator
            Advanced by one permutation per epoch begun.
        """
        x = torch.from_numpy(examples.x)
        y = torch.from_numpy(examples.y)
        self._model.train()
        self._velocity.zero_()
        loss_sum = 0.0
        num_samples = 0
        for index in batches(len(examples), self._batch_size, num_steps, rng=rng):
            rows = torch.from_numpy(index)
            loss = self._step(x[rows], y[rows], learning_rate)
            loss_sum += loss * len(index)
            num_samples += len(index)
        return LocalRun(loss_sum / num_samples, num_steps, num_samples)

    def _step(self, x: Tensor, y: Tensor, learning_rate: float) -> float:
        self._gradient.zero_()
        loss = self._loss(self._model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        direction = self._gradient
        if self._momentum > 0:
            direction = self._velocity.mul_(self._momentum).add_(self._gradient)
        self._weights.sub_(direction, alpha=learning_rate)
        return loss.item()


def batches(
    num_examples: int, batch_size: int, num_steps: int, *, rng: np.random.Generator
) -> Iterator[NDArray[np.int64]]:
    """Yield the indices of `num_steps` batches, through freshly shuffled epochs.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> [len(index) for index in batches(5, 2, 4, rng=rng)]
    [2, 2, 1, 2]
    """
    steps_per_epoch = -(-num_examples // batch_size)
    for step in range(num_steps):
        start = step % steps_per_epoch * batch_size
        if start == 0:
            order = rng.permutation(num_examples)
        yield order[start : start + batch_size]


def _flatten(model: nn.Module) -> Tensor:
    """Move the trainable parameters into one tensor and return it."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    dtypes = sorted({str(p.dtype) for p in parameters})
    if len(dtypes) != 1:
        raise TypeError(
            f"trainable parameters must have one dtype, got {len(dtypes)}: {dtypes}"
        )
    flat = torch.cat([p.detach().reshape(-1) for p in parameters])
    for parameter, view in zip(parameters, _views(parameters, flat), strict=True):
        parameter.data = view
    return flat


def _attach_gradients(model: nn.Module, flat: Tensor) -> None:
    # A gradient that exists is added to in place, so these views stay in use.
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter, view in zip(parameters, _views(parameters, flat), strict=True):
        parameter.grad = view


def _views(parameters: list[nn.Parameter], flat: Tensor) -> list[Tensor]:
    parts = torch.split(flat, [p.numel() for p in parameters])
    return [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
