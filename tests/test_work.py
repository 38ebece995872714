"""How many steps a node is asked for, and what is learned of its pace."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_sap.strategies import work
from flower_sap.strategies.state import NodeState, ServerState, Trip
from flower_sap.strategies.updates import WorkReport
from flower_sap.strategies.work import (
    BalancedWork,
    FillInterval,
    FixedWork,
    NodePace,
    dlb_shares,
    steps_within,
)

UNSEEN = NodePace(None, 0.0, 0.0)
paces = st.builds(
    NodePace,
    st.none() | st.floats(1e-9, 1e9),
    st.floats(0, 1e9),
    st.floats(-1e-6, 1e9),
)
bounds = st.tuples(*[st.integers(1, 500)] * 3).map(sorted)
bounded_rules = st.one_of(
    bounds.map(lambda b: BalancedWork(b[1], b[0], b[2])),
    bounds.map(lambda b: FillInterval(b[1], b[0], b[2])),
)


@given(bounded_rules, paces, st.floats(-1e9, math.inf))
def test_the_steps_asked_for_stay_within_their_bounds(rule, pace, available):
    assert rule.least <= rule.local_steps(pace, available) <= rule.most


@given(bounded_rules | st.builds(FixedWork, st.none() | st.integers(1, 99)))
def test_a_rule_prints_as_the_code_that_makes_it(rule):
    assert eval(repr(rule), vars(work).copy()) == rule


def test_fixed_work_asks_the_same_of_all():
    assert FixedWork(7).local_steps(UNSEEN, 0.0) == 7
    assert FixedWork().local_steps(UNSEEN, 0.0) is None


def test_balanced_work_is_in_proportion_to_speed():
    rule = BalancedWork(12)

    assert rule.local_steps(NodePace(0.5, 0.0, 1.0), math.inf) == 24
    assert rule.local_steps(NodePace(4.0, 0.0, 1.0), math.inf) == 3
    assert rule.local_steps(UNSEEN, math.inf) == 12


def test_balanced_work_fits_the_time_that_is_left():
    assert BalancedWork(12).local_steps(NodePace(0.5, 2.0, 1.0), 5.0) == 6


def test_a_full_interval_takes_as_many_steps_as_fit():
    rule = FillInterval(4, 2, 50)

    assert rule.local_steps(NodePace(0.5, 2.0, 1.0), 10.0) == 16
    assert rule.local_steps(NodePace(0.5, 2.0, 1.0), 1.0) == 2
    assert rule.local_steps(NodePace(0.5, 2.0, 1.0), math.inf) == 50
    assert rule.local_steps(UNSEEN, 10.0) == 4


def test_the_steps_that_fit_are_never_negative_and_never_without_end():
    assert steps_within(NodePace(1.0, 3.0, 1.0), -math.inf) == 0
    assert steps_within(NodePace(1.0, 3.0, 1.0), 2.0) == 0
    assert steps_within(NodePace(1e-300, 0.0, 1.0), 1e300) == 1 << 30
    assert steps_within(UNSEEN, 1.0) == 1 << 30


def test_dlb_shares_have_their_published_values():
    shares = dlb_shares([0.25] * 4, [1, 1, 2, 4])

    assert [round(p, 4) for p in shares] == [0.3636, 0.3636, 0.1818, 0.0909]


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=9))
def test_dlb_is_done_after_one_step_when_time_is_linear_in_load(seconds_per_share):
    equal = [1 / len(seconds_per_share)] * len(seconds_per_share)
    first = dlb_shares(
        equal, [p * t for p, t in zip(equal, seconds_per_share, strict=True)]
    )

    second = dlb_shares(
        first, [p * t for p, t in zip(first, seconds_per_share, strict=True)]
    )

    assert sum(first) == pytest.approx(1)
    assert second == pytest.approx(first)


@pytest.mark.parametrize(
    ("shares", "seconds", "message"),
    [
        ([0.5], [1, 2], "got 1 shares and 2 times"),
        ([0.5, 0.5], [1, 0], r"seconds must be > 0 s and finite, got \[1, 0\]"),
        ([0.5, 0.5], [1, math.nan], "seconds must be > 0 s and finite"),
        ([0.5, 0.5], [1, math.inf], "seconds must be > 0 s and finite"),
        ([0, 0], [1, 1], r"shares must be >= 0 with a sum > 0, got \[0, 0\]"),
        ([-1, 2], [1, 1], r"shares must be >= 0 with a sum > 0, got \[-1, 2\]"),
        ([math.nan, 1], [1, 1], "shares must be >= 0 with a sum > 0"),
        ([], [], r"shares must be >= 0 with a sum > 0, got \[\]"),
    ],
)
def test_shares_that_make_no_sense_are_refused(shares, seconds, message):
    with pytest.raises(ValueError, match=message):
        dlb_shares(shares, seconds)


WRONG = [
    (lambda: FixedWork(0), "steps must be >= 1, got 0"),
    (lambda: FixedWork(math.nan), "steps must be >= 1, got nan"),
    (lambda: FixedWork(2.5), "steps must be a whole number, got 2.5"),
    (lambda: FixedWork(math.inf), "steps must be a whole number, got inf"),
    (lambda: BalancedWork(0), "got least=1, steps=0, most=200"),
    (lambda: BalancedWork(5, 6), "got least=6, steps=5, most=200"),
    (lambda: BalancedWork(most=math.inf), "most must be a whole number, got inf"),
    (lambda: FillInterval(math.nan), "got least=1, first=nan, most=200"),
    (lambda: FillInterval(300), "got least=1, first=300, most=200"),
    (lambda: FillInterval(2.5), "first must be a whole number, got 2.5"),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_work_that_makes_no_sense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def trip(**facts) -> Trip:
    return Trip(
        **{
            "message_id": "m",
            "node_id": 1,
            "group": 0,
            "purpose": "train",
            "base_version": 0,
            "sent_at": 0.0,
            "expires_at": 99.0,
            **facts,
        }
    )


def test_the_pace_is_learned_from_the_report():
    node = NodeState(1)

    node.observe(trip(), WorkReport(compute_seconds=4.0, num_steps=8), now=10.0)

    assert node.seconds_per_step == 0.5
    assert node.overhead_seconds == 6.0
    assert node.trip_seconds == 10.0


def test_a_trip_without_a_report_counts_as_computing():
    node = NodeState(1)

    node.observe(trip(local_steps=5), WorkReport(), now=10.0)

    assert (node.seconds_per_step, node.overhead_seconds) == (2.0, 0.0)


def test_nobody_computes_longer_than_its_trip_took():
    node = NodeState(1)

    node.observe(trip(), WorkReport(compute_seconds=1e9, num_steps=1), now=10.0)

    assert node.seconds_per_step == 10.0


@given(
    st.lists(
        st.tuples(
            st.floats(0, 1e9),
            st.builds(
                WorkReport,
                compute_seconds=st.none() | st.floats(5e-324, 1e308),
                num_steps=st.none() | st.integers(1, 10**12),
            ),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_no_claim_and_no_instant_trip_breaks_the_pace(answers):
    # A time of 5e-324 s over 2 steps is 0 s a step, and its speed a division by 0.
    state = ServerState([], nodes={1: NodeState(1), 2: NodeState(2)})
    for number, (now, report) in enumerate(answers):
        state.observe(trip(node_id=1 + number % 2), report, now)

        pace = state.pace(state.nodes[1])

        assert pace.seconds_per_step > 0
        assert math.isfinite(pace.mean_steps_per_second)
        assert 1 <= BalancedWork().local_steps(pace, math.inf) <= 200


def test_the_mean_speed_is_over_the_nodes_seen():
    state = ServerState([], nodes={n: NodeState(n) for n in (1, 2, 3)})
    state.observe(trip(node_id=1), WorkReport(2.0, num_steps=1), 2.0)
    state.observe(trip(node_id=2), WorkReport(4.0, num_steps=1), 4.0)

    assert state.pace(state.nodes[3]) == NodePace(None, 0.0, (0.5 + 0.25) / 2)
