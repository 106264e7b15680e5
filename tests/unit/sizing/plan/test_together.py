"""Jobs that share pools: never more than there is, close to the exact optimum, the command line."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.joint import gap
from shoal.cli import main
from shoal.sizing.fleet import plan_fleet
from shoal.sizing.fleet.planner import SPARE, plan_problems
from shoal.sizing.fleet.problems import job_problem
from shoal.sizing.plan import Objective, Pool, Problem, Servers, StepWork, together
from shoal.sizing.plan.assign import Columns, assign
from shoal.sizing.plan.found import Found
from shoal.sizing.plan.search import EXACT_LIMIT, search
from shoal.sizing.plan.together import plan_together
from shoal.sizing.speed.model import fitted
from tests.unit.sizing.fleet.test_fleet import PROFILE, SPOT, STEADY, job

SIZING = Path(__file__).parents[4] / "examples" / "sizing"


@pytest.mark.nightly
def test_cost_is_close_to_the_exact_optimum() -> None:
    """A slice of the 200 instances that `python -m benchmarks.joint` solves."""
    found = [gap(seed) for seed in range(24)]
    gaps = [each for each in found if each is not None]
    assert len(gaps) >= 12
    assert min(gaps) >= -1e-6
    assert np.median(gaps) <= 0.05
    assert max(gaps) <= 0.15


def test_higher_priority_gets_a_candidate_first() -> None:
    one = Columns(np.array([[4.0]]), np.array([1.0]))
    assert assign([one, replace(one, priority=1)], np.array([4.0])) == (None, 0)
    assert assign([one, one], np.array([8.0])) == (0, 0)


def test_plans_of_two_jobs_fit_into_one_pool() -> None:
    """Before, two jobs on a pool of 8 nodes were each planned as if alone: 8 and 6."""
    spot = Pool("spot", 8, 0.5, 0.1, 128, startup_seconds=60, interruptions_per_hour=0.05)
    steady = Pool("steady", 8, 1.5, 0.1, 128, spot=False, startup_seconds=60)
    one = Problem((spot, steady), StepWork(steps=200_000), Servers(), Objective(deadline=3600))
    plans = [plan for plan in plan_together([one, one], [0, 0]) if plan is not None]
    assert len(plans) == 2
    assert all(plan.feasible for plan in plans)
    assert sum(plan.counts[0] for plan in plans) <= 8
    assert sum(plan.counts[1] for plan in plans) <= 8


def test_jobs_with_many_nodes_trade_without_looking_at_every_combination(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to 20 million were looked at for each of eight jobs, once a minute, while nothing else could be planned."""
    looked = list[int]()

    def counted(*given: Any, **options: Any) -> tuple[Found, bool]:
        found, exact = search(*given, **options)
        looked.append(found.searched)
        return found, exact

    monkeypatch.setattr(together, "search", counted)
    pools = [
        Pool(
            f"p{n}",
            70,
            0.5 + 0.2 * n,
            0.1 / (1 + n / 7),
            128,
            startup_seconds=60,
            interruptions_per_hour=0.05,
        )
        for n in range(3)
    ]
    one = Problem(pools, StepWork(steps=1_300_000), Servers(), Objective(deadline=3600))
    plans = [plan for plan in plan_together([one, one], [0, 0]) if plan is not None]
    assert len(plans) == 2
    assert all(plan.feasible for plan in plans)
    assert max(looked) <= together.MOST_EXACT < math.prod(pool.limit + 1 for pool in pools)
    monkeypatch.setattr(together, "MOST_EXACT", EXACT_LIMIT)
    exact = [plan for plan in plan_together([one, one], [0, 0]) if plan is not None]
    assert len(exact) == 2
    assert sum(plan.cost for plan in plans) <= 1.02 * sum(plan.cost for plan in exact)


def test_a_job_that_gets_no_node_has_no_plan_and_leaves_the_other_its_own() -> None:
    pool = Pool("steady", 1, 1.5, 0.1, 128, spot=False)
    one = Problem((pool,), StepWork(steps=200_000), Servers(), Objective(deadline=36_000))
    found = plan_together([one, one], [0, 0])
    assert [None if plan is None else plan.counts for plan in found].count((1,)) == found.count(None) == 1


@pytest.mark.parametrize("limit", [1, 16])
def test_command_plans_several_jobs_together(tmp_path: Path, limit: int) -> None:
    text = (SIZING / "job.yaml").read_text().replace("name: resnet32-cifar10", "name: other")
    (tmp_path / "other.yaml").write_text(text)
    pools = (SIZING / "pools.yaml").read_text().replace("limits: {nodes: 16}", f"limits: {{nodes: {limit}}}")
    (tmp_path / "pools.yaml").write_text(pools)
    arguments = [
        "plan", "-f", str(SIZING / "job.yaml"), "-f", str(tmp_path / "other.yaml"), "--pools",
        str(tmp_path / "pools.yaml"), "--profiles", str(SIZING / "profiles.yaml"),
    ]  # fmt: skip
    result = CliRunner().invoke(main, [*arguments, "--json"])
    assert result.exit_code == (0 if limit == 16 else 3), result.output
    answer = json.loads(result.output)
    assert [job["name"] for job in answer["jobs"]] == ["resnet32-cifar10", "other"]
    for pool in ("spot-p100", "on-demand-p100"):
        assert sum(job["counts"][pool] for job in answer["jobs"]) <= limit
    assert answer["cost"] > 0


def test_jobs_from_files_are_planned_and_trade_as_the_operator_lets_them() -> None:
    """They were chosen together, whatever each would choose: a trade of a few percent that no cluster would see."""
    pools = [replace(SPOT, limit=5), STEADY]
    fleet = [
        job("a", samples_left=1.5e7),
        job("b", deadline_seconds=2700.0),
        job("c", deadline_seconds=None, samples_left=4e6, running={"spot": 2}),
    ]
    speeds, _ = fitted([PROFILE])
    limits = {pool.name: pool.limit for pool in pools}
    problems = [(each, job_problem(each, pools, limits, speeds, spare=SPARE)) for each in fleet]
    found = plan_problems(pools, problems)
    theirs = plan_fleet(pools, [PROFILE], fleet).jobs
    assert [dict(zip(("spot", "steady"), plan.counts, strict=True)) for plan in found] == [
        theirs[each.name].counts for each in fleet
    ]
