"""Plans of several jobs together, where what each takes for itself is dear or leaves another without nodes.

Jobs trade nodes where that lets more of them keep their limits, or where together they cost clearly less. What they
carry out already is kept where trading is not surely better.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Mapping, Sequence

import numpy as np

from shoal.errors import UsageError
from shoal.sizing.availability import Floats
from shoal.sizing.fleet.alone import Given, Solved, fits
from shoal.sizing.fleet.answers import answer_of
from shoal.sizing.fleet.values import FleetJob, FleetPool, JobPlan
from shoal.sizing.plan.planner import exactly
from shoal.sizing.plan.problem import Prefer
from shoal.sizing.plan.switch import Switch, is_sure, switch
from shoal.sizing.plan.together import plan_together

__all__ = ["better_together"]

WORTH_A_TRADE = 0.1
"""Jobs trade pools where all of them together then cost less by this part, since less is not known any better; or less
at all, if that moves fewer workers: what was traded stays so."""
SAME, MOST_TIMES = 1e-9, 1e3
"""What differs by no more is the same, and more times as much is no more than that: what is free, or never ends."""
MOST_TRADERS = 8
"""So many jobs trade together, more of them in groups: the candidates of each are tried against those of each other."""
MOST_GROUPS = 12
"""A plan tries no more: for each job, once a minute, a trade takes about as long as its plan alone. The next one goes
on from what is carried out by then."""


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

    Where a group finds no trade, those that are late look for one singly, and leave half of the time to the others.
    """
    best, many, most = able, len(able) > MOST_TRADERS, MOST_TRADERS
    tried = {each.job.name for each in able if many and each.job.name in lost}
    for number in range(MOST_GROUPS if many else 1):
        if many and number == MOST_GROUPS // 2:
            tried |= {each.job.name for each in _late(best)}
        traders = _traders(best, given.pools, limits, tried, most)
        if many and number == 0 and traders and (runs := _kept(best, limits, given)):
            best = runs
            traders = _traders(best, given.pools, limits, tried, most)
        if not traders:
            break
        traded = {each.job.name: each for each in _traded(traders, best, limits, given, between)}
        best = [traded.get(each.job.name, each) for each in best]
        if not traded and most > 1 and _late(traders):
            most = 1
        else:
            tried |= {each.job.name for each in _late(traders) or traders}
    return _kept(best, limits, given) or best


def _traders(
    able: Sequence[Solved],
    pools: Sequence[FleetPool],
    limits: Mapping[str, int],
    tried: Container[str],
    most: int,
) -> Sequence[Solved]:
    """The jobs that may trade, in their order: those that miss their limits, and those that have what these could use.

    Where nobody else has it, one that is late itself may, of the same priority. Where none misses its limits: all, if
    one pays more because of what others have; of many, some of those. `limits`: the nodes by pool that there are for
    all of them. `tried`: jobs that need not be helped any more. `most`: how many are helped at once.
    """
    late = [each for each in _late(able) if each.job.name not in tried][:most]
    if not late and len(able) > MOST_TRADERS:
        return _dearest([each for each in able if each.job.name not in tried], pools, _full(able, limits))
    if not late:
        return able if not tried and _is_contended(able, pools, limits) else ()
    full = _full(able, limits)
    wanted = {name for each in late for name in full.intersection(each.job.pools)}

    def has(each: Solved) -> int:
        return sum(each.answer.counts.get(name, 0) for name in wanted)

    others = sorted((each for each in able if each.answer.feasible and has(each)), key=has, reverse=True)
    room = max(MOST_TRADERS - len(late), MOST_TRADERS // 2)
    givers = others[:room]
    if not givers:
        number = Counter(each.job.priority for each in late)
        level = next((priority for priority, jobs in number.items() if jobs > 1), late[0].job.priority)
        late = [each for each in late if each.job.priority == level]
    chosen = {each.job.name for each in [*givers, *late[: MOST_TRADERS - len(givers)]]}
    return [each for each in able if each.job.name in chosen]


def _dearest(plans: Sequence[Solved], pools: Sequence[FleetPool], full: set[str]) -> Sequence[Solved]:
    """Of jobs that are to be cheap: to whom a full pool is worth most, and those that have it and to whom it is least.

    A node is worth what a job pays for the same work elsewhere: now, or if it had to leave.
    """
    groups = defaultdict[tuple[int, str], list[Solved]](list)
    for each in plans:
        if _prefers(each) == "MinCost" and each.answer.feasible:
            for name in full.intersection(each.answer.speeds):
                groups[each.job.priority, name].append(each)
    prices = {pool.name: pool.price_per_hour or 0.0 for pool in pools}
    chosen, most = list[Solved](), 0.0
    for (_, name), jobs in groups.items():
        pays, saves = list[tuple[float, Solved]](), list[tuple[float, Solved]]()
        for each in jobs:
            speed, counts = each.answer.speeds[name], each.answer.counts
            dear = {
                other: prices[other] / of * speed
                for other, of in each.answer.speeds.items()
                if other != name and of
            }
            now = max((dear[other] for other in dear if counts.get(other)), default=0.0)
            if now > prices[name]:
                pays.append((now, each))
            if counts.get(name):
                saves.append((min(dear.values(), default=math.inf), each))
        pays.sort(key=lambda pair: -pair[0])
        saves.sort(key=lambda pair: pair[0])
        if pays and saves and pays[0][0] - saves[0][0] > most:
            most = pays[0][0] - saves[0][0]
            takers = [each for worth, each in pays if worth > (1 + WORTH_A_TRADE) * saves[0][0]]
            givers = [each for worth, each in saves if (1 + WORTH_A_TRADE) * worth < pays[0][0]]
            givers = givers[: max(MOST_TRADERS - len(takers), MOST_TRADERS // 2)]
            chosen = [*givers, *takers[: MOST_TRADERS - len(givers)]]
    names = {each.job.name for each in chosen}
    return [each for each in plans if each.job.name in names]


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
        cheap = [pair for pair in pairs if _prefers(pair[0]) == "MinCost"]
        cost, was = (sum(pair[side].answer.cost or 0.0 for pair in cheap) for side in (0, 1))
        money = _times(cost, was)
        others = [_times(_value(new), _value(old)) for new, old in pairs if _prefers(new) != "MinCost"]
        change = math.exp(float(np.mean(np.log([money] * len(cheap) + others))))
        if abs(change - 1) > SAME:
            # Who has most of the nodes was chance, where that is for the same money.
            return change < (1 if moves < otherwise or abs(money - 1) <= SAME else 1 - WORTH_A_TRADE)
    return False


def _prefers(each: Solved) -> Prefer:
    assert each.one is not None
    return each.one.problem.objective.prefer


def _value(each: Solved) -> float:
    """What a job that does not prefer to be cheap prefers to be small: its time, or its mean with the cost."""
    if each.found is None:
        return math.inf
    seconds = each.found.seconds
    return seconds if _prefers(each) == "MinTime" else math.sqrt(seconds * each.found.cost)


def _times(new: float, old: float) -> float:
    """How many times as much it is."""
    return 1.0 if new == old else min(max(new / max(old, SAME), 1 / MOST_TIMES), MOST_TIMES)


def _used(plans: Sequence[Solved]) -> Counter[str]:
    """Nodes by pool."""
    used = Counter[str]()
    for each in plans:
        used.update(each.job.holds(each.answer.counts))
    return used


def _full(plans: Sequence[Solved], limits: Mapping[str, int]) -> set[str]:
    """The pools of which no node is left; not those that have none for these jobs, whatever they trade."""
    used = _used(plans)
    return {name for name, limit in limits.items() if used[name] >= limit > 0}


def _late(plans: Sequence[Solved]) -> list[Solved]:
    """Those that miss their limits."""
    return [each for each in plans if not each.answer.feasible]


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
    if any(n > limits[name] for name, n in _used(plans).items()):
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


def _is_contended(plans: Sequence[Solved], pools: Sequence[FleetPool], limits: Mapping[str, int]) -> bool:
    """Whether a job names a pool of which others have all nodes, and uses a dearer one, or would gain by more nodes."""
    used, full = _used(plans), _full(plans, limits)
    prices = {pool.name: pool.price_per_hour or 0.0 for pool in pools}

    def dear(plan: JobPlan, name: str) -> float:
        return prices[name] / plan.speeds[name] if plan.speeds.get(name) else math.inf

    for each in plans:
        plan = each.answer
        wants = _prefers(each) != "MinCost" and sum(plan.counts.values()) < each.job.max_workers
        most = max((dear(plan, name) for name, n in plan.counts.items() if n), default=0.0)
        for name in full.intersection(each.job.pools):
            if plan.counts.get(name, 0) < used[name] and (wants or dear(plan, name) < most):
                return True
    return False
