"""Refusals by the API server: retried when due and reported in a condition."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest

from shoal.cluster.transport import Answer
from shoal.errors import Unavailable
from shoal.manifests.names import budget_name, group_name, secret_name
from shoal.manifests.objects import POD_GROUPS
from shoal.policy.actions import ConfirmAbsent, CreatePod, DeletePod
from tests.unit.controllers.clusters import EVERYTHING, JOB_PATH, KEY, NOW, Rig

pytestmark = pytest.mark.looptime

Fault = Callable[[str, str], Answer | None]


def refusing(kind: str, status: int, message: str = "no", reason: str = "") -> Fault:
    answer = Answer(status, json.dumps({"message": message, "reason": reason}).encode())

    def fault(method: str, path: str) -> Answer | None:
        made = method == "POST" and path.endswith(f"/{kind}")
        applied = method == "PATCH" and f"/{kind}/" in path and kind == "podgroups"
        return answer if made or applied else None

    return fault


def no_fault(_method: str, _path: str) -> None:
    return None


async def passes(rig: Rig, number: int = 5) -> list[float | None]:
    """Reconcile several times at one moment; returns the requested delays."""
    delays = []
    for _ in range(number):
        rig.see()
        delays.append(await rig.reconcile(KEY))
    return delays


def condition(rig: Rig, kind: str) -> tuple[str, str, str]:
    found = rig.job.status.condition(kind)
    return (found.status, found.reason, found.message) if found else ("", "", "")


@pytest.mark.by_day(6)
@pytest.mark.parametrize("kind", ["secrets", "services", "poddisruptionbudgets"])
@pytest.mark.parametrize(
    ("status", "message", "again"),
    [
        (403, "forbidden: no such right", 30),
        (403, "exceeded quota: few", 5),
        (422, "invalid", 30),
        (400, 'admission webhook "images.example.com" denied the request: not signed', 30),
        (422, "ValidatingAdmissionPolicy 'teams' with binding 'all' denied request: no team", 30),
    ],
)
async def test_refused_object_is_retried_only_when_due(
    kind: str, status: int, message: str, again: int
) -> None:
    rig = Rig().applied()
    rig.cluster.fault = refusing(kind, status, message)
    delays = await passes(rig)
    assert len(rig.cluster.writes("POST", kind)) == 1
    assert all(delay is None or delay >= 1.0 for delay in delays)
    conditions = [condition(rig, which) for which in ("Stalled", "QuotaExceeded", "Degraded")]
    assert any(status_ == "True" and message in words for status_, _, words in conditions)
    await rig.pass_time(again - 1)
    delay = (await passes(rig))[-1]
    assert len(rig.cluster.writes("POST", kind)) == 1
    assert delay is not None
    await rig.pass_time(delay)
    await passes(rig)
    assert len(rig.cluster.writes("POST", kind)) == 2
    rig.cluster.fault = no_fault
    await rig.pass_time(2 * again)  # a quota is asked for less often each time
    await passes(rig)
    assert rig.pods() == EVERYTHING
    rig.run_pods()
    await passes(rig)
    assert not [which for which in ("Stalled", "QuotaExceeded") if condition(rig, which)[0] == "True"]


async def test_invalid_pod_is_asked_for_ever_more_seldom_and_stalls_the_job_all_the_while() -> None:
    """What is wrong may be elsewhere than in the job: that it was corrected there, nobody tells."""
    rig = Rig().applied()
    rig.cluster.fault = refusing("pods", 422, "spec.nodeSelector: Invalid value")
    tries, told = [], []
    for _ in range(1200):
        asked = len(rig.cluster.writes("POST", "pods"))
        await passes(rig, 2)
        tries.append(len(rig.cluster.writes("POST", "pods")) > asked)
        told.append(condition(rig, "Stalled")[:2])
        await rig.pass_time(1)
    assert 4 <= sum(tries[60:]) <= 2 * 6  # of both roles
    assert set(told[1:]) == {("True", "Invalid")}
    events = [each for path, each in rig.cluster.objects.items() if "/events/" in path]
    assert len([each for each in events if each["reason"] == "Invalid"]) == 1
    rig.cluster.fault = no_fault
    await rig.pass_time(301)
    await passes(rig)
    assert rig.pods() == EVERYTHING
    assert condition(rig, "Stalled")[0] == "False"


@pytest.mark.parametrize("kind", ["secrets", "services"])
async def test_pods_wait_for_secret_and_service(kind: str) -> None:
    rig = Rig().applied()
    rig.cluster.fault = refusing(kind, 403, "exceeded quota: few")
    for _ in range(5):
        await passes(rig, 2)
        await rig.pass_time(6)
    assert rig.pods() == set()


@pytest.mark.parametrize("status", [403, 422])
async def test_pods_do_not_wait_for_the_disruption_budget(status: int) -> None:
    rig = Rig().applied()
    rig.cluster.fault = refusing("poddisruptionbudgets", status, "policy is not for you")
    await passes(rig)
    assert rig.pods() == EVERYTHING
    rig.run_pods()
    await passes(rig)
    state, reason, words = condition(rig, "Degraded")
    assert (state, reason) == ("True", "NoDisruptionBudget")
    assert "policy is not for you" in words
    assert condition(rig, "Stalled")[0] != "True"
    rig.cluster.fault = no_fault
    body = rig.cluster.objects[JOB_PATH]
    rig.cluster.change(JOB_PATH, metadata={**body["metadata"], "generation": 2})
    await rig.pass_time(31)
    await passes(rig)
    assert condition(rig, "Degraded")[0] == "False"


GANG = {"runPolicy": {"schedulingPolicy": {"gang": "PodGroup"}}}


async def test_a_gang_has_a_pod_group_of_the_least_that_can_train() -> None:
    rig = Rig()
    rig.apply(**GANG, workers={"replicas": 3, "minReplicas": 2})
    await passes(rig)
    group = rig.cluster.objects[f"/apis/{POD_GROUPS}/namespaces/ns/podgroups/{group_name(rig.job)}"]
    assert group["spec"] == {"minMember": 3}
    assert group["metadata"]["ownerReferences"][0]["uid"] == rig.job.metadata.uid
    body = rig.cluster.objects[JOB_PATH]
    body["spec"]["workers"]["minReplicas"] = 1
    rig.cluster.change(JOB_PATH, metadata={**body["metadata"], "generation": 2}, spec=body["spec"])
    await passes(rig)
    group = rig.cluster.objects[f"/apis/{POD_GROUPS}/namespaces/ns/podgroups/{group_name(rig.job)}"]
    assert group["spec"] == {"minMember": 2}


async def test_a_gang_that_runs_costs_no_requests() -> None:
    rig = Rig()
    rig.apply(**GANG)
    await passes(rig)
    rig.run_pods()
    rig.cluster.requests.clear()
    for _ in range(60):
        await rig.pass_time(10)
        await passes(rig, 1)
    assert rig.cluster.writes("PATCH", "podgroups") == []


@pytest.mark.parametrize("status", [403, 404])
async def test_a_job_whose_cluster_has_no_pod_groups_runs_without_and_says_so(status: int) -> None:
    rig = Rig()
    rig.apply(**GANG)
    rig.cluster.fault = refusing("podgroups", status, "the server could not find the requested resource")
    await passes(rig)
    assert rig.pods() == EVERYTHING
    rig.run_pods()
    await passes(rig)
    state, reason, words = condition(rig, "Degraded")
    assert (state, reason) == ("True", "NoPodGroup")
    assert "scheduler-plugins" in words
    assert "could not find" in words
    asked = len(rig.cluster.writes("PATCH", "podgroups"))
    await passes(rig)
    assert len(rig.cluster.writes("PATCH", "podgroups")) == asked
    rig.cluster.fault = no_fault
    await rig.pass_time(31)
    await passes(rig)
    assert condition(rig, "Degraded")[0] == "False"


async def test_request_without_effect_is_repeated_ever_more_seldom() -> None:
    rig = Rig().applied()
    rig.cluster.fault = refusing("pods", 409, "digits-ps-0-0 exists", "AlreadyExists")  # and GET says 404
    for _ in range(20):
        await asyncio.sleep(await rig.reconcile(KEY) or 0.0)
    assert 8.0 <= (await rig.reconcile(KEY) or 0.0) <= 12.0


# --- the wall clock --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [(403, "exceeded quota: few"), (403, "no such right"), (422, "invalid")])
@pytest.mark.parametrize("kind", ["pods", "secrets"])
async def test_a_refusal_is_over_though_the_clock_was_set_back(kind: str, answer: tuple[int, str]) -> None:
    """A machine whose clock is ahead at its start and is then set right: the job waited for as long as that was."""
    rig = Rig().applied()
    rig.cluster.fault = refusing(kind, *answer)
    rig.wall += timedelta(hours=1)
    await passes(rig)
    rig.wall -= timedelta(hours=1)
    rig.cluster.fault = no_fault
    assert rig.pods() == set()
    await rig.pass_time(31)
    await passes(rig)
    assert rig.pods() == EVERYTHING


async def test_a_name_is_asked_for_again_though_the_clock_was_set_back() -> None:
    rig = Rig().applied()
    path = "/api/v1/namespaces/ns/pods/digits-ps-0-0"
    rig.cluster.add(path, {"metadata": {"name": "digits-ps-0-0", "namespace": "ns"}, "spec": {}})
    rig.wall += timedelta(hours=1)
    rig.state.pods.keep(set(), rig.cluster.version)  # it has no label: no watch tells of it
    await rig.reconcile(KEY)
    assert condition(rig, "Stalled")[1] == "NameCollision"
    rig.wall -= timedelta(hours=1)
    rig.cluster.objects.pop(path)
    await rig.pass_time(3)
    await rig.reconcile(KEY)
    assert rig.pods() == EVERYTHING


@pytest.mark.parametrize("hours", [-1, 1])
async def test_what_was_confirmed_is_confirmed_again_whatever_the_clock_says(hours: int) -> None:
    rig = Rig().applied()
    await passes(rig)
    await rig.applier.carry_out(rig.job, ConfirmAbsent("spot-0", "Node"))
    name = secret_name(rig.job)
    for seconds, known in ((0, (True, True)), (61, (True, False)), (240, (False, False))):
        rig.wall += timedelta(hours=hours)
        await rig.pass_time(seconds)
        seen = rig.observer.observe(KEY)
        assert seen is not None
        assert (name in seen.existing, "spot-0" in seen.absent_nodes) == known


# --- existing objects ------------------------------------------------------------------------------------------------


async def test_deleted_secret_is_created_again() -> None:
    rig = Rig().applied()
    await passes(rig)
    path = f"/api/v1/namespaces/ns/secrets/{secret_name(rig.job)}"
    made = rig.cluster.objects.pop(path)
    for pod in rig.pods():
        rig.cluster.change(f"/api/v1/namespaces/ns/pods/{pod}", spec={"nodeName": "spot-0"})
    passed = 0.0
    while path not in rig.cluster.objects:  # pods that are bound but not started may wait for it
        delay = (await passes(rig))[-1]
        assert delay is not None
        assert passed + delay <= 301
        await rig.pass_time(delay)
        passed += delay
        await passes(rig)
    assert rig.cluster.objects[path]["data"] == made["data"]


@pytest.mark.parametrize("restarted", [False, True])
async def test_job_that_runs_costs_no_requests_for_what_it_has(restarted: bool) -> None:
    """B17: 6.7 writes a second of 1,000 jobs, and 2,000 at each start of a leader, all answered 409."""
    rig = Rig().applied()
    await passes(rig)
    rig.run_pods()
    await passes(rig)
    rig.cluster.requests.clear()
    for _ in range(60):
        if restarted:
            rig.answers.forget(rig.job.metadata.uid)
        await rig.pass_time(10)
        await passes(rig, 1)
    made = {path for method, path in rig.cluster.requests if method == "POST"}
    assert made <= {"/api/v1/namespaces/ns/events"}, "that the coordinator of this world does not answer"


async def test_deleted_disruption_budget_is_created_again_and_given_back_once() -> None:
    rig = Rig().applied()
    await passes(rig)
    path = f"/apis/policy/v1/namespaces/ns/poddisruptionbudgets/{budget_name(rig.job)}"
    rig.cluster.objects.pop(path)
    rig.see()
    await passes(rig)
    assert path in rig.cluster.objects
    rig.cluster.change(JOB_PATH, spec={**rig.cluster.objects[JOB_PATH]["spec"], "suspend": True})
    rig.see()
    await passes(rig, 6)
    for pod in rig.pods():
        rig.cluster.objects.pop(f"/api/v1/namespaces/ns/pods/{pod}")
    rig.see()
    await passes(rig, 6)
    assert path not in rig.cluster.objects
    rig.answers.forget(rig.job.metadata.uid)  # as a new leader
    await passes(rig, 3)
    assert len(rig.cluster.writes("DELETE", "poddisruptionbudgets")) == 1


@pytest.mark.parametrize("restarted", [False, True])
async def test_full_quota_does_not_block_pods_with_an_existing_secret(restarted: bool) -> None:
    """The API server checks quotas before it looks whether the object exists."""
    rig = Rig().applied()
    await passes(rig)
    rig.run_pods()
    await passes(rig)
    rig.cluster.fault = refusing("secrets", 403, "exceeded quota: secrets")
    await rig.pass_time(301)
    if restarted:
        rig.answers.forget(rig.job.metadata.uid)
    rig.cluster.objects.pop("/api/v1/namespaces/ns/pods/digits-worker-1-0")
    delays = await passes(rig)
    assert (
        "digits-worker-1-2" if restarted else "digits-worker-1-1"
    ) in rig.pods()  # see policy/decide/workers.py
    assert len(rig.cluster.writes("POST", "secrets")) == 1  # a pod runs, so it exists
    assert all(delay is None or delay >= 1.0 for delay in delays[restarted:])


# --- kinds of answers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["secrets", "services", "pods"])
@pytest.mark.parametrize("status", [401, 404, 405, 409])
async def test_temporary_refusal_is_retried(kind: str, status: int) -> None:
    rig = Rig().applied()
    rig.cluster.fault = refusing(kind, status, "Operation cannot be fulfilled on resourcequotas", "Conflict")
    assert 0.0 < (await rig.reconcile(KEY) or 0.0) < 0.1
    rig.cluster.fault = no_fault
    await asyncio.sleep(0.1)
    await passes(rig)
    assert rig.pods() == EVERYTHING
    created: dict[str, Any] = rig.cluster.objects
    assert f"/api/v1/namespaces/ns/secrets/{secret_name(rig.job)}" in created
    assert f"/apis/policy/v1/namespaces/ns/poddisruptionbudgets/{budget_name(rig.job)}" in created


# --- names of an earlier run ----------------------------------------------------------------------------------------


async def test_overdue_pod_of_an_earlier_run_stalls_the_job() -> None:
    rig = Rig()
    path = "/api/v1/namespaces/ns/pods/digits-ps-0-0"
    owner = {"kind": "TrainingJob", "name": "digits", "uid": "the-earlier-run", "controller": True}
    until = NOW + timedelta(seconds=60)
    meta = {
        "name": "digits-ps-0-0",
        "namespace": "ns",
        "labels": {"shoal.dev/job": "digits"},
        "ownerReferences": [owner],
        "deletionTimestamp": until.isoformat(),
        "deletionGracePeriodSeconds": 60,
    }
    rig.cluster.add(path, {"metadata": meta, "spec": {"nodeName": "safe-7"}})
    rig.apply()
    await passes(rig)
    assert condition(rig, "Stalled")[0] != "True"  # it is terminating
    await rig.pass_time(66)
    delay = (await passes(rig))[-1]
    state, reason, words = condition(rig, "Stalled")
    assert (state, reason) == ("True", "NameCollision")
    assert "digits-ps-0-0" in words
    assert "kubectl delete node safe-7" in words
    assert delay is not None
    assert delay >= 1.0
    rig.cluster.objects.pop(path)
    await passes(rig)
    assert rig.pods() == EVERYTHING
    assert condition(rig, "Stalled")[0] == "False"


async def test_overdue_pod_unknown_to_the_watch_stalls_the_job() -> None:
    rig = Rig()
    meta = {"name": "digits-ps-0-0", "namespace": "ns", "deletionTimestamp": NOW.isoformat()}
    path = "/api/v1/namespaces/ns/pods/digits-ps-0-0"
    rig.cluster.add(path, {"metadata": meta, "spec": {"nodeName": "safe-7"}})
    rig.apply()
    await rig.pass_time(6)
    rig.state.pods.keep(set(), rig.cluster.version)
    await rig.reconcile(KEY)
    assert "on node safe-7" in condition(rig, "Stalled")[2]


async def test_a_finished_job_says_that_it_cannot_be_deleted() -> None:
    """Of a job that outlived its time, only the operator's log said why."""
    rig = Rig()
    rig.apply(runPolicy={"ttlSecondsAfterFinished": 60})
    await passes(rig)
    done = {
        "type": "Complete",
        "status": "True",
        "reason": "Done",
        "lastTransitionTime": f"{NOW:%Y-%m-%dT%H:%M:%SZ}",
    }
    status = rig.cluster.objects[JOB_PATH]["status"]
    finished = {"phase": "Succeeded", "completionTime": done["lastTransitionTime"], "conditions": [done]}
    rig.cluster.change(JOB_PATH, status={**status, **finished})
    refusal = Answer(403, json.dumps({"message": "trainingjobs is forbidden: no such right"}).encode())
    rig.cluster.fault = lambda method, path: refusal if (method, path) == ("DELETE", JOB_PATH) else None
    await passes(rig)
    await rig.pass_time(61)
    for _ in range(8):
        await passes(rig)
        await rig.pass_time(10)
        await asyncio.sleep(10)
    status_, reason, words = condition(rig, "Degraded")
    assert (status_, reason) == ("True", "ApiServerRefuses")
    assert "DeleteJob" in words
    assert "no such right" in words
    events = [each for path, each in rig.cluster.objects.items() if "/events/" in path]
    told = [each for each in events if each["reason"] == "ApiServerRefuses"]
    assert len(told) == 1
    rig.cluster.fault = no_fault
    await asyncio.sleep(10)
    await passes(rig)
    assert JOB_PATH not in rig.cluster.objects


@pytest.mark.parametrize(
    ("status", "words", "goes"),
    [
        (201, "", True),
        (403, "exceeded quota: pods=4", True),
        (400, 'admission webhook "old.example.com" does not support dry run', True),
        (403, 'admission webhook "policy.example.com" denied the request', False),
        (422, "Invalid value", False),
        (500, "failed calling webhook: connection refused", False),
    ],
)
async def test_server_is_ended_for_another_only_if_that_would_be_made(
    status: int, words: str, goes: bool
) -> None:
    """A quota that is full has its own place."""
    rig = Rig().applied()
    await passes(rig)
    before = rig.pods()
    body = {"metadata": {"name": "digits-ps-0-1"}}
    deletion = DeletePod(
        "digits-ps-0-0",
        rig.pod("digits-ps-0-0")["metadata"]["uid"],
        successor=CreatePod("digits-ps-0-1", lambda: body, "ps", 0, 1),
    )
    if status != 201:
        rig.cluster.fault = refusing("pods", status, words)
    with nullcontext() if goes else pytest.raises(Unavailable, match="digits-ps-0-1 would be refused"):
        await rig.applier.carry_out(rig.job, deletion)
    assert rig.pods() == (before - {"digits-ps-0-0"} if goes else before)


async def test_what_a_quota_refused_is_asked_for_at_once_when_a_pod_of_the_job_is_gone() -> None:
    """After up to a minute, another job had the place that it had left."""
    rig = Rig().applied()
    await passes(rig)
    rig.run_pods()
    await passes(rig)
    rig.cluster.fault = refusing("pods", 403, "exceeded quota: pods=3")
    for name in ("digits-worker-0-0", "digits-worker-1-0"):
        rig.state.pods.drop(rig.cluster.objects.pop(f"/api/v1/namespaces/ns/pods/{name}")["metadata"]["uid"])
        tried = len(rig.cluster.writes("POST", "pods"))
        await passes(rig)
        assert len(rig.cluster.writes("POST", "pods")) == tried + 1
        await passes(rig)
        assert len(rig.cluster.writes("POST", "pods")) == tried + 1
