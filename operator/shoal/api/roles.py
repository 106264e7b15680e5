"""`spec.parameterServers` and `spec.workers` of a TrainingJob: how many, where, and from which template."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator

from shoal.api.base import Strict
from shoal.api.json_text import NOTHING, JsonText, Kept
from shoal.api.pod_template import pod_template_schema
from shoal.api.rules import NAME, Natural, Positive, explained, rules

MOST_SHARDS = 16
MOST_POOLS = 16

Capacity = Literal["Spot", "OnDemand", "Any"]
"""Kinds of nodes, told apart by the labels of the platform."""
MAX_TEMPLATE_BYTES = 128 << 10
"""Of a template as JSON: the operator keeps it for as long as there is the job, and each of its pods has it."""
_Template = Annotated[JsonText, Kept(dict[str, Any])]
PsTemplate = Annotated[_Template, Field(json_schema_extra=lambda s: s.update(pod_template_schema("ps")))]
WorkerTemplate = Annotated[
    _Template, Field(json_schema_extra=lambda s: s.update(pod_template_schema("worker")))
]
_POOL = explained(NAME, "must be the name of a CapacityPool: a-z, 0-9, '-' and '.'")
PoolNames = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=63, pattern=NAME, json_schema_extra=_POOL)], ...],
    Field(max_length=MOST_POOLS, json_schema_extra={"x-kubernetes-list-type": "set"}),
]


class SnapshotSpec(Strict):
    """How often parameters, optimizer state and the data ledger are saved together."""

    every_seconds: Positive = 60
    """Seconds between snapshots."""
    retain: int = Field(3, ge=1, le=100)
    """Number of snapshots to keep. A bucket with soft delete or versions keeps, and bills, those that are removed."""


class Templated(Strict):
    """A role whose pods are made from a template."""

    if TYPE_CHECKING:
        template: JsonText

    @cached_property
    def template_digest(self) -> str:
        """A digest of the template: pods with another one were created before it changed."""
        return hashlib.sha256(self.template.text).hexdigest()[:12]

    def container(self, name: str) -> dict[str, Any]:
        """What the template says of the container of this name."""
        containers = (self.template.read().get("spec") or {}).get("containers") or ()
        return next((each for each in containers if each["name"] == name), {})

    @field_validator("template", check_fields=False)
    @classmethod
    def _is_no_data(cls, template: JsonText) -> JsonText:
        if (size := len(template.text)) > MAX_TEMPLATE_BYTES:
            raise ValueError(
                f"the template has {size} bytes as JSON, at most {MAX_TEMPLATE_BYTES} are possible: put what is large"
                " into the image, a ConfigMap or a Secret"
            )
        return template


class ParameterServers(Templated):
    """The processes that hold the model."""

    replicas: int = Field(1, ge=1, le=MOST_SHARDS)
    """Number of shards of the parameters. Can change only while the job is suspended."""
    capacity: Capacity = "OnDemand"
    """Kind of nodes, by the platform's labels: OnDemand (nodes without a known spot label), Spot, or Any. Terms of the
    template's nodeAffinity apply as well. A change of this, of `pools` or of their nodes applies to pods that have no
    node yet."""
    pools: PoolNames = ()
    """CapacityPools that they may run on, the first that is not Exhausted. They replace `capacity`. Empty: any node of
    that kind. While none of them exists, no server is made. One that waits leaves a pool that is Exhausted for the
    next; one that runs stays."""
    snapshot: SnapshotSpec = SnapshotSpec()
    """How often the model is saved. A change applies to servers that start later, as after a suspension."""
    template: PsTemplate = Field(default_factory=lambda: NOTHING)
    """A PodTemplateSpec of at most 128 KiB as JSON, merged over Shoal's defaults as `kubectl patch` does. The training
    container is named `ps`. A change applies to pods that have not run yet."""


class Fallback(Strict):
    """What happens when no spot node is to be had."""

    after_seconds: Positive = 300
    """Workers that waited for a spot node for this many seconds run on on-demand nodes instead."""
    return_after_seconds: Positive = 1800
    """So many seconds after a worker fell back, or tried in vain, one that runs on demand tries a spot node again, and
    works on until that is there."""


class NodeExclusion(Strict):
    """When workers avoid a node."""

    failures_before_exclude: Positive = 2
    """Workers that failed on a node, before others avoid it. Disruptions do not count, nor what most nodes see."""
    cooldown_seconds: Positive = 3600
    """Seconds for which workers avoid the node."""


class Workers(Templated):
    """The processes that compute gradients."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.maxReplicas) || self.replicas <= self.maxReplicas",
                "replicas must not exceed maxReplicas: lower replicas or raise maxReplicas",
            ),
            (
                "!has(self.minReplicas) || self.replicas == 0 || self.minReplicas <= self.replicas",
                "replicas must not be less than minReplicas: raise replicas or lower minReplicas",
            ),
            (
                "!has(self.maxReplicas) || !has(self.minReplicas) || self.minReplicas <= self.maxReplicas",
                "minReplicas must not exceed maxReplicas: lower minReplicas or raise maxReplicas",
            ),
            (
                "!has(self.maxReplicas) || self.onDemandBase <= self.maxReplicas",
                "onDemandBase must not exceed maxReplicas: lower onDemandBase or raise maxReplicas",
            ),
            (
                "!has(self.fallback) || (has(self.pools) && size(self.pools) > 0) || self.capacity == 'Spot'",
                "fallback is for workers on spot nodes: set capacity to Spot, or remove fallback",
            ),
        )
    )

    replicas: int = Field(ge=0, le=1000)
    """Number of workers. `kubectl scale` changes it while training continues. 0: no workers for now."""
    min_replicas: int = Field(1, ge=0, le=1000)
    """With fewer ready workers than this the job is Degraded, but it keeps training with those that it has."""
    max_replicas: int | None = Field(None, ge=1, le=1000)
    """Upper limit of `replicas`. Unset: no limit."""
    max_surge: int | str = Field(
        "25%",
        json_schema_extra={
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            **rules(
                (
                    "type(self) == int ? self >= 0 : self.matches('^(100|[1-9]?[0-9])%$')",
                    'must be a non-negative integer, or a percentage in quotes such as "25%"',
                )
            ),
        },
    )
    """How many replacement pods may run alongside pods that are still terminating: a number, or a percentage of
    replicas, rounded up. 0, as where a quota has no room for one more: a worker that is to move to another pool ends
    before its successor begins, one at a time, while all others run."""
    capacity: Capacity = "Spot"
    """Kind of nodes, by the platform's labels: Spot, OnDemand (nodes without a known spot label), or Any. On a cluster
    whose nodes have no spot labels: Any. Terms of the template's nodeAffinity apply as well. A change of this or of
    the nodes of `pools` applies to pods that have no node yet."""
    pools: PoolNames = ()
    """CapacityPools that they may run on, in order of preference. They replace `capacity`. Empty: any node of that
    kind."""
    zone_policy: Literal["Same", "Preferred", "Any"] = "Any"
    """Whether workers run in the zone of parameter server 0: Same (only there), Preferred, or Any. Traffic between
    zones is slower, and is paid for."""
    on_demand_base: Natural = 0
    """This many workers run on on-demand nodes, the others as `capacity` or `pools` say."""
    fallback: Fallback | None = None
    """What happens when no spot node is to be had. Unset: workers wait for one."""
    node_exclusion: NodeExclusion | None = None
    """When workers avoid a node. Unset: never."""
    template: WorkerTemplate = Field(default_factory=lambda: NOTHING)
    """A PodTemplateSpec of at most 128 KiB as JSON, merged over Shoal's defaults as `kubectl patch` does. The training
    container is named `worker`. A change applies to pods that have not run yet."""
