"""examples/gitops and the chart on a real API server: what Argo CD and Flux would apply, compare and leave alone.

Both apply on the server's side with a field manager of their own. Argo CD compares the object with the result of a dry
run, without what `ignoreDifferences` names; with RespectIgnoreDifferences it does not apply these fields either.
"""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from dev.cluster import ControlPlane
from dev.kube import Json, Kube
from dev.paths import ROOT
from tests.chart.rendered import render
from tests.control_plane.operators import Job

FOLDER = ROOT / "examples" / "gitops"


@pytest.fixture
def rendered(control_plane: ControlPlane, namespace: str) -> dict[str, Json]:
    """The objects by kind, in the namespace of the test."""
    text = control_plane.kubectl("kustomize", str(FOLDER))
    found = {each["kind"]: each for each in yaml.safe_load_all(text)}
    for each in found.values():
        assert each["metadata"]["namespace"] == "training"
        each["metadata"]["namespace"] = namespace
    return found


def server_side(plane: ControlPlane, manifest: Json, manager: str, *more: str) -> Json:
    words = [
        "apply",
        "--server-side",
        "--force-conflicts",
        f"--field-manager={manager}",
        "-o",
        "json",
        "-f",
        "-",
    ]
    return dict(json.loads(plane.kubectl(*words, *more, stdin=json.dumps(manifest))))


def without(manifest: Json, pointers: list[str]) -> Json:
    """The manifest without these fields."""
    found = copy.deepcopy(manifest)
    for pointer in pointers:
        *path, last = pointer.strip("/").split("/")
        part: Any = found
        for name in path:
            part = part.get(name, {})
        part.pop(last, None)
    return found


async def by_hand(plane: ControlPlane, job: Job) -> None:
    """Somebody scales the job and suspends it."""
    plane.kubectl("-n", job.namespace, "scale", "trainingjob", job.name, "--replicas=9")
    plane.kubectl(
        "-n", job.namespace, "patch", "trainingjob", job.name, "--type=merge", '-p={"spec":{"suspend":true}}'
    )


async def test_the_job_names_its_code(
    crds: None, control_plane: ControlPlane, rendered: dict[str, Json]
) -> None:
    job, code = rendered["TrainingJob"], rendered["ConfigMap"]
    assert job["spec"]["training"]["code"]["configMap"] == code["metadata"]["name"] != "quickstart-code"
    assert code["data"]["quickstart.py"] == (ROOT / "examples/quickstart/quickstart.py").read_text()
    claim = rendered["PersistentVolumeClaim"]["metadata"]["name"]
    assert job["spec"]["storage"] == {"volumeClaim": {"name": claim}, "run": "main"}
    for each in rendered.values():
        server_side(control_plane, each, "test")
    edited = copy.deepcopy(job)
    edited["spec"]["training"]["code"]["configMap"] = "quickstart-code-edited"
    with pytest.raises(subprocess.CalledProcessError) as refused:
        server_side(control_plane, edited, "test")
    assert "spec.training.code: Invalid value: code is immutable" in refused.value.stderr


def test_no_controller_deletes_the_claim_that_outlives_its_runs() -> None:
    """Both prune what has left the repository: with the claim its snapshots and models would go."""
    claim = yaml.safe_load((FOLDER / "claim.yaml").read_text())
    assert claim["metadata"]["annotations"] == {
        "argocd.argoproj.io/sync-options": "Prune=false,Delete=false",
        "kustomize.toolkit.fluxcd.io/prune": "disabled",
    }


async def test_argo_cd_sees_no_difference_after_a_job_was_scaled_by_hand(
    crds: None, control_plane: ControlPlane, kube: Kube, namespace: str, rendered: dict[str, Json]
) -> None:
    application = yaml.safe_load((FOLDER / "argocd.yaml").read_text())
    [ignored] = application["spec"]["ignoreDifferences"]
    assert (ignored["group"], ignored["kind"]) == ("shoal.dev", "TrainingJob")
    pointers = ignored["jsonPointers"]
    desired = rendered["TrainingJob"]
    job = Job(kube, namespace, desired["metadata"]["name"])
    server_side(control_plane, desired, "argocd-controller")
    await by_hand(control_plane, job)

    live = (await job.get())["spec"]
    predicted = server_side(control_plane, desired, "argocd-controller", "--dry-run=server")["spec"]
    assert live != predicted, "the test would say nothing"
    spec = [pointer.removeprefix("/spec") for pointer in pointers]
    assert without(live, spec) == without(predicted, spec)

    server_side(control_plane, without(desired, pointers), "argocd-controller")
    after = (await job.get())["spec"]
    assert (after["workers"]["replicas"], after["suspend"]) == (9, True)


async def test_flux_resets_only_what_the_repository_says(
    crds: None, control_plane: ControlPlane, kube: Kube, namespace: str, rendered: dict[str, Json]
) -> None:
    desired = rendered["TrainingJob"]
    job = Job(kube, namespace, desired["metadata"]["name"])
    server_side(control_plane, desired, "kustomize-controller")
    await by_hand(control_plane, job)
    server_side(control_plane, desired, "kustomize-controller")
    after = (await job.get())["spec"]
    replicas = desired["spec"]["workers"]["replicas"]
    assert (after["workers"]["replicas"], after["suspend"]) == (replicas, True)


SCOPED = ("scope.namespace={0}", "scope.pools=false", "scope.nodes=false", "installKey.existingSecret=key")
MORE = (
    *("pools.enabled=true", "page.enabled=true", "kueue.enabled=true", "admissionPolicy.enabled=true"),
    *(
        "networkPolicy.enabled=true",
        "networkPolicy.egress.enabled=true",
        "networkPolicy.jobNamespaces={{{0}}}",
    ),
    *("pools.bufferNamespaces={{{0}}}", "metrics.dashboard.enabled=true", "trainer.workerGpuImage=x/gpu"),
)


@pytest.mark.parametrize("values", [(), SCOPED, MORE], ids=["default", "scoped", "more"])
def test_all_that_the_chart_renders_is_in_what_the_api_server_keeps(
    crds: None, control_plane: ControlPlane, namespace: str, values: tuple[str, ...]
) -> None:
    """What it drops, such as an empty value of a variable, Argo CD would call out of sync for ever."""
    sets = (each.format(namespace) for each in values)
    desired = [
        each
        for each in render(control_plane.tools.folder, *sets, namespace=namespace, crds=True)
        if "helm.sh/hook" not in each["metadata"].get("annotations", {})
    ]
    words = ("apply", "--server-side", "--force-conflicts", "--dry-run=server", "-o", "json", "-f", "-")
    kept = json.loads(control_plane.kubectl(*words, stdin=yaml.safe_dump_all(desired)))["items"]
    assert len(kept) == len(desired) > 10
    assert [each for pair in zip(desired, kept, strict=True) for each in dropped(*pair)] == []


def dropped(desired: Any, kept: Any, path: str = "") -> Iterator[str]:
    """The leaves that are not as they were."""
    if isinstance(desired, dict) and desired and isinstance(kept, dict):
        for name, each in desired.items():
            yield from dropped(each, kept.get(name), f"{path}.{name}")
    elif isinstance(desired, list) and isinstance(kept, list) and len(desired) == len(kept):
        for number, (each, there) in enumerate(zip(desired, kept, strict=True)):
            yield from dropped(each, there, f"{path}[{number}]")
    elif desired != kept:
        yield f"{path}: {desired!r} is {kept!r}"
