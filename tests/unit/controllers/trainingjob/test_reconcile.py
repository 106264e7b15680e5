"""Reconciles of one job, down to the requests and their order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Never

import pytest

from shoal.api.kube import Node
from shoal.cluster.transport import Answer
from shoal.controllers.trainingjob import reconcile
from shoal.controllers.trainingjob.api_answers import ApiAnswers
from shoal.errors import Unavailable
from shoal.manifests import runtime_config
from shoal.policy.actions import CreatePod, UpdateService
from shoal.policy.decide.workers import MOST_NEW
from shoal.policy.facts.sightings import Memory
from shoal.policy.model import Observation, Plan
from shoal.policy.plan import plan
from shoal.runtime.work_queue import Priority
from tests.unit.controllers.clusters import EVERYTHING, JOB_PATH, KEY, Rig
from tests.unit.policy import build, pools

pytestmark = pytest.mark.looptime
PODS = "/api/v1/namespaces/ns/pods"


async def settled(rig: Rig) -> None:
    """Reconcile until nothing changes."""
    for _ in range(10):
        rig.see()
        before = rig.cluster.version
        await rig.reconcile(KEY)
        if rig.cluster.version == before:
            return
    raise AssertionError(f"does not settle: {rig.cluster.requests[-20:]}")


async def running() -> Rig:
    """A job whose pods run, as its status says."""
    rig = Rig().applied()
    await settled(rig)
    rig.run_pods()
    await settled(rig)
    return rig


async def test_first_reconcile_creates_everything_and_writes_one_status() -> None:
    rig = Rig().applied()
    await rig.reconcile(KEY)
    assert rig.pods() == EVERYTHING
    kinds = [path for method, path in rig.cluster.requests if method == "POST" and "events" not in path]
    assert kinds[:2] == ["/api/v1/namespaces/ns/secrets", "/api/v1/namespaces/ns/services"]
    assert rig.cluster.writes("PUT", "trainingjobs") == ["status"]
    slots = {(s.role, s.index, s.incarnation) for s in rig.job.status.slots}
    assert slots == {("ps", 0, 0), ("worker", 0, 0), ("worker", 1, 0)}


async def test_settled_job_sends_no_requests() -> None:
    rig = await running()
    rig.cluster.requests.clear()
    await rig.reconcile(KEY)
    assert rig.cluster.requests == []
    assert rig.job.status.phase == "Running"


async def test_lost_pod_is_replaced_before_the_status_is_written() -> None:
    rig = await running()
    rig.cluster.objects.pop("/api/v1/namespaces/ns/pods/digits-worker-1-0")
    rig.see()
    assert rig.woken[-1] == (KEY, Priority.URGENT)
    rig.cluster.requests.clear()
    await rig.reconcile(KEY)
    assert rig.cluster.requests[:2] == [
        ("GET", "/api/v1/namespaces/ns/pods/digits-worker-1-0"),  # it may have lost its label only
        ("POST", "/api/v1/namespaces/ns/pods"),
    ]
    assert "digits-worker-1-1" in rig.pods()
    assert rig.job.status.restarts.disruptions == 1
    assert rig.registry.get_sample_value("shoal_disruptions_total") == 1
    assert rig.registry.get_sample_value("shoal_workers_lost_total", {"reason": "Gone"}) == 1


async def test_recorded_pod_that_was_never_seen_is_asked_for() -> None:
    """The watch of pods of a new leader may lag behind that of jobs."""
    rig = await running()
    path = "/api/v1/namespaces/ns/pods/digits-worker-1-0"
    uid = rig.cluster.objects[path]["metadata"]["uid"]
    rig.state.pods.drop(uid)
    rig.state.pods._deleted.clear()  # as if it had never been seen
    rig.state._gone_pods.clear()
    rig.cluster.requests.clear()
    await rig.reconcile(KEY)
    assert rig.cluster.requests == [("GET", path)]
    assert "digits-worker-1-1" not in rig.pods()
    assert rig.job.status.restarts.disruptions == 0


async def test_pod_that_went_as_it_had_announced_is_not_asked_for() -> None:
    rig = await running()
    path = "/api/v1/namespaces/ns/pods/digits-worker-1-0"
    going = {"deletionTimestamp": "2026-01-01T12:00:30Z"}
    rig.cluster.change(path, metadata=rig.cluster.objects[path]["metadata"] | going)
    rig.see()
    rig.cluster.objects.pop(path)
    rig.see()
    rig.cluster.requests.clear()
    await rig.reconcile(KEY)
    assert rig.cluster.requests[0] == ("POST", "/api/v1/namespaces/ns/pods")


async def test_pod_that_lost_its_label_is_deleted_and_replaced() -> None:
    """Its watch says that it was deleted; it ran on, on a GPU of which nobody knew."""
    rig = await running()
    path = "/api/v1/namespaces/ns/pods/digits-worker-1-0"
    meta = rig.cluster.objects[path]["metadata"]
    labels = {name: value for name, value in meta["labels"].items() if name != "shoal.dev/job"}
    rig.cluster.change(path, metadata=meta | {"labels": labels})
    rig.state.pods.drop(meta["uid"], rig.cluster.version)
    await rig.reconcile(KEY)
    assert rig.pods() == {"digits-ps-0-0", "digits-worker-0-0", "digits-worker-1-1"}
    assert rig.job.status.restarts.by_reason == {"LabelRemoved": 1}
    await settled(rig)


async def test_loss_keeps_its_reason_though_the_pod_vanishes_meanwhile() -> None:
    rig = await running()
    path = "/api/v1/namespaces/ns/pods/digits-worker-1-0"
    rig.cluster.change(path, status={"phase": "Failed", "reason": "Evicted"})
    rig.see()

    def vanish(method: str, path_: str) -> None:
        if method == "POST" and path_.endswith("/pods") and rig.cluster.objects.pop(path, None):
            rig.see()

    rig.cluster.fault = vanish
    await rig.reconcile(KEY)
    messages = [o["message"] for o in rig.cluster.objects.values() if o.get("reason") == "WorkerDisrupted"]
    assert rig.job.status.restarts.by_reason == {"Evicted": 1}
    assert messages == ["worker digits-worker-1-0 was disrupted: Evicted"]


@pytest.mark.parametrize(
    ("condition", "reason"),
    [("TerminationTarget", "EvictedByKueue"), ("DisruptionTarget", "DisruptionTarget"), ("Ready", "Gone")],
)
async def test_pod_that_goes_before_anyone_looks_is_lost_for_the_reason_that_it_had_announced(
    condition: str, reason: str
) -> None:
    rig = await running()
    path = "/api/v1/namespaces/ns/pods/digits-worker-1-0"
    rig.cluster.change(
        path, status={"phase": "Running", "conditions": [{"type": condition, "status": "True"}]}
    )
    rig.see()
    rig.cluster.objects.pop(path)
    rig.see()
    await rig.reconcile(KEY)
    assert rig.job.status.restarts.by_reason == {reason: 1}


async def test_pods_are_deleted_after_the_status_is_written() -> None:
    rig = await running()
    rig.cluster.change(JOB_PATH, spec={**rig.cluster.objects[JOB_PATH]["spec"], "workers": {"replicas": 1}})
    rig.see()
    rig.cluster.fault = lambda method, _path: Unavailable("status unavailable") if method == "PUT" else None
    assert 0.0 < (await rig.reconcile(KEY) or 0.0) < 0.1, "it is tried again"
    assert rig.pods() == EVERYTHING
    rig.cluster.fault = lambda _method, _path: None
    await asyncio.sleep(0.1)
    rig.cluster.requests.clear()
    await settled(rig)
    assert rig.pods() == EVERYTHING - {"digits-worker-1-0"}
    methods = [method for method, path in rig.cluster.requests if "events" not in path]
    assert methods.index("PUT") < methods.index("DELETE")
    assert rig.job.status.restarts.disruptions == 0


async def test_conflict_of_a_deletion_hides_no_pod() -> None:
    """A 409 says that another object has the name by now, or that this one changed: then it is still there."""
    rig = await running()
    rig.cluster.change(JOB_PATH, spec={**rig.cluster.objects[JOB_PATH]["spec"], "workers": {"replicas": 1}})
    conflict = Answer(409, b'{"reason": "Conflict", "message": "the object has been modified"}')
    rig.cluster.fault = lambda method, _path: conflict if method == "DELETE" else None
    rig.see()
    rig.cluster.requests.clear()
    await rig.reconcile(KEY)
    await asyncio.sleep(0.1)
    assert "GET" not in {method for method, _ in rig.cluster.requests}, "not every kind may be read"
    rig.cluster.fault = lambda _method, _path: None
    await asyncio.sleep(1.0)
    await settled(rig)
    assert rig.pods() == EVERYTHING - {"digits-worker-1-0"}


async def test_status_conflict_is_retried() -> None:
    rig = Rig().applied()
    rig.cluster.change(JOB_PATH, metadata={**rig.cluster.objects[JOB_PATH]["metadata"], "labels": {"a": "b"}})
    assert await rig.reconcile(KEY) is not None  # a conflict, which is retried
    assert not rig.job.status.slots
    await settled(rig)
    assert len(rig.job.status.slots) == 3
    assert rig.job.status.restarts.disruptions == 0


async def test_lost_answer_creates_no_second_pod() -> None:
    rig = Rig().applied()
    rig.cluster.loses_answer = lambda method, path: method == "POST" and path.endswith("/pods")
    await rig.reconcile(KEY)
    assert rig.pods() == EVERYTHING  # created, but the answers were lost
    rig.cluster.loses_answer = lambda _method, _path: False
    await asyncio.sleep(0.1)
    await rig.reconcile(KEY)  # the watch has not reported them either, so they are found by name
    await settled(rig)
    assert rig.pods() == EVERYTHING
    assert rig.job.status.restarts.disruptions == 0


async def test_status_that_is_stored_without_an_answer_is_told_once() -> None:
    """Its events and the counts of its losses were lost for good."""
    rig = Rig().applied()
    await rig.reconcile(KEY)
    rig.run_pods()
    await settled(rig)
    lost = rig.cluster.objects.pop("/api/v1/namespaces/ns/pods/digits-worker-0-0")
    rig.state.pods.drop(lost["metadata"]["uid"])
    rig.cluster.loses_answer = lambda method, path: method == "PUT" and path.endswith("digits/status")
    before = rig.metrics.disruptions._value.get()
    rig.cluster.requests.clear()
    for _ in range(5):
        await rig.reconcile(KEY)
        rig.see()
        await asyncio.sleep(0.3)
    assert rig.job.status.restarts.disruptions == 1
    rig.cluster.loses_answer = lambda _method, _path: False
    await settled(rig)
    assert rig.metrics.disruptions._value.get() == before + 1
    told = [each["reason"] for path, each in rig.cluster.objects.items() if "/events/" in path]
    assert told.count("WorkerDisrupted") == 1, told


async def test_created_pod_missing_from_the_cache_is_found_by_name() -> None:
    rig = Rig().applied()
    await rig.reconcile(KEY)
    uid = rig.pod("digits-worker-0-0")["metadata"]["uid"]
    rig.state.pods.keep(set(), rig.cluster.version)  # an empty cache
    rig.state.pods._deleted.clear()
    rig.state._gone_pods.clear()
    rig.cluster.change(JOB_PATH, status={})
    rig.state.jobs.put(rig.job)
    await rig.reconcile(KEY)
    assert rig.pods() == EVERYTHING
    assert rig.pod("digits-worker-0-0")["metadata"]["uid"] == uid


async def test_who_finds_its_work_done_by_others_knows_that_they_may_have_made_pods() -> None:
    rig = Rig().applied()
    await settled(rig)
    rig.cluster.change(JOB_PATH, spec={**rig.cluster.objects[JOB_PATH]["spec"], "suspend": True})
    rig.see()
    answers = rig.answers.get(rig.job.metadata.uid)
    assert answers.recorded
    rig.cluster.objects = {path: o for path, o in rig.cluster.objects.items() if "/pods/" not in path}
    rig.see()
    rig.cluster.objects.pop("/api/v1/namespaces/ns/services/digits-ps-0")  # the watch has not told it yet
    for _ in range(3):  # it asks for the pods before
        await rig.once(KEY)
        await rig.tasks.idle()
        if rig.cluster.writes("DELETE", "services"):
            break
    assert ("DELETE", "/api/v1/namespaces/ns/services/digits-ps-0") in rig.cluster.requests
    assert answers.first_look


async def test_new_leader_makes_no_pod_again_that_its_list_of_the_job_is_too_old_to_know() -> None:
    """Nothing was to be done when it began. Its watch of pods, which is ahead of that of jobs, tells of a loss then."""
    rig = await running()
    job = rig.job
    for incarnation in range(2):
        rig.cluster.objects.pop(f"{PODS}/digits-worker-1-{incarnation}")
        if incarnation == 0:
            await settled(rig)
    answers = ApiAnswers(recorded=True, made_before=True)
    create = CreatePod("digits-worker-1-1", dict, "worker", 1, 1)
    rig.answers._by_uid[job.metadata.uid] = answers
    with pytest.raises(Unavailable, match="changed since"):
        await rig.applier.carry_out(job, create)
    assert answers.first_look, "the next plan is recorded first"
    assert "digits-worker-1-1" not in rig.pods()
    await settled(rig)
    # One number is left out: its predecessor may have made that pod, too.
    assert {name for name in rig.pods() if "worker-1" in name} == {"digits-worker-1-3"}


async def test_new_leader_turns_no_service_by_a_list_of_the_job_that_is_too_old() -> None:
    """Its watch of Services is ahead of that of jobs; by the job as it was, nothing was to be told."""
    rig = await running()
    old = rig.job
    service = "/api/v1/namespaces/ns/services/digits-ps-0"
    selector = rig.cluster.objects[service]["spec"]["selector"]
    rig.cluster.change(service, spec={"selector": {**selector, "shoal.dev/incarnation": "1"}})
    rig.see()
    rig.cluster.change(JOB_PATH, status={**rig.cluster.objects[JOB_PATH]["status"], "reason": "Newer"})
    answers = rig.answers._by_uid[old.metadata.uid] = ApiAnswers(recorded=True, made_before=True)
    with pytest.raises(Unavailable, match="changed since"):
        await rig.applier.carry_out(old, UpdateService("digits-ps-0", selector))
    assert answers.first_look, "the next plan is recorded first"
    assert rig.cluster.objects[service]["spec"]["selector"]["shoal.dev/incarnation"] == "1"


@pytest.mark.parametrize("ends", ["gone", "terminates", "has a successor", "runs"])
async def test_service_is_turned_back_only_to_a_server_that_is_there_as_it_was_seen(ends: str) -> None:
    """The watch of Services is ahead of that of pods."""
    rig = await running()
    job, service = rig.job, "/api/v1/namespaces/ns/services/digits-ps-0"
    selector = rig.cluster.objects[service]["spec"]["selector"]
    rig.cluster.change(service, spec={"selector": {**selector, "shoal.dev/incarnation": "1"}})
    rig.see()
    pod = rig.cluster.objects[f"{PODS}/digits-ps-0-0"]
    if ends == "gone":
        del rig.cluster.objects[f"{PODS}/digits-ps-0-0"]
    elif ends == "terminates":
        deleted = {**pod["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}
        rig.cluster.change(f"{PODS}/digits-ps-0-0", metadata=deleted)
    elif ends == "has a successor":
        labels = {**pod["metadata"]["labels"], "shoal.dev/incarnation": "1"}
        meta = {**pod["metadata"], "name": "digits-ps-0-1", "uid": "later", "labels": labels}
        rig.cluster.objects[f"{PODS}/digits-ps-0-1"] = {**pod, "metadata": meta}
    action = UpdateService("digits-ps-0", selector, back_from="digits-ps-0-1", back_to="digits-ps-0-0")
    with nullcontext() if ends == "runs" else pytest.raises(Unavailable, match="has changed since"):
        await rig.applier.carry_out(job, action)
    incarnation = rig.cluster.objects[service]["spec"]["selector"]["shoal.dev/incarnation"]
    assert incarnation == ("0" if ends == "runs" else "1")


@pytest.mark.parametrize("meanwhile", [{"suspend": True}, {"workers": {"replicas": 1}}])
async def test_leader_that_looked_first_when_a_worker_was_not_wanted_makes_no_pod_of_it_again(
    meanwhile: dict[str, Any],
) -> None:
    """Its predecessor had made one that went, perhaps from a node that runs on, and died before a status said so."""
    rig = await running()
    told, spec = (rig.cluster.objects[JOB_PATH][part] for part in ("status", "spec"))
    rig.cluster.objects.pop(f"{PODS}/digits-worker-1-0")
    await settled(rig)
    rig.cluster.objects.pop(f"{PODS}/digits-worker-1-1")
    rig.cluster.change(JOB_PATH, status=told, spec={**spec, **meanwhile})
    rig.see()
    rig.answers._by_uid.clear()
    rig.state._gone_pods.clear()
    rig.forget()
    await settled(rig)
    rig.cluster.change(JOB_PATH, spec=spec)
    rig.cluster.requests.clear()
    await settled(rig)
    assert {name for name in rig.pods() if "worker-1" in name} == {"digits-worker-1-2"}
    rig.cluster.objects.pop(f"{PODS}/digits-worker-1-2")
    await settled(rig)
    assert "digits-worker-1-3" in rig.pods(), "from then on none is left out"


@pytest.mark.parametrize("may", [True, False])
async def test_leader_that_has_stored_no_status_asks_once_before_it_makes_a_pod(may: bool) -> None:
    """Where it may not, it believes its list."""
    rig = await running()
    if not may:
        rig.cluster.fault = lambda verb, path: (
            Answer(403, b"{}") if (verb, path) == ("GET", JOB_PATH) else None
        )
    rig.answers._by_uid[rig.job.metadata.uid] = ApiAnswers(recorded=True, made_before=True)
    for index in range(2):
        rig.cluster.requests.clear()
        pod = rig.cluster.objects.pop(f"{PODS}/digits-worker-{index}-0")
        rig.state.pods.drop(pod["metadata"]["uid"])
        await rig.reconcile(KEY)
        assert f"digits-worker-{index}-1" in rig.pods()
        assert rig.cluster.requests.count(("GET", JOB_PATH)) == (index == 0)


async def test_exceeded_quota_is_retried_later() -> None:
    rig = Rig().applied()
    words = {"message": 'pods "x" is forbidden: exceeded quota: few, requested: pods=1'}
    full = Answer(403, json.dumps(words).encode())
    rig.cluster.fault = lambda method, path: full if method == "POST" and path.endswith("/pods") else None
    delay = await rig.reconcile(KEY)
    assert delay is not None
    assert delay <= 5.0
    condition = rig.job.status.condition("QuotaExceeded")
    assert condition is not None
    assert "exceeded quota: few" in condition.message
    tried = len(rig.cluster.writes("POST", "pods"))
    await rig.reconcile(KEY)
    assert len(rig.cluster.writes("POST", "pods")) == tried  # not retried yet
    rig.cluster.fault = lambda _method, _path: None
    await rig.pass_time(31)
    await settled(rig)
    assert rig.pods() == EVERYTHING
    condition = rig.job.status.condition("QuotaExceeded")
    assert condition is None or condition.status == "False"


async def test_invalid_pod_is_retried_at_once_when_the_spec_changes() -> None:
    rig = Rig().applied()
    no = Answer(422, b'{"message": "spec.containers[0].image: Required value"}')
    rig.cluster.fault = lambda method, path: no if method == "POST" and path.endswith("/pods") else None
    await rig.reconcile(KEY)
    condition = rig.job.status.condition("Stalled")
    assert condition is not None
    assert "Required value" in condition.message
    tried = len(rig.cluster.writes("POST", "pods"))
    await rig.pass_time(29)
    rig.see()
    await rig.reconcile(KEY)
    assert len(rig.cluster.writes("POST", "pods")) == tried
    rig.cluster.fault = lambda _method, _path: None
    body = rig.cluster.objects[JOB_PATH]
    rig.cluster.change(JOB_PATH, metadata={**body["metadata"], "generation": 2})
    await settled(rig)
    assert rig.pods() == EVERYTHING


async def test_name_conflict_is_retried_soon() -> None:
    rig = Rig()
    pod: dict[str, Any] = {"metadata": {"name": "digits-worker-0-0", "namespace": "ns"}, "spec": {}}
    path = "/api/v1/namespaces/ns/pods/digits-worker-0-0"
    rig.cluster.add(path, pod)
    rig.apply()
    delay = await rig.reconcile(KEY)
    condition = rig.job.status.condition("Stalled")
    assert condition is not None
    assert condition.reason == "NameCollision"
    assert delay is not None
    assert delay <= 3.0
    rig.cluster.objects.pop(path)
    await rig.pass_time(delay)
    await settled(rig)
    assert rig.pods() == EVERYTHING


def _fails(*_: object) -> Never:
    raise ValueError("a mistake of ours")


async def test_internal_error_is_reported_once_and_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_config, "as_environment", _fails)
    rig = Rig().applied()
    for _ in range(3):
        with pytest.raises(ValueError, match="a mistake of ours"):
            await rig.reconcile(KEY)
        await rig.tasks.idle()
        await rig.recorder.drain()
        rig.see()
    stalled = rig.job.status.condition("Stalled")
    assert stalled is not None
    assert (stalled.status, stalled.reason, rig.job.status.reason) == ("True", *["InternalError"] * 2)
    assert "ValueError" in stalled.message
    assert "a mistake of ours" in stalled.message
    assert "report this error" in stalled.message
    assert rig.cluster.writes("PUT", "trainingjobs") == ["status"]
    assert len(rig.cluster.writes("POST", "events")) == 1
    monkeypatch.undo()
    rig.apply()
    await settled(rig)
    assert rig.pods() == EVERYTHING


async def test_internal_error_that_cannot_be_reported_is_raised_and_reported_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime_config, "as_environment", _fails)
    rig = Rig().applied()
    rig.cluster.fault = lambda method, _path: Unavailable("status unavailable") if method == "PUT" else None
    with pytest.raises(ValueError, match="a mistake of ours"):
        await rig.reconcile(KEY)
    await rig.tasks.idle()
    rig.cluster.fault = lambda _method, _path: None
    await asyncio.sleep(0.1)
    with pytest.raises(ValueError, match="a mistake of ours"):
        await rig.reconcile(KEY)
    await rig.tasks.idle()
    assert rig.job.status.reason == "InternalError"


async def test_process_that_ends_while_a_status_is_written_tells_what_it_says() -> None:
    rig = await running()
    rig.cluster.objects.pop("/api/v1/namespaces/ns/pods/digits-worker-1-0")
    rig.see()
    stored, request = asyncio.Event(), rig.cluster.request

    async def never_answered(method: str, path: str, **options: Any) -> Answer:
        answer = await request(method, path, **options)
        if method == "PUT":
            stored.set()
            await asyncio.Event().wait()
        return answer

    rig.cluster.request = never_answered  # type: ignore[method-assign]
    process = asyncio.create_task(rig.tasks.run())
    reconcile = asyncio.create_task(rig.reconcile(KEY))
    await stored.wait()
    process.cancel()
    await asyncio.gather(process, reconcile, return_exceptions=True)
    assert rig.job.status.restarts.disruptions == 1
    assert [o["reason"] for o in rig.cluster.objects.values() if o.get("kind") == "Event"] == [
        "WorkerDisrupted"
    ]


async def test_telemetry_writes_are_rate_limited() -> None:
    rig = Rig(telemetry_seconds=30).applied()
    await settled(rig)
    job = rig.job
    rig.state.jobs.put(job)
    status = job.status.model_copy(update={"training": job.status.training.model_copy(update={"step": 5})})
    held = rig.reporter.report(job, status, [], makes=False)
    assert held.recorded
    assert held.wait is not None
    assert 29 <= held.wait <= 30
    loud = status.model_copy(update={"reason": "Something"})
    assert rig.reporter.report(job, loud, [], makes=False).wait == 0.0


async def test_conflict_at_a_service_does_not_keep_its_server_from_being_replaced() -> None:
    """The Service exists, whatever the conflict was about: it is found again, and the pod is made."""
    rig = Rig().applied()
    await settled(rig)
    rig.run_pods()
    await settled(rig)
    conflicts = iter([Answer(409, b'{"message": "the object has been modified"}')])
    rig.cluster.fault = lambda method, path: (
        next(conflicts, None) if method == "PATCH" and "/services/" in path else None
    )
    rig.cluster.change("/api/v1/namespaces/ns/pods/digits-ps-0-0", status={"phase": "Failed"})
    rig.see()
    await asyncio.sleep(5)
    await rig.reconcile(KEY)
    await rig.pass_time(5)
    await settled(rig)
    assert "digits-ps-0-1" in rig.pods()
    assert next(conflicts, None) is None, "it was met"
    selector = rig.cluster.objects["/api/v1/namespaces/ns/services/digits-ps-0"]["spec"]["selector"]
    assert selector["shoal.dev/incarnation"] == "1"


async def calls_for_one_change(workers: int, *, remembers: bool = True) -> int:
    """Function calls of the reconcile after one worker of many has failed."""
    rig = Rig(settle_seconds=1.0)
    rig.apply(workers={"replicas": workers, "maxReplicas": workers})
    await settled(rig)
    rig.run_pods()
    await settled(rig)
    rig.cluster.change("/api/v1/namespaces/ns/pods/digits-worker-7-0", status={"phase": "Failed"})
    rig.see()
    if not remembers:
        rig.forget()
    calls = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        await rig.once(KEY)
    finally:
        sys.setprofile(None)
    await rig.tasks.idle()
    return calls


async def test_one_change_costs_little_for_each_worker_that_did_not_change() -> None:
    """The event loop is held meanwhile, and other jobs wait. Counted, since time depends on the machine."""

    async def for_each(*, remembers: bool) -> float:
        # The second time: what depends on the spec alone is remembered beyond one rig.
        few, many = [
            [await calls_for_one_change(workers, remembers=remembers) for _ in range(2)][1]
            for workers in (50, 150)
        ]
        assert few > 500, "it was reconciled"
        return (many - few) / 100

    calls = await for_each(remembers=True)
    assert calls < 25
    assert calls < 0.7 * await for_each(remembers=False), "what did not change is not read again"


@pytest.mark.parametrize("seconds", [0.015, 0.2])
async def test_job_has_a_tenth_of_the_loop_however_slow_the_machine(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan of 1,000 workers takes 4 ms of processor time, and several times that beside other processes."""
    rig, now = Rig(), 0.0

    def slowly(seen: Observation, memory: Memory) -> Plan:
        nonlocal now
        now += seconds
        return plan(seen, memory)

    monkeypatch.setattr(reconcile, "plan", slowly)
    monkeypatch.setattr(reconcile, "loop_time", lambda: now)
    rig.apply(workers={"replicas": 100, "maxReplicas": 100})
    await rig.once()
    assert rig.rests == []  # it has no pods yet
    await rig.reconcile(KEY)
    assert rig.rests[-1] > 8.99 * seconds


async def test_large_job_makes_all_its_pods_though_a_plan_begins_only_some() -> None:
    rig, workers = Rig(), 2 * MOST_NEW + 10
    rig.apply(workers={"replicas": workers, "maxReplicas": workers})
    await rig.reconcile(KEY)
    assert len(rig.pods()) == workers + 1


@pytest.mark.parametrize("behind", [True, False])
async def test_server_that_works_is_deleted_for_its_node_as_that_is_now(behind: bool) -> None:
    """The watch of nodes may be behind that of pods: the node was announced to go, was well again, and then got it."""
    rig = Rig()
    path = "/api/v1/nodes/safe-0"
    leaving = [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule", "value": "1"}]
    seen = rig.cluster.add(path, build.node_manifest("safe-0", spot=False, taints=leaving))
    rig.state.nodes.put(Node.model_validate(seen))
    rig.apply()
    await settled(rig)
    server = f"{PODS}/digits-ps-0-0"
    rig.cluster.change(server, spec={"nodeName": "safe-0"})
    ready = [{"type": "Ready", "status": "True"}]
    rig.cluster.change(server, status={"phase": "Running", "conditions": ready})
    if behind:
        rig.cluster.add(path, build.node_manifest("safe-0", spot=False))
    rig.see()
    for _ in range(5):
        await rig.pass_time(5)
        with contextlib.suppress(Unavailable):
            await settled(rig)
    assert ("digits-ps-0-0" in rig.pods()) is behind


@pytest.mark.parametrize("behind", [True, False])
async def test_server_of_a_suspended_job_is_deleted_by_force_for_its_node_as_that_is_now(
    behind: bool,
) -> None:
    """Its final snapshot was cut off: the watch of nodes was half-open, and showed a node that had been away."""
    rig = Rig()
    path = "/api/v1/nodes/safe-0"
    away = [{"key": "node.cloudprovider.kubernetes.io/shutdown", "effect": "NoSchedule"}]
    seen = rig.cluster.add(path, build.node_manifest("safe-0", spot=False, taints=away))
    rig.state.nodes.put(Node.model_validate(seen))
    rig.apply()
    await settled(rig)
    server = f"{PODS}/digits-ps-0-0"
    rig.cluster.change(server, spec={"nodeName": "safe-0"}, status={"phase": "Running"})
    rig.cluster.change(JOB_PATH, spec={**rig.cluster.objects[JOB_PATH]["spec"], "suspend": True})
    leaving = {"deletionTimestamp": build.stamp(rig.wall), "deletionGracePeriodSeconds": 600}
    rig.cluster.change(server, metadata=rig.cluster.objects[server]["metadata"] | leaving)
    if behind:
        rig.cluster.add(path, build.node_manifest("safe-0", spot=False))
    rig.see()
    for _ in range(20):
        await rig.pass_time(5)
        with contextlib.suppress(Unavailable):
            await settled(rig)
    assert ("digits-ps-0-0" in rig.pods()) is behind


@pytest.mark.parametrize("hours", [-6, 6])
async def test_a_minute_with_a_wrong_clock_is_counted_as_a_minute(hours: int) -> None:
    """Two minutes in which the machine's clock was six hours ahead cost six hours of all nodes."""
    rig = Rig()
    rig.state.pools.put(pools.pool("a"))
    rig.apply(workers={"replicas": 1, "pools": ["a"]})
    await settled(rig)
    for name in rig.pods():
        rig.cluster.change(f"{PODS}/{name}", spec={"nodeName": "spot-0"})
    rig.run_pods()

    async def minute() -> int:
        await rig.pass_time(60)
        await settled(rig)
        return rig.job.status.pool_usage["a"].node_seconds

    seconds = [await minute() for _ in range(2)]
    rig.wall += timedelta(hours=hours)
    seconds += [await minute() for _ in range(2)]
    rig.wall -= timedelta(hours=hours)
    seconds += [await minute() for _ in range(2)]
    assert seconds == [seconds[0] + 60 * number for number in range(6)]


async def test_pool_of_servers_that_cannot_be_read_is_named_with_its_field() -> None:
    rig = Rig()
    meta = {"name": "safe", "uid": "u", "resourceVersion": "5"}
    rig.state.pools.leave_unread("u", 5)
    rig.state.hear_unreadable_pool({"metadata": meta}, "spec.limits: too many")
    rig.apply(parameterServers={"pools": ["safe"]})
    await settled(rig)
    degraded = rig.job.status.condition("Degraded")
    assert degraded is not None
    assert (degraded.reason, "spec.limits: too many" in degraded.message) == ("PoolNotFound", True)
