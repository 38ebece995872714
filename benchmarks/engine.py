"""What the engine itself costs.

(a) CPU per update over the same training without federated learning around it.
    100 clients x 100 samples, MLP 784-128-10 (101,770 parameters), batch 20, 5 SGD
    steps an update, 20 in flight, FedBuff K = 10, 300 updates. Two floors: a deep copy
    of the model and 5 steps of torch.optim.SGD, and the bare local SGD of our client.
(b) CPU of aggregating 10 updates of 10 million float32 in 20 tensors, beside Flower's
    own aggregation and a memcpy of the same bytes; memory for 100 replies.
(c) Messages per second of the emulation without training, to 10,000 vehicles and
    100,000 messages.

Everything is seeded and alternates with what it is compared to; medians are printed.
Run: ``make bench-engine`` (or ``python benchmarks/engine.py --part b``).
"""

import argparse
import copy
import gc
import logging
import math
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.app import Context as FlowerContext
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords
from torch import nn
from torch.nn import functional

from flower_sap import EmulatedGrid, Fleet, LocalGrid, RunOptions, SemiAsync
from flower_sap.clients.app import client_app
from flower_sap.clients.local_sgd import LocalSgd
from flower_sap.clients.task import Task, correctness, initial_arrays
from flower_sap.data import Examples, FederatedData
from flower_sap.payload.dense import Arrays, Manifest, decode, encode
from flower_sap.strategies import Buffered, FixedWork
from flower_sap.strategies.streaming_mean import StreamingMean

NUM_UPDATES = 300
SILENT = RunOptions(events=None, progress=False)


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU time of one call (s)."""
    gc.collect()
    started = time.process_time()
    work()
    return time.process_time() - started


# -- (a) ----------------------------------------------------------------------------


def mlp() -> nn.Module:
    """Return the model of part (a)."""
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def make_job() -> tuple[Task, FederatedData]:
    """Return 100 clients x 100 random samples."""
    rng = np.random.default_rng(0)
    parts = [
        Examples(
            rng.standard_normal((100, 784), dtype=np.float32),
            rng.integers(0, 10, 100),
            np.arange(100),
        )
        for _ in range(100)
    ]
    task = Task(
        mlp,
        functional.cross_entropy,
        correctness,
        "accuracy",
        higher_is_better=True,
        learning_rate=0.01,
        momentum=0.0,
        batch_size=20,
    )
    return task, FederatedData.with_shared_test("random", parts, test=parts[0])


def plain_training(data: FederatedData) -> None:
    """Train NUM_UPDATES times: a deep copy and 5 steps of torch.optim.SGD."""
    model = mlp()
    for number in range(NUM_UPDATES):
        part = data.train[number % 100]
        x, y = torch.from_numpy(part.x), torch.from_numpy(part.y)
        mine = copy.deepcopy(model)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.01)
        for batch in torch.randperm(100).reshape(5, 20):
            optimizer.zero_grad()
            functional.cross_entropy(mine(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def bare_training(task: Task, data: FederatedData) -> None:
    """Train NUM_UPDATES times with the client's own local SGD."""
    sgd = LocalSgd(mlp(), loss=task.loss, momentum=0.0, batch_size=20)
    for number in range(NUM_UPDATES):
        rng = np.random.default_rng(number)
        sgd.run(data.train[number % 100], num_steps=5, learning_rate=0.01, rng=rng)


def federated_training(task: Task, data: FederatedData) -> None:
    """Train NUM_UPDATES times with FedBuff in virtual time."""
    grid = EmulatedGrid(
        LocalGrid(client_app(task, data, seed=0), 100), Fleet.mild(100, seed=0)
    )
    SemiAsync(
        FedAvg(fraction_evaluate=0.0),
        sync=Buffered(10),
        work=FixedWork(5),
        concurrency=20,
        options=SILENT,
    ).start(grid, initial_arrays(task, 0), num_rounds=NUM_UPDATES // 10, timeout=1e6)


def part_a() -> None:
    """Print the cost of one update."""
    task, data = make_job()
    plain, bare, ours = [], [], []
    for _ in range(7):
        plain.append(cpu_seconds(lambda: plain_training(data)))
        ours.append(cpu_seconds(lambda: federated_training(task, data)))
        bare.append(cpu_seconds(lambda: bare_training(task, data)))
    per = 1e3 / NUM_UPDATES
    over_plain = statistics.median(o - p for o, p in zip(ours, plain, strict=True))
    over_bare = statistics.median(o - b for o, b in zip(ours, bare, strict=True))
    print(
        "(a) 100 clients, 101,770 parameters, K=10, 300 updates, 20 in flight; CPU ms"
    )
    print(
        f"    deep copy + 5 torch.optim.SGD steps {statistics.median(plain) * per:7.2f}"
    )
    print(
        f"    bare local SGD of the client        {statistics.median(bare) * per:7.2f}"
    )
    print(
        f"    SemiAsync in virtual time           {statistics.median(ours) * per:7.2f}"
    )
    print(f"    overhead over the first             {over_plain * per:7.2f}   (<= 1)")
    print(f"    overhead over the second            {over_bare * per:7.2f}")


# -- (b) ----------------------------------------------------------------------------


def make_arrays(rng: np.random.Generator) -> Arrays:
    """Return 10 million float32 in 20 tensors."""
    return [rng.standard_normal(500_000, dtype=np.float32) for _ in range(20)]


def fold(
    mean: StreamingMean,
    replies: Iterable[ArrayRecord],
    base: Arrays,
    manifest: Manifest,
    *,
    gain: float = 1.0,
) -> Arrays:
    """Check and fold each reply as it comes; return the next model."""
    for reply in replies:
        mean.add(
            decode(reply, manifest), base=base, num_examples=10.0, gain=gain, share=gain
        )
    return mean.models(1.0)[0][0]


def part_b() -> None:
    """Print the cost of aggregating one update, and the memory for 100."""
    rng = np.random.default_rng(0)
    base = make_arrays(rng)
    records = [
        ArrayRecord({str(i): Array(a) for i, a in enumerate(make_arrays(rng))})
        for _ in range(10)
    ]
    manifest = Manifest.of(records[0])
    contents = [
        RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": 10})})
        for record in records
    ]
    target = [np.empty_like(array) for array in base]
    views = [decode(record, manifest) for record in records]

    def memcpy() -> None:
        for view in views:
            for to, source in zip(target, view, strict=True):
                np.copyto(to, source)

    mean = StreamingMean(base, manifest)

    def ours(gain: float = 1.0, *, is_encoded: bool = False) -> None:
        nonlocal mean
        mean = mean.renewed(base)  # in the same memory, as the engine does
        model = fold(mean, records, base, manifest, gain=gain)
        if is_encoded:
            encode(model, manifest)

    rows: dict[str, list[float]] = {}
    for _ in range(7):
        for name, work in (
            ("memcpy of the same bytes", memcpy),
            (
                "Flower's aggregate_arrayrecords",
                lambda: aggregate_arrayrecords(contents, "num-examples"),
            ),
            ("ours: checked and folded (<= 6)", ours),
            ("ours: and the next version encoded", lambda: ours(is_encoded=True)),
            ("ours: stale updates, checked and folded", lambda: ours(0.7)),
        ):
            rows.setdefault(name, []).append(cpu_seconds(work) * 1e3 / len(records))
    print(
        "(b) 10 updates x 10 M float32 in 20 tensors; CPU ms per update, median "
        "(smallest)"
    )
    for name, figures in rows.items():
        print(f"    {name:48s}{statistics.median(figures):7.2f} ({min(figures):.2f})")
    part_b_memory(base, manifest)


def part_b_memory(base: Arrays, manifest: Manifest) -> None:
    """Print the peak memory of 100 replies, one arriving after the other."""
    peak = 0

    def arriving() -> Iterator[ArrayRecord]:
        nonlocal peak
        for number in range(100):
            # What it takes to make a reply is not the server's.
            peak = max(peak, tracemalloc.get_traced_memory()[1])
            reply = encode([array + number for array in base], manifest)
            tracemalloc.reset_peak()
            yield reply
            del reply

    gc.collect()
    tracemalloc.start()
    encode(fold(StreamingMean(base, manifest), arriving(), base, manifest), manifest)
    peak = max(peak, tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    print(
        f"    memory for 100 replies beside the current model: "
        f"{peak / manifest.nbytes:.2f} models (<= 3), the arriving reply included"
    )


# -- (c) ----------------------------------------------------------------------------


def echo_app() -> ClientApp:
    """Return an app that sends the model back at once."""
    app = ClientApp()

    @app.train()
    def train(message: Message, _: FlowerContext) -> Message:
        metrics = MetricRecord({"num-examples": 10, "samples-processed": 100})
        content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def part_c(largest: int) -> None:
    """Print messages per second, and the growth of the cost."""
    print("(c) emulation without training, Buffered(10), everybody in flight")
    costs = []
    for num_nodes in (largest // 100, largest // 10, largest):
        num_messages = 10 * num_nodes
        grid = EmulatedGrid(LocalGrid(echo_app(), num_nodes), Fleet.mixed(num_nodes))
        strategy = SemiAsync(
            FedAvg(fraction_evaluate=0.0), sync=Buffered(10), options=SILENT
        )
        seconds = cpu_seconds(
            lambda grid=grid, strategy=strategy, n=num_messages: strategy.start(  # type: ignore[misc]
                grid, ArrayRecord([np.zeros(4, np.float32)]), n // 10, timeout=1e6
            )
        )
        costs.append(seconds / (num_messages * math.log(num_messages)))
        print(
            f"    {num_nodes:6d} vehicles, {num_messages:7d} messages: "
            f"{num_messages / seconds:7.0f} messages/s (CPU), "
            f"{seconds / num_messages * 1e6:5.0f} us each"
        )
    print(
        f"    cost over n log n, largest against smallest: {costs[-1] / costs[0]:.2f}"
        " (<= about 1)"
    )


def main() -> None:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", choices="abc", action="append")
    parser.add_argument("--vehicles", type=int, default=10_000, help="of part c")
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    for name, part in (
        ("a", part_a),
        ("b", part_b),
        ("c", lambda: part_c(arguments.vehicles)),
    ):
        if name in (arguments.part or "abc"):
            part()


if __name__ == "__main__":
    main()
