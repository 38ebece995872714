"""Small mistakes that the tests must notice: ``python tests/mutants.py [word]``.

Each mutant replaces one piece of the source in a temporary copy and runs the test files
named for it there; they must fail. Without a word all mutants are tried, with one those
whose file or change contains it.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutant(NamedTuple):
    file: str
    old: str
    new: str
    tests: str


MUTANTS = [
    Mutant("strategies/staleness.py", "** -self.exponent", "** self.exponent",
           "staleness"),
    Mutant("strategies/staleness.py", "self.slope * late + 1.0", "self.slope * late",
           "staleness"),
    Mutant("strategies/staleness.py", "max(float(weight), math.ulp(0.0))",
           "float(weight)", "staleness"),
    Mutant("strategies/staleness.py",
           "power * math.log(ratio) >= math.log(limit)", "ratio < 0", "staleness"),
    Mutant("strategies/interval.py", "view.merges_since_sync >= self.merges - 1",
           "view.merges_since_sync >= self.merges", "sync"),
    Mutant("strategies/interval.py", "view.is_empty or not is_draining", "True",
           "sync"),
    Mutant("strategies/interval.py", "self.patience * (drains_from", "0 * (drains_from",
           "sync"),
    Mutant("strategies/interval.py", "return min(from_merges, view.synced_at",
           "return max(from_merges, view.synced_at", "sync"),
    Mutant("strategies/sync.py", "behind >= self.limit", "behind > self.limit", "sync"),
    Mutant("strategies/sync.py", "view.num_in_flight > 0 and behind", "behind", "sync"),
    Mutant("strategies/composition.py", "return min(policy.merge_at(view)",
           "return max(policy.merge_at(view)", "sync"),
    Mutant("strategies/composition.py", "all(policy.may_start(view)",
           "any(policy.may_start(view)", "sync"),
    Mutant("strategies/sync.py", "view.opened_at + self.seconds",
           "view.synced_at + self.seconds", "sync"),
    Mutant("strategies/merging.py", "if scale < math.inf else 0.0", "if True else 0.0",
           "merging"),
    Mutant("strategies/merging.py", "weight / num_steps", "weight", "merging"),
    Mutant("strategies/merging.py", "totals.examples / totals.weighted",
           "totals.weighted / totals.examples", "merging"),
    Mutant("strategies/work.py", "speed / total for", "speed for", "work"),
    Mutant("strategies/work.py", "available - pace.overhead_seconds", "available",
           "work"),
    Mutant("strategies/state.py", "max(_SHORTEST_STEP, computing / steps)",
           "computing / steps", "work"),
    Mutant("strategies/state.py", "seconds)\n", "1e99)\n", "work"),
    Mutant("strategies/streaming_mean.py", "delta_piece.mul_(gain)", "delta_piece",
           "aggregation"),
    Mutant("strategies/streaming_mean.py", "scale = min(scale, 1.0)", "pass",
           "aggregation"),
    Mutant("strategies/streaming_mean.py", "spare.fill(0)", "pass", "aggregation"),
    Mutant("strategies/streaming_mean.py", "return np.array(x, wide(x))",
           "return np.asarray(x)", "aggregation"),
    Mutant("strategies/streaming_mean.py",
           "if gain == 1.0 and share == 1.0 and base is self._current:",
           "if base is self._current:", "aggregation"),
    Mutant("strategies/aggregation.py", "share * convex", "share * scale",
           "aggregation"),
    Mutant("strategies/aggregation.py", "np.maximum(a, b)", "(a + b) / 2",
           "aggregation"),
    Mutant("strategies/aggregation.py", "x.astype(wide(x), copy=False) - base",
           "x - base", "aggregation"),
    Mutant("strategies/release.py", "max(settled, 3.0 / (version + 2))", "settled",
           "release"),
    Mutant("strategies/state.py", "buffer.opened_at = trip.sent_at", "pass",
           "evaluation"),
    Mutant("strategies/roster.py", "if any(n.trip_seconds is None and not",
           "if any(n.trip_seconds is None or", "semi_async"),
    Mutant("report/table.py", "problem.reaches(second.metric, target)", "True",
           "compare"),
    Mutant("strategies/updates.py", "if not 0 < value <=", "if not 0 <= value <=",
           "updates"),
    Mutant("strategies/updates.py", "if claimed != base_version", "if False",
           "updates"),
    Mutant("payload/dense.py", "RecursionError,\n        MemoryError,\n",
           "", "dense"),
    Mutant("payload/dense.py", "0 <= size <= sys.maxsize", "size <= sys.maxsize",
           "dense"),
    Mutant("payload/dense.py", "if _energy(view) < LARGEST_VALUE**2:", "if True:",
           "dense"),
    Mutant("payload/dense.py", "    if num_bad:\n", "    if True:\n", "dense"),
    Mutant("payload/dense.py", "if largest > LARGEST_VALUE:", "if False:", "dense"),
    Mutant("payload/dense.py", 'order="F" if fortran else "C"', 'order="C"', "dense"),
    Mutant("payload/dense.py", "view.shape != spec.shape or ", "", "dense"),
    Mutant("payload/dense.py", "if list(record) != manifest.names:",
           "if set(record) != set(manifest.names):", "dense"),
    Mutant("payload/dense.py", "except ValueError as error:",
           "except OSError as error:", "dense"),
    Mutant("payload/deadzone.py", "np.copysign(shift, moved, out=up)",
           "np.copyto(up, shift)", "payload_parts"),
    Mutant("payload/deadzone.py", "move = np.add if c > 0 else np.subtract",
           "move = np.add", "payload"),
    Mutant("payload/entropy.py", "if positions[-1] >= count:", "if False:",
           "payload_parts"),
    Mutant("payload/entropy.py",
           "progress.n_processed != count or not progress.finished",
           "progress.n_processed != count", "payload_parts"),
    Mutant("payload/low_rank.py", "if not strength**2 > _NOISE * noise * edge:",
           "if False:", "payload_parts"),
    Mutant("payload/low_rank.py", "for _ in range(2):", "for _ in range(0):",
           "payload_parts"),
    Mutant("payload/lrdzq.py", "if rank > most:", "if False:", "payload_parts"),
    Mutant("payload/lrdzq.py", "(strengths >= step / 64).all()", "True",
           "payload_parts"),
    Mutant("payload/lrdzq.py", "not 0 < step < math.inf or ", "", "payload_parts"),
    Mutant("payload/solver.py", "if trial >= enough and best is not None:",
           "if trial >= enough:", "payload_parts"),
    Mutant("payload/encoder.py", "if factor < 1:", "if False:", "feedback"),
    Mutant("payload/beside.py", "MOST_BESIDE * room", "room", "payload_parts"),
    Mutant("payload/wire_format.py", "if claimed != found:", "if False:", "payload"),
    Mutant("payload/wire_format.py", "section <= sections[-1].section", "False",
           "payload_parts"),
    Mutant("payload/decoder.py", "if header.digest != layout.digest:", "if False:",
           "payload"),
    Mutant("payload/decoder.py", "if bits[num_bits:].any():", "if False:",
           "payload_parts"),
    Mutant("payload/decoder.py", "if not energy < LARGEST_VALUE:", "if False:",
           "payload_parts"),
    Mutant("payload/decoder.py", "np.maximum(model[place.index], 0)",
           "model[place.index]", "payload_parts"),
    Mutant("payload/feedback.py", "if acked != sent.number:", "if False:",
           "feedback"),
    Mutant("payload/feedback.py", "if missed > _MOST_MISSED:", "if False:",
           "feedback"),
    Mutant("payload/budget.py", "deadline - link.compute_seconds, self.beside",
           "deadline, self.beside", "budget"),
    Mutant("payload/budget.py", "abs(asked - last) < self.hysteresis * last",
           "False", "budget"),
    Mutant("payload/budget.py", "new if old is None or new > old else", "",
           "budget"),
    Mutant("payload/delta_sum.py", "part.left * weight", "part.left",
           "payload_parts"),
    Mutant("strategies/streaming_mean.py", "scale * self._coded.unit / self._total",
           "scale / self._total", "sizing"),
    Mutant("strategies/sizing.py", "budget = max(budget, least + _MESSAGE_NBYTES)",
           "pass", "sizing"),
    Mutant("strategies/broadcast.py", "held, node.held = node.held, None",
           "held = node.held", "sizing"),
    Mutant("strategies/training.py", "if kept is not None and kept[0] < kept[1]:",
           "if False:", "sizing"),
    Mutant("clients/upload.py", "number > sent.number", "False", "sizing"),
    Mutant("events.py", 'if not line.endswith("\\n"):', "if not line:", "events"),
    Mutant("events.py", "or event.schema not in _READABLE", "", "events"),
    Mutant("events.py", "    _keep_earlier(path)\n", "    path.unlink(True)\n",
           "events"),
    Mutant("errors.py", ' or ["?"]', "", "errors"),
    Mutant("clock.py", "max(0.0, min(", "abs(min(", "clock"),
]  # fmt: skip


def is_noticed(mutant: Mutant, copy: Path) -> bool:
    """Return whether the tests fail with the mutant in place."""
    file = copy / "flower_sap" / mutant.file
    source = file.read_text(encoding="utf-8")
    if mutant.old not in source:
        raise SystemExit(f"{mutant.file} no longer holds {mutant.old!r}")
    file.write_text(source.replace(mutant.old, mutant.new, 1), encoding="utf-8")
    tests = subprocess.run(
        [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
         f"tests/test_{mutant.tests}.py"],
        cwd=copy, capture_output=True, check=False,
    )  # fmt: skip
    file.write_text(source, encoding="utf-8")
    return tests.returncode in (1, 2)  # 2: not even collected


def main(word: str = "") -> int:
    """Try the mutants; return how many were missed."""
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("flower_sap", "tests", "pyproject.toml"):
            source = ROOT / part
            (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / part)
        for mutant in MUTANTS:
            if word in f"{mutant.file} {mutant.old}":
                noticed = is_noticed(mutant, copy)
                missed += not noticed
                verdict = "noticed" if noticed else "MISSED"
                print(f"{verdict:8} {mutant.file}: {mutant.old!r}", flush=True)
    print(f"{missed} missed")
    return missed


if __name__ == "__main__":
    sys.exit(min(1, main(*sys.argv[1:2])))
