"""The status of a TrainingJob, which is also the operator's only durable state.

`slots` records the pods. It is written in one update with the counters, so that a pod that vanished while no operator
ran is counted exactly once. Counters only grow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal, TypeVar, get_args

from pydantic import AwareDatetime, Field, model_serializer

from shoal.api.base import Condition, Status
from shoal.api.labels import Place
from shoal.api.planning_status import CostStatus, PlanStatus, PoolUsage, PredictionStatus
from shoal.words import duration

T = TypeVar("T")

STALE = timedelta(minutes=2)
"""An operator looks at a new generation at once, and steps are reported each 30 s: after so long nobody is watching."""
MOST_USED = 64
"""Pools whose use is counted, of all that the spec of a job ever named: a status with more is refused."""
UNWANTED = "Unwanted"
"""The cause of a pod that was scaled down or suspended."""
SlotState = Literal["Planned", "Starting", "Running", "Silent", "Draining", "Ended"]


class Slot(Status):
    """One pod that runs, or last ran, as a worker or parameter server of the job.

    A job has up to a thousand, so defaults are left out: `{index: 7, node: …}` is worker 7, which runs.
    """

    role: Literal["ps", "worker"] = "worker"
    """Parameter server or worker (left out)."""
    index: int
    """The slot of a worker or the shard of a parameter server."""
    incarnation: int = 0
    """The number of its pod among those of this role and index; a number may have been left out. 0 is left out here."""
    state: SlotState = "Running"
    """Planned (recorded before its pod is created), Starting, Running (left out), Silent (the coordinator no longer
    hears from it), Draining or Ended."""
    cause: str = ""
    """Why the pod ended or is draining; set when it is counted. Cleared if the notice is withdrawn."""
    node: str = ""
    """The node it is or was bound to."""
    machine: str = ""
    """Digest of that node's uid and boot ID: a node recreated under the same name is another machine."""
    pool: str = ""
    """The CapacityPool that it was created for; empty without pools. Its node time is counted and paid there."""
    on_demand: bool = False
    """Its pod is for an on-demand node because of onDemandBase or fallback, in a job without pools."""
    ran: bool = False
    """Its container ran before it was draining or ended."""
    trained: bool = False
    """Its first push is counted as a start of the pool, or is none, since its pod was held back."""
    unfulfilled: bool = False
    """Its wait for a node is counted as unfulfilled."""
    interrupted: bool = False
    """It was replaced when it fell silent or was evicted, and that the platform took its node is counted."""
    replaces: bool = False
    """It follows a pod that was lost, and not one that was given up (suspended, scaled down)."""
    restarts: int = 0
    """Container restarts in place that have been counted (parameter servers)."""
    attempts: int = 0
    """How many incarnations in a row ended abnormally shortly after they started."""
    queued: bool = False
    """A queue, such as Kueue, holds its pod back."""
    created_at: AwareDatetime | None = None
    """When the pod was created, let go by a queue or, of a planned one, recorded; until it runs."""
    ended_at: AwareDatetime | None = None
    """When it was first seen to have ended or to be draining."""

    @cached_property
    def place(self) -> Place:
        """Its place in the job."""
        return Place(self.role, self.index, self.incarnation)

    @property
    def has_run(self) -> bool:
        """Whether its container ever ran."""
        return self.ran or self.state in {"Running", "Silent"}

    @property
    def has_pod(self) -> bool:
        """Whether its pod has a node, or is to have one."""
        return self.state not in {"Planned", "Ended"}

    @property
    def has_begun(self) -> bool:
        """Whether its worker has a pod that no queue holds back, or had one and is to go on."""
        return not self.queued and self.cause != UNWANTED and (self.has_pod or self.has_run or self.replaces)

    @model_serializer
    def _without_defaults(self) -> dict[str, Any]:
        return {alias: value for name, alias in _ALIASES if (value := getattr(self, name)) != _DEFAULTS[name]}


_DEFAULTS = {name: field.default for name, field in Slot.model_fields.items()}
_ALIASES = tuple((name, field.alias or name) for name, field in Slot.model_fields.items())


class ParameterServersStatus(Status):
    """The parameter servers."""

    desired: int = 0
    """Number wanted."""
    ready: int = 0
    """Number ready."""
    restarts: int = 0
    """Replacements and restarts in place."""
    last_snapshot_time: AwareDatetime | None = None
    """When the model was last saved."""


class WorkersStatus(Status):
    """The workers."""

    desired: int = 0
    """Number wanted."""
    active: int = 0
    """Pods that are not draining. One that is to move to another pool counts until its successor runs."""
    ready: int = 0
    """Those of them that are running."""
    pending: int = 0
    """Pods that have not started."""
    succeeded: int = 0
    """Workers that exited because the work is done."""
    spot: int = 0
    """Active pods on nodes with a known spot label."""
    on_demand: int = 0
    """Active pods on other nodes."""
    selector: str = ""
    """Label selector of the workers, for `kubectl scale` and autoscalers."""


class Restarts(Status):
    """How many pods were replaced, and why."""

    failures: int = 0
    """Errors of the job itself: these count against backoffLimit."""
    disruptions: int = 0
    """Workers that the platform disrupted."""
    withdrawn: int | None = None
    """Announced disruptions that did not come. They do not count against maxDisruptions."""
    excused: int | None = None
    """Failures that do not count against backoffLimit: those of workers whose node ended within a minute, and whose
    memory was too small while others trained."""
    by_reason: dict[str, int] = Field(default_factory=dict)
    """Failures and disruptions of workers, by reason."""


class LastDisruption(Status):
    """The most recent disruption of a pod."""

    pod: str
    """The pod that was disrupted."""
    node: str = ""
    """The node it ran on."""
    reason: str
    """The signal that announced it."""
    time: AwareDatetime
    """When the operator noticed it."""
    replacement_created_seconds: int | None = None
    """Seconds until the replacement was created."""
    recovered_seconds: int | None = None
    """Seconds until the replacement's first push."""


class LastFailure(Status):
    """The most recent failure."""

    pod: str
    """The pod that failed."""
    node: str = ""
    """The node it ran on."""
    exit_code: int | None = None
    """Exit code of the training container."""
    reason: str
    """Why, in one CamelCase word."""
    message: str = ""
    """The message of the trainer or of Kubernetes."""
    time: AwareDatetime
    """When the operator noticed it."""


class ExcludedNode(Status):
    """A node that new workers avoid."""

    node: str
    """Its name."""
    reason: str = ""
    """Why, in one CamelCase word."""
    until: AwareDatetime
    """When it is tried again."""


class TrainingProgress(Status):
    """Training progress, as reported by parameter server 0. Updated at most every 30 seconds."""

    phase: str = ""
    """Starting, Training, Finishing, Succeeded or Failed."""
    step: int = 0
    """Steps, one batch each, that the parameters contain."""
    epoch: int = 0
    """Completed passes over the data."""
    loss: str | None = None
    """Training loss, a decimal."""
    samples_per_second: str | None = None
    """Speed of the whole job, a decimal."""
    progress_percent: int | None = None
    """Progress, 0 to 100."""
    remaining_seconds: int | None = None
    """Expected seconds until training ends."""
    wasted_steps: int = 0
    """Steps that were computed but do not count: their gradients were not applied, or were lost."""
    goodput: str | None = None
    """Share of the computed steps that count, 0 to 1, a decimal."""
    input_wait: str | None = None
    """Share of their time that workers wait for input, 0 to 1, a decimal. Much above 0, the data function is slower
    than the training step."""
    regained_step: int | None = None
    """The furthest step since the servers went back to a snapshot, until they reach `step` again."""
    last_progress_time: AwareDatetime | None = None
    """When `step`, or `regainedStep`, last increased."""
    message: str = ""
    """What the trainer waits for, and of which worker, such as a file that cannot be read or an outage."""
    restarts_from_nothing: int = 0
    """How often training began again from its initial parameters, because the servers were lost with all snapshots
    (`storage: ephemeral`). `step` begins again, too."""
    metrics: dict[str, str] = Field(default_factory=dict, max_length=64)
    """Metrics by their Keras names, decimals: those of training in the newest epoch, and those of the newest
    evaluation (`val_…`). At most 64."""


class DataStatus(Status):
    """Samples: `done`, `leased` and `total` of the current epoch, the others of the whole run."""

    done: int = 0
    """Trained in this epoch."""
    leased: int = 0
    """Leased to a worker."""
    total: int | None = None
    """Samples in one epoch, when known."""
    repeated: int = 0
    """Applied twice, because a parameter server was lost."""
    partial: int = 0
    """Applied on some shards only, because a parameter server was lost, or a worker in the middle of a push."""
    lost: int = 0
    """Left out, because their loss or gradient was not finite and the Training's on_nan says so."""


class Output(Status):
    """The trained model."""

    uri: str
    """Location of the model."""
    digest: str | None = None
    """SHA-256 of its manifest."""


class JobImages(Status):
    """The images of pods whose template names none. A job keeps those it started with when the operator is upgraded."""

    ps: str
    """Image of parameter servers."""
    worker: str
    """Image of workers."""
    worker_gpu: str | None = None
    """Image of workers that request GPUs, if there is one."""
    node_selector: dict[str, str] | None = None
    """Labels of the nodes that they run on, such as their architecture, as the operator's installation has them now."""


Phase = Literal["", "Pending", "Starting", "Running", "Suspended", "Succeeded", "Failed"]
PHASES: tuple[Phase, ...] = get_args(Phase)[1:]
MOST_IMPORTANT_FIRST = (
    "Failed",
    "Complete",
    "Stalled",
    "QuotaExceeded",
    "Degraded",
    "NodeSignalsSuspect",
    "Suspended",
    "Disrupted",
)
"""The conditions that a job is judged by, where several are True."""
TROUBLE = {*MOST_IMPORTANT_FIRST, "NodeSignalsUnavailable"} - {"Complete", "Suspended"}
"""The conditions that say that something is wrong."""

PASSES = frozenset({"Queued", "Unschedulable", "PoolsFull", "BelowMinReplicas", "StuckTerminating"})
"""The reasons of Degraded that may pass by themselves, or without which the job does as well: all others wait for a
person (docs/gitops.md)."""


class TrainingJobStatus(Status):
    """The observed state."""

    observed_generation: int = 0
    """The generation of the spec that this status is based on."""
    phase: Phase = ""
    """Pending, Starting, Running, Suspended, Succeeded or Failed: a summary of the conditions."""
    reason: str = ""
    """The reason of the most important condition, when the job is not simply running."""
    start_time: AwareDatetime | None = None
    """When the operator first created pods for the job."""
    images: JobImages | None = None
    """The images of pods whose template names none, since the job first had pods."""
    args_digest: str | None = None
    """A digest of `training.args`, since the job first had pods. No pod is made with others."""
    completion_time: AwareDatetime | None = None
    """When the job succeeded or failed."""
    suspended_seconds: int = 0
    """Total suspended time up to the last resumption."""
    conditions: tuple[Condition, ...] = Field(
        default=(),
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """Conditions, each with a reason and a message."""
    slots: tuple[Slot, ...] = ()
    """The pods: the newest of each role and index, and earlier ones that still exist."""
    parameter_servers: ParameterServersStatus = ParameterServersStatus()
    """The parameter servers."""
    workers: WorkersStatus = WorkersStatus()
    """The workers."""
    restarts: Restarts = Restarts()
    """How many pods were replaced, and why. Only grows."""
    last_disruption: LastDisruption | None = None
    """The most recent disruption of a pod."""
    last_failure: LastFailure | None = None
    """The most recent failure."""
    training: TrainingProgress = TrainingProgress()
    """Training progress."""
    data: DataStatus = DataStatus()
    """Progress through the data."""
    output: Output | None = None
    """The trained model, when the job has succeeded."""
    plan: PlanStatus | None = None
    """How many workers of which pool are wanted; of a job with pools. In mode Advise: what Shoal would choose."""
    prediction: PredictionStatus | None = None
    """How fast the job is expected to be; of a job with pools."""
    cost: CostStatus | None = None
    """What the nodes of the job cost; of a job with pools that have prices."""
    pool_usage: dict[str, PoolUsage] = Field(default_factory=dict, max_length=MOST_USED)
    """What the job used and met in each pool. Only grows."""
    counted_until: AwareDatetime | None = None
    """Until when poolUsage and cost are counted."""
    returning_since: AwareDatetime | None = None
    """When a worker last tried to return from an on-demand node to a spot node, or gave a spot node up."""
    released: bool = False
    """The Services and the disruption budget of the finished job are given back."""
    node_failures: dict[str, int] = Field(default_factory=dict, max_length=64)
    """Failures of workers on nodes that are not excluded, with workers.nodeExclusion."""
    excluded_nodes: tuple[ExcludedNode, ...] = Field(default=(), max_length=64)
    """Nodes that new workers avoid."""

    def condition(self, kind: str) -> Condition | None:
        """The condition of this type, if set."""
        return next((c for c in self.conditions if c.type == kind), None)

    @property
    def words(self) -> str:
        """The message of the most important condition that holds; empty if none has anything to say."""
        found = (self.condition(kind) for kind in (*MOST_IMPORTANT_FIRST, "Reconciling"))
        return next((c.message for c in found if c is not None and c.status == "True" and c.message), "")

    @property
    def resumed_at(self) -> datetime | None:
        """When it was last let go on after a pause; None while it pauses, and of one that never did."""
        pause = self.condition("Suspended")
        return pause.last_transition_time if pause is not None and pause.reason == "Resumed" else None

    @property
    def starts_again(self) -> bool:
        """Whether no step is known since it was resumed."""
        resumed, last = self.resumed_at, self.training.last_progress_time
        return resumed is not None and last is not None and last < resumed

    def standing(self, now: datetime) -> str:
        """For how many minutes no step is known of a job that is said to train; empty if one was a moment ago.

        A pause is none: what starts again has its time from then on.
        """
        last = self.training.last_progress_time
        if self.phase != "Running" or last is None:
            return ""
        stands = now - max(last, self.resumed_at or last)
        if stands <= STALE:
            return ""
        since = ", since it was resumed" if self.starts_again else ""
        return f"no step is known for {duration(60 * (stands // timedelta(minutes=1)))}{since}"

    def is_old(self, now: datetime) -> bool:
        """Whether it tells of nothing that was a moment ago: then perhaps nobody writes it."""
        slots = (at for slot in self.slots for at in (slot.created_at, slot.ended_at))
        conditions = (each.last_transition_time for each in self.conditions)
        others = (
            self.training.last_progress_time,
            self.parameter_servers.last_snapshot_time,
            self.counted_until,
        )
        return all(at is None or now - at > STALE for at in (*slots, *conditions, *others))

    @property
    def worker_nodes(self) -> Counter[str]:
        """Nodes by pool that workers with a pod have, or wait for."""
        places = {
            (each.pool, each.index)
            for each in self.slots
            if each.pool and each.role == "worker" and each.has_pod
        }
        return Counter(pool for pool, _ in places)  # a worker and its successor in one pool count once

    def to_begin(self, nodes: Counter[str]) -> Counter[str]:
        """Of the plan, the workers by pool that have not begun, beside those with `nodes`: a queue may hold them back.

        One that moves or backs off has no pod there either, and gets one without anybody's leave.
        """
        plan = self.plan or PlanStatus()
        wanted = plan.have_nodes(plan.pools)
        begun = {slot.index for slot in self.slots if slot.role == "worker" and slot.has_begun}
        left, found = max(0, wanted.total() - len(begun)), Counter[str]()
        for pool, number in (wanted - nodes).items():
            found[pool] = min(number, left - found.total())
        return found

    @property
    def finished(self) -> bool:
        """Whether the job succeeded or failed: no more pods are created."""
        return any(c.status == "True" and c.type in {"Complete", "Failed"} for c in self.conditions)


def by_identity(found: Sequence[T]) -> dict[int, T]:
    """The same objects, in order, by what tells whether each is the same one as before."""
    return dict(zip(map(id, found), found, strict=True))


def apart(old: TrainingJobStatus, new: TrainingJobStatus) -> tuple[TrainingJobStatus, TrainingJobStatus]:
    """Both, each without the records that are the same objects in the other: nothing happened to most."""
    was, now = by_identity(old.slots), by_identity(new.slots)
    gone, come = (
        tuple(sorted(map(these.__getitem__, these.keys() - those.keys()), key=attrgetter("place")))
        for these, those in ((was, now), (now, was))
    )
    return old.model_copy(update={"slots": gone}), new.model_copy(update={"slots": come})
