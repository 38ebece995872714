"""Budgets: what a link carries in the time there is, and what is believed of links."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_sap.payload.budget import (
    SMALLEST_BUDGET,
    BandwidthAdaptive,
    Fixed,
    Fraction,
    LinkEstimate,
    LinkView,
    budget_rule,
)

MODEL = 8_000_000


def adaptive(**settings):
    return BandwidthAdaptive(**{"most": 1.0, "hysteresis": 0.0, **settings})


def test_a_budget_is_what_the_link_carries_before_the_deadline():
    link = LinkView(MODEL, rate=100_000.0, compute_seconds=4.0, available=10.0)

    assert adaptive(use=0.5).budget(link) == 300_000


def test_without_a_deadline_a_transfer_takes_a_share_of_the_rest_of_the_trip():
    link = LinkView(MODEL, rate=100_000.0, compute_seconds=4.0)

    assert adaptive(use=0.5, beside=0.25).budget(link) == 50_000


def test_a_slow_device_may_send_past_the_deadline_it_has_missed_anyway():
    link = LinkView(MODEL, rate=100_000.0, compute_seconds=20.0, available=10.0)

    assert adaptive(use=1.0, beside=0.25).budget(link) == 500_000


def test_where_all_start_together_the_usual_trip_is_the_deadline():
    link = LinkView(MODEL, rate=100_000.0, compute_seconds=4.0, usual_seconds=10.0)

    assert adaptive(use=0.5).budget(link) == 300_000


def test_a_budget_stays_while_the_link_changes_little():
    def asked(rate, last):
        link = LinkView(
            MODEL, rate=rate, compute_seconds=0.0, available=10.0, last_budget=last
        )
        return adaptive(use=1.0, hysteresis=0.1).budget(link)

    assert asked(10_500.0, 100_000) == 100_000
    assert asked(11_500.0, 100_000) == 115_000
    assert asked(8_000.0, 100_000) == 80_000


def test_a_node_that_was_not_seen_is_asked_for_the_first_share():
    assert adaptive(first=1 / 64).budget(LinkView(MODEL)) == MODEL // 64


rates = st.none() | st.floats(1e-6, math.inf)
seconds = st.floats(0, 1e6) | st.just(math.inf)


@given(
    st.integers(1, 10**10), rates, st.floats(0, 1e6), seconds, st.none() | seconds,
    st.none() | st.integers(SMALLEST_BUDGET, 10**9),
)  # fmt: skip
def test_a_budget_is_always_within_its_bounds(
    model, rate, computing, available, usual, last
):
    rule = BandwidthAdaptive(hysteresis=0.0)
    link = LinkView(model, rate, computing, available, usual, last)

    found = rule.budget(link)

    assert type(found) is int
    least = max(SMALLEST_BUDGET, math.floor(rule.least * model))
    assert least <= found <= max(least, math.ceil(rule.most * model))


@given(st.floats(1.0, 1e9), st.floats(1.0, 10.0))
def test_a_faster_link_is_never_granted_less(rate, factor):
    def asked(rate):
        return adaptive().budget(LinkView(MODEL, rate, 2.0, 9.0))

    assert asked(rate) <= asked(rate * factor)


def test_fixed_and_fractional_budgets_are_what_they_say():
    assert Fixed(5000).budget(LinkView(MODEL)) == 5000
    assert Fraction(1 / 32).budget(LinkView(MODEL)) == 250_000
    assert Fraction(1e-9).budget(LinkView(MODEL)) == SMALLEST_BUDGET


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fixed(100), r"nbytes must be >= 2048 bytes, got 100"),
        (lambda: Fixed(3000.5), "nbytes must be a whole number"),
        (lambda: Fraction(0), "share must be > 0"),
        (lambda: Fraction(math.nan), "share must be > 0"),
        (lambda: BandwidthAdaptive(use=0), r"use must be in \(0, 1\]"),
        (lambda: BandwidthAdaptive(least=0.5), "needs 0 < least <= first <= most"),
        (lambda: BandwidthAdaptive(beside=-1), "beside must be >= 0"),
        (lambda: BandwidthAdaptive(hysteresis=1), r"hysteresis must be in \[0, 1\)"),
    ],
)
def test_odd_rules_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_slow_down_is_believed_at_once_and_a_speed_up_by_halves():
    link = LinkEstimate()
    assert link.uplink is None

    link.observe(1000, 1.0)
    assert link.uplink == 1000.0
    link.observe(1000, 10.0)
    assert link.uplink == 100.0
    for _ in range(3):
        link.observe(1000, 1.0)
    assert link.uplink == pytest.approx(1000 / (1 + 9 / 8))


def test_odd_observations_change_nothing():
    link = LinkEstimate()
    for nbytes, took in ((0, 1.0), (10, -1.0), (10, math.inf), (10, math.nan)):
        link.observe(nbytes, took)

    assert link.uplink is None


def test_a_link_without_transfer_times_is_infinitely_fast():
    link = LinkEstimate()
    link.observe(1000, 0.0)

    assert link.uplink == math.inf
    assert adaptive().budget(LinkView(MODEL, link.uplink, 1.0, 2.0)) == MODEL


def test_what_a_node_measured_itself_is_taken():
    link = LinkEstimate()
    link.observe(1000, 10.0)
    link.report(5000.0)

    assert link.uplink == pytest.approx(5000.0)


def test_a_rule_is_read_from_a_word():
    assert budget_rule("adaptive") == BandwidthAdaptive()
    assert budget_rule("1/32") == Fraction(1 / 32)
    assert budget_rule("0.5") == Fraction(0.5)
    assert budget_rule("5000B") == Fixed(5000)
    for word in ("most", "1/0", "B", "", "12.5B"):
        with pytest.raises(ValueError, match="choose adaptive, a share such as 1/32"):
            budget_rule(word)
