"""What other jobs have of the pools."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shoal.api.training_job import TrainingJob
from shoal.controllers.trainingjob.claims import Claims, holdings
from shoal.policy.actions import CreatePod
from shoal.policy.model import Plan
from shoal.policy.plan import plan
from tests.unit.policy import build
from tests.unit.policy.pools import pool


def job(name: str, version: int = 1, *, mode: str = "Auto", **status: Any) -> TrainingJob:
    manifest = build.job_manifest(workers={"replicas": 1, "pools": ["a", "b"]}, elasticity={"mode": mode})
    manifest["metadata"] |= {"name": name, "uid": name, "resourceVersion": str(version)}
    return TrainingJob.model_validate({**manifest, "status": status}, extra="ignore")


def slot(index: int, pool: str, state: str = "Running", incarnation: int = 0) -> dict[str, Any]:
    return {"role": "worker", "index": index, "incarnation": incarnation, "pool": pool, "state": state}


def decided(mine: TrainingJob) -> Plan:
    return Plan((), mine.status)


def test_jobs_that_are_applied_in_the_same_instant_keep_to_a_pool_together() -> None:
    """In mode Off, where no plan counts: the workers that are about to be made do."""
    pools = {"a": pool("a", limit=4)}
    jobs = {}
    for name in "xy":
        found = build.job_manifest(workers={"replicas": 3, "pools": ["a"]}, elasticity={"mode": "Off"})
        found["metadata"] |= {"name": name, "uid": name, "resourceVersion": "1"}
        jobs[name] = TrainingJob.model_validate(found)
    claims = Claims()
    made = 0
    for each in jobs.values():
        claims.see(None, each)
    for each in jobs.values():  # none of them is in the cache with what was decided for it before
        made_now = plan(build.observe(each, pools=pools, taken=claims.of_others(each)))
        claims.decide(each, made_now)
        made += sum(isinstance(a, CreatePod) and a.role == "worker" for a in made_now.actions)
    assert made == 4


def test_plan_and_workers_count_and_those_that_leave_too() -> None:
    planned = {"plan": {"pools": {"a": 2}}, "slots": [slot(0, "a"), slot(1, "b", "Draining")]}
    assert holdings(job("x", **planned)) == {"a": 2, "b": 1}
    assert holdings(job("x", mode="Advise", **planned)) == {"a": 1, "b": 1}  # advice is not carried out
    moved = {"slots": [slot(0, "a", "Draining"), slot(0, "a", incarnation=1), slot(1, "a", "Ended")]}
    assert holdings(job("x", **moved)) == {"a": 1}


def test_a_job_of_another_controller_has_no_nodes_here() -> None:
    """MultiKueue copies the status of its twin in another cluster: pools of that name bought its nodes here, too."""
    x, y, claims = job("x", plan={"pools": {"a": 3}}, slots=[slot(0, "a"), slot(1, "b")]), job("y"), Claims()
    remote = x.model_copy(
        update={"spec": x.spec.model_copy(update={"managed_by": "kueue.x-k8s.io/multikueue"})}
    )
    assert holdings(remote) == {}
    claims.see(None, remote)
    assert claims.of_others(y) == {}


def test_what_was_decided_counts_before_it_is_seen() -> None:
    x, y, claims = job("x"), job("y"), Claims()
    claims.see(None, x)
    claims.see(None, y)
    assert claims.of_others(y) == {}
    claims.decide(x, decided(job("x", plan={"pools": {"a": 3}})))
    assert claims.of_others(y) == {"a": 3}
    assert claims.of_others(x) == {}
    second = job("x", 2, plan={"pools": {"a": 3}})
    claims.see(x, second)
    claims.decide(second, decided(job("x", plan={"pools": {"a": 1}})))
    assert claims.of_others(y) == {"a": 3}  # it has not left them
    third = job("x", 3, plan={"pools": {"a": 1}})
    claims.see(second, third)
    assert claims.of_others(y) == {"a": 1}
    claims.see(third, None)
    assert claims.of_others(y) == {}


def test_a_job_that_has_ended_has_only_the_nodes_that_it_has_not_left() -> None:
    x, y, claims = job("x"), job("y"), Claims()
    claims.see(None, x)
    claims.decide(x, decided(job("x", plan={"pools": {"a": 3}})))
    over = {
        "type": "Complete",
        "status": "True",
        "reason": "Trained",
        "lastTransitionTime": build.stamp(build.NOW),
    }
    claims.see(x, job("x", 2, plan={"pools": {"a": 3}}, slots=[slot(0, "a", "Draining")], conditions=[over]))
    assert claims.of_others(y) == {"a": 1}


def test_a_job_that_is_being_deleted_wants_no_nodes_of_its_plan_any_more() -> None:
    """A finalizer of its team, or foreground deletion, may keep it for hours."""
    x, y, claims = job("x", plan={"pools": {"a": 3}}, slots=[slot(0, "a")]), job("y"), Claims()
    claims.see(None, x)
    claims.decide(x, decided(x))
    assert claims.of_others(y) == {"a": 3}
    leaving = {"resource_version": "2", "deletion_timestamp": build.stamp(build.NOW)}
    claims.see(x, x.model_copy(update={"metadata": x.metadata.model_copy(update=leaving)}))
    assert claims.of_others(y) == {"a": 1}


def test_a_job_whose_spec_names_no_pools_any_more_gives_their_nodes_to_others() -> None:
    """They were kept from others until the operator was started again."""
    x, y, claims = job("x", mode="Manual"), job("y"), Claims()
    claims.see(None, x)
    claims.decide(x, decided(job("x", slots=[slot(0, "a"), slot(1, "a")])))
    assert claims.of_others(y) == {"a": 2}
    spec = x.spec.model_copy(update={"workers": x.spec.workers.model_copy(update={"pools": ()})})
    elsewhere = job("x", 2, mode="Manual", slots=[slot(0, "a", "Draining"), slot(0, "", incarnation=1)])
    second = elsewhere.model_copy(update={"spec": spec})
    claims.see(x, second)
    claims.decide(second, decided(second))
    assert claims.of_others(y) == {"a": 1}  # it has not left it
    third = job("x", 3, mode="Manual", slots=[slot(0, "", incarnation=1)]).model_copy(update={"spec": spec})
    claims.decide(second, decided(third))
    claims.see(second, third)
    assert claims.of_others(y) == {}


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.integers(0, 6)), max_size=30))
def test_jobs_that_keep_to_what_others_leave_never_have_more_than_a_pool(
    wishes: list[tuple[str, int]],
) -> None:
    """However late a status is written; and the sum is that of the parts."""
    jobs = {name: job(name) for name in "xyz"}
    claims, version = Claims(), 1
    for each in jobs.values():
        claims.see(None, each)
    last: dict[str, Counter[str]] = {}
    for name, wish in wishes:
        room = 10 - claims.of_others(jobs[name]).get("a", 0)
        mine = job(name, plan={"pools": {"a": min(wish, room)}}).status
        claims.decide(jobs[name], Plan((), mine))
        last[name] = holdings(jobs[name], Plan((), mine))
        version += 1
        if version % 3:  # else the write is still on its way
            old, jobs[name] = jobs[name], job(name, version).model_copy(update={"status": mine})
            claims.see(old, jobs[name])
        had = claims.of_others(job("nobody"))
        assert had.get("a", 0) <= 10
        parts = [holdings(jobs[each]) | last.get(each, Counter()) for each in jobs]
        assert had == sum(parts, Counter())
