"""What is planned where not all limits can be kept: within the budget as fast as can be, else as cheap as can be."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dev.night import examples
from shoal.sizing.plan import Objective, Pool, Problem, Servers, StepWork, explain, plan, together
from shoal.sizing.plan.elastic import ElasticModel
from shoal.sizing.plan.engine import Engine
from shoal.sizing.plan.problem import Prefer

ABOUT = 1.05 + 1e-9
CALM = Servers(interruptions_per_hour=0.0)


def problem(*pools: Pool, hours: float = 8.0, **changes: Any) -> Problem:
    return Problem(pools, StepWork(steps=hours * 36_000), CALM, Objective(**changes))


def pool(name: str, **changes: Any) -> Pool:
    values = {
        "limit": 4,
        "price": 1.0,
        "step_seconds": 0.1,
        "batch": 128,
        "startup_seconds": 60.0,
        "spot": False,
    }
    return Pool(name, **(values | changes))


def every(of: Problem) -> dict[tuple[int, ...], tuple[float, float]]:
    """The time and cost of each combination."""
    grid = list(itertools.product(*(range(n + 1) for n in of.limits)))[1:]
    out = ElasticModel(of).evaluators()[0](np.array(grid, dtype=np.float64).T)
    return dict(zip(grid, zip(out.seconds.tolist(), out.cost.tolist(), strict=True), strict=True))


PROBLEMS = st.builds(
    lambda price, step, limits, deadline, budget, prefer: problem(
        pool("one", limit=limits[0]),
        pool("other", limit=limits[1], price=price, step_seconds=step),
        deadline=deadline,
        budget=budget,
        prefer=prefer,
    ),
    st.floats(0.5, 20.0),
    st.floats(0.03, 0.2),
    st.tuples(st.integers(1, 4), st.integers(0, 4)),
    st.one_of(st.floats(600.0, 20_000.0), st.none()),
    st.one_of(st.floats(8.0, 30.0), st.none()),
    st.sampled_from(["MinCost", "MinTime"]),
)


@settings(max_examples=examples(120), deadline=None)
@given(PROBLEMS)
def test_limits_are_kept_in_their_order_as_by_a_look_at_every_plan(one: Problem) -> None:
    """A deadline that nothing kept made the budget void, though something kept that."""
    found, seen = plan(one), every(one)
    deadline = one.objective.deadline or np.inf
    budget = one.objective.budget or np.inf
    seconds, cost = seen[found.counts]
    in_budget = [each for each in seen.values() if each[1] <= budget]
    best = [each for each in in_budget if each[0] <= deadline]
    quick = one.objective.prefer == "MinTime"
    assert found.feasible == bool(best)
    if best:
        assert (seconds, cost)[not quick] == min(each[not quick] for each in best)
    elif in_budget:
        assert cost <= budget
        assert seconds <= (1 if quick else ABOUT) * min(in_budget)[0]
    else:
        assert cost <= ABOUT * min(each[1] for each in seen.values())


@settings(max_examples=examples(40), deadline=None)
@given(PROBLEMS, st.tuples(st.floats(0.5, 3.0), st.floats(1.0, 3.0)))
def test_with_more_budget_a_job_is_never_slower(one: Problem, times: tuple[float, float]) -> None:
    """By more than what is about as fast; what nothing keeps is no budget to compare with one that is hardly more."""
    least = min(cost for _, cost in every(one).values())
    less, more = times[0] * least, max(ABOUT, times[0] * times[1]) * least
    found = [plan(replace(one, objective=replace(one.objective, budget=each))) for each in (less, more)]
    assert found[1].seconds <= ABOUT * found[0].seconds


def test_a_budget_that_some_plan_keeps_for_sure_is_kept_whatever_the_deadline() -> None:
    unsure = problem(
        pool("spot", limit=3, spot=True, interruptions_per_hour=1.0, step_sigma=0.05),
        pool("quick", limit=2, price=6.0, step_seconds=0.05, step_sigma=0.05),
        hours=3.0,
    )
    others = Engine(unsure, 20_000.0, seed=7)
    for deadline, counts in ((300.0, (1, 1)), (4000.0, (3, 0))):
        budget = float(np.quantile(others.run(counts, 1, "").cost, 0.98))
        found = plan(replace(unsure, objective=Objective(deadline=deadline, budget=budget)))
        assert not found.feasible
        assert found.budget_chance is not None
        assert found.budget_chance >= 0.95
        assert found.seconds <= ABOUT * ElasticModel(unsure).seconds(counts, 1)


def test_both_limits_are_said_where_neither_lets_the_job_be_faster() -> None:
    late = problem(pool("own"), pool("quick", price=12.0, step_seconds=0.05), deadline=1200.0, budget=20.0)
    said = explain(plan(late))
    assert "No plan ends within 20 min." in said
    assert "plan within the budget is 4 workers from own" in said
    assert "The very fastest, 4 workers from own and 4 from quick, would cost $" in said
    poor = replace(late, objective=replace(late.objective, budget=1.0))
    assert "No plan ends within 20 min. The budget of $1.00 is too small for every plan." in explain(
        plan(poor)
    )


@given(PROBLEMS)
@settings(max_examples=examples(30), deadline=None)
def test_candidates_of_a_job_that_trades_are_in_the_same_order(one: Problem) -> None:
    """With a budget that could be kept, those of a late job were as cheap as could be."""
    found = plan(one)
    assume(found.aim.prefer == "MinTime" or not found.feasible)
    columns = together._columns(one, 0, ["one", "other"])
    first = tuple(int(n) for n in columns.counts[:, 0])
    assert columns.late != found.feasible
    at = 0 if found.aim.prefer == "MinTime" else 1
    seen = every(one)
    assert seen[found.counts][at] <= ABOUT * seen[first][at]
    assert seen[first][at] <= seen[found.counts][at] * (1 + 1e-9)


def prefers(prefer: Prefer) -> Objective:
    return Objective(deadline=60.0, budget=5.0, prefer=prefer)


def test_objectives_are_in_order() -> None:
    for prefer in ("MinCost", "MinTime"):
        _, late, over = prefers(prefer).in_order
        assert (late.deadline, late.budget, late.prefer) == (None, 5.0, "MinTime")
        assert (over.deadline, over.budget, over.prefer) == (None, None, "MinCost")
    assert [each.limited for each in Objective(deadline=60.0).in_order] == [True, False]
    assert [each.prefer for each in Objective(budget=5.0, prefer="MinTime").in_order] == [
        "MinTime",
        "MinCost",
    ]
    assert Objective().in_order == (Objective(),)
