"""The best plan by each objective in its turn, until one is sure to keep its limits.

A job that cannot keep all of its limits has a plan nevertheless: the best by what counts then (`Objective.in_order`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal.sizing.plan.elastic import ElasticModel
from shoal.sizing.plan.evaluation import Model
from shoal.sizing.plan.found import Candidate, Found
from shoal.sizing.plan.problem import Objective, Problem
from shoal.sizing.plan.risk import Checked, Engines, Walk, is_risky

__all__ = ["Look", "Tried", "in_order"]

PASSES = 8
"""Times that the search is continued where the shortlist ends without a plan that is sure enough."""
Look = Callable[[Model, float], tuple[Found, bool]]
"""A search (`search`), or less than that: what it finds, and whether it has seen all that there is."""


@dataclass(frozen=True)
class Tried:
    """What was found for one objective: the best plan that is sure to keep its limits, if any is, and its runs.

    `proved`: everything better was ruled out.
    """

    model: ElasticModel
    found: Found
    walk: Walk
    best: Candidate | None
    checked: Checked | None
    proved: bool
    exact: bool

    def keeps_budget(self, one: Candidate) -> bool:
        """Whether a plan is as sure to keep the budget as the best one."""
        objective = self.model.problem.objective
        if objective.budget is None:
            return True
        if self.checked is None or one.cost > objective.budget:
            return one.cost <= objective.budget
        return self.walk.check(one.counts, one.variant).sure(objective.confidence)


def in_order(problem: Problem, look: Look, engines: Engines) -> tuple[Tried, Tried]:
    """What was found for the objective itself, and for the first one by which there is a plan, if any is allowed."""
    first, *others = problem.objective.in_order
    tried = strict = _tried(problem, first, look, engines)
    for aim in others:
        if tried.best is not None or strict.found.fastest is None:
            break
        tried = _tried(problem, aim, look, engines, strict)
    return strict, tried


def _tried(
    problem: Problem, aim: Objective, look: Look, engines: Engines, before: Tried | None = None
) -> Tried:
    """The best plan by an objective. `before`: what was found for another one, which has all if there are no limits."""
    model = ElasticModel(replace(problem, objective=aim), aim.margin)
    if before is None or (aim.limited and not aim.is_lost):
        found, exact = look(model, -math.inf)
        best = found.best
    else:
        found, exact = before.found, before.exact
        best = found.fastest if aim.prefer == "MinTime" else found.cheapest
    typical = best or (found.cheapest if aim.deadline is None else found.fastest)
    walk = Walk(model, typical.seconds if typical else 1.0, engines)
    checked, proved = None, exact
    if aim.is_lost:
        best = None
    elif aim.limited and is_risky(problem, [1] * len(problem.pools), max(problem.servers.counts)):
        best, checked, walked = _first_sure(walk, model, found, look)
        proved = exact and walked
    return Tried(model, found, walk, best, checked, proved, exact)


def _first_sure(
    walk: Walk, model: ElasticModel, found: Found, look: Look
) -> tuple[Candidate | None, Checked | None, bool]:
    """The best plan that is sure enough, its runs, and whether everything better was ruled out."""
    shortlist, confidence = found.shortlist, model.problem.objective.confidence
    if found.best is not None and shortlist.begins_with(found.best):
        # Nothing is better, and the formula holds it to be sure: mostly it is, and no other needs a look.
        first = walk.check(found.best.counts, found.best.variant)
        if first.sure(confidence):
            return found.best, first, True
    for number in range(PASSES):
        checked = walk.first_sure(shortlist)
        if checked is not None:
            at = checked.at
            column = shortlist.counts[:, at : at + 1], int(shortlist.variant[at])
            return Candidate.at(model.evaluators(), *column), checked, not walk.cut_short
        if shortlist.complete or number == PASSES - 1:
            break
        more, _ = look(model, float(shortlist.first[-1]))
        shortlist = more.shortlist
    # What the formula holds to be sure, or else the fastest: the simulation decides.
    for candidate in dict.fromkeys((found.best, found.fastest_in_budget, found.fastest)):
        if candidate is not None:
            checked = walk.check(candidate.counts, candidate.variant)
            if checked.sure(confidence):
                return candidate, checked, False
    return None, None, shortlist.complete and not walk.cut_short
