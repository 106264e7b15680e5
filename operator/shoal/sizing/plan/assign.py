"""Which candidate each job runs, so that all fit into the pools together: least total cost, most urgent jobs first.

The exact problem is an integer program (one candidate for each job, the sums of their workers within the limits). It is
solved approximately: jobs in several orders, each taking its cheapest candidate in what is left, under prices of the
pools that rise where too much is wanted (Lagrangian relaxation), then exchanges between pairs of jobs. A test compares
it with the exact optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

import numpy as np
from numpy.typing import NDArray

from shoal.sizing.availability import Floats

__all__ = ["Columns", "assign"]

Chosen = tuple[int | None, ...]

ROUNDS = 12
ORDERS = 24
EXCHANGES = 4
PAIRED = 150  # candidates of a job, about half of them its best, that are tried against each of another one


@dataclass(frozen=True)
class Columns:
    """The candidates of one job in the order of their cost (m,), with their workers (k, m) in all k pools."""

    counts: Floats
    cost: Floats
    priority: int = 0
    late: bool = False
    """None of them keeps its limits: of one priority, jobs that can keep theirs get a candidate first."""


def assign(jobs: Sequence[Columns], limits: Floats) -> Chosen:
    """The candidate of each job, None where none fits.

    More urgent jobs get one if they can, and then the least total cost, whatever that costs the others; among equals as
    many as possible get one. `jobs` are in the order of urgency within a priority.
    """
    best = _in_order(jobs, limits, range(len(jobs)), np.zeros(len(limits)))
    prices = np.zeros(len(limits))
    scale = _scale(jobs, limits)
    for turn in range(ROUNDS):
        for order in _orders(jobs):
            found = _in_order(jobs, limits, order, prices)
            best = min(best, found, key=lambda each: _rank(jobs, each))
        wanted = np.zeros(len(limits))
        for job in jobs:
            if job.counts.shape[1]:
                wanted += job.counts[:, int(np.argmin(job.cost + prices @ job.counts))]
        if turn == 0 and (wanted <= limits).all():
            break
        prices = np.maximum(prices + scale * (wanted - limits) / (turn + 1), 0.0)
    return _exchanged(jobs, limits, best)


def _rank(jobs: Sequence[Columns], chosen: Chosen) -> tuple[float, ...]:
    """Less is better: jobs without a candidate by priority, then the total cost by priority."""
    without, cost = dict[tuple[int, bool], float](), dict[int, float]()
    for job, at in zip(jobs, chosen, strict=True):
        level = -job.priority, job.late
        without[level] = without.get(level, 0.0) + (at is None)
        cost[level[0]] = cost.get(level[0], 0.0) + (0.0 if at is None else float(job.cost[at]))
    return (*(without[level] for level in sorted(without)), *(cost[level] for level in sorted(cost)))


def _in_order(jobs: Sequence[Columns], limits: Floats, order: Sequence[int], prices: Floats) -> Chosen:
    """Every job takes its cheapest candidate, by cost and prices, in what is left."""
    left, chosen = limits.astype(np.float64), [None] * len(jobs)
    found: list[int | None] = list(chosen)
    for number in order:
        job = jobs[number]
        fits = np.flatnonzero((job.counts <= left[:, None]).all(axis=0))
        if len(fits):
            at = int(fits[np.argmin(job.cost[fits] + prices @ job.counts[:, fits])])
            found[number] = at
            left = left - job.counts[:, at]
    return tuple(found)


def _orders(jobs: Sequence[Columns]) -> list[tuple[int, ...]]:
    """Orders of the jobs with higher priorities first, up to `ORDERS` of them."""
    levels = sorted({job.priority for job in jobs}, reverse=True)
    groups = [[i for i, job in enumerate(jobs) if job.priority == level] for level in levels]
    orders: list[tuple[int, ...]] = [()]
    for group in groups:
        several = [group, group[::-1]] if len(group) > 5 else list(permutations(group))
        orders = [(*before, *after) for before in orders for after in several][:ORDERS]
    return orders


def _scale(jobs: Sequence[Columns], limits: Floats) -> float:
    """A first step of the prices: what a worker costs in a typical candidate."""
    each = [
        float(np.median(job.cost / np.maximum(job.counts.sum(axis=0), 1))) for job in jobs if len(job.cost)
    ]
    return float(np.mean(each)) / max(float(np.mean(limits)), 1.0) * 4 if each else 0.0


def _exchanged(jobs: Sequence[Columns], limits: Floats, chosen: Chosen) -> Chosen:
    """Improve pairs of jobs, the others staying as they are."""
    for _ in range(EXCHANGES):
        before = chosen
        for i, j in combinations(range(len(jobs)), 2):
            chosen = _pair(jobs, limits, chosen, i, j)
        if chosen == before:
            break
    return chosen


def _pair(jobs: Sequence[Columns], limits: Floats, chosen: Chosen, i: int, j: int) -> Chosen:
    left = limits.astype(np.float64)
    for number, at in enumerate(chosen):
        if at is not None and number not in (i, j):
            left = left - jobs[number].counts[:, at]
    one, other = jobs[i], jobs[j]
    fits = _some(np.flatnonzero((one.counts <= left[:, None]).all(axis=0)))
    best, rank = chosen, _rank(jobs, chosen)
    for at in fits:
        rest = left - one.counts[:, at]
        second = np.flatnonzero((other.counts <= rest[:, None]).all(axis=0))
        if not len(second):
            continue
        found = list(chosen)
        found[i], found[j] = int(at), int(second[np.argmin(other.cost[second])])
        better = _rank(jobs, tuple(found))
        if better < rank:
            best, rank = tuple(found), better
    return best


def _some(fits: NDArray[np.int64]) -> NDArray[np.int64]:
    """The best, and some of all others."""
    best, others = fits[: PAIRED // 2], fits[PAIRED // 2 :]
    return np.concatenate([best, others[:: 1 + len(others) * 2 // PAIRED]])
