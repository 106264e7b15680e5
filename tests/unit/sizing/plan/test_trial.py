"""One worker in a pool that was never measured, where what it teaches is worth its price."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dev.night import examples
from shoal.sizing.plan import Objective, Pool, Problem, StepWork, plan
from shoal.sizing.plan.trial import DRAWS, Trial, worth_measuring

KNOWN = Pool(
    "known", limit=6, price=1.0, step_seconds=0.1, batch=128, spot=False, step_sigma=0.02, startup_seconds=60
)
NEW = Pool(
    "new", limit=6, price=1.3, step_seconds=0.1, batch=128, spot=False, step_sigma=0.8, startup_seconds=60
)


def tried(new: Pool = NEW, hours: float = 12.0, **changes: object) -> Trial | None:
    """`hours`: what the work takes one worker of the known pool."""
    work = StepWork(samples=hours * 36_000 * 128)
    problem = Problem([KNOWN, new], work, objective=Objective(deadline=hours * 1200), max_workers=6)
    found = plan(problem)
    assert found.counts[1] == 0, "the plan uses the pool anyway"
    return worth_measuring(replace(problem, **changes), found.counts, found.cost, found.seconds, {"new"})  # type: ignore[arg-type]


def test_pool_that_may_be_much_cheaper_is_measured() -> None:
    found = tried()
    assert found is not None
    assert found.pool == "new"
    assert found.saving > 10 * found.price > 0


def test_measurement_that_cannot_pay_is_not_made() -> None:
    assert tried(hours=0.3) is None  # the work is done before the knowledge is of use
    assert tried(replace(NEW, price=9.0)) is None  # it would have to be nine times as fast
    assert tried(replace(NEW, step_seconds=0.15, step_sigma=0.03)) is None  # it is known to be slower
    assert tried(replace(NEW, limit=0)) is None
    assert tried(replace(NEW, out_seconds=1800.0)) is None  # there are no nodes now
    assert tried(max_workers=3) is None  # there is no room for one more


def test_measurement_that_has_begun_is_not_given_up_for_little() -> None:
    """Its worth varies from plan to plan: a worker that comes and goes with it teaches nothing."""
    work = StepWork(samples=12 * 36_000 * 128)
    problem = Problem([KNOWN, NEW], work, objective=Objective(deadline=12 * 1200.0), max_workers=6)
    found = plan(problem)

    def told(cost: float, *begun: str) -> Trial | None:
        return worth_measuring(problem, found.counts, cost, found.seconds, {"new"}, begun)

    costs = [found.cost * (1 - n / 200) for n in range(200)]
    begins = min(cost for cost in costs if told(cost))
    goes_on = min(cost for cost in costs if told(cost, "new"))
    assert goes_on < begins
    assert told(goes_on) is None
    assert told(min(costs), "new") is None


def test_measured_pool_and_one_that_is_used_need_no_trial() -> None:
    problem = Problem([KNOWN, NEW], StepWork(samples=1e7), objective=Objective(prefer="MinTime"))
    assert worth_measuring(problem, (6, 6), 10.0, 1e4, {"new"}) is None
    cheapest = replace(problem, objective=Objective())
    assert worth_measuring(cheapest, (6, 0), 10.0, 1e4, set()) is None


@pytest.mark.parametrize(("deadline", "prefer"), [(600.0, "MinCost"), (None, "MinTime")])
def test_fastest_plan_gives_a_place_to_a_pool_that_may_be_faster(
    deadline: float | None, prefer: Literal["MinCost", "MinTime"]
) -> None:
    """Where there is no room for one worker more; the slowest leaves, and what is lost until it is known is small."""
    slower = replace(NEW, step_seconds=0.12)
    brake = replace(KNOWN, name="brake", step_seconds=0.11, limit=1)
    work = StepWork(samples=3 * 36_000 * 128)
    objective = Objective(deadline=deadline, prefer=prefer)
    problem = Problem([replace(KNOWN, limit=3), brake, slower], work, objective=objective, max_workers=4)
    found = plan(problem)
    assert found.counts == (3, 1, 0)
    problem = replace(problem, objective=found.aim)
    trial = worth_measuring(problem, found.counts, found.cost, found.seconds, {"new"})
    assert trial is not None
    assert trial.counts == (3, 0, 1)
    assert trial.saving > 60
    assert 0 < trial.price < 5  # of two minutes of a quarter of the speed, the twelfth part
    sure = replace(problem, pools=[*problem.pools[:2], replace(slower, step_sigma=0.02)])
    assert worth_measuring(sure, found.counts, found.cost, found.seconds, {"new"}) is None


def test_place_is_given_up_only_where_the_job_may_do_without() -> None:
    """Its workers on demand, or those in the zone of its servers, are as many as it says."""
    work = StepWork(samples=3 * 36_000 * 128)
    spot, steady = replace(KNOWN, name="spot", spot=True, limit=3), replace(KNOWN, limit=1, step_seconds=0.11)
    new = replace(NEW, spot=True, zone="b")
    objective = Objective(prefer="MinTime")
    problem = Problem([spot, steady, new], work, objective=objective, max_workers=4, min_on_demand=1)
    trial = worth_measuring(problem, (3, 1, 0), 12.0, 2700.0, {"new"})
    assert trial is not None
    assert trial.counts == (2, 1, 1)
    near = [replace(spot, zone="a"), replace(steady, zone="a"), new]
    apart = replace(problem, pools=near, zone_policy="Same")
    assert worth_measuring(apart, (3, 1, 0), 12.0, 2700.0, {"new"}) is None


@settings(max_examples=examples(20), deadline=None)
@given(sigma=st.floats(0.1, 1.0), hours=st.floats(1.0, 20.0), price=st.floats(0.5, 2.0))
def test_more_work_is_worth_more_knowledge(sigma: float, hours: float, price: float) -> None:
    new = replace(NEW, step_sigma=sigma, price=price)
    savings = []
    for factor in (1, 3):
        work = StepWork(samples=factor * hours * 36_000 * 128)
        problem = Problem([KNOWN, new], work, objective=Objective(), max_workers=6)
        alone = plan(replace(problem, pools=[KNOWN, replace(new, limit=0)]))
        found = worth_measuring(problem, (1, 0), alone.cost, alone.seconds, {"new"})
        savings.append(found.saving if found is not None else 0.0)
        assert found is None or 0 < found.saving <= alone.cost
    assert savings[1] >= savings[0] * 0.99


def test_saving_is_the_mean_over_plausible_speeds() -> None:
    """Without limits the cost is price times work over speed: by hand."""
    work = StepWork(samples=100 * 36_000 * 128)
    new, known = (replace(pool, startup_seconds=0.0) for pool in (NEW, KNOWN))
    problem = Problem([known, new], work, objective=Objective(), max_workers=6)
    found = worth_measuring(problem, (1, 0), 100.0, 1e9, {"new"})
    assert found is not None
    by_hand = sum(max(100.0 - 130.0 * math.exp(0.8 * z), 0.0) for z in DRAWS) / len(DRAWS)
    assert found.saving == pytest.approx(by_hand, rel=0.01)
