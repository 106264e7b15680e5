"""How many more samples do N asynchronous workers need for the same loss, and does the online fit know it?

`python -m benchmarks.efficiency [FIRST_SEED]` trains the networks of `convergence` on the real shard in virtual time
with 1 to 16 workers, prints the samples to a loss relative to one worker, and how far the samples left are off that
`shoal.sizing.speed.efficiency` foresees.
"""

from __future__ import annotations

import sys

import numpy as np

from benchmarks.tasks import BATCH
from benchmarks.virtual_job import Job, VirtualJob
from shoal.sizing.speed.efficiency import samples_to_target
from shoal.sizing.speed.measurements import Evaluation

__all__ = ["curve", "samples_to"]

CASES = (("digits", "momentum"), ("MNIST", "momentum"))
WORKERS = (1, 2, 4, 8, 16)
SEEDS = 3
EVERY = 5
"""Updates between two evaluations."""


def curve(data: str, optimizer: str, workers: int, seed: int) -> tuple[list[int], list[float]]:
    """Samples, and the cross-entropy on the held-out set after so many."""
    run = VirtualJob(Job(data, workers, seed, optimizer))
    samples, losses = [], []
    for done in range(EVERY, run.updates + 1, EVERY):
        run.train(EVERY)
        samples.append(done * BATCH)
        losses.append(run.loss())
    return samples, losses


def samples_to(loss: float, samples: list[int], losses: list[float]) -> float | None:
    """The samples after which the loss is below `loss` for the first time, interpolated; None: never."""
    for at, value in enumerate(losses):
        if value <= loss:
            if at == 0:
                return float(samples[0])
            part = (losses[at - 1] - loss) / (losses[at - 1] - value)
            return samples[at - 1] + part * (samples[at] - samples[at - 1])
    return None


def foreseen(
    samples: list[int], losses: list[float], workers: int, loss: float, part: float
) -> tuple[float, bool] | None:
    """What the fit says after a part of the samples to a loss: its error, and whether the truth was in its 90 %.

    None: the loss was not reached, or the fit has no answer.
    """
    truth = samples_to(loss, samples, losses)
    if truth is None:
        return None
    known = [
        Evaluation(at, value, workers)
        for at, value in zip(samples, losses, strict=True)
        if at <= part * truth
    ]
    if not known:
        return None
    found = samples_to_target(known, loss, rises=False, workers=workers)
    if found.samples is None:
        return None
    off = float(np.log(found.samples / (truth - known[-1].samples)))
    return float(np.exp(abs(off)) - 1), abs(off) <= 1.6449 * found.sigma


if __name__ == "__main__":
    first = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    told: dict[float, list[tuple[float, bool] | None]] = {0.5: [], 0.7: [], 0.85: []}
    for data, optimizer in CASES:
        runs = {n: [curve(data, optimizer, n, seed) for seed in range(first, first + SEEDS)] for n in WORKERS}
        for loss in (0.8, 0.5, 0.4, 0.3):
            needed = {n: [samples_to(loss, *each) for each in found] for n, found in runs.items()}
            reached = {n: [v for v in each if v is not None] for n, each in needed.items()}
            known = {n: float(np.median(v)) for n, v in reached.items() if len(v) == SEEDS}
            cells = ", ".join(
                f"{n}: {known[n] / known[1]:.2f}" if n in known else f"{n}: not reached" for n in WORKERS
            )
            print(f"{data}, {optimizer}, samples to a loss of {loss}, relative to one worker: {cells}")
            for part, each in told.items():
                each += [foreseen(*one, n, loss, part) for n, found in runs.items() for one in found]
    for part, each in told.items():
        said = [one for one in each if one is not None]
        print(
            f"after {part:.0%} of the samples to a loss: {len(said)} of {len(each)} foreseen, median error "
            f"{np.median([error for error, _ in said]):.0%}, {np.mean([inside for _, inside in said]):.0%} in 90 %"
        )
