"""Worker processes that run a ClientApp beside the server.

Each worker is a fork of this process, so it has the ClientApp and its data without
any of it being sent. A message travels as a JSON header and two contents in Flower's
wire format, each behind its length (8 bytes, little-endian).
"""

import contextlib
import json
import multiprocessing
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess

import torch
from flwr.app import Error, Message, RecordDict
from flwr.clientapp import ClientApp

from flower_sap._flower import (
    CLIENT_APP_CRASHED,
    content_from_bytes,
    content_to_bytes,
    ensure_task_identity,
    set_message_id,
)
from flower_sap.emulation.client_process import NodeIdentity, Outcome, run_client_app


@dataclass(slots=True)
class Job:
    """One message for one node."""

    message: Message
    node: NodeIdentity
    state: RecordDict
    seeds: tuple[int, int]


class WorkerPool:
    """Runs jobs on `num_workers` processes, in the order in which they come.

    Parameters
    ----------
    app : ClientApp
        The client program.
    num_workers : int
        Processes, >= 1.

    Raises
    ------
    ValueError
        If this platform cannot fork; run with no workers there.
    """

    def __init__(self, app: ClientApp, num_workers: int) -> None:
        if "fork" not in multiprocessing.get_all_start_methods():
            raise ValueError(
                f"workers={num_workers} needs a platform that can fork; use workers=0"
            )
        self._app = app
        self._queue: deque[Job] = deque()
        self._workers = [_Worker(app) for _ in range(num_workers)]

    def submit(self, job: Job) -> None:
        """Start a job, or queue it until a worker is free."""
        self._queue.append(job)
        self._feed()

    def results(self, *, timeout: float | None) -> list[tuple[Job, Outcome]]:
        """Return finished jobs, waiting up to `timeout` s (None: no limit) for one."""
        busy = {worker.pipe: worker for worker in self._workers if worker.job}
        done = []
        for pipe in wait(list(busy), timeout) if busy else ():
            worker = busy[pipe]  # type: ignore[index]
            done.append(worker.take())
            if not worker.process.is_alive():
                self._workers[self._workers.index(worker)] = _Worker(self._app)
        self._feed()
        return done

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.stop()

    def _feed(self) -> None:
        for worker in self._workers:
            if not self._queue:
                return
            if worker.job is None:
                worker.give(self._queue.popleft())


class _Worker:
    def __init__(self, app: ClientApp) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process: ForkProcess = context.Process(
            target=_serve, args=(app, theirs, self.pipe), daemon=True
        )
        self.process.start()
        theirs.close()
        self.job: Job | None = None

    def give(self, job: Job) -> None:
        self.job = job
        metadata = job.message.metadata
        header = {
            "type": metadata.message_type,
            "group_id": metadata.group_id,
            "ttl": metadata.ttl,
            "id": metadata.message_id,
            "run_id": metadata.run_id,
            "seeds": job.seeds,
            "node": asdict(job.node),
        }
        # A worker that died while idle is noticed when its pipe is read.
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send_bytes(_pack(header, job.message.content, job.state))

    def take(self) -> tuple[Job, Outcome]:
        job, self.job = self.job, None
        if job is None:
            raise AssertionError("a worker without a job has no result")
        try:
            header, content, state = _unpack(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join()
            reason = f"the worker process died (exit code {self.process.exitcode})"
            return job, Outcome(None, Error(CLIENT_APP_CRASHED, reason), job.state)
        if header:
            error = Error(int(str(header["code"])), str(header["reason"]))
            return job, Outcome(None, error, state)
        return job, Outcome(content, None, state)

    def stop(self) -> None:
        self.pipe.close()
        self.process.terminate()
        self.process.join()


def _serve(app: ClientApp, pipe: Connection, parents_end: Connection) -> None:
    """Answer jobs until the pipe is closed."""
    parents_end.close()
    torch.set_num_threads(1)  # two threads a client can take 30 times longer
    ensure_task_identity()
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            header, content, state = _unpack(pipe.recv_bytes())
            outcome = run_client_app(
                app,
                _rebuild(header, content),
                NodeIdentity(**header["node"]),  # type: ignore[arg-type]
                state,
                tuple(header["seeds"]),  # type: ignore[arg-type]
            )
            error = outcome.error
            told: dict[str, object] = {}
            if error is not None:
                told = {"code": error.code, "reason": error.reason}
            pipe.send_bytes(_pack(told, outcome.content, outcome.state))


def _rebuild(header: dict[str, object], content: RecordDict) -> Message:
    node: dict[str, int] = header["node"]  # type: ignore[assignment]
    message = Message(
        content,
        dst_node_id=node["node_id"],
        message_type=str(header["type"]),
        group_id=str(header["group_id"]),
        ttl=float(str(header["ttl"])),
    )
    message.metadata.__dict__["_run_id"] = header["run_id"]
    set_message_id(message, str(header["id"]))
    return message


def _pack(
    header: dict[str, object], content: RecordDict | None, state: RecordDict
) -> bytes:
    parts: Sequence[bytes] = (
        json.dumps(header).encode(),
        content_to_bytes(content or RecordDict()),
        content_to_bytes(state),
    )
    return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def _unpack(data: bytes) -> tuple[dict[str, object], RecordDict, RecordDict]:
    parts, start = [], 0
    for _ in range(3):
        (size,) = struct.unpack_from("<Q", data, start)
        parts.append(data[start + 8 : start + 8 + size])
        start += 8 + size
    header: dict[str, object] = json.loads(parts[0])
    return header, content_from_bytes(parts[1]), content_from_bytes(parts[2])
