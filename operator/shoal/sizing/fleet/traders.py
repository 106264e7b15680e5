"""Which jobs may trade nodes with each other: a few, for each of which a trade takes as long as its plan alone.

Those that miss their limits, and those that have what these could use. Or those that pay more because of what others
have that need it less.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence

from shoal.sizing.fleet.alone import Solved
from shoal.sizing.fleet.values import FleetPool, JobPlan
from shoal.sizing.plan.problem import Prefer

__all__ = ["MOST_TRADERS", "WORTH_A_TRADE", "apart", "full_of", "late_of", "prefers", "traders_of", "used"]

WORTH_A_TRADE = 0.1
"""Jobs trade pools where all of them together then cost less by this part, since less is not known any better; or less
at all, if that moves fewer workers: what was traded stays so."""
MOST_TRADERS = 8
"""So many jobs trade together, more of them in groups: the candidates of each are tried against those of each other."""


def apart(plans: Sequence[Solved]) -> list[list[Solved]]:
    """The jobs in parts, each in their order, of which none names a pool that another one does."""
    parts = list[set[str]]()
    for each in plans:
        near = [part for part in parts if not part.isdisjoint(each.job.pools)]
        parts = [*(part for part in parts if part not in near), set(each.job.pools).union(*near)]
    return [[each for each in plans if not part.isdisjoint(each.job.pools)] for part in parts]


def traders_of(
    able: Sequence[Solved],
    pools: Sequence[FleetPool],
    limits: Mapping[str, int],
    tried: Container[str],
    most: int,
) -> Sequence[Solved]:
    """The jobs that may trade, in their order: those that miss their limits, and those that have what these could use.

    Where nobody else has it, one that is late itself may, of the same priority. Where none misses its limits: all, if
    one pays more because of what others have; of many, some of those. `limits`: the nodes by pool that there are for
    all of them. `tried`: jobs that nothing helps, or that need not be helped any more; they do not trade for money, but
    may have what others of no lower priority need. `most`: how many are helped at once.
    """
    rest, full = [each for each in able if each.job.name not in tried], full_of(able, limits)
    late = late_of(rest)[:most]
    if not late and len(able) > MOST_TRADERS:
        return _dearest(rest, pools, full)
    if not late:
        return rest if _is_contended(rest, pools, full) else ()
    lowest = min(each.job.priority for each in late)
    wanted = {name for each in late for name in full.intersection(each.job.pools)}

    def has(each: Solved) -> tuple[bool, int]:
        return each.answer.feasible, sum(each.answer.counts.get(name, 0) for name in wanted)

    def may(each: Solved) -> bool:
        return each.answer.feasible or (each.job.name in tried and each.job.priority <= lowest)

    givers = sorted((each for each in able if may(each) and has(each)[1]), key=has, reverse=True)
    givers = givers[: MOST_TRADERS // 2 if most == 1 else max(MOST_TRADERS - len(late), MOST_TRADERS // 2)]
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
        if prefers(each) == "MinCost" and each.answer.feasible:
            for name in full.intersection(each.answer.speeds):
                groups[each.job.priority, name].append(each)
    prices = {pool.name: pool.price_per_hour or 0.0 for pool in pools}
    chosen, most = list[Solved](), 0.0
    for (_, name), jobs in groups.items():
        worth = [(each, *_worth(each.answer, name, prices)) for each in jobs]
        pays = sorted(((now, each) for each, now, _ in worth if now > prices[name]), key=_first, reverse=True)
        saves = sorted(((then, each) for each, _, then in worth if each.answer.counts.get(name)), key=_first)
        if pays and saves and pays[0][0] - saves[0][0] > most:
            most = pays[0][0] - saves[0][0]
            takers = [each for now, each in pays if now > (1 + WORTH_A_TRADE) * saves[0][0]]
            givers = [each for then, each in saves if (1 + WORTH_A_TRADE) * then < pays[0][0]]
            givers = givers[: max(MOST_TRADERS - len(takers), MOST_TRADERS // 2)]
            chosen = [*givers, *takers[: MOST_TRADERS - len(givers)]]
    names = {each.job.name for each in chosen}
    return [each for each in plans if each.job.name in names]


def _worth(plan: JobPlan, name: str, prices: Mapping[str, float]) -> tuple[float, float]:
    """What a job pays elsewhere for what a node of this pool does: at most now, and at least if it had to leave."""
    speed = plan.speeds[name]
    dear = {other: prices[other] / of * speed for other, of in plan.speeds.items() if other != name and of}
    now = max((price for other, price in dear.items() if plan.counts.get(other)), default=0.0)
    return now, min(dear.values(), default=math.inf)


def _first(pair: tuple[float, Solved]) -> float:
    return pair[0]


def _is_contended(plans: Sequence[Solved], pools: Sequence[FleetPool], full: set[str]) -> bool:
    """Whether a job names a full pool that others have, too, and uses a dearer one, or would gain by more nodes."""
    there = used(plans)
    prices = {pool.name: pool.price_per_hour or 0.0 for pool in pools}

    def dear(plan: JobPlan, name: str) -> float:
        return prices[name] / plan.speeds[name] if plan.speeds.get(name) else math.inf

    for each in plans:
        plan = each.answer
        wants = prefers(each) != "MinCost" and sum(plan.counts.values()) < each.job.max_workers
        most = max((dear(plan, name) for name, n in plan.counts.items() if n), default=0.0)
        for name in full.intersection(each.job.pools):
            if plan.counts.get(name, 0) < there[name] and (wants or dear(plan, name) < most):
                return True
    return False


def prefers(each: Solved) -> Prefer:
    """What a job prefers to be small, as far as its nodes cost something."""
    assert each.one is not None
    return each.one.problem.objective.prefer


def used(plans: Sequence[Solved]) -> Counter[str]:
    """Nodes by pool."""
    held = Counter[str]()
    for each in plans:
        held.update(each.job.holds(each.answer.counts))
    return held


def full_of(plans: Sequence[Solved], limits: Mapping[str, int]) -> set[str]:
    """The pools of which no node is left; not those that have none for these jobs, whatever they trade."""
    there = used(plans)
    return {name for name, limit in limits.items() if there[name] >= limit > 0}


def late_of(plans: Sequence[Solved]) -> list[Solved]:
    """Those that miss their limits."""
    return [each for each in plans if not each.answer.feasible]
