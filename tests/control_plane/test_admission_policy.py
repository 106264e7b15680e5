"""The chart's admission policy on a real API server: it admits what the operator does, and no more."""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dev.cluster import ControlPlane
from dev.kube import Json, Kube
from dev.tools.build import ensure
from tests.control_plane.installed import admission_policy, install_account, user_of
from tests.control_plane.operators import Job


class As:
    """kubectl with the operator's identity."""

    def __init__(self, control_plane: ControlPlane, home: str) -> None:
        self._words = [
            ensure(("kubectl",))["kubectl"],
            "--kubeconfig",
            str(control_plane.kubeconfig),
            "--as",
            user_of(home, "shoal"),
        ]

    def create(self, manifest: Json) -> str:
        """Empty if it was admitted, else the refusal."""
        done = subprocess.run([*self._words, "create", "-f", "-"], input=json.dumps(manifest), capture_output=True,
                              text=True, check=False)  # fmt: skip
        return done.stderr if done.returncode else ""

    def patch(self, kind: str, name: str, namespace: str, change: Json) -> str:
        words = [*self._words, "-n", namespace, "patch", kind, name, "--type=merge", "-p", json.dumps(change)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return done.stderr if done.returncode else ""

    def delete(self, kind: str, name: str, namespace: str) -> str:
        words = [*self._words, "-n", namespace, "delete", kind, name, "--wait=false"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return done.stderr if done.returncode else ""


@pytest.fixture
async def operator(
    control_plane: ControlPlane, crds: None, kube: Kube, second_namespace: str
) -> AsyncIterator[As]:
    """The operator's account, installed into the second namespace, under the policy."""
    await install_account(control_plane, kube, second_namespace)
    labels = "admissionPolicy.namespaceLabels.example\\.com/jobs=shoal"
    async with admission_policy(control_plane, second_namespace, labels):
        yield As(control_plane, second_namespace)


def secret(namespace: str, owners: list[Json] | None = None, name: str = "some") -> Json:
    metadata: Json = {"name": name, "namespace": namespace, **({"ownerReferences": owners} if owners else {})}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata}


async def test_only_objects_of_training_jobs(
    operator: As, kube: Kube, namespace: str, second_namespace: str
) -> None:
    await kube.patch(
        f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": {"example.com/jobs": "shoal"}}}
    )
    job = await Job(kube, namespace).apply()
    owner: dict[str, Any] = {
        "apiVersion": job["apiVersion"], "kind": "TrainingJob", "name": "digits",
        "uid": job["metadata"]["uid"], "controller": True,
    }  # fmt: skip
    assert operator.create(secret(namespace, [owner])) == ""
    refused = "may only touch objects that a TrainingJob controls"
    assert refused in operator.create(secret(namespace, name="alone"))
    assert refused in operator.create(
        secret(namespace, [{**owner, "controller": False}], name="not-controlled")
    )
    stranger = {**owner, "apiVersion": "apps/v1", "kind": "ReplicaSet"}
    assert refused in operator.create(secret(namespace, [stranger], name="stranger"))
    assert "no business in this namespace" in operator.create(secret("kube-system", [owner], name="system"))

    invented = {**owner, "uid": "00000000-0000-0000-0000-000000000000"}
    assert "without the label example.com/jobs=shoal" in operator.create(secret("default", [invented]))

    own = secret(second_namespace, name="shoal-install-key")
    assert operator.create(own) == ""
    assert "no business" in operator.create(secret(second_namespace, [owner], name="other"))

    pods = f"/api/v1/namespaces/{namespace}/pods"
    container = {"name": "c", "image": "x"}
    await kube.create(pods, {"metadata": {"name": "foreign"}, "spec": {"containers": [container]}})
    assert refused in operator.delete("pod", "foreign", namespace)
    await kube.create(
        pods, {"metadata": {"name": "mine", "ownerReferences": [owner]}, "spec": {"containers": [container]}}
    )
    assert operator.delete("pod", "mine", namespace) == ""


async def test_only_profiles_of_its_own_are_deleted(operator: As, kube: Kube, namespace: str) -> None:
    await kube.patch(
        f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": {"example.com/jobs": "shoal"}}}
    )
    profiles = f"/apis/shoal.dev/v1alpha1/namespaces/{namespace}/speedprofiles"
    identity = {"apiVersion": "shoal.dev/v1alpha1", "kind": "SpeedProfile"}
    labels = {"app.kubernetes.io/managed-by": "shoal"}
    said = {"spec": {"convergence": {"r1": 100, "r2": 0, "r3": 1000, "r4": 0.2}}}
    await kube.create(profiles, {**identity, "metadata": {"name": "foreign"}})
    await kube.create(profiles, {**identity, "metadata": {"name": "said", "labels": labels}, **said})
    await kube.create(profiles, {**identity, "metadata": {"name": "own", "labels": labels}, "spec": {}})
    for name in ("foreign", "said"):
        assert "only delete SpeedProfiles that it made" in operator.delete("speedprofile", name, namespace)
    assert operator.delete("speedprofile", "own", namespace) == ""


async def test_no_object_of_somebody_else_is_taken_over(
    operator: As, kube: Kube, namespace: str, second_namespace: str
) -> None:
    """With an invented owner, the garbage collector would have deleted it."""
    await kube.patch(
        f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": {"example.com/jobs": "shoal"}}}
    )
    job = await Job(kube, namespace).apply()
    owner = {
        "apiVersion": job["apiVersion"], "kind": "TrainingJob", "name": "digits",
        "uid": job["metadata"]["uid"], "controller": True,
    }  # fmt: skip
    services = f"/api/v1/namespaces/{namespace}/services"
    body: Json = {"metadata": {"name": "foreign"}, "spec": {"ports": [{"port": 80}]}}
    await kube.create(services, body)
    await kube.create(services, {**body, "metadata": {"name": "own", "ownerReferences": [owner]}})
    selector = {"spec": {"selector": {"a": "b"}}}
    invented = {**owner, "uid": "00000000-0000-0000-0000-000000000000"}
    refused = "may only touch objects that a TrainingJob controls"
    for owners in ([invented], [owner]):
        taken = {"metadata": {"ownerReferences": owners}, **selector}
        assert refused in operator.patch("service", "foreign", namespace, taken)
    assert refused in operator.patch("service", "own", namespace, {"metadata": {"ownerReferences": None}})
    assert operator.patch("service", "own", namespace, selector) == ""
