"""Which nodes there are, which of them rest, and which are to start.

A node is idle, busy or resting after a failure. Idle ones start in the order in which
they became idle; where not all may start, they are drawn at random.
"""

import heapq
import math

import numpy as np

from flower_sap.errors import AllClientsFailedError, NoNodesError
from flower_sap.strategies.parts import Parts, World
from flower_sap.strategies.state import NodeState, ServerState

_LOOK_SECONDS = 5.0  # how often the grid is asked who is connected
_FIRST_REST = 1.0  # a failed node rests this long (s), then twice as long, ...
_LONGEST_REST = 60.0
_MOST_FAILURES = 5  # of every node in a row: then the run cannot go on


class Roster:
    """The nodes of one run.

    Parameters
    ----------
    state : ServerState
        Holds the nodes and who is idle.
    world : World
        The grid that knows who is connected, and the time.
    parts : Parts
        How many train at once, and the seed of the draws.
    """

    def __init__(self, state: ServerState, world: World, parts: Parts) -> None:
        self._state = state
        self._grid, self._clock = world.grid, world.clock
        self._concurrency, self._seed = parts.concurrency, parts.seed
        self._resting: list[tuple[float, int]] = []
        self._looked_at = -math.inf

    # --- who is there -----------------------------------------------------------

    def gather(self, needed: int, timeout: float) -> None:
        """Wait until `needed` nodes are connected, at most `timeout` seconds."""
        give_up_at = self._clock.now() + timeout
        while True:
            node_ids = list(self._grid.get_node_ids())
            if len(node_ids) >= needed:
                self._take_in(node_ids)
                return
            if self._clock.now() >= give_up_at:
                raise NoNodesError(found=len(node_ids), needed=needed, waited=timeout)
            self._clock.wait_until(min(self._clock.now() + 1.0, give_up_at))

    def look(self) -> list[int]:
        """Wake who has rested, look from time to time who is there.

        Returns
        -------
        list of int
            Nodes that are no longer connected.
        """
        now = self._clock.now()
        while self._resting and self._resting[0][0] <= now:
            self.make_idle(heapq.heappop(self._resting)[1])
        # The same sum as in `next_change`: a difference may round to just below.
        if now >= self._looked_at + _LOOK_SECONDS:
            return self._take_in(list(self._grid.get_node_ids()))
        return []

    def next_change(self) -> float:
        """Return when a node may come back, or be looked for (s)."""
        times = [math.inf]
        if self._resting:
            times.append(self._resting[0][0])
        if not self._state.nodes or self._is_short_of_nodes():
            times.append(self._looked_at + _LOOK_SECONDS)
        return min(times)

    def _is_short_of_nodes(self) -> bool:
        num_out, wanted = len(self._state.trips), self._concurrency
        return not num_out or (wanted is not None and num_out < wanted)

    def _take_in(self, node_ids: list[int]) -> list[int]:
        """Welcome new nodes, let vanished ones go; return these."""
        state = self._state
        self._looked_at = self._clock.now()
        connected = set(node_ids)
        for node_id in sorted(connected - state.nodes.keys()):
            state.nodes[node_id] = NodeState(node_id)
            state.idle.append(node_id)
        gone = [n for n in state.nodes if n not in connected]
        for node_id in gone:
            if not state.nodes[node_id].is_busy:
                self._forget(node_id)
        if gone:
            state.idle = [n for n in state.idle if n in connected]
        return gone

    def _forget(self, node_id: int) -> None:
        node = self._state.nodes.pop(node_id)
        if node.seconds_per_step:
            self._state.speed_sum -= 1 / node.seconds_per_step
            self._state.num_speeds -= 1
        self._resting = [entry for entry in self._resting if entry[1] != node_id]
        heapq.heapify(self._resting)

    # --- who may be sent something ----------------------------------------------

    def make_idle(self, node_id: int) -> None:
        """Let a node be sent its next message, if it is still known."""
        if node_id in self._state.nodes:
            self._state.idle.append(node_id)

    def rest(self, node_id: int, reason: str) -> None:
        """Leave a failed node alone for a while, longer each time."""
        node = self._state.nodes[node_id]
        pause = min(_LONGEST_REST, _FIRST_REST * 2.0**node.failures_in_row)
        node.failures_in_row += 1
        node.last_reason = reason
        heapq.heappush(self._resting, (self._clock.now() + pause, node_id))

    def healthy(self) -> list[int]:
        """Return the nodes whose last train message did not fail."""
        return [n for n, node in self._state.nodes.items() if not node.failures_in_row]

    def check_failures(self) -> None:
        """End a run in which every node has failed too often."""
        nodes = self._state.nodes.values()
        if (
            nodes
            and not self._state.trips
            and all(node.failures_in_row >= _MOST_FAILURES for node in nodes)
        ):
            raise AllClientsFailedError(
                failures=_MOST_FAILURES,
                reasons={node.node_id: node.last_reason for node in nodes},
            )

    # --- who trains next --------------------------------------------------------

    def choose(self, open_groups: list[bool]) -> list[int]:
        """Take the nodes that are to train now out of the idle ones.

        Parameters
        ----------
        open_groups : list of bool
            Whether the nodes of each speed group may start.
        """
        state = self._state
        free = len(state.idle)
        if self._concurrency is not None:
            free = min(free, self._concurrency - len(state.trips))
        if free <= 0 or not any(open_groups):
            return []
        if len(state.buffers) > 1:
            self._assign_groups()
        ready, waiting = state.idle, []
        if not all(open_groups):
            ready = [n for n in state.idle if open_groups[state.nodes[n].group]]
            waiting = [n for n in state.idle if not open_groups[state.nodes[n].group]]
        chosen = self._draw(ready, free)
        state.idle = ready + waiting
        return chosen

    def _draw(self, ready: list[int], free: int) -> list[int]:
        """Take up to `free` nodes out of `ready`: all in order, or some at random."""
        if free >= len(ready):
            chosen = list(ready)
            ready.clear()
            return chosen
        rng = np.random.default_rng([self._seed, self._state.num_dispatched])
        chosen = []
        for _ in range(free):
            index = int(rng.integers(len(ready)))
            ready[index], ready[-1] = ready[-1], ready[index]
            chosen.append(ready.pop())
        return chosen

    def _assign_groups(self) -> None:
        """Sort idle nodes into speed groups of equal size, once all are known.

        One that only ever failed counts as slowest: waiting for it, there would be no
        groups.
        """
        state = self._state
        nodes = state.nodes.values()
        if any(n.trip_seconds is None and not n.failures_in_row for n in nodes):
            return
        ranked = sorted(nodes, key=lambda n: (n.trip_seconds or math.inf, n.node_id))
        idle = set(state.idle)
        for rank, node in enumerate(ranked):
            if node.node_id in idle:
                node.group = rank * len(state.buffers) // len(ranked)
