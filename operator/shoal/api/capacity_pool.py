"""The CapacityPool: interchangeable nodes, described by the platform team.

Prices and rates in the spec are priors, which Git owns; what was measured is in the status and takes precedence once
there is enough of it. One worker uses one node of a pool with all its accelerators. Money is in the cluster's currency.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from shoal.api.base import Column, Resource, Strict
from shoal.api.capacity_pool_scaling import Scaling
from shoal.api.capacity_pool_status import CapacityPoolStatus
from shoal.api.rules import LABEL_KEY, LABEL_VALUE, UNQUOTED, Amount, Positive, Rate, quoted, rules

_PART = "[.]([1-9][0-9]{0,2}|0[1-9][0-9]?|00[1-9])"
_MOST = "([1-9][0-9]{0,2}|[1-3][0-9]{3}|40[0-8][0-9]|409[0-5])([.][0-9]{1,3})?|4096([.]0{1,3})?"
Cores = Annotated[
    float,
    Field(gt=0, le=4096, allow_inf_nan=False, json_schema_extra=quoted(f"^0*({_PART}|{_MOST})$")),
    UNQUOTED,
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


class CapacityPoolSpec(Strict):
    """The description of the pool."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.scaling) || !has(self.scaling.minNodes) || self.scaling.minNodes <= self.limits.nodes",
                "scaling.minNodes must not exceed limits.nodes: lower minNodes or raise limits.nodes",
            )
        )
    )

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
    interruptions_per_hour: Rate = 0
    """Interruptions per node and hour, used until they have been measured: `0.05`."""
    batch_size: Positive | None = None
    """Samples in one step of a worker on this pool, whatever its job's batchSize and batchSizes are. A push of the
    job's batchSize has weight 1 here as well. Unset: as the job says."""
    scaling: Scaling = Scaling()
    """How the pool is scaled to the recommended size."""

    @property
    def core_count(self) -> float:
        """`cores` as a number; 0 if it is not said."""
        return self.cores or 0.0


class CapacityPool(Resource):
    """Interchangeable nodes: the same accelerator, zone, price and interruption rate."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                # What is stored keeps its name, or could not be changed, nor end with a finalizer. Of what is new, the
                # API server drops the status.
                "has(self.status) || self.metadata.name.size() <= 63",
                "metadata.name must be at most 63 characters: pods of a job have it as a label",
            )
        )
    )

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
        Column(
            "Ready",
            ".status.conditions[?(@.type=='Ready')].status",
            description="Whether it can be used; its condition Ready says why not",
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
    def is_ending(self) -> bool:
        """Whether it is being deleted: what runs in it stays, no worker begins, and no server that has another pool."""
        return self.metadata.deletion_timestamp is not None

    @property
    def gives_nodes(self) -> bool:
        """Whether it has more nodes that a worker can use, as far as is known."""
        status = self.status
        return status.exhausted is None and status.lacks_accelerator is None and not self.is_ending

    @property
    def room(self) -> int:
        """How many nodes with workers there may be: parameter servers have filled the others."""
        return max(0, self.spec.limits.nodes - sum(share.full for share in self.status.shares))
