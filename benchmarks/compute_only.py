"""What the cores can compute without a parameter server, in the same number of processes.

`by="shoal"`: the worker's step function on the job's data; `by="keras"`: Keras' `fit` in each process, with its
optimizer, on one batch; `by="echo"`: the worker's step, while its last update goes through a bare socket to threads of
the parent and back, to measure the cost of moving the bytes.
As a script: `python -m benchmarks.compute_only JOB BATCH BY PORT COUNTER ARGUMENTS` computes until it is killed, and
keeps the number of its steps, and when it took the last one, in the file COUNTER.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from benchmarks.turns import System
from shoal_trainer.termination.orphans import PARENT_ENV, follow_parent
from shoal_trainer.worker.hardware import shared_by

Kind = Literal["shoal", "keras", "echo"]
FIT_STEPS = 1_000_000
FIRST_STEPS = 3


def rate(job: str, batch: int, processes: int, seconds: float, **arguments: Any) -> float:
    """Steps/s of all processes together, measured at the same time. `job`: a function of benchmarks.jobs."""
    with computing(job, batch, processes, **arguments) as found:
        before = [counter.copy() for counter in found.counters]
        time.sleep(seconds)
        spans = [counter - old for counter, old in zip(found.counters, before, strict=True)]
        found.steps()  # all are alive
        return float(sum(steps / nanoseconds * 1e9 for steps, nanoseconds in spans))


class Computing(NamedTuple):
    """Processes that compute, and for each [the number of its steps, the nanosecond of the last one]."""

    children: list[subprocess.Popen[str]]
    counters: list[Any]

    def system(self) -> System:
        """All of them together."""
        return System([child.pid for child in self.children], self.steps)

    def steps(self) -> int:
        """The steps of all; `RuntimeError` if a process has ended."""
        if any(child.poll() is not None for child in self.children):
            raise RuntimeError("a process that computes alone has ended")
        return sum(int(counter[0]) for counter in self.counters)


@contextlib.contextmanager
def computing(
    job: str, batch: int, processes: int, *, by: Kind = "shoal", **arguments: Any
) -> Iterator[Computing]:
    """Processes that have taken their first steps and go on."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port = stack.enter_context(_echo())
        counters = [folder / str(index) for index in range(processes)]
        children = [
            stack.enter_context(
                _child([job, str(batch), by, str(port), str(path), json.dumps(arguments)], processes)
            )
            for path in counters
        ]
        for child in children:
            assert child.stdout is not None
            if not child.stdout.readline():
                raise RuntimeError("a process that computes alone has ended")
        yield Computing(children, [_counter(path, "r+") for path in counters])


@contextlib.contextmanager
def _child(arguments: list[str], processes: int) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.compute_only", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ
        | {PARENT_ENV: str(os.getpid())}
        | shared_by(processes),  # as the workers of a local run
    )
    with child:
        try:
            yield child
        finally:
            child.kill()


def _counter(path: Path, mode: Literal["r+", "w+"]) -> Any:
    return np.memmap(path, np.int64, mode, shape=(2,))


def _receive(sock: socket.socket, view: memoryview) -> bool:
    """Fill `view`. Returns False if the peer has closed."""
    done = 0
    while done < len(view):
        count = sock.recv_into(view[done:], 0, socket.MSG_WAITALL)
        if not count:
            return False
        done += count
    return True


@contextlib.contextmanager
def _echo() -> Iterator[int]:
    """A port that echoes messages. A connection sends their size first."""

    def serve(sock: socket.socket) -> None:
        with sock:
            size = bytearray(8)
            if _receive(sock, memoryview(size)):
                message = memoryview(bytearray(int.from_bytes(size, "little")))
                while _receive(sock, message):
                    sock.sendall(message)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        acceptor = threading.Thread(target=accept, daemon=True)
        acceptor.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            acceptor.join()


def _stepper(job: Any, batch: int) -> tuple[Any, Callable[[], Any]]:
    from shoal_trainer.worker.buffers import Buffers
    from shoal_trainer.worker.flat_model import FlatModel

    flat_model = FlatModel(job.model(), job.data.example(batch), job.wire, (0, 0))
    buffers = Buffers(flat_model.layout, flat_model.vector)
    batches = _batches(job.data, batch)
    return flat_model, lambda: flat_model.step(buffers.tensor, next(batches)).update


def _batches(data: Any, batch: int) -> Iterator[Any]:
    """The batches of one epoch after the other."""
    from shoal_trainer.data.source import Part

    for epoch in itertools.count():
        yield from data.read(Part(0, data.size, epoch), batch)


Advance = Callable[[], None]
Done = Callable[[], None]


def shoal(job: Any, batch: int, done: Done) -> Advance:
    """One step of the worker's function."""
    flat_model, step = _stepper(job, batch)

    def advance() -> None:
        flat_model.vector.reuse(step())
        done()

    return advance


def echo(job: Any, batch: int, done: Done, port: int) -> Advance:
    """One step of the worker's function, while the previous update goes to `port` and back."""
    from shoal_trainer.ps.aligned import octets

    flat_model, step = _stepper(job, batch)
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    landing = memoryview(bytearray(step().nbytes))
    sock.sendall(len(landing).to_bytes(8, "little"))
    thread = ThreadPoolExecutor(1)
    under_way: list[Future[None]] = []

    def exchange(update: Any) -> None:
        sock.sendall(octets(update))
        _receive(sock, landing)
        flat_model.vector.reuse(update)

    def advance() -> None:
        update = step()
        if under_way:
            under_way.pop().result()
        under_way.append(thread.submit(exchange, update))
        done()

    return advance


def keras(job: Any, batch: int, done: Done) -> Advance:
    """`FIT_STEPS` steps of `fit`."""
    import keras as k
    import tensorflow as tf

    example, model = job.data.example(batch), job.model()
    data = tf.data.Dataset.from_tensors((example.x, example.y, example.weights)).repeat()
    counting = k.callbacks.LambdaCallback(on_train_batch_end=lambda _batch, **_logs: done())

    def advance() -> None:
        model.fit(data, steps_per_epoch=FIT_STEPS, shuffle=False, verbose=0, callbacks=[counting])

    return advance


def main() -> None:
    """Run one process."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from benchmarks import jobs

    follow_parent()
    name, batch, by, port, path, arguments = sys.argv[1:]
    job, counter = getattr(jobs, name)(**json.loads(arguments)), _counter(Path(path), "w+")
    makers: dict[str, Callable[[Any, int, Done], Advance]] = {
        "shoal": shoal,
        "keras": keras,
        "echo": partial(echo, port=int(port)),
    }

    def done() -> None:
        counter[:] = counter[0] + 1, time.monotonic_ns()
        if counter[0] == FIRST_STEPS:
            print("ready", flush=True)

    advance = makers[by](job, int(batch), done)
    while True:
        advance()


if __name__ == "__main__":
    main()
