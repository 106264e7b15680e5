"""The operator's account with the permissions of the chart, as `helm install` would make it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import yaml

from dev.cluster import ControlPlane
from dev.kube import Json, Kube
from tests.chart.rendered import render
from tests.control_plane.operators import eventually

KINDS = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
POLICY = "ValidatingAdmissionPolicy"


def rendered(plane: ControlPlane, namespace: str, *values: str) -> list[Json]:
    """The chart's manifests, of a release into this namespace."""
    return render(plane.tools.folder, *values, namespace=namespace)


async def install_account(plane: ControlPlane, kube: Kube, namespace: str, *values: str) -> list[Json]:
    """The account with its roles, in force; returns their manifests."""
    objects = [o for o in rendered(plane, namespace, *values) if o["kind"] in KINDS]
    for each in objects:  # one installation per test: cluster-scoped names must differ
        if each["kind"].startswith("Cluster"):
            each["metadata"]["name"] += f"-{namespace}"
            if "roleRef" in each:
                each["roleRef"]["name"] += f"-{namespace}"
    plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))
    roles = [o for o in objects if o["kind"] in {"Role", "ClusterRole"}]
    await _permissions_in_force(kube, namespace, account_of(objects), roles)
    return objects


@contextlib.asynccontextmanager
async def admission_policy(plane: ControlPlane, namespace: str, *values: str) -> AsyncIterator[None]:
    """The chart's admission policy, in force within the block. The account is installed already."""
    objects = rendered(plane, namespace, "admissionPolicy.enabled=true", *values)
    text = yaml.safe_dump_all(each for each in objects if each["kind"].startswith(POLICY))
    user = user_of(namespace, account_of(objects))
    probe = json.dumps({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "probe"}})
    words = ("--as", user, "-n", namespace, "create", "--dry-run=server", "-f", "-")

    async def in_force() -> bool:
        try:
            plane.kubectl(*words, stdin=probe)
        except subprocess.CalledProcessError as error:
            return POLICY in error.stderr
        return False

    plane.kubectl("apply", "-f", "-", stdin=text)
    try:
        await eventually(in_force, what="the admission policy")
        yield
    finally:
        plane.kubectl("delete", "-f", "-", stdin=text)


async def health_check(
    plane: ControlPlane, kubeconfig: Path, namespace: str, *values: str, options: tuple[str, ...] = ()
) -> tuple[int, str]:
    """Exit code and words of what `helm test` runs, with the account of this kubeconfig; `options` are added."""
    [container] = next(o for o in rendered(plane, namespace, *values) if o["kind"] == "Pod")["spec"][
        "containers"
    ]
    checked = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "shoal.process.main", *container["command"][1:], *options,
        env={**os.environ, "KUBECONFIG": str(kubeconfig), "POD_NAMESPACE": namespace},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await checked.communicate()
    assert checked.returncode is not None
    return checked.returncode, said.decode()


def account_of(objects: list[Json]) -> str:
    """The name of the ServiceAccount."""
    return str(next(o["metadata"]["name"] for o in objects if o["kind"] == "ServiceAccount"))


async def as_service_account(
    plane: ControlPlane, kube: Kube, namespace: str, folder: Path, *values: str
) -> Path:
    """A kubeconfig with the operator's permissions from the chart."""
    account = account_of(await install_account(plane, kube, namespace, *values))
    answer = await kube.create(
        f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token",
        {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}},
    )
    config = yaml.safe_load(plane.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": answer["status"]["token"]}
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


def user_of(namespace: str, account: str) -> str:
    """A ServiceAccount as the API server's user."""
    return f"system:serviceaccount:{namespace}:{account}"


async def _permissions_in_force(kube: Kube, namespace: str, account: str, roles: list[Json]) -> None:
    """Wait until the API server's authorizer has seen the new roles and bindings."""
    for role in roles:
        rule = role["rules"][0]
        attributes = {
            "verb": rule["verbs"][0],
            "group": rule["apiGroups"][0],
            "resource": rule["resources"][0],
            "namespace": role["metadata"].get("namespace", namespace),
        }
        user = user_of(namespace, account)
        question = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": user, "groups": ["system:authenticated"], "resourceAttributes": attributes},
        }

        async def allowed(question: Json = question) -> bool:
            answer = await kube.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", question)
            return bool(answer["status"]["allowed"])

        await eventually(allowed, what=f"{user} may {attributes}")
