"""Labels of a job's objects, and the place in the job that a pod's labels say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from shoal.api.base import GROUP

RoleName = Literal["ps", "worker"]

JOB = f"{GROUP}/job"
JOB_UID = f"{GROUP}/job-uid"
ROLE = f"{GROUP}/role"
INDEX = f"{GROUP}/index"
INCARNATION = f"{GROUP}/incarnation"
TEMPLATE = f"{GROUP}/template"
PLACEMENT = f"{GROUP}/placement"
"""What else decided which nodes the pod may run on (`manifests.placement.placement_labels`)."""
PLATFORM = f"{GROUP}/platform"
"""What the platform makes of that (`manifests.placement.of_platform`)."""
AVOIDS_UNTIL = f"{GROUP}/avoids-until"
"""When the last of the nodes that the pod avoids is excluded no longer, in seconds since 1970."""
SHARDS = f"{GROUP}/shards"
"""Of a parameter server: how many the parameters are divided among."""
POOL = f"{GROUP}/pool"
"""The CapacityPool that the pod was created for."""
ON_DEMAND = f"{GROUP}/on-demand"
"""The pod is for an on-demand node because of onDemandBase or fallback."""
OURS = frozenset(
    {
        JOB,
        JOB_UID,
        ROLE,
        INDEX,
        INCARNATION,
        TEMPLATE,
        PLACEMENT,
        PLATFORM,
        AVOIDS_UNTIL,
        SHARDS,
        POOL,
        ON_DEMAND,
    }
)
"""Those that are read of what a job owns."""
SPEED_PROFILE = f"{GROUP}/speed-profile"
"""The annotation of a job that names its SpeedProfile."""
MADE_BY = "app.kubernetes.io/managed-by"
"""Who made an object."""

SPOT_LABELS: dict[str, tuple[str, ...]] = {
    "cloud.google.com/gke-spot": ("true",),
    "cloud.google.com/gke-preemptible": ("true",),
    "cloud.google.com/gke-provisioning": ("spot", "preemptible"),
    "eks.amazonaws.com/capacityType": ("SPOT",),
    "karpenter.sh/capacity-type": ("spot",),
    "kubernetes.azure.com/scalesetpriority": ("spot",),
}
"""Labels by which a spot node is recognised, of all platforms."""


class Place(NamedTuple):
    """A worker's slot or a server's shard, and which of its pods."""

    role: RoleName
    index: int  # type: ignore[assignment]  # not the method of tuples
    incarnation: int

    @property
    def is_coordinator(self) -> bool:
        """Whether this is parameter server 0."""
        return self.role == "ps" and self.index == 0


_NUMBER = re.compile("0|[1-9][0-9]{0,9}")
"""As Shoal writes it. A longer one, of somebody else, would be an integer for no other program that reads a status."""


def avoids_until(labels: Mapping[str, str]) -> datetime | None:
    """From when on a pod avoids nodes for nothing; None: it avoids none."""
    until = labels.get(AVOIDS_UNTIL)
    return datetime.fromtimestamp(int(until), UTC) if until and _NUMBER.fullmatch(until) else None


def place_in(labels: Mapping[str, str]) -> Place | None:
    """The place that labels name; None if they are incomplete, or not as Shoal writes them."""
    role, index, incarnation = labels.get(ROLE), labels.get(INDEX, ""), labels.get(INCARNATION, "")
    if not (_NUMBER.fullmatch(index) and _NUMBER.fullmatch(incarnation)):
        return None
    if role == "ps":
        return Place("ps", int(index), int(incarnation))
    return Place("worker", int(index), int(incarnation)) if role == "worker" else None
