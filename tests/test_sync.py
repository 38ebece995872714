"""When to merge, synchronize and start: rules of each policy, laws of all."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_sap import strategies
from flower_sap.strategies.composition import AllOf, FirstOf
from flower_sap.strategies.interval import Interval
from flower_sap.strategies.sync import (
    AT_ONCE,
    WAIT,
    BoundedStaleness,
    Buffered,
    Deadline,
    FullyAsync,
    FullySync,
    RoundView,
    SyncPolicy,
    Tiered,
)

counts = st.integers(1, 6)
spans = st.floats(1e-3, 1e6)
intervals = st.builds(
    Interval,
    merges=st.none() | counts,
    seconds=spans,
    buffer=st.none() | counts,
    grace=st.none() | st.floats(0, 1e6),
    patience=st.none() | st.floats(0, 100),
    drop_late=st.booleans(),
) | st.builds(
    Interval, merges=st.none() | counts, buffer=counts, grace=st.floats(0, 1e6)
)
single = st.one_of(
    st.just(FullySync()),
    st.just(FullyAsync()),
    st.builds(Buffered, counts),
    intervals,
    st.builds(BoundedStaleness, st.integers(0, 5), counts),
    st.builds(Deadline, spans, st.booleans()),
)
policies = st.recursive(
    single | st.builds(Tiered, counts),
    lambda parts: st.builds(FirstOf, parts, single) | st.builds(AllOf, single, parts),
    max_leaves=4,
)


@st.composite
def arrivals(draw):
    """Draw a view and what it is after some of its messages have arrived."""
    synced_at = draw(st.floats(0, 100))
    opened_at = synced_at + draw(st.floats(0, 100))
    now = opened_at + draw(st.floats(0, 1000))
    version = draw(st.integers(0, 20))
    bases = sorted(draw(st.lists(st.integers(0, version), max_size=6)))
    arrived = draw(st.integers(0, len(bases)))
    out = sorted(draw(st.permutations(bases))[arrived:])
    view = RoundView(
        now=now, opened_at=opened_at, synced_at=synced_at, version=version,
        oldest_base_version=min(bases, default=version),
        merges_since_sync=draw(st.integers(0, 6)),
        num_buffered=draw(st.integers(0, 6)), num_in_flight=len(bases),
    )  # fmt: skip
    later = replace(
        view,
        num_buffered=view.num_buffered + arrived,
        num_in_flight=len(out),
        oldest_base_version=min(out, default=version),
    )
    return view, later


def at(now: float = 0.0, **facts) -> RoundView:
    usual = {
        "opened_at": 0.0,
        "synced_at": 0.0,
        "version": 0,
        "oldest_base_version": 0,
        "merges_since_sync": 0,
        "num_buffered": 1,
        "num_in_flight": 1,
    }
    return RoundView(now=now, **{**usual, **facts})


@given(policies, arrivals())
def test_an_arrival_never_postpones_a_merge(policy, views):
    before, after = views

    assert policy.merge_at(after) <= policy.merge_at(before)


@given(policies, arrivals())
def test_an_empty_house_may_always_start_or_merge(policy, views):
    # Otherwise a run stands still with every node idle.
    empty = replace(
        views[0], num_buffered=0, num_in_flight=0,
        oldest_base_version=views[0].version,
    )  # fmt: skip

    assert policy.may_start(empty)


@given(policies, policies, arrivals())
def test_first_of_is_the_earliest_and_all_of_the_latest(left, right, views):
    if left.num_groups() > 1 and right.num_groups() > 1:
        return
    times = [policy.merge_at(views[0]) for policy in (left, right)]

    assert FirstOf(left, right).merge_at(views[0]) == min(times)
    assert AllOf(left, right).merge_at(views[0]) == max(times)


@given(policies, arrivals())
def test_a_composition_of_a_policy_with_itself_is_that_policy(policy, views):
    if policy.num_groups() > 1:
        return
    view = views[0]
    for both in (FirstOf(policy, policy), AllOf(policy, policy)):
        assert both.merge_at(view) == policy.merge_at(view)
        assert both.may_start(view) == policy.may_start(view)
        assert both.synchronizes(view) == policy.synchronizes(view)
        assert both.ends_round(view) == policy.ends_round(view)
        assert both.work_until(view) == policy.work_until(view)
        assert both.drops_late() == policy.drops_late()
        assert both.starts_together() == policy.starts_together()


@given(policies)
def test_a_policy_prints_as_the_code_that_makes_it(policy):
    again = eval(repr(policy), vars(strategies).copy())

    assert again == policy
    assert hash(again) == hash(policy)


def test_compositions_of_another_kind_or_order_differ():
    parts = Buffered(1), Deadline(2.0)

    assert FirstOf(*parts) != AllOf(*parts)
    assert FirstOf(*parts) != FirstOf(*reversed(parts))


def test_a_composition_starts_a_node_only_when_all_agree():
    held = at(num_buffered=0, num_in_flight=1)

    assert not FirstOf(FullySync(), Deadline(5)).may_start(held)
    assert not AllOf(Buffered(1), FullySync()).may_start(held)


def test_a_composition_synchronizes_drops_and_groups_when_one_does():
    both = FirstOf(FullySync(), Deadline(5, drop_late=True))

    assert both.synchronizes(at())
    assert both.drops_late()
    assert both.starts_together()
    assert FirstOf(Tiered(3), Deadline(5)).num_groups() == 3


def test_a_composition_ends_a_round_only_when_all_see_its_end():
    within = FirstOf(Interval(merges=3, buffer=1), Deadline(5))

    assert not within.ends_round(at())
    assert within.ends_round(at(merges_since_sync=2))


def test_a_composition_wants_work_back_at_the_earliest_end():
    both = FirstOf(Interval(seconds=9), Interval(seconds=4))

    assert both.work_until(at(now=1)) == 4


def test_the_defaults_of_a_policy_are_the_mildest():
    class Mine(SyncPolicy):
        def merge_at(self, view):
            return AT_ONCE

    mine = Mine()

    assert mine.may_start(at())
    assert not mine.synchronizes(at())
    assert mine.ends_round(at())
    assert mine.work_until(at()) == math.inf
    assert not mine.drops_late()
    assert mine.num_groups() == 1
    assert not mine.starts_together()


def test_fully_sync_waits_for_the_last_and_starts_nobody_before():
    policy = FullySync()

    assert policy.merge_at(at(num_buffered=9, num_in_flight=1)) == WAIT
    assert policy.merge_at(at(num_buffered=9, num_in_flight=0)) == AT_ONCE
    assert not policy.may_start(at(num_buffered=1, num_in_flight=0))
    assert policy.may_start(at(num_buffered=0, num_in_flight=0))


@given(arrivals())
def test_fully_async_is_a_buffer_of_one(views):
    assert FullyAsync().merge_at(views[0]) == Buffered(1).merge_at(views[0])


def test_a_buffer_merges_with_its_kth_update():
    assert Buffered(3).merge_at(at(num_buffered=2)) == WAIT
    assert Buffered(3).merge_at(at(num_buffered=3)) == AT_ONCE


@given(arrivals(), counts)
def test_an_interval_without_end_is_a_buffer(views, k):
    for view in views:
        assert Interval(buffer=k).merge_at(view) == Buffered(k).merge_at(view)
        assert Interval(buffer=k).may_start(view)
        assert not Interval(buffer=k).synchronizes(view)


def test_an_interval_of_h_merges_drains_before_its_last():
    policy = Interval(merges=3, buffer=1)
    before, last = at(merges_since_sync=1), at(merges_since_sync=2)

    assert policy.merge_at(before) == AT_ONCE
    assert policy.may_start(before)
    assert not policy.synchronizes(before)
    assert policy.merge_at(last) == WAIT
    assert not policy.may_start(last)
    assert policy.synchronizes(last)
    assert policy.merge_at(replace(last, num_in_flight=0)) == AT_ONCE


def test_a_gate_that_drains_stays_closed_while_updates_wait():
    # The last has answered, but is not merged: a start now would carry the old version.
    draining = at(merges_since_sync=2, num_buffered=2, num_in_flight=0)

    assert not Interval(merges=3).may_start(draining)


def test_a_draining_interval_does_not_merge_for_a_full_buffer():
    draining = at(merges_since_sync=2, num_buffered=50)

    assert Interval(merges=3, buffer=1).merge_at(draining) == WAIT


def test_grace_counts_from_the_start_of_draining():
    by_merges = Interval(merges=2, grace=5.0)
    by_time = Interval(seconds=60.0, grace=5.0)

    assert by_merges.merge_at(at(now=9, opened_at=8.0, merges_since_sync=1)) == 13.0
    assert by_time.merge_at(at(now=9, opened_at=8.0, synced_at=7.0)) == 72.0
    assert by_time.merge_at(at(now=70, opened_at=8.0, synced_at=7.0)) == 72.0


def test_after_its_patience_the_next_full_buffer_ends_an_interval():
    draining = at(now=9, opened_at=8.0, synced_at=4.0, merges_since_sync=1)
    full = replace(draining, num_buffered=10)

    # The interval took 4 s before it drained; half of that is 2 s.
    assert Interval(merges=2, patience=0.5).merge_at(full) == 10.0
    assert Interval(merges=2, patience=0.5).merge_at(draining) == WAIT
    assert Interval(merges=2, patience=0.5, grace=1.0).merge_at(full) == 9.0
    assert Interval(merges=2, patience=0.5, grace=9.0).merge_at(draining) == 17.0
    assert Interval(patience=0.0).merge_at(draining) == WAIT


def test_dispatching_goes_on_when_patience_ends():
    policy = Interval(merges=2, patience=0.5)
    draining = at(now=9, opened_at=8.0, synced_at=4.0, merges_since_sync=1)

    assert not policy.may_start(draining)
    assert policy.opens_at(draining) == 10.0
    assert policy.may_start(replace(draining, now=10.0))
    assert policy.synchronizes(replace(draining, now=10.0))
    assert policy.opens_at(replace(draining, now=10.0)) == WAIT
    assert policy.opens_at(replace(draining, merges_since_sync=0)) == WAIT


def test_an_interval_of_seconds_ends_with_its_time():
    policy = Interval(seconds=60.0)
    early, over = at(now=59.9), at(now=60.0)

    assert policy.may_start(early)
    assert not policy.synchronizes(early)
    assert not policy.ends_round(early)
    assert not policy.may_start(over)
    assert policy.synchronizes(over)
    assert policy.ends_round(over)
    assert policy.merge_at(replace(over, num_in_flight=0)) == AT_ONCE


def test_the_earlier_of_merges_and_seconds_ends_an_interval():
    policy = Interval(merges=2, seconds=60.0, grace=1.0)

    assert policy.merge_at(at(now=70, opened_at=65.0, merges_since_sync=1)) == 61.0
    assert policy.merge_at(at(now=30, opened_at=20.0, merges_since_sync=1)) == 21.0


def test_an_interval_without_a_buffer_merges_at_its_end_alone():
    policy = Interval(seconds=60.0, buffer=None, grace=2.0)

    assert policy.merge_at(at(now=10, num_buffered=99)) == 62.0


def test_work_is_due_at_the_end_of_the_interval():
    policy = Interval(seconds=60.0)

    assert policy.work_until(at(now=10, synced_at=5.0)) == 65.0
    assert policy.work_until(at(now=70, synced_at=5.0)) == 130.0
    assert Interval(merges=2).work_until(at(now=70)) == math.inf


def test_late_updates_are_rebased_unless_told_to_drop_them():
    assert not Interval(merges=2).drops_late()
    assert Interval(merges=2, drop_late=True).drops_late()


def test_bounded_staleness_waits_for_the_node_at_its_limit():
    policy = BoundedStaleness(2, k=1)
    within = at(version=5, oldest_base_version=4)
    reached = at(version=5, oldest_base_version=3)

    assert policy.merge_at(within) == AT_ONCE
    assert policy.may_start(within)
    assert policy.merge_at(reached) == WAIT
    assert not policy.may_start(reached)


def test_nobody_in_flight_is_at_no_limit():
    alone = at(version=5, oldest_base_version=0, num_in_flight=0)

    assert BoundedStaleness(2).may_start(alone)
    assert BoundedStaleness(2).merge_at(alone) == AT_ONCE


def test_bounded_staleness_wants_its_k_updates():
    assert BoundedStaleness(2, k=3).merge_at(at(num_buffered=2)) == WAIT
    assert BoundedStaleness(2, k=3).merge_at(at(num_buffered=3)) == AT_ONCE


@given(arrivals())
def test_no_staleness_at_all_is_fully_synchronous(views):
    for view in views:
        for answer in ("merge_at", "may_start"):
            bounded = getattr(BoundedStaleness(0, k=3), answer)(view)
            assert bounded == getattr(FullySync(), answer)(view)


@given(arrivals())
def test_a_tier_is_synchronous_within_and_synchronizes_nobody_else(views):
    for view in views:
        assert Tiered(2).merge_at(view) == FullySync().merge_at(view)
        assert Tiered(2).may_start(view) == FullySync().may_start(view)
        assert not Tiered(2).synchronizes(view)
    assert Tiered(2).starts_together()


def test_a_deadline_counts_from_the_last_merge():
    assert Deadline(5.0).merge_at(at(now=9, opened_at=7.0)) == 12.0


WRONG = [
    (lambda: Buffered(0), "k must be >= 1 update, got 0"),
    (lambda: Buffered(math.nan), "k must be >= 1 update, got nan"),
    (lambda: Buffered(math.inf), "k must be a whole number of updates, got inf"),
    (lambda: Buffered(2.5), "k must be a whole number of updates, got 2.5"),
    (lambda: Interval(merges=0), "merges must be >= 1, got 0"),
    (lambda: Interval(merges=math.nan), "merges must be >= 1, got nan"),
    (lambda: Interval(merges=1.5), "merges must be a whole number, got 1.5"),
    (lambda: Interval(seconds=0), "seconds must be > 0 s and finite, got 0"),
    (lambda: Interval(seconds=-1), "seconds must be > 0 s and finite, got -1"),
    (lambda: Interval(seconds=math.inf), "seconds must be > 0 s and finite, got inf"),
    (lambda: Interval(seconds=math.nan), "seconds must be > 0 s and finite, got nan"),
    (lambda: Interval(buffer=0), "buffer must be >= 1 update, got 0"),
    (lambda: Interval(buffer=None), "needs seconds .* got merges=None, seconds=None"),
    (lambda: Interval(buffer=None, merges=2), "got merges=2, seconds=None"),
    (lambda: Interval(grace=-1.0), "grace must be >= 0 s and finite, got -1.0"),
    (lambda: Interval(grace=math.nan), "grace must be >= 0 s and finite, got nan"),
    (lambda: Interval(grace=math.inf), "grace must be >= 0 s and finite, got inf"),
    (lambda: Interval(patience=-1.0), "patience must be >= 0 and finite, got -1.0"),
    (lambda: Interval(patience=math.nan), "patience must be >= 0 and finite, got nan"),
    (lambda: BoundedStaleness(-1), "limit must be >= 0 versions, got -1"),
    (lambda: BoundedStaleness(math.nan), "limit must be >= 0 versions, got nan"),
    (lambda: BoundedStaleness(math.inf), "limit must be a whole number of versions"),
    (lambda: BoundedStaleness(1, 0), "k must be >= 1 update, got 0"),
    (lambda: Tiered(0), "num_tiers must be >= 1, got 0"),
    (lambda: Tiered(2.5), "num_tiers must be a whole number, got 2.5"),
    (lambda: Deadline(0), "seconds must be > 0 s and finite, got 0"),
    (lambda: Deadline(math.inf), "seconds must be > 0 s and finite, got inf"),
    (lambda: Deadline(math.nan), "seconds must be > 0 s and finite, got nan"),
    (lambda: FirstOf(Buffered(1)), "FirstOf needs >= 2 policies, got 1"),
    (lambda: AllOf(), "AllOf needs >= 2 policies, got 0"),
    (lambda: AllOf(Tiered(2), Tiered(3)), "only one of the policies may group"),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_a_policy_that_makes_no_sense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("wrong", [4, Deadline, "Buffered"])
def test_a_composition_refuses_what_is_no_policy(wrong):
    with pytest.raises(TypeError, match="FirstOf takes sync policies, got"):
        FirstOf(Buffered(1), wrong)


def test_one_merge_an_interval_needs_neither_buffer_nor_time():
    policy = Interval(merges=1, buffer=None)

    assert policy.merge_at(at(num_in_flight=0)) == AT_ONCE


def test_work_ends_at_the_deadline_of_a_round_that_starts_together():
    view = RoundView(
        now=5.0, opened_at=4.0, synced_at=4.0, version=0, oldest_base_version=0,
        merges_since_sync=0, num_buffered=0, num_in_flight=0,
    )  # fmt: skip

    assert FirstOf(FullySync(), Deadline(20.0)).work_until(view) == 24.0
    assert FirstOf(Buffered(3), Deadline(20.0)).work_until(view) == math.inf
    assert FirstOf(FullySync(), Deadline(0.5)).work_until(view) == math.inf
