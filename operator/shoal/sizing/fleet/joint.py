"""Plans of several jobs together, where what each takes for itself is dear or leaves another without nodes.

Jobs trade nodes where that lets more of them keep their limits, or where together they cost clearly less. What they
carry out already is kept where trading is not surely better.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from itertools import chain

import numpy as np

from shoal.errors import UsageError
from shoal.sizing.availability import Floats
from shoal.sizing.fleet.alone import Given, Solved, fits
from shoal.sizing.fleet.answers import answer_of
from shoal.sizing.fleet.problems import JobProblem
from shoal.sizing.fleet.traders import (
    MOST_TRADERS,
    WORTH_A_TRADE,
    apart,
    full_of,
    late_of,
    prefers,
    traders_of,
    used,
)
from shoal.sizing.fleet.values import FleetJob, JobPlan
from shoal.sizing.plan.planner import exactly, plan
from shoal.sizing.plan.switch import Switch, is_sure, switch
from shoal.sizing.plan.together import plan_together

__all__ = ["better_together"]

SAME, MOST_TIMES = 1e-9, 1e3
"""What differs by no more is the same, and more times as much is no more than that: what is free, or never ends."""
MOST_GROUPS = 3
"""A plan tries no more, but one in each part: for each job, a trade takes about as long as its plan alone."""


def better_together(
    order: Sequence[Solved],
    given: Given,
    between: Callable[[], None] = lambda: None,
    lost: Container[str] = (),
) -> dict[str, Solved]:
    """What is better than the jobs' own plans, one after another: a trade between them, or what is planned already.

    Those that share no pool, not even by way of others, have nothing to trade: whoever waits in one of them ends no
    trade elsewhere. Of many jobs, parts in which all are in time go on without one. `between`: see `plan_together`.
    `lost`: jobs that no trade would have in time.
    """
    best = dict[str, Solved]()
    planned = [each for each in order if each.one is not None and not each.job.is_held]
    more = iter(range(MOST_GROUPS - 1))  # of all parts
    for able in apart(planned):
        if len(able) > 1:
            limits = _left(given.limits, order, able)
            with suppress(UsageError):
                runs = len(planned) > MOST_TRADERS and not late_of(able) and _kept(able, limits, given)
                found = runs or _best(able, limits, given, between, lost, chain(range(1), more))
                best |= {each.job.name: each for each in found}
    return best


def _best(
    able: Sequence[Solved],
    limits: Mapping[str, int],
    given: Given,
    between: Callable[[], None],
    lost: Container[str],
    groups: Iterable[int],
) -> Sequence[Solved]:
    """What is carried out, or else the jobs' own plans, with all trades.

    Of many jobs, groups trade: several that are late; where they find none, one of them, and they all have tried. Once
    all that are late have, the others trade for money: one that nothing helps would stop that for ever.
    """
    best, many, most = able, len(able) > MOST_TRADERS, MOST_TRADERS
    seen, tried = set[str](), set[str]()
    if many:
        full = full_of(able, limits)
        tried = {
            each.job.name
            for each in late_of(able)
            if each.job.name in lost or _is_lost(each, full, limits, given, between)
        }
    for _ in groups:
        traders = traders_of(best, given.pools, limits, tried, most)
        traded = {each.job.name: each for each in _traded(traders, best, limits, given, between)}
        best = [traded.get(each.job.name, each) for each in best]
        late = {each.job.name for each in late_of(traders if many else best)} - tried
        if not (late or traded) or (traded and not many):
            break
        seen |= late
        if many and not traded and len(late) > 1 and most > 1:
            most = 1
        else:
            tried |= late if traded else seen
    return _kept(best, limits, given) or best


def _is_lost(
    each: Solved, full: Set[str], limits: Mapping[str, int], given: Given, between: Callable[[], None]
) -> bool:
    """Whether a late job misses its limits with all nodes, too, so that no trade helps it: as one over its budget."""
    assert each.one is not None
    if each.one.problem.objective.is_lost or full.isdisjoint(each.job.pools):
        return True
    between()
    try:
        return not plan(given.problem(each.job, limits).problem).feasible
    except UsageError:  # it needs more nodes than there are
        return True


def _left(limits: Mapping[str, int], plans: Sequence[Solved], some: Sequence[Solved]) -> dict[str, int]:
    """The nodes by pool that there are for some of the jobs, beside what all others have."""
    others = used(plans) - used(some)
    return {name: max(limit - others[name], 0) for name, limit in limits.items()}


def _traded(
    traders: Sequence[Solved],
    able: Sequence[Solved],
    limits: Mapping[str, int],
    given: Given,
    between: Callable[[], None],
) -> Sequence[Solved]:
    """Better plans where a job misses its limits, or pays more, because of what others took that need it less."""
    left, asked = _left(limits, able, traders), list[tuple[Solved, JobProblem]]()
    for each in traders:
        with suppress(UsageError):  # it needs more nodes than all of them have
            asked.append((each, given.problem(each.job, left)))
    if len(asked) < 2:
        return ()
    priorities = [each.job.priority for each, _ in asked]
    found = plan_together([one.problem for _, one in asked], priorities, between)
    traded = [
        Solved(each.job, answer, one, plan)
        for (each, one), plan in zip(asked, found, strict=True)
        if plan is not None and each.job.accepts((answer := answer_of(each.job, one, plan)).counts)
    ]
    names = {each.job.name for each in traded}
    if used(
        [each for each in traders if each.job.name not in names]
    ).total():  # who gets nothing has none to give
        return ()
    traders = [each for each in traders if each.job.name in names]
    if _missed(traded) != _missed(traders):
        return traded if _missed(traded) < _missed(traders) and not _pays_downwards(traded, traders) else ()
    if not any(each.answer.feasible for each in traders):  # what jobs cost that are late is not what counts
        return ()
    return traded if _is_better(traded, traders) else ()


def _is_better(traded: Sequence[Solved], before: Sequence[Solved]) -> bool:
    """Whether a trade is better for the jobs of the highest priority for which it is not the same.

    It is if in the geometric mean they then have less of what each prefers to be small; of those that prefer to be
    cheap, of what they cost together.
    """
    moves, otherwise = (sum(_moved(each.job, each.answer) for each in plans) for plans in (traded, before))
    for level in _levels(before):
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
    return [
        sum(each.job.priority == level and not each.answer.feasible for each in plans)
        for level in _levels(plans)
    ]


def _levels(plans: Sequence[Solved]) -> list[int]:
    """The priorities of jobs, the highest first."""
    return sorted({each.job.priority for each in plans}, reverse=True)


def _pays_downwards(traded: Sequence[Solved], before: Sequence[Solved]) -> bool:
    """Whether a late job ends later than before, and only jobs of lower priority are in time for it."""
    missed = zip(_levels(before), _missed(traded), _missed(before), strict=True)
    gains = next(level for level, now, then in missed if now < then)
    return any(
        _times(_ends(new), _ends(old)) > 1 + SAME
        for new, old in zip(traded, before, strict=True)
        if old.job.priority > gains and not old.answer.feasible
    )


def _ends(each: Solved) -> float:
    """When a job ends, from now: never, where that is not known."""
    seconds = each.answer.finish_seconds
    return math.inf if seconds is None else seconds


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
