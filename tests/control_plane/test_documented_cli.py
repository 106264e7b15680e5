"""docs/cli.md and docs/keras.md: their commands run as they stand and print what is shown, with the pods played."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator, Iterator

import pytest
import s3fs
import yaml
from moto.server import ThreadedMotoServer

from dev.cluster import ControlPlane
from dev.kube import Json, Kube
from dev.paths import ROOT
from shoal_trainer.contract import Outcome, Phase, StatusReport, TerminationMessage
from tests.control_plane.operators import FakeCoordinator, Job, eventually, running_operator
from tests.control_plane.terminal import Terminal
from tests.doubles.fake_kubelet import FakeKubelet
from tests.unit.docs.pages import alike, block

VOLUMES = "/api/v1/persistentvolumes"


@pytest.fixture
async def nodes(fake_kubelet: FakeKubelet) -> FakeKubelet:
    """A worker has a node of its own, else the scheduler chooses how many share one."""
    await fake_kubelet.add_node("safe-1")
    for number in range(1, 5):
        await fake_kubelet.add_node(f"spot-{number}", spot=True, capacity={"pods": "1"})
    return fake_kubelet


@pytest.fixture
async def claim(kube: Kube, namespace: str) -> AsyncIterator[str]:
    """That of the example, with a volume."""
    documents = yaml.safe_load_all((ROOT / "examples/digits.yaml").read_text())
    made: Json = next(each for each in documents if each["kind"] == "PersistentVolumeClaim")
    name = made["metadata"]["name"]
    made["spec"]["storageClassName"] = ""
    volume = {
        "metadata": {"name": f"{name}-{namespace}"},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": made["spec"]["accessModes"],
            "hostPath": {"path": "/nowhere"},
            "claimRef": {"namespace": namespace, "name": name},
        },
    }
    await kube.create(VOLUMES, volume)
    await kube.create(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims", made)
    yield name
    await kube.delete(f"{VOLUMES}/{name}-{namespace}")


def ordered(text: str) -> str:
    """What happened in the same second is told in any order: by its words, at the end."""
    return "".join(sorted(text.splitlines(keepends=True), key=lambda line: line.partition(" ago ")[2]))


async def test_a_job_that_lost_a_worker(
    control_plane: ControlPlane, kube: Kube, namespace: str, nodes: FakeKubelet, claim: str,
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(terminal.folder / "examples/digits")
    submit, *looks = block("docs/cli.md", "shoal submit digits.py:job --storage claim:digits-runs").commands
    job, coordinator = Job(kube, namespace), FakeCoordinator()
    async with running_operator(control_plane.kubeconfig, namespace, coordinator):
        assert await terminal.run(submit.line) == submit.shown
        await job.runs(2)
        uid = (await job.get())["metadata"]["uid"]
        coordinator.reports[uid] = StatusReport(
            job_uid=uid, phase=Phase.TRAINING, step=1204, epoch=3, loss=0.2113, samples_per_second=856.2,
            progress_percent=62, remaining_seconds=100,
        )  # fmt: skip
        pods = await job.pods()
        await nodes.notice(pods["digits-worker-1-0"]["spec"]["nodeName"])

        async def replaced() -> bool:
            status = await job.status()
            there = {(slot["index"], slot.get("incarnation", 0)) for slot in status["slots"]}
            told = "samplesPerSecond" in status.get("training", {})
            return (1, 1) in there and (1, 0) not in there and status["workers"]["ready"] == 2 and told

        await eventually(replaced, what="worker 1-1 runs and the report is told")
        for command in looks:
            printed = await terminal.run(command.line)
            assert re.fullmatch(alike(ordered(command.shown)), ordered(printed)), f"{command.line}\n{printed}"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[s3fs.S3FileSystem]:
    """An S3 server on loopback, with `s3://bucket`."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    s3fs.S3FileSystem.clear_instance_cache()
    files = s3fs.S3FileSystem()
    files.mkdir("bucket")
    yield files
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()


async def test_a_file_is_submitted_followed_and_its_model_fetched(
    control_plane: ControlPlane, kube: Kube, namespace: str, nodes: FakeKubelet, bucket: s3fs.S3FileSystem,
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(terminal.folder / "examples/digits")
    submit, model = block("docs/keras.md", "shoal submit").commands
    async with running_operator(control_plane.kubeconfig, namespace):
        following = asyncio.create_task(terminal.run(submit.line))
        jobs = f"/apis/shoal.dev/v1alpha1/namespaces/{namespace}/trainingjobs"

        async def submitted() -> str | None:
            return next((each["metadata"]["name"] for each in (await kube.get(jobs))["items"]), None)

        job = Job(kube, namespace, await eventually(submitted))
        await job.runs(4)
        uri = f"{(await job.get())['spec']['storage']['uri']}/{namespace}/{job.name}/model"
        files = [{"name": "model.keras", "sha256": hashlib.sha256(b"trained").hexdigest()}]
        exported = json.dumps({"files": files, "outcome": {"modelDigest": "d"}}).encode()
        for name, content in (("model.keras", b"trained"), ("manifest.json", exported)):
            await asyncio.to_thread(bucket.pipe_file, f"{uri}/{name}", content)
        ended = TerminationMessage(outcome=Outcome.SUCCEEDED, message="done", model_uri=uri, model_digest="d")
        server = next(name for name in await job.pods() if "-ps-0-" in name)
        await nodes.succeed_pod(namespace, server, message=ended.to_json())
        assert "Succeeded" in await following
        assert model.line.split()[2] == "JOB"
        await terminal.run(model.line.replace("JOB", job.name))
    assert (terminal.folder / "examples/digits/model/model.keras").read_bytes() == b"trained"
