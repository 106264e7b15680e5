"""Plans of several jobs together, where what each takes for itself is dear or leaves another without nodes.

Jobs trade nodes where that lets more of them keep their limits, or where together they cost clearly less. What they
carry out already is kept where trading is not surely better.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence

import numpy as np

from shoal.errors import UsageError
from shoal.sizing.availability import Floats
from shoal.sizing.fleet.alone import Given, Solved, fits
from shoal.sizing.fleet.answers import answer_of
from shoal.sizing.fleet.traders import MOST_TRADERS, WORTH_A_TRADE, late_of, prefers, traders_of, used
from shoal.sizing.fleet.values import FleetJob, JobPlan
from shoal.sizing.plan.planner import exactly, plan
from shoal.sizing.plan.switch import Switch, is_sure, switch
from shoal.sizing.plan.together import plan_together

__all__ = ["better_together"]

SAME, MOST_TIMES = 1e-9, 1e3
"""What differs by no more is the same, and more times as much is no more than that: what is free, or never ends."""
MOST_GROUPS = 3
"""A plan tries no more: for each job, a trade takes about as long as its plan alone."""


def better_together(
    order: Sequence[Solved],
    given: Given,
    between: Callable[[], None] = lambda: None,
    lost: Container[str] = (),
) -> dict[str, Solved]:
    """What is better than the jobs' own plans, one after another: a trade between them, or what is planned already.

    `between`: see `plan_together`. `lost`: jobs that no trade would have in time.
    """
    able = [each for each in order if each.one is not None and not each.job.is_held]
    if len(able) < 2:
        return {}
    limits = given.limits
    for each in order:
        if each.one is None or each.job.is_held:
            for name, count in each.job.holds(each.answer.counts).items():
                if name in limits:
                    limits[name] = max(limits[name] - count, 0)
    try:
        best = _best(able, limits, given, between, lost)
    except UsageError:
        return {}
    return {each.job.name: each for each in best}


def _best(
    able: Sequence[Solved],
    limits: Mapping[str, int],
    given: Given,
    between: Callable[[], None],
    lost: Container[str],
) -> Sequence[Solved]:
    """What is carried out, or else the jobs' own plans, with all trades.

    Of many jobs, groups trade until one finds no trade; where several that are late find none, one may. Once all
    that are late have tried, the others trade for money: one that nothing helps would stop that for ever.
    """
    best, many, most, tried = able, len(able) > MOST_TRADERS, MOST_TRADERS, set[str]()
    helped = {
        each.job.name for each in able if many and (each.job.name in lost or _is_lost(each, limits, given))
    }
    if many and not late_of(able) and (runs := _kept(able, limits, given)):
        return runs
    for _ in range(MOST_GROUPS if many else 2):
        traders = traders_of(best, given.pools, limits, helped, most)
        traded = {each.job.name: each for each in _traded(traders, best, limits, given, between)}
        best = [traded.get(each.job.name, each) for each in best]
        late = {each.job.name for each in late_of(traders if many else best)}
        tried |= late
        if traded and not many:
            break
        if traded:
            helped |= late
        elif many and len(late) > 1 and most > 1:
            most = 1
        elif not tried <= helped and {each.job.name for each in late_of(best)} <= tried | helped:
            helped |= tried
        else:
            break
    return _kept(best, limits, given) or best


def _is_lost(each: Solved, limits: Mapping[str, int], given: Given) -> bool:
    """Whether a job misses its limits with all nodes, too, so that no trade helps it: as one over its budget."""
    if each.answer.feasible:
        return False
    try:
        return not plan(given.problem(each.job, limits).problem).feasible
    except UsageError:  # it needs more nodes than there are
        return True


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
    others = used(able) - used(traders)
    left = {name: max(limit - others[name], 0) for name, limit in limits.items()}
    try:
        problems = [given.problem(each.job, left) for each in traders]
    except UsageError:  # one of them needs more nodes than all of them have
        return ()
    priorities = [each.job.priority for each in traders]
    found = plan_together([one.problem for one in problems], priorities, between)
    if found is None:
        return ()
    traded = [
        Solved(each.job, answer_of(each.job, one, plan), one, plan)
        for each, one, plan in zip(traders, problems, found, strict=True)
    ]
    if not all(each.job.accepts(each.answer.counts) for each in traded):
        return ()
    if _missed(traded) != _missed(traders):
        return traded if _missed(traded) < _missed(traders) else ()
    if not any(each.answer.feasible for each in traders):  # what jobs cost that are late is not what counts
        return ()
    return traded if _is_better(traded, traders) else ()


def _is_better(traded: Sequence[Solved], before: Sequence[Solved]) -> bool:
    """Whether a trade is better for the jobs of the highest priority for which it is not the same.

    It is if in the geometric mean they then have less of what each prefers to be small; of those that prefer to be
    cheap, of what they cost together.
    """
    moves, otherwise = (sum(_moved(each.job, each.answer) for each in plans) for plans in (traded, before))
    for level in sorted({each.job.priority for each in before}, reverse=True):
        pairs = [pair for pair in zip(traded, before, strict=True) if pair[0].job.priority == level]
        cheap = [pair for pair in pairs if prefers(pair[0]) == "MinCost"]
        cost, was = (sum(pair[side].answer.cost or 0.0 for pair in cheap) for side in (0, 1))
        money = _times(cost, was)
        others = [_times(_value(new), _value(old)) for new, old in pairs if prefers(new) != "MinCost"]
        change = math.exp(float(np.mean(np.log([money] * len(cheap) + others))))
        if abs(change - 1) > SAME:
            # Who has most of the nodes was chance, where that is for the same money.
            return change < (1 if moves < otherwise or abs(money - 1) <= SAME else 1 - WORTH_A_TRADE)
    return False


def _value(each: Solved) -> float:
    """What a job that does not prefer to be cheap prefers to be small: its time, or its mean with the cost."""
    if each.found is None:
        return math.inf
    seconds = each.found.seconds
    return seconds if prefers(each) == "MinTime" else math.sqrt(seconds * each.found.cost)


def _times(new: float, old: float) -> float:
    """How many times as much it is."""
    return 1.0 if new == old else min(max(new / max(old, SAME), 1 / MOST_TIMES), MOST_TIMES)


def _missed(plans: Sequence[Solved]) -> list[int]:
    """How many jobs miss their limits, those of higher priority first."""
    levels = sorted({each.job.priority for each in plans}, reverse=True)
    return [
        sum(each.job.priority == level and not each.answer.feasible for each in plans) for level in levels
    ]


def _kept(best: Sequence[Solved], limits: Mapping[str, int], given: Given) -> list[Solved] | None:
    """The plans that are being carried out, where they fit, keep all limits, and the best are not surely better.

    Together: what one job gains by nodes of another is no gain if that one loses as much, each as a part of its time;
    those that prefer to be cheap, of what they cost. A job of higher priority gains, whatever lower ones lose.
    """
    plans, changes = list[Solved](), defaultdict[int, list[tuple[Solved, Switch]]](list)
    for each in best:
        assert each.one is not None
        counts = [each.job.under_way.get(pool.name, 0) for pool in each.one.problem.pools]
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
        plans.append(Solved(each.job, answer_of(each.job, one, same), one, same))
        changes[each.job.priority].append((plans[-1], change))
    if any(n > limits[name] for name, n in used(plans).items()):
        return None
    for _, level in sorted(changes.items(), reverse=True):
        saved = _saved(level)
        if is_sure(saved):
            return None
        if is_sure(-saved):
            break
    return plans


def _saved(changes: Sequence[tuple[Solved, Switch]]) -> Floats:
    """What jobs of one priority save together by a change from their plans, in each simulated run."""
    faster = [change.saved for _, change in changes if change.timed]
    cheaper = [(change.saved, kept.answer.cost or 0.0) for kept, change in changes if not change.timed]
    cost = sum(cost for _, cost in cheaper)
    with np.errstate(invalid="ignore"):  # where one never ends now, and another would not: no gain
        return np.zeros(1) + sum(faster) + sum(saved for saved, _ in cheaper) * len(cheaper) / (cost or 1.0)


def _moved(job: FleetJob, plan: JobPlan) -> int:
    """Workers that a plan starts or ends."""
    return sum(
        abs(plan.counts.get(pool, 0) - job.running.get(pool, 0)) for pool in {*plan.counts, *job.running}
    )
