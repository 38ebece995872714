"""How much an update counts: published values, one law for all, and refusals."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_sap.strategies import staleness
from flower_sap.strategies.staleness import (
    Constant,
    Contribution,
    Equal,
    Exponential,
    Fidelity,
    Hinge,
    Participation,
    Polynomial,
    Progress,
)

STALENESS = (0, 1, 2, 3, 5, 8, 10, 15)

not_negative = st.floats(0, 1e308)
weights = st.one_of(
    st.just(Constant()),
    st.builds(Polynomial, not_negative),
    st.builds(Hinge, not_negative, st.integers(0, 10**6)),
    st.builds(Exponential, st.floats(0, 1, exclude_min=True)),
)
contribution_weights = st.one_of(
    st.just(Equal()),
    st.builds(Progress, not_negative, st.floats(1, 1e300)),
    st.builds(Participation, not_negative, st.floats(1, 1e300)),
    st.builds(Fidelity, not_negative, st.floats(1e-9, 1)),
)
contributions = st.builds(
    Contribution,
    staleness=st.integers(0, 100),
    num_examples=st.floats(1, 1e15),
    num_steps=st.none() | st.integers(1, 10**12),
    mean_steps=st.floats(1, 1e12),
    node_updates=st.integers(1, 10**6),
    mean_updates=st.floats(1e-6, 1e6),
)


def contribution(**facts) -> Contribution:
    usual = {
        "staleness": 0,
        "num_examples": 1.0,
        "num_steps": 10,
        "mean_steps": 10.0,
        "node_updates": 4,
        "mean_updates": 4.0,
    }
    return Contribution(**{**usual, **facts})


@pytest.mark.parametrize(
    ("weight", "golden"),
    [
        (Constant(), [1, 1, 1, 1, 1, 1, 1, 1]),
        (Polynomial(0.5), [1, 0.7071, 0.5774, 0.5, 0.4082, 0.3333, 0.3015, 0.25]),
        (Polynomial(1), [1, 0.5, 0.3333, 0.25, 0.1667, 0.1111, 0.0909, 0.0625]),
        (Hinge(10, 4), [1, 1, 1, 1, 0.0909, 0.0244, 0.0164, 0.009]),
        (Hinge(10, 6), [1, 1, 1, 1, 1, 0.0476, 0.0244, 0.011]),
        (Exponential(0.5), [1, 0.5, 0.25, 0.125, 0.0312, 0.0039, 0.001, 0]),
    ],
)
def test_weights_have_their_published_values(weight, golden):
    assert [round(weight(tau), 4) for tau in STALENESS] == golden


@given(weights, st.integers(0, 10**9))
def test_a_fresh_update_counts_fully_and_age_never_raises_a_weight(weight, tau):
    assert weight(0) == 1.0
    assert 0 < weight(tau + 1) <= weight(tau) <= 1


@given(weights, st.integers(0, 100))
def test_a_weight_depends_on_staleness_alone_and_does_not_accumulate(weight, tau):
    # Plato multiplies its mixing rate by each discount, so that it fades over a run.
    first = weight(tau)

    assert [weight(tau) for _ in range(10)] == [first] * 10


def test_a_stale_update_is_not_weighted_up():
    # APPFL raises (1 + tau) to +a: 3 instead of 1/3 at a staleness of 8.
    assert Polynomial(0.5)(8) == pytest.approx(1 / 3)


def test_the_hinge_continues_at_its_knee():
    # FLGo leaves the + 1 out: 0.1 instead of 1/11, and a division by 0 at the knee.
    assert Hinge(10, 4)(5) == pytest.approx(1 / 11)
    assert Hinge(0.0, 4)(99) == 1.0


@given(weights | contribution_weights)
def test_a_weight_prints_as_the_code_that_makes_it(weight):
    assert eval(repr(weight), vars(staleness).copy()) == weight


@given(contribution_weights, contributions)
def test_a_contribution_weight_is_finite_and_never_negative(weight, facts):
    assert 0 <= weight(facts) < math.inf


def test_equal_looks_at_nothing():
    assert Equal()(contribution(num_steps=1000, node_updates=1)) == 1.0


def test_progress_counts_work_in_proportion():
    assert Progress(1)(contribution(num_steps=5)) == 0.5
    assert Progress(0.5)(contribution(num_steps=40)) == 2.0
    assert Progress(0)(contribution(num_steps=40)) == 1.0


def test_progress_counts_unknown_work_as_the_mean():
    assert Progress(1)(contribution(num_steps=None)) == 1.0


def test_progress_believes_a_claim_up_to_its_limit():
    assert Progress(1, limit=5)(contribution(num_steps=10**12)) == 5


def test_a_rarely_heard_node_counts_more_and_a_talkative_one_less():
    assert Participation(1)(contribution(node_updates=2)) == 2.0
    assert Participation(1)(contribution(node_updates=8)) == 0.5
    assert Participation(0.5)(contribution(node_updates=1)) == 2.0


def test_participation_stays_within_its_limit():
    assert Participation(1, 4)(contribution(node_updates=1, mean_updates=99.0)) == 4
    assert Participation(1, 4)(contribution(node_updates=99, mean_updates=1.0)) == 0.25
    assert Participation(0, 4)(contribution(node_updates=99)) == 1


def test_with_full_power_each_node_has_the_same_total_influence():
    influences = [
        updates * Participation(1, 100)(contribution(node_updates=updates))
        for updates in (1, 4, 16)
    ]

    assert influences == [4.0, 4.0, 4.0]


WRONG = [
    (lambda: Polynomial(-1), "exponent must be >= 0 and finite, got -1"),
    (lambda: Polynomial(math.nan), "exponent must be >= 0 and finite, got nan"),
    (lambda: Polynomial(math.inf), "exponent must be >= 0 and finite, got inf"),
    (lambda: Hinge(-1), "slope must be >= 0 per version and finite, got -1"),
    (lambda: Hinge(math.nan), "slope must be >= 0 per version and finite, got nan"),
    (lambda: Hinge(math.inf), "slope must be >= 0 per version and finite, got inf"),
    (lambda: Hinge(1, -1), "free must be >= 0 versions, got -1"),
    (lambda: Hinge(1, math.nan), "free must be >= 0 versions, got nan"),
    (lambda: Hinge(1, math.inf), "free must be a whole number of versions, got inf"),
    (lambda: Hinge(1, 2.5), "free must be a whole number of versions, got 2.5"),
    (lambda: Exponential(0), r"decay must be in \(0, 1\], got 0"),
    (lambda: Exponential(1.1), r"decay must be in \(0, 1\], got 1.1"),
    (lambda: Exponential(math.nan), r"decay must be in \(0, 1\], got nan"),
    (lambda: Progress(-1), "power must be >= 0 and finite, got -1"),
    (lambda: Progress(1, 0.5), "limit must be >= 1 and finite, got 0.5"),
    (lambda: Participation(math.nan), "power must be >= 0 and finite, got nan"),
    (lambda: Fidelity(-1), "power must be >= 0 and finite, got -1"),
    (lambda: Fidelity(1, 0), r"least must be in \(0, 1\], got 0"),
    (lambda: Participation(1, 0), "limit must be >= 1 and finite, got 0"),
    (lambda: Participation(1, math.inf), "limit must be >= 1 and finite, got inf"),
    (lambda: Participation(1, math.nan), "limit must be >= 1 and finite, got nan"),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_a_weight_that_makes_no_sense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_payload_counts_by_the_share_of_its_energy_that_arrived():
    weight = Fidelity(1, least=0.25)

    assert weight(contribution()) == 1.0
    assert weight(contribution(relative_error=0.6)) == pytest.approx(0.64)
    assert weight(contribution(relative_error=7.0)) == 0.25
