"""How many writes a lost worker costs the API server: alone, and in a wave."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from shoal.cluster.transport import Answer
from shoal.controllers.trainingjob.report import (
    MOST_UNANSWERED,
    REPLACED_SECONDS,
    SETTLE_SECONDS,
    WAVE_SECONDS,
    _is_awaited,
)
from shoal.controllers.trainingjob.requests import FEW, MAX_IN_FLIGHT, ORDINARY_IN_FLIGHT
from shoal.errors import Unavailable
from shoal.telemetry.poller import Seen
from shoal_trainer.contract import WorkerReport, WorkerState
from tests.unit.controllers.clusters import JOB_PATH, KEY, Rig
from tests.unit.policy import build

pytestmark = pytest.mark.looptime


async def replaced(workers: int, lost: int) -> Counter[str]:
    """The writes, by kind, from the loss of some workers until their replacements run and nothing is left to say."""
    rig = Rig()
    rig.state.nodes.put(build.node("spot-0"))
    rig.apply(workers={"replicas": workers, "maxReplicas": workers})
    await settle(rig)
    run(rig)
    await settle(rig)
    rig.cluster.requests.clear()
    for index in range(lost):
        pod = rig.cluster.objects.pop(f"/api/v1/namespaces/ns/pods/digits-worker-{index}-0")
        rig.state.pods.drop(pod["metadata"]["uid"])
    for _ in range(8):  # a part at a time: a bounded number of replacements wait for nodes
        await settle(rig, 2)
        run(rig)
    await settle(rig)
    assert {f"digits-worker-{index}-1" for index in range(lost)} <= rig.pods()
    assert rig.job.status.restarts.disruptions == lost
    return Counter(
        path.split("/namespaces/ns/")[1].split("/")[0] for verb, path in rig.cluster.requests if verb != "GET"
    )


def run(rig: Rig) -> None:
    """All pods are bound and run."""
    for pod in rig.pods():
        rig.cluster.change(f"/api/v1/namespaces/ns/pods/{pod}", spec={"nodeName": "spot-0"})
    rig.run_pods()


async def settle(rig: Rig, times: int = 6) -> None:
    for _ in range(times):
        rig.see()
        await rig.reconcile(KEY)
        rig.wall += timedelta(seconds=5)


async def of_four() -> Rig:
    """A job of four workers that has run for a minute; all of it is told."""
    rig = Rig(settle_seconds=SETTLE_SECONDS)
    rig.state.nodes.put(build.node("spot-0"))
    rig.apply(workers={"replicas": 4})
    await settle(rig)
    run(rig)
    await asyncio.sleep(60)
    await settle(rig)
    return rig


@pytest.mark.parametrize("announced", [False, True])
async def test_a_worker_lost_alone(announced: bool) -> None:
    """The pod, the loss, its event; that the replacement has a node, runs and trains is told with the telemetry."""
    rig = await of_four()
    rig.cluster.requests.clear()
    lost, replacement = (f"/api/v1/namespaces/ns/pods/digits-worker-1-{n}" for n in (0, 1))
    if announced:
        stopped = [{"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}]
        rig.cluster.change(lost, status={"phase": "Failed", "conditions": stopped})
    else:
        rig.cluster.objects.pop(lost)

    async def stage() -> None:
        await asyncio.sleep(2)
        await settle(rig, 3)

    await stage()
    rig.cluster.change(replacement, spec={**rig.cluster.objects[replacement]["spec"], "nodeName": "spot-0"})
    await stage()
    run(rig)
    await stage()
    pushed = WorkerReport(slot=1, incarnation=1, state=WorkerState.ACTIVE, first_push_at=rig.wall.timestamp())

    def report() -> None:
        report = build.report().model_copy(update={"workers": (pushed,)})
        rig.poller._seen[rig.job.metadata.uid] = Seen(report, asyncio.get_running_loop().time())

    report()
    await stage()
    deleted = ["DELETE pods"] if announced else []
    assert writes_of(rig) == [*deleted, "POST ns", "POST ns", "PUT digits"]
    assert rig.job.status.workers.ready == 3
    await asyncio.sleep(30)
    report()
    await settle(rig)
    assert rig.cluster.writes("PUT", "trainingjobs") == ["status", "status"]
    assert rig.job.status.workers.ready == 4
    assert rig.job.status.reason == ""
    assert rig.job.status.last_disruption is not None
    assert rig.job.status.last_disruption.recovered_seconds is not None


@pytest.mark.parametrize("failed", [False, True], ids=["taken", "failed"])
async def test_a_loss_is_told_with_its_replacement(failed: bool) -> None:
    """On a node that has its image it runs within two seconds: there is nothing left to say after the one status."""
    rig = await of_four()
    rig.cluster.requests.clear()
    lost = "/api/v1/namespaces/ns/pods/digits-worker-1-0"
    if failed:
        end = {"exitCode": 1, "reason": "Error", "finishedAt": f"{rig.wall:%Y-%m-%dT%H:%M:%SZ}"}
        containers = [{"name": "worker", "state": {"terminated": end}}]
        rig.cluster.change(lost, status={"phase": "Failed", "containerStatuses": containers})
        rig.see()
    else:
        rig.state.pods.drop(rig.cluster.objects.pop(lost)["metadata"]["uid"])
    for _ in range(2):
        await rig.reconcile(KEY)
        assert "PUT digits" not in writes_of(rig)
        rig.wall += timedelta(seconds=1)  # as long as the first back-off
        await asyncio.sleep(0.9)
    await rig.reconcile(KEY)
    run(rig)
    await settle(rig)
    for _ in range(2):
        assert writes_of(rig) == ["POST ns", "POST ns", "PUT digits"]
        assert rig.job.status.workers.ready == 4
        await asyncio.sleep(40)
        await settle(rig)
    restarts = rig.job.status.restarts
    assert (restarts.failures, restarts.disruptions) == ((1, 0) if failed else (0, 1))


async def test_what_waits_for_the_record_of_a_loss_does_not_wait_for_the_replacement() -> None:
    """A replacement that is gone before it was recorded has a successor once it is."""
    rig = await of_four()
    for incarnation in range(2):
        rig.cluster.objects.pop(f"/api/v1/namespaces/ns/pods/digits-worker-1-{incarnation}")
        rig.see()
        await rig.reconcile(KEY)
        await rig.tasks.idle()
    await asyncio.sleep(WAVE_SECONDS)
    await settle(rig, 2)
    assert "digits-worker-1-2" in rig.pods()


def writes_of(rig: Rig) -> list[str]:
    """The verb of each write, and of which folder."""
    return sorted(f"{verb} {path.split('/')[-2]}" for verb, path in rig.cluster.requests if verb != "GET")


@pytest.mark.parametrize("older", [False, True])
async def test_what_an_older_crd_prunes_is_not_written_again_and_again(older: bool) -> None:
    """An operator beside the CRDs of the version before wrote the status of each job once a second, for ever."""
    rig = Rig(settle_seconds=SETTLE_SECONDS)
    rig.observer._images = replace(rig.observer._images, node_selector={"kubernetes.io/arch": "amd64"})
    put = rig.cluster._put

    def prune(path: str, body: dict[str, Any]) -> Answer:
        if older:
            (body.get("status", {}).get("images") or {}).pop("nodeSelector", None)
        return put(path, body)

    rig.cluster._put = prune  # type: ignore[method-assign]
    rig.apply()
    await settle(rig)
    run(rig)
    await asyncio.sleep(60)
    await settle(rig)
    rig.cluster.requests.clear()
    for _ in range(60):
        await asyncio.sleep(1)
        await settle(rig, 1)
    assert len(rig.cluster.writes("PUT", "trainingjobs")) <= 1, "the newest telemetry"
    assert rig.job.status.images is not None
    assert (rig.job.status.images.node_selector is None) == older
    rig.apply(workers={"replicas": 3})
    await settle(rig)
    assert rig.job.status.observed_generation == 2
    written = len(rig.cluster.writes("PUT", "trainingjobs"))
    rig.cluster.change(JOB_PATH, status={**rig.cluster.objects[JOB_PATH]["status"], "phase": "Failed"})
    await asyncio.sleep(60)
    await settle(rig)
    assert len(rig.cluster.writes("PUT", "trainingjobs")) > written, "what somebody else wrote is mended"


async def test_a_ramp_is_told_once_a_second_though_some_of_it_is_told_at_once() -> None:
    """Of the servers, and of the phase, is told at once."""
    rig = Rig(settle_seconds=SETTLE_SECONDS)
    rig.state.nodes.put(build.node("spot-0"))
    rig.apply(workers={"replicas": 40, "maxReplicas": 40})
    started: set[str] = set()
    running = {"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
    for tenth in range(100):
        if tenth % 5 == 2 and (fresh := sorted(rig.pods() - started)):
            started.add(fresh[0])
            path = f"/api/v1/namespaces/ns/pods/{fresh[0]}"
            rig.cluster.change(path, spec={"nodeName": "spot-0"}, status=running)
        rig.see()
        await rig.reconcile(KEY)
        await asyncio.sleep(0.1)
    assert rig.job.status.phase == "Running"
    assert rig.job.status.parameter_servers.ready == 1
    assert 5 <= len(rig.cluster.writes("PUT", "trainingjobs")) <= 10


async def test_a_loss_that_leaves_too_few_is_over_as_soon_as_it_is() -> None:
    rig = Rig(settle_seconds=SETTLE_SECONDS)
    rig.state.nodes.put(build.node("spot-0"))
    rig.apply(workers={"replicas": 2, "minReplicas": 2})
    await settle(rig)
    run(rig)
    await asyncio.sleep(60)
    await settle(rig)
    rig.cluster.objects.pop("/api/v1/namespaces/ns/pods/digits-worker-1-0")
    await asyncio.sleep(WAVE_SECONDS)
    await settle(rig, 2)
    assert rig.job.status.reason != ""
    await asyncio.sleep(SETTLE_SECONDS)
    run(rig)
    await settle(rig, 2)
    assert (rig.job.status.reason, rig.job.status.workers.ready) == ("", 2)


async def test_a_wave_of_losses_shares_the_status_and_few_events() -> None:
    writes = await replaced(workers=100, lost=50)
    assert writes["pods"] == 50
    assert writes["trainingjobs"] <= 3
    assert writes.total() <= 1.5 * 50


async def test_growth_leaves_the_rest_of_a_jobs_requests_to_replacements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    rig.state.nodes.put(build.node("spot-0"))
    rig.apply(workers={"replicas": 100, "maxReplicas": 100})
    most: Counter[str] = Counter()
    open_, made, request = 0, 0, rig.cluster.request

    async def slow(method: str, path: str, **options: Any) -> Answer:
        nonlocal open_, made
        if (method, path.rpartition("/")[2]) == ("POST", "pods"):
            open_, made = open_ + 1, made + 1
            kind = "replace" if options.get("urgent") else "grow" if made <= 101 - FEW else "the last"
            most[kind] = max(most[kind], open_)
            await asyncio.sleep(1)
            open_ -= 1
        return await request(method, path, **options)

    monkeypatch.setattr(rig.cluster, "request", slow)
    await settle(rig)
    run(rig)
    await settle(rig)
    for index in range(50):
        pod = rig.cluster.objects.pop(f"/api/v1/namespaces/ns/pods/digits-worker-{index}-0")
        rig.state.pods.drop(pod["metadata"]["uid"])
    await settle(rig)
    assert most.pop("the last") <= FEW
    assert most == {"grow": ORDINARY_IN_FLIGHT, "replace": MAX_IN_FLIGHT}


async def test_status_of_a_job_that_ramps_up_is_written_once_a_second() -> None:
    """And at once when its server is ready, and when its phase changes."""
    rig = Rig(settle_seconds=SETTLE_SECONDS)
    rig.apply(workers={"replicas": 100, "maxReplicas": 100})
    await settle(rig)
    rig.cluster.requests.clear()
    began = asyncio.get_running_loop().time()
    for name in sorted(rig.pods()):
        ready = [{"type": "Ready", "status": "True"}]
        path = f"/api/v1/namespaces/ns/pods/{name}"
        rig.cluster.change(path, status={"phase": "Running", "conditions": ready})
        rig.see()
        await rig.reconcile(KEY)
        await asyncio.sleep(0.1)
    seconds = asyncio.get_running_loop().time() - began
    assert len(rig.cluster.writes("PUT", "trainingjobs")) <= 2 + seconds / SETTLE_SECONDS


async def test_an_event_is_told_once_with_the_status_that_says_the_same() -> None:
    """A restart from nothing came with telemetry only, which waits: each plan until then told it again."""
    rig = Rig().applied()
    await settle(rig)
    rig.run_pods()
    await settle(rig)
    for step, restarts in ((5, 0), (1, 1)):
        report = build.report(step=step, restarted_from_nothing=restarts)
        rig.poller._seen[rig.job.metadata.uid] = Seen(report, asyncio.get_running_loop().time())
        await settle(rig)
    told = [each for each in rig.cluster.objects.values() if each.get("reason") == "TrainingRestarted"]
    assert [each["count"] for each in told] == [1]
    assert rig.job.status.training.restarts_from_nothing == 1


async def test_of_writes_that_nothing_answers_the_last_ones_are_kept() -> None:
    """All were: 33 KiB of each job a minute, so that of 500 jobs the operator was killed for memory in half an hour."""
    rig = Rig().applied()
    await settle(rig)
    rig.run_pods()
    await settle(rig)
    rig.cluster.loses_answer = lambda method, path: method == "PUT" and path.endswith("/status")
    uid, before = rig.job.metadata.uid, rig.job.metadata.resource_version
    rig.cluster.fault = lambda method, _path: (
        Unavailable("500: failed calling webhook") if method == "PUT" else None
    )
    for step in range(1, 4 * MOST_UNANSWERED):
        report = build.report(step=step, restarted_from_nothing=1)
        rig.poller._seen[uid] = Seen(report, asyncio.get_running_loop().time())
        await rig.once()
        await rig.tasks.idle()
        await asyncio.sleep(60.0)
    told = rig.reporter._told[uid]
    assert len(told.unanswered) == MOST_UNANSWERED
    assert rig.job.metadata.resource_version == before
    rig.cluster.fault = lambda _method, _path: None  # the next one is stored, and only its answer is lost
    await rig.once()
    await rig.tasks.idle()
    rig.see()
    rig.cluster.loses_answer = lambda _method, _path: False
    await settle(rig)
    assert told.unanswered == []
    events = [each for each in rig.cluster.objects.values() if each.get("reason") == "TrainingRestarted"]
    assert [each["count"] for each in events] == [1]


@pytest.mark.parametrize("fault", [Unavailable("500: no webhook"), Answer(422, b'{"message": "no webhook"}')])
async def test_a_status_that_cannot_be_stored_is_an_event(fault: Answer | Exception) -> None:
    """It stood still, and only the operator's log said why."""
    rig = Rig().applied()
    await settle(rig)
    rig.run_pods()

    def told() -> list[str]:
        events = (each for each in rig.cluster.objects.values() if each.get("reason") == "StatusNotStored")
        return [each["message"] for each in events]

    async def tries(seconds: float) -> None:
        for _ in range(round(seconds / 10)):
            rig.see()
            await rig.once()
            await rig.tasks.idle()
            await rig.recorder.drain()
            await asyncio.sleep(10)

    rig.cluster.fault = lambda method, _path: fault if method == "PUT" else None
    await tries(20)
    assert told() == []
    await tries(400)
    assert len(told()) == 1
    assert "the status cannot be stored" in told()[0]
    assert "no webhook" in told()[0]
    rig.cluster.fault = lambda _method, _path: None
    await settle(rig)
    rig.cluster.fault = lambda method, _path: fault if method == "PUT" else None
    rig.cluster.objects.pop("/api/v1/namespaces/ns/pods/digits-worker-0-0")
    await tries(20)
    assert len(told()) == 1


def test_the_time_of_a_snapshot_makes_no_other_change_urgent() -> None:
    before = build.job().status
    servers = before.parameter_servers.model_copy(update={"last_snapshot_time": build.NOW})
    after = before.model_copy(update={"parameter_servers": servers})
    assert not _is_awaited(before, after)
    ready = before.model_copy(update={"parameter_servers": servers.model_copy(update={"ready": 1})})
    assert _is_awaited(before, ready)


async def test_losses_one_after_the_other_are_replaced_at_once_and_recorded_together() -> None:
    lost = 15  # fewer than may wait for nodes
    rig = Rig(settle_seconds=SETTLE_SECONDS)
    rig.apply(workers={"replicas": 20, "maxReplicas": 20})
    await settle(rig)
    run(rig)
    await asyncio.sleep(60)
    await settle(rig)
    rig.cluster.requests.clear()
    for index in range(lost):
        pod = rig.cluster.objects.pop(f"/api/v1/namespaces/ns/pods/digits-worker-{index}-0")
        rig.state.pods.drop(pod["metadata"]["uid"])
        await rig.reconcile(KEY)
        assert f"digits-worker-{index}-1" in rig.pods()
        await asyncio.sleep(0.05)
    writes = Counter(path.endswith("/status") for verb, path in rig.cluster.requests if verb == "PUT")
    assert writes[True] <= 1 + lost * 0.05 / WAVE_SECONDS
    await asyncio.sleep(REPLACED_SECONDS)
    await rig.reconcile(KEY)
    assert rig.job.status.restarts.disruptions == lost


async def test_what_a_replacement_waits_for_is_as_urgent_as_the_replacement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 200 jobs that begin, each sends 8 requests at a time: more than the places of those that are not urgent."""
    rig = Rig().applied()
    await settle(rig)
    run(rig)
    await settle(rig)
    sent: dict[str, set[bool]] = {}
    request = rig.cluster.request

    async def noted(method: str, path: str, **options: Any) -> Answer:
        words = f"{method} {path.partition('/ns/')[2]}"
        sent.setdefault(words, set()).add(bool(options.get("urgent")))
        return await request(method, path, **options)

    monkeypatch.setattr(rig.cluster, "request", noted)
    for name in ("digits-worker-1-0", "digits-ps-0-0"):
        rig.cluster.objects.pop(f"/api/v1/namespaces/ns/pods/{name}")
        rig.see()
        await settle(rig)
    assert {"digits-worker-1-1", "digits-ps-0-1"} <= rig.pods()
    assert sent["GET pods/digits-worker-1-0"] == sent["GET pods/digits-ps-0-0"] == {True}
    assert sent["POST pods"] == sent["PATCH services/digits-ps-0"] == {True}
    assert True in sent["PUT trainingjobs/digits/status"], "the record of the next server comes first"
    assert sent["POST events"] == {False}
