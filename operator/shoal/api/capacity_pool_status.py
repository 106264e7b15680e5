"""The status of a CapacityPool: what jobs used, what was measured of it, and the size that is recommended.

Measurements are sums in which what is older counts less; each operator that has jobs in the pool writes its own share.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from pydantic import AwareDatetime, Field

from shoal.api.base import Condition, Status
from shoal.api.capacity_pool_scaling import Subject


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

    per_hour: str | None = None
    """Interruptions per node and hour. Unset until a job has had a node: what the spec says counts."""
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
    known_until: AwareDatetime | None = None
    """Up to when it is known whether there were any: while pods wait, that shows later. Unset: `countedUntil`."""


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


LACKS_ACCELERATOR = "NodesLackAccelerator"
"""Of the condition Ready: its nodes are there and give no worker what the spec says that they have."""
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
    waiting_nodes: int | None = None
    """As many nodes as these pods need, and those that are kept apart: workers may share one. Unset: `waiting`."""
    pending: int = 0
    """Those that have waited for too long."""
    nodes: int = 0
    """Nodes that its jobs have, or are to have by plans that are carried out."""
    reason: str = ""
    """Why, for people."""
    blind: bool = False
    """It cannot read nodes: which of them its jobs have is not known."""
    at: AwareDatetime
    """When it last said so, which it repeats every five minutes. After fifteen it does not run, and only `used` counts:
    jobs train on without their operator. Remove the share of one that is gone for good."""

    def runs(self, now: datetime) -> bool:
        """Whether the operator runs. What it said by a clock that was ahead says no more than what it said long ago."""
        return abs(now - self.at) < SILENT


class Sized(Status):
    """What is remembered of a pool that is sized."""

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


class ScalingStatus(Sized):
    """What `shoal-pools` scales for the pool, written only by it."""

    subject: Subject
    """What it scales: as in the spec, until it has been released."""
    releasing_since: AwareDatetime | None = None
    """Since when it gives the size back."""


class OlderPool(Status):
    """An older pool that selects nodes of this one, or would."""

    name: str
    """Its name."""
    node_selector: dict[str, str]
    """As it was then: once it is another one, the pool is looked at anew."""


class CapacityPoolStatus(Status):
    """The observed state and the recommended size."""

    observed_generation: int = 0
    """The generation of the spec that this status is based on."""
    nodes: int = 0
    """Existing nodes."""
    used: int = 0
    """Nodes with a pod of a TrainingJob."""
    waiting: int = 0
    """Nodes of the pool that pods of TrainingJobs wait for: each worker for one."""
    waiting_nodes: int | None = None
    """As many nodes as these pods need, and those that are kept apart: workers may share one. Unset: `waiting`."""
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
    sums: UsageSums | None = None
    """The measurements. Unset: those of `counted`."""
    retired_until: AwareDatetime | None = None
    """What a job used that ended before, and has given everything back, is in `sums`, though the job exists."""
    conditions: tuple[Condition, ...] = Field(
        default=(),
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """Ready and Exhausted, and of `shoal-pools` Scaled and FieldConflict: each with a reason and a message."""
    overlaps: OlderPool | None = None
    """The older pool that selects nodes of this one, to which no plan adds; it is remembered when these are gone."""
    scaling: ScalingStatus | None = None
    """What `shoal-pools` scales for the pool. Unset: nothing."""

    @property
    def lacks_accelerator(self) -> Condition | None:
        """The condition that says that its nodes lack the accelerators of its description; None: as far as is known."""
        found = (c for c in self.conditions if c.type == "Ready" and c.status == "False")
        return next((c for c in found if c.reason == LACKS_ACCELERATOR), None)

    @property
    def exhausted(self) -> Condition | None:
        """The condition that says that it has no more nodes; None: as far as is known, it has."""
        return next((c for c in self.conditions if c.type == "Exhausted" and c.status == "True"), None)
