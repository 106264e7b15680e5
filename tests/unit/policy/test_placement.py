"""Where pods go: capacity, the platform's own keys, terms of the template, zones, GPUs."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from shoal import manifests
from shoal.api.kube import Node, Taint, Toleration
from shoal.api.labels import SPOT_LABELS, Place, RoleName
from shoal.api.roles import Capacity
from shoal.manifests.names import group_key
from shoal.manifests.objects import Manifest
from shoal.manifests.placement import Where
from shoal.manifests.platforms import (
    AKS,
    AUTOPILOT,
    EKS,
    GENERIC,
    GKE,
    KARPENTER,
    NODE_GROUPS_KEY,
    PLATFORMS,
    Platform,
    is_spot,
    platform_of,
)
from shoal.manifests.pods import SAFE_TO_EVICT
from shoal.policy.actions import CreatePod
from shoal.policy.facts.sightings import Memory
from shoal.policy.model import Plan, Refusal, RefusalKind
from shoal.policy.plan import plan
from tests.unit.policy import build
from tests.unit.policy.pools import pool

AUTOPILOT_KEYS = {
    "cloud.google.com/compute-class",
    "cloud.google.com/gke-accelerator",
    "cloud.google.com/gke-os-distribution",
    "cloud.google.com/gke-placement-group",
    "cloud.google.com/gke-spot",
    "cloud.google.com/private-node",
    "cloud.google.com/requested-min-cpu-platform",
    "kubernetes.io/arch",
    "kubernetes.io/os",
    "topology.kubernetes.io/region",
    "topology.kubernetes.io/zone",
}
"""Keys that GKE's documentation lists for node affinities of Autopilot pods."""


def pod(role: str = "worker", platform: Platform = GENERIC, **spec: Any) -> dict[str, Any]:
    place = Place("worker", 0, 0) if role == "worker" else Place("ps", 0, 0)
    return manifests.pod(build.job(**spec), place, build.IMAGES, platform=platform)


def terms(made: dict[str, Any]) -> list[dict[str, Any]]:
    required = made["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    found: list[dict[str, Any]] = required["nodeSelectorTerms"]
    return found


def keys_of(role: str, platform: Platform, operator: str) -> list[dict[str, tuple[str, ...]]]:
    """Of each term."""
    found = [each["matchExpressions"] for each in terms(pod(role, platform))]
    assert {each["operator"] for term in found for each in term} == {operator}
    return [{each["key"]: tuple(each["values"]) for each in term} for term in found]


@pytest.mark.parametrize("platform", PLATFORMS.values(), ids=PLATFORMS)
def test_workers_name_the_spot_labels_of_their_platform_and_servers_avoid_all(platform: Platform) -> None:
    """Karpenter simulates a pod for each of its terms: it has one, where all nodes are said to be Karpenter's."""
    assert keys_of("worker", KARPENTER, "In") == [KARPENTER.spot]
    assert sorted(keys_of("worker", platform, "In"), key=str) == sorted(
        ({key: values} for key, values in platform.spot.items()), key=str
    )
    ours = {key: values for key, values in SPOT_LABELS.items() if key != NODE_GROUPS_KEY} | platform.spot
    assert keys_of("ps", platform, "NotIn") == [AUTOPILOT.spot if platform is AUTOPILOT else ours]


@pytest.mark.parametrize("cloud", ["eks", "aks", "karpenter", "none"])
def test_the_key_of_karpenter_is_in_the_last_term(cloud: str) -> None:
    """It drops terms until one is left, and then preferences (kubernetes-sigs/karpenter, preferences.go)."""
    nodes = [node_of(**LABELS[name]) for name in (cloud, "eks") if name in LABELS and cloud != "none"]
    assert keys_of("worker", platform_of(nodes, own=OWN), "In")[-1] == KARPENTER.spot


OWN = Platform("own", spot={"node-lifecycle": ("spot",)}, taints={"reclaimable": "yes"})
LABELS = {
    "gke": {"cloud.google.com/gke-nodepool": "a", "cloud.google.com/gke-spot": "true"},
    "gke, preemptible": {"cloud.google.com/gke-nodepool": "a", "cloud.google.com/gke-preemptible": "true"},
    "eks": {"eks.amazonaws.com/nodegroup": "a", "eks.amazonaws.com/capacityType": "SPOT"},
    "karpenter": {"karpenter.sh/nodepool": "a", "karpenter.sh/capacity-type": "spot"},
    "aks": {"kubernetes.azure.com/agentpool": "a", "kubernetes.azure.com/scalesetpriority": "spot"},
    "own": {"node-lifecycle": "spot"},
}
"""Of a spot node, by platform."""


def node_of(**labels: str) -> Node:
    node = build.node()
    return node.model_copy(update={"metadata": node.metadata.model_copy(update={"labels": labels})})


def admits(made: dict[str, Any], node: Node) -> bool:
    def holds(rule: dict[str, Any]) -> bool:
        return (node.metadata.labels.get(rule["key"]) in rule["values"]) == (rule["operator"] == "In")

    return any(all(holds(rule) for rule in term["matchExpressions"]) for term in terms(made))


@pytest.mark.parametrize("one", LABELS)
@pytest.mark.parametrize("other", LABELS)
def test_no_server_goes_to_a_spot_node_of_any_platform_of_the_cluster(one: str, other: str) -> None:
    """A cluster of EKS has spot groups beside Karpenter's nodes, one of AKS node pools beside its own provisioning."""
    nodes = [node_of(**LABELS[one]), node_of(**LABELS[other])]
    platform = platform_of(nodes, own=OWN)
    for node in nodes:
        assert is_spot(node, platform)
        assert not admits(pod("ps", platform), node)
        assert admits(pod("worker", platform), node)
    assert len(terms(pod("ps", platform))) == 1
    assert "reclaimable" in {each["key"] for each in pod("worker", platform)["spec"]["tolerations"]}
    assert "reclaimable" not in {each["key"] for each in pod("ps", platform)["spec"]["tolerations"]}


@pytest.mark.parametrize("cloud", ["eks", "aks"])
def test_a_karpenter_that_has_no_node_yet_makes_spot_nodes_for_workers_and_none_for_a_server(
    cloud: str,
) -> None:
    platform, karpenters = platform_of([node_of(**LABELS[cloud])]), node_of(**LABELS["karpenter"])
    assert not admits(pod("ps", platform), karpenters)
    assert admits(pod("worker", platform), karpenters)


@pytest.mark.parametrize("spot", [each for each in LABELS if each != "own"])
def test_no_server_goes_to_a_spot_node_of_whatever_is_not_said(spot: str) -> None:
    """Such as a node pool of AKS, where somebody said that the platform is Karpenter."""
    for platform in PLATFORMS.values():
        refused = platform is AUTOPILOT or (spot == "eks" and NODE_GROUPS_KEY not in platform.spot)
        assert refused or not admits(pod("ps", platform), node_of(**LABELS[spot]))


@pytest.mark.parametrize("role", ["worker", "ps"])
@pytest.mark.parametrize("said", [None, KARPENTER])
def test_the_karpenter_of_eks_auto_mode_makes_nodes_for_all_pods(said: Platform | None, role: str) -> None:
    """It ignores a pod that names a key of its provider's domain which it does not know, even to avoid it."""
    labels = {**LABELS["karpenter"], "eks.amazonaws.com/compute-type": "auto"}
    made = pod(role, platform_of([node_of(**labels)] if said is None else [], said))
    keys = {rule["key"] for term in terms(made) for rule in term["matchExpressions"]}
    assert not [key for key in keys if key.startswith("eks.amazonaws.com/")]


@pytest.mark.parametrize("capacity", ["Spot", "OnDemand", "Any"])
@pytest.mark.parametrize("incarnation", [0, 1])
@pytest.mark.parametrize("excluded", [(), ("node-1",)])
@pytest.mark.parametrize("zone", ["Same", "Preferred", "Any"])
@pytest.mark.parametrize("role", ["worker", "ps"])
def test_autopilot_admits_every_pod(
    role: RoleName, zone: Any, excluded: tuple[str, ...], incarnation: int, capacity: Capacity
) -> None:
    """It refuses other keys of node selectors and affinities (`autogke-node-affinity-selector-limitation`)."""
    where = Where(capacity, zone=zone, excluded=excluded)
    made = manifests.pod(build.job(), Place(role, 0, incarnation), build.IMAGES, where, AUTOPILOT)
    affinity = made["spec"]["affinity"].get("nodeAffinity", {"required": {"nodeSelectorTerms": []}})
    found = [term for rule in affinity.values() for term in rule["nodeSelectorTerms"]]
    assert {e["key"] for term in found for e in term["matchExpressions"]} <= AUTOPILOT_KEYS
    assert not any("matchFields" in term for term in found)
    assert not made["spec"].get("nodeSelector")
    assert not any(made["spec"].get(field) for field in ("hostNetwork", "hostPID", "hostIPC"))
    assert not any("hostPath" in volume for volume in made["spec"]["volumes"])


@pytest.mark.parametrize("platform", PLATFORMS.values(), ids=PLATFORMS)
def test_a_server_keeps_its_node_from_the_autoscaler_where_that_is_all_that_it_asks_for(
    platform: Platform,
) -> None:
    """Autopilot takes it as a wish for a longer run time, which it has neither for spot pods nor for any with a term
    about other pods, as each replacement has: the autoscaler makes no node for them."""
    asked = pod("ps", platform)["metadata"]["annotations"].get(SAFE_TO_EVICT)
    assert asked == (None if platform is AUTOPILOT else "false")
    assert pod("worker", platform)["metadata"]["annotations"] == {SAFE_TO_EVICT: "true"}
    mine = {"metadata": {"annotations": {SAFE_TO_EVICT: "false"}}}
    assert (
        pod("ps", platform, parameterServers={"template": mine})["metadata"]["annotations"][SAFE_TO_EVICT]
        == "false"
    )


def test_a_pod_goes_where_its_image_runs_unless_its_pool_or_template_says_otherwise() -> None:
    arch, images = "kubernetes.io/arch", replace(build.IMAGES, node_selector={"kubernetes.io/arch": "amd64"})

    def selected(where: Where | None = None, **template: Any) -> dict[str, str]:
        job = build.job(workers={"replicas": 1, "template": {"spec": template}})
        return manifests.pod(job, Place("worker", 0, 0), images, where, GKE)["spec"].get("nodeSelector", {})

    arm = pool("arm", nodeSelector={"pool": "arm", arch: "arm64"})
    assert selected() == {arch: "amd64"}
    assert selected(nodeSelector={"team": "ml"}) == {arch: "amd64", "team": "ml"}
    assert selected(nodeSelector={arch: "arm64"}) == {arch: "arm64"}
    assert selected(Where("Any", pool=arm)) == {"pool": "arm", arch: "arm64"}
    either = {"matchExpressions": [{"key": arch, "operator": "In", "values": ["arm64", "amd64"]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [either]}}
    assert selected(affinity={"nodeAffinity": required}) == {}  # with both, a pod of arm64 fits nowhere
    assert selected(affinity={"nodeAffinity": None}) == {arch: "amd64"}


@pytest.mark.parametrize("role", ["worker", "ps"])
def test_silent_node_keeps_a_pod_for_15_s_only_where_the_operator_does_not_see_it(role: RoleName) -> None:
    """Else the operator replaces those that are not heard, and Kubernetes would delete those that are."""

    def silence(platform: Platform) -> dict[str, int]:
        made = manifests.pod(build.job(), Place(role, 0, 0), build.IMAGES, Where("Spot"), platform)
        return {
            t["key"]: t.get("tolerationSeconds")
            for t in made["spec"]["tolerations"]
            if t["effect"] == "NoExecute"
        }

    assert silence(GKE) == {}
    assert silence(GKE.unread) == {"node.kubernetes.io/not-ready": 15, "node.kubernetes.io/unreachable": 15}


@pytest.mark.parametrize("role", ["worker", "ps"])
@pytest.mark.parametrize("platform", PLATFORMS.values(), ids=PLATFORMS)
def test_nothing_is_placed_on_a_node_that_is_unknown(platform: Platform, role: RoleName) -> None:
    """The scheduler keeps pods off a node with these taints, unless they tolerate them."""
    for where in (Where("Spot"), Where("OnDemand"), Where("Any", pool=pool("a"))):
        made = manifests.pod(build.job(), Place(role, 0, 0), build.IMAGES, where, platform)
        tolerated = [Toleration(**t) for t in map(_plain, made["spec"]["tolerations"])]
        for key in ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready"):
            unknown = Taint(key=key, effect="NoSchedule")
            assert not any(each.tolerates(unknown) for each in tolerated)


def _plain(toleration: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in toleration.items() if key != "tolerationSeconds"}


def test_excluded_nodes_are_named_where_that_is_admitted() -> None:
    where = Where("Spot", excluded=("node-1", "node-2"))
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in where.excluded]
    for term in terms(manifests.pod(build.job(), Place("worker", 0, 0), build.IMAGES, where, GKE)):
        assert term["matchFields"] == fields
        assert term["matchExpressions"], "it asks for spot nodes, too"
    (term,) = terms(manifests.pod(build.job(), Place("worker", 0, 0), build.IMAGES, where, KARPENTER))
    assert "matchFields" not in term


@pytest.mark.parametrize(
    ("label", "platform"),
    [
        ("cloud.google.com/gke-nodepool", GKE),
        ("eks.amazonaws.com/nodegroup", EKS),
        ("karpenter.sh/nodepool", KARPENTER),
        ("kubernetes.azure.com/agentpool", AKS),
        ("kubernetes.io/hostname", GENERIC),
    ],
)
def test_platform_is_detected_by_the_labels_of_nodes(label: str, platform: Platform) -> None:
    assert platform_of([node_of(**{label: "x"})]) is platform


def test_karpenter_goes_before_the_cloud_that_it_runs_on() -> None:
    assert list(PLATFORMS) == ["karpenter", "gke", "autopilot", "eks", "aks", "generic"]


def test_capacity_any_has_no_affinity_and_both_roles_can_be_moved() -> None:
    anywhere = pod(workers={"replicas": 1, "capacity": "Any"})
    assert "nodeAffinity" not in anywhere["spec"]["affinity"]
    assert "nodeAffinity" not in pod("ps", parameterServers={"capacity": "Any"})["spec"]["affinity"]
    (term,) = terms(pod(platform=EKS, workers={"replicas": 1, "capacity": "OnDemand"}))
    assert term["matchExpressions"][0]["operator"] == "NotIn"
    (term,) = terms(pod("ps", platform=KARPENTER, parameterServers={"capacity": "Spot"}))
    assert term["matchExpressions"][0]["operator"] == "In"


def test_terms_of_the_template_are_added_and_never_replace_the_rule() -> None:
    theirs = [
        {"matchExpressions": [{"key": "disk", "operator": "In", "values": ["ssd"]}]},
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]},
    ]
    affinity = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": theirs}}
    }
    template = {"spec": {"affinity": affinity}}
    found = terms(pod(platform=AUTOPILOT, workers={"replicas": 1, "template": template}))
    spot = {"key": "cloud.google.com/gke-spot", "operator": "In", "values": ["true"]}
    assert found == [
        {"matchExpressions": [spot, *theirs[0]["matchExpressions"]]},
        {"matchExpressions": [spot], "matchFields": theirs[1]["matchFields"]},
    ]


def gpu(container: str) -> dict[str, Any]:
    limits = {"nvidia.com/gpu": 1}
    return {"spec": {"containers": [{"name": container, "resources": {"limits": limits}}]}}


def test_gpu_toleration_only_where_a_gpu_is_requested() -> None:
    def tolerated(made: dict[str, Any]) -> set[str]:
        return {t["key"] for t in made["spec"]["tolerations"]}

    assert "nvidia.com/gpu" not in tolerated(pod())
    assert "nvidia.com/gpu" in tolerated(pod(workers={"replicas": 1, "template": gpu("worker")}))
    assert "nvidia.com/gpu" not in tolerated(pod("ps"))


def test_zone_policy_keeps_workers_near_the_servers() -> None:
    hard = pod(workers={"replicas": 1, "zonePolicy": "Same"})["spec"]["affinity"]["podAffinity"]
    (term,) = hard["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "topology.kubernetes.io/zone"
    assert term["labelSelector"]["matchLabels"] == {"shoal.dev/job-uid": build.UID, "shoal.dev/role": "ps"}
    soft = pod(workers={"replicas": 1, "zonePolicy": "Preferred"})["spec"]["affinity"]["podAffinity"]
    assert "preferredDuringSchedulingIgnoredDuringExecution" in soft
    assert "podAffinity" not in pod()["spec"]["affinity"]


def test_queue_of_kueue_is_a_label_of_all_pods() -> None:
    spec = {"runPolicy": {"schedulingPolicy": {"queue": "research"}}}
    for role in ("worker", "ps"):
        assert pod(role, **spec)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
        assert "kueue.x-k8s.io/queue-name" not in pod(role)["metadata"]["labels"]


def test_pods_of_a_gang_have_the_label_of_its_group() -> None:
    spec = {"runPolicy": {"schedulingPolicy": {"gang": "PodGroup"}}}
    for role in ("worker", "ps"):
        group = f"digits-gang-{build.UID[:8]}"
        assert pod(role, **spec)["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == group
        assert "scheduling.x-k8s.io/pod-group" not in pod(role)["metadata"]["labels"]


@pytest.mark.parametrize(
    ("gang", "placed", "told"),
    [
        ("NoPodGroups", 0, "0/1 nodes"),
        ("PodGroup", 0, "room for 2 of them together: all parameter servers and workers.minReplicas"),
        ("PodGroup", 2, "0/1 nodes"),
        ("None", 0, "0/1 nodes"),
    ],
)
def test_a_gang_without_room_is_told_as_a_gang(gang: str, placed: int, told: str) -> None:
    refused = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}]
    places: list[tuple[RoleName, int]] = [("ps", 0), ("worker", 0), ("worker", 1)]
    waits = {
        "phase": "Pending",
        "node": None,
        "state": {},
        "conditions": refused,
        "created": build.NOW - timedelta(seconds=61),
    }
    pods = [
        build.pod(role, index, **({} if number < placed else waits))
        for number, (role, index) in enumerate(places)
    ]
    job = build.job(runPolicy={"schedulingPolicy": {"gang": "None" if gang == "None" else "PodGroup"}})
    refusal = Refusal(RefusalKind.INVALID, group_key(job), "no such kind", (1, 0), 0.0)
    refusals = (refusal,) if gang == "NoPodGroups" else ()
    degraded = plan(build.observe(job, *pods, refusals=refusals)).status.condition("Degraded")
    assert degraded is not None
    assert degraded.reason == "Unschedulable"
    assert told in degraded.message
    assert "the pod needs a" in degraded.message


def test_pods_that_wait_for_a_queue_are_told_as_queued() -> None:
    gated = [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "gated"}]
    a_pod = build.pod(phase="Pending", node=None, state={}, conditions=gated)
    degraded = plan(build.observe(build.job(), a_pod)).status.condition("Degraded")
    assert degraded is not None
    assert degraded.reason == "Queued"


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (
            {},
            "(no node of this cluster has a known spot label); on other nodes it runs with workers.capacity: Any",
        ),
        (None, "the pod needs a spot node with room for its requests; on other nodes"),
    ],
)
def test_refusal_on_a_cluster_without_spot_labels_says_so(nodes: dict[str, Any] | None, words: str) -> None:
    unschedulable = [{"type": "PodScheduled", "status": "False", "message": "0/4 nodes are available"}]
    a_pod = build.pod(
        phase="Pending", node=None, state={}, conditions=unschedulable, created=build.NOW.replace(hour=11)
    )
    more = {} if nodes is None else {"nodes": nodes}
    degraded = plan(build.observe(build.job(), a_pod, **more)).status.condition("Degraded")
    assert degraded is not None
    assert words in degraded.message


def test_pods_of_one_job_share_what_they_have_in_common_and_differ_in_the_rest() -> None:
    factory = manifests.PodFactory(build.job(), build.IMAGES)
    made = [factory.pod(Place("worker", i, n)) for i, n in ((0, 0), (7, 0), (7, 3))]
    alone = [
        manifests.pod(build.job(), Place("worker", i, n), build.IMAGES) for i, n in ((0, 0), (7, 0), (7, 3))
    ]
    assert made == alone
    assert len({str(each) for each in made}) == 3


def manifests_of(made: Plan) -> list[Manifest]:
    return [each.manifest for each in made.actions if isinstance(each, CreatePod)]


def test_a_template_is_merged_once_while_pods_of_it_are_still_to_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The largest one takes milliseconds, and a job that begins is planned again with each answer."""
    merged = list[str]()

    def counted(job: Any, place: Place, *_more: Any) -> Any:
        merged.append(place.role)
        return defaults(job, place, *_more)

    defaults = manifests.pods._defaults
    monkeypatch.setattr(manifests.pods, "_defaults", counted)
    job, memory = build.job(), Memory()
    first = manifests_of(plan(build.observe(job), memory))
    assert len(first) == 4
    second = plan(build.observe(job, build.pod("ps", phase="Pending", node=None, state={})), memory)
    assert len(manifests_of(second)) == 3
    assert merged == ["ps", "worker"]
    assert manifests_of(second) == first[1:]
    running = [build.pod("ps"), *(build.pod(index=index) for index in range(3))]
    plan(build.observe(job, *running), memory)
    assert manifests_of(plan(build.observe(job), memory)) == first
    assert merged == 2 * ["ps", "worker"]


def test_a_template_is_merged_again_where_anything_in_it_has_changed() -> None:
    """Nodes that are excluded, the platform, an image, and a template."""
    memory, told = Memory(), set()
    until = build.stamp(build.NOW + timedelta(hours=1))
    excluded = {"excludedNodes": [{"node": "node-1", "until": until, "reason": "Failures"}]}
    template = {"spec": {"containers": [{"name": "worker", "image": "mine"}]}}
    job = build.job()
    other_status = job.model_copy(update={"status": build.job(excluded).status})
    observations = [
        build.observe(job),
        build.observe(other_status),
        build.observe(other_status, platform=GKE),
        build.observe(other_status, platform=GKE, images=replace(build.IMAGES, worker="shoal/worker:newer")),
        build.observe(build.job(excluded, workers={"replicas": 3, "template": template}), platform=GKE),
    ]
    for seen in observations:
        made = manifests_of(plan(seen, memory))
        assert made == manifests_of(plan(seen))
        told.add(str(made))
    assert len(told) == len(observations)
