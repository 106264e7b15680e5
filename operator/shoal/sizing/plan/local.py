"""Local search for too many combinations: seeds from windows of similar workers, and steepest descent from the best.

The seeds are spotDNN's idea (Algorithm 1 of the paper): workers sorted by step time, in windows of n neighbors. A
second order, by price per speed, finds what the first misses. From the best seeds, moves that add, remove or swap
workers are tried until none helps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from shoal.sizing.availability import Floats
from shoal.sizing.plan.evaluation import Evaluated, Evaluator, Model
from shoal.sizing.plan.found import Found, feasible, ranks
from shoal.sizing.plan.grid import BLOCK
from shoal.sizing.plan.problem import Objective, Pool

__all__ = ["local_search"]

SEEDS = 6  # of each kind, per choice of parameter servers
SIZES, SEEN = 400, 2_000_000  # window lengths, and window starts; fewer of them with so many numbers in all
MOST_MOVES = 500


def local_search(model: Model) -> Found:
    """Descend from the best windows towards the objective, the least time and the least cost."""
    problem = model.problem
    found = Found(problem.objective, len(problem.limits))
    limits = np.array(problem.limits, dtype=np.float64)
    seeds = _windows(problem.pools, problem.limits)
    steps = _moves(problem.limits)
    for variant, evaluator in enumerate(model.evaluators()):
        for goal in _goals(problem.objective):
            scores = np.concatenate(
                [
                    _score(goal, _look(evaluator, seeds[:, at : at + BLOCK], variant, found))
                    for at in range(0, seeds.shape[1], BLOCK)
                ]
            )
            for seed in np.argsort(scores, kind="stable")[:SEEDS]:
                _descend(seeds[:, seed], scores[seed], steps, limits, goal, evaluator, variant, found)
    return found


def _goals(objective: Objective) -> list[Objective]:
    """The objective, and the two ends of the Pareto front, which show what binds if nothing is feasible."""
    return [objective, Objective(prefer="MinTime"), Objective(prefer="MinCost")]


def _look(evaluator: Evaluator, counts: Floats, variant: int, found: Found) -> Evaluated:
    out = evaluator(counts)
    found.add(counts, out, variant)
    return out


def _score(goal: Objective, out: Evaluated) -> Floats:
    """(m,) the score, lower is better: plans within the limits first, then by how much they miss them."""
    first, _ = ranks(goal, out)
    in_time, in_budget = feasible(goal, out)
    over = np.zeros_like(first)
    if goal.deadline is not None:
        over += np.maximum(out.sure_seconds / goal.deadline - 1, 0)
    if goal.budget is not None:
        over += np.maximum(out.cost / goal.budget - 1, 0)
    # An offset that no cost or time reaches separates the two kinds.
    return np.asarray(
        np.where(in_time & in_budget, first, np.where(np.isfinite(first), 1e30 * (1 + over), np.inf))
    )


def _descend(
    start: Floats,
    score: float,
    steps: Floats,
    limits: Floats,
    goal: Objective,
    evaluator: Evaluator,
    variant: int,
    found: Found,
) -> None:
    here = start
    for _ in range(MOST_MOVES):
        near = here[:, None] + steps
        near = near[:, ((near >= 0) & (near <= limits[:, None])).all(axis=0)]
        if near.shape[1] == 0:
            return
        scores = _score(goal, _look(evaluator, near, variant, found))
        best = int(np.argmin(scores))
        if not scores[best] < score:
            return
        here, score = near[:, best], scores[best]


def _windows(pools: Sequence[Pool], limits: Sequence[int]) -> Floats:
    """(k, s) counts of workers in windows of two orders, which wrap around."""
    speed = [pool.samples_per_second for pool in pools]
    price = [pool.price + 1e-9 for pool in pools]
    orders = [
        sorted(range(len(pools)), key=lambda i: pools[i].step_seconds),
        sorted(range(len(pools)), key=lambda i: price[i] / speed[i]),
    ]
    seeds, most = [], min(SIZES, math.isqrt(SEEN // len(pools)))
    for order in orders:
        ends = np.cumsum([limits[i] for i in order])
        total = int(ends[-1])
        begins = ends - [limits[i] for i in order]
        lengths = np.unique(np.linspace(1, total, min(total, most)).round())
        starts = np.unique(np.linspace(0, total - 1, min(total, most)).round())
        first, n = (grid.ravel() for grid in np.meshgrid(starts, lengths))
        counts = np.zeros((len(pools), len(first)))
        for turn in (0, total):  # a window wraps around the end
            overlap = np.minimum(first + n, ends[:, None] + turn) - np.maximum(first, begins[:, None] + turn)
            counts[order] += np.maximum(overlap, 0)
        seeds.append(counts)
    every = np.concatenate(seeds, axis=1)
    # Equal columns have equal sums of whole numbers, and nearly no others: sorting columns takes ten times as long.
    key = np.random.default_rng(0).integers(0, 2**31, len(pools)) @ every.astype(np.int64)
    return every[:, np.sort(np.unique(key, return_index=True)[1])]


def _moves(limits: Sequence[int]) -> Floats:
    """(k, s) changes: more or fewer of one pool, in steps that double, and swaps 1:1, 1:2 and 2:1 of two pools."""
    moves = list[tuple[int, int, int, int]]()  # of a pool by so many, and of another one
    for i, limit in enumerate(limits):
        for size in (1 << power for power in range(max(limit, 1).bit_length())):
            moves += [(i, size, i, 0), (i, -size, i, 0)]
            swaps = {size, 2 * size, max(size // 2, 1)}
            moves += [(i, size, j, -other) for j in range(len(limits)) if j != i for other in swaps]
    changed, by, other, less = np.array(moves).T
    found, column = np.zeros((len(limits), len(moves))), np.arange(len(moves))
    found[changed, column] = by
    found[other, column] += less
    return found
