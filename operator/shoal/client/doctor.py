"""Whether a cluster has what jobs need: `shoal doctor`. Each check reads, and says what to do.

Pure apart from `read`, which asks the API server; what a user may not read is unknown, not broken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from shoal.api.base import GROUP, VERSION
from shoal.api.crd import KINDS as MODELS
from shoal.api.crd import not_kept, published
from shoal.api.kube import Node, Toleration
from shoal.client.api import Api, Json
from shoal.errors import NotFound, Refused, UsageError
from shoal.manifests.installed import own_spot_of
from shoal.manifests.placement import Where, tolerations
from shoal.manifests.platforms import GENERIC, NO_OWN, Platform, is_spot, platform_of
from shoal.words import count, few

Name = tuple[str, str]
"""Namespace and name."""

OLDEST = (1, 29)
"""The oldest Kubernetes whose CRDs have the rules that Shoal's use."""
KINDS = tuple(model.PLURAL for model in MODELS)
RIGHTS = (
    ("create", GROUP, "trainingjobs"),
    ("create", "", "configmaps"),
    ("list", "", "pods"),
    ("get", "", "pods/log"),
    ("list", "", "events"),
)
"""What `shoal submit`, `status`, `logs` and `history` need."""
SIZED = ("Buffer", "Scale", "Cloud")
"""Modes of a CapacityPool that need `shoal-pools`."""
TAKEN = 20
"""A Lease that was not renewed in so many seconds is nobody's: longer than its duration in the chart."""


@dataclass(frozen=True)
class Check:
    """One answer. `unknown`: this user may not read it, or nothing shows it now."""

    name: str
    state: Literal["ok", "warning", "broken", "unknown"]
    message: str
    help: str = ""


@dataclass(frozen=True)
class Cluster:
    """What was read. None: not allowed."""

    version: Mapping[str, str]
    resources: Sequence[str]
    schemas: Mapping[str, Json] | None
    """Of the resources, by what the API server calls them."""
    rights: Mapping[tuple[str, str, str], bool]
    namespace: str
    deployments: Sequence[Json] | None = None
    sizers: Sequence[Json] | None = None
    leases: Sequence[Json] | None = None
    renewed: Collection[Name] = ()
    """The Leases that were seen to be renewed. How old a renewal is, says the holder's clock only."""
    nodes: Sequence[Json] | None = None
    pools: Sequence[Json] | None = None
    jobs: Sequence[Json] | None = ()
    classes: Sequence[Json] | None = None


def read(api: Api, *, pause: Callable[[float], None] = time.sleep) -> Cluster:
    """Ask the API server, the Leases until they were renewed. `pause` waits so many seconds. Raises Unavailable."""

    def allowed(ask: Callable[[], list[Json]]) -> list[Json] | None:
        try:
            return ask()
        except NotFound:
            return []
        except Refused:
            return None

    try:
        served = [each["name"] for each in api.get(f"/apis/{GROUP}/{VERSION}")["resources"]]
    except NotFound:
        served = []
    try:
        document = api.get(f"/openapi/v3/apis/{GROUP}/{VERSION}")
        schemas = document.get("components", {}).get("schemas", {})
    except NotFound:
        schemas = {}
    except Refused:
        schemas = None

    def deployments(name: str) -> list[Json] | None:
        selector = f"app.kubernetes.io/name={name}"
        return allowed(lambda: api.list("/apis/apps/v1/deployments", labelSelector=selector))

    def leases() -> list[Json] | None:
        return allowed(lambda: api.list("/apis/coordination.k8s.io/v1/leases"))

    operators, first = deployments("shoal"), leases()
    newest, renewed = first, set[Name]()
    awaited = {_name(each) for each in operators or ()} & _held(first).keys()
    for _ in range(TAKEN):
        if awaited <= renewed:
            break
        pause(1.0)
        newest = leases()
        renewed |= {name for name, said in _held(newest).items() if said != _held(first).get(name)}
    return Cluster(
        version=api.get("/version"),
        resources=served,
        schemas=schemas,
        rights={right: api.may(*right, namespace=api.namespace) for right in RIGHTS},
        namespace=api.namespace,
        deployments=operators,
        sizers=deployments("shoal-pools"),
        leases=newest,
        renewed=renewed,
        nodes=allowed(lambda: api.list("/api/v1/nodes")),
        pools=allowed(lambda: api.list(f"/apis/{GROUP}/{VERSION}/capacitypools")),
        jobs=allowed(lambda: api.list(f"/apis/{GROUP}/{VERSION}/namespaces/{api.namespace}/trainingjobs")),
        classes=allowed(lambda: api.list("/apis/storage.k8s.io/v1/storageclasses")),
    )


def diagnose(cluster: Cluster) -> list[Check]:
    """All answers."""
    return [answer for check in CHECKS for answer in check(cluster)]


def _kubernetes(cluster: Cluster) -> Iterator[Check]:
    version = cluster.version
    numbers = tuple(int("".join(filter(str.isdigit, version[part]))) for part in ("major", "minor"))
    words = f"Kubernetes {version.get('gitVersion', '')}"
    if numbers < OLDEST:
        yield Check("kubernetes", "broken", words, f"{OLDEST[0]}.{OLDEST[1]} or newer is needed")
    else:
        yield Check("kubernetes", "ok", words)


def _kinds(cluster: Cluster) -> Iterator[Check]:
    missing = [kind for kind in KINDS if kind not in cluster.resources]
    if missing:
        yield Check("crds", "broken", f"the cluster does not know {', '.join(missing)}",
                    "helm install shoal charts/shoal … (docs/install.md), which brings them")  # fmt: skip
        return
    if cluster.schemas is None:
        yield Check("crds", "unknown", "whether they are older than this command: you may not read /openapi")
        return
    known = [(model, cluster.schemas.get(published(model))) for model in MODELS]
    lost = [path for model, schema in known if schema is not None for path in not_kept(model, schema)]
    if lost:
        yield Check("crds", "warning", f"of an older version than this command: without {few(lost)}",
                    "kubectl apply --server-side -f crds/ of the operator's version: what a newer one writes "
                    "there is lost")  # fmt: skip
    else:
        yield Check("crds", "ok", f"{', '.join(KINDS)} are served")


def _rights(cluster: Cluster) -> Iterator[Check]:
    missing = [f"{verb} {resource}" for (verb, _, resource), may in cluster.rights.items() if not may]
    where = f"in the namespace {cluster.namespace}"
    if missing:
        yield Check("permissions", "warning", f"you may not {', '.join(missing)} {where}",
                    "the roles edit and admin of the namespace include them")  # fmt: skip
    else:
        yield Check("permissions", "ok", f"you may submit jobs and read their logs {where}")


def _operator(cluster: Cluster) -> Iterator[Check]:
    if cluster.deployments is None:
        yield Check("operator", "unknown", "you may not read Deployments of all namespaces")
        return
    if not cluster.deployments:
        yield Check("operator", "broken", "no Deployment has the label app.kubernetes.io/name=shoal",
                    "helm install shoal charts/shoal …; jobs wait until an operator runs")  # fmt: skip
    for each in cluster.deployments:
        elsewhere = scope_of(each) not in {"", cluster.namespace}
        for check in (*_replicas(each), *_images(each), *_lease(cluster, each["metadata"])):
            yield replace(check, state="warning") if elsewhere and check.state == "broken" else check
    scopes = {scope_of(each) for each in cluster.deployments}
    ours = [
        "/".join(_name(each))
        for each in cluster.deployments
        if scope_of(each) in {"", cluster.namespace} and each["spec"].get("replicas", 1)
    ]
    if len(ours) > 1:
        yield Check("operator", "broken", f"{' and '.join(ours)} work for the namespace {cluster.namespace}, "
                    "so they work against each other",
                    "uninstall one, or give each a scope.namespace of its own (docs/install.md)")  # fmt: skip
    if scopes and not scopes & {"", cluster.namespace}:
        yield Check("operator", "broken", f"no operator works for the namespace {cluster.namespace}",
                    f"submit jobs to {' or '.join(sorted(scopes))}, or set scope.namespace of a release")  # fmt: skip


def _replicas(deployment: Json) -> Iterator[Check]:
    metadata, ready = deployment["metadata"], deployment.get("status", {}).get("readyReplicas", 0)
    name = f"{metadata['namespace']}/{metadata['name']}"
    wanted = deployment["spec"].get("replicas", 1)
    state: Literal["ok", "broken", "warning"] = (
        "broken" if not ready else "ok" if ready == wanted else "warning"
    )
    describe = f"kubectl -n {metadata['namespace']} describe pods -l app.kubernetes.io/name=shoal"
    help_ = "" if state == "ok" else describe
    of = f", for the namespace {scope}" if (scope := scope_of(deployment)) else ""
    yield Check("operator", state, f"{name}: {ready} of {count(wanted, 'replica')} ready{of}", help_)


def _images(deployment: Json) -> Iterator[Check]:
    """Where the image with CUDA is Shoal's own: `make images` builds none, and an upgrade keeps the old one."""
    variables = _environment(deployment)
    servers, _, tag = variables.get("SHOAL_IMAGE_PS", "").rpartition(":")
    workers, _, other = variables.get("SHOAL_IMAGE_WORKER_GPU", "").rpartition(":")
    if workers and workers == servers.removesuffix("ps") + "worker-gpu" and tag != other:
        yield Check("images", "warning", f"of new jobs, workers with GPUs are of {other}, parameter servers of {tag}: "
                    "with another protocol they wait for each other",
                    f"build worker-gpu of {tag} (docs/install.md), then helm upgrade … "
                    f"--set trainer.workerGpuImage={workers}:{tag}")  # fmt: skip


def scope_of(deployment: Json) -> str:
    """The namespace that an operator works for; empty: all of them."""
    return _environment(deployment).get("SHOAL_NAMESPACE", "")


def _environment(deployment: Json) -> dict[str, str]:
    """The variables of an operator whose values are in its Deployment."""
    containers = deployment["spec"].get("template", {}).get("spec", {}).get("containers", ())
    variables = [
        variable for each in containers if each["name"] == "operator" for variable in each.get("env") or ()
    ]
    return {each["name"]: each.get("value", "") for each in variables}


def _platform(cluster: Cluster) -> Platform:
    """All platforms' spot nodes, and those that the installation for this namespace names as its own."""
    own = NO_OWN
    for each in cluster.deployments or ():
        if scope_of(each) in {"", cluster.namespace}:
            with suppress(UsageError):  # which that operator says itself, and does not start
                own = own_spot_of(_environment(each))
    return platform_of((), GENERIC, own)


def _lease(cluster: Cluster, deployment: Json) -> Iterator[Check]:
    name, where = _name({"metadata": deployment}), f"kubectl -n {deployment['namespace']}"
    if cluster.leases is None:
        yield Check("leader", "unknown", "you may not read Leases of all namespaces")
        return
    holders = [each.get("spec", {}).get("holderIdentity") for each in cluster.leases if _name(each) == name]
    if holders and name in cluster.renewed:
        yield Check("leader", "ok", f"{holders[0]} works: it renews its Lease")
    else:
        yield Check("leader", "broken", f"nobody renews the Lease {name[1]}: no operator works",
                    f"{where} logs -l app.kubernetes.io/name=shoal --prefix")  # fmt: skip


def _name(manifest: Json) -> Name:
    return manifest["metadata"]["namespace"], manifest["metadata"]["name"]


def _held(leases: Sequence[Json] | None) -> dict[Name, tuple[str, str | None]]:
    """Who holds each Lease, and since which renewal."""
    held = {_name(each): each.get("spec", {}) for each in leases or ()}
    return {
        name: (spec["holderIdentity"], spec.get("renewTime"))
        for name, spec in held.items()
        if spec.get("holderIdentity")
    }


def _nodes(cluster: Cluster) -> Iterator[Check]:
    if cluster.nodes is None:
        yield Check("nodes", "unknown", "you may not read nodes")
        return
    nodes = [Node.model_validate(each, extra="ignore") for each in cluster.nodes]
    platform = _platform(cluster)
    pools = [each for pool in cluster.pools or () for each in pool["spec"].get("tolerations") or ()]
    tolerated = {
        spot: [
            Toleration(**each)
            for each in tolerations(Where("Spot" if spot else "OnDemand"), platform, gpu=spot) + pools
        ]
        for spot in (True, False)
    }
    usable = [each for each in nodes if _open(each, tolerated[is_spot(each, platform)])]
    closed = [each.metadata.name for each in nodes if each not in usable]
    spot = [each for each in usable if is_spot(each, platform)]
    safe = len(usable) - len(spot)
    words = f"{count(len(spot), 'spot node')} for workers, {safe} without a spot label for parameter servers"
    if cluster.deployments is None:
        words += "; spotLabels of the installation are not known: you may not read its Deployment"
    if closed:
        words += f"; with taints that jobs do not tolerate: {few(sorted(closed))}"
    if away := [each["metadata"]["name"] for each in cluster.nodes if not _ready(each)]:
        words += f"; not ready, or cordoned: {few(sorted(away))}"
        yield Check("nodes", "warning", words, "kubectl describe node says why; nothing is started there")
    elif not safe:
        yield Check("nodes", "warning", words, "parameter servers need a node without a spot label, unless "
                    "parameterServers.capacity is Any")  # fmt: skip
    elif not spot:
        yield Check("nodes", "warning", words, "an autoscaler may add spot nodes; else set workers.capacity to "
                                               "Any, or label a "
                    "node: kubectl label node NODE cloud.google.com/gke-spot=true")  # fmt: skip
    else:
        yield Check("nodes", "ok", words)
    yield from _accelerators(cluster.nodes)


def _accelerators(nodes: Sequence[Json]) -> Iterator[Check]:
    gpus = {each["metadata"]["name"]: _gpus(each) for each in nodes}
    labelled = [each["metadata"]["name"] for each in nodes if set(_labels(each)) & ACCELERATOR_LABELS]
    silent, offered = [name for name in labelled if not gpus[name]], sum(gpus.values())
    if silent:
        yield Check("accelerators", "broken", f"{few(silent)} should have GPUs but offer none",
                    "the NVIDIA device plugin or driver is missing on them: workers that request a GPU "
                    "stay Pending")  # fmt: skip
    elif offered:
        yield Check(
            "accelerators", "ok", f"{count(offered, 'GPU')} on {count(sum(map(bool, gpus.values())), 'node')}"
        )


ACCELERATOR_LABELS = {"cloud.google.com/gke-accelerator", "k8s.amazonaws.com/accelerator", "nvidia.com/gpu.present",
                      "karpenter.k8s.aws/instance-gpu-name"}  # fmt: skip


def _pools(cluster: Cluster) -> Iterator[Check]:
    if cluster.pools is None:
        yield Check("pools", "unknown", "you may not read CapacityPools")
    elif not cluster.pools:
        yield Check("pools", "ok", "no CapacityPool: nothing is planned or priced, and jobs run all the same")
    for pool in cluster.pools or ():
        status, price = pool.get("status") or {}, (pool["spec"].get("price") or {}).get("perHour")
        words = (
            f"{pool['metadata']['name']}: {count(status.get('nodes', 0), 'node')}, price {price or 'unknown'}"
        )
        ready = next((each for each in status.get("conditions") or () if each["type"] == "Ready"), None)
        if ready is not None and ready["status"] != "True":
            yield Check("pools", "warning", words, ready.get("message", ""))
        elif ready is None:
            yield Check(
                "pools", "warning", words, "no operator has looked at it yet, so what it says is not checked"
            )
        else:
            yield Check("pools", "ok", words)


def _sizers(cluster: Cluster) -> Iterator[Check]:
    """Pools whose size is left to `shoal-pools`, which is off in the chart by default."""
    left = [
        pool["metadata"]["name"]
        for pool in cluster.pools or ()
        if (pool["spec"].get("scaling") or {}).get("mode") in SIZED
    ]
    ready = any(each.get("status", {}).get("readyReplicas") for each in cluster.sizers or ())
    if left and cluster.sizers is None:
        yield Check("pools", "unknown", f"who sizes {few(left)}: you may not read Deployments of all "
                                        "namespaces")  # fmt: skip
    elif left and not ready:
        yield Check("pools", "warning", f"nobody sizes {few(left)}: no shoal-pools is ready",
                    "helm upgrade … --set pools.enabled=true, or set scaling.mode to Pods "
                    "(docs/pools.md)")  # fmt: skip


def _storage(cluster: Cluster) -> Iterator[Check]:
    if cluster.classes is None:
        yield Check("storage", "unknown", "you may not read StorageClasses")
        return
    default = [
        each["metadata"]["name"]
        for each in cluster.classes
        if (each["metadata"].get("annotations") or {}).get("storageclass.kubernetes.io/is-default-class")
        == "true"
    ]
    if default:
        yield Check("storage", "ok", f"volume claims without a class are of {default[0]}")
    else:
        yield Check("storage", "warning", "no StorageClass is the default",
                    "name one in PersistentVolumeClaims, or use a bucket as storage")  # fmt: skip


def _coordinators(cluster: Cluster) -> Iterator[Check]:
    if cluster.jobs is None:
        yield Check("coordinators", "unknown", f"you may not read TrainingJobs in {cluster.namespace}")
        return
    statuses = [(job["metadata"]["name"], job.get("status") or {}) for job in cluster.jobs]
    running = [
        (name, status)
        for name, status in statuses
        if status.get("phase") == "Running" and (status.get("workers") or {}).get("ready")
    ]
    if not running:
        yield Check("coordinators", "unknown", f"no job runs in the namespace {cluster.namespace}: whether the "
                                               "operator reaches parameter servers shows one that does")  # fmt: skip
    known = {name: bool((status.get("training") or {}).get("phase")) for name, status in running}
    read, unread = ([name for name, is_read in known.items() if is_read is one] for one in (True, False))
    if read:
        yield Check("coordinators", "ok", f"{few(read)}: the operator reads parameter server 0")
    if unread:
        yield Check("coordinators", "warning", f"{few(unread)}: workers run, but the operator has no report of "
                                               f"parameter server 0",
                    "if it stays so: a NetworkPolicy blocks port 7071 from the operator's namespace")  # fmt: skip


CHECKS = (_kubernetes, _kinds, _rights, _operator, _nodes, _pools, _sizers, _storage, _coordinators)


def _open(node: Node, tolerated: Sequence[Toleration]) -> bool:
    """Whether pods with these tolerations may be placed on the node, by its taints."""
    hard = (
        each
        for each in node.spec.taints
        if each.effect in {"NoSchedule", "NoExecute"} and each.key not in NOT_READY
    )
    return all(any(each.tolerates(taint) for each in tolerated) for taint in hard)


NOT_READY = {
    "node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable", "node.kubernetes.io/unschedulable",
}  # fmt: skip
"""Taints of a node that is told to be away."""


def _ready(node: Json) -> bool:
    conditions = node.get("status", {}).get("conditions") or ()
    ready = all(each["status"] == "True" for each in conditions if each["type"] == "Ready")
    return ready and not node.get("spec", {}).get("unschedulable")


def _gpus(node: Json) -> int:
    return int(node.get("status", {}).get("allocatable", {}).get("nvidia.com/gpu", 0))


def _labels(node: Json) -> dict[str, str]:
    return node["metadata"].get("labels") or {}
