"""spotDNN's published results, and the exact search against brute force."""

from __future__ import annotations

import csv
import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.spotdnn import DATA, Network, SpotDnn, main
from benchmarks.spotdnn import published as model
from shoal.errors import UsageError
from shoal.sizing.plan import LossWork, Objective, Pool, Problem, plan
from shoal.sizing.plan.as_good import AS_GOOD
from shoal.sizing.plan.explain import explain
from shoal.sizing.plan.local import local_search
from shoal.sizing.plan.search import exact_search, search

ROWS = json.loads((DATA / "plans.json").read_text())["rows"]
TABLE_I_PRICES = [0.918, 0.3612, 0.684, 1.37, 2.16]
NETWORK = Network(11.5, 142, 1200, 0.8, 1.92)


def plainly(
    quota: list[int], price: list[float], loss: float, deadline: float
) -> tuple[float, tuple[int, ...]] | None:
    """The formulas once more, one combination at a time."""
    workload = json.loads((DATA / "workload.json").read_text())
    with (DATA / "instances.csv").open() as file:
        rows = list(csv.DictReader(file))
    s, breq, bps = workload["S_param_MB"], workload["B_req_MBps"], workload["B_ps_MBps"]
    curve, share = workload["loss"], workload["P"]
    best = None
    for counts in itertools.product(*(range(q + 1) for q in quota)):
        n = sum(counts)
        if n == 0:
            continue
        p = min(share["alpha1"] * math.sqrt(n) - share["minus_beta1"], 1)
        bandwidth = p * bps / n + (1 - p) * breq if n * breq > bps else breq
        steps = samples = hourly = 0.0
        for count, row, cost in zip(counts, rows, price, strict=True):
            batch = float(row["batch_instance"])
            one = 1 / (batch / float(row["img_per_s(instance)"]) + 2 * s / bandwidth - 2 * s / breq)
            steps += count * one
            samples += count * batch * one
            hourly += count * cost
        b = samples / steps
        j = (curve["r2"] * b + curve["r3"]) * math.sqrt(n) / (loss - curve["r4"]) - curve["r1"]
        seconds = j / steps
        if j >= 1 and seconds <= deadline and (best is None or seconds / 3600 * hourly < best[0]):
            best = (seconds / 3600 * hourly, counts)
    return best


@pytest.mark.parametrize("row", ROWS, ids=[f"{r['objloss']}-{r['objtime']}" for r in ROWS])
def test_search_finds_published_optima(row: dict[str, Any]) -> None:
    found, exact = search(model(row["quota"], row["price"], row["objloss"], row["objtime"]))
    assert exact
    assert found.feasible == row["feasible"]
    if row["optimum"] is None:
        assert found.best is None
        return
    best, optimum = found.best, row["optimum"]
    assert best is not None
    assert list(best.counts) == optimum["counts"]
    assert best.seconds == pytest.approx(optimum["time_s"], rel=1e-6)
    assert best.cost == pytest.approx(optimum["cost"], rel=1e-6)
    assert best.iterations == pytest.approx(optimum["iterations"], rel=1e-6)


def test_search_reproduces_table_one_of_paper() -> None:
    table = model([0, 5, 5, 5, 5], TABLE_I_PRICES, 0.8, 2600)
    best = search(table)[0].best
    assert best is not None
    assert best.counts == (0, 2, 5, 2, 0)
    assert best.seconds == pytest.approx(2597.35, abs=0.005)
    assert best.cost == pytest.approx(4.966, abs=0.0005)
    heuristic = table(np.array([[0, 0, 5, 3, 0]], dtype=float).T)
    assert heuristic.seconds[0] == pytest.approx(2549.02, abs=0.005)
    assert heuristic.cost[0] == pytest.approx(5.332, abs=0.0005)


@settings(max_examples=15, deadline=None)
@given(
    quota=st.lists(st.integers(0, 3), min_size=5, max_size=5).filter(any),
    factor=st.lists(st.floats(0.6, 1.6), min_size=5, max_size=5),
    loss=st.floats(0.62, 1.0),
    deadline=st.floats(900, 9000),
)
def test_exact_search_agrees_with_brute_force(
    quota: list[int], factor: list[float], loss: float, deadline: float
) -> None:
    price = [f * p for f, p in zip(factor, TABLE_I_PRICES, strict=True)]
    expected = plainly(quota, price, loss, deadline)
    best = search(model(quota, price, loss, deadline))[0].best
    if expected is None:
        assert best is None
    else:
        assert best is not None
        assert best.cost == pytest.approx(expected[0], rel=1e-9)


@pytest.mark.nightly
def test_local_search_finds_optimum_of_random_problems() -> None:
    rng = np.random.default_rng(7)
    found = 0
    for _ in range(40):
        quota = rng.integers(0, 9, 5).tolist()
        if not any(quota):
            quota[0] = 1
        price = (np.array(TABLE_I_PRICES) * rng.uniform(0.6, 1.6, 5)).tolist()
        loss = float(rng.uniform(0.62, 1.0))
        fastest = search(model(quota, price, loss, 1e9))[0].fastest
        assert fastest is not None
        problem = model(quota, price, loss, fastest.seconds * float(rng.uniform(1.005, 3)))
        exact, local = search(problem)[0].best, local_search(problem).best
        assert exact is not None
        assert local is not None, "a plan exists"
        assert local.cost >= exact.cost * (1 - 1e-12)
        found += local.cost <= exact.cost * (1 + 1e-9)
    assert found >= 39


def test_threads_and_blocks_give_same_result() -> None:
    pools = [Pool(f"p{i}", 6, 0.3 + 0.21 * i, 0.5 + 0.1 * i, 512 * (1 + i % 2)) for i in range(7)]
    problem = Problem(pools, LossWork(0.8, 876.5, -0.2, 2507.6, 0.5), objective=Objective(deadline=1500))
    big = SpotDnn(problem, NETWORK)
    one = exact_search([big], problem.limits, problem.objective, threads=1)
    two = exact_search([big], problem.limits, problem.objective, threads=2)
    assert one.searched == two.searched == 7**7
    assert one.best == two.best
    assert np.array_equal(one.front.seconds, two.front.seconds)


def test_search_beyond_limit_is_reported_as_inexact() -> None:
    pools = [Pool(f"p{i}", 40, 0.3 + 0.2 * i, 0.5 + 0.1 * i, 512) for i in range(6)]
    answer = plan(
        Problem(tuple(pools), LossWork(0.8, 876.5, -0.2, 2507.6, 0.5), objective=Objective(deadline=1700))
    )
    assert not answer.exact
    assert "slightly better plan may exist" in explain(answer)
    assert answer.feasible
    assert answer.seconds <= 1700


def test_pareto_front_holds_all_undominated_plans() -> None:
    small = model([2, 2, 2, 1, 0], TABLE_I_PRICES, 0.8, 3000)
    counts = np.array(
        list(itertools.product(range(3), range(3), range(3), range(2), range(1))), dtype=float
    ).T
    out = small(counts)
    points = [(s, c) for s, c in zip(out.seconds, out.cost, strict=True) if np.isfinite(s)]
    kept = sorted({p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)})
    front = search(small)[0].front
    assert np.array([*zip(front.seconds, front.cost, strict=True)]) == pytest.approx(np.array(kept))


def test_infeasible_problem_gives_the_cheapest_plan_that_is_about_as_fast_as_can_be_and_the_constraint() -> (
    None
):
    answer = plan(model([2, 5, 5, 8, 5], TABLE_I_PRICES, 0.8, 600).problem)
    assert not answer.feasible
    assert answer.binding == "deadline"
    fastest = min(point.seconds for point in answer.pareto)
    as_fast = [point for point in answer.pareto if point.seconds <= AS_GOOD * fastest]
    assert answer.seconds <= AS_GOOD * fastest
    assert answer.cost == pytest.approx(min(point.cost for point in as_fast))
    assert "No plan ends within 10 min" in explain(answer)


def test_unreachable_loss_raises_error() -> None:
    with pytest.raises(UsageError, match=r"levels off at 0\.5"):
        model([1, 1, 1, 1, 1], TABLE_I_PRICES, 0.5, 1800)
    easy = model([1, 1, 1, 1, 1], TABLE_I_PRICES, 1000.0, 1800)
    with pytest.raises(UsageError, match="ask for a lower loss"):
        plan(easy.problem)


def test_plan_stays_in_fitted_batch_range() -> None:
    work = LossWork(0.8, 876.5, -0.2, 2507.6, 0.5, batch_range=(900, 1300))
    iterations = work.iterations(np.array([512.0, 1024.0, 8192.0]), np.array([2.0, 2.0, 2.0]))
    assert np.isfinite(iterations).tolist() == [False, True, False]


def test_the_table_has_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    assert capsys.readouterr().out.count("$") >= len([row for row in ROWS if row["optimum"]])
