"""Plans of several jobs that share pools: their candidates are found alone and chosen together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from shoal.sizing.plan.assign import Columns, assign
from shoal.sizing.plan.elastic import ElasticModel
from shoal.sizing.plan.found import Shortlist
from shoal.sizing.plan.planner import Plan, plan
from shoal.sizing.plan.problem import Problem
from shoal.sizing.plan.risk import Walk
from shoal.sizing.plan.search import search

__all__ = ["plan_together"]

MOST_COLUMNS = 1024
MOST_EXACT = 300_000
"""Of up to so many combinations of a job each one is looked at; of more, about as many are (`local_search`): a test
has what two jobs cost together then within 2 % of the exact trade."""


def plan_together(
    problems: Sequence[Problem], priorities: Sequence[int], between: Callable[[], None] = lambda: None
) -> list[Plan] | None:
    """A plan for each, in the same order; together they need no more of any pool than its limit.

    None: there is no node for one of them. `between`: called before each of two parts of the work for each.

    Problems are those of jobs as if each were alone; of one priority, they are in the order of urgency. Jobs whose
    limits cannot all be kept get the fastest plan in what the others leave.
    """
    left = dict[str, float]()
    for pool in (pool for problem in problems for pool in problem.pools):
        left[pool.name] = max(left.get(pool.name, 0.0), float(pool.limit))
    names, found = list(left), dict[int, Plan]()
    columns = list[Columns]()
    for problem, priority in zip(problems, priorities, strict=True):
        between()
        columns.append(_columns(problem, priority, names))
    chosen = assign(columns, np.array(list(left.values())))
    for number in sorted(range(len(problems)), key=lambda i: (chosen[i] is None, -priorities[i])):
        between()
        at, problem = chosen[number], problems[number]
        given = None if at is None else dict(zip(names, columns[number].counts[:, at], strict=True))
        answer = _within(problem, left if given is None else given)
        if given is not None and answer is not None and not answer.feasible:
            answer = _within(problem, left)
        if answer is None:
            return None
        found[number] = answer
        for pool, n in zip(answer.pools, answer.counts, strict=True):
            left[pool.name] = max(left[pool.name] - n, 0.0)
    return [found[number] for number in range(len(problems))]


def _columns(problem: Problem, priority: int, names: Sequence[str]) -> Columns:
    """The candidates of a job that keep its limits with the confidence asked for, by the tables of simulated runs."""
    limited = problem.objective.deadline is not None or problem.objective.budget is not None
    model = ElasticModel(problem, NormalDist().inv_cdf(problem.objective.confidence) if limited else 0.0)
    found, _ = search(model, exact_limit=MOST_EXACT)
    shortlist = found.shortlist
    kept = np.arange(len(shortlist.first))
    if limited and len(kept):
        kept = _sure(Walk(model, float(shortlist.seconds[0])), shortlist)
    kept = kept[:MOST_COLUMNS]
    counts = np.zeros((len(names), len(kept)))
    for row, pool in enumerate(problem.pools):
        counts[names.index(pool.name)] = shortlist.counts[row, kept]
    return Columns(counts, shortlist.cost[kept], priority)


def _sure(walk: Walk, shortlist: Shortlist) -> NDArray[np.int64]:
    """(m,) which candidates keep the limits, in their order: `MOST_COLUMNS` of them, and some more, or all."""
    kept = np.empty(0, dtype=np.int64)
    for start in range(0, len(shortlist.first), MOST_COLUMNS):
        likely = walk.likely(shortlist, slice(start, start + MOST_COLUMNS), careful=True)
        kept = np.concatenate([kept, start + np.flatnonzero(likely)])
        if len(kept) >= MOST_COLUMNS:
            break
    return kept


def _within(problem: Problem, limits: dict[str, float]) -> Plan | None:
    """The plan of a job in what it was given; None: that is nothing."""
    pools = tuple(replace(pool, limit=int(min(pool.limit, limits[pool.name]))) for pool in problem.pools)
    given = sum(pool.limit for pool in pools)
    least = min(problem.min_workers, max(given, 1))
    if given == 0:
        return None
    steady = sum(pool.limit for pool in pools if not pool.spot)
    given_them = replace(
        problem, pools=pools, min_workers=least, min_on_demand=min(problem.min_on_demand, steady)
    )
    return plan(given_them, exact_limit=MOST_EXACT)
