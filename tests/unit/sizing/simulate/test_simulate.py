"""Traces, and the policies that are simulated with them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.cli.views import show_simulation
from shoal.errors import UsageError
from shoal.sizing.availability import Stock, Windows
from shoal.sizing.plan import Objective, Pool, Problem, Servers, StepWork
from shoal.sizing.plan.deadline import spare_seconds
from shoal.sizing.plan.elastic import ElasticModel
from shoal.sizing.simulate.measured import with_trace
from shoal.sizing.simulate.policies import UniformProgress, View
from shoal.sizing.simulate.replay import supply
from shoal.sizing.simulate.scenario import Scenario, scenario_of
from shoal.sizing.simulate.summary import explain, run
from shoal.sizing.simulate.traces import Trace, read_trace
from tests.unit.sizing.runs import chance

AWS = Path(__file__).parents[3] / "data" / "traces" / "aws-p3-2xlarge-32-nodes.csv"
WORKERS, STEP = 16, 0.1


def scenario(hours: float, slack: float) -> Scenario:
    spot = Pool("spot", 32, 0.9, STEP, 128, startup_seconds=180)
    steady = Pool("steady", 32, 3.0, STEP, 128, spot=False, startup_seconds=180)
    work = StepWork(steps=hours * 3600 * WORKERS / STEP)
    problem = Problem((spot, steady), work, Servers(price=0.2), max_workers=WORKERS)
    return scenario_of(problem, slack=slack)


def counts(tmp_path: Path, nodes: list[int], gap: float = 300) -> Trace:
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": gap}, "data": nodes}))
    return read_trace(path)


def test_what_never_ends_has_no_cost_and_is_not_called_cheaper(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(scenario(0.5, 1.2), [counts(tmp_path, [0] * 50)], runs=5)
    assert result.outcome("spot only").unfinished == 1
    show_simulation(result, explain(result), "$")
    row = next(line.split() for line in capsys.readouterr().out.splitlines() if "spot only" in line)
    assert row[2:7] == ["0.0%", "never", "never", "-", "-"]


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("hours", "slack"), [(0.5, 1.2), (2, 1.2), (2, 1.5), (8, 1.2)])
def test_shoal_policy_on_recorded_trace_meets_deadlines_at_lowest_cost(hours: float, slack: float) -> None:
    result = run(scenario(hours, slack), [read_trace(AWS)], runs=200)
    ours = result.outcome("shoal")
    assert ours.kept == 1
    for other in ("uniform progress", "on-demand only"):
        assert (ours.cost["mean"] or 0) <= (result.outcome(other).cost["mean"] or 0) * 1.0001
    assert (result.outcome("oracle").cost["mean"] or 0) <= (ours.cost["mean"] or 0)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    "nodes",
    [
        [0] * 50,
        [16] * 60 + [0] * 200,
        [16, 0] * 100,
        np.random.default_rng(3).integers(0, 17, 60).repeat(8).tolist(),
    ],
    ids=["no spot at all", "spot that ends", "spot that comes and goes", "scarce spot"],
)
def test_shoal_policy_meets_deadline_for_any_spot_capacity(tmp_path: Path, nodes: list[int]) -> None:
    result = run(scenario(2, 1.2), [counts(tmp_path, nodes)], runs=100)
    assert result.outcome("shoal").kept == 1
    assert result.outcome("spot only").kept < 1
    assert "would have been late" in explain(result)
    assert "the operator plans instead) kept" in explain(result)


def test_cheaper_and_equally_sure_policy_is_named(tmp_path: Path) -> None:
    result = run(scenario(1, 1.3), [counts(tmp_path, [32] * 100)], runs=5)
    assert "Cheaper" not in explain(result)
    ours = result.outcome("shoal")
    dear = replace(ours, cost={**ours.cost, "mean": 1.1 * (ours.cost["mean"] or 0)})
    others = tuple(dear if o is ours else o for o in result.outcomes)
    assert "Cheaper and as often in time was here" in explain(replace(result, outcomes=others))


def test_unlimited_spot_uses_no_on_demand_workers(tmp_path: Path) -> None:
    result = run(scenario(1, 1.5), [counts(tmp_path, [32] * 100)], runs=20)
    ours, spot = result.outcome("shoal"), result.outcome("spot only")
    assert ours.cost == spot.cost
    assert ours.on_demand_share == 0
    # 16 workers at work for an hour, and 180 s to start; workers at $0.9, the server at $0.2.
    hours = 1 + 180 / 3600
    assert spot.cost["mean"] == pytest.approx(hours * (16 * 0.9 + 0.2), rel=0.01)
    assert spot.goodput == pytest.approx(1 / hours, rel=0.01)


def test_same_seed_gives_same_runs() -> None:
    one, two = (run(scenario(1, 1.3), [read_trace(AWS)], runs=30, seed=5) for _ in range(2))
    assert one.as_json("") == two.as_json("")


def test_three_trace_formats_give_same_nodes(tmp_path: Path) -> None:
    events = tmp_path / "events.csv"
    events.write_text("0,add,a\n0,add,b\n600000,remove,a\n900000,add,c\n1200000,remove,b\n")
    table = tmp_path / "table.csv"
    table.write_text("\ufeffseconds,nodes\n0,2\n600,1\n900,2\n1200,1\n")  # as Excel writes it
    there = counts(tmp_path, [2, 2, 1, 2, 1])
    for path in (events, table):
        trace = read_trace(path)
        assert trace.span == 1200
        assert trace.bins(300)[0].tolist() == there.bins(300)[0].tolist()[:4]
    assert read_trace(events).bins(300)[1].tolist() == [0, 1, 0, 1]


def test_node_removed_before_added_exists_from_start_of_trace(tmp_path: Path) -> None:
    path = tmp_path / "events.csv"
    path.write_text("# a comment\nms,event,node\n60000,add,b\n120000,remove,a\n180000,remove,a\n")
    trace = read_trace(path)
    assert sorted(trace.begins.tolist()) == [0, 0]
    assert sorted(trace.ends.tolist()) == [60, math.inf]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("0,add\n", "line 1"),
        ("0,add,a\n5,explode,a\n", "add or remove"),
        ("x,add,a\n0,nothing,b\n", "ms or seconds"),
        ("seconds,nodes\n", "no rows"),
        ("seconds,nodes\n0,-1\n", "0 or more"),
        ("seconds,nodes\n0,4.5\n60,4\n", "a whole number from 0 to 100,000"),
        ("seconds,nodes\n0,1000000\n60,4\n", "a whole number from 0 to 100,000"),
        ("seconds,nodes\n0,4\n", "spans no time"),
        ("0,add,a\n", "spans no time"),
        ("seconds,price\n0,1\n", "no column nodes"),
        ("0,5\n60,4\n", "needs a header"),
        ('{"data": []}', "gap_seconds"),
        ("{", "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"metadata": {"gap_seconds": Infinity}, "data": [4, 3]}', "gap_seconds"),
        (
            '{"metadata": {"gap_seconds": 600}, "data": [' + "9" * 400 + "]}",
            "a whole number from 0 to 100,000",
        ),
    ],
)
def test_invalid_trace_raises_error_with_advice(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(UsageError, match=says):
        read_trace(path)


def test_time_in_another_unit_is_an_error_and_a_gap_is_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("seconds,nodes\n0,8\n1000000000000,8\n")
    with pytest.raises(UsageError, match="in ms where it should be in seconds"):
        read_trace(path).bins(60)
    rows = [60 * i for i in range(30)] + [86_400 + 60 * i for i in range(30)]
    path.write_text("seconds,nodes\n" + "".join(f"{at},8\n" for at in rows))
    assert "has 1 gap of up to 23.5 h without a row" in read_trace(path).note
    path.write_text("seconds,nodes\n" + "".join(f"{60 * i},8\n" for i in range(30)))
    assert read_trace(path).note == ""


def pools() -> tuple[Pool, Pool]:
    spot, steady = scenario(1, 1.3).problem.pools
    return spot, steady


@pytest.mark.nightly
def test_policies_respect_pool_limits(tmp_path: Path) -> None:
    spot, steady = pools()
    limited = replace(
        scenario(1, 1.3).problem, pools=(replace(spot, limit=4), replace(steady, limit=10)), max_workers=16
    )
    small = scenario_of(limited, slack=1.3)
    assert (small.workers, small.most_spot, small.most_on_demand) == (14, 4, 10)
    result = run(small, [counts(tmp_path, [32] * 100)], runs=20)
    assert max(result.outcome("spot only").workers_over_time) == 4
    assert result.outcome("on-demand only").kept == 1
    assert result.outcome("shoal").kept == 1
    for outcome in result.outcomes:
        assert max(outcome.workers_over_time) <= 14


def test_on_demand_base_applies_to_every_policy(tmp_path: Path) -> None:
    problem = replace(scenario(1, 1.5).problem, min_on_demand=3)
    result = run(scenario_of(problem, slack=1.5), [counts(tmp_path, [32] * 100)], runs=10)
    spot = result.outcome("spot only")
    assert spot.on_demand_share == pytest.approx(3 / WORKERS, abs=0.01)
    assert max(spot.workers_over_time) == WORKERS
    assert result.outcome("shoal").cost == spot.cost
    with pytest.raises(UsageError, match="of 33 nodes or more"):
        spot_pool, steady = pools()
        split = (spot_pool, steady, replace(steady, name="more"))
        scenario_of(replace(problem, pools=split, min_on_demand=33, max_workers=64), slack=1.5)


def test_zone_policy_same_chooses_pools_in_one_zone() -> None:
    spot, steady = pools()
    far = replace(spot, name="far", zone="b", price=0.1), replace(steady, name="far too", zone="c", price=1.0)
    near = replace(spot, zone="a"), replace(steady, zone="a")
    anywhere = replace(scenario(1, 1.3).problem, pools=(*far, *near))
    found = scenario_of(anywhere, slack=1.3)
    assert (found.spot.name, found.on_demand.name) == ("far", "far too")
    same = scenario_of(replace(anywhere, zone_policy="Same"), slack=1.3)
    assert (same.spot.name, same.on_demand.name) == ("spot", "steady")
    with pytest.raises(UsageError, match="in one zone"):
        scenario_of(replace(anywhere, pools=far, zone_policy="Same"), slack=1.3)
    elsewhere = replace(anywhere.servers, zone="b")
    with pytest.raises(UsageError, match=r"that of the parameter servers \(b\)"):
        scenario_of(replace(anywhere, zone_policy="Same", servers=elsewhere), slack=1.3)


def view(now: float, done: float, on_demand: int = 0, starting: int = 0, spot: int = 0) -> View:
    return view_of(scenario(2, 1.5), now, done, on_demand, starting, spot)


def view_of(
    job: Scenario, now: float, done: float, on_demand: int = 0, starting: int = 0, spot: int = 0
) -> View:
    def one(number: int) -> Any:
        return np.array([number])

    return View(
        scenario=job, now=now * job.deadline, step=30.0, remaining=np.array([(1 - done) * job.work]), spot=one(spot),
        on_demand=one(on_demand), starting=one(starting), starting_wait=np.zeros(1), spot_there=one(spot),
        startup=180.0, on_demand_work=np.zeros(1),
    )  # fmt: skip


def test_uniform_progress_keeps_on_demand_until_two_changes_ahead() -> None:
    policy = UniformProgress()
    assert policy(view(0.2, done=0.21))[1] == 0
    asked = int(policy(view(0.3, done=0.29))[1][0])
    assert asked > 0
    # They stay while they start, and when the run is just on schedule.
    assert policy(view(0.31, done=0.30, starting=asked))[1] >= asked
    assert policy(view(0.4, done=0.401, on_demand=asked))[1] >= asked
    ahead = 2 * 180 / scenario(2, 1.5).deadline
    assert policy(view(0.4, done=0.4 + ahead - 0.001, on_demand=asked))[1] >= asked
    assert policy(view(0.4, done=0.4 + ahead + 0.001, on_demand=asked))[1] == 0
    # Both kinds together are at most the workers of the job.
    spot, own = policy(view(0.5, done=0.1, on_demand=WORKERS, spot=2))
    assert spot + min(own, WORKERS) <= WORKERS


def test_uniform_progress_keeps_spot_and_replaces_idle_workers_late() -> None:
    policy = UniformProgress()
    assert policy(view(0.5, done=0.2, spot=WORKERS))[1] == 0  # behind, but no worker is idle
    # The work takes two thirds of the time on-demand: a fifth of the time is left, and more of the work.
    policy = UniformProgress()
    assert policy(view(0.8, done=0.7, spot=WORKERS))[1] == 0
    assert policy(view(0.8, done=0.7, spot=WORKERS - 5))[1] == 5
    assert policy(view(0.9, done=0.99, on_demand=5, spot=WORKERS - 5))[1] == 5
    calm = UniformProgress()
    assert calm(view(0.9, done=0.99, on_demand=5, spot=WORKERS - 5))[1] == 0


def test_trace_sets_interruptions_and_availability_of_pool() -> None:
    problem = scenario(1, 1.2).problem
    spot = with_trace(problem, "spot", read_trace(AWS)).pools[0]
    assert 0 < spot.interruptions_per_hour < 5
    assert spot.process.mean == pytest.approx(0.75, abs=0.05)
    with pytest.raises(UsageError, match="not among spot, steady"):
        with_trace(problem, "other", read_trace(AWS))


def test_trace_without_time_keeps_the_prior_rate(tmp_path: Path) -> None:
    problem = scenario(1, 1.2).problem
    known = replace(problem.pools[0], interruptions_per_hour=0.2)
    one = with_trace(replace(problem, pools=(known, problem.pools[1])), "spot", counts(tmp_path, [8], gap=1))
    assert one.pools[0].interruptions_per_hour == pytest.approx(0.2, rel=0.01)


def test_beside_a_trace_counts_what_the_pool_was_seen_to_do() -> None:
    """A trace of hours says little of the next ones: with a small weight, a run is what was known before."""
    problem = scenario(1, 1.2).problem
    known = replace(problem.pools[0], stock=Stock.watched(1e6, 3e5, 300), shock_share=0.9)
    spot = with_trace(replace(problem, pools=(known, problem.pools[1])), "spot", read_trace(AWS)).pools[0]
    assert isinstance(spot.availability, Windows)
    assert spot.availability.prior.stock == known.stock
    assert spot.availability.prior.shock_share == 0.9


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("workers", "hours", "slack"), [(16, 1, 1.1), (24, 1, 1.3), (32, 1, 1.2), (32, 4, 1.3)]
)
def test_promise_with_a_trace_is_kept_in_its_replay(workers: int, hours: float, slack: float) -> None:
    """Before, the plan promised 100 % where the replay of the same trace kept 0 to 82 %."""
    trace = read_trace(AWS)
    spot = Pool("spot", workers, 0.9, STEP, 128, startup_seconds=180)
    steady = Pool("steady", workers, 3.0, STEP, 128, spot=False, startup_seconds=180)
    work = StepWork(steps=hours * 3600 * workers / STEP)
    problem = Problem((spot, steady), work, Servers(interruptions_per_hour=0), max_workers=workers)
    made = scenario_of(problem, slack=slack)
    limited = replace(problem, objective=Objective(deadline=made.deadline))
    promised = chance(with_trace(limited, "spot", trace), (workers, 0), 1)
    kept = run(made, [trace], runs=400).outcome("spot only").kept
    assert kept - 0.2 <= promised <= kept + 0.05  # careful: 11 hours of a trace are few
    assert promised < 0.9


def test_slack_counts_the_start_of_parameter_servers() -> None:
    fast = scenario(1, 1.2).problem
    slow = replace(fast, servers=replace(fast.servers, startup_seconds=600))
    assert scenario_of(slow, slack=1.2).deadline - scenario_of(fast, slack=1.2).deadline == pytest.approx(
        1.2 * 420
    )


def test_incomplete_scenario_raises_error() -> None:
    problem = scenario(1, 1.2).problem
    with pytest.raises(UsageError, match="on-demand pool"):
        scenario_of(Problem(problem.pools[:1], problem.work), slack=1.2)
    with pytest.raises(UsageError, match="needs a deadline"):
        scenario_of(problem)
    with pytest.raises(UsageError, match="1 or more"):
        scenario_of(problem, slack=0.5)


@pytest.mark.parametrize("slack", [1.02, 1.2, 2.0])
def test_policies_and_operator_ask_one_safety_rule(slack: float) -> None:
    """What is to spare at the beginning is the same by a policy's view as by the planner's model of time."""
    job = scenario(2, slack)
    evaluators = ElasticModel(replace(job.problem, pools=(job.on_demand,))).evaluators()
    (model,) = (each for each in evaluators if each.servers == job.servers)
    workers = np.array([[float(job.most_on_demand)]])
    wait = float(model.wait(workers)[0])
    planned = spare_seconds(float(model(workers).seconds[0]) - wait, wait=wait, left=job.deadline)
    seen = view_of(job, now=0.0, done=0.0)
    assert float(seen.spare(job.on_demand.startup_seconds)[0]) == pytest.approx(planned, abs=1.0)
    assert planned == pytest.approx((1 - 1 / slack) * job.deadline, abs=1.0)


def test_trace_is_scaled_to_the_pool(tmp_path: Path) -> None:
    """Before, 16 workers drew from 32 nodes, and 8 of these could be missing for free."""
    trace = counts(tmp_path, [32] * 20 + [24] * 20)
    found = supply([trace], 300.0, 1, np.random.default_rng(0), 16)
    assert set(found.there[0]) == {16, 12}
    assert found.lost.max() == 4
