"""Real compute, 2 workers: share of what the same processes compute with no parameter server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from benchmarks import compute_only
from benchmarks.harness import Measurement, summary
from benchmarks.runs import status_of, working
from benchmarks.turns import System, rates

WORKERS = 2
REPEATS, TURNS, SECONDS = 3, 2, 3.0
CASES = (
    ("resnet20", 16, 0.95),
    ("resnet20", 64, 0.95),
    ("resnet110", 4, 0.95),
    ("resnet110", 10, 0.95),
    ("mlp", 64, None),
    ("mlp", 512, 0.75),
)
"""(model, batch, goal). The cost of a push does not depend on the batch, so a share depends on the duration of a step.
The goals were set on cores on which a step took 123 ms (16 samples of ResNet-20), 183 ms (4 of ResNet-110) and 23 ms
(64 of the MLP). On the machine of the record, the second batch of each model takes about as long or less."""


def measure(quick: bool) -> Iterator[Measurement]:
    """Compare each model with the worker's step, with a bare socket, and with Keras' `fit`, which take turns.

    Each repeat starts all of them anew, because equal processes differ by some percent for as long as they live.
    """
    for model, batch, goal in CASES[:1] if quick else CASES:
        found = []
        for _ in range(1 if quick else REPEATS):
            with contextlib.ExitStack() as stack:
                found.append(rates(_systems(model, batch, stack), TURNS, SECONDS))

        def shares(of: str, against: str, found: list[dict[str, float]] = found) -> list[float]:
            return [rate[of] / rate[against] for rate in found]

        name = f"{model}, batch {batch}, {WORKERS} workers, bf16"
        own = "the worker's own step without parameter server"
        yield summary(name, shares("job", "shoal"), "x", own, goal)
        bare = f"{name}: a bare socket that sends each update back, instead of a PS"
        yield summary(bare, shares("echo", "shoal"), "x", own)
        fit = "Keras' fit, each process for itself"
        yield summary(f"{name} / Keras' fit", shares("job", "keras"), "x", fit)
        alone = [WORKERS * 1e3 / rate["shoal"] for rate in found]
        yield summary(f"{name}: a step alone", alone, "ms", "no parameter server, both processes at once")


def _systems(model: str, batch: int, stack: contextlib.ExitStack) -> dict[str, System]:
    """The job and its peers, each stopped as soon as it has taken a few steps.

    The job is the last to start: the start of the others takes longer than its timeouts.
    """
    systems: dict[str, System] = {}
    kinds: tuple[compute_only.Kind, ...] = ("shoal", "echo", "keras")
    for by in kinds:
        computing = compute_only.computing("compute", batch, WORKERS, by=by, model=model)
        systems[by] = stack.enter_context(computing).system()
        systems[by].stop()
    local = stack.enter_context(
        working("benchmarks.jobs:compute", workers=WORKERS, args={"model": model}, batch=batch)
    )

    def steps() -> int:
        if any(process.popen.poll() is not None for process in local.processes):
            raise RuntimeError(f"a process of the job has ended: logs in {local.logs}")
        return status_of(local).step

    systems["job"] = System([process.popen.pid for process in local.processes], steps)
    systems["job"].stop()
    return systems
