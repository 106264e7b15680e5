"""An upgrade under running jobs, and the way back: chart, CRDs and operator of before and of now. Nothing restarts.

There is no release yet, so "previous" is a commit: code, chart and CRDs as they were. At a release, name its tag.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import shlex
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dev.audit import writes
from dev.cluster import ControlPlane
from dev.kube import Json, Kube
from dev.paths import ROOT
from dev.publish import upgrade_command
from dev.tools.build import ensure
from tests.chart.rendered import IMAGES_SET
from tests.control_plane.installed import health_check
from tests.control_plane.operators import Job, OperatorProcess, eventually, fixed_ports
from tests.doubles.fake_kubelet import FakeKubelet

PREVIOUS = "ecec2410b0ee1bdce34ecc84385fadf660c07ccf"
BY_HAND = ("--take-ownership", "--force-conflicts")
"""What docs/operating.md adds to `helm install` where the CRDs were applied by hand before."""
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


@pytest.fixture
def crds_of_now_at_the_end(control_plane: ControlPlane, crds: None) -> Iterator[None]:
    """The tests that follow on this control plane find the CRDs of this checkout."""
    yield
    control_plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "crds"))


def helm(plane: ControlPlane, namespace: str, *words: str) -> str:
    """What helm prints; it must succeed."""
    done = run_helm(plane, namespace, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def documented_upgrade() -> list[str]:
    """The `helm upgrade` that `make images` prints, of the chart in this checkout; the namespace is a test's own."""
    words = shlex.split(upgrade_command("r.io/t", "2").replace("\\\n", ""))
    at = words.index("--namespace")
    return [*words[1:3], str(ROOT / words[3]), *words[4:at], *words[at + 2 :]]


def run_helm(plane: ControlPlane, namespace: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [ensure(("helm",))["helm"], "--kubeconfig", str(plane.kubeconfig), "--namespace", namespace]
    return subprocess.run([*command, *words], capture_output=True, text=True, check=False)


def has_newest_rules(plane: ControlPlane) -> bool:
    """Whether the CRD of TrainingJobs is that of this checkout, as far as its spec goes."""
    file = yaml.safe_load((ROOT / "crds" / "shoal.dev_trainingjobs.yaml").read_text())
    served = yaml.safe_load(plane.kubectl("get", "crd", file["metadata"]["name"], "-o", "yaml"))
    ours, theirs = (without_empty(each["spec"]["versions"][0]["schema"]) for each in (file, served))
    return bool(ours == theirs)


def without_empty(value: Any) -> Any:
    """The API server drops `properties: {}`."""
    if isinstance(value, dict):
        return {key: without_empty(each) for key, each in value.items() if key != "properties" or each}
    return [without_empty(each) for each in value] if isinstance(value, list) else value


def identity(pod: Json) -> tuple[str, list[int]]:
    """A pod that was restarted or replaced has another one."""
    statuses = pod["status"].get("containerStatuses", [])
    return pod["metadata"]["uid"], [each.get("restartCount", 0) for each in statuses]


async def scaled(plane: ControlPlane, job: Job, workers: int) -> None:
    """Scale, and wait for the workers."""
    patch = json.dumps({"spec": {"replicas": workers}})
    words = ["patch", "etj", job.name, "--type=merge", "--subresource=scale", f"--patch={patch}"]
    await asyncio.to_thread(plane.kubectl, "-n", job.namespace, *words)
    await job.runs(workers)


@pytest.mark.nightly
async def test_an_upgrade_and_a_rollback_restart_nothing(
    control_plane: ControlPlane,
    crds_of_now_at_the_end: None,
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
    }
    sets = [f"--set={name}={value}" for name, value in values.items()]
    install = ["install", "shoal", str(previous / "charts" / "shoal"), *sets]
    refused = run_helm(control_plane, namespace, *install)  # the CRDs are there, applied by hand
    assert "invalid ownership metadata" in refused.stderr
    helm(control_plane, namespace, *install, *BY_HAND)
    assert not has_newest_rules(control_plane)

    job = Job(kube, namespace)
    older = os.pathsep.join(str(previous / each) for each in ("operator", "trainer_image"))

    def old_operator(name: str) -> OperatorProcess:
        return OperatorProcess(control_plane.kubeconfig, namespace, tmp_path / name, {"PYTHONPATH": older})

    async with old_operator("old") as old:
        await job.apply()
        await job.runs()
        before = {name: identity(pod) for name, pod in (await job.pods()).items()}
        images = (await job.status())["images"]

        helm(control_plane, namespace, *documented_upgrade())
        assert has_newest_rules(control_plane)
        kept = json.loads(helm(control_plane, namespace, "get", "values", "shoal", "--output=json"))
        assert kept["scope"]["namespace"] == namespace, "what was set stays"
        assert kept["image"]["repository"] == "r.io/t/shoal-operator"
        assert await old.stop() == 0

    [port] = fixed_ports(1)
    settings = {
        "POD_NAME": "operator-1",
        "SHOAL_METRICS_PORT": str(port),
        "SHOAL_IMAGE_WORKER": "shoal/worker:new",
        "SHOAL_IMAGE_WORKER_GPU": "",  # a job that has none would take a new one, which it may have been told to lack
    }
    async with OperatorProcess(control_plane.kubeconfig, namespace, tmp_path / "new", settings):
        await scaled(control_plane, job, 3)
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
        scope, metrics = f"scope.namespace={namespace}", f"--metrics=http://127.0.0.1:{port}/metrics"
        code, said = await health_check(
            control_plane, control_plane.kubeconfig, namespace, scope, options=(metrics,)
        )
        assert code == 0, said
        await job.runs(3)

    helm(control_plane, namespace, "rollback", "shoal", "1")
    assert not has_newest_rules(control_plane)
    before = {name: identity(pod) for name, pod in (await job.pods()).items()}
    async with old_operator("older"):
        await scaled(control_plane, job, 4)
        after = await job.pods()
        assert {name: identity(after[name]) for name in before} == before
        status = await job.status()
        assert status["images"] == images
        assert status["restarts"]["disruptions"] == status["restarts"]["failures"] == 0


@pytest.mark.nightly
async def test_what_the_builtin_roles_may_do_is_taken_from_them_by_an_upgrade(
    control_plane: ControlPlane, crds_of_now_at_the_end: None, kube: Kube, namespace: str
) -> None:
    """The users' roles are kept on uninstall, so Helm would leave them as they were."""

    async def may_create() -> bool:
        role = await kube.get("/apis/rbac.authorization.k8s.io/v1/clusterroles/edit")
        return any(
            "trainingjobs" in each["resources"] and "create" in each["verbs"] for each in role["rules"]
        )

    chart = str(ROOT / "charts" / "shoal")
    images = [f"--set={each}" for each in IMAGES_SET]
    helm(
        control_plane,
        namespace,
        "install",
        "shoal",
        chart,
        *images,
        f"--set=scope.namespace={namespace}",
        *BY_HAND,
    )
    await eventually(may_create, what="TrainingJobs in the role edit")
    off = "--set=rbac.aggregateRoles=false"
    helm(control_plane, namespace, "upgrade", "shoal", chart, "--reuse-values", off)

    async def may_not() -> bool:
        return not await may_create()

    await eventually(may_not, what="no TrainingJobs in the role edit")
