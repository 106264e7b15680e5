"""What the cores can compute without a parameter server, in the same number of processes.

`by="shoal"`: the worker's own step function; `by="keras"`: Keras' `fit`, each process for itself, optimizer and all.
As a script: `python -m benchmarks.compute_only JOB BATCH SECONDS BY ARGUMENTS` prints its steps a second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

from benchmarks.runs import START_SECONDS

FIT_STEPS = 20


def rate(
    job: str,
    batch: int,
    processes: int,
    seconds: float,
    *,
    by: Literal["shoal", "keras"] = "shoal",
    **arguments: object,
) -> float:
    """Steps a second of all processes together; they begin to measure at the same moment. `job`: of benchmarks.jobs."""
    command = [sys.executable, "-m", "benchmarks.compute_only"]
    command += [job, str(batch), str(seconds), by, json.dumps(arguments)]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
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


def shoal(job: Any, batch: int) -> Callable[[], int]:
    """Does one step of the worker's function."""
    from shoal_trainer.worker.buffers import Buffers
    from shoal_trainer.worker.glue import Glue

    example = job.data.example(batch)
    glue = Glue(job.model(), example, job.wire, (0, 0))
    buffers = Buffers(glue.layout.size, glue.dtype, glue.alias)

    def advance() -> int:
        glue.step(buffers.tensor, example)
        return 1

    return advance


def keras(job: Any, batch: int) -> Callable[[], int]:
    """Does some steps of `fit`."""
    import tensorflow as tf

    example, model = job.data.example(batch), job.model()
    data = tf.data.Dataset.from_tensors((example.x, example.y, example.weights)).repeat()

    def advance() -> int:
        model.fit(data, steps_per_epoch=FIT_STEPS, shuffle=False, verbose=0)
        return FIT_STEPS

    return advance


def main() -> None:
    """One process."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from benchmarks import jobs

    name, batch, seconds, by, arguments = sys.argv[1:]
    job = getattr(jobs, name)(**json.loads(arguments))
    advance = {"shoal": shoal, "keras": keras}[by](job, int(batch))
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
