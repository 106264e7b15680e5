"""The CapacityPool: interchangeable nodes, described by the platform team.

Prices and rates in the spec are priors; measurements are in the status and take precedence once there are enough.
One worker uses one node of a pool with all its accelerators. Money is a decimal string in the cluster's currency.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import ConfigDict, Field

from shoal.api.base import Resource, Status, Strict
from shoal.api.rules import DECIMAL, rules

__all__ = ["AcceleratorSpec", "CapacityPool", "CapacityPoolSpec", "CapacityPoolStatus", "Toleration"]


class AcceleratorSpec(Strict):
    """The accelerators of one node."""

    name: str = Field(min_length=1, max_length=63)
    """Name of the accelerator in the catalogue, or as the cloud labels it: `T4`, `nvidia-tesla-t4`."""
    count: int = Field(1, ge=1, le=64)
    """Accelerators per node; one worker uses all of them."""


class Toleration(Strict):
    """A toleration, as in a pod."""

    key: str | None = Field(None, max_length=316)
    """The taint's key. Unset, with operator Exists: every taint."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """Exists: any value. Equal: `value`."""
    value: str | None = Field(None, max_length=63)
    """The taint's value."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The taint's effect. Unset: every effect."""


class PoolLimits(Strict):
    """Limits of the pool's size."""

    nodes: int = Field(ge=0, le=10_000)
    """Maximum number of nodes."""


class Price(Strict):
    """Price of a node."""

    per_hour: str = Field(pattern=DECIMAL, max_length=32)
    """Price of one node per hour, a decimal in quotes: `"0.35"`."""


class ScaleTarget(Strict):
    """An object with a `scale` subresource that sets the pool's size."""

    api_version: str = Field(min_length=1, max_length=253)
    """Its apiVersion."""
    kind: str = Field(min_length=1, max_length=63)
    """Its kind: MachineDeployment, NodePool, …"""
    name: str = Field(min_length=1, max_length=253)
    """Its name."""
    namespace: str | None = Field(None, max_length=63)
    """Its namespace. Unset: cluster-scoped."""


class Scaling(Strict):
    """How the pool is scaled to the recommended size."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "(self.mode == 'Scale') == has(self.target)",
                "set target (the object to scale) if and only if mode is Scale",
            )
        )
    )

    mode: Literal["Pods", "Buffer", "Scale", "Cloud"] = "Pods"
    """Pods: pending pods make the cluster's autoscaler add nodes. Buffer: a CapacityBuffer asks it to. Scale: the
    `scale` subresource of `target`. Cloud: the cloud's API for node groups."""
    target: ScaleTarget | None = None
    """For mode Scale: the object to scale."""


class CapacityPoolSpec(Strict):
    """The description of the pool."""

    accelerator: AcceleratorSpec | None = None
    """Accelerators of one node. Unset: nodes without accelerators, for parameter servers."""
    capacity_type: Literal["Spot", "OnDemand"] = "OnDemand"
    """Spot: the cloud may reclaim nodes. OnDemand: it does not."""
    zone: str = Field("", max_length=63)
    """The zone of the nodes. Empty: any."""
    node_selector: dict[str, str] = Field(default_factory=dict, max_length=32)
    """Labels that select the nodes."""
    tolerations: list[Toleration] = Field(default=[], max_length=32)
    """Tolerations that pods need to run on these nodes."""
    limits: PoolLimits
    """Limits of the pool's size."""
    price: Price
    """Price of a node."""
    transfer_per_gib: str = Field("0", alias="transferPerGiB", pattern=DECIMAL, max_length=32)
    """Price of one GiB of traffic to another zone, both directions together, a decimal in quotes."""
    startup_seconds: int = Field(180, ge=0, le=86_400)
    """Seconds from requesting a node until its worker trains; used until it has been measured."""
    interruptions_per_hour: str = Field("0", pattern=DECIMAL, max_length=32)
    """Interruptions per node and hour, a decimal in quotes; used until they have been measured: `"0.05"`."""
    batch_size: int | None = Field(None, ge=1)
    """Samples in one step of a worker on this pool. Unset: the job's batchSize."""
    scaling: Scaling = Scaling()
    """How the pool is scaled to the recommended size."""


class MeasuredInterruptions(Status):
    """Measured interruptions of the pool."""

    per_hour: str = "0"
    """Interruptions per node and hour."""
    seen: int = 0
    """Number of interruptions."""
    node_hours: str = "0"
    """Observed node-hours."""
    together: str | None = None
    """Share of the pool's nodes that is lost when several are lost at once."""


class MeasuredStartup(Status):
    """Measured start-ups of the pool."""

    seconds: int = 0
    """Mean seconds from requesting a node until its worker trains."""
    seen: int = 0
    """Number of start-ups."""


class Recommendation(Status):
    """The recommended size of the pool."""

    nodes: int = 0
    """Number of nodes."""
    reason: str = ""
    """Why, for people."""


class PoolCondition(Status):
    """A metav1.Condition."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None


class CapacityPoolStatus(Status):
    """The observed state and the recommended size."""

    nodes: int = 0
    """Existing nodes."""
    free_accelerators: int = 0
    """Accelerators that no pod uses."""
    used_accelerators: int = 0
    """Accelerators in use."""
    startup: MeasuredStartup = MeasuredStartup()
    """Measured start-ups."""
    interruptions: MeasuredInterruptions = MeasuredInterruptions()
    """Measured interruptions."""
    recommended: Recommendation = Recommendation()
    """The recommended size, and why."""
    conditions: tuple[PoolCondition, ...] = ()
    """Conditions such as FieldConflict."""


class CapacityPool(Resource):
    """Interchangeable nodes: the same accelerator, zone, price and interruption rate."""

    PLURAL: ClassVar[str] = "capacitypools"
    SHORT_NAMES: ClassVar[tuple[str, ...]] = ("cpool",)
    NAMESPACED: ClassVar[bool] = False

    kind: Literal["CapacityPool"] = "CapacityPool"
    spec: CapacityPoolSpec
    """The description of the pool."""
    status: CapacityPoolStatus = CapacityPoolStatus()
    """The observed state."""
