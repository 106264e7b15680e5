"""The reason for a plan, in sentences for users."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from shoal.sizing.plan.answer import Plan, Point
from shoal.sizing.plan.problem import PASSED, SPENT

__all__ = ["duration", "explain", "fleet", "money", "sentence"]


def explain(plan: Plan, currency: str = "$") -> str:
    """A few sentences: what to run, why not something cheaper or faster, and how sure it is."""
    sentences = _found(plan, currency) if plan.feasible else _not_found(plan, currency)
    sentences += _risk(plan)
    sentences += [] if plan.given else [_how_searched(plan)]
    sentences += plan.notes
    return " ".join(sentences)


class Named(Protocol):
    """A pool."""

    @property
    def name(self) -> str:
        """Its name."""


def fleet(pools: Sequence[Named], counts: Sequence[int]) -> str:
    """'2 workers from spot-t4 and 1 from on-demand-t4', 'no worker'."""
    used = [(pool.name, n) for pool, n in zip(pools, counts, strict=True) if n]
    if not used:
        return "no worker"
    (name, n), *others = used
    first = f"{n} {'worker' if n == 1 else 'workers'} from {name}"
    return _listed([first, *(f"{n} from {name}" for name, n in others)])


def sentence(words: str) -> str:
    """Words with a capital letter and a full stop."""
    return f"{words[:1].upper()}{words[1:].rstrip('.')}."


def duration(seconds: float) -> str:
    """'43 min 20 s', '2 h 5 min', '3.2 s'; 'for ever'."""
    if math.isinf(seconds):
        return "for ever"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s" if rest and minutes < 60 else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes and hours < 48 else f"{hours} h"


def money(amount: float, currency: str = "$") -> str:
    """'$2.97', '$0.0042'."""
    digits = 2 if amount >= 0.1 or amount == 0 else 4
    return f"{currency}{amount:,.{digits}f}"


def _found(plan: Plan, currency: str) -> list[str]:
    servers = f"{plan.servers} parameter server{'s' if plan.servers > 1 else ''}"
    what = (
        f"Run {fleet(plan.pools, plan.counts)}, with {servers}: training then takes {duration(plan.seconds)}"
    )
    what += f" and costs {money(plan.cost, currency)}."
    objective = plan.objective
    limits = []
    if objective.deadline is not None:
        limits.append(f"ends within the deadline of {duration(objective.deadline)}")
    if objective.budget is not None:
        limits.append(f"stays within the budget of {money(objective.budget, currency)}")
    superlative = {
        "MinCost": "the plan of least cost, where time to spare counts as well,"
        if objective.spare and objective.deadline is not None
        else "the cheapest plan",
        "MinTime": "the fastest plan",
        "BestValue": "the plan with the most speed for its cost",
    }[objective.prefer]
    if plan.given:
        return [what, f"That {' and '.join(limits)}."] if limits else [what]
    why = (
        f"This is {superlative}"
        if plan.proved
        else f"No better plan was found than this one; it is {superlative}"
    )
    why += f" that {' and '.join(limits)}" if limits else ""
    why += ", in the nodes that other jobs leave." if plan.shared else "."
    sentences = [what, why]
    other = plan.unlimited
    if plan.binding == "deadline" and other is not None:
        sentences.append(
            f"The deadline is what makes it cost so much: with more time, {_brief(plan, other)} would do for "
            f"{money(other.cost, currency)} in {duration(other.seconds)}."
        )
    elif plan.binding == "budget" and other is not None:
        sentences.append(
            f"The budget is what makes it take so long: for {money(other.cost, currency)}, {_brief(plan, other)} "
            f"would be ready in {duration(other.seconds)}."
        )
    elif objective.prefer == "MinCost" and objective.deadline and not (objective.spare or plan.shared):
        sentences.append("No plan is cheaper, even with more time.")
    return sentences


def _not_found(plan: Plan, currency: str) -> list[str]:
    most, what = (plan.cheapest, "cheapest") if plan.aim.prefer == "MinCost" else (plan.fastest, "fastest")
    other, superlative = plan.unlimited, f"{what} plan"
    if plan.given or plan.counts != most.counts:
        superlative = "plan" if plan.given or plan.weighed else superlative
        superlative += "" if plan.given or plan.aim.budget is None else " within the budget"
    sentences = [
        *_missed(plan, currency),
        f"The {superlative} is {fleet(plan.pools, plan.counts)}, with {plan.servers} parameter "
        f"server{'s' if plan.servers > 1 else ''}: it takes {duration(plan.seconds)} and costs "
        f"{money(plan.cost, currency)}.",
    ]
    if plan.counts != most.counts:
        sentences.append(
            f"The very {what}, {_brief(plan, most)}, would cost {money(most.cost, currency)} and take "
            f"{duration(most.seconds)}."
        )
    if other is not None and other.counts != plan.counts:
        sentences.append(
            f"In time the cheapest is {_brief(plan, other)}, for {money(other.cost, currency)}"
            f"{': raise the deadline or the budget' if plan.binding == 'deadline and budget' else ''}."
        )
    return sentences + _advice(plan)


def _missed(plan: Plan, currency: str) -> list[str]:
    """Which limits are not kept."""
    objective, unsure = plan.objective, plan.given and not plan.proved
    deadline = "" if objective.deadline is None else duration(objective.deadline)
    budget = "" if objective.budget is None else money(objective.budget, currency)
    if plan.binding == "deadline and budget":
        return [
            f"Deadline and budget cannot be kept together: each of {deadline} and {budget} can be kept alone."
        ]
    if plan.binding == "confidence":
        limits = [f"the deadline of {deadline}"] if deadline else []
        limits += [f"the budget of {budget}"] if budget else []
        none = "this plan does not keep" if unsure else "no plan keeps"
        many = "them" if len(limits) > 1 else "it"
        return [
            f"{sentence(' and '.join(limits)).rstrip('.')} can be kept only if nothing goes wrong: {none} {many} with "
            f"a probability of {100 * objective.confidence:.4g}%."
        ]
    missed = []
    if objective.deadline == PASSED:
        missed.append("The deadline has passed: raise elasticity.objective.deadlineSeconds, or remove it.")
    elif plan.binding == "deadline":
        none = "This plan does not end" if unsure else "No plan ends"
        left = " in the nodes that other jobs leave" if plan.shared else ""
        missed.append(f"{none} within {deadline}{left}.")
    if objective.budget == SPENT:
        missed.append("The budget is spent: raise elasticity.objective.maxCost, or remove it.")
    elif budget and plan.aim.budget is None:
        whom = "this plan" if unsure else "every plan"
        missed.append(f"The budget of {budget} is too small for {whom}.")
    return missed


def _advice(plan: Plan) -> list[str]:
    """What to change."""
    objective = plan.objective
    high = plan.sure_seconds if plan.finish is None else plan.finish[1]
    allowed = duration(max(high if math.isfinite(high) else plan.sure_seconds, plan.seconds))
    if plan.binding == "deadline and budget":
        return []
    if plan.binding == "budget":
        return ["Raise the budget to at least that."]
    if plan.binding == "confidence":
        return [
            f"Allow {allowed}, ask for less confidence, or add on-demand workers."
            if objective.deadline is not None
            else "Raise the budget, or ask for less confidence."
        ]
    used_up = ["workers.maxReplicas"] if plan.full else []
    used_up += [
        f"the limit of {p.name}" for p, n in zip(plan.pools, plan.counts, strict=True) if n and n == p.limit
    ]
    more = f", or raise what is used up: {_listed(used_up)}" if used_up else ""
    return [f"Allow at least {allowed}{more}."]


def _risk(plan: Plan) -> list[str]:
    kept = []
    if plan.chance is not None and plan.objective.deadline is not None:
        kept.append(f"the deadline was kept in {plan.chance:.1%}")
    if plan.budget_chance is not None and plan.objective.budget is not None:
        kept.append(f"the budget was kept in {plan.budget_chance:.1%}")
    if not kept:
        return []
    if plan.kept is not None and len(kept) > 1:
        kept.append(f"both in {plan.kept:.1%}")
    return [
        f"In simulated runs with revocations and uncertain speed {' and '.join(kept)} "
        f"(asked for: {100 * plan.objective.confidence:.4g}%)."
    ]


def _how_searched(plan: Plan) -> str:
    if plan.exact:
        return f"All {plan.searched:,} combinations were compared."
    return (
        f"There are too many combinations to compare them all; {plan.searched:,} of the most promising were, so a "
        "slightly better plan may exist."
    )


def _brief(plan: Plan, point: Point) -> str:
    return fleet(plan.pools, point.counts)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
