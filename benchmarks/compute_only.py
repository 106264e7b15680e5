"""What the cores can compute without a parameter server: the same step function, in the same number of processes.

As a script: `python -m benchmarks.compute_only MODEL BATCH SECONDS` prints its steps a second.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from benchmarks.runs import START_SECONDS


def rate(model: str, batch: int, processes: int, seconds: float) -> float:
    """Steps a second of all processes together; they begin to measure at the same moment."""
    command = [sys.executable, "-m", "benchmarks.compute_only", model, str(batch), str(seconds)]
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


def main() -> None:
    """One process."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from benchmarks.jobs import compute
    from shoal_trainer.worker.buffers import Buffers
    from shoal_trainer.worker.glue import Glue

    model, batch, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    job = compute(model)
    example = job.data.example(batch)
    glue = Glue(job.model(), example, job.wire, (0, 0))
    buffers = Buffers(glue.layout.size, glue.dtype, glue.alias)
    for _ in range(3):
        glue.step(buffers.tensor, example)
    print("ready", flush=True)
    sys.stdin.readline()
    steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        glue.step(buffers.tensor, example)
        steps += 1
    print(steps / (time.perf_counter() - start), flush=True)


if __name__ == "__main__":
    main()
