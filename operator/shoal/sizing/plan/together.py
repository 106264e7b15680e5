"""Plans of several jobs that share pools: their candidates are found alone and chosen together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shoal.sizing.plan.answer import Plan
from shoal.sizing.plan.assign import Columns, assign
from shoal.sizing.plan.elastic import ElasticModel
from shoal.sizing.plan.evaluation import Evaluated
from shoal.sizing.plan.found import Shortlist, ranks
from shoal.sizing.plan.planner import plan
from shoal.sizing.plan.problem import Objective, Problem
from shoal.sizing.plan.risk import Walk
from shoal.sizing.plan.search import look_at, search

__all__ = ["plan_together"]

MOST_COLUMNS = 1024
MOST_EXACT = 300_000
"""Of up to so many combinations of a job each one is looked at; of more, about as many are (`local_search`): a test
has what two jobs cost together then within 2 % of the exact trade."""


def plan_together(
    problems: Sequence[Problem], priorities: Sequence[int], between: Callable[[], None] = lambda: None
) -> list[Plan | None]:
    """A plan for each, in the same order; together they need no more of any pool than its limit.

    None: there is no node for it. `between`: called before each of two parts of the work for each.

    Problems are those of jobs as if each were alone; of one priority, they are in the order of urgency. Jobs whose
    limits cannot all be kept get what counts instead (`Objective.in_order`) in what the others leave. Least is to be,
    by priority, the sum of what each job prefers to be small, as a part of the least that it could have; of those that
    prefer to be cheap, what they cost together.
    """
    pools = [pool for problem in problems for pool in problem.pools]
    names = list(dict.fromkeys(pool.name for pool in pools))
    columns = list[Columns]()
    for problem, priority in zip(problems, priorities, strict=True):
        between()
        columns.append(_columns(problem, priority, names))
    free = np.array([max(float(pool.nodes) for pool in pools if pool.name == name) for name in names])
    chosen = assign(_in_one_unit(columns, problems), free)
    taken = [
        np.zeros(len(names)) if at is None else each.counts[:, at]
        for each, at in zip(columns, chosen, strict=True)
    ]
    free, found = free - sum(taken), dict[int, Plan | None]()
    for number in sorted(range(len(problems)), key=lambda i: (chosen[i] is not None, -priorities[i])):
        between()
        free = free + taken[number]
        answer = _within(problems[number], dict(zip(names, free, strict=True)))
        found[number] = answer
        for pool, n in zip(answer.pools, answer.counts, strict=True) if answer is not None else ():
            free[names.index(pool.name)] -= n
    return [found[number] for number in range(len(problems))]


def _in_one_unit(columns: Sequence[Columns], problems: Sequence[Problem]) -> list[Columns]:
    """The columns with money as a part of what the mean job costs alone, and all else of the least of the same job."""
    least = [float(each.cost.min(initial=np.inf)) for each in columns]
    money = [
        problem.objective.prefer == "MinCost" and not each.late
        for each, problem in zip(columns, problems, strict=True)
    ]
    mean = float(np.mean([own for own, paid in zip(least, money, strict=True) if paid] or [1.0]))
    return [
        replace(each, cost=each.cost / ((mean if paid else own) or 1.0))
        for each, paid, own in zip(columns, money, least, strict=True)
    ]


def _columns(problem: Problem, priority: int, names: Sequence[str]) -> Columns:
    """The candidates of a job that keep its limits with the confidence asked for, by the tables of simulated runs.

    Of a job that cannot keep them, those that do what counts instead.
    """
    for objective in problem.objective.in_order:
        found = _by(problem, objective, priority, names)
        if len(found.cost):
            break
    return found


def _by(problem: Problem, objective: Objective, priority: int, names: Sequence[str]) -> Columns:
    """The candidates of a job that keep the limits of an objective."""
    model = ElasticModel(replace(problem, objective=objective), objective.margin)
    cheap = replace(model, problem=replace(problem, objective=replace(objective, prefer="MinCost")))
    lists = [search(cheap, exact_limit=MOST_EXACT)[0].shortlist]
    if objective.prefer != "MinCost":
        lists.append(_of_all_sizes(model))
    parts = [(each, _kept(model, each)) for each in lists]
    counts, seconds, cost = (
        np.concatenate([getattr(each, name)[..., kept] for each, kept in parts], axis=-1)
        for name in ("counts", "seconds", "cost")
    )
    value, _ = ranks(objective, Evaluated(seconds, seconds, cost, cost))
    order = np.argsort(value, kind="stable")
    by_pool = np.zeros((len(names), len(order)))
    for row, pool in enumerate(problem.pools):
        by_pool[names.index(pool.name)] = counts[row, order]
    return Columns(by_pool, value[order], priority, late=objective != problem.objective)


def _of_all_sizes(model: ElasticModel) -> Shortlist:
    """Candidates from one worker to the most: those that a search keeps want nearly all nodes, as does the next job."""
    limits = np.array(model.problem.limits, dtype=np.float64)
    most = min(float(sum(limits)), model.problem.max_workers or np.inf)
    parts = np.random.default_rng(0).dirichlet(np.full(len(limits), 0.5), MOST_COLUMNS)
    sizes = np.linspace(1.0, most, MOST_COLUMNS)
    counts = np.unique(np.minimum(np.rint(parts.T * sizes), limits[:, None]), axis=1)
    return look_at(model, counts).shortlist


def _kept(model: ElasticModel, shortlist: Shortlist) -> NDArray[np.int64]:
    """(m,) which candidates keep the limits, in their order: `MOST_COLUMNS` of them, or all."""
    objective, kept = model.problem.objective, np.arange(len(shortlist.first))
    if len(kept) and objective.limited:
        kept = _sure(Walk(model, float(shortlist.seconds[0])), shortlist)
    return kept[:MOST_COLUMNS]


def _sure(walk: Walk, shortlist: Shortlist) -> NDArray[np.int64]:
    """(m,) which candidates keep the limits, in their order: `MOST_COLUMNS` of them, and some more, or all."""
    kept = np.empty(0, dtype=np.int64)
    for start in range(0, len(shortlist.first), MOST_COLUMNS):
        likely = walk.likely(shortlist, slice(start, start + MOST_COLUMNS), careful=True)
        kept = np.concatenate([kept, start + np.flatnonzero(likely)])
        if len(kept) >= MOST_COLUMNS:
            break
    return kept


def _within(problem: Problem, left: dict[str, float]) -> Plan | None:
    """The plan of a job in what it was given; None: that is nothing."""
    given = sum(int(min(pool.nodes, left[pool.name])) for pool in problem.pools)
    if given == 0:
        return None
    steady = sum(int(min(pool.nodes, left[pool.name])) for pool in problem.pools if not pool.spot)
    least = replace(
        problem,
        min_workers=min(problem.min_workers, given),
        min_on_demand=min(problem.min_on_demand, steady),
    )
    return plan(least.within(left), exact_limit=MOST_EXACT)
