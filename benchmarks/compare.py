"""How much sooner SAP reaches the synchronous baseline's accuracy.

Runs `flower-sap compare` on the fleets *mixed* and *mild*, and with ``--more`` on
speeds 1:1, 1:2 and 1:4 and on data that follows device speed. What is compared, on
which inputs and seeds, is printed with each table.

Run: ``make bench-compare GTSRB=gtsrb_subset.npz`` (without GTSRB= torchvision downloads
the signs).
"""

import argparse
import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Run the comparisons asked for; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", default="parking")
    parser.add_argument("--data-file", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("compare"))
    parser.add_argument("--strategy", action="append", default=[])
    parser.add_argument("--fleets", nargs="+", default=["mixed", "mild"])
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--more", action="store_true")
    arguments = parser.parse_args()
    fleets = [*arguments.fleets, *(["1:1", "1:2", "1:4"] if arguments.more else [])]
    runs: list[tuple[str, list[str]]] = [(fleet, []) for fleet in fleets]
    if arguments.more and arguments.data != "parking":
        runs.append(("mixed", ["--by-speed", "0.8"]))
    return max(_compare(arguments, fleet, extra) for fleet, extra in runs)


def _compare(arguments: argparse.Namespace, fleet: str, extra: list[str]) -> int:
    name = "-".join([arguments.data, fleet.replace(":", "to"), *extra[1:]])
    command = [sys.executable, "-m", "flower_sap.cli", "compare"]
    command += ["--data", arguments.data, "--fleet", fleet, *extra]
    command += ["--seeds", str(arguments.seeds), "--workers", str(arguments.workers)]
    command += ["--out", str(arguments.out / name)]
    for strategy in arguments.strategy:
        command += ["--strategy", strategy]
    if arguments.resume:
        command += ["--resume"]
    if arguments.data_file:
        command += ["--data-file", str(arguments.data_file)]
    return int(subprocess.run(command, check=False).returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
