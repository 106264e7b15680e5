"""What the page shows of a job is what the command line shows."""

from __future__ import annotations

import io
from datetime import timedelta
from typing import Any

import pytest
from rich.console import Console

from shoal.api.capacity_pool import CapacityPool
from shoal.api.training_job import TrainingJob
from shoal.client.view import job_table
from shoal.page.view import detail, overview, row
from tests.unit.policy.build import NOW, job, stamp


@pytest.mark.parametrize(("mode", "desired"), [("Advise", 2), ("Auto", 6)])
def test_how_many_workers_are_wanted_has_one_answer(mode: str, desired: int) -> None:
    """kubectl's column DESIRED: what is planned changes nothing in mode Advise, and all in mode Auto."""
    of = job(
        {
            "phase": "Running",
            "workers": {"ready": 2, "desired": desired},
            "plan": {"pools": {"a": 6}, "summary": "6 a"},
        },
        workers={"replicas": 2, "maxReplicas": 12, "pools": ["a"]},
        elasticity={"mode": mode},
    )
    assert row(of, NOW)["wanted"] == desired
    out = io.StringIO()
    Console(file=out, width=200).print(job_table([of], now=NOW))
    assert f"2/{desired}" in out.getvalue()


def test_a_job_that_no_operator_has_looked_at_wants_what_its_spec_says() -> None:
    assert row(job(workers={"replicas": 4}), NOW)["wanted"] == 4


@pytest.mark.parametrize(
    ("minutes", "speed", "words"), [(1, 856.2, ""), (12.5, None, "no step is known for 12m00s")]
)
def test_a_job_that_stands_is_not_told_as_if_it_trained(
    minutes: float, speed: float | None, words: str
) -> None:
    training: dict[str, Any] = {
        "samplesPerSecond": "856.2", "remainingSeconds": 60,
        "lastProgressTime": stamp(NOW - timedelta(minutes=minutes)),
    }  # fmt: skip
    of = job({"phase": "Running", "training": training})
    shown = detail(of, None, NOW)
    assert (shown["samplesPerSecond"], shown["message"]) == (speed, words)
    assert (shown["finish"] is None) == (speed is None)


@pytest.mark.parametrize(("nodes", "used", "free"), [(4, 3, 1), (3, 3, 0), (1, 2, 0)])
def test_free_nodes_of_a_pool_are_those_that_no_job_uses(nodes: int, used: int, free: int) -> None:
    """A node that is gone may still have a pod."""
    spec = {"nodeSelector": {"pool": "a"}, "limits": {"nodes": 8}, "price": {"perHour": 0.3}}
    found = CapacityPool.model_validate(
        {
            "kind": "CapacityPool", "metadata": {"name": "a"}, "spec": spec,
            "status": {"nodes": nodes, "used": used},
        }
    )  # fmt: skip
    [shown] = overview([], [found], NOW)["pools"]
    assert [shown[key] for key in ("used", "free", "limit", "price")] == [used, free, 8, 0.3]


@pytest.mark.parametrize("kind", [TrainingJob, CapacityPool])
def test_columns_of_money_say_of_how_much_it_is(kind: type[TrainingJob | CapacityPool]) -> None:
    """For an hour, or so far; and in whose currency."""
    money = [each for each in kind.COLUMNS if "rice" in each.path or "cost" in each.path]
    assert money
    for column in money:
        assert column.name.endswith("/h") == column.path.endswith("perHour")
        assert "currency" in column.description
        assert column.name.lower() not in {"cost", "price"}


def test_the_condition_that_matters_most_is_told() -> None:
    """In the order by which the operator chooses `status.reason`."""
    told = [
        {"type": kind, "status": "True", "reason": kind, "message": kind, "lastTransitionTime": stamp(NOW)}
        for kind in ("Reconciling", "Disrupted", "Suspended", "Degraded")
    ]
    assert row(job({"phase": "Running", "conditions": told}), NOW)["message"] == "Degraded"
