"""The CapacityPool: nodes that are interchangeable, described by the platform team.

Prices and rates are priors; what the operator has measured stands in the status and wins where there is enough of it.
One worker takes one node of a pool, with all its accelerators. Money is a decimal string in the one currency of the
cluster.
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
    """How many of them one node has; one worker uses them all."""


class Toleration(Strict):
    """A toleration, as a pod has it."""

    key: str | None = Field(None, max_length=316)
    """The taint's key. Unset, with operator Exists: every taint."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """Exists: any value. Equal: `value`."""
    value: str | None = Field(None, max_length=63)
    """The taint's value."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The taint's effect. Unset: every effect."""


class PoolLimits(Strict):
    """How large the pool may get."""

    nodes: int = Field(ge=0, le=10_000)
    """The most nodes."""


class Price(Strict):
    """What a node costs."""

    per_hour: str = Field(pattern=DECIMAL, max_length=32)
    """Price of one node for an hour, a decimal in quotes: `"0.35"`."""


class ScaleTarget(Strict):
    """An object with a `scale` subresource in the pool's charge."""

    api_version: str = Field(min_length=1, max_length=253)
    """Its apiVersion."""
    kind: str = Field(min_length=1, max_length=63)
    """Its kind: MachineDeployment, NodePool, …"""
    name: str = Field(min_length=1, max_length=253)
    """Its name."""
    namespace: str | None = Field(None, max_length=63)
    """Its namespace. Unset: it has none."""


class Scaling(Strict):
    """Who makes the pool as large as recommended."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "(self.mode == 'Scale') == has(self.target)",
                "set target, the object to scale, with mode Scale and with no other mode",
            )
        )
    )

    mode: Literal["Pods", "Buffer", "Scale", "Cloud"] = "Pods"
    """Pods: pending pods make the cluster's autoscaler add nodes. Buffer: a CapacityBuffer asks it to. Scale: the
    `scale` subresource of `target`. Cloud: the cloud's API for node groups."""
    target: ScaleTarget | None = None
    """For mode Scale: what to scale."""


class CapacityPoolSpec(Strict):
    """What the platform team says about the pool."""

    accelerator: AcceleratorSpec | None = None
    """The node's accelerators. Unset: nodes without, for parameter servers."""
    capacity_type: Literal["Spot", "OnDemand"] = "OnDemand"
    """Spot: the cloud may take nodes back. OnDemand: it does not."""
    zone: str = Field("", max_length=63)
    """The zone of the nodes. Empty: any."""
    node_selector: dict[str, str] = Field(default_factory=dict, max_length=32)
    """Labels by which the nodes are recognised."""
    tolerations: list[Toleration] = Field(default=[], max_length=32)
    """Tolerations that pods need to run there."""
    limits: PoolLimits
    """How large the pool may get."""
    price: Price
    """What a node costs."""
    transfer_per_gib: str = Field("0", alias="transferPerGiB", pattern=DECIMAL, max_length=32)
    """Price of a GiB that crosses to another zone, both directions together, a decimal in quotes."""
    startup_seconds: int = Field(180, ge=0, le=86_400)
    """Seconds from asking for a node until its worker trains, until it has been measured."""
    interruptions_per_hour: str = Field("0", pattern=DECIMAL, max_length=32)
    """How many times an hour the cloud takes back a node, until it has been measured: `"0.05"`."""
    batch_size: int | None = Field(None, ge=1)
    """Samples in one step of a worker here. Unset: the job's batchSize."""
    scaling: Scaling = Scaling()
    """Who makes the pool as large as recommended."""


class MeasuredInterruptions(Status):
    """What was seen of the pool's interruptions."""

    per_hour: str = "0"
    """Interruptions per node and hour."""
    seen: int = 0
    """How many were seen."""
    node_hours: str = "0"
    """In how many node-hours."""
    together: str | None = None
    """Part of the pool's nodes that is lost when several are lost at once."""


class MeasuredStartup(Status):
    """What was seen of the pool's start-ups."""

    seconds: int = 0
    """Mean seconds from asking for a node until its worker trains."""
    seen: int = 0
    """How many were seen."""


class Recommendation(Status):
    """How many nodes the pool should have."""

    nodes: int = 0
    """The number."""
    reason: str = ""
    """Why, in words."""


class PoolCondition(Status):
    """A metav1.Condition."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None


class CapacityPoolStatus(Status):
    """What the operator sees and recommends."""

    nodes: int = 0
    """Nodes that are there."""
    free_accelerators: int = 0
    """Accelerators that no pod uses."""
    used_accelerators: int = 0
    """Accelerators in use."""
    startup: MeasuredStartup = MeasuredStartup()
    """Measured start-ups."""
    interruptions: MeasuredInterruptions = MeasuredInterruptions()
    """Measured interruptions."""
    recommended: Recommendation = Recommendation()
    """The size it should have, and why."""
    conditions: tuple[PoolCondition, ...] = ()
    """FieldConflict and the like."""


class CapacityPool(Resource):
    """Nodes that are interchangeable: the same accelerator, zone, price, and chance to be taken back."""

    PLURAL: ClassVar[str] = "capacitypools"
    SHORT_NAMES: ClassVar[tuple[str, ...]] = ("cpool",)
    NAMESPACED: ClassVar[bool] = False

    kind: Literal["CapacityPool"] = "CapacityPool"
    spec: CapacityPoolSpec
    """What the platform team says."""
    status: CapacityPoolStatus = CapacityPoolStatus()
    """What the operator sees."""
