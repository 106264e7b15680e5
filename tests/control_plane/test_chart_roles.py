"""The operator with exactly the chart's permissions, under its admission policy: nothing is denied, nothing is unused.

One story goes through everything that it does, another through what `kueue.enabled` adds, with Kueue played. What it
asked for is read from the audit log.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import yaml

from dev.audit import AuditTail
from dev.cluster import ControlPlane
from dev.cluster.control_plane import OPERATOR_NAMESPACE
from dev.kube import ApiError, Json, Kube, tolerant
from shoal.controllers.trainingjob.credentials import InstallKey
from shoal.manifests.workload import POD_PRIORITY
from shoal_trainer.contract import Outcome, StatusReport, TerminationMessage
from tests.control_plane import service_account
from tests.control_plane.conftest import await_served
from tests.control_plane.coordinators import Coordinators
from tests.control_plane.installed import (
    account_of,
    admission_policy,
    as_service_account,
    health_check,
    install_account,
    rendered,
    user_of,
)
from tests.control_plane.operators import (
    COLLECTED_SECONDS,
    Job,
    OperatorProcess,
    eventually,
    running_operator,
)
from tests.control_plane.pools import GPUS, POOLS, pool, report
from tests.doubles.fake_kubelet import FakeKubelet
from tests.doubles.pod_status import now

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
OPEN: Json = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
CONDITIONS: Json = {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"],
                    "items": {**OPEN, "required": ["type"], "properties": {"type": {"type": "string"}}}}  # fmt: skip


def crd(group: str, version: str, kind: str, plural: str, *, namespaced: bool = True) -> Json:
    """Another project's CRD, which allows any fields."""
    status = {**OPEN, "properties": {"conditions": CONDITIONS}}
    served = {"name": version, "served": True, "storage": True, "subresources": {"status": {}},
              "schema": {"openAPIV3Schema": {**OPEN, "properties": {"status": status}}}}  # fmt: skip
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}", "annotations": {
            "api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/scheduler-plugins/pull/50"}},
        "spec": {
            "group": group,
            "scope": "Namespaced" if namespaced else "Cluster",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [served],
        },
    }  # fmt: skip


POD_GROUPS = [crd("scheduling.x-k8s.io", "v1alpha1", "PodGroup", "podgroups")]
QUEUES = "kueue.x-k8s.io"
KUEUE = [
    crd(QUEUES, "v1beta2", "Workload", "workloads"),
    crd(QUEUES, "v1beta2", "ResourceFlavor", "resourceflavors", namespaced=False),
    crd(QUEUES, "v1beta2", "WorkloadPriorityClass", "workloadpriorityclasses", namespaced=False),
]

DENIED = {403, 422}
"""By the roles, by the admission policy."""
UNSEEN = {("scheduling.x-k8s.io", "podgroups", "create")}
"""An apply that makes the object is a patch in the audit log, and is allowed to who may also create."""
SELDOM = {("shoal.dev", "trainingjobs", "get")}
"""Of a leader that makes a pod before it has stored a status of the job, where others may have made some. With pools it
counts their use at its first look, and stores that (`test_reconcile` plays it)."""

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


def used(log: AuditTail, user: str) -> set[Right]:
    """What this user asked for; nothing of it was denied."""
    seen = [each for each in log.read() if each.user == user]
    assert [(each.verb, each.resource, each.name) for each in seen if each.code in DENIED] == []
    return {
        (each.group, "/".join(filter(None, (each.resource, each.subresource))), each.verb) for each in seen
    }


@pytest.fixture
def others_crds(control_plane: ControlPlane, request: pytest.FixtureRequest) -> Iterator[None]:
    """CRDs of other projects, as the test's parameter lists them."""
    manifests = yaml.safe_dump_all(request.param)
    control_plane.kubectl("apply", "-f", "-", stdin=manifests)
    for each in request.param:
        [version] = each["spec"]["versions"]
        path = f"/apis/{each['spec']['group']}/{version['name']}/{each['spec']['names']['plural']}"
        await_served(control_plane, path)
    yield
    control_plane.kubectl("delete", "-f", "-", stdin=manifests)


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
    """The operator's namespace, without the Lease and the key of an earlier test. It stays: no other test uses it."""
    with tolerant(409):
        await kube.create("/api/v1/namespaces", {"metadata": {"name": OPERATOR_NAMESPACE}})
    for prefix, left in (("apis/coordination.k8s.io", "leases/shoal"), ("api", "secrets/shoal-install-key")):
        with tolerant(404):
            await kube.delete(f"/{prefix}/v1/namespaces/{OPERATOR_NAMESPACE}/{left}")
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

    async def has_an_old_profile(self) -> None:
        """One of the operator's own, of which no measurement counts any more."""
        profiles = f"/apis/shoal.dev/v1alpha1/namespaces/{self.namespace}/speedprofiles"
        labels = {"app.kubernetes.io/managed-by": "shoal"}
        identity = {"apiVersion": "shoal.dev/v1alpha1", "kind": "SpeedProfile"}
        await self.kube.create(profiles, {**identity, "metadata": {"name": "old", "labels": labels}})
        await self.kube.patch(f"{profiles}/old/status", {"status": {"lastUpdated": "2020-01-01T00:00:00Z"}})

        async def deleted() -> bool:
            return all(each["metadata"]["name"] != "old" for each in (await self.kube.get(profiles))["items"])

        await eventually(deleted, what="it is deleted")

    async def loses_all(self) -> None:
        """Its workers, twice, so that the same events come again; and its server."""
        for _ in range(2):
            lost = [await self.take("worker", slot) for slot in range(self.WORKERS)]
            for slot, incarnation in enumerate(lost):
                await self.is_replaced("worker", slot, incarnation)
            await self.job.runs(self.WORKERS)
        server = await self.take("ps", 0)

        async def restored() -> bool:
            found = (await self.kube.get(f"{self.services}/digits-ps-0"))["spec"]["selector"]
            return bool(found["shoal.dev/incarnation"] != server)

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

    async def newest(self, role: str, index: int) -> Json:
        """The pod of a place. On a busy machine, it may have been given up for another pool before."""
        labels = {"shoal.dev/role": role, "shoal.dev/index": str(index)}
        pods = [
            p for p in (await self.job.pods()).values() if labels.items() <= p["metadata"]["labels"].items()
        ]
        none: Json = {"metadata": {"labels": {"shoal.dev/incarnation": "-1"}}, "status": {}}
        return max(pods, key=lambda p: int(p["metadata"]["labels"]["shoal.dev/incarnation"]), default=none)

    async def node_of(self, role: str, index: int) -> str:
        """The node of a place's pod."""
        return str((await self.newest(role, index))["spec"]["nodeName"])

    async def take(self, role: str, index: int) -> str:
        """Take the pod of a place; returns its incarnation."""
        meta = (await self.newest(role, index))["metadata"]
        await self.kube.delete(f"/api/v1/namespaces/{self.namespace}/pods/{meta['name']}", grace_seconds=0)
        return str(meta["labels"]["shoal.dev/incarnation"])

    async def is_replaced(self, role: str, index: int, lost: str) -> None:
        async def replaced() -> bool:
            newest = await self.newest(role, index)
            other = newest["metadata"]["labels"]["shoal.dev/incarnation"] != lost
            return other and newest["status"].get("phase") == "Running"

        await eventually(replaced, what=f"{role} {index} is replaced")

    async def ends(self) -> None:
        """It succeeds, and is deleted after its time to live."""
        message = TerminationMessage(outcome=Outcome.SUCCEEDED).to_json()
        await self.is_replaced("ps", 0, "")  # it may have been on the node that went
        server = (await self.newest("ps", 0))["metadata"]["name"]
        await self.nodes.succeed_pod(self.namespace, server, message=message)

        async def cleaned_up() -> bool:
            try:
                await self.job.get()
            except ApiError as error:
                return error.status == 404
            return False

        await eventually(cleaned_up, what="ttlSecondsAfterFinished")


async def no_job_anywhere(kube: Kube) -> None:
    """Wait until those of earlier tests are gone, in whose namespaces nothing can be made any more."""

    async def none() -> bool:
        return not (await kube.get("/apis/shoal.dev/v1alpha1/trainingjobs"))["items"]

    await eventually(none, what="no job anywhere")


@pytest.mark.parametrize("others_crds", [POD_GROUPS], indirect=True, ids=["PodGroup"])
@pytest.mark.parametrize(
    "everywhere", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["one-namespace", "everywhere"]
)
async def test_permissions_are_enough_and_all_used(
    control_plane: ControlPlane,
    newer_crd: None,
    others_crds: None,
    kube: Kube,
    namespace: str,
    home: str,
    tmp_path: Path,
    everywhere: bool,
) -> None:
    values = "serviceAccount.name=everywhere" if everywhere else f"scope.namespace={namespace}"
    objects = await install_account(control_plane, kube, home, values)
    account, mounted = account_of(objects), tmp_path / "account"
    if everywhere:
        await no_job_anywhere(kube)
    await service_account.mount(control_plane, kube, account, mounted)
    log, user = AuditTail.from_now(control_plane.audit_log), user_of(home, account)
    pools, reports = [f"spot-{namespace}", f"od-{namespace}"], dict[str, StatusReport]()
    async with (
        admission_policy(control_plane, home, values),
        FakeKubelet(control_plane.kubeconfig, pod_ip=lambda _pod: coordinators.address(0)) as nodes,
    ):
        key = await install_key(control_plane, mounted, tmp_path)
        coordinators = Coordinators(InstallKey(key.read_bytes()), tmp_path, lambda uid: reports[uid])
        operator, standby = (
            OperatorProcess(
                control_plane.kubeconfig,
                "" if everywhere else namespace,
                tmp_path / name,
                service_account.environment(control_plane, SHOAL_INSTALL_KEY_FILE=str(key), POD_NAME=name),
                mounted,
            )
            for name in ("operator-0", "operator-1")
        )
        for name in ("spot", "od"):
            await kube.create(POOLS, pool(name, namespace, 0.4, spot=name == "spot", nodes=20))
        for name in ("spot-1", "spot-2"):
            await nodes.add_node(name, spot=True, labels={"example.com/pool": pools[0]}, capacity=GPUS)
        # On a busy machine, workers may wait for the scheduler until their pool is exhausted: then they live here.
        await nodes.add_node("safe-1", labels={"example.com/pool": pools[1]}, capacity=GPUS)
        story = Story(kube, namespace, nodes)
        try:
            async with operator:
                uid = await story.begins(pools)
                reports[uid] = report(uid, story.WORKERS, 12e6)
                await coordinators.serve(0, uid)
                await story.is_learned()
                await story.has_an_old_profile()
                await story.loses_all()
                await story.has_an_unreadable_sibling()
                # While nobody looks, a pod and a node go.
                assert await operator.stop() == 0
                await story.take("worker", 0)
                await nodes.remove_node(await story.node_of("worker", 1))
                await operator.start()

                async def asked() -> bool:
                    return {("", "pods", "get"), ("", "nodes", "get")} <= used(log, user)

                await eventually(asked, what="it asks for what it does not find", seconds=COLLECTED_SECONDS)
                await story.job.runs(story.WORKERS)
                since = len(log.read())

                async def looked() -> bool:
                    return any(
                        each.user == user and (each.resource, each.verb) == ("leases", "get")
                        for each in log.read()[since:]
                    )

                async with standby:  # it watches the Lease; a watch is in the log when it ends
                    await story.ends()
                    await eventually(looked, what="the other one reads the Lease", seconds=COLLECTED_SECONDS)
                    await operator.stop()
            assert (granted(objects) - used(log, user)) | SELDOM == UNSEEN | SELDOM
        finally:  # a second attempt makes nodes of the same names
            await coordinators.close()
            for name in pools:
                await kube.delete(f"{POOLS}/{name}")
            for name in list(nodes.nodes):
                await nodes.remove_node(name)


async def test_with_rights_in_one_namespace_only_nothing_is_denied(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, home: str, tmp_path: Path
) -> None:
    """Neither nodes nor CapacityPools: of these every list was refused, for as long as the operator was there."""
    scope = (f"scope.namespace={namespace}", "scope.pools=false", "scope.nodes=false")
    values = (*scope, "serviceAccount.name=scoped")  # its own: the log has what others did with the usual one
    objects = await install_account(control_plane, kube, home, *values)
    assert {each["kind"] for each in objects if each["kind"].startswith("Cluster")} == set()
    account, mounted = account_of(objects), tmp_path / "account"
    await service_account.mount(control_plane, kube, account, mounted)
    log, user = AuditTail.from_now(control_plane.audit_log), user_of(home, account)
    key = await install_key(control_plane, mounted, tmp_path)
    [deployment] = [each for each in rendered(control_plane, home, *values) if each["kind"] == "Deployment"]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    said = {each["name"]: each["value"] for each in container["env"] if each["name"].startswith("SHOAL_")}
    changed = {"SHOAL_INSTALL_KEY_FILE": str(key), "SHOAL_METRICS_PORT": "0", "SHOAL_HEALTH_PORT": "0"}
    environment = service_account.environment(control_plane, **{**said, **changed}, POD_NAME="operator-0")
    job = Job(kube, namespace)
    async with (
        admission_policy(control_plane, home, *values),
        FakeKubelet(control_plane.kubeconfig) as nodes,
        OperatorProcess(control_plane.kubeconfig, namespace, tmp_path / "operator", environment, mounted),
    ):
        await nodes.add_node("safe-1")
        await nodes.add_node("spot-1", spot=True)
        try:
            await job.apply(workers={"replicas": 2})
            await job.runs(2)
            assert (await job.condition("NodeSignalsUnavailable")).get("status") == "True"

            async def witnessed() -> bool:
                """kopf has looked, too."""
                lists = [each for each in log.read() if each.user == user and each.verb == "list"]
                return [each.resource for each in lists].count("trainingjobs") > 1

            await eventually(witnessed, what="kopf lists the jobs")
            assert {"nodes", "capacitypools"}.isdisjoint(resource for _, resource, _ in used(log, user))
        finally:
            for name in list(nodes.nodes):
                await nodes.remove_node(name)


class Queue:
    """Kueue, played: it admits and evicts when it is told to."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self.kube, self.workloads = kube, f"/apis/{QUEUES}/v1beta2/namespaces/{namespace}/workloads"

    async def workload(self, job: Job) -> Json | None:
        """The job's Workload."""
        found = (await self.kube.get(self.workloads, labelSelector=f"shoal.dev/job={job.name}"))["items"]
        return found[0] if found else None

    async def asks(self, job: Job, **priority: object) -> None:
        """Wait until the job has a Workload of this priority."""

        async def there() -> bool:
            found = await self.workload(job)
            return found is not None and {name: found["spec"].get(name) for name in priority} == priority

        await eventually(there, what=f"the Workload of {job.name}")

    async def says(self, job: Job, **conditions: str) -> None:
        """Set these conditions; with QuotaReserved, what is asked for is admitted."""
        found = await self.workload(job)
        assert found is not None
        told = {each["type"]: each for each in found.get("status", {}).get("conditions", [])}
        for kind, state in conditions.items():
            told[kind] = {"type": kind, "status": state, "reason": "Preempted", "lastTransitionTime": now()}
        status: Json = {"conditions": list(told.values())}
        if "QuotaReserved" in conditions:
            sets = [{"name": each["name"], "flavors": {"cpu": "all"}} for each in found["spec"]["podSets"]]
            status["admission"] = {"podSetAssignments": sets}
        await self.kube.patch(f"{self.workloads}/{found['metadata']['name']}/status", {"status": status})

    async def is_told(self, job: Job, kind: str, status: str = "True") -> None:
        """Wait until a condition of the Workload has this status."""

        async def told() -> bool:
            found = await self.workload(job)
            conditions = (found or {}).get("status", {}).get("conditions", [])
            return any((each["type"], each["status"]) == (kind, status) for each in conditions)

        await eventually(told, what=f"{kind} is {status}")


@pytest.mark.nightly
@pytest.mark.parametrize("others_crds", [KUEUE], indirect=True, ids=["Kueue"])
async def test_permissions_for_kueue_are_enough_and_all_used(
    control_plane: ControlPlane,
    crds: None,
    others_crds: None,
    kube: Kube,
    namespace: str,
    home: str,
    fake_kubelet: FakeKubelet,
    tmp_path: Path,
) -> None:
    scope, enabled = f"scope.namespace={namespace}", "kueue.enabled=true"
    added = granted(rendered(control_plane, home, scope, enabled)) - granted(
        rendered(control_plane, home, scope)
    )
    config = await as_service_account(control_plane, kube, home, tmp_path, scope, enabled)
    user = user_of(home, account_of(rendered(control_plane, home, scope)))
    log, queue = AuditTail.from_now(control_plane.audit_log), Queue(kube, namespace)
    await fake_kubelet.add_node("safe-1")
    await fake_kubelet.add_node("spot-1", spot=True)
    cluster_wide: list[tuple[str, str, Json]] = [
        ("ResourceFlavor", "resourceflavors", {"metadata": {"name": "all"}, "spec": {}}),
        ("WorkloadPriorityClass", "workloadpriorityclasses", {"metadata": {"name": "urgent"}, "value": 9}),
    ]
    for kind, plural, body in cluster_wide:
        body |= {"apiVersion": f"{QUEUES}/v1beta2", "kind": kind}
        await kube.create(f"/apis/{QUEUES}/v1beta2/{plural}", body)

    async def apply(name: str, *, label: str = "", class_of_pods: str = "") -> Job:
        job = Job(kube, namespace, name)
        spec = {"spec": {"priorityClassName": class_of_pods}} if class_of_pods else {}
        manifest = job.manifest(
            runPolicy={"schedulingPolicy": {"queue": "all", "queueAs": "Workload"}},
            workers={"replicas": 1, "minReplicas": 1, "template": spec},
        )
        manifest["metadata"]["labels"] = {"kueue.x-k8s.io/priority-class": label} if label else {}
        await kube.create(job.path.rpartition("/")[0], manifest)
        return job

    async with (
        admission_policy(control_plane, home, scope, enabled),
        running_operator(config, namespace, kueue=True, lease_namespace=home),
    ):
        await queue.asks(await apply("urgent", label="urgent"), priority=9)
        await queue.asks(
            await apply("system", class_of_pods="system-node-critical"),
            priorityClassRef={**POD_PRIORITY, "name": "system-node-critical"},
        )
        job = await apply("digits")
        await queue.asks(job, priority=0)
        await queue.says(job, QuotaReserved="True", Admitted="True")
        await job.runs(1)
        await queue.is_told(job, "PodsReady")
        await queue.says(job, Evicted="True")
        await queue.is_told(job, "QuotaReserved", "False")
        await kube.patch(job.path, {"spec": {"suspend": True}})

        async def gone() -> bool:
            return await queue.workload(job) is None

        await eventually(gone, what="a suspended job has no Workload")
    assert added - used(log, user) == set()


@pytest.mark.nightly
async def test_the_health_check_names_what_a_role_of_ones_own_lacks(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, home: str, tmp_path: Path
) -> None:
    values = (f"scope.namespace={namespace}", f"fullnameOverride=own-{namespace}")
    config = await as_service_account(control_plane, kube, home, tmp_path, *values)
    options = (
        "--metrics=http://127.0.0.1:1/metrics",
        "--seconds=0",
    )  # nothing runs: only rights are asked for

    async def says() -> str:
        _, said = await health_check(control_plane, config, home, *values, options=options)
        return said

    async def may_all() -> bool:  # the authorizer has seen each role
        return "may not" not in await says()

    await eventually(may_all, what="the chart's roles are enough")
    path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles/own-{namespace}"
    rules = (await kube.get(path))["rules"]
    for rule in rules:
        if rule["resources"] == ["pods"]:
            rule["verbs"].remove("create")
    await kube.patch(path, {"rules": rules})

    async def named() -> bool:
        return f"may not create pods in the namespace {namespace}\n" in await says()

    await eventually(named, what="the right that is missing is named")
