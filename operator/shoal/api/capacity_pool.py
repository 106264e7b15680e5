"""The CapacityPool: interchangeable nodes, described by the platform team.

Prices and rates in the spec are priors, which Git owns; what was measured is in the status and takes precedence once
there is enough of it. One worker uses one node of a pool with all its accelerators. Money is in the cluster's currency.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, ClassVar, Literal

from pydantic import AwareDatetime, ConfigDict, Field

from shoal.api.base import Column, Condition, Resource, Status, Strict
from shoal.api.rules import LABEL_KEY, LABEL_VALUE, Amount, Positive, quoted, rules

__all__ = [
    "AcceleratorSpec",
    "Buffer",
    "CapacityPool",
    "CapacityPoolSpec",
    "CapacityPoolStatus",
    "CloudGroup",
    "CountedUsage",
    "EksNodegroup",
    "GkeNodePool",
    "MeasuredInterruptions",
    "MeasuredStartup",
    "Recommendation",
    "ScaleTarget",
    "Scaling",
    "ScalingStatus",
    "Subject",
    "Toleration",
    "UnfulfilledWaits",
    "Usage",
]

_PART = "[.]([1-9][0-9]{0,2}|0[1-9][0-9]?|00[1-9])"
_MOST = "([1-9][0-9]{0,2}|[1-3][0-9]{3}|40[0-8][0-9]|409[0-5])([.][0-9]{1,3})?|4096([.]0{1,3})?"
Cores = Annotated[
    float,
    Field(gt=0, le=4096, allow_inf_nan=False, json_schema_extra=quoted(f"^0*({_PART}|{_MOST})$")),
]
"""Above 0, up to 4096; in quotes with up to three digits of a part."""
_LETTERS = "letters, digits, '-', '_' and '.', with a letter or digit at both ends"
_VALUE = rules(
    (
        f"self.matches('{LABEL_VALUE}')",
        f"no label or taint has such a value: at most 63 {_LETTERS}: correct it",
    )
)
_KEY = f"a key is at most 63 {_LETTERS}, perhaps after a domain and '/': correct it"
LabelValue = Annotated[str, Field(max_length=63, json_schema_extra=_VALUE)]


class AcceleratorSpec(Strict):
    """The accelerators of one node."""

    name: str = Field(min_length=1, max_length=63)
    """Name of the accelerator in the catalogue, or as the cloud labels it: `T4`, `nvidia-tesla-t4`."""
    count: int = Field(1, ge=1, le=64)
    """Accelerators per node. One worker uses all of them: Shoal requests so many `nvidia.com/gpu` for it, unless the
    job's template names a resource of `nvidia.com` itself."""


class Toleration(Strict):
    """A toleration, as in a pod."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.operator != 'Exists' || !has(self.value) || self.value == ''",
                "operator Exists takes any value: remove value, or set operator to Equal",
            ),
            (
                "self.operator == 'Exists' || (has(self.key) && self.key != '')",
                "without a key every taint is tolerated, which needs operator Exists: set key or operator",
            ),
        )
    )

    key: str | None = Field(
        None,
        max_length=316,
        json_schema_extra=rules(
            (f"self == '' || self.matches('{LABEL_KEY}')", f"no taint has such a key: {_KEY}")
        ),
    )
    """The taint's key. Unset, with operator Exists: every taint."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """Exists: any value. Equal: `value`."""
    value: LabelValue | None = None
    """The taint's value."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The taint's effect. Unset: every effect."""


class PoolLimits(Strict):
    """Limits of the pool's size."""

    nodes: int = Field(ge=0, le=10_000)
    """Maximum number of nodes."""


class Price(Strict):
    """Price of a node."""

    per_hour: Amount
    """Price of one node per hour: `0.35`. In your currency, the same for all pools: Shoal names and converts none."""


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


class Buffer(Strict):
    """A CapacityBuffer, which asks the cluster's autoscaler for nodes before there are pods."""

    namespace: str = Field(min_length=1, max_length=63)
    """Namespace of the CapacityBuffer and of its PodTemplate, which are named `shoal-` and the pool's name."""
    requests: dict[str, str] = Field(min_length=1, max_length=16)
    """Resources of one unit of the buffer. They have to fill a node, so that one unit is one node: `cpu: "7"`."""


class EksNodegroup(Strict):
    """A managed node group of EKS."""

    region: str = Field(min_length=1, max_length=63)
    """The AWS region."""
    cluster: str = Field(min_length=1, max_length=100)
    """Name of the EKS cluster."""
    nodegroup: str = Field(min_length=1, max_length=63)
    """Name of the node group."""


class GkeNodePool(Strict):
    """A node pool of GKE."""

    project: str = Field(min_length=1, max_length=63)
    """The Google Cloud project."""
    location: str = Field(min_length=1, max_length=63)
    """Region or zone of the cluster."""
    cluster: str = Field(min_length=1, max_length=63)
    """Name of the GKE cluster."""
    node_pool: str = Field(min_length=1, max_length=63)
    """Name of the node pool."""


class CloudGroup(Strict):
    """A node group of a cloud."""

    model_config = ConfigDict(
        json_schema_extra=rules(("has(self.eks) != has(self.gke)", "set exactly one of eks and gke"))
    )

    eks: EksNodegroup | None = None
    """A managed node group of EKS."""
    gke: GkeNodePool | None = None
    """A node pool of GKE."""


class Subject(Strict):
    """What is scaled."""

    target: ScaleTarget | None = None
    """For mode Scale: the object to scale."""
    buffer: Buffer | None = None
    """For mode Buffer: the CapacityBuffer."""
    cloud: CloudGroup | None = None
    """For mode Cloud: the node group."""


def _only_with(mode: str, field: str, what: str) -> tuple[str, str]:
    # The server checks the default `{}` too, before it fills in the mode.
    return (
        f"(has(self.mode) && self.mode == '{mode}') == has(self.{field})",
        f"set {field} ({what}) if and only if mode is {mode}",
    )


class Scaling(Subject):
    """How the pool is scaled to the recommended size."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            _only_with("Scale", "target", "the object to scale"),
            _only_with("Buffer", "buffer", "the namespace and requests of the CapacityBuffer"),
            _only_with("Cloud", "cloud", "the node group: eks or gke"),
        )
    )

    mode: Literal["Pods", "Buffer", "Scale", "Cloud"] = "Pods"
    """Pods: pending pods make the cluster's autoscaler add nodes. The others need `shoal-pools` (the chart's
    `pools.enabled`). Buffer: a CapacityBuffer asks the autoscaler for nodes. Scale: the `scale` subresource of
    `target`. Cloud: the cloud's API for node groups."""
    shrink_after_seconds: int = Field(600, ge=0, le=86_400)
    """The pool shrinks after less has been recommended for this long. Not for mode Buffer, which shrinks at once. In
    mode Pods: how long your autoscaler keeps an idle node. Plans count it as the price of leaving a node."""
    shrink: Literal["WhenNoServers", "WhenIdle"] = "WhenNoServers"
    """For modes Scale and Cloud: whoever gets a smaller size chooses which nodes go, unless empty ones go first
    (Karpenter). WhenNoServers: the pool shrinks only while no node has a parameter server; workers that are hit are
    replaced on the nodes that stay. WhenIdle: only while no node has a pod of a job."""


class CapacityPoolSpec(Strict):
    """The description of the pool."""

    accelerator: AcceleratorSpec | None = None
    """Accelerators of one node. Unset: nodes without accelerators, for parameter servers and for workers on CPUs."""
    cores: Cores | None = None
    """CPU cores of one node, below 1 where its share is limited: `0.5`. Unset: as its nodes report."""
    capacity_type: Literal["Spot", "OnDemand"] = "OnDemand"
    """Spot: the cloud may reclaim nodes. OnDemand: it does not."""
    zone: LabelValue = ""
    """The zone of the nodes. Empty: any."""
    node_selector: dict[str, LabelValue] = Field(
        default_factory=dict,
        max_length=32,
        json_schema_extra=rules(
            (f"self.all(key, key.matches('{LABEL_KEY}'))", f"no node has such a label: {_KEY}")
        ),
    )
    """Labels that select the nodes."""
    tolerations: list[Toleration] = Field(default=[], max_length=32)
    """Tolerations that pods need to run on these nodes."""
    limits: PoolLimits
    """Limits of the pool's size."""
    price: Price | None = None
    """Price of a node. Unset: the pool is offered to no plan, since its cost is not known."""
    transfer_per_gib: Amount = Field(0, alias="transferPerGiB")
    """Price of one GiB of traffic to another zone, both directions together."""
    startup_seconds: int = Field(180, ge=0, le=86_400)
    """Seconds from requesting a node until its worker trains; used until it has been measured."""
    interruptions_per_hour: Amount = 0
    """Interruptions per node and hour, used until they have been measured: `0.05`."""
    batch_size: Positive | None = None
    """Samples in one step of a worker on this pool. Unset: the job's batchSize."""
    scaling: Scaling = Scaling()
    """How the pool is scaled to the recommended size."""

    @property
    def core_count(self) -> float:
        """`cores` as a number; 0 if it is not said."""
        return self.cores or 0.0


class Usage(Status):
    """What jobs used of the pool: cumulative sums."""

    node_seconds: int = 0
    """Seconds that pods of jobs held nodes."""
    starts: int = 0
    """Worker pods that waited for their node, for half an hour at most, and reached their first push."""
    start_seconds: int = 0
    """Sum over these of the seconds from the pod's creation until it had its node."""
    start_seconds_squared: int = 0
    """Sum of the squares of these seconds."""
    warm_starts: int = 0
    """Worker pods that reached their first push, whether or not they had waited for their node."""
    warm_start_seconds: int = 0
    """Sum over these of the seconds from when they had it, of each ten minutes at most."""
    unfulfilled: int = 0
    """Requests for a node that were not fulfilled in time."""
    interruptions: int = 0
    """Nodes that the platform took."""
    shocks: int = 0
    """Times when several were taken together."""
    in_shocks: int = 0
    """Nodes that were taken in these."""
    at_shocks: int = 0
    """Nodes that there were when these began."""


class CountedUsage(Usage):
    """The part of one job, as it was last counted."""

    uid: str
    """The job's uid."""
    operator: str = ""
    """The operator of the job, as in `shares`."""


class UsageSums(Status):
    """What all jobs used of the pool, in decimals. What is older counts less: half after 30 days."""

    node_seconds: str = "0"
    """As in a job's status.poolUsage, and so are all."""
    starts: str = "0"
    """With those of nodes that came soon after nobody waited for them any more."""
    start_seconds: str = "0"
    """Of these."""
    start_seconds_squared: str = "0"
    """Of these."""
    warm_starts: str = "0"
    """Starts of workers once they had their node."""
    warm_start_seconds: str = "0"
    """Of these."""
    unfulfilled: str = "0"
    """Requests for a node."""
    interruptions: str = "0"
    """Nodes that the platform took."""
    shocks: str = "0"
    """Times when several were."""
    in_shocks: str = "0"
    """Nodes that were taken in these."""
    at_shocks: str = "0"
    """Nodes that there were when these began."""


class MeasuredInterruptions(Status):
    """Measured interruptions of the pool. What is older counts less: half after 30 days."""

    per_hour: str = "0"
    """Interruptions per node and hour."""
    seen: int = 0
    """Number of interruptions."""
    node_hours: str = "0"
    """Observed node-hours."""
    shocks: int = 0
    """Times when several nodes were lost together."""
    in_shocks: int = 0
    """Interruptions in these."""
    at_shocks: int = 0
    """Nodes that the jobs had in the pool when these began."""
    together: str | None = None
    """Share of a job's nodes that was lost when several were lost at once: inShocks of atShocks."""


class MeasuredStock(Status):
    """How often the pool was out of nodes. What is older counts less: half after 30 days."""

    watched_seconds: str = "0"
    """Seconds in which it would have been noticed: workers had nodes and no pod waited, a node came, or none did."""
    out_seconds: str = "0"
    """Seconds of these in which there were no more nodes."""
    outs: str = "0"
    """How often it ran out."""
    counted_until: AwareDatetime | None = None
    """Up to when that is counted."""


class MeasuredStartup(Status):
    """Measured start-ups of the pool. What is older counts less: half after 30 days."""

    seconds: int = 0
    """Mean seconds from requesting a node until its worker trains: until the node is there, and `warmSeconds`."""
    deviation_seconds: int = 0
    """Standard deviation of the seconds until the node is there."""
    seen: int = 0
    """Number of nodes that were waited for."""
    warm_seconds: int = 0
    """Mean seconds until a worker trains whose node is there already."""
    warm_seen: int = 0
    """Number of these."""


class UnfulfilledWaits(Status):
    """Requests for a node that the pool did not fulfil."""

    waits: int = 0
    """How many, so far."""
    pending: int = 0
    """Worker pods that wait for a node of the pool now, for longer than nodes take to come."""


class Recommendation(Status):
    """The recommended size of the pool."""

    nodes: int = 0
    """Number of nodes."""
    reason: str = ""
    """Why, for people."""


SILENT = timedelta(minutes=15)
"""An operator that has said nothing of a pool for so long does not run. Clocks of nodes differ by less."""


class OperatorShare(Status):
    """What the jobs of one operator have and want of the pool. Operators may be scoped to namespaces."""

    operator: str
    """Namespace and name of its Lease."""
    used: int = 0
    """Nodes with a pod of its jobs."""
    serving: int = 0
    """Of these, nodes with a parameter server."""
    full: int = 0
    """Of these, nodes without a worker, and without room for one: `limits.nodes` leaves workers the others."""
    waiting: int = 0
    """Nodes of the pool that pods of its jobs wait for: each worker for one, parameter servers for those that they
    would fill."""
    pending: int = 0
    """Those that have waited for too long."""
    nodes: int = 0
    """Nodes that its jobs have, or are to have by plans that are carried out."""
    reason: str = ""
    """Why, for people."""
    at: AwareDatetime
    """When it last said so, which it repeats every five minutes. After fifteen it does not run, and only `used` counts:
    jobs train on without their operator. Remove the share of one that is gone for good."""


class ScalingStatus(Status):
    """What `shoal-pools` scales for the pool, written only by it."""

    subject: Subject
    """What it scales: as in the spec, until it has been released."""
    original_nodes: int
    """The size that it found, and gives back."""
    nodes: int
    """The size that it last set, or found."""
    setting: int | None = None
    """The size that it is setting."""
    resized_at: AwareDatetime | None = None
    """When it last began to set a size."""
    shrunk_at: AwareDatetime | None = None
    """When it last began to set a smaller one: nodes that go soon after are no interruptions."""
    lower_since: AwareDatetime | None = None
    """Since when less is recommended than there is."""
    highest: int = 0
    """The highest recommendation since then."""
    releasing_since: AwareDatetime | None = None
    """Since when it gives the size back."""


class CapacityPoolStatus(Status):
    """The observed state and the recommended size."""

    observed_generation: int = 0
    """The generation of the spec that this status is based on."""
    nodes: int = 0
    """Existing nodes."""
    used: int = 0
    """Nodes with a pod of a TrainingJob."""
    waiting: int = 0
    """Nodes of the pool that pods of TrainingJobs wait for."""
    startup: MeasuredStartup = MeasuredStartup()
    """Measured start-ups."""
    interruptions: MeasuredInterruptions = MeasuredInterruptions()
    """Measured interruptions."""
    unfulfilled: UnfulfilledWaits = UnfulfilledWaits()
    """Requests for a node that were not fulfilled."""
    stock: MeasuredStock = MeasuredStock()
    """How often there were no more nodes."""
    out_since: AwareDatetime | None = None
    """Since when pods waited for a node in vain, if none has come since, however often it was tried again."""
    recommended: Recommendation = Recommendation()
    """The recommended size, and why."""
    shares: tuple[OperatorShare, ...] = ()
    """What each operator that has jobs in the pool says. Sums of these are above."""
    counted: tuple[CountedUsage, ...] = ()
    """What is in `sums` of each job that runs, or ran in the last hour."""
    sums: UsageSums = UsageSums()
    """The measurements."""
    retired_until: AwareDatetime | None = None
    """What a job used that ended before, and has given everything back, is in `sums`, though the job exists."""
    conditions: tuple[Condition, ...] = Field(
        default=(),
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """Ready and Exhausted, and of `shoal-pools` Scaled and FieldConflict: each with a reason and a message."""
    scaling: ScalingStatus | None = None
    """What `shoal-pools` scales for the pool. Unset: nothing."""

    @property
    def exhausted(self) -> Condition | None:
        """The condition that says that it has no more nodes; None: as far as is known, it has."""
        return next((c for c in self.conditions if c.type == "Exhausted" and c.status == "True"), None)


class CapacityPool(Resource):
    """Interchangeable nodes: the same accelerator, zone, price and interruption rate."""

    PLURAL: ClassVar[str] = "capacitypools"
    SHORT_NAMES: ClassVar[tuple[str, ...]] = ("cpool",)
    NAMESPACED: ClassVar[bool] = False
    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column("Accelerator", ".spec.accelerator.name"),
        Column("Type", ".spec.capacityType"),
        Column("Price/h", ".spec.price.perHour", description="Price of a node per hour, in your currency"),
        Column("Nodes", ".status.nodes", "integer", description="Existing nodes"),
        Column("Used", ".status.used", "integer", description="Nodes with a pod of a TrainingJob"),
        Column("Recommended", ".status.recommended.nodes", "integer", description="Recommended nodes"),
        Column(
            "Interruptions/h",
            ".status.interruptions.perHour",
            description="Measured interruptions per node and hour",
        ),
        Column("Age", ".metadata.creationTimestamp", "date"),
        Column("Limit", ".spec.limits.nodes", "integer", wide=True, description="Most nodes"),
        Column("Exhausted", ".status.conditions[?(@.type=='Exhausted')].status", wide=True),
        Column("Reason", ".status.recommended.reason", wide=True, description="Why this size"),
    )

    kind: Literal["CapacityPool"] = "CapacityPool"
    spec: CapacityPoolSpec
    """The description of the pool."""
    status: CapacityPoolStatus = CapacityPoolStatus()
    """The observed state, written by the operator, and in part by `shoal-pools`."""

    @property
    def room(self) -> int:
        """How many nodes with workers there may be: parameter servers have filled the others."""
        return max(0, self.spec.limits.nodes - sum(share.full for share in self.status.shares))
