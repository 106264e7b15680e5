"""What the cores can compute without a parameter server, in the same number of processes.

`by="shoal"`: the worker's step function on the job's data; `by="keras"`: Keras' `fit` in each process, with its
optimizer, on one batch; `by="echo"`: the worker's step, while its last update goes through a bare socket to threads of
the parent and back, to measure the cost of moving the bytes.
As a script: `python -m benchmarks.compute_only JOB BATCH SECONDS BY PORT ARGUMENTS` prints its steps a second.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

from benchmarks.runs import START_SECONDS
from shoal_trainer.worker.hardware import shared_by

FIT_STEPS = 20


def rate(
    job: str,
    batch: int,
    processes: int,
    seconds: float,
    *,
    by: Literal["shoal", "keras", "echo"] = "shoal",
    **arguments: Any,
) -> float:
    """Steps/s of all processes together, measured at the same time. `job`: a function of benchmarks.jobs."""
    with _echo() as port:
        return _rate([job, str(batch), str(seconds), by, str(port), json.dumps(arguments)], processes)


def _rate(arguments: list[str], processes: int) -> float:
    command = [sys.executable, "-m", "benchmarks.compute_only", *arguments]
    children = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | shared_by(processes),  # as the workers of a local run
        )
        for _ in range(processes)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        return sum(float(child.communicate(timeout=START_SECONDS)[0]) for child in children)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()


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
    buffers = Buffers(flat_model.layout.size, flat_model.dtype, flat_model.alias)
    batches = _batches(job.data, batch)
    return flat_model, lambda: flat_model.step(buffers.tensor, next(batches)).update


def _batches(data: Any, batch: int) -> Iterator[Any]:
    """The batches of one epoch after the other."""
    from shoal_trainer.data.source import Part

    for epoch in itertools.count():
        yield from data.read(Part(0, data.size, epoch), batch)


def shoal(job: Any, batch: int) -> Callable[[], int]:
    """One step of the worker's function."""
    flat_model, step = _stepper(job, batch)

    def advance() -> int:
        flat_model.reuse(step())
        return 1

    return advance


def echo(job: Any, batch: int, port: int) -> Callable[[], int]:
    """One step of the worker's function, while the previous update goes to `port` and back."""
    from shoal_trainer.ps.buffers import octets

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
        flat_model.reuse(update)

    def advance() -> int:
        update = step()
        if under_way:
            under_way.pop().result()
        under_way.append(thread.submit(exchange, update))
        return 1

    return advance


def keras(job: Any, batch: int) -> Callable[[], int]:
    """`FIT_STEPS` steps of `fit`."""
    import tensorflow as tf

    example, model = job.data.example(batch), job.model()
    data = tf.data.Dataset.from_tensors((example.x, example.y, example.weights)).repeat()

    def advance() -> int:
        model.fit(data, steps_per_epoch=FIT_STEPS, shuffle=False, verbose=0)
        return FIT_STEPS

    return advance


def main() -> None:
    """Run one process."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from benchmarks import jobs

    name, batch, seconds, by, port, arguments = sys.argv[1:]
    job = getattr(jobs, name)(**json.loads(arguments))
    makers: dict[str, Callable[[Any, int], Callable[[], int]]] = {
        "shoal": shoal,
        "keras": keras,
        "echo": partial(echo, port=int(port)),
    }
    advance = makers[by](job, int(batch))
    for _ in range(3):
        advance()
    print("ready", flush=True)
    sys.stdin.readline()
    steps, start, until = 0, time.perf_counter(), time.perf_counter() + float(seconds)
    while time.perf_counter() < until:
        steps += advance()
    print(steps / (time.perf_counter() - start), flush=True)


if __name__ == "__main__":
    main()
