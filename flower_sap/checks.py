"""Checks that several constructors share, so that they refuse in one wording."""

import math
from numbers import Integral


def check_count(name: str, value: int, *, least: int, unit: str = "") -> None:
    """Refuse what is not a whole number of at least `least`."""
    if not value >= least:  # also refuses NaN
        raise ValueError(f"{name} must be >= {least}{_after(unit)}, got {value}")
    if not isinstance(value, Integral):
        counted = f"of {unit.removesuffix('s')}s" if unit else ""
        raise ValueError(f"{name} must be a whole number{_after(counted)}, got {value}")


def check_positive(name: str, value: float, *, unit: str = "") -> None:
    """Refuse what is not above 0, or without end."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be > 0{_after(unit)} and finite, got {value}")


def check_not_negative(name: str, value: float, *, unit: str = "") -> None:
    """Refuse what is below 0, or without end."""
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be >= 0{_after(unit)} and finite, got {value}")


def _after(words: str) -> str:
    return f" {words}" if words else ""
