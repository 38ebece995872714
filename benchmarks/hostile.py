"""What damaged and hostile payloads do to a server: nothing but `PayloadError`.

Mutates good payloads (bytes changed, cut, repeated, lengths and counts restated) and
decodes them; half of them get a new check sum, as an attacker would give them. Counts
what is refused and what is taken, and looks at time and memory. Anything but a
`PayloadError` ends the run with its traceback.

Run: ``make fuzz-payload`` (100,000 mutants of small payloads, 2,000 of 1 MB).
"""

import argparse
import resource
import struct
import sys
import time
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from flower_sap.errors import PayloadError
from flower_sap.payload import (
    ArraySpec,
    Header,
    Layout,
    Manifest,
    Treatment,
    check,
    encode,
)
from flower_sap.payload.wire_format import HEADER_NBYTES

SMALL = [
    ("a.weight", (160, 120), "float32"),
    ("a.bias", (120,), "float16"),
    ("bn.running_mean", (30,), "float32"),
    ("bn.running_var", (30,), "float32"),
    ("bn.num_batches_tracked", (), "int64"),
    ("mask", (19,), "bool"),
    ("head", (12, 10), "float64"),
]
LARGE = [("a", (2048, 2048), "float32"), ("b", (1024, 512), "float32")]


def good_payloads(
    specs: Sequence[tuple[str, tuple[int, ...], str]], budgets: list[int]
) -> tuple[Layout, list[bytes]]:
    """Return a layout, and a payload of an update for each budget."""
    arrays = tuple(ArraySpec(n, s, np.dtype(d)) for n, s, d in specs)
    layout = Layout(Manifest(arrays), Treatment(protect=("head",)))
    rng = np.random.default_rng(0)
    base = [np.zeros(s.shape, s.dtype) for s in arrays]
    trained = [
        np.asarray(rng.standard_normal(s.shape)).astype(s.dtype)
        if s.dtype.kind == "f"
        else np.ones(s.shape, s.dtype)
        for s in arrays
    ]
    return layout, [
        encode(
            trained, base, layout, budget=b, header=Header(b"", 7, 3), seed=(0, 0, 0)
        ).data
        for b in budgets
    ]


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """Return a damaged copy."""
    changed = bytearray(data)
    kind = int(rng.integers(6))
    for _ in range(int(rng.integers(1, 5))):
        at = int(rng.integers(len(changed)))
        if kind <= 1:
            changed[at] = int(rng.integers(256))
        elif kind == 2:
            changed[at] ^= 1 << int(rng.integers(8))
        elif kind == 3 and len(changed) > at + 8:
            number = int(rng.choice([0, 1, 2**31 - 1, 2**32 - 1, len(data)]))
            changed[at : at + 4] = struct.pack("<I", number)
        elif kind == 4:
            del changed[at : at + int(rng.integers(1, 9))]
        else:
            changed[at:at] = changed[at : at + int(rng.integers(1, 9))]
        if not changed:
            break
    return bytes(changed)


def with_check_sum(data: bytes) -> bytes:
    """Return the bytes with the body length and check sum that they need."""
    if len(data) < HEADER_NBYTES:
        return data
    body = data[HEADER_NBYTES:]
    head = data[: HEADER_NBYTES - 8] + struct.pack("<I", len(body))
    crc = zlib.crc32(body, zlib.crc32(head))
    return head + struct.pack("<I", crc) + body


def attack(layout: Layout, sources: list[bytes], count: int, seed: int) -> None:
    """Decode `count` mutants and print what came of them."""
    rng = np.random.default_rng(seed)
    for renews in (False, True):
        make: Callable[[bytes], bytes] = with_check_sum if renews else bytes
        seconds, num_taken, before = [], 0, _peak_nbytes()
        for number in range(count // 2):
            data = make(mutated(sources[number % len(sources)], rng))
            started = time.thread_time()
            try:
                update = check(data, layout, base_version=7, number=3)
                num_taken += 1
                assert np.isfinite(update.vector()).all()
            except PayloadError:
                seconds.append(time.thread_time() - started)
        milliseconds = 1e3 * np.array(seconds)
        middle, most = np.quantile(milliseconds, (0.5, 0.99))
        grown = _peak_nbytes() - before
        print(
            f"  {'new' if renews else 'old'} check sum: {len(seconds)} refused, "
            f"{num_taken} taken (finite); refused in {middle:.3f} ms (median), "
            f"{most:.3f} (99 %), {milliseconds.max():.3f} (longest); "
            f"peak memory +{grown / 1e6:.1f} MB",
            flush=True,
        )


def _peak_nbytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> int:
    """Attack with small and with large payloads."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--large", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    layout, sources = good_payloads(
        SMALL, [200, 1000, 3000, 12_000, 25_000, 50_000, 10**6]
    )
    print(f"small model of {layout.manifest.nbytes} bytes, seed {arguments.seed}")
    attack(layout, sources, arguments.count, arguments.seed)
    layout, sources = good_payloads(LARGE, [10**6])
    print(f"model of {layout.manifest.nbytes} bytes, payload of {len(sources[0])}")
    attack(layout, sources, arguments.large, arguments.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
