"""`shoal.client` and its commands on a real API server: submit, list, scale, suspend, resume, wait, delete."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dev.cluster import ControlPlane
from dev.kube import Kube
from shoal.api.crd import KINDS as MODELS
from shoal.api.crd import published
from shoal.cli import main
from shoal.client import Client, install_key
from shoal.client.doctor import read
from shoal.errors import NotFound, Refused, UsageError
from shoal.manifests.names import secret_name_of
from shoal_trainer.contract import Outcome, TerminationMessage, job_key
from tests.control_plane.operators import COLLECTED_SECONDS, Job, eventually, running_operator
from tests.doubles.fake_kubelet import FakeKubelet
from tests.unit.policy import build

Shoal = Callable[..., Any]


@pytest.fixture
async def nodes(fake_kubelet: FakeKubelet) -> FakeKubelet:
    await fake_kubelet.add_node("safe-1")
    for name in ("spot-1", "spot-2", "spot-3"):
        await fake_kubelet.add_node(name, spot=True)
    return fake_kubelet


@pytest.fixture
def client(control_plane: ControlPlane, crds: None, namespace: str) -> Client:
    return Client(namespace, kubeconfig=str(control_plane.kubeconfig))


@pytest.fixture
def shoal(control_plane: ControlPlane, crds: None, namespace: str) -> Shoal:
    """Run a command of `shoal` in a thread, as the event loop plays the cluster."""

    async def run(*words: str, code: int = 0) -> str:
        options = ["-n", namespace, "--kubeconfig", str(control_plane.kubeconfig)]
        result: Result = await asyncio.to_thread(CliRunner().invoke, main, [words[0], *options, *words[1:]])
        assert result.exit_code == code, result.output
        return result.output

    return run


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "digits.py"
    file.write_text("job = None\n")
    return f"{file}:job"


async def test_life_of_a_submitted_job(
    control_plane: ControlPlane, client: Client, kube: Kube, namespace: str, nodes: FakeKubelet, script: str
) -> None:
    async with running_operator(control_plane.kubeconfig, namespace):
        job = await asyncio.to_thread(
            client.submit, script, storage="ephemeral", workers=2, name="digits", args={"rate": 0.1}
        )
        await Job(kube, namespace).runs()
        pods = await Job(kube, namespace).pods()
        volumes = {each["name"]: each for each in pods["digits-worker-0-0"]["spec"]["volumes"]}
        name = volumes["shoal-code"]["configMap"]["name"]
        code = await kube.get(f"/api/v1/namespaces/{namespace}/configmaps/{name}")
        assert code["data"] == {"digits.py": "job = None\n"}
        assert [owner["name"] for owner in code["metadata"]["ownerReferences"]] == ["digits"]
        assert [each.name for each in await asyncio.to_thread(client.list)] == ["digits"]

        await asyncio.to_thread(job.scale, 3)
        await Job(kube, namespace).runs(3)
        await asyncio.to_thread(job.suspend)
        assert (await asyncio.to_thread(job.wait, "Suspended", timeout=60)).phase == "Suspended"
        await asyncio.to_thread(job.resume)
        assert (await asyncio.to_thread(job.wait, "Running", timeout=60)).phase == "Running"

        waiting = asyncio.create_task(asyncio.to_thread(job.wait, timeout=60))
        message = TerminationMessage(
            outcome=Outcome.SUCCEEDED, message="done", model_uri="s3://b/m", model_digest="d"
        )
        server = next(name for name in await Job(kube, namespace).pods() if "-ps-0-" in name)
        await nodes.succeed_pod(namespace, server, message=message.to_json())
        assert (await waiting).phase == "Succeeded"
        await asyncio.to_thread(job.delete)

        async def collected() -> bool:
            listed = await kube.get(f"/api/v1/namespaces/{namespace}/configmaps")
            return name not in [each["metadata"]["name"] for each in listed["items"]]

        await eventually(collected, COLLECTED_SECONDS, what="the code is deleted with its job")


@pytest.mark.nightly
async def test_commands(
    control_plane: ControlPlane, kube: Kube, namespace: str, nodes: FakeKubelet, shoal: Shoal, script: str
) -> None:
    async with running_operator(control_plane.kubeconfig, namespace):
        said = await shoal("submit", script, "--storage", "ephemeral", "--workers", "2", "--name", "digits")
        assert said == "job digits was created; shoal follow digits shows it\n"
        assert await shoal("wait", "digits", "--for", "Running", "--timeout", "60") == "Running\n"
        await Job(kube, namespace).runs()
        assert "digits  Running  2/2" in " ".join((await shoal("list")).split("\n")).replace("   ", "  ")
        [listed] = json.loads(await shoal("top", "--once", "-o", "json"))
        assert listed["metadata"]["name"] == "digits"
        story = await shoal("status", "digits")
        assert "worker 0-0 runs on spot-" in story
        assert "the job was created" in story
        assert "no report from parameter server 0" in await shoal("explain", "digits")
        await shoal("scale", "digits", "1")
        await Job(kube, namespace).runs(1)
        assert "kind: TrainingJob" in await shoal("list", "-o", "yaml") or "TrainingJob" in await shoal(
            "list", "-o", "json"
        )
        assert "is deleted" in await shoal("delete", "digits", "--yes")


async def test_a_name_that_is_not_there_lists_those_that_are(
    client: Client, shoal: Shoal, script: str
) -> None:
    await shoal("submit", script, "--storage", "ephemeral", "--name", "mine")
    with pytest.raises(NotFound, match=r"no job 'main': the namespace .* has mine"):
        await asyncio.to_thread(client.job, "main")
    assert "has mine" in await shoal("status", "main", code=2)


async def test_refusal_has_the_words_of_the_server_and_leaves_nothing(
    client: Client, kube: Kube, namespace: str, script: str
) -> None:
    with pytest.raises(Refused, match="lower replicas or raise maxReplicas"):
        await asyncio.to_thread(client.submit, script, storage="ephemeral", workers=5, max_workers=2)
    with pytest.raises(UsageError, match=r"spec\.training\.stopAfter: this metric is at most 1"):
        await asyncio.to_thread(client.submit, script, storage="ephemeral", until=("val_accuracy", 1.5))
    with pytest.raises(UsageError, match="worker: there is no such argument"):
        await asyncio.to_thread(client.submit, script, storage="ephemeral", worker=5)
    configmaps = await kube.get(f"/api/v1/namespaces/{namespace}/configmaps")
    assert [each for each in configmaps["items"] if each["metadata"]["name"] != "kube-root-ca.crt"] == []


async def test_a_dry_run_is_checked_by_the_api_server(
    shoal: Shoal, kube: Kube, namespace: str, script: str
) -> None:
    words = ("submit", script, "--storage", "ephemeral", "--dry-run", "--name", "digits")
    for wrong, says in (
        (["--until", "my_metric=0.1"], "mode is required for this metric"),
        (["--until", "val_accuracy=97"], "this metric is at most 1"),
        (["--run", "x"], "a run that is to be continued needs a storage"),
        (["--pool", "a", "--max-workers", "4", "--max-cost", "5USD"], "'5USD' is not a valid float"),
        (["--max-workers", "2", "--workers", "5"], "maxReplicas"),
    ):
        assert says in await shoal(*words, *wrong, code=2)
    assert "mode: Min" in await shoal(*words, "--until", "my_metric=0.1", "--mode", "min")
    await shoal("submit", script, "--storage", "ephemeral", "--name", "digits")
    assert "Not checked" not in await shoal(*words), (
        "a job of this name is there, and its manifest is printed"
    )
    assert "kind: PersistentVolumeClaim" in await shoal("init", script)
    jobs = await kube.get(f"/apis/shoal.dev/v1alpha1/namespaces/{namespace}/trainingjobs")
    assert [each["metadata"]["name"] for each in jobs["items"]] == ["digits"]


async def test_large_answers_are_compressed(
    client: Client, kube: Kube, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`shoal top` lists all jobs every two seconds."""
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    await kube.create(path, {"metadata": {"name": "large"}, "data": {"text": "a line of a job\n" * 20_000}})
    answers: list[Any] = []
    send = client.api._send

    def noted(*arguments: Any, **options: Any) -> Any:
        answers.append(send(*arguments, **options))
        return answers[-1]

    monkeypatch.setattr(client.api, "_send", noted)
    assert len((await asyncio.to_thread(client.api.get, f"{path}/large"))["data"]["text"]) == 320_000
    assert answers[0].response.headers["Content-Encoding"] == "gzip"
    assert int(answers[0].response.headers.get("Content-Length", 0)) < 32_000


async def test_accelerator_is_looked_up_in_the_capacity_pools(
    client: Client, kube: Kube, script: str
) -> None:
    with pytest.raises(UsageError, match="no CapacityPool has the accelerator L4"):
        await asyncio.to_thread(client.prepare, script, storage="ephemeral", accelerator="L4")
    pool = {
        "apiVersion": "shoal.dev/v1alpha1",
        "kind": "CapacityPool",
        "metadata": {"name": "client-l4"},
        "spec": {"accelerator": {"name": "L4", "count": 2}, "limits": {"nodes": 4}},
    }
    await kube.create("/apis/shoal.dev/v1alpha1/capacitypools", pool)
    try:
        made = await asyncio.to_thread(
            client.prepare, script, storage="ephemeral", accelerator="l4", image="r.io/worker-gpu:1"
        )
        workers = made.job["spec"]["workers"]
        assert workers["pools"] == ["client-l4"]
    finally:
        await kube.delete("/apis/shoal.dev/v1alpha1/capacitypools/client-l4")


async def test_doctor_finds_that_no_operator_is_installed(shoal: Shoal, client: Client) -> None:
    checks = {each["name"]: each for each in json.loads(await shoal("doctor", "-o", "json", code=1))}
    assert checks["kubernetes"]["state"] == "ok"
    assert checks["crds"]["state"] == "ok"
    schemas = (await asyncio.to_thread(read, client.api)).schemas
    assert schemas is not None
    assert {published(model) for model in MODELS} <= schemas.keys(), "so they were compared"
    assert checks["permissions"]["state"] == "ok"
    assert checks["operator"]["state"] == "broken"


async def test_without_a_cluster_the_exit_code_is_4(tmp_path: Path) -> None:
    result = await asyncio.to_thread(
        CliRunner().invoke, main, ["list", "--kubeconfig", str(tmp_path / "none")]
    )
    assert result.exit_code == 4
    assert "Make `kubectl get nodes` work" in result.output


def test_an_install_key_is_retired_when_no_pod_and_no_job_has_it(client: Client) -> None:
    """What the API server itself says of who wrote the Secret, and when."""
    namespace, old = client.namespace, b"o" * 32
    core, jobs = (
        f"/api/v1/namespaces/{namespace}",
        f"/apis/shoal.dev/v1alpha1/namespaces/{namespace}/trainingjobs",
    )

    def secret(name: str, key: bytes) -> None:
        data = {"key": base64.b64encode(key).decode()}
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": data}
        client.api.create(f"{core}/secrets", body)

    secret("shoal-install-key", old)
    labels = {"app.kubernetes.io/name": "shoal"}
    spec = {"containers": [{"name": "operator", "image": "x"}]}
    metadata = {"name": "shoal-a", "labels": labels}
    client.api.create(f"{core}/pods", {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    install_key.rotate(client.api, "shoal-install-key")
    with pytest.raises(Refused, match="shoal-a began before the rotation"):
        install_key.retire(client.api, "shoal-install-key")
    client.api.delete(f"{core}/pods/shoal-a")
    body = build.job_manifest()
    body["metadata"] = {"name": "runs"}
    uid = client.api.create(jobs, body)["metadata"]["uid"]
    secret(secret_name_of("runs", uid), job_key(old, uid, "1"))
    with pytest.raises(Refused, match=f"{namespace}/runs have the previous key"):
        install_key.retire(client.api, "shoal-install-key")
    client.api.delete(f"{jobs}/runs")
    install_key.retire(client.api, "shoal-install-key")
    assert client.api.get(f"{core}/secrets/shoal-install-key")["data"].keys() == {"key", "key-id"}
