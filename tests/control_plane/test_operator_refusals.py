"""Refusals by the API server (quotas, name conflicts, bad templates, missing permissions); none is a failure."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from dev.cluster import ControlPlane
from dev.kube import Json, Kube
from tests.control_plane.installed import as_service_account
from tests.control_plane.operators import Job, eventually, running_operator
from tests.doubles.fake_kubelet import FakeKubelet


@pytest.fixture
async def nodes(fake_kubelet: FakeKubelet) -> FakeKubelet:
    await fake_kubelet.add_node("safe-1")
    for name in ("spot-1", "spot-2"):
        await fake_kubelet.add_node(name, spot=True)
    return fake_kubelet


async def condition_holds(job: Job, kind: str, reason: str | None = None) -> Json:
    async def holds() -> Json | None:
        found = await job.condition(kind)
        return found if found.get("status") == "True" and reason in (None, found["reason"]) else None

    try:
        return dict(await eventually(holds))
    except AssertionError as error:
        raise AssertionError(f"{error}: {await job.status()}") from None


async def condition_ends(job: Job, kind: str) -> None:
    async def over() -> bool:
        return (await job.condition(kind)).get("status") != "True"

    await eventually(over)


async def limit(kube: Kube, namespace: str, resource: str, number: int) -> str:
    """A ResourceQuota named `few`, in force; returns its path."""
    quotas = f"/api/v1/namespaces/{namespace}/resourcequotas"
    await kube.create(quotas, {"metadata": {"name": "few"}, "spec": {"hard": {resource: str(number)}}})

    async def in_force() -> bool:
        return "hard" in (await kube.get(f"{quotas}/few")).get("status", {})

    await eventually(in_force)
    return f"{quotas}/few"


@pytest.mark.nightly
async def test_exceeded_quota_waits(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet
) -> None:
    quota = await limit(kube, namespace, "pods", 2)
    job = Job(kube, namespace)
    async with running_operator(control_plane.kubeconfig, namespace):
        await job.apply()
        condition = await condition_holds(job, "QuotaExceeded")
        assert "exceeded quota: few" in condition["message"]
        assert (await job.status())["restarts"] == {"failures": 0, "disruptions": 0, "byReason": {}}
        assert len(await job.pods()) == 2
        await kube.patch(quota, {"spec": {"hard": {"pods": "5"}}})
        await job.runs()
        await condition_ends(job, "QuotaExceeded")
        assert (await job.status())["restarts"] == {"failures": 0, "disruptions": 0, "byReason": {}}


async def test_job_that_is_nested_too_deeply_says_so_and_others_run(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet
) -> None:
    """The API server takes it. It made all jobs unreadable, or ended the operator, and again each time it started."""
    job = Job(kube, namespace)
    args = '{"a":' + "[" * 3000 + "]" * 3000 + "}"

    async def apply_deep(name: str) -> str:
        deep = Job(kube, namespace, name)
        manifest = deep.manifest()
        manifest["spec"]["training"]["args"] = "ARGS"
        text = json.dumps(manifest).replace('"ARGS"', args)
        header = {"Content-Type": "application/json"}
        async with kube.session.post(deep.path.rpartition("/")[0], data=text, headers=header) as answer:
            assert answer.status == 201, await answer.text()
        return deep.path

    async def told(*paths: str) -> bool:
        for path in paths:
            async with kube.session.get(path) as answer:
                if '"reason":"Unreadable"' not in await answer.text():
                    return False
        return True

    listed = await apply_deep("listed")
    async with running_operator(control_plane.kubeconfig, namespace):
        await job.apply()
        watched = await apply_deep("watched")
        await job.runs()
        await eventually(lambda: told(listed, watched))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("resource", ["services", "secrets"])
async def test_pods_wait_for_refused_secret_or_service(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet, resource: str
) -> None:
    quota = await limit(kube, namespace, resource, 0)
    job = Job(kube, namespace)
    async with running_operator(control_plane.kubeconfig, namespace):
        await job.apply()
        condition = await condition_holds(job, "QuotaExceeded")
        assert f"requested: {resource}=1" in condition["message"]
        assert not await job.pods()
        await kube.patch(quota, {"spec": {"hard": {resource: "5"}}})
        await job.runs()
        await condition_ends(job, "QuotaExceeded")


@pytest.mark.nightly
async def test_job_without_disruption_budget_runs_degraded(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet
) -> None:
    budgets = "count/poddisruptionbudgets.policy"
    quota = await limit(kube, namespace, budgets, 0)
    job = Job(kube, namespace)
    async with running_operator(control_plane.kubeconfig, namespace):
        await job.apply()
        await job.runs()
        condition = await condition_holds(job, "Degraded", "NoDisruptionBudget")
        assert "exceeded quota: few" in condition["message"]
        await kube.patch(quota, {"spec": {"hard": {budgets: "5"}}})
        await condition_ends(job, "Degraded")


@pytest.mark.nightly
async def test_name_conflict_stalls_until_resolved(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet
) -> None:
    pods = f"/api/v1/namespaces/{namespace}/pods"

    async def default_account() -> Json:
        return await kube.get(f"/api/v1/namespaces/{namespace}/serviceaccounts/default")

    await eventually(default_account)
    await kube.create(
        pods,
        {
            "metadata": {"name": "digits-worker-0-0"},
            "spec": {"nodeSelector": {"no": "where"}, "containers": [{"name": "a", "image": "a"}]},
        },
    )
    job = Job(kube, namespace)
    async with running_operator(control_plane.kubeconfig, namespace):
        await job.apply()
        condition = await condition_holds(job, "Stalled", "NameCollision")
        assert "digits-worker-0-0 exists and does not belong to this job" in condition["message"]
        await kube.delete(f"{pods}/digits-worker-0-0", grace_seconds=0)
        await job.runs()
        await condition_ends(job, "Stalled")


async def test_rejected_template_stalls_until_fixed(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet
) -> None:
    job = Job(kube, namespace)
    bad = {"spec": {"containers": [{"name": "worker", "image": "a", "recources": {}}]}}
    async with running_operator(control_plane.kubeconfig, namespace):
        await job.apply(workers={"replicas": 2, "template": bad})
        condition = await condition_holds(job, "Stalled", "Invalid")
        assert 'unknown field "spec.containers[0].recources"' in condition["message"]
        good = {"spec": {"containers": [{"name": "worker", "image": "a"}]}}
        await kube.patch(job.path, {"spec": {"workers": {"template": good}}})
        await job.runs()
        await condition_ends(job, "Stalled")


async def test_missing_image_degrades_the_job(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet
) -> None:
    nodes.image_errors["no/such:image"] = 'Back-off pulling image "no/such:image"'
    job = Job(kube, namespace)
    async with running_operator(control_plane.kubeconfig, namespace):
        template = {"spec": {"containers": [{"name": "worker", "image": "no/such:image"}]}}
        await job.apply(workers={"replicas": 1, "template": template})
        condition = await condition_holds(job, "Degraded", "ImagePullFailed")
        assert "no/such:image" in condition["message"]
        assert "check the image" in condition["message"]
        assert (await job.status())["restarts"]["failures"] == 0


async def test_pods_run_under_restricted_pod_security(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet
) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    await kube.patch(f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": labels}})
    job = Job(kube, namespace)
    async with running_operator(control_plane.kubeconfig, namespace):
        await job.apply()
        await job.runs()


# --- with the permissions of the chart ------------------------------------------------------------------------------


async def test_pods_that_a_queue_holds_back_are_told_as_queued(
    kube: Kube, control_plane: ControlPlane, crds: None, namespace: str, nodes: FakeKubelet
) -> None:
    """As Kueue does it; the test with the real one is nightly."""
    gated = {"template": {"spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}}}
    job = Job(kube, namespace)
    async with running_operator(control_plane.kubeconfig, namespace):
        await job.apply(parameterServers=gated, workers={"replicas": 2, "maxSurge": 1, **gated})
        condition = await condition_holds(job, "Degraded")
        assert condition["reason"] == "Queued"
        pods = await job.pods()
        for name in pods:
            assert pods[name]["spec"]["schedulingGates"]
            path = f"/api/v1/namespaces/{namespace}/pods/{name}"
            await kube.patch(path, {"spec": {"schedulingGates": None}})
        await job.runs()
        assert (await job.status())["restarts"]["disruptions"] == 0
        await condition_ends(job, "Degraded")


@pytest.mark.by_day(1)
@pytest.mark.parametrize("scope", ["cluster", "namespace", "no-nodes"])
async def test_permissions_of_the_chart_are_sufficient(
    control_plane: ControlPlane,
    crds: None,
    kube: Kube,
    namespace: str,
    nodes: FakeKubelet,
    tmp_path: Path,
    scope: str,
) -> None:
    values = {
        "cluster": (),
        "namespace": (f"scope.namespace={namespace}",),
        "no-nodes": (f"scope.namespace={namespace}", "scope.nodes=false"),
    }[scope]
    kubeconfig = await as_service_account(control_plane, kube, namespace, tmp_path, *values)
    job = Job(kube, namespace)
    watched = "" if scope == "cluster" else namespace
    async with running_operator(kubeconfig, watched, lease_namespace=namespace):
        await job.apply(runPolicy={"ttlSecondsAfterFinished": 0})
        await job.runs()
        if scope == "no-nodes":
            condition = await condition_holds(job, "NodeSignalsUnavailable")
            assert "nodes cannot be read" in condition["message"]
        else:
            assert not await job.condition("NodeSignalsUnavailable")
        secrets = await kube.get(f"/api/v1/namespaces/{namespace}/secrets")
        [secret] = [s for s in secrets["items"] if s["metadata"]["name"].startswith("digits-")]
        assert len(base64.b64decode(secret["data"]["key"])) == 32
        await kube.delete(f"/api/v1/namespaces/{namespace}/pods/digits-ps-0-0", grace_seconds=0)
        await job.pod_runs("digits-ps-0-1")  # this updates a Service
        await job.runs()

        async def event_posted() -> bool:
            return "ParameterServerRestored" in await job.events()

        await eventually(event_posted)
        await nodes.succeed_pod(
            namespace, "digits-ps-0-1", message='{"outcome": "Succeeded", "modelUri": "file:///m"}'
        )

        async def gone() -> bool:
            listed = await kube.get(job.path.rpartition("/")[0])
            return not listed["items"]

        await eventually(gone)  # ttlSecondsAfterFinished
