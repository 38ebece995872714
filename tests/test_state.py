"""The state of a run: which versions are kept, and until when."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flower_sap.payload.dense import Manifest
from flower_sap.strategies.aggregation import KeepAll
from flower_sap.strategies.state import Buffer, NodeState, ServerState, Trip


def new_state(num_nodes: int = 9) -> ServerState:
    return ServerState(
        [np.array(0)],
        nodes={n: NodeState(n) for n in range(num_nodes)},
        buffers=[Buffer(KeepAll([], Manifest(())))],
    )


def leave(state: ServerState, node_id: int, purpose: str = "train") -> Trip:
    trip = Trip(f"m{node_id}", node_id, 0, purpose, state.version, 0.0, 9.0)
    state.take_off(trip)
    return trip


def merge(state: ServerState) -> None:
    state.version += 1
    state.arrays = [np.array(state.version)]


def test_an_update_meets_the_model_it_was_trained_from():
    state = new_state()
    trip = leave(state, 1)
    merge(state)

    (base,) = state.land(trip)

    assert base == 0
    assert not state.nodes[1].is_busy


def test_a_version_is_forgotten_with_its_last_message():
    state = new_state()
    trips = [leave(state, 1), leave(state, 2)]
    merge(state)

    state.land(trips[0])
    assert list(state.base_arrays) == [0]
    state.land(trips[1])

    assert (state.base_arrays, state.num_flying) == ({}, {})


def test_a_message_to_evaluate_keeps_no_version_and_fills_no_buffer():
    state = new_state()

    trip = leave(state, 1, "evaluate")

    assert state.nodes[1].is_busy
    assert (state.base_arrays, state.buffers[0].num_in_flight) == ({}, 0)
    assert state.land(trip) is None
    assert not state.nodes[1].is_busy


def test_a_late_message_is_no_longer_counted_as_in_flight():
    state = new_state()
    trip = leave(state, 1)
    trip.is_late, state.buffers[0].num_in_flight = True, 0

    state.land(trip)

    assert state.buffers[0].num_in_flight == 0


@given(st.lists(st.sampled_from(["leave", "land", "merge"]), max_size=60), st.randoms())
def test_only_versions_in_flight_are_kept_and_the_oldest_is_known(steps, rng):
    state, out, free = new_state(), [], list(range(9))
    for step in steps:
        if step == "leave" and free:
            out.append(leave(state, free.pop()))
        elif step == "land" and out:
            trip = out.pop(rng.randrange(len(out)))
            (base,) = state.land(trip)
            assert base == trip.base_version
            free.append(trip.node_id)
        elif step == "merge":
            merge(state)

        flying = {trip.base_version for trip in out}
        assert set(state.base_arrays) == flying
        assert state.oldest_base_version == min(flying, default=state.version)
        assert state.buffers[0].num_in_flight == len(out)
