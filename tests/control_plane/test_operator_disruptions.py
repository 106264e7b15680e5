"""Disruptions of nodes and pods. Reaction times are read from the API server's audit log."""

from __future__ import annotations

import asyncio
import datetime as dt
from typing import Any

import pytest

from dev.audit import creates, writes
from dev.cluster import ControlPlane
from dev.kube import Kube
from shoal_trainer.contract import Phase, StatusReport, WorkerReport, WorkerState
from tests.control_plane.operators import FakeCoordinator, Job, eventually, running_operator
from tests.doubles.fake_kubelet import FakeKubelet

ONE_POD = {"pods": "1"}
"""Capacity of one pod: otherwise the scheduler places a random number of workers on a node."""


@pytest.fixture
async def nodes(fake_kubelet: FakeKubelet) -> FakeKubelet:
    await fake_kubelet.add_node("safe-1")
    await fake_kubelet.add_node("safe-2")
    for name in ("spot-1", "spot-2", "spot-3", "spot-4"):
        await fake_kubelet.add_node(name, spot=True, capacity=ONE_POD)
    return fake_kubelet


def created_at(plane: ControlPlane, namespace: str, name: str) -> dt.datetime | None:
    """When the API server received the request that created the pod."""
    return next(
        (w.received for w in creates(plane.audit_log, "pods", namespace=namespace) if w.name == name), None
    )


async def created(plane: ControlPlane, namespace: str, name: str) -> dt.datetime:
    async def is_created() -> dt.datetime | None:
        return created_at(plane, namespace, name)

    at = await eventually(is_created, what=f"{name} is created")
    assert isinstance(at, dt.datetime)
    return at


def utc_now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


async def answered(plane: ControlPlane, since: dt.datetime, *request: str) -> dt.datetime:
    """When the API server answered the test's request (verb, resource, subresource, name).

    Reaction times are measured from then, so that they exclude the time of the test itself.
    """

    async def is_answered() -> dt.datetime | None:
        return next(
            (
                w.answered
                for w in writes(plane.audit_log)
                if (w.verb, w.resource, w.subresource, w.name) == request and w.received >= since
            ),
            None,
        )

    at = await eventually(is_answered, what=f"{request} is answered")
    assert isinstance(at, dt.datetime)
    return at


async def room(kube: Kube, kubelet: FakeKubelet, name: str) -> None:
    """Add a spot node for replacements, and wait until it is schedulable: its taint is removed after it is Ready.

    Otherwise the only node with room may be the terminating one.
    """
    await kubelet.add_node(name, spot=True)

    async def untainted() -> bool:
        return not (await kube.get(f"/api/v1/nodes/{name}"))["spec"].get("taints")

    await eventually(untainted)


async def count(job: Job, disruptions: int, failures: int) -> dict[str, Any]:
    async def counted() -> dict[str, Any] | None:
        status = await job.status()
        restarts = status["restarts"]
        reached = (restarts["disruptions"], restarts["failures"]) == (disruptions, failures)
        return status if reached and status["workers"]["ready"] == 2 else None

    try:
        return dict(await eventually(counted))
    except AssertionError as error:
        raise AssertionError(f"{error}: {await job.status()}") from None


async def test_notice_creates_a_replacement_within_a_second(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet
) -> None:
    job = Job(kube, namespace)
    async with running_operator(control_plane.kubeconfig, namespace):
        await job.apply()
        await job.runs()
        node = (await job.pods())["digits-worker-0-0"]["spec"]["nodeName"]
        asked = utc_now()
        await nodes.notice(node)
        at = await created(control_plane, namespace, "digits-worker-0-1")
        began = await answered(control_plane, asked, "patch", "nodes", "status", node)
        assert (at - began).total_seconds() <= 1.0
        replacement = await job.pod_runs("digits-worker-0-1")
        assert replacement["spec"]["nodeName"] not in {node, "safe-1", "safe-2"}
        await count(job, 1, 0)  # the reason is recorded before the pod gives another one
        await nodes.end_shutdown(node)
        status = await count(job, 1, 0)
        assert status["lastDisruption"]["pod"] == "digits-worker-0-0"
        assert status["restarts"]["byReason"] == {"NodeShutdown": 1}
        assert status["parameterServers"]["restarts"] == 0

        async def event_posted() -> bool:
            return len((await job.events()).get("WorkerDisrupted", [])) == 1

        await eventually(event_posted)


@pytest.mark.nightly
async def test_replacement_of_a_silent_worker_is_withdrawn_if_it_recovers(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet
) -> None:
    job, coordinator = Job(kube, namespace), FakeCoordinator()

    def set_report(uid: str, state: WorkerState) -> None:
        workers = (
            WorkerReport(slot=0, incarnation=0, state=state),
            WorkerReport(slot=1, incarnation=0, state=WorkerState.ACTIVE),
        )
        coordinator.reports[uid] = StatusReport(job_uid=uid, phase=Phase.TRAINING, step=5, workers=workers)

    async with running_operator(control_plane.kubeconfig, namespace, coordinator):
        uid = (await job.apply())["metadata"]["uid"]
        set_report(uid, WorkerState.ACTIVE)
        await job.runs()
        nodes.hold = lambda pod: pod["metadata"]["name"] == "digits-worker-0-1"
        began = utc_now()
        set_report(uid, WorkerState.SILENT)
        at = await created(control_plane, namespace, "digits-worker-0-1")
        assert (at - began).total_seconds() <= 10.0  # of 15 s; the coordinator takes 5 s
        set_report(uid, WorkerState.ACTIVE)

        async def taken_back() -> bool:
            pods = await job.pods()
            return "digits-worker-0-1" not in pods and "digits-worker-0-0" in pods

        await eventually(taken_back)
        status = await count(job, 0, 0)
        assert status["training"]["step"] == 5

        nodes.hold = lambda _pod: False
        set_report(uid, WorkerState.SILENT)
        await job.pod_runs("digits-worker-0-2")
        status = await count(job, 1, 0)
        assert status["restarts"]["byReason"] == {"Silent": 1}


async def test_lost_node_does_not_block_its_slot(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet
) -> None:
    job = Job(kube, namespace)
    async with running_operator(control_plane.kubeconfig, namespace):
        await job.apply(runPolicy={"forceDeleteAfterSeconds": 1})
        await job.runs()
        node = (await job.pods())["digits-worker-0-0"]["spec"]["nodeName"]
        await nodes.vanish(node, unknown_after=0)
        await job.pod_runs("digits-worker-0-1")

        async def old_one_gone() -> bool:
            return "digits-worker-0-0" not in await job.pods()

        await eventually(old_one_gone)
        await count(job, 1, 0)


async def test_nodes_that_turn_unknown_together_lose_no_pod(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet
) -> None:
    """As after a pause of the API server: their pods run on, and nobody hears from them."""
    job = Job(kube, namespace)
    async with running_operator(control_plane.kubeconfig, namespace):
        await job.apply()
        await job.runs()
        before = {name: pod["metadata"]["uid"] for name, pod in (await job.pods()).items()}
        names = list(nodes.nodes)
        for name in names:
            await nodes.vanish(name, unknown_after=0)

        async def suspected() -> bool:
            return (await job.condition("NodeSignalsSuspect")).get("status") == "True"

        await eventually(suspected)
        for name in names:
            await nodes.appear(name)

        async def believed() -> bool:
            return (await job.condition("NodeSignalsSuspect")).get("status") == "False"

        await eventually(believed)
        assert {name: pod["metadata"]["uid"] for name, pod in (await job.pods()).items()} == before
        assert not any(pod["metadata"].get("deletionTimestamp") for pod in (await job.pods()).values())
        status = await job.status()
        assert status["restarts"] == {"failures": 0, "disruptions": 0, "byReason": {}}
        assert status["parameterServers"]["restarts"] == 0


async def test_recreated_node_of_the_same_name_loses_its_pods(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet
) -> None:
    job = Job(kube, namespace)
    async with running_operator(control_plane.kubeconfig, namespace):
        await job.apply()
        await job.runs()
        pod = (await job.pods())["digits-worker-0-0"]
        node = pod["spec"]["nodeName"]
        began = dt.datetime.fromisoformat(pod["status"]["startTime"])

        async def a_second_has_passed() -> bool:
            return dt.datetime.now(dt.UTC) - began >= dt.timedelta(seconds=2)

        await eventually(
            a_second_has_passed
        )  # a node of the second in which a pod was bound may be the pod's
        await nodes.remove_node(node)
        await nodes.add_node(node, spot=True, capacity=ONE_POD)
        await job.pod_runs("digits-worker-0-1")
        await count(job, 1, 0)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("end", "disruptions", "failures", "reason"),
    [
        ({"exit_code": 1}, 0, 1, "Error"),
        ({"exit_code": 137, "reason": "OOMKilled"}, 0, 1, "OOMKilled"),
        ({"exit_code": 1, "pod_reason": "OutOfnvidia.com/gpu"}, 1, 0, "OutOfnvidia.com/gpu"),
    ],
)
async def test_failures_and_disruptions_are_counted_separately(
    control_plane: ControlPlane,
    crds: None,
    kube: Kube,
    namespace: str,
    nodes: FakeKubelet,
    end: dict[str, Any],
    disruptions: int,
    failures: int,
    reason: str,
) -> None:
    job = Job(kube, namespace)
    async with running_operator(control_plane.kubeconfig, namespace):
        await job.apply()
        await job.runs()
        await nodes.fail_pod(namespace, "digits-worker-0-0", **end)
        status = await count(job, disruptions, failures)
        assert list(status["restarts"]["byReason"].values()) == [1]
        if failures:
            assert status["lastFailure"]["reason"] == reason


async def test_exceeded_backoff_limit_fails_the_job(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet
) -> None:
    job = Job(kube, namespace)
    async with running_operator(control_plane.kubeconfig, namespace):
        await job.apply(runPolicy={"backoffLimit": 0})
        await job.runs()
        await nodes.fail_pod(namespace, "digits-worker-0-0", exit_code=3, message="no such file")
        status = await job.reaches(phase="Failed")
        assert status["lastFailure"]["exitCode"] == 3
        assert "no such file" in status["lastFailure"]["message"]
        assert (await job.condition("Failed"))["reason"] == "BackoffLimitExceeded"


@pytest.mark.nightly
async def test_deleted_parameter_server_returns_with_the_next_epoch(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet
) -> None:
    job = Job(kube, namespace)
    async with running_operator(control_plane.kubeconfig, namespace):
        await job.apply()
        await job.runs()
        workers = {n: p["metadata"]["uid"] for n, p in (await job.pods()).items() if "worker" in n}
        await kube.delete(f"/api/v1/namespaces/{namespace}/pods/digits-ps-0-0", grace_seconds=0)
        await job.pod_runs("digits-ps-0-1")
        service = await kube.get(f"/api/v1/namespaces/{namespace}/services/digits-ps-0")
        assert service["spec"]["selector"]["shoal.dev/incarnation"] == "1"

        async def counted() -> bool:
            return bool((await job.status())["parameterServers"] == {"desired": 1, "ready": 1, "restarts": 1})

        await eventually(counted)
        now = {n: p["metadata"]["uid"] for n, p in (await job.pods()).items() if "worker" in n}
        assert now == workers
        assert (await job.status())["restarts"]["disruptions"] == 0


async def test_drained_node_gives_up_its_parameter_server(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet
) -> None:
    """The disruption budget refuses to evict the server: the operator moves it, because its node is cordoned."""
    job = Job(kube, namespace)
    async with running_operator(control_plane.kubeconfig, namespace):
        await job.apply()
        await job.runs()
        old = (await job.pods())["digits-ps-0-0"]["spec"]["nodeName"]
        arguments = ("drain", old, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=45s")
        drained = await asyncio.create_subprocess_exec("kubectl", *arguments, env=control_plane.env)
        assert await drained.wait() == 0
        new = await job.pod_runs("digits-ps-0-1")
        assert new["spec"]["nodeName"] != old
        await job.runs()
        budgets = await kube.get(f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets")
        assert [budget["spec"]["minAvailable"] for budget in budgets["items"]] == [1]
        await kube.patch(job.path, {"spec": {"suspend": True}})

        async def no_budget() -> bool:
            budgets = await kube.get(f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets")
            return not budgets["items"]

        await eventually(no_budget)


async def test_evicted_worker_is_replaced_while_it_drains(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet
) -> None:
    nodes.stop_seconds = 15
    job = Job(kube, namespace)
    async with running_operator(control_plane.kubeconfig, namespace):
        await job.apply()
        await job.runs()
        asked = utc_now()
        path = f"/api/v1/namespaces/{namespace}/pods/digits-worker-1-0"
        await kube.create(
            f"{path}/eviction",
            {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "digits-worker-1-0"}},
        )
        at = await created(control_plane, namespace, "digits-worker-1-1")
        began = await answered(control_plane, asked, "create", "pods", "eviction", "digits-worker-1-0")
        assert (at - began).total_seconds() <= 1.0
        await job.pod_runs("digits-worker-1-1")
        assert "digits-worker-1-0" in await job.pods()  # it is still draining
        status = await count(job, 1, 0)
        assert status["restarts"]["byReason"] == {"EvictionByEvictionAPI": 1}


@pytest.mark.nightly
async def test_many_workers_are_replaced_at_once(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, fake_kubelet: FakeKubelet
) -> None:
    workers = 40
    await fake_kubelet.add_node("safe-1")
    for number in range(4):  # 44 places, so at least 7 workers are on each node
        await fake_kubelet.add_node(f"spot-{number}", spot=True, capacity={"pods": "11"})
    job = Job(kube, namespace)
    async with running_operator(control_plane.kubeconfig, namespace):
        await job.apply(workers={"replicas": workers, "maxSurge": "100%"})
        await job.runs(workers)
        gone = [n for n, pod in (await job.pods()).items() if pod["spec"].get("nodeName") == "spot-0"]
        assert 7 <= len(gone) <= 11
        await room(kube, fake_kubelet, "spot-4")
        asked = utc_now()
        await fake_kubelet.notice("spot-0")
        last = max([await created(control_plane, namespace, name[:-1] + "1") for name in gone])
        began = await answered(control_plane, asked, "patch", "nodes", "status", "spot-0")
        assert (last - began).total_seconds() <= 5.0

        async def counted() -> bool:
            status = await job.status()
            return (status["restarts"]["disruptions"], status["workers"]["ready"]) == (len(gone), workers)

        try:
            await eventually(counted)
        except AssertionError as error:
            status = await job.status()
            raise AssertionError(
                f"{error}: {len(gone)} disrupted; {status['restarts']}, {status['workers']}"
            ) from None


@pytest.mark.nightly
async def test_each_of_many_jobs_reports_its_disruptions(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, fake_kubelet: FakeKubelet
) -> None:
    await fake_kubelet.add_node("safe-1")
    await fake_kubelet.add_node("spot-1", spot=True)
    jobs = [Job(kube, namespace, f"digits-{number}") for number in range(11)]
    async with running_operator(control_plane.kubeconfig, namespace):
        await asyncio.gather(*(job.apply() for job in jobs))
        await asyncio.gather(*(job.runs() for job in jobs))
        await room(kube, fake_kubelet, "spot-2")
        await fake_kubelet.notice("spot-1")
        await asyncio.gather(*(count(job, 2, 0) for job in jobs))

        async def all_told() -> bool:
            events = [await job.events() for job in jobs]
            return all(len(each.get("WorkerDisrupted", [])) == 2 for each in events)

        await eventually(all_told)
