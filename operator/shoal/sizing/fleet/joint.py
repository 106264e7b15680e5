"""Plans of several jobs together, where what each takes for itself is dear or leaves another without nodes.

Jobs trade nodes where that lets more of them keep their limits, or where together they cost clearly less. What they
carry out already is kept where trading is not surely better.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from shoal.errors import UsageError
from shoal.sizing.fleet.alone import Given, Solved, exactly, fits, under_way
from shoal.sizing.fleet.answers import answer_of
from shoal.sizing.fleet.values import FleetJob, FleetPool, JobPlan
from shoal.sizing.plan.switch import is_sure, switch
from shoal.sizing.plan.together import plan_together

__all__ = ["better_together"]

WORTH_A_TRADE = 0.1
"""Jobs trade pools where all of them together then cost less by this part, since less is not known any better; or less
at all, if that moves fewer workers: what was traded stays so."""
MOST_TRADERS = 8
"""Of more jobs no cheaper trade is looked for, and no more trade with one that is late: for each, once a minute, it
takes about as long as its plan alone."""


def better_together(
    order: Sequence[Solved], given: Given, between: Callable[[], None] = lambda: None
) -> dict[str, Solved]:
    """What is better than the jobs' own plans, one after another: a trade between them, or what is planned already.

    `between`: see `plan_together`.
    """
    able = [each for each in order if each.one is not None]
    if len(able) < 2:
        return {}
    limits = given.limits
    for each in order:
        if each.one is None:
            for name, count in each.answer.counts.items():
                limits[name] = max(limits[name] - count, 0)
    try:
        traders = _traders(able, given.pools)
        traded = {each.job.name: each for each in _traded(traders, able, limits, given, between)}
        best = [traded.get(each.job.name, each) for each in able]
        best = _kept(best, limits, given) or best
    except UsageError:
        return {}
    return {each.job.name: each for each in best}


def _traders(able: Sequence[Solved], pools: Sequence[FleetPool]) -> Sequence[Solved]:
    """The jobs that may trade, in their order: those that miss their limits, and those that have what these could use.

    Where none misses its limits: all, if one pays more because of what others have.
    """
    late = [each for each in able if not each.answer.feasible]
    if not late:
        return able if len(able) <= MOST_TRADERS and _is_contended(able, pools) else ()
    used = _used(able)
    full = {pool.name for pool in pools if used[pool.name] >= pool.limit > 0}
    wanted = {name for each in late for name in full.intersection(each.job.pools)}

    def has(each: Solved) -> int:
        return sum(each.answer.counts.get(name, 0) for name in wanted)

    others = sorted((each for each in able if each.answer.feasible and has(each)), key=has, reverse=True)
    room = max(MOST_TRADERS - len(late), MOST_TRADERS // 2)
    givers = others[:room]
    chosen = {each.job.name for each in [*givers, *late[: MOST_TRADERS - len(givers)]]}
    return [each for each in able if each.job.name in chosen] if givers else ()


def _traded(
    traders: Sequence[Solved],
    able: Sequence[Solved],
    limits: Mapping[str, int],
    given: Given,
    between: Callable[[], None],
) -> Sequence[Solved]:
    """Better plans where a job misses its limits, or pays more, because of what others took that need it less."""
    if len(traders) < 2:
        return ()
    others = _used(able) - _used(traders)
    left = {name: max(limit - others[name], 0) for name, limit in limits.items()}
    problems = [given.problem(each.job, left) for each in traders]
    priorities = [each.job.priority for each in traders]
    found = plan_together([one.problem for one in problems], priorities, between)
    if found is None:
        return ()
    traded = [
        Solved(each.job, answer_of(each.job, one, plan), one, plan)
        for each, one, plan in zip(traders, problems, found, strict=True)
    ]
    if _missed(traded) != _missed(traders):
        return traded if _missed(traded) < _missed(traders) else ()
    cost, before = (sum(each.answer.cost or 0.0 for each in plans) for plans in (traded, traders))
    moves, otherwise = (sum(_moved(each.job, each.answer) for each in plans) for plans in (traded, traders))
    return traded if cost < (before if moves < otherwise else (1 - WORTH_A_TRADE) * before) else ()


def _used(plans: Sequence[Solved]) -> Counter[str]:
    """Nodes by pool."""
    used = Counter[str]()
    for each in plans:
        used.update(each.answer.counts)
    return used


def _missed(plans: Sequence[Solved]) -> list[int]:
    """How many jobs miss their limits, those of higher priority first."""
    levels = sorted({each.job.priority for each in plans}, reverse=True)
    return [
        sum(each.job.priority == level and not each.answer.feasible for each in plans) for level in levels
    ]


def _kept(best: Sequence[Solved], limits: Mapping[str, int], given: Given) -> list[Solved] | None:
    """The plans that are being carried out, where they fit, keep all limits, and the best are not surely better.

    Together: what one job gains by nodes of another is no gain if that one loses as much.
    """
    plans, saved = list[Solved](), np.zeros(1)
    for each in best:
        assert each.one is not None
        counts = [under_way(each.job).get(pool.name, 0) for pool in each.one.problem.pools]
        if tuple(counts) == each.counts:
            plans.append(each)
            continue
        one = given.problem(each.job, limits)
        if not fits(one.problem, counts):
            return None
        change = switch(one.problem, counts, each.counts, each.answer.parameter_servers)
        same = exactly(one.problem, counts)
        if not (change.kept and same.feasible):
            return None
        saved = saved + change.saved
        plans.append(Solved(each.job, answer_of(each.job, one, same), one, same))
    used = _used(plans)
    if is_sure(saved) or any(n > limits[name] for name, n in used.items()):
        return None
    return plans


def _moved(job: FleetJob, plan: JobPlan) -> int:
    """Workers that a plan starts or ends."""
    return sum(
        abs(plan.counts.get(pool, 0) - job.running.get(pool, 0)) for pool in {*plan.counts, *job.running}
    )


def _is_contended(plans: Sequence[Solved], pools: Sequence[FleetPool]) -> bool:
    """Whether a job uses a dearer pool than one that it names and of which others have all nodes."""
    used = _used(plans)
    full = {pool.name for pool in pools if used[pool.name] >= pool.limit > 0}
    prices = {pool.name: pool.price_per_hour or 0.0 for pool in pools}

    def dear(plan: JobPlan, name: str) -> float:
        return prices[name] / plan.speeds[name] if plan.speeds.get(name) else math.inf

    for each in plans:
        plan = each.answer
        most = max((dear(plan, name) for name, n in plan.counts.items() if n), default=0.0)
        for name in full.intersection(each.job.pools):
            if plan.counts.get(name, 0) < used[name] and dear(plan, name) < most:
                return True
    return False
