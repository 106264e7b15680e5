"""The parts of a TrainingJob's status about pools: the plan, the prediction, what was used and what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated

from pydantic import AwareDatetime, Field

from shoal.api.base import Status
from shoal.api.capacity_pool_status import Usage

Decimals = Annotated[str, Field(json_schema_extra={"pattern": "^-?[0-9]{1,20}([.][0-9]{1,20})?$"})]
"""A decimal, as the API server lets nobody store it otherwise; what is stored already is read whatever it is."""


class PlanStatus(Status):
    """How many workers of which pool are wanted, and what that is expected to give."""

    revision: int = 0
    """Grows with each change of the counts."""
    summary: str = ""
    """The counts in a few characters."""
    pools: dict[str, int] = Field(default_factory=dict)
    """Workers wanted, by CapacityPool."""
    kept_to: dict[str, int] | None = None
    """By CapacityPool, where pods of workers cannot be made, as the API server refuses them or the job lacks something
    else: how many workers have pods. The nodes of the others are left to other jobs until a pod is made."""
    in_vain: dict[str, int] | None = None
    """By CapacityPool, how many workers have a pod that gets no node of it, for a queue, a volume, or what it asks for:
    theirs are left to other jobs until they may have one."""
    parameter_servers: int | None = None
    """Parameter servers that the plan is made for. A different number of them takes effect only if you set it."""
    finish_time: AwareDatetime | None = None
    """When the job is expected to finish: the end of that minute."""
    cost: str | None = None
    """What the whole job is expected to cost, including what was spent, a decimal."""
    confidence: str | None = None
    """The probability with which deadline and budget are expected to be kept, 0 to 1, a decimal."""
    reason: str = ""
    """Why these counts."""
    decided_at: AwareDatetime | None = None
    """When the counts last changed."""

    @property
    def is_made(self) -> bool:
        """Whether there is a plan: before, what the job has no nodes for may be told alone."""
        return bool(self.revision or self.pools)

    def may_have_pods(self, workers: Mapping[str, int]) -> Counter[str]:
        """How many of these workers, by pool, have pods, or may have."""
        kept_to = self.kept_to or {}
        return Counter({pool: min(count, kept_to.get(pool, count)) for pool, count in workers.items()})

    def have_nodes(self, workers: Mapping[str, int]) -> Counter[str]:
        """Of how many of these workers, by pool, the job has the nodes: of those with pods that do not wait in vain."""
        return self.may_have_pods(workers) - Counter(self.in_vain or {})


class CoursePoint(Status):
    """The metric that ends the job, after an epoch."""

    epoch: int
    """From 0."""
    samples: int
    """Samples of the whole run so far."""
    value: str
    """The metric, a decimal."""
    workers: str = "1"
    """How many trained since the point before, in the mean, a decimal."""


class PredictionStatus(Status):
    """How fast the job is expected to be with its workers, and how wrong that was."""

    samples_per_second: str | None = None
    """Expected samples per second of the whole job, with what passes beside steps, a decimal."""
    remaining_seconds: int | None = None
    """Expected seconds until training ends, with the workers that are planned now. It does not foresee that nodes run
    out, nor that others are planned later because they are cheaper and still in time."""
    earliest_seconds: int | None = None
    """The same in a good case: it takes longer in 95 % of simulated runs of this plan."""
    latest_seconds: int | None = None
    """The same in a bad case: it takes less in 95 % of simulated runs of this plan."""
    relative_error: str | None = None
    """The expected speed of its workers over the measured one, less 1, a decimal: 1 where they are half as fast."""
    watched_seconds: int | None = None
    """For how long the workers were watched for that, of the last 90 s, each step for 0.5 s at most. It holds until
    workers are watched again, or the job is suspended."""
    basis: str = ""
    """What the expectation is based on."""
    course: tuple[CoursePoint, ...] | None = Field(default=None, max_length=64)
    """How the metric that ends the job came along: ever fewer points of ever older epochs, and the newest."""


class CostStatus(Status):
    """What the nodes of the job cost, in the currency of the CapacityPools' prices. Amounts are decimals.

    They are those of workers.pools and parameterServers.pools: pods without a pool are not in it, nor are transfers. A
    node counts, once, while it has pods of the job: not while it boots or stands idle. Jobs that have pods on one node
    pay it in equal parts, as far as the operator sees them: one that serves a namespace sees those there.
    """

    per_hour: Decimals = "0"
    """Of the nodes in use now; of one with pods of several jobs, an equal part."""
    accumulated: Decimals = "0"
    """Up to status.countedUntil. Only grows."""
    saved_versus_on_demand: Decimals = "0"
    """What the same node hours would have cost more at on-demand prices of the same accelerator, or as many cores
    without one, where a pool has them."""


class PoolUsage(Usage):
    """What the job used and met in one pool. All counts only grow, and include each thing once."""

    last_interruption: AwareDatetime | None = None
    """When the platform last took one of its nodes."""
    in_last_shock: int = 0
    """How many it took within a minute of each other the last time."""
    at_last_shock: int = 0
    """How many there were before."""
    price_per_hour: str | None = None
    """Of a node, when it was last counted: what it costs while the CapacityPool is not there. A decimal."""
