"""Beside tf.distribute.ParameterServerStrategy: the same models in the same run."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness import Measurement, summary
from benchmarks.runs import run
from benchmarks.strategy_peer import Case
from benchmarks.strategy_peer import run as run_peer

REAL = (("resnet20", 16, 1), ("mlp", 64, 1), ("resnet110", 4, 10))
SIMULATED = ((1, 2.2), (2, 2.2), (4, 4.0), (8, 7.0))
RESNET110 = {"parameters": 1_730_000, "tensors": 329}
STEP = 0.1


def measure(quick: bool) -> Iterator[Measurement]:
    """Rates, then CPU time and memory of a parameter server."""
    seconds, repeats = (8.0, 1) if quick else (15.0, 3)
    for model, batch, closure in REAL[:1] if quick else REAL:
        ratios, cpu, memory = [], [], []
        for _ in range(repeats):
            peer = run_peer(Case(model, 2, batch, steps_per_closure=closure, seconds=seconds))
            ours = run(
                "benchmarks.jobs:compute", workers=2, args={"model": model}, batch=batch, seconds=seconds
            )
            ratios.append(ours.rate / peer.rate)
            cpu.append(ours.ps_cpu / peer.ps_cpu)
            memory.append(ours.ps_memory / peer.ps_memory)
        against = f"ParameterServerStrategy, {closure} steps a closure"
        yield summary(f"{model}, 2 workers, steps/s", ratios, "x", against, 1.5)
        yield summary(f"{model}, PS processor time a step", cpu, "x", against, at_most=True)
        yield summary(f"{model}, PS memory", memory, "x", against, at_most=True)
    for workers, goal in SIMULATED[:1] if quick else SIMULATED:
        peer = run_peer(Case("resnet110", workers, step_seconds=STEP, seconds=seconds))
        args = {**RESNET110, "milliseconds": int(STEP * 1000)}
        ours = run("benchmarks.jobs:sleeping", workers=workers, args=args, batch=4, seconds=seconds)
        ratios = [ours.rate / peer.rate]
        against = "ParameterServerStrategy"
        yield summary(f"simulated ResNet-110, {workers} workers", ratios, "x", against, goal)
