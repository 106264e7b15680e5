"""Exact search over all combinations up to a limit, local search beyond it.

spotDNN's heuristic evaluates windows of instances only. Vectorized, 20 million combinations take seconds, so the
heuristic (`local`) is needed only beyond that.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from shoal.sizing.availability import Floats
from shoal.sizing.plan.evaluation import Evaluator, Model
from shoal.sizing.plan.found import Found
from shoal.sizing.plan.grid import Grid
from shoal.sizing.plan.local import local_search
from shoal.sizing.plan.problem import Objective

__all__ = ["EXACT_LIMIT", "exact_search", "look_at", "search"]

EXACT_LIMIT = 20_000_000
"""The most combinations for an exact search."""

_SMALL = 8  # the most blocks that are evaluated without threads


def search(model: Model, after: float = -math.inf, *, exact_limit: int = EXACT_LIMIT) -> tuple[Found, bool]:
    """Search a model's combinations. The second value: whether all of them were evaluated.

    The shortlist has those whose objective is above `after`.
    """
    evaluators, problem = model.evaluators(), model.problem
    if Grid(problem.limits).size * len(evaluators) <= exact_limit:
        return exact_search(evaluators, problem.limits, problem.objective, after=after), True
    return local_search(model), False


def look_at(model: Model, counts: Floats, after: float = -math.inf) -> Found:
    """Evaluate these combinations (k, m), and no others, with every evaluator."""
    found = Found(model.problem.objective, len(counts), after=after)
    for variant, evaluator in enumerate(model.evaluators()):
        found.add(counts, evaluator(counts), variant)
    return found


def exact_search(
    evaluators: Sequence[Evaluator],
    limits: Sequence[int],
    objective: Objective,
    threads: int | None = None,
    after: float = -math.inf,
) -> Found:
    """Evaluate every combination with every evaluator, with one thread per processor."""
    grid = Grid(limits)
    tasks = len(grid) * len(evaluators)
    workers = min(threads or len(os.sched_getaffinity(0)), tasks)

    def part(first: int) -> Found:
        found = Found(objective, len(limits), after=after)
        for task in range(first, tasks, workers):
            block, variant = divmod(task, len(evaluators))
            counts = grid[block]
            found.add(counts, evaluators[variant](counts), variant)
        return found

    if tasks <= _SMALL or workers == 1:
        workers = 1
        return part(0)
    whole = Found(objective, len(limits), after=after)
    with ThreadPoolExecutor(workers) as pool:  # numpy releases the GIL in its loops
        for found in pool.map(part, range(workers)):
            whole.merge(found)
    return whole
