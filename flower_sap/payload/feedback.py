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

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_sap.errors import PayloadError
from flower_sap.payload import decoder
from flower_sap.payload.deadzone import Floats
from flower_sap.payload.kept import KeptFile
from flower_sap.payload.layout import Layout

DECAY = 0.8  # a message missed
_MOST_MISSED = 10
_LARGEST_RATIO = 4.0  # of the residual's norm to the update's
NEGLIGIBLE_ERROR = 0.05  # relative: below, feedback is not worth its staleness


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


def largest_scale(residual_energy: float, update_energy: float) -> float:
    """Return the factor, at most 1, with which a residual does not drown an update."""
    most = _LARGEST_RATIO**2 * update_energy
    if residual_energy <= most:
        return 1.0
    return math.sqrt(most / residual_energy)


def load_sent(file: KeptFile, layout: Layout) -> Sent | None:
    """Return the last payload that a node kept of this model, or None."""
    kept = file.load()
    if kept is None or kept[1].get("digest") != layout.digest.hex():
        return None
    arrays, words = kept
    try:
        data = arrays["payload"].tobytes()
        return Sent(int(words["number"]), data, arrays.get("error"))
    except (KeyError, ValueError):
        return None


def save_sent(file: KeptFile, sent: Sent, layout: Layout) -> None:
    """Keep a payload that is about to be sent, and what it does not say."""
    arrays: dict[str, NDArray[Any]] = {"payload": np.frombuffer(sent.data, np.uint8)}
    if sent.error is not None:
        arrays["error"] = sent.error
    file.save(arrays, {"number": str(sent.number), "digest": layout.digest.hex()})
