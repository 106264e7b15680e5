"""What a pool sizes, as one word to compare and to tell people, and the driver for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache, partial

from shoal.api.capacity_pool import CapacityPool
from shoal.api.capacity_pool_scaling import Scaling, Subject
from shoal.cluster.transport import Transport
from shoal.manifests.platforms import Platform
from shoal.pools.buffer import BufferDriver
from shoal.pools.driver import Driver, Fence
from shoal.pools.eks import EksDriver, eks_client
from shoal.pools.gke import GkeDriver, gke_clients
from shoal.pools.rules import Pace
from shoal.pools.scale import ScaleDriver

Drivers = Callable[[CapacityPool, Subject], Driver]
"""Makes the driver of what a pool sizes, or sized."""


def subject_of(scaling: Scaling) -> Subject | None:
    """What the spec says to size; None: nothing, pending pods do."""
    if scaling.mode == "Pods":
        return None
    return Subject(target=scaling.target, buffer=scaling.buffer, cloud=scaling.cloud)


def identity(pool: CapacityPool, subject: Subject) -> str:
    """Equal for what is the same thing, whatever the version of its API or its details."""
    if (target := subject.target) is not None:
        group = target.api_version.rpartition("/")[0]
        kind = f"{target.kind}.{group}" if group else target.kind
        return f"{kind} {target.namespace}/{target.name}" if target.namespace else f"{kind} {target.name}"
    if subject.buffer is not None:
        return f"CapacityBuffer {subject.buffer.namespace}/shoal-{pool.metadata.name}"
    if subject.cloud is not None and (eks := subject.cloud.eks) is not None:
        return f"EKS node group {eks.region}/{eks.cluster}/{eks.nodegroup}"
    if subject.cloud is not None and (gke := subject.cloud.gke) is not None:
        return f"GKE node pool {gke.project}/{gke.location}/{gke.cluster}/{gke.node_pool}"
    return ""


def keeps_paid_nodes(subject: Subject) -> bool:
    """Whether nodes stay when the pool is deleted, unless their number is given back."""
    return subject.buffer is None


def drivers(transport: Transport, platform: Platform, selector: Mapping[str, str], fence: Fence) -> Drivers:
    """The drivers of the modes that size something. Those of a cloud share its clients.

    `platform`, `selector`: of the installation's nodes; see `BufferDriver`.
    """
    eks, gke = cache(partial(eks_client, fence=fence)), cache(gke_clients)

    def make(pool: CapacityPool, subject: Subject) -> Driver:
        pace = Pace(shrink_after=timedelta(seconds=pool.spec.scaling.shrink_after_seconds))
        if subject.target is not None:
            return ScaleDriver(transport, subject.target, pace)
        if subject.buffer is not None:
            return BufferDriver(transport, pool, subject.buffer, platform, selector)
        if subject.cloud is not None and subject.cloud.eks is not None:
            return EksDriver(subject.cloud.eks, pace, eks)
        if subject.cloud is not None and subject.cloud.gke is not None:
            return GkeDriver(subject.cloud.gke, pace, gke, fence)
        raise ValueError(f"nothing to size: {subject}")  # CEL rules forbid it

    return make
