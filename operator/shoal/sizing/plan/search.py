"""Exact search over all combinations while that is affordable, and it says when it is not.

spotDNN's heuristic looks at windows of instances to save time; vectorised, all of 20 million combinations are a
matter of seconds, so heuristics begin beyond that (`local`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from shoal.sizing.plan.evaluation import Evaluator, Model
from shoal.sizing.plan.found import Found
from shoal.sizing.plan.grid import Grid
from shoal.sizing.plan.local import local_search
from shoal.sizing.plan.problem import Objective

__all__ = ["EXACT_LIMIT", "exact_search", "search"]

EXACT_LIMIT = 20_000_000
"""Combinations up to which every one is looked at."""

_SMALL = 8  # blocks that are not worth a thread


def search(model: Model, *, exact_limit: int = EXACT_LIMIT) -> tuple[Found, bool]:
    """Search a model's combinations; also say whether all of them were looked at."""
    evaluators = model.evaluators()
    if Grid(model.limits).size * len(evaluators) <= exact_limit:
        return exact_search(evaluators, model.limits, model.objective), True
    return local_search(model), False


def exact_search(
    evaluators: Sequence[Evaluator], limits: Sequence[int], objective: Objective, threads: int | None = None
) -> Found:
    """Look at every combination with every evaluator, on as many threads as there are processors."""
    grid = Grid(limits)
    tasks = len(grid) * len(evaluators)
    workers = min(threads or len(os.sched_getaffinity(0)), tasks)

    def part(first: int) -> Found:
        found = Found(objective, len(limits))
        for task in range(first, tasks, workers):
            block, variant = divmod(task, len(evaluators))
            counts = grid[block]
            found.add(counts, evaluators[variant](counts), variant)
        return found

    if tasks <= _SMALL or workers == 1:
        workers = 1
        return part(0)
    whole = Found(objective, len(limits))
    with ThreadPoolExecutor(workers) as pool:  # numpy lets go of the interpreter's lock in its loops
        for found in pool.map(part, range(workers)):
            whole.merge(found)
    return whole
