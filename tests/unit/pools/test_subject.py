"""How the status and people call what a pool sizes."""

from __future__ import annotations

from shoal.api.capacity_pool_scaling import (
    Buffer,
    CloudGroup,
    EksNodegroup,
    GkeNodePool,
    ScaleTarget,
    Subject,
)
from shoal.pools.subject import identity
from tests.unit.policy.pools import pool

GROUP = ScaleTarget(
    api_version="cluster.x-k8s.io/v1beta1", kind="MachineDeployment", name="spot", namespace="capi"
)
NODE_POOL = ScaleTarget(api_version="karpenter.sh/v1", kind="NodePool", name="spot")
EKS = EksNodegroup(region="eu-west-1", cluster="main", nodegroup="spot")
GKE = GkeNodePool(project="shop", location="europe-west1", cluster="main", node_pool="spot")
NAMED = {
    "MachineDeployment.cluster.x-k8s.io capi/spot": Subject(target=GROUP),
    "NodePool.karpenter.sh spot": Subject(target=NODE_POOL),
    "ReplicationController capi/spot": Subject(
        target=GROUP.model_copy(update={"api_version": "v1", "kind": "ReplicationController"})
    ),
    "CapacityBuffer buffers/shoal-t4": Subject(buffer=Buffer(namespace="buffers", requests={"cpu": "7"})),
    "EKS node group eu-west-1/main/spot": Subject(cloud=CloudGroup(eks=EKS)),
    "GKE node pool shop/europe-west1/main/spot": Subject(cloud=CloudGroup(gke=GKE)),
}


def test_each_thing_that_is_sized_has_a_name_of_its_own() -> None:
    """Of two with one name, the second would be sized with what is remembered of the first."""
    assert [identity(pool("t4"), each) for each in NAMED.values()] == list(NAMED)


def test_a_new_version_of_its_api_is_the_same_thing() -> None:
    later = Subject(target=GROUP.model_copy(update={"api_version": "cluster.x-k8s.io/v1"}))
    assert identity(pool("t4"), later) == identity(pool("t4"), Subject(target=GROUP))
