"""What is missing on a cluster, and what a user may not see."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from shoal.api.crd import KINDS as MODELS
from shoal.api.crd import custom_resource_definition, published
from shoal.client.doctor import KINDS, RIGHTS, TAKEN, Cluster, diagnose, read

SPOT = {"cloud.google.com/gke-spot": "true"}


def node(name: str, gpus: int = 0, **labels: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": labels},
        "status": {"allocatable": {"nvidia.com/gpu": str(gpus)}},
    }


def operator_of(namespace: str, **variables: str) -> dict[str, Any]:
    """Its Deployment."""
    variables = {"SHOAL_NAMESPACE": namespace, **variables}
    said = [{"name": name, "value": value} for name, value in variables.items()]
    containers = [{"name": "proxy"}, {"name": "operator", "env": [{"name": "POD_NAME"}, *said]}]
    return {
        "metadata": {"namespace": "shoal-system", "name": "shoal"},
        "spec": {"replicas": 2, "template": {"spec": {"containers": containers}}},
        "status": {"readyReplicas": 2},
    }


def pool(ready: str = "True", message: str = "", **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "l4"},
        "spec": {"nodeSelector": SPOT, "price": {"perHour": 0.28}, **spec},
        "status": {"nodes": 3, "conditions": [{"type": "Ready", "status": ready, "message": message}]},
    }


RUNNING = {
    "metadata": {"name": "digits"},
    "status": {"phase": "Running", "workers": {"ready": 1}, "training": {"phase": "Training"}},
}
SCALED = pool(scaling={"mode": "Scale"})
SCHEMAS = {
    published(model): custom_resource_definition(model)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for model in MODELS
}
GOOD = Cluster(
    version={"major": "1", "minor": "36+", "gitVersion": "v1.36.2"},
    resources=KINDS,
    schemas=SCHEMAS,
    rights=dict.fromkeys(RIGHTS, True),
    namespace="team",
    deployments=[operator_of("")],
    leases=[
        {
            "metadata": {"namespace": "shoal-system", "name": "shoal"},
            "spec": {"holderIdentity": "shoal-1", "renewTime": "2026-11-23T23:59:58.000000Z"},
        }
    ],
    renewed={("shoal-system", "shoal")},
    nodes=[node("safe"), node("spot", 1, **SPOT)],
    pools=[],
    jobs=[RUNNING],
    classes=[
        {"metadata": {"name": "fast", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}}
    ],
)


def test_nothing_is_wrong_with_a_good_cluster() -> None:
    checks = diagnose(GOOD)
    assert {each.state for each in checks} == {"ok"}
    assert "shoal-1 works: it renews its Lease" in [each.message for each in checks]
    assert "1 spot node for workers, 1 without a spot label for parameter servers" in [
        each.message for each in checks
    ]


def test_crds_of_an_older_version_are_told_and_what_they_do_not_keep() -> None:
    """They drop it, and so what an operator of this version has measured; those of a newer one keep everything."""
    other = copy.deepcopy(SCHEMAS)
    job, profile = (
        next(value for name, value in other.items() if name.endswith(kind))["properties"]
        for kind in ("TrainingJob", "SpeedProfile")
    )
    job["status"]["properties"]["newer"] = {"type": "string"}
    assert {each.state for each in diagnose(replace(GOOD, schemas=other))} == {"ok"}
    del (
        job["status"]["properties"]["slots"]["items"]["properties"]["pool"],
        job["spec"]["properties"]["elasticity"],
    )
    del profile["status"]["properties"]["besideSteps"]
    [check] = [each for each in diagnose(replace(GOOD, schemas=other)) if each.state != "ok"]
    assert (check.name, check.state) == ("crds", "warning")
    assert check.message == (
        "of an older version than this command: without TrainingJob.spec.elasticity, TrainingJob.status.slots[].pool, "
        "SpeedProfile.status.besideSteps"
    )
    assert "kubectl apply --server-side -f crds/" in check.help


@pytest.mark.parametrize(("first", "second"), [("", ""), ("", "team"), ("team", "team")])
def test_two_operators_of_the_namespace_are_told(first: str, second: str) -> None:
    """They work against each other: each has a key of its own, and both write the status."""
    one, other = operator_of(first), operator_of(second)
    other["metadata"] = {"namespace": "team-tools", "name": "shoal"}
    lease = {**GOOD.leases[0], "metadata": other["metadata"]} if GOOD.leases else {}
    renewed = {("shoal-system", "shoal"), ("team-tools", "shoal")}
    two = replace(GOOD, deployments=[one, other], leases=[*(GOOD.leases or ()), lease], renewed=renewed)
    [check] = [each for each in diagnose(two) if each.state != "ok"]
    assert (check.name, check.state) == ("operator", "broken")
    assert "shoal-system/shoal and team-tools/shoal work for the namespace team" in check.message
    other["spec"]["replicas"] = 0
    assert "work against each other" not in " ".join(each.message for each in diagnose(two))


def test_an_operator_of_this_namespace_is_enough() -> None:
    checks = diagnose(replace(GOOD, deployments=[operator_of("other"), operator_of("team")]))
    assert {each.state for each in checks} == {"ok"}
    assert "shoal-system/shoal: 2 of 2 replicas ready, for the namespace team" in [
        each.message for each in checks
    ]


def test_a_broken_operator_of_another_namespace_breaks_nothing_here() -> None:
    """It was told as broken, with exit code 1, to who asked about a namespace whose operator works."""
    away = operator_of("other") | {"metadata": {"namespace": "theirs", "name": "shoal"}, "status": {}}
    checks = diagnose(replace(GOOD, deployments=[away, operator_of("team")]))
    assert [(each.name, each.state) for each in checks if each.state != "ok"] == [
        ("operator", "warning"),
        ("leader", "warning"),
    ]
    alone = diagnose(replace(GOOD, deployments=[away]))
    assert [each.message for each in alone if each.state == "broken"] == [
        "no operator works for the namespace team"
    ]


SCALED_TO_NONE = operator_of("") | {"status": {}}
SCALED_TO_NONE["spec"]["replicas"] = 0
AWAY = {"type": "Ready", "status": "Unknown"}


@pytest.mark.parametrize(
    ("changes", "name", "state", "words"),
    [
        ({"version": {"major": "1", "minor": "28", "gitVersion": "v1.28"}}, "kubernetes", "broken", "1.29 or newer"),
        ({"resources": ["trainingjobs"]}, "crds", "broken", "helm install"),
        ({"rights": dict.fromkeys(RIGHTS, False)}, "permissions", "warning", "roles edit and admin"),
        ({"deployments": []}, "operator", "broken", "jobs wait until an operator runs"),
        ({"deployments": None}, "operator", "unknown", ""),
        ({"leases": [], "renewed": ()}, "leader", "broken", "logs -l app.kubernetes.io/name=shoal --prefix"),
        ({"deployments": [SCALED_TO_NONE]}, "operator", "broken", "describe pods"),
        ({"renewed": ()}, "leader", "broken", "logs -l app.kubernetes.io/name=shoal --prefix"),
        ({"nodes": [node("safe")]}, "nodes", "warning", "kubectl label node NODE cloud.google.com/gke-spot=true"),
        ({"nodes": [node("s", **SPOT)]}, "nodes", "warning", "parameterServers.capacity is Any"),
        (
            {"nodes": [node("safe"), node("s", **SPOT) | {"status": {"conditions": [AWAY]}}]},
            "nodes", "warning", "kubectl describe node",
        ),
        (
            {"nodes": [node("g", 0, **{"cloud.google.com/gke-accelerator": "nvidia-l4"}), node("safe")]},
            "accelerators", "broken", "device plugin",
        ),
        ({"pools": [pool("False", "no node is in this pool")]}, "pools", "warning", "no node is in this pool"),
        ({"pools": [pool("Unknown", "nodes cannot be read")]}, "pools", "warning", "nodes cannot be read"),
        ({"pools": [pool() | {"status": {}}]}, "pools", "warning", "no operator has looked at it yet"),
        ({"deployments": [operator_of("other")]}, "operator", "broken", "submit jobs to other, or"),
        ({"pools": [SCALED], "sizers": []}, "pools", "warning", "pools.enabled=true"),
        ({"classes": []}, "storage", "warning", "use a bucket"),
        (
            {"jobs": [{"metadata": {"name": "digits"}, "status": {"phase": "Running", "workers": {"ready": 1}}}]},
            "coordinators", "warning", "port 7071",
        ),
    ],
)  # fmt: skip
def test_what_is_missing_is_named_with_a_way_out(
    changes: dict[str, Any], name: str, state: str, words: str
) -> None:
    assert GOOD.leases is not None
    [check] = [
        each for each in diagnose(replace(GOOD, **changes)) if each.name == name and each.state != "ok"
    ]
    assert check.state == state
    assert words in check.help


@pytest.mark.parametrize(
    ("gpu", "told"),
    [
        ("r.io/shoal-worker-gpu:1", True),
        ("r.io/shoal-worker-gpu:2", False),
        ("r.io/own-gpu:7", False),
        ("r.io/shoal-worker-gpu@sha256:aa", False),
        ("", False),
    ],
)
def test_an_image_for_gpus_that_an_upgrade_left_behind_is_told(gpu: str, told: bool) -> None:
    """Of one's own, a tag says nothing."""
    operator = operator_of("", SHOAL_IMAGE_PS="r.io/shoal-ps:2", SHOAL_IMAGE_WORKER_GPU=gpu)
    wrong = [each for each in diagnose(replace(GOOD, deployments=[operator])) if each.state != "ok"]
    assert [(each.name, each.state) for each in wrong] == ([("images", "warning")] if told else [])
    assert all("--set trainer.workerGpuImage=r.io/shoal-worker-gpu:2" in each.help for each in wrong)


def test_a_thousand_coordinators_are_a_line() -> None:
    many = [copy.deepcopy(RUNNING) for _ in range(1000)]
    for number, each in enumerate(many):
        each["metadata"]["name"] = f"job-{number}"
    del many[500]["status"]["training"]
    checks = [each for each in diagnose(replace(GOOD, jobs=many)) if each.name == "coordinators"]
    assert [each.state for each in checks] == ["ok", "warning"]
    assert "and 996 more" in checks[0].message
    assert checks[1].message.startswith("job-500:")


@pytest.mark.parametrize(
    "jobs", [[], [{"metadata": {"name": "new"}}], [RUNNING | {"status": {"phase": "Failed"}}]]
)
def test_the_way_to_coordinators_is_unknown_where_no_job_runs(jobs: list[dict[str, Any]]) -> None:
    [check] = [each for each in diagnose(replace(GOOD, jobs=jobs)) if each.state != "ok"]
    assert (check.name, check.state) == ("coordinators", "unknown")
    assert "no job runs in the namespace team" in check.message


OWN = {"SHOAL_SPOT_LABELS": "node-lifecycle=spot", "SHOAL_SPOT_TAINTS": "reclaimable=yes"}


@pytest.mark.parametrize(
    ("operators", "words"),
    [
        ([operator_of("", **OWN)], "1 spot node for workers, 1 without a spot label for parameter servers"),
        ([operator_of("other"), operator_of("team", **OWN)], "1 spot node for workers, 1 without a spot label"),
        ([operator_of("other", **OWN), operator_of("team")], "0 spot nodes for workers, 1 without a spot label"),
        ([operator_of("", SHOAL_SPOT_LABELS="spot")], "0 spot nodes for workers"),
        (None, "spotLabels of the installation are not known"),
    ],
)  # fmt: skip
def test_spot_nodes_are_those_that_the_installation_names_too(
    operators: list[dict[str, Any]] | None, words: str
) -> None:
    reclaimable = {"key": "reclaimable", "value": "yes", "effect": "NoSchedule"}
    nodes = [node("safe"), tainted("ours", reclaimable, **{"node-lifecycle": "spot"})]
    checks = diagnose(replace(GOOD, nodes=nodes, deployments=operators))
    [found] = [each for each in checks if each.name == "nodes"]
    assert words in found.message


def test_pools_that_are_sized_are_fine() -> None:
    sizers = [{"status": {"readyReplicas": 1}}]
    assert {each.state for each in diagnose(replace(GOOD, pools=[SCALED], sizers=sizers))} == {"ok"}


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        ({"leases": None}, "leader", "you may not read Leases"),
        ({"schemas": None}, "crds", "whether they are older than this command"),
        ({"nodes": None}, "nodes", "you may not read nodes"),
        ({"pools": None}, "pools", "you may not read CapacityPools"),
        ({"pools": [SCALED], "sizers": None}, "pools", "who sizes l4: you may not read Deployments"),
        ({"classes": None}, "storage", "you may not read StorageClasses"),
        ({"jobs": None}, "coordinators", "you may not read TrainingJobs"),
    ],
)
def test_what_may_not_be_read_is_unknown_and_not_left_out(
    changes: dict[str, Any], name: str, words: str
) -> None:
    [check] = [each for each in diagnose(replace(GOOD, **changes)) if each.state != "ok"]
    assert (check.name, check.state) == (name, "unknown")
    assert words in check.message


def tainted(name: str, *taints: dict[str, str], **labels: str) -> dict[str, Any]:
    return node(name, **labels) | {"spec": {"taints": [*taints]}}


CONTROL_PLANE = {"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}
SPOT_TAINT = {"key": "cloud.google.com/gke-spot", "value": "true", "effect": "NoSchedule"}
TEAM = {"key": "team", "value": "a", "effect": "NoSchedule"}
OF_THE_TEAM = {"price": {"perHour": 1}, "tolerations": [{"key": "team", "value": "a"}]}
CLOSED = [tainted("cp", CONTROL_PLANE), node("safe"), node("s", **SPOT)]


@pytest.mark.parametrize(
    ("nodes", "pools", "state", "words"),
    [
        ([tainted("cp", CONTROL_PLANE), tainted("spot", SPOT_TAINT, **SPOT)], [], "warning", "1 spot node"),
        (CLOSED, [], "ok", "1 without a spot label"),
        (CLOSED, [], "ok", "do not tolerate: cp"),
        ([tainted("safe", TEAM), node("s", **SPOT)], [], "warning", "do not tolerate: safe"),
        (
            [tainted("safe", TEAM), node("s", **SPOT)],
            [{"metadata": {"name": "p"}, "spec": OF_THE_TEAM}],
            "ok", "1 without a spot label",
        ),
    ],
)  # fmt: skip
def test_a_node_that_no_pod_may_use_is_not_counted(
    nodes: list[dict[str, Any]], pools: list[dict[str, Any]], state: str, words: str
) -> None:
    [found] = [each for each in diagnose(replace(GOOD, nodes=nodes, pools=pools)) if each.name == "nodes"]
    assert found.state == state
    assert words in found.message


@pytest.mark.parametrize(
    ("holder", "renewals", "waited"), [("shoal-1", 3, 3), ("shoal-1", 0, TAKEN), ("", 0, 0)]
)
def test_an_operator_works_if_its_lease_is_seen_to_change(holder: str, renewals: int, waited: int) -> None:
    """ "Nobody holds the Lease" was said wherever the laptop's clock was 40 s ahead."""
    seconds = 0.0

    class Api:
        namespace = "team"

        def get(self, path: str) -> dict[str, Any]:
            return {"resources": []} if path.startswith("/apis") else dict(GOOD.version)

        def may(self, *_right: str, namespace: str) -> bool:
            return namespace == "team"

        def list(self, path: str, labelSelector: str = "") -> list[dict[str, Any]]:
            if path.endswith("/deployments"):
                return list(GOOD.deployments or ()) if labelSelector.endswith("=shoal") else []
            spec = {
                "holderIdentity": holder,
                "renewTime": f"2001-01-01T00:00:{seconds // 3 if renewals else 0}",
            }
            of_a_node = {
                "metadata": {"namespace": "kube-node-lease", "name": "a"},
                "spec": {"holderIdentity": "a"},
            }
            return [{**(GOOD.leases or ())[0], "spec": spec}, of_a_node] if path.endswith("/leases") else []

    def pause(by: float) -> None:
        nonlocal seconds
        seconds += by

    api: Any = Api()
    found = read(api, pause=pause)
    assert seconds == waited
    [leader] = [each for each in diagnose(found) if each.name == "leader"]
    assert leader.state == ("ok" if renewals else "broken")
