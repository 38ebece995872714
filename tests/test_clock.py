"""The wall clock, with time itself replaced."""

import math

import pytest

from flower_sap import clock
from flower_sap.clock import WallClock


class Wall:
    """A wall whose time passes by sleeping alone."""

    def __init__(self) -> None:
        self.time = 1000.0

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.time += seconds


@pytest.fixture
def wall(monkeypatch) -> Wall:
    replaced = Wall()
    monkeypatch.setattr(clock, "time", replaced)
    return replaced


def test_a_clock_begins_at_zero(wall):
    assert WallClock().now() == 0.0


@pytest.mark.parametrize(
    ("at", "slept"), [(0.05, 0.05), (7.0, 0.25), (math.inf, 0.25), (-math.inf, 0.0)]
)
def test_a_wait_ends_at_its_time_or_at_the_next_look(wall, at, slept):
    ours = WallClock(poll_seconds=0.25)

    ours.wait_until(at)

    assert ours.now() == pytest.approx(slept)


def test_readings_of_real_time_never_go_back():
    for read in (clock.wall_seconds, WallClock().now):
        assert read() <= read()


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf])
def test_a_clock_that_never_looks_is_refused(seconds):
    with pytest.raises(ValueError, match=f"poll_seconds must be > 0 s, got {seconds}"):
        WallClock(seconds)
