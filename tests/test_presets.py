"""The named algorithms: each is the composition that its paper describes."""

import pytest

from flower_sap.strategies.merging import Discounted, ModelMixing
from flower_sap.strategies.presets import fedasync, fedbuff, gsyn, heter_train, ssp
from flower_sap.strategies.staleness import Constant, Equal, Polynomial
from flower_sap.strategies.sync import BoundedStaleness, Buffered, FullyAsync, Tiered
from flower_sap.strategies.work import FixedWork


@pytest.mark.parametrize(
    ("strategy", "sync", "staleness", "merge"),
    [
        (fedasync(), FullyAsync(), Polynomial(0.5), ModelMixing(0.6)),
        (fedbuff(k=4), Buffered(4), Polynomial(0.5), Discounted(1.0)),
        (ssp(limit=2), BoundedStaleness(2, 1), Constant(), Discounted(1.0)),
        (gsyn(num_tiers=2), Tiered(2), Polynomial(0.5), Discounted(1.0)),
    ],
)
def test_a_named_algorithm_is_the_composition_of_its_paper(
    strategy, sync, staleness, merge
):
    parts = strategy.parts

    assert (parts.sync, parts.staleness, parts.merge) == (sync, staleness, merge)
    assert (parts.contribution, parts.work) == (Equal(), FixedWork())


def test_the_knobs_of_a_named_algorithm_reach_its_parts():
    mixed = fedasync(mixing=0.9, exponent=1.0).parts
    buffered = fedbuff(server_lr=0.5, local_steps=3).parts

    assert (mixed.merge, mixed.staleness) == (ModelMixing(0.9), Polynomial(1.0))
    assert (buffered.merge, buffered.work) == (Discounted(0.5), FixedWork(3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fedasync(mixing=0), r"mixing must be in \(0, 1\], got 0"),
        (lambda: fedbuff(k=0), "k must be >= 1 update, got 0"),
        (lambda: fedbuff(server_lr=-1), "server_lr must be > 0 and finite, got -1"),
        (lambda: ssp(limit=-1), "limit must be >= 0 versions, got -1"),
        (lambda: gsyn(num_tiers=0), "num_tiers must be >= 1, got 0"),
    ],
)
def test_a_knob_out_of_range_is_refused_where_it_is_turned(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_sap_discounts_by_version():
    assert heter_train().parts.staleness(3) < 1
