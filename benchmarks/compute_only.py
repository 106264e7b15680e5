"""What the cores can compute without a parameter server: the same step function, in the same number of processes.

As a script: `python -m benchmarks.compute_only JOB BATCH SECONDS ARGUMENTS` prints its steps a second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from benchmarks.runs import START_SECONDS


def rate(job: str, batch: int, processes: int, seconds: float, **arguments: object) -> float:
    """Steps a second of all processes together; they begin to measure at the same moment. `job`: of benchmarks.jobs."""
    command = [sys.executable, "-m", "benchmarks.compute_only"]
    command += [job, str(batch), str(seconds), json.dumps(arguments)]
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
    from benchmarks import jobs
    from shoal_trainer.worker.buffers import Buffers
    from shoal_trainer.worker.glue import Glue

    name, batch, seconds, arguments = (
        sys.argv[1],
        int(sys.argv[2]),
        float(sys.argv[3]),
        json.loads(sys.argv[4]),
    )
    job = getattr(jobs, name)(**arguments)
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
