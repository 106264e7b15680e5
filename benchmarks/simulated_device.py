"""The real worker loop on a simulated device: share of N x ideal, where a step sleeps and the cores are free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks import compute_only
from benchmarks.harness import Measurement, summary
from benchmarks.runs import run

CASES = [
    *(
        ("1.73 M", 1_730_000, 100, workers, 1, 0.97 if workers <= 16 else None)
        for workers in (1, 2, 4, 8, 16, 32)
    ),
    ("1.73 M", 1_730_000, 100, 4, 2, None),
    ("25.6 M", 25_600_000, 300, 2, 1, 0.96),
]
"""(name, parameters, milliseconds a step, workers, parameter servers, goal)."""


def measure(quick: bool) -> Iterator[Measurement]:
    """One row for each number of workers. Ideal: the same step in one process, without a parameter server.

    The ideal is measured before each run, since the duration of a sleep varies on a shared host.
    """
    for name, parameters, milliseconds, workers, servers, goal in CASES[:2] if quick else CASES:
        args: dict[str, Any] = {"parameters": parameters, "milliseconds": milliseconds}
        shares, cpu = [], []
        for _ in range(1 if quick or workers > 16 else 3):
            ideal = workers * compute_only.rate("sleeping", 4, 1, 5.0, **args)
            found = run(
                "benchmarks.jobs:sleeping",
                workers=workers,
                args=args,
                batch=4,
                seconds=5 if quick else 12,
                parameter_servers=servers,
            )
            shares.append(found.rate / ideal)
            cpu.append((found.worker_cpu + found.ps_cpu) * ideal)
        title = f"{name}, {milliseconds} ms, {workers} workers, {servers} PS, bf16"
        yield summary(title, shares, "x", "workers x the same step with no PS", goal)
        yield summary(
            f"{title}, cores that ideal would take", cpu, "cores", "processor time a step, workers and PS"
        )
