"""The chart's admission policy on a real API server: it admits what the operator does, and no more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from dev.cluster import ControlPlane
from dev.kube import MERGE, Json, Kube
from tests.control_plane.installed import admission_policy, install_account, user_of
from tests.control_plane.operators import Job

CONTAINERS = {"containers": [{"name": "c", "image": "x"}]}
KINDS: dict[str, Json] = {
    "/api/v1/namespaces/{}/pods": {"spec": CONTAINERS},
    "/api/v1/namespaces/{}/services": {"spec": {"ports": [{"port": 80}]}},
    "/api/v1/namespaces/{}/secrets": {},
    "/apis/policy/v1/namespaces/{}/poddisruptionbudgets": {"spec": {"selector": {}}},
}
"""Where each kind is, and what it needs. That there are no others is tested on the rendered policy."""
SECRETS = next(path for path in KINDS if path.endswith("secrets"))
NOT_ITS = "may only touch objects that a TrainingJob controls"
NOT_HERE = "no business in this namespace"


@dataclass
class As:
    """The API server with the operator's identity. What it admits is not done."""

    kube: Kube
    user: str

    async def create(self, path: str, body: Json) -> str:
        """Empty if it was admitted, else the refusal."""
        return await self._ask("POST", path, json=body)

    async def patch(self, path: str, change: Json) -> str:
        return await self._ask("PATCH", path, json=change, headers={"Content-Type": MERGE})

    async def delete(self, path: str) -> str:
        return await self._ask("DELETE", path)

    async def _ask(self, verb: str, path: str, headers: dict[str, str] | None = None, **body: Any) -> str:
        headers = {"Impersonate-User": self.user, **(headers or {})}
        async with self.kube.session.request(
            verb, path, params={"dryRun": "All"}, headers=headers, **body
        ) as answer:
            return "" if answer.ok else str((await answer.json())["message"])


@pytest.fixture
async def operator(
    control_plane: ControlPlane, crds: None, kube: Kube, second_namespace: str
) -> AsyncIterator[As]:
    """The operator's account, installed into the second namespace, under the policy alone: roles refuse it nothing."""
    await install_account(control_plane, kube, second_namespace)
    user = user_of(second_namespace, "shoal")
    bindings = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
    name = f"all-{second_namespace}"
    subject = {"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}
    role = {"kind": "ClusterRole", "name": "cluster-admin", "apiGroup": "rbac.authorization.k8s.io"}
    await kube.create(bindings, {"metadata": {"name": name}, "roleRef": role, "subjects": [subject]})
    labels = "admissionPolicy.namespaceLabels.example\\.com/jobs=shoal"
    async with admission_policy(control_plane, second_namespace, labels):
        yield As(kube, user)
    await kube.delete(f"{bindings}/{name}")


@pytest.fixture
async def owner(kube: Kube, crds: None, namespace: str) -> Json:
    """The owner reference of a job, in a namespace with the label."""
    labels = {"metadata": {"labels": {"example.com/jobs": "shoal"}}}
    await kube.patch(f"/api/v1/namespaces/{namespace}", labels)
    job = await Job(kube, namespace).apply()
    uid = job["metadata"]["uid"]
    return {
        "apiVersion": job["apiVersion"],
        "kind": "TrainingJob",
        "name": "digits",
        "uid": uid,
        "controller": True,
    }


def some(name: str, *owners: Json, of: str = SECRETS, **more: Any) -> Json:
    return {**KINDS[of], "metadata": {"name": name, "ownerReferences": list(owners)}, **more}


async def test_only_objects_of_training_jobs(operator: As, owner: Json, kube: Kube, namespace: str) -> None:
    """With an invented owner, the garbage collector would have deleted what is somebody else's."""
    marked: Json = {"labels": {"a": "b"}}
    for kind in KINDS:
        path = kind.format(namespace)
        assert await operator.create(path, some("own", owner, of=kind)) == ""
        assert NOT_ITS in await operator.create(path, some("foreign", of=kind))
        await kube.create(path, some("foreign", of=kind))
        await kube.create(path, some("own", owner, of=kind))
        for owners in ([], [owner], [{**owner, "uid": "00000000-0000-0000-0000-000000000000"}]):
            taken = {"metadata": {**marked, "ownerReferences": owners}}
            assert NOT_ITS in await operator.patch(f"{path}/foreign", taken)
        assert NOT_ITS in await operator.patch(f"{path}/own", {"metadata": {"ownerReferences": None}})
        assert NOT_ITS in await operator.delete(f"{path}/foreign")
        assert await operator.patch(f"{path}/own", {"metadata": marked}) == ""
        assert await operator.delete(f"{path}/own") == ""
    for wrong in ({"controller": False}, {"controller": None}, {"kind": "ReplicaSet"}, {"apiVersion": "apps/v1"},
                  {"apiVersion": "shoal.developers.example/v1"}):  # fmt: skip
        given = {key: value for key, value in {**owner, **wrong}.items() if value is not None}
        assert NOT_ITS in await operator.create(SECRETS.format(namespace), some("some", given)), wrong


async def test_only_in_namespaces_of_jobs(
    operator: As, owner: Json, kube: Kube, namespace: str, second_namespace: str
) -> None:
    """In its own it makes the install key, and does not change it."""
    for closed in ("kube-system", "kube-public", "kube-node-lease", second_namespace):
        assert NOT_HERE in await operator.create(SECRETS.format(closed), some("some", owner)), closed
    refused = await operator.create(SECRETS.format("default"), some("some", owner))
    assert "without the label example.com/jobs=shoal" in refused
    key = some("shoal-install-key")
    assert await operator.create(SECRETS.format(second_namespace), key) == ""
    assert NOT_ITS in await operator.create(SECRETS.format(namespace), key)
    await kube.create(SECRETS.format(second_namespace), key)
    path = f"{SECRETS.format(second_namespace)}/shoal-install-key"
    assert NOT_HERE in await operator.patch(path, {"metadata": {"labels": {"a": "b"}}})
    assert NOT_HERE in await operator.delete(path)


ITS_OWN = {"app.kubernetes.io/managed-by": "shoal"}
SAID: dict[str, Json] = {
    "model": {"model": {"flopsPerSample": 1e6, "parameters": 1000, "tensors": 4}},
    "rows": {"rows": [{"accelerator": "T4", "batchSize": 8, "stepSeconds": 0.1}]},
    "convergence": {"convergence": {"r1": 100, "r2": 0, "r3": 1000, "r4": 0.2}},
}


async def test_only_profiles_of_its_own_are_deleted(
    operator: As, owner: Json, kube: Kube, namespace: str
) -> None:
    """Not those that somebody made, or wrote something in."""
    path = f"/apis/shoal.dev/v1alpha1/namespaces/{namespace}/speedprofiles"

    async def refusal(name: str, spec: Json, **labels: str) -> str:
        identity = {"apiVersion": "shoal.dev/v1alpha1", "kind": "SpeedProfile"}
        await kube.create(path, {**identity, "metadata": {"name": name, "labels": labels}, "spec": spec})
        return await operator.delete(f"{path}/{name}")

    assert await refusal("own", {}, **ITS_OWN) == ""
    refused = "only delete SpeedProfiles that it made"
    assert refused in await refusal("unlabelled", {})
    assert refused in await refusal("foreign", {}, **dict.fromkeys(ITS_OWN, "helm"))
    for what, spec in SAID.items():
        assert refused in await refusal(what, spec, **ITS_OWN), what
