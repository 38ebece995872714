"""What a budget is good for, told without an update."""

from dataclasses import dataclass

from flower_sap.payload import entropy, fixed_rate, wire_format
from flower_sap.payload.beside import MOST_BESIDE
from flower_sap.payload.layout import Layout, length
from flower_sap.payload.wire_format import BLOCK8, HALF, LRDZQ, SECTION_NBYTES


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a budget is good for.

    Attributes
    ----------
    codec : int or None
        Of the stream, as in `wire_format`; None: it is not sent.
    bits_per_value : float
        Of the stream.
    relative_error : float
        Of noise, the worst there is to code; real updates have less.
    """

    codec: int | None
    bits_per_value: float
    relative_error: float


def estimate(
    layout: Layout, budget: int, *, has_entropy_coder: bool | None = None
) -> Estimate:
    r"""Return what `encode` would do with a budget, without an update.

    The error of noise is that of its rate-distortion function, :math:`2^{-R}` at
    :math:`R` bits a value, and no less than what the codec resolves.

    Parameters
    ----------
    layout : Layout
        Of the model.
    budget : int
        Bytes of the payload.
    has_entropy_coder : bool, optional
        Default: if pcodec is there.

    Examples
    --------
    >>> import numpy as np
    >>> from flower_sap.payload import ArraySpec, Layout, Manifest
    >>> model = Manifest((ArraySpec("w", (1000, 1000), np.dtype("float32")),))
    >>> estimate(Layout(model), 125_000).bits_per_value
    0.999552
    """
    if has_entropy_coder is None:
        has_entropy_coder = entropy.is_available()
    size = length(layout.stream)
    beside = sum(
        SECTION_NBYTES + fixed_rate.half_nbytes(length(places))
        for places in (layout.protected, layout.statistics)
        if places
    )
    room = budget - wire_format.HEADER_NBYTES - SECTION_NBYTES
    room -= min(beside, int(MOST_BESIDE * room))
    bits = 8 * room / size if size else 0.0
    if room <= 0 or not size:
        return Estimate(None, 0.0, 1.0)
    if bits >= 32:
        return Estimate(HALF, 32.0, 0.0)
    if bits >= 16:
        return Estimate(HALF, 16.0, 2.0**-12)
    if has_entropy_coder:
        return Estimate(LRDZQ, bits, 2.0**-bits)
    if fixed_rate.block8_nbytes(size) <= room:
        return Estimate(BLOCK8, 8 * fixed_rate.block8_nbytes(size) / size, 0.01)
    return Estimate(None, 0.0, 1.0)
