"""What an exception says, and that code need not parse it."""

import pytest

from flower_sap import errors
from flower_sap.errors import (
    AllClientsFailedError,
    NoNodesError,
    PayloadError,
    SapError,
    StalledError,
    UpdateRejected,
)
from flower_sap.strategies.sync import Buffered


def test_everything_raised_for_a_run_can_be_caught_as_one_class():
    kinds = [k for k in vars(errors).values() if isinstance(k, type)]

    raised = [k for k in kinds if issubclass(k, Exception)]

    assert len(raised) == 9
    assert all(issubclass(kind, SapError) for kind in raised)
    assert issubclass(PayloadError, UpdateRejected)


def test_the_drawn_tree_names_every_exception():
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, Exception):
            assert name in errors.__doc__


def test_a_stalled_run_says_who_waited_for_what():
    error = StalledError(
        policy=Buffered(3), num_buffered=2, num_in_flight=0, waited=60.0
    )

    assert str(error) == (
        "no new model version for 60.0 s: Buffered(k=3) is not met by 2 buffered "
        "updates (0 messages in flight). Connect more nodes, ask for fewer updates, "
        "raise `timeout`, or bound the wait with FirstOf(..., Deadline(seconds))."
    )
    assert (error.policy, error.num_buffered) == (Buffered(3), 2)
    assert (error.num_in_flight, error.waited) == (0, 60.0)


def test_a_run_without_nodes_says_how_many_it_needs():
    error = NoNodesError(found=1, needed=4, waited=9.96)

    assert str(error).startswith(
        "1 nodes connected after 10.0 s, but the run needs 4. Start SuperNodes"
    )
    assert (error.found, error.needed, error.waited) == (1, 4, 9.96)


def test_a_run_of_failures_shows_the_last_line_of_three_reasons():
    reasons = {
        1: "Traceback:\n  line\nValueError: bad\n", 2: "x" * 999, 3: "gone", 4: "never"
    }  # fmt: skip

    error = AllClientsFailedError(failures=5, reasons=reasons)

    assert str(error).startswith(
        f"all 4 connected nodes failed 5 times in a row (node 1: ValueError: bad; "
        f"node 2: {'x' * 200}; node 3: gone). "
    )
    assert (error.failures, error.reasons) == (5, reasons)


@pytest.mark.parametrize("reason", ["", " ", "\n", "\n \t\n"])
def test_a_failure_without_words_is_still_told(reason):
    error = AllClientsFailedError(failures=5, reasons={1: reason})

    assert "(node 1: ?)" in str(error)


def test_a_rejection_carries_its_reason():
    assert PayloadError("3 of 4").reason == str(PayloadError("3 of 4")) == "3 of 4"
