"""How many more samples do N asynchronous workers need for the same loss, and does the online fit know it?

`python -m benchmarks.efficiency [FIRST_SEED]` trains the networks of `convergence` on the real shard in virtual time
with 1 to 16 workers, prints the samples to a loss relative to one worker, what of it is learned from a job whose
workers become fewer, and how far the samples left are off that `shoal.sizing.speed.efficiency` foresees.
"""

from __future__ import annotations

import sys

import numpy as np

from benchmarks.tasks import BATCH
from benchmarks.virtual_job import Job, VirtualJob
from shoal.sizing.speed.efficiency import samples_to_target
from shoal.sizing.speed.measurements import Evaluation

__all__ = ["curve", "samples_to"]

CASES = (
    ("digits", "momentum"),
    ("digits", "Adam"),
    ("MNIST", "momentum"),
    ("MNIST", "Adam"),
    ("table", "momentum"),
    ("words", "Adam"),
)
WORKERS = (1, 2, 4, 8, 16)
WAYS = (0.5, 0.7, 0.85, 0.95)
"""The losses to reach: parts of the way from one worker's first loss to its least one."""
MANY = 8
SEEDS = 3
Z90 = 1.6449
EVERY = 5
"""Updates between two evaluations."""


def curve(data: str, optimizer: str, workers: int, seed: int) -> tuple[list[int], list[float]]:
    """Samples, and the cross-entropy on the held-out set after so many."""
    points = _course(VirtualJob(Job(data, workers, seed, optimizer)), workers)
    return [int(point.samples) for point in points], [point.value for point in points]


def learned(data: str, optimizer: str, seed: int) -> tuple[float, float, bool]:
    """What a job learns of k that has `MANY` workers for a third of its samples and one for the rest.

    Gives its median, the standard deviation of its logarithm, and whether it counts as learned.
    """
    run = VirtualJob(Job(data, MANY, seed, optimizer))
    points = _course(run, MANY, run.updates // 3)
    run.shrink(1)
    points += _course(run, 1)
    found = samples_to_target(points, 0.0, rises=False)
    return found.efficiency.penalty, found.efficiency.sigma, found.learned


def _course(run: VirtualJob, workers: int, until: int | None = None) -> list[Evaluation]:
    """Trains to so many updates, with an evaluation every few."""
    points = []
    for _ in range(run.samples // BATCH + EVERY, (until or run.updates) + 1, EVERY):
        run.train(EVERY)
        points.append(Evaluation(run.samples, run.loss(), workers))
    return points


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


def _losses(ones: list[tuple[list[int], list[float]]]) -> list[float]:
    """The losses to reach, from the courses of one worker."""
    first, least = (float(np.mean([end(losses) for _, losses in ones])) for end in (lambda v: v[0], min))
    return [first - way * (first - least) for way in WAYS]


def main(first: int) -> None:
    """Prints everything, for `SEEDS` seeds from `first`."""
    told: dict[float, list[tuple[float, bool] | None]] = {0.5: [], 0.7: [], 0.85: []}
    penalties: list[float] = []
    for data, optimizer in CASES:
        seeds = range(first, first + SEEDS)
        runs = {n: [curve(data, optimizer, n, seed) for seed in seeds] for n in WORKERS}
        of_many = []
        for way, loss in zip(WAYS, _losses(runs[1]), strict=True):
            needed = {n: [samples_to(loss, *each) for each in found] for n, found in runs.items()}
            reached = {n: [v for v in each if v is not None] for n, each in needed.items()}
            known = {n: float(np.median(v)) for n, v in reached.items() if len(v) == SEEDS}
            cells = " | ".join(f"{known[n] / known[1]:.2f}" if n in known else "" for n in WORKERS)
            print(f"| {data}, {optimizer}, {way:.0%} of the way: {loss:.2f} | {cells} |")
            found = {n: (known[n] / known[1] - 1) / (n - 1) for n in known if n > 2}
            penalties += found.values()
            of_many += [found[MANY]] if MANY in found else []
            for part, each in told.items():
                each += [foreseen(*one, n, loss, part) for n, ran in runs.items() for one in ran]
        fits = [learned(data, optimizer, seed) for seed in seeds]
        said = ", ".join(
            f"{k * np.exp(-Z90 * sigma):.2f} to {k * np.exp(Z90 * sigma):.2f}{'' if sure else ' (not learned)'}"
            for k, sigma, sure in fits
        )
        print(
            f"{data}, {optimizer}: k of {MANY} workers {min(of_many):.2f} to {max(of_many):.2f}; learned {said}"
        )
    low, middle, high = np.quantile(penalties, (0.05, 0.5, 0.95))
    print(f"k with 4 workers and more: {middle:.2f} ({low:.2f} to {high:.2f} in 90 %)")
    for part, each in told.items():
        answers = [one for one in each if one is not None]
        print(
            f"after {part:.0%} of the samples to a loss: {len(answers)} of {len(each)} foreseen, median error "
            f"{np.median([off for off, _ in answers]):.0%}, {np.mean([inside for _, inside in answers]):.0%} in 90 %"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
