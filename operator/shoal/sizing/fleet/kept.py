"""Choices that are kept from one plan of the fleet to the next: of a thousand jobs, most do what was expected of them.

A choice is found for a problem, and holds for another one that differs only by what was done meanwhile: a little less
work, in as much less time and money, at the same pace as far as that can be told. Estimates that rest on counts may
move by a part of themselves. All that somebody said or did (prices, limits, what runs, what others leave) is to be the
same. So the choices are those that would be found anew, for the same problem; what is told of them is brought up to
date.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from shoal.sizing.plan.answer import Plan, Point
from shoal.sizing.plan.problem import Pool, Problem
from shoal.sizing.plan.trial import Trial
from shoal.sizing.plan.work import StepWork, Work

__all__ = ["Asked", "Choice", "Kept", "choice_of"]

LEAST_LEFT = 0.95
"""A choice is made anew when so much of the work is left."""
BEHIND, AHEAD = 0.02, 0.08
"""Or when the time or money that is needed, over what is left of it, has grown or fallen by more than this part. As far
behind as ahead, where the plan is still surely in time: a watch of a minute is no better than that."""
APART = 0.02
"""Or when some pools have become faster than others by more than this part."""
COUNTED = 0.1
"""Or when what was counted has moved an estimate by more than this part."""
SPARE = 2
"""Or when a pool has not so many times the nodes that are used any more."""
ESTIMATES = frozenset(
    {
        "coming", "horizon", "interruptions_per_hour", "losses_per_hour", "losses_seen", "looks", "out_now",
        "out_seconds", "out_share", "penalty", "seen", "shock_share", "shock_size", "sigma", "startup_seconds",
        "step_sigma", "tasks", "waits",
    }
)  # fmt: skip
"""What rests on counts, which never stand still."""


@dataclass(frozen=True)
class Asked:
    """All that the choice for one job follows from.

    `under_way`: what it runs or is on its way to, by pool. `measured`: whether its model was, anywhere; `unmeasured`:
    pools where it was not, and that nobody else measures; `begun`: pools in which it has a worker or asked for one.
    """

    problem: Problem
    under_way: tuple[int, ...]
    measured: bool
    unmeasured: frozenset[str]
    begun: frozenset[str]


@dataclass(frozen=True)
class Choice:
    """The plan that was found, and the pool that one worker is to measure."""

    found: Plan
    trial: Trial | None


Kept = dict[str, tuple[Asked, Choice]]
"""The choices of the last plans, by job, and what each was made for."""


def choice_of(kept: Kept, job: str, asked: Asked, choose: Callable[[Asked], Choice]) -> Choice:
    """The choice that is kept, or else a new one."""
    if job in kept:
        before, choice = kept.pop(job)
        if _same(before, asked, {"problem"}) and (left := _left(before.problem, choice, asked.problem)):
            kept[job] = before, choice
            return replace(choice, found=_up_to_date(choice.found, asked.problem, left))
    choice = choose(asked)
    if choice.found.feasible:  # what is late, or too dear, is looked at every time
        kept[job] = asked, replace(choice, found=replace(choice.found, pareto=()))  # most of its memory
    return choice


def _left(before: Problem, choice: Choice, now: Problem) -> float | None:
    """The part of a plan's time that is left, where no more than that has changed; None: something else has."""
    left = _work_left(before.work, now.work)
    if left is None or len(before.pools) != len(now.pools) or not LEAST_LEFT <= left <= 1 + BEHIND:
        return None
    pairs = list(zip(before.pools, now.pools, strict=True))
    paces = [new.step_seconds / old.step_seconds for old, new in pairs]
    if update := before.servers.model.update_seconds:
        paces.append(now.servers.model.update_seconds / update)
    least, most = left * min(paces), left * max(paces)
    workers = choice.found.counts if choice.trial is None else choice.trial.counts
    same = (
        most <= (1 + APART) * least
        and all(_same(old, new, {"step_seconds", "limit", "room"}) for old, new in pairs)
        and all(_has_room(*pair, now.max_workers, n) for pair, n in zip(pairs, workers, strict=True))
        and _same(before.servers, now.servers, {"model"})
        and _same(before.servers.model, now.servers.model, {"update_seconds"})
        and _same(before.objective, now.objective, {"deadline", "budget", "spent"})
        and _same(before, now, {"pools", "work", "servers", "objective", "shared"})
        and _in_step(before.objective.budget, now.objective.budget, least, most)
        and _in_step(
            before.objective.deadline, now.objective.deadline, least, most, choice.found.sure_seconds
        )
    )
    return (least + most) / 2 if same else None


def _work_left(before: Work, now: Work) -> float | None:
    if not (isinstance(before, StepWork) and isinstance(now, StepWork)):
        return 1.0 if before == now else None
    amounts = [(before.samples, now.samples), (before.steps, now.steps)]
    if not _same(before, now, {"samples", "steps"}) or any((a is None) != (b is None) for a, b in amounts):
        return None
    parts = [new / old for old, new in amounts if old and new]
    return max(parts) if max(parts) <= (1 + APART) * min(parts) else None


def _has_room(old: Pool, new: Pool, most: int | None, workers: int) -> bool:
    """Whether a pool has room for its workers as before: to have less bars only others, and more than all is no gain.

    Some nodes to spare are a reserve for lost ones.
    """
    less = new.nodes <= old.nodes
    return new.nodes == old.nodes or (
        new.nodes >= SPARE * workers if less else most is not None and old.nodes >= most
    )


def _in_step(
    before: float | None, now: float | None, least: float, most: float, needed: float = math.inf
) -> bool:
    """Whether a limit came nearer as what is needed became less: to between `least` and `most` of what it was.

    `needed`: what is sure to be enough for that.
    """
    if before is None or now is None:
        return before is now
    behind = AHEAD if most * needed <= now else BEHIND
    return (1 - AHEAD) * now / before <= least and most <= (1 + behind) * now / before


def _same(old: Any, new: Any, apart: Collection[str] = ()) -> bool:
    """Whether two values have the same fields, apart from some, and estimates that hardly differ."""
    return type(old) is type(new) and all(
        _alike(name, getattr(old, name), getattr(new, name))
        for name in old.__dataclass_fields__
        if name not in apart
    )


def _alike(name: str, old: Any, new: Any) -> bool:
    if is_dataclass(old):
        return old is new or _same(old, new)
    if bool(old == new):
        return True
    if old is None or new is None:
        return False
    return name in ESTIMATES and abs(new - old) <= COUNTED * max(abs(new), abs(old))


def _up_to_date(found: Plan, problem: Problem, left: float) -> Plan:
    """The plan with what is left of its time and cost."""

    def point(of: Point) -> Point:
        return replace(of, seconds=left * of.seconds, cost=left * of.cost)

    return replace(
        found,
        pools=tuple(problem.pools),
        objective=problem.objective,
        aim=problem.objective,
        work=problem.work,
        shared=problem.shared,
        seconds=left * found.seconds,
        sure_seconds=left * found.sure_seconds,
        cost=left * found.cost,
        iterations=left * found.iterations,
        finish=None if found.finish is None else (left * found.finish[0], left * found.finish[1]),
        cheapest=point(found.cheapest),
        fastest=point(found.fastest),
        unlimited=None if found.unlimited is None else point(found.unlimited),
    )
