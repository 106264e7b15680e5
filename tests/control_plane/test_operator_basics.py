"""A job on a real API server, from apply to its end."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path

import aiohttp
import pytest

from dev.cluster import ControlPlane
from dev.kube import ApiError, Kube
from shoal_trainer.contract import Outcome, TerminationMessage
from tests.control_plane.operators import (
    COLLECTED_SECONDS,
    Job,
    OperatorProcess,
    eventually,
    fixed_ports,
    running_operator,
)
from tests.doubles.fake_kubelet import FakeKubelet


@pytest.fixture
async def nodes(fake_kubelet: FakeKubelet) -> FakeKubelet:
    """One on-demand node and three spot nodes."""
    await fake_kubelet.add_node("safe-1")
    for name in ("spot-1", "spot-2", "spot-3"):
        await fake_kubelet.add_node(name, spot=True)
    return fake_kubelet


async def fetched(url: str, words: str) -> str:
    """The page, as soon as it contains these words."""

    async def page() -> str:
        with contextlib.suppress(aiohttp.ClientError):
            async with aiohttp.ClientSession() as session, session.get(url) as answer:
                text = await answer.text()
                return text if answer.status == 200 and words in text else ""
        return ""

    return str(await eventually(page, what=f"{words} at {url}"))


async def test_job_runs_from_apply_to_succeeded(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet
) -> None:
    job = Job(kube, namespace)
    async with running_operator(control_plane.kubeconfig, namespace):
        await job.apply()
        await job.runs()
        pods = await job.pods()
        assert set(pods) == {"digits-ps-0-0", "digits-worker-0-0", "digits-worker-1-0"}
        assert pods["digits-ps-0-0"]["spec"]["nodeName"] == "safe-1"
        assert pods["digits-worker-0-0"]["spec"]["nodeName"].startswith("spot")
        service = await kube.get(f"/api/v1/namespaces/{namespace}/services/digits-ps-0")
        assert service["spec"]["selector"]["shoal.dev/incarnation"] == "0"

        message = TerminationMessage(outcome=Outcome.SUCCEEDED, model_uri="file:///m", step=7).to_json()
        await nodes.succeed_pod(namespace, "digits-ps-0-0", message=message)
        status = await job.reaches(phase="Succeeded")
        assert status["output"]["uri"] == "file:///m"
        assert (await job.condition("Complete"))["status"] == "True"

        async def workers_gone() -> bool:
            return not any("worker" in name for name in await job.pods())

        await eventually(workers_gone)

        async def event_posted() -> bool:
            return "Succeeded" in await job.events()

        await eventually(event_posted)


async def test_process_runs_a_job_and_stops_cleanly(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet, tmp_path: Path
) -> None:
    job = Job(kube, namespace)
    health, metrics = fixed_ports(2)
    settings = {
        "SHOAL_HEALTH_PORT": str(health),
        "SHOAL_METRICS_PORT": str(metrics),
        "SHOAL_LOG_FORMAT": "json",
    }
    async with OperatorProcess(control_plane.kubeconfig, namespace, tmp_path, settings) as process:
        await job.apply()
        await job.runs()
        for host in ("127.0.0.1", *(["[::1]"] if socket.has_dualstack_ipv6() else [])):
            await fetched(f"http://{host}:{health}/healthz", "")
        text = await fetched(f"http://127.0.0.1:{metrics}/metrics", 'shoal_jobs{phase="Running"} 1.0')
        assert "shoal_leading 1.0" in text
        assert 'shoal_actions_total{action="CreatePod",result="done"} 3.0' in text
        code = await process.stop()
        log = process.log.read_text()
        assert code == 0, log
        lease = await kube.get(f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/shoal")
        assert lease["spec"].get("holderIdentity", "") == ""
        assert "Traceback" not in log
        lines = [json.loads(line) for line in log.splitlines()]
        assert any(line["message"] == "operator-0 acquired Lease shoal" for line in lines)
        every, about = {"time", "severity", "logger", "message"}, {"controller", "namespace", "name"}
        assert {frozenset(line) for line in lines} == {frozenset(every), frozenset(every | about)}
        [made] = (line for line in lines if "CreatePod digits-ps-0-0" in line["message"])
        assert [made[key] for key in ("controller", "namespace", "name")] == [
            "trainingjob",
            namespace,
            "digits",
        ]
    assert set(await job.pods()) == {"digits-ps-0-0", "digits-worker-0-0", "digits-worker-1-0"}


async def test_deleted_job_leaves_no_objects(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet
) -> None:
    job = Job(kube, namespace)
    async with running_operator(control_plane.kubeconfig, namespace) as operator:
        await job.apply()
        await job.runs()
        await kube.delete(job.path)

        async def no_objects() -> bool:
            names = []
            for path in ("api/v1/{}/pods", "api/v1/{}/services", "api/v1/{}/secrets"):
                listed = await kube.get("/" + path.format(f"namespaces/{namespace}"))
                names += [item["metadata"]["name"] for item in listed["items"]]
            budgets = await kube.get(f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets")
            return not names and not budgets["items"]

        await eventually(no_objects, COLLECTED_SECONDS)

        async def forgotten() -> bool:
            return not list(operator.state.jobs.all())

        await eventually(forgotten)
        with pytest.raises(ApiError, match="404"):
            await job.get()


@pytest.mark.nightly
async def test_process_serves_the_page(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet, tmp_path: Path
) -> None:
    [port] = fixed_ports(1)
    job = Job(kube, namespace)
    async with OperatorProcess(control_plane.kubeconfig, namespace, tmp_path, {"SHOAL_PAGE_PORT": str(port)}):
        await job.apply()
        await job.runs()
        url = f"http://127.0.0.1:{port}"
        await fetched(url, "<h1>")
        await fetched(f"{url}/api/overview", '"phase": "Running"')
        text = await fetched(f"{url}/api/jobs/{namespace}/digits", '"role": "worker"')
        assert "SHOAL_CONFIG" not in text
