"""Where each array of the model stands in a payload, and how it is treated there.

The float parameters are laid end to end into one vector, so that one quantizer step
serves all of them; that is how bits go to where the energy is. Nothing of the layout
travels: each side derives it from its own manifest, and eight bytes of digest are
compared.
"""

import fnmatch
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from flower_sap.errors import PayloadError
from flower_sap.payload.dense import Arrays, ArraySpec, Manifest

_STATISTICS = ("running_mean", "running_var")
SMALLEST_MATRIX = 16_384  # elements; a smaller one is not worth a factorization


class Kind(Enum):
    """How an array is aggregated."""

    PARAMETER = "parameter"
    STATISTIC = "statistic"
    COUNTER = "counter"


def kind_of(spec: ArraySpec) -> Kind:
    """Return the kind of an array, by dtype and by torch's names for statistics."""
    if spec.dtype.kind in "iub":
        return Kind.COUNTER
    if spec.name.rpartition(".")[2] in _STATISTICS:
        return Kind.STATISTIC
    return Kind.PARAMETER


@dataclass(frozen=True, slots=True)
class Treatment:
    """What is sent otherwise than in the common stream, by name.

    Parameters
    ----------
    protect : tuple of str
        Shell patterns (``"head.*"``) of float arrays that are sent in 16 bits a value
        whatever the budget, as long as it allows that.
    local_keys : tuple of str
        Shell patterns of arrays that never leave the client: a personalized head.
    statistics : str
        ``"sent"``, or ``"local"``: running means and variances stay on the client
        (FedBN, Li et al. 2021, arXiv:2102.07623).

    Examples
    --------
    >>> Treatment(protect=("head.*",)).protects("head.bias")
    True
    """

    protect: tuple[str, ...] = ()
    local_keys: tuple[str, ...] = ()
    statistics: str = "sent"

    def __post_init__(self) -> None:
        """Refuse what is no tuple of patterns, and another word for statistics."""
        for name in ("protect", "local_keys"):
            patterns = getattr(self, name)
            if isinstance(patterns, str) or not all(
                isinstance(pattern, str) for pattern in patterns
            ):
                raise TypeError(f"{name} must be a tuple of patterns, got {patterns!r}")
        if self.statistics not in ("sent", "local"):
            raise ValueError(
                f"statistics must be 'sent' or 'local', got {self.statistics!r}"
            )

    def protects(self, name: str) -> bool:
        """Return whether an array of this name is protected."""
        return _matches(name, self.protect)

    def keeps_local(self, spec: ArraySpec) -> bool:
        """Return whether an array never leaves the client."""
        if self.statistics == "local" and kind_of(spec) is Kind.STATISTIC:
            return True
        return _matches(spec.name, self.local_keys)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True, slots=True)
class Place:
    """One array's elements ``[start, stop)`` in the vector of its section."""

    index: int
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A part of the stream that is factorized, as ``rows`` times ``columns``."""

    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        """Return the end of its elements in the stream."""
        return self.start + self.rows * self.columns


@dataclass(frozen=True)
class Layout:
    """The sections of a payload for one model.

    Parameters
    ----------
    manifest : Manifest
        The model.
    treatment : Treatment
        What leaves the common stream.

    Attributes
    ----------
    stream, protected, statistics : tuple of Place
        Float arrays in manifest order, each section laid end to end.
    counters : tuple of int
        Indices of integer and boolean arrays.
    local : tuple of int
        Indices of arrays that are not sent.
    matrices : tuple of Matrix
        What is large enough in the stream to be factorized.

    Raises
    ------
    PayloadError
        If the model has arrays that no codec takes (complex numbers).
    """

    manifest: Manifest
    treatment: Treatment = field(default_factory=Treatment)

    def __post_init__(self) -> None:
        """Refuse what no codec takes."""
        for spec in self.manifest.arrays:
            if spec.dtype.kind not in "fiub":
                raise PayloadError(f"array {spec} cannot be coded: no real number")

    @cached_property
    def local(self) -> tuple[int, ...]:
        """Return the indices of the arrays that are not sent."""
        return tuple(
            index
            for index, spec in enumerate(self.manifest.arrays)
            if self.treatment.keeps_local(spec)
        )

    @cached_property
    def counters(self) -> tuple[int, ...]:
        """Return the indices of integer and boolean arrays."""
        return tuple(
            index
            for index, spec in enumerate(self.manifest.arrays)
            if kind_of(spec) is Kind.COUNTER and index not in self.local
        )

    @cached_property
    def stream(self) -> tuple[Place, ...]:
        """Return the parameters that share one quantizer."""
        return self._lay(Kind.PARAMETER, protected=False)

    @cached_property
    def protected(self) -> tuple[Place, ...]:
        """Return the parameters that are sent in 16 bits."""
        return self._lay(Kind.PARAMETER, protected=True)

    @cached_property
    def statistics(self) -> tuple[Place, ...]:
        """Return the running means and variances."""
        return self._lay(Kind.STATISTIC, protected=False)

    def _lay(self, kind: Kind, *, protected: bool) -> tuple[Place, ...]:
        places, start = [], 0
        for index, spec in enumerate(self.manifest.arrays):
            if kind_of(spec) is not kind or index in self.local:
                continue
            if kind is Kind.PARAMETER and protected != self.treatment.protects(
                spec.name
            ):
                continue
            stop = start + math.prod(spec.shape)
            places.append(Place(index, start, stop, spec.shape))
            start = stop
        return tuple(places)

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """Return the parts of the stream that are factorized: (out, the rest)."""
        return tuple(
            Matrix(place.start, place.shape[0], math.prod(place.shape[1:]))
            for place in self.stream
            if len(place.shape) >= 2
            and place.stop - place.start >= SMALLEST_MATRIX
            and min(place.shape[0], math.prod(place.shape[1:])) >= 8
        )

    @property
    def num_stream(self) -> int:
        """Return the elements of the stream."""
        return length(self.stream)

    @cached_property
    def digest(self) -> bytes:
        """Return 8 bytes that differ where the sections do."""
        local, protected = set(self.local), {place.index for place in self.protected}
        described = [
            (
                spec.name,
                spec.shape,
                spec.dtype.str,
                "local" if index in local else kind_of(spec).value,
                index in protected,
            )
            for index, spec in enumerate(self.manifest.arrays)
        ]
        return hashlib.blake2b(repr(described).encode(), digest_size=8).digest()

    def sent(self, arrays: Arrays) -> Arrays:
        """Return those of a model's arrays that are sent."""
        local = set(self.local)
        return [array for index, array in enumerate(arrays) if index not in local]


def length(places: Sequence[Place]) -> int:
    """Return the elements of a section."""
    return places[-1].stop if places else 0
