"""Shoal's model: start-up, risk, zones, servers and limits."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dev.night import examples
from shoal.errors import UsageError
from shoal.sizing.availability import Markov, Stock
from shoal.sizing.plan import LossWork, Objective, Pool, Problem, Servers, StepWork, explain, plan, risk
from shoal.sizing.plan.cost import wire_bytes
from shoal.sizing.plan.elastic import ElasticModel
from shoal.sizing.plan.engine import RUNS, Engine
from shoal.sizing.plan.problem import MOST_CONFIDENCE, Prefer
from shoal.sizing.plan.risk import kept
from shoal.sizing.plan.switch import Switch, is_sure, switch
from shoal.sizing.simulate import calibrate
from shoal.sizing.speed.servers import PsModel
from tests.unit.sizing.runs import chance, finish_times

HOUR = 3600.0


def pool(name: str = "spot", **changes: object) -> Pool:
    settings = {
        "limit": 8,
        "price": 1.0,
        "step_seconds": 0.1,
        "batch": 128,
        "accelerator": "T4",
        "startup_seconds": 60,
    } | changes
    return Pool(name, **settings)


def problem(*pools: Pool, deadline: float | None = HOUR, **changes: object) -> Problem:
    return Problem(pools, StepWork(steps=100_000), objective=Objective(deadline=deadline), **changes)


def quiet(**changes: object) -> Servers:
    return Servers(**({"interruptions_per_hour": 0.0} | changes))


def test_time_and_cost_without_risk_match_hand_calculation() -> None:
    answer = plan(problem(pool(), servers=quiet(price=0.05)))
    assert answer.counts == (3,)  # 100,000 steps / 3 / 10 a second = 3,333 s; two workers would take 5,000 s
    assert answer.seconds == pytest.approx(60 + 100_000 / 30)
    assert answer.cost == pytest.approx(answer.seconds / HOUR * 3.05)


def test_startup_time_counts_against_deadline() -> None:
    assert plan(problem(pool(startup_seconds=400), servers=quiet())).counts == (4,)


def test_revocations_increase_number_of_workers() -> None:
    calm = plan(problem(pool(), servers=quiet()))
    rough = plan(problem(pool(startup_seconds=300, interruptions_per_hour=1.0), servers=quiet()))
    assert sum(rough.counts) > sum(calm.counts)
    assert rough.chance is not None
    assert rough.chance >= 0.95
    assert "deadline was kept in" in explain(rough)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("share", "rate", "deadline"), [(0, 0.05, 900), (0, 1.0, 900), (0.5, 1.0, 1800), (1.0, 1.0, 1800)]
)
def test_plan_is_no_surer_than_it_has_to_be(share: float, rate: float, deadline: float) -> None:
    risky = pool(
        limit=200, startup_seconds=600, interruptions_per_hour=rate, shock_share=share, shock_size=0.5
    )
    one = problem(risky, servers=quiet(), deadline=deadline)
    (workers,) = plan(one).counts
    sure, less = chance(one, (workers,), 1), chance(one, (round(0.95 * workers - 0.5),), 1)
    assert sure is not None
    assert less is not None
    assert less < 0.95 <= sure


@pytest.mark.nightly
def test_pool_shocks_have_higher_variance_than_single_losses() -> None:
    single = problem(pool(startup_seconds=600, interruptions_per_hour=0.5, shock_share=0.0))
    together = replace(single, pools=(replace(single.pools[0], shock_share=1.0, shock_size=1.0),))
    spread = [np.std(finish_times(p, (6,), 1, runs=20_000)) for p in (single, together)]
    assert spread[1] > 1.5 * spread[0]
    formula = [ElasticModel(p, 1.0).evaluators()[0](np.array([[6.0]])) for p in (single, together)]
    assert formula[1].sure_seconds[0] > formula[0].sure_seconds[0]


@pytest.mark.nightly
@settings(max_examples=examples(12), deadline=None)
@given(
    rate=st.floats(0.01, 0.4),
    startup=st.floats(30, 400),
    share=st.floats(0, 1),
    workers=st.integers(2, 8),
    sigma=st.floats(0, 0.1),
)
def test_formula_agrees_with_simulated_runs(
    rate: float, startup: float, share: float, workers: int, sigma: float
) -> None:
    one = problem(
        pool(startup_seconds=startup, interruptions_per_hour=rate, shock_share=share, step_sigma=0.02),
        servers=quiet(model=PsModel(0.01), sigma=sigma),
    )
    out = ElasticModel(one, 1.0).evaluators()[0](np.array([[float(workers)]]))
    times = finish_times(one, (workers,), 1, runs=20_000)
    assert out.seconds[0] == pytest.approx(times.mean(), rel=0.03)
    assert out.sure_seconds[0] - out.seconds[0] == pytest.approx(times.std(), rel=0.35)


def test_slow_server_gets_more_servers() -> None:
    slow = PsModel(update_seconds=0.05)  # at most 20 updates a second
    answer = plan(problem(pool(), servers=quiet(counts=(1, 2, 3, 4), price=0.2, model=slow)))
    assert answer.servers > 1
    assert "parameter servers" in explain(answer)


def test_more_servers_than_measured_add_risk_and_note() -> None:
    slow = PsModel(update_seconds=0.08)  # at most 12.5 updates a second of one server
    sure, unsure = (
        problem(pool(startup_seconds=0), servers=quiet(counts=(1, 2, 3), price=0.2, model=slow, measured=n))
        for n in (3, 1)
    )
    spread = [np.std(finish_times(p, (6,), 3)) / np.mean(finish_times(p, (6,), 3)) for p in (sure, unsure)]
    assert np.ptp(finish_times(sure, (6,), 3)) == 0
    assert spread[1] == pytest.approx(0.2 * np.log(3) * 0.95, rel=0.15)  # the servers are busy, not wholly
    careful, bold = plan(unsure), plan(sure)
    assert bold.chance is None
    assert "not measured" not in explain(bold)
    assert careful.chance is not None
    assert careful.cost > bold.cost
    assert "More than 1 parameter server was not measured: 3 are taken to do 3 times as much" in explain(
        careful
    )


def test_server_uncertainty_grows_with_utilization() -> None:
    def spread(update_seconds: float) -> float:
        servers = quiet(model=PsModel(update_seconds), sigma=0.3)
        return float(np.std(np.log(finish_times(problem(pool(startup_seconds=0), servers=servers), (4,), 1))))

    idle, half, full = (spread(update) for update in (0.001, 0.02, 0.1))
    assert idle < 0.01
    assert idle < half < full
    assert full > 0.25


def test_plan_that_meets_deadline_in_simulation_is_accepted() -> None:
    # One run in a hundred loses all workers: the deviation is large, but 99 % are in time.
    rare = pool(limit=3, startup_seconds=600, interruptions_per_hour=0.01, shock_share=1.0, shock_size=1.0)
    late = ElasticModel(problem(rare, servers=quiet()), 1.645).evaluators()[0](np.array([[3.0]]))
    deadline = float(late.seconds[0] + late.sure_seconds[0]) / 2
    answer = plan(problem(rare, servers=quiet(), deadline=deadline))
    assert answer.chance is not None
    assert answer.chance >= 0.95
    assert answer.feasible
    assert answer.proved
    assert "no plan keeps it" not in explain(answer)
    assert "This is the cheapest plan" in explain(answer)  # all four combinations were ruled out or simulated
    poor = problem(rare, servers=quiet())
    poor = replace(poor, objective=Objective(deadline=deadline, budget=answer.cost * 0.99))
    dear = plan(poor)
    assert not dear.feasible
    assert "no plan keeps it" not in explain(dear)
    assert dear.binding in ("budget", "deadline and budget")
    refused = plan(
        problem(rare, servers=quiet(), deadline=deadline - (late.sure_seconds[0] - late.seconds[0]))
    )
    assert not refused.feasible
    assert refused.chance is not None
    assert refused.chance < 0.95


def test_losses_cost_what_following_every_worker_gives() -> None:
    rough = problem(pool(startup_seconds=1200, interruptions_per_hour=1.0, shock_share=0.0), servers=quiet())
    rng, step, runs = np.random.default_rng(1), 10.0, 300
    ready, done, ended = np.full((runs, 4), 1200.0), np.zeros(runs), np.full(runs, np.inf)
    for i in range(1500):
        now = i * step
        lost = (rng.random((runs, 4)) < step / 3600) & (ready <= now)
        ready = np.where(lost, now + 1200, ready)
        done += step * (ready <= now).sum(axis=1) * 10
        ended = np.where((done >= 100_000) & ~np.isfinite(ended), now, ended)
    assert finish_times(rough, (4,), 1, runs=4000).mean() == pytest.approx(ended.mean(), rel=0.02)


def test_transfer_between_zones_is_priced() -> None:
    # 8 workers, 25.6 M parameters in bf16, 300 ms a step move about 10 TB an hour.
    moved = 8 * wire_bytes(25_600_000) / 0.3 * HOUR
    assert moved == pytest.approx(10e12, rel=0.03)
    near = pool("near", zone="a", price=1.2, limit=8)
    far = pool("far", zone="b", price=1.0, limit=8, transfer_per_gib=0.01)
    there = quiet(zone="a", bytes_per_step=wire_bytes(25_600_000))
    assert plan(problem(near, far, servers=there)).counts == (3, 0)
    assert plan(problem(near, far, servers=quiet(zone="a"))).counts == (0, 3)


def test_zone_policy_same_keeps_workers_in_one_zone() -> None:
    pools = pool("a", zone="a", limit=2), pool("b", zone="b", limit=4)
    answer = plan(problem(*pools, servers=quiet(), zone_policy="Same"))
    assert answer.counts == (0, 3)
    assert answer.zone == "b"


def test_deadline_and_budget_are_kept_together_and_not_each_in_runs_of_its_own() -> None:
    """Where nodes run out, the slow runs are not the dear ones: each limit is kept in nine of ten, both in fewer."""
    out = Markov(1.0, stock=Stock(0.3, 1800, math.inf))
    unsure = problem(
        pool("spot", interruptions_per_hour=1.0, availability=out),
        pool("other", step_sigma=0.1),
        servers=quiet(),
    )
    engine = Engine(unsure, 2 * HOUR)
    runs = engine.run((2, 2), 1, "")
    deadline, budget = (float(np.quantile(each, 0.9)) for each in (runs.finish, runs.cost))
    both = replace(unsure, objective=Objective(deadline=deadline, budget=budget))
    share = float(np.mean((runs.finish <= deadline) & (runs.cost <= budget)))
    assert kept(both.objective, runs) == share < 0.88
    hourly = np.array([3600 * runs.cost.mean() / runs.finish.mean()])
    assert Engine(both, 1.25 * deadline).chances(np.array([[2], [2]]), 1, hourly)[0] < 0.9


def test_a_plan_says_how_often_its_limits_are_kept_together_also_a_budget_alone() -> None:
    unsure = problem(pool(step_sigma=0.1), servers=quiet())
    alone = plan(replace(unsure, objective=Objective(budget=5.0)))
    assert alone.chance is None
    assert alone.kept == alone.budget_chance is not None
    both = plan(replace(unsure, objective=Objective(deadline=HOUR, budget=4.0)))
    assert both.kept is not None
    assert both.chance is not None
    assert both.budget_chance is not None
    assert both.kept <= min(both.chance, both.budget_chance)


def test_prefer_min_time_stays_within_budget() -> None:
    base = problem(pool(startup_seconds=120), deadline=None, servers=quiet())
    answer = plan(replace(base, objective=Objective(budget=3.0, prefer="MinTime")))
    assert answer.feasible
    assert answer.cost <= 3.0
    assert answer.binding == "budget"
    assert "The budget is what makes it take so long" in explain(answer)


def test_conflicting_deadline_and_budget_are_reported() -> None:
    base = problem(pool(startup_seconds=120), deadline=None, servers=quiet())
    answer = plan(replace(base, objective=Objective(deadline=2400, budget=2.9)))
    assert not answer.feasible
    assert answer.binding == "deadline and budget"
    assert "cannot be kept together" in explain(answer)


def test_worker_limits_of_job_are_respected() -> None:
    wide = problem(pool(), deadline=None, servers=quiet(), min_workers=2, max_workers=5)
    answer = plan(wide)
    assert 2 <= sum(answer.counts) <= 5
    mixed = problem(pool(), pool("od", spot=False, price=3.0), servers=quiet(), min_on_demand=1)
    assert plan(mixed).counts[1] == 1


@pytest.mark.parametrize("prefer", ["BestValue", "MinCost", "MinTime"])
def test_free_nodes_are_all_used(prefer: Prefer) -> None:
    """The most speed for no cost was that of the slowest plan."""
    free = problem(pool(price=0.0), deadline=None, servers=quiet())
    assert plan(replace(free, objective=Objective(prefer=prefer))).counts == (8,)


def test_confidence_asked_for_and_kept_are_never_rounded_to_certainty() -> None:
    most = plan(
        replace(
            problem(pool(interruptions_per_hour=1.0)), objective=Objective(HOUR, confidence=MOST_CONFIDENCE)
        )
    )
    assert "(asked for: 99.9%)" in explain(most)
    assert pytest.approx(1 - 1 / RUNS) == MOST_CONFIDENCE == pytest.approx(1 - 1 / calibrate.RUNS)


def test_loss_reached_so_far_reduces_remaining_steps() -> None:
    curve = {"r1": 876.5, "r2": -0.2, "r3": 2507.6, "r4": 0.5}
    batch, workers = np.array([128.0]), np.array([4.0])
    whole = LossWork(0.8, **curve).iterations(batch, workers)[0]
    half = LossWork(0.8, **curve, done=1.0).iterations(batch, workers)[0]
    assert half == pytest.approx(whole - LossWork(1.0, **curve).iterations(batch, workers)[0])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (problem, "at least one"),
        (
            lambda: problem(pool(limit=0)),
            "no pool has a node for the job: raise the limit of at least one, or",
        ),
        (lambda: problem(pool(room=0)), "no pool has a node for the job: raise .* or wait for nodes"),
        (lambda: problem(pool(), pool()), "same name"),
        (lambda: pool(price=float("nan")), "must be a number"),
        (lambda: pool(step_seconds=0), "greater than 0"),
        (lambda: problem(pool(), deadline=-5), "deadline in seconds must be greater than 0"),
        (lambda: problem(pool(), min_workers=9), "hold 8 workers together"),
        (lambda: problem(pool(), min_workers=4, max_workers=2), "contradict each other"),
        (lambda: Objective(confidence=0.99999), "at most 0.999, .* runs of a plan can show, not 0.99999"),
        (lambda: Objective(confidence=0.4), "at least 0.5"),
        (StepWork, "as steps or as samples"),
        (lambda: LossWork(0.4, 1, 1, 1, 0.5), "out of reach"),
    ],
)
def test_invalid_input_raises_error_with_advice(make: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make()


class TestSwitch:
    """What runs is left where the gain is sure: `fleet` keeps it below `SURE`."""

    def setup_method(self) -> None:
        self.problem = problem(
            pool("a", startup_seconds=200), pool("b", startup_seconds=200, running=3), servers=quiet()
        )

    def switch(self, price: float, new: tuple[int, int] = (3, 0)) -> Switch:
        a, b = self.problem.pools
        return switch(replace(self.problem, pools=(replace(a, price=price), b)), (0, 3), new, 1)

    def test_equal_pool_is_no_gain_since_its_nodes_must_start(self) -> None:
        assert not is_sure(self.switch(1.0).saved)

    def test_gain_must_outweigh_the_nodes_that_are_left_and_still_paid(self) -> None:
        assert not is_sure(self.switch(0.93).saved)
        assert is_sure(self.switch(0.3).saved)

    def test_what_runs_is_judged_by_the_limits(self) -> None:
        assert self.switch(1.0).kept
        unsure = tuple(replace(p, step_sigma=0.1) for p in self.problem.pools)
        # Three workers are in time by 7 % on average, but late in a quarter of the runs.
        assert not switch(replace(self.problem, pools=unsure), (0, 3), (3, 0), 1).kept

    def test_bytes_that_cross_zones_are_part_of_what_staying_costs(self) -> None:
        a, b = (
            replace(each, zone=zone, transfer_per_gib=0.02)
            for each, zone in zip(self.problem.pools, "ab", strict=True)
        )
        there = replace(self.problem, pools=(a, b), servers=quiet(zone="a", bytes_per_step=1e8))
        assert is_sure(switch(there, (0, 3), (3, 0), 1).saved)
        here = replace(there, servers=quiet(zone="b", bytes_per_step=1e8))
        assert not is_sure(switch(here, (0, 3), (3, 0), 1).saved)

    def test_faster_plan_is_worth_how_many_times_as_fast_it_is(self) -> None:
        hurry = replace(self.problem, objective=Objective(prefer="MinTime"))
        saved = switch(hurry, (0, 3), (3, 3), 1).saved
        now, then = (finish_times(hurry, counts, 1) for counts in ((0, 3), (3, 3)))
        assert saved.mean() == pytest.approx(np.log(now / then).mean(), rel=0.01)

    def test_plan_that_never_ends_saves_no_time_and_leaving_it_saves_all(self) -> None:
        a, b = self.problem.pools
        b = replace(b, availability=Markov(stock=Stock(1.0, 1e9, math.inf), shock_size=1.0), running=0)
        hurry = replace(self.problem, pools=(a, b), objective=Objective(prefer="MinTime"))
        to, back = (switch(hurry, *plans, 1).saved for plans in (((3, 0), (0, 3)), ((0, 3), (3, 0))))
        assert math.isinf(to.min())
        assert math.isinf(back.max())
        assert not is_sure(to)
        assert is_sure(back)


def test_other_number_of_servers_restarts_all_workers_from_a_snapshot() -> None:
    """The job is suspended for it: nothing runs before the servers are restored and the workers start again."""
    runs = problem(
        pool(startup_seconds=200, running=4),
        servers=quiet(counts=(1, 2, 3), running=2, startup_seconds=30, recovery_seconds=60),
    )
    alone = [each(np.array([[4.0]])).seconds[0] for each in ElasticModel(runs).evaluators()]
    assert alone[0] == alone[2] == pytest.approx(alone[1] + 200, abs=0.1)
    times = [finish_times(runs, (4,), number).mean() for number in (1, 2, 3)]
    assert times[0] == times[2] == pytest.approx(times[1] + 200, rel=0.01)
    slow = replace(runs, servers=replace(runs.servers, startup_seconds=400))
    assert finish_times(slow, (4,), 1).mean() == pytest.approx(times[1] + 460, rel=0.01)
    assert plan(runs).servers == 2


def test_where_the_best_plan_is_sure_no_other_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of all that might be surer took more than half of the time of a plan."""
    made: list[int] = []
    table = Engine.chances
    monkeypatch.setattr(Engine, "chances", lambda *args: made.append(1) or table(*args))
    unsure = problem(pool(step_sigma=0.05, interruptions_per_hour=0.1), deadline=20 * HOUR, servers=quiet())
    assert plan(unsure).proved
    assert not made
    near = plan(replace(unsure, objective=Objective(deadline=100_000 / 30 + 70)))
    assert near.counts[0] > 3
    assert made


class TestManyPoolsAlike:
    """Spot nodes of one kind in four zones: nine workers are cheapest, in time too rarely, and placed in 200 ways."""

    def problem(self, deadline: float, dearer: float = 0.0) -> Problem:
        pools = [
            pool(
                f"zone-{n}",
                price=0.5 * (1 + n * dearer),
                startup_seconds=180,
                interruptions_per_hour=0.3,
                step_sigma=0.03,
            )
            for n in range(4)
        ]
        return Problem(
            pools,
            StepWork(steps=400_000),
            Servers(model=PsModel(0.002)),
            Objective(deadline=deadline),
            max_workers=32,
        )

    def test_more_time_makes_no_plan_dearer(self) -> None:
        """After 150 of these ways the plan with 15 minutes more had 19 workers, and was called the cheapest."""
        less, more = (plan(self.problem(deadline)) for deadline in (4000.0, 4900.0))
        assert less.feasible
        assert more.cost <= less.cost
        assert more.proved

    def test_way_that_was_not_looked_at_is_not_said_to_be_ruled_out(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is found then is as good as what the table of the pools' work holds to be sure."""
        monkeypatch.setattr(risk, "MOST_CHECKED", 8)
        found = plan(self.problem(4900.0, dearer=1e-4))
        assert not found.proved
        assert found.feasible
        assert sum(found.counts) == 10
        assert "No better plan was found" in explain(found)
