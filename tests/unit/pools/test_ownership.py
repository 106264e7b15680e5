"""Who else sizes an object, as it says itself, and what the kind of it promises."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shoal.api.capacity_pool_scaling import ScaleTarget
from shoal.cluster.transport import Answer, Query
from shoal.pools.ownership import MANAGER, most_nodes, sized_by, takes_empty_first
from shoal.pools.rules import Pace, Target
from shoal.pools.scale import ScaleDriver
from tests.unit.cluster.servers import SmallServer

LIMIT = "cluster.x-k8s.io/cluster-api-autoscaler-node-group-max-size"
BY_OTHER = "cluster.x-k8s.io/replicas-managed-by"
OWNER = {"kind": "MachinePool", "name": "blue", "controller": True}


def machines(**meta: Any) -> dict[str, Any]:
    """A MachineDeployment."""
    return {"apiVersion": "cluster.x-k8s.io/v1beta1", "metadata": meta, "spec": {"replicas": 2}}


def node_pool(**spec: Any) -> dict[str, Any]:
    """A NodePool of Karpenter."""
    return {"apiVersion": "karpenter.sh/v1", "metadata": {"resourceVersion": "7"}, "spec": spec}


def written(manager: str, operation: str = "Apply", field: str = "f:replicas") -> dict[str, Any]:
    """A MachineDeployment of which somebody writes a field."""
    entry = {"manager": manager, "operation": operation, "fieldsV1": {"f:spec": {field: {}}}}
    return machines(managedFields=[entry])


@pytest.mark.parametrize(
    ("found", "reason", "words"),
    [
        (machines(deletionTimestamp="2026-01-01T12:00:00Z"), "Deleted", "name another target"),
        (machines(annotations={LIMIT: "9"}), "AutoscalerActive", f"remove {LIMIT}"),
        (machines(annotations={BY_OTHER: "fleets"}), "AutoscalerActive", "fleets manages its replicas"),
        (machines(annotations={BY_OTHER: ""}), "AutoscalerActive", "another manages its replicas"),
        (machines(ownerReferences=[OWNER]), "Controlled", "MachinePool blue sizes it: name that one"),
        (node_pool(), "AutoscalerActive", "without spec.replicas"),
        (node_pool(limits={"nodes": "6"}), "AutoscalerActive", "set spec.scaling.mode to Pods"),
        (written("argocd"), "FieldManager", "argocd applies spec.replicas"),
    ],
)
def test_who_else_sizes_an_object_is_found_in_it(found: dict[str, Any], reason: str, words: str) -> None:
    finding = sized_by(found)
    assert finding is not None
    assert finding.reason == reason
    assert words in finding.message


@pytest.mark.parametrize(
    "found",
    [
        machines(),
        machines(annotations={"example.org/size": "9"}),
        machines(ownerReferences=[{**OWNER, "controller": False}]),
        node_pool(replicas=0),
        written(MANAGER),
        written("kubectl", operation="Update"),
        written("argocd", field="f:template"),
    ],
    ids=["plain", "annotated", "owned", "static", "ours", "updated", "another field"],
)
def test_what_nobody_else_sizes_is_sized(found: dict[str, Any]) -> None:
    assert sized_by(found) is None


@pytest.mark.parametrize(
    ("found", "most", "empty_first"),
    [
        (node_pool(replicas=2, limits={"nodes": "6"}), 6, True),
        (node_pool(replicas=2, limits={"nodes": 6}), 6, True),
        (node_pool(replicas=2, limits={"cpu": "100"}), None, True),
        (node_pool(replicas=2), None, True),
        ({**machines(), "spec": {"limits": {"nodes": "6"}}}, None, False),
    ],
)
def test_limit_and_order_are_karpenters(found: dict[str, Any], most: int | None, empty_first: bool) -> None:
    assert (most_nodes(found), takes_empty_first(found)) == (most, empty_first)


class Karpenter(SmallServer):
    """An API server with one NodePool."""

    def __init__(self, **spec: Any) -> None:
        super().__init__()
        kinds = [
            {"kind": "NodePool", "name": name, "namespaced": False}
            for name in ("nodepools", "nodepools/scale")
        ]
        self.found: dict[str, Any] = {
            "/apis/karpenter.sh/v1": {"resources": kinds},
            "/apis/karpenter.sh/v1/nodepools/static": node_pool(**spec),
            "/apis/karpenter.sh/v1/nodepools/static/scale": {"spec": {"replicas": spec.get("replicas", 0)}},
        }

    def answer(self, _method: str, path: str, _query: Query, _body: Any) -> Answer:
        return Answer(200, json.dumps(self.found[path]).encode())


async def test_what_the_object_says_of_itself_reaches_the_rules() -> None:
    at = ScaleTarget(api_version="karpenter.sh/v1", kind="NodePool", name="static")
    static = await ScaleDriver(Karpenter(replicas=2, limits={"nodes": "6"}), at, Pace()).read()
    assert static == Target(nodes=2, maximum=6, version="7", empty_first=True)
    dynamic = await ScaleDriver(Karpenter(), at, Pace()).read()
    assert dynamic.sized_by == sized_by(node_pool())
