"""An upgrade under running jobs: the previous chart, CRDs and operator, then those of this checkout. Nothing restarts.

There is no release yet, so "previous" is a commit: code, chart and CRDs as they were. At a release, name its tag.
"""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from dev.audit import writes
from dev.cluster import ControlPlane
from dev.fake_kubelet import FakeKubelet
from dev.kube import Json, Kube
from dev.paths import ROOT
from dev.tools.build import ensure
from tests.control_plane.operators import Job, OperatorProcess, free_ports

PREVIOUS = "ecec2410b0ee1bdce34ecc84385fadf660c07ccf"
PARTS = ("operator", "trainer_image", "charts", "crds")


@pytest.fixture
def previous(tmp_path: Path) -> Path:
    """The tree of the previous version."""
    done = subprocess.run(["git", "archive", PREVIOUS, *PARTS], cwd=ROOT, capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("the previous version is not in this clone's history")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(tmp_path / "previous", filter="data")
    return tmp_path / "previous"


def helm(plane: ControlPlane, namespace: str, verb: str, chart: Path, *more: str) -> None:
    words = [verb, "shoal", str(chart), "--namespace", namespace, *more]
    done = subprocess.run(
        [ensure(("helm",))["helm"], "--kubeconfig", str(plane.kubeconfig), *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def identity(pod: Json) -> tuple[str, list[int]]:
    """A pod that was restarted or replaced has another one."""
    statuses = pod["status"].get("containerStatuses", [])
    return pod["metadata"]["uid"], [each.get("restartCount", 0) for each in statuses]


@pytest.mark.timeout(180)
async def test_an_upgrade_restarts_nothing(
    control_plane: ControlPlane,
    crds: None,
    kube: Kube,
    namespace: str,
    fake_kubelet: FakeKubelet,
    previous: Path,
    tmp_path: Path,
) -> None:
    await fake_kubelet.add_node("safe-1")
    for name in ("spot-1", "spot-2", "spot-3"):
        await fake_kubelet.add_node(name, spot=True)
    values = {
        "image.repository": "r.io/operator",
        "trainer.psImage": "shoal/ps:test",
        "trainer.workerImage": "shoal/worker:test",
        "scope.namespace": namespace,
        "crds.install": "false",  # as in docs/install.md: they are applied by themselves, before
    }
    sets = [f"--set={name}={value}" for name, value in values.items()]
    control_plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(previous / "crds"))
    helm(control_plane, namespace, "install", previous / "charts" / "shoal", *sets)

    job = Job(kube, namespace)
    older = os.pathsep.join(str(previous / each) for each in ("operator", "trainer_image"))
    old = OperatorProcess(control_plane.kubeconfig, namespace, tmp_path / "old", PYTHONPATH=older)
    async with old:
        await job.apply()
        await job.runs()
        before = {name: identity(pod) for name, pod in (await job.pods()).items()}
        images = (await job.status())["images"]

        control_plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "crds"))
        helm(control_plane, namespace, "upgrade", ROOT / "charts" / "shoal", "--reuse-values")
        assert await old.stop() == 0

    [port] = free_ports(1)
    settings = {
        "POD_NAME": "operator-1",
        "SHOAL_METRICS_PORT": str(port),
        "SHOAL_IMAGE_WORKER": "shoal/worker:new",
    }
    async with OperatorProcess(control_plane.kubeconfig, namespace, tmp_path / "new", **settings):
        scale = {"spec": {"replicas": 3}}
        await asyncio.to_thread(
            control_plane.kubectl, "-n", namespace, "patch", "etj", job.name, "--type=merge", "--subresource=scale",
            f"--patch={scale}".replace("'", '"'),
        )  # fmt: skip
        await job.runs(3)
        after = await job.pods()
        assert {name: identity(after[name]) for name in before} == before
        status = await job.status()
        assert status["images"] == images, "a job keeps the images that it started with"
        assert status["restarts"]["disruptions"] == status["restarts"]["failures"] == 0
        deleted = [
            write.name
            for write in writes(control_plane.audit_log, namespace=namespace)
            if write.verb == "delete" and write.resource == "pods"
        ]
        assert [name for name in deleted if name.startswith(job.name)] == []
        checked = await asyncio.create_subprocess_exec(  # what `helm test` runs
            sys.executable, "-m", "shoal.process.main", "check", f"--namespace={namespace}", "--lease=shoal",
            f"--metrics=http://127.0.0.1:{port}/metrics",
            env={**os.environ, "KUBECONFIG": str(control_plane.kubeconfig), "POD_NAMESPACE": namespace},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        said, _ = await checked.communicate()
        assert checked.returncode == 0, said.decode()
