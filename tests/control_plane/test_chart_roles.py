"""The operator with exactly the chart's permissions: no request of it is denied, and none of them is unused.

One story goes through everything that it does. What it asked for is read from the audit log.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dev import service_account
from dev.audit import AuditTail
from dev.cluster import ControlPlane
from dev.cluster.control_plane import OPERATOR_NAMESPACE
from dev.fake_kubelet import FakeKubelet
from dev.kube import ApiError, Json, Kube, tolerant
from shoal.controllers.trainingjob.credentials import InstallKey
from shoal_trainer.contract import Outcome, StatusReport, TerminationMessage
from tests.control_plane.coordinators import Coordinators
from tests.control_plane.installed import account_of, install_account, user_of
from tests.control_plane.operators import COLLECTED_SECONDS, Job, OperatorProcess, eventually
from tests.control_plane.pools import POOLS, pool, report

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
POD_GROUPS: Json = {
    "metadata": {"name": "podgroups.scheduling.x-k8s.io", "annotations": {
        "api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/scheduler-plugins/pull/50"}},
    "spec": {
        "group": "scheduling.x-k8s.io",
        "scope": "Namespaced",
        "names": {"kind": "PodGroup", "plural": "podgroups", "singular": "podgroup"},
        "versions": [{"name": "v1alpha1", "served": True, "storage": True, "schema": {"openAPIV3Schema": {
            "type": "object", "x-kubernetes-preserve-unknown-fields": True}}}],
    },
}  # fmt: skip

UNSEEN = {("scheduling.x-k8s.io", "podgroups", "create")}
"""An apply that makes the object is a patch in the audit log, and is allowed to who may also create."""

Right = tuple[str, str, str]
"""API group, resource with its subresource, verb."""


def granted(objects: list[Json]) -> set[Right]:
    """What the roles allow."""
    return {
        (group, resource, verb)
        for role in objects
        if role["kind"] in {"Role", "ClusterRole"}
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@pytest.fixture
async def pod_groups(kube: Kube) -> AsyncIterator[None]:
    """scheduler-plugins' CRD."""
    await kube.create(CRDS, POD_GROUPS)
    yield
    await kube.delete(f"{CRDS}/{POD_GROUPS['metadata']['name']}")


@pytest.fixture
async def newer_crd(kube: Kube, crds: None) -> AsyncIterator[None]:
    """A CRD that is newer than the operator: it has one more cleanPodPolicy."""
    path = f"{CRDS}/trainingjobs.shoal.dev"
    before = await kube.get(path)
    newer = json.loads(json.dumps(before["spec"]["versions"]))
    spec = newer[0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    spec["runPolicy"]["properties"]["cleanPodPolicy"]["enum"].append("Tomorrow")
    await kube.patch(path, {"spec": {"versions": newer}})
    yield
    await kube.patch(path, {"spec": {"versions": before["spec"]["versions"]}})


@pytest.fixture
async def home(kube: Kube) -> str:
    """The operator's namespace. It stays: no other test uses it."""
    with tolerant(409):
        await kube.create("/api/v1/namespaces", {"metadata": {"name": OPERATOR_NAMESPACE}})
    return OPERATOR_NAMESPACE


async def install_key(plane: ControlPlane, mounted: Path, folder: Path) -> Path:
    """The key as the chart's init container makes it; the second pod finds the Secret of the first."""
    file = folder / "key"
    for _ in range(2):
        words = ["install-key", "--secret", "shoal-install-key", "--file", str(file)]
        made = await asyncio.create_subprocess_exec(
            *service_account.command(mounted), *words, env=service_account.environment(plane)
        )
        assert await made.wait() == 0
    return file


class Story:
    """What happens to one job, so that the operator needs each of its permissions."""

    WORKERS = 8

    def __init__(self, kube: Kube, namespace: str, nodes: FakeKubelet) -> None:
        self.kube, self.namespace, self.nodes = kube, namespace, nodes
        self.job = Job(kube, namespace)
        self.services = f"/api/v1/namespaces/{namespace}/services"

    async def begins(self, pools: list[str]) -> str:
        """A Service of someone else has the name that the job needs; returns the job's uid."""
        body = {"metadata": {"name": "digits-ps-0"}, "spec": {"ports": [{"port": 80}]}}
        await self.kube.create(self.services, body)
        applied = await self.job.apply(
            workers={"replicas": self.WORKERS, "maxReplicas": 16, "pools": pools},
            runPolicy={
                "schedulingPolicy": {"gang": "PodGroup"},
                "ttlSecondsAfterFinished": 1,
                "backoffLimit": 1000,
            },
        )

        async def collides() -> bool:
            return (await self.job.condition("Stalled")).get("reason") == "NameCollision"

        await eventually(collides, what="the foreign Service is told")
        await self.kube.delete(f"{self.services}/digits-ps-0")
        await self.job.runs(self.WORKERS)
        return str(applied["metadata"]["uid"])

    async def is_learned(self) -> None:
        """Its reports become a profile."""

        async def learned() -> bool:
            path = f"/apis/shoal.dev/v1alpha1/namespaces/{self.namespace}/speedprofiles"
            return any(each.get("status") for each in (await self.kube.get(path))["items"])

        await eventually(learned, what="a SpeedProfile")

    async def loses_all(self) -> None:
        """Its workers, twice, so that the same events come again; and its server."""
        for wave in (0, 1):
            for slot in range(self.WORKERS):
                await self.take(f"digits-worker-{slot}-{wave}")
            await self.job.runs(self.WORKERS)
        await self.take("digits-ps-0-0")

        async def restored() -> bool:
            found = (await self.kube.get(f"{self.services}/digits-ps-0"))["spec"]["selector"]
            return bool(found["shoal.dev/incarnation"] == "1")

        await eventually(restored, what="the Service selects the new server")
        await self.job.runs(self.WORKERS)

    async def has_an_unreadable_sibling(self) -> None:
        """A job with a value that this operator does not know."""
        newer = Job(self.kube, self.namespace, "newer")
        await newer.apply(runPolicy={"cleanPodPolicy": "Tomorrow"})

        async def told() -> bool:
            return (await newer.condition("Stalled")).get("reason") == "Unreadable"

        await eventually(told, what="a job that cannot be read says so")
        await self.kube.delete(newer.path)

    async def take(self, pod: str) -> None:
        await self.kube.delete(f"/api/v1/namespaces/{self.namespace}/pods/{pod}", grace_seconds=0)

    async def ends(self) -> None:
        """It succeeds, and is deleted after its time to live."""
        message = TerminationMessage(outcome=Outcome.SUCCEEDED).to_json()
        await self.nodes.succeed_pod(self.namespace, "digits-ps-0-1", message=message)

        async def cleaned_up() -> bool:
            try:
                await self.job.get()
            except ApiError as error:
                return error.status == 404
            return False

        await eventually(cleaned_up, what="ttlSecondsAfterFinished")


@pytest.mark.timeout(300)
async def test_permissions_are_enough_and_all_used(
    control_plane: ControlPlane,
    newer_crd: None,
    pod_groups: None,
    kube: Kube,
    namespace: str,
    home: str,
    tmp_path: Path,
) -> None:
    objects = await install_account(control_plane, kube, home, f"scope.namespace={namespace}")
    account, mounted = account_of(objects), tmp_path / "account"
    await service_account.mount(control_plane, kube, account, mounted)
    log = AuditTail(control_plane.audit_log)
    key = await install_key(control_plane, mounted, tmp_path)

    def used() -> set[Right]:
        """What was asked for; nothing of it was denied."""
        seen = [each for each in log.read() if each.user == user_of(home, account)]
        assert [(each.verb, each.resource, each.name) for each in seen if each.code == 403] == []
        return {
            (each.group, "/".join(filter(None, (each.resource, each.subresource))), each.verb)
            for each in seen
        }

    reports: dict[str, StatusReport] = {}
    coordinators = Coordinators(InstallKey(key.read_bytes()), tmp_path, lambda uid: reports[uid])
    pools = [f"spot-{namespace}", f"od-{namespace}"]
    operator = OperatorProcess(
        control_plane.kubeconfig,
        namespace,
        tmp_path / "operator",
        mounted,
        **service_account.environment(control_plane, SHOAL_INSTALL_KEY_FILE=str(key)),
    )
    async with FakeKubelet(control_plane.kubeconfig, pod_ip=lambda _pod: coordinators.address(0)) as nodes:
        for name in ("spot", "od"):
            await kube.create(POOLS, pool(name, namespace, "0.4", spot=name == "spot", nodes=20))
        for name in ("spot-1", "spot-2"):
            await nodes.add_node(name, spot=True, labels={"example.com/pool": pools[0]})
        # On a busy machine, workers may wait for the scheduler until their pool is exhausted: then they live here.
        await nodes.add_node("safe-1", labels={"example.com/pool": pools[1]})
        story = Story(kube, namespace, nodes)
        async with operator:
            uid = await story.begins(pools)
            reports[uid] = report(uid, story.WORKERS, 12e6)
            await coordinators.serve(0, uid)
            await story.is_learned()
            await story.loses_all()
            await story.has_an_unreadable_sibling()
            # While nobody looks, a pod and a node go.
            assert await operator.stop() == 0
            await story.take("digits-worker-0-2")
            await nodes.remove_node("spot-2")
            await operator.start()

            async def asked() -> bool:
                return {("", "pods", "get"), ("", "nodes", "get")} <= used()

            await eventually(asked, what="it asks for what it does not find", seconds=COLLECTED_SECONDS)
            await story.job.runs(story.WORKERS)
            await story.ends()
            await operator.stop()
        assert granted(objects) - used() == UNSEEN
        await coordinators.close()
        for name in pools:
            await kube.delete(f"{POOLS}/{name}")
        for name in list(nodes.nodes):
            await nodes.remove_node(name)
