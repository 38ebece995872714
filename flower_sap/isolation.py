"""Compute in torch, and leave the process as it was found.

The idea: what torch keeps per process (the generator, the number of threads) belongs to
the user. Local training needs its own values, and gives the old ones back.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_seed(seed: int) -> Iterator[None]:
    """Let torch's own draws depend on `seed` for a while, then put the generator back.

    Initialisers and dropout take no generator: they draw from the global one. It is the
    user's, so it is returned as it was. Only the CPU's is seeded: ``torch.manual_seed``
    would reach the accelerators too, and they are not restored.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one torch thread for a while.

    Nodes already share the cores, and more threads per node slow all of them down (30
    times was seen). One thread also fixes the order of sums, and so the result.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
