r"""Error feedback: what a payload did not say is said by a later one.

.. math:: x_k = \Delta_k + \gamma^{m} e_{k-1}, \qquad e_k = x_k - C(x_k)

with :math:`m` the messages that this node was sent since and did not answer. The error
:math:`e_k` holds only once the server has taken payload *k* in; of a payload that was
lost or refused, all of :math:`x_k` is carried over instead. Both can be rebuilt from
what is kept: the error and the payload.

Sources: Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847 (algorithm 2);
the decay after Li and Li 2022, arXiv:2211.14292 (stale error compensation). Commit,
rollback and the cap are ours.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from flower_sap.errors import PayloadError
from flower_sap.payload import decoder
from flower_sap.payload.deadzone import Floats
from flower_sap.payload.layout import Layout

DECAY = 0.8  # a message missed
_MOST_MISSED = 10
_LARGEST_RATIO = 4.0  # of the residual's norm to the update's
NEGLIGIBLE_ERROR = 0.05  # relative: below, feedback is not worth its staleness
_SERIES_KEPT = 4  # files a node, the newest


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """What a node keeps of the last payload that it sent.

    Attributes
    ----------
    number : int
        The dispatch that it answered.
    data : bytes
        The payload.
    error : NDArray, float32, shape (parameters,), or None
        What it did not say; None: next to nothing.
    """

    number: int
    data: bytes
    error: Floats | None


def carried_over(
    sent: Sent | None, layout: Layout, *, acked: int, number: int
) -> Floats | None:
    """Return what the next payload has to make up for, or None.

    Parameters
    ----------
    sent : Sent or None
        The last payload, if there was one.
    layout : Layout
        Of the model.
    acked : int
        The last payload that the server took in; 0: none.
    number : int
        Of the message that is to be answered.
    """
    if sent is None or not sent.number < number:
        return None
    missed = number - sent.number - 1
    if missed > _MOST_MISSED:
        return None
    residual = None if sent.error is None else sent.error.copy()
    if acked != sent.number:
        try:
            lost = decoder.check(sent.data, layout).vector()
        except PayloadError:  # of another model: nothing of it is worth keeping
            return None
        residual = lost if residual is None else residual + lost
    if residual is not None and missed:
        residual *= np.float32(DECAY**missed)
    return residual


def capped(residual: Floats, update_norm: float) -> Floats:
    """Return the residual, shortened where it would drown the update."""
    norm = float(np.sqrt(np.dot(residual, residual)))
    most = _LARGEST_RATIO * update_norm
    if norm <= most:
        return residual
    return np.asarray(residual * np.float32(most / norm))


class ResidualFile:
    """A node's last payload on disk: whole or not at all.

    One file a run series and node, in safetensors' format; of each node the newest few
    are kept.

    Parameters
    ----------
    folder : Path
        Made if missing.
    series, node : str
        Whose it is.
    """

    def __init__(self, folder: Path, *, series: str, node: str) -> None:
        self._folder = folder
        self._node = node
        self.path = folder / f"{node}-{series}.safetensors"

    def load(self, layout: Layout) -> Sent | None:
        """Return what was saved for this model, or None."""
        try:
            with safe_open(self.path, framework="numpy") as file:
                told = file.metadata() or {}
                if told.get("digest") != layout.digest.hex():
                    return None
                names = list(file.keys())
                error = file.get_tensor("error") if "error" in names else None
                data = file.get_tensor("payload").tobytes()
                return Sent(int(told["number"]), data, error)
        except (OSError, SafetensorError, KeyError, ValueError):
            return None  # none there, or damaged: the run goes on without

    def save(self, sent: Sent, layout: Layout) -> None:
        """Replace what was saved; a crash leaves the old file."""
        self._folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, NDArray[Any]] = {
            "payload": np.frombuffer(sent.data, np.uint8)
        }
        if sent.error is not None:
            tensors["error"] = sent.error
        told = {"number": str(sent.number), "digest": layout.digest.hex()}
        if not self.path.exists():
            self._forget_old_series()
        beside = self.path.with_suffix(f".{os.getpid()}.tmp")
        with beside.open("wb") as file:
            file.write(save(tensors, metadata=told))
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self.path)

    def _forget_old_series(self) -> None:
        with contextlib.suppress(OSError):  # another run may be tidying up as well
            files = sorted(
                self._folder.glob(f"{self._node}-*.safetensors"),
                key=lambda path: (path.stat().st_mtime_ns, path.name),
            )
            for path in files[: 1 - _SERIES_KEPT]:
                path.unlink(missing_ok=True)
