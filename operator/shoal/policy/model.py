"""Input and output of a plan: the interface between the pure policies and the controller.

The controller fills an `Observation` from its caches, calls `shoal.policy.plan.plan`, sends what is to be made, writes
the status if it changed, sends the removals when it is stored, and posts the events. It plans again when something was
answered or has changed, and after `wake_after` seconds: a plan asks for all that is still to be done. All state between
two calls is in `job.status`; the answers of the API server that `apply` keeps may be lost at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from shoal.api.base import Reason
from shoal.api.capacity_pool import CapacityPool
from shoal.api.events import Event
from shoal.api.kube import Node, Pod, Service
from shoal.api.kueue import ResourceFlavor, Workload
from shoal.api.labels import Place
from shoal.api.planning_status import CoursePoint
from shoal.api.training_job import TrainingJob
from shoal.api.training_job_status import TrainingJobStatus
from shoal.manifests.platforms import GENERIC, Platform
from shoal.manifests.pods import Images
from shoal.policy.actions import Action
from shoal_trainer.contract import StatusReport


class RefusalKind(StrEnum):
    """Why the API server refused an object."""

    QUOTA = "Quota"  # 403 from a ResourceQuota: wait
    FORBIDDEN = (
        "Forbidden"  # 403 otherwise: RBAC, Pod Security, a LimitRange; or an admission webhook or policy
    )
    INVALID = "Invalid"  # 400, 422: for a person, who corrects the spec or what else it is made of


@dataclass(frozen=True)
class Refusal:
    """A create that the API server refused.

    The controller keeps the last one for each name until a create succeeds.
    """

    kind: RefusalKind
    name: str
    """The name of the object."""
    message: str
    """The server's message."""
    specs: tuple[int, int]
    """The generations of the job, and of its pool (0: of none), that it was made of."""
    at: float
    """When, as `Observation.at`."""
    times: int = 0
    """So many refusals of this kind came before it, in a row."""
    pool: str = ""
    """The CapacityPool that it was for, of a pod for one."""


@dataclass(frozen=True)
class NameConflict:
    """An object of another owner that has a name which the job needs."""

    terminating: bool = False
    """It has a deletionTimestamp, or it belongs to an earlier TrainingJob of this name."""
    deadline: datetime | None = None
    """Its deletionTimestamp: when its grace period ends."""
    node: str = ""
    """The node, if it is a pod."""
    due: bool = False
    """It was seen some time ago: no watch reports that the name is free, so to create is to ask."""


@dataclass(frozen=True)
class Wish:
    """Workers by CapacityPool that the planner proposed from a time on, until it proposed others."""

    since: datetime
    pools: Mapping[str, int]


@dataclass(frozen=True)
class Proposal:
    """What the planner proposes for a job. Amounts of money and shares are floats here, and decimals in the status."""

    pools: Mapping[str, int]
    """Workers by CapacityPool."""
    parameter_servers: int
    reason: str
    """Why, in plain sentences."""
    since: datetime
    """Since when the planner proposes the same counts."""
    before: tuple[Wish, ...] = ()
    """What it proposed before that, the oldest first, for as long as a change is to last."""
    age_seconds: float = 0.0
    """How long ago it was made."""
    finish_time: datetime | None = None
    cost: float | None = None
    """Expected cost of the whole job, including what was spent."""
    confidence: float | None = None
    """Probability of keeping deadline and budget."""
    feasible: bool = True
    """Whether deadline and budget can be kept with the wanted confidence."""
    urgent: bool = False
    """Deadline or budget are at risk, or a job of higher priority is to have nodes of it: the change is at once."""
    traded: frozenset[str] = frozenset()
    """Pools of which nodes go from this job to another, or to it: both change at the same time."""
    samples_per_second: float | None = None
    remaining_seconds: float | None = None
    remaining_range: tuple[float, float] | None = None
    """Between these it is in 90 % of simulated runs."""
    relative_error: float | None = None
    """The predicted speed of its workers over the measured one, less 1."""
    watched_seconds: float | None = None
    """For how long the workers were watched for that."""
    measured: bool = True
    """Whether the model's speed was measured in any pool that the job may use."""
    basis: str = ""
    """What the prediction is based on."""
    course: tuple[CoursePoint, ...] = ()
    """How the metric that ends the job came along, to be remembered."""
    speeds: Mapping[str, float] = field(default_factory=dict)
    """Samples per second of one worker, by pool; for the choice of whom to drain."""


@dataclass(frozen=True)
class Observation:
    """Everything about one job at one moment."""

    job: TrainingJob
    now: datetime
    """Wall clock, with a time zone. It may be set back or forth between two observations."""
    at: float
    """`now` in seconds on a clock that is not: what waits, or is counted, in this process goes by this one."""
    images: Images
    counted_at: float | None = None
    """When this process counted the time of nodes up to `job.status.counted_until`, as `at`; None: another one did."""
    first_look: bool = False
    """This process has recorded nothing of the job yet: an earlier leader may have died before it recorded a pod."""
    unseen: Container[int] = frozenset()
    """Workers of which that holds still: no plan that this process has recorded decided whether to make their pods."""
    pods: tuple[Pod, ...] = ()
    """Pods controlled by the job, including terminating and finished ones."""
    services: Mapping[str, Service] = field(default_factory=dict)
    """Services controlled by the job, by name."""
    existing: frozenset[str] = frozenset()
    """Names of the job's PodDisruptionBudgets that exist; and of its Secret, and the key of its PodGroup, if the API
    server confirmed it within the last minutes: nobody may read Secrets, and nobody watches PodGroups."""
    name_conflicts: Mapping[str, NameConflict] = field(default_factory=dict)
    """Names that objects of other owners have, by `get`: it need not list them. Names of pods and Services never
    coincide."""
    workloads: tuple[Workload, ...] = ()
    """Workloads of Kueue controlled by the job."""
    no_workloads: str = ""
    """Why Workloads cannot be read now; empty: they can."""
    flavors: Mapping[str, ResourceFlavor] = field(default_factory=dict)
    """All ResourceFlavors of Kueue by name."""
    nodes: Mapping[str, Node] = field(default_factory=dict)
    """All nodes by name; empty where nodes cannot be read."""
    silent_nodes: Sequence[datetime] = ()
    """Since when nodes are Unknown, the earliest first."""
    nodes_heard_again: Sequence[datetime] = ()
    """When nodes that had been Unknown were heard again, the earliest first."""
    node_signals: bool = True
    """Whether nodes can be read at all."""
    unread: bool = False
    """The job has a newer state that cannot be parsed: nothing about it can be recorded."""
    old_pods: bool = False
    """Pods cannot be read, and `pods` are those of before."""
    report: StatusReport | None = None
    """The last report of parameter server 0."""
    report_age: float = 0.0
    """Age of the report in seconds."""
    unreachable_seconds: float = 0.0
    """For how long parameter server 0, whose pod runs, could not be reached; 0: it can."""
    unreachable_because: str = ""
    """The last error."""
    failing: str = ""
    """What requests about the job have failed with for long, in the API server's words; empty: they do not."""
    refusals: tuple[Refusal, ...] = ()
    gone_pods: Mapping[str, str | None] = field(default_factory=dict)
    """Names that pods of the job had: they were seen to go, or the API server was asked (`ConfirmAbsent`). With the
    reason that they had announced, empty if it is not known. None: they went without a word, and may run on."""
    in_flight: frozenset[Place] = frozenset()
    """Places whose pods are being created: the API server has not answered yet."""
    absent_nodes: Set[str] = frozenset()
    """Names of nodes that do not exist: the API server was asked. One that was seen to go may be there again."""
    api_returned_seconds: float | None = None
    """For how long the API server has answered again after a pause that was long enough for nodes to turn Unknown."""
    platform: Platform = GENERIC
    """The platform of the nodes."""
    pools: Mapping[str, CapacityPool] = field(default_factory=dict)
    """All CapacityPools by name."""
    unreadable_pools: Mapping[str, str] = field(default_factory=dict)
    """Why CapacityPools cannot be parsed, by name."""
    no_pools: str = ""
    """Why no CapacityPool can be read, as a sentence's end; empty: they can."""
    proposal: Proposal | None = None
    """The newest proposal of the planner for this job."""
    taken: Mapping[str, int] = field(default_factory=dict)
    """Nodes of each pool that other jobs have, or plan to have."""
    others_on: Callable[[Set[tuple[str, str]]], Mapping[tuple[str, str], int]] = lambda _nodes: {}
    """Of nodes of pools, those that other jobs pay, too, and how many of these there are."""


@dataclass(frozen=True)
class Plan:
    """The result. Actions are sent in this order; pods when the answers about what they need are there."""

    actions: tuple[Action, ...]
    status: TrainingJobStatus
    events: tuple[Event, ...] = ()
    wake_after: float | None = None
    """Seconds until the next plan, if nothing changes; None: only after a change; 0: once the status is stored."""
    nodes: Mapping[str, int] | None = None
    """How many nodes of each pool its workers have then, those that are made included, without those that get none;
    None: as the status says."""
    looked_at: frozenset[int] | None = None
    """Of which workers it decided whether to make a pod; None: of none, nor of a server, as while it is suspended."""


__all__ = [
    "Event",
    "Images",
    "NameConflict",
    "Observation",
    "Plan",
    "Proposal",
    "Reason",
    "Refusal",
    "RefusalKind",
]
