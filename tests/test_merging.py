"""How deltas move the model: each rule against its paper's formula, by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_sap.strategies import merging
from flower_sap.strategies.merging import (
    Discounted,
    ModelMixing,
    Normalized,
    StepNormalized,
    Totals,
)

rates = st.floats(1e-6, 1e6)
rules = st.one_of(
    st.builds(Discounted, rates),
    st.builds(Normalized, rates),
    st.builds(StepNormalized, rates),
    st.builds(ModelMixing, st.floats(1e-6, 1)),
)


def step(rule, updates) -> float:
    """Return how far the rule moves a model; updates are (n, s, e, delta)."""
    totals = Totals(
        examples=sum(n for n, _, _, _ in updates),
        weighted=sum(n * s for n, s, _, _ in updates),
        steps=sum(n * e for n, _, e, _ in updates),
    )
    pull = sum(n * rule.gain(s, e) * delta for n, s, e, delta in updates)
    return rule.scale(totals) * pull / totals.examples


@given(rules)
def test_a_rule_prints_as_the_code_that_makes_it(rule):
    assert eval(repr(rule), vars(merging).copy()) == rule


@given(rules, st.floats(1e-6, 1), st.integers(1, 1000))
def test_updates_that_changed_nothing_move_nothing(rule, weight, num_steps):
    assert step(rule, [(3, weight, num_steps, 0.0), (1, 1.0, 1, 0.0)]) == 0


def test_discounted_adds_the_mean_of_discounted_deltas():
    # FedBuff: the mean is over n, so that a stale buffer takes a shorter step.
    # FLGo and Plato leave the discount out: 3.5.
    moved = step(Discounted(), [(1, 1.0, 1, 2.0), (3, 0.5, 1, 4.0)])

    assert moved == (1 * 1.0 * 2 + 3 * 0.5 * 4) / 4


def test_a_server_rate_multiplies_the_step():
    updates = [(1, 1.0, 2, 2.0), (3, 0.5, 4, 4.0)]

    for rule in (Discounted, Normalized, StepNormalized):
        assert step(rule(0.5), updates) == pytest.approx(0.5 * step(rule(), updates))


def test_normalized_shares_one_full_step_by_weight():
    moved = step(Normalized(), [(1, 1.0, 1, 2.0), (3, 0.5, 1, 4.0)])

    assert moved == pytest.approx((1 * 2 + 1.5 * 4) / 2.5)


@given(st.lists(st.tuples(st.integers(1, 99), st.floats(1e-3, 1)), min_size=1))
def test_equal_deltas_make_that_step_whatever_their_normalized_weights(facts):
    # Dividing by the buffer's size instead of the weights' sum would not.
    moved = step(Normalized(), [(n, s, 1, 5.0) for n, s in facts])

    assert moved == pytest.approx(5.0)


@pytest.mark.parametrize("weight", [0.0, math.ulp(0.0)])
def test_weights_that_vanished_move_nothing_instead_of_everything(weight):
    totals = Totals(examples=1e3, weighted=1e3 * weight, steps=1e3)

    scale = Normalized().scale(totals)

    assert 0 <= scale < math.inf


def test_a_subnormal_sum_of_weights_gives_no_infinite_scale():
    assert Normalized().scale(Totals(1e15, math.ulp(0.0), 1.0)) == 0.0


def test_an_empty_buffer_has_no_division():
    assert Normalized().scale(Totals()) == 0.0
    assert StepNormalized().scale(Totals()) == 0.0


def test_step_normalized_is_fednova():
    # d_i = delta_i / e_i; p_i = n_i / n; effective steps = sum p_i e_i.
    updates = [(1, 1.0, 2, 4.0), (3, 1.0, 10, 30.0)]
    effective = 0.25 * 2 + 0.75 * 10
    direction = 0.25 * 4 / 2 + 0.75 * 30 / 10

    assert step(StepNormalized(), updates) == pytest.approx(effective * direction)


def test_model_mixing_is_fedasync():
    model, client, weight = 2.0, 12.0, 0.5
    share = 0.6 * weight

    moved = model + step(ModelMixing(0.6), [(7, weight, 1, client - model)])

    assert ModelMixing().mixes_models
    assert moved == pytest.approx((1 - share) * model + share * client)


def test_mixing_does_not_fade_over_a_run():
    # Plato's rate after ten merges with s = 0.5 is 0.9 / 1024.
    rule = ModelMixing(0.9)

    moves = [step(rule, [(1, 0.5, 1, 1.0)]) for _ in range(10)]

    assert moves == [pytest.approx(0.45)] * 10


def test_only_mixing_measures_from_the_current_model():
    assert not Discounted().mixes_models
    assert not Normalized().mixes_models
    assert not StepNormalized().mixes_models


@pytest.mark.parametrize("rule", [Discounted, Normalized, StepNormalized])
@pytest.mark.parametrize("rate", [0, -1.0, math.nan, math.inf])
def test_a_rate_that_stands_still_or_goes_astray_is_refused(rule, rate):
    with pytest.raises(
        ValueError, match=f"server_lr must be > 0 and finite, got {rate}"
    ):
        rule(rate)


@pytest.mark.parametrize("mixing", [0, -0.1, 1.1, math.nan, math.inf])
def test_a_share_outside_0_to_1_is_refused(mixing):
    with pytest.raises(ValueError, match=rf"mixing must be in \(0, 1\], got {mixing}"):
        ModelMixing(mixing)
