"""The status of a TrainingJob: what the operator saw and did, and all that it remembers.

The operator keeps nothing anywhere else: `slots` is its durable record of pods, written in one update with the
counters, so that what vanished while nobody looked is counted once. Counters only grow.
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from shoal.api.base import Status

SlotState = Literal["Starting", "Running", "Silent", "Draining", "Ended"]


class JobCondition(Status):
    """A metav1.Condition."""

    type: str
    """What is said: Running, Degraded, Complete, Failed, …"""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    observed_generation: int = 0
    """The generation of the spec that this was said of."""
    last_transition_time: datetime
    """When `status` last changed."""
    reason: str
    """One word, for programs."""
    message: str = ""
    """A sentence, for people."""


class Slot(Status):
    """One pod that fills, or last filled, a place of the job."""

    role: Literal["ps", "worker"]
    """Parameter server or worker."""
    index: int
    """The worker's slot or the server's shard."""
    incarnation: int
    """How many pods have filled this place before."""
    state: SlotState
    """Starting, Running, Silent (the coordinator hears nothing), Draining (on its way out) or Ended."""
    cause: str = ""
    """Why it left or is leaving: when that is set, it is counted. Empty again if the notice is withdrawn."""
    node: str = ""
    """The node it is or was bound to."""
    node_uid: str = ""
    """The node's uid: a node that comes back under its old name is another node."""
    boot_id: str = ""
    """The node's boot, for the same reason."""
    pool: str = ""
    """The node pool that the node belongs to, as its cloud labels it."""
    restarts: int = 0
    """Restarts of the container in place that have been counted (parameter servers)."""
    attempts: int = 0
    """How many incarnations of this place in a row ended badly soon after their start."""
    created_at: datetime | None = None
    """When the pod was created."""
    running_at: datetime | None = None
    """When its container first ran."""
    ended_at: datetime | None = None
    """When it was seen to have ended or to be leaving."""


class ParameterServersStatus(Status):
    """The parameter servers."""

    desired: int = 0
    """How many are wanted."""
    ready: int = 0
    """How many are ready."""
    restarts: int = 0
    """How often one was replaced or restarted in place."""
    last_snapshot_time: datetime | None = None
    """When the model was last saved."""


class WorkersStatus(Status):
    """The workers."""

    desired: int = 0
    """How many are wanted."""
    active: int = 0
    """Pods that are not on their way out."""
    ready: int = 0
    """Pods that are running and not on their way out."""
    pending: int = 0
    """Pods that have not started."""
    succeeded: int = 0
    """Workers that were told that the work is done."""
    spot: int = 0
    """Active pods on nodes with a known spot label."""
    on_demand: int = 0
    """Active pods on other nodes."""
    selector: str = ""
    """Label selector of the workers, for `kubectl scale` and autoscalers."""


class Restarts(Status):
    """How often a pod was replaced, and why."""

    failures: int = 0
    """The job's own fault: these count against backoffLimit."""
    disruptions: int = 0
    """Workers that the platform took."""
    by_reason: dict[str, int] = Field(default_factory=dict)
    """The same by reason: failures and disruptions of workers."""


class LastDisruption(Status):
    """The last pod that the platform took."""

    pod: str
    """Its name."""
    node: str = ""
    """The node it ran on."""
    reason: str
    """The signal."""
    time: datetime
    """When it was noticed."""
    replacement_created_seconds: int | None = None
    """Seconds until its replacement was created."""
    recovered_seconds: int | None = None
    """Seconds until its replacement trained."""


class LastFailure(Status):
    """The last failure that was the job's own fault."""

    pod: str
    """The pod that failed."""
    node: str = ""
    """The node it ran on."""
    exit_code: int | None = None
    """Exit code of the training container."""
    reason: str
    """One word."""
    message: str = ""
    """What the trainer or Kubernetes said."""
    time: datetime
    """When it was noticed."""


class TrainingProgress(Status):
    """How the training goes, as PS 0 tells. Updated at most every 30 seconds."""

    phase: str = ""
    """Starting, Training, Finishing, Succeeded or Failed."""
    step: int = 0
    """Updates of the parameters so far."""
    epoch: int = 0
    """Passes over the data that are done."""
    loss: str | None = None
    """Training loss, a decimal."""
    samples_per_second: str | None = None
    """Speed of the whole job, a decimal."""
    progress_percent: int | None = None
    """How much is done, 0 to 100."""
    remaining_seconds: int | None = None
    """Expected time to the end."""
    wasted_steps: int = 0
    """Steps whose gradients did not count."""
    goodput: str | None = None
    """Share of computed samples that count, 0 to 1, a decimal."""
    input_wait: str | None = None
    """Share of their time that workers wait for input, 0 to 1, a decimal. Near 0 is good; more means that the
    data function is slower than the step."""
    last_progress_time: datetime | None = None
    """When `step` last grew."""
    metrics: dict[str, str] = Field(default_factory=dict)
    """Metrics, as Keras names them, decimals."""


class DataStatus(Status):
    """Samples of the data: three for the current epoch, three over the whole run."""

    done: int = 0
    """Trained in this epoch."""
    leased: int = 0
    """Being worked on."""
    total: int | None = None
    """In one epoch, when known."""
    repeated: int = 0
    """Applied twice because a parameter server was lost."""
    partial: int = 0
    """Applied on some shards only."""
    lost: int = 0
    """Never applied though once called done."""


class Output(Status):
    """The trained model."""

    uri: str
    """Where it lies."""
    digest: str | None = None
    """SHA-256 of its manifest."""


class TrainingJobStatus(Status):
    """What the operator saw and did."""

    observed_generation: int = 0
    """The generation of the spec that this status speaks of."""
    phase: Literal["", "Pending", "Starting", "Running", "Suspended", "Succeeded", "Failed"] = ""
    """Pending, Starting, Running, Suspended, Succeeded or Failed: a summary of the conditions."""
    reason: str = ""
    """Why the job is not simply running: the reason of the condition that matters most."""
    start_time: datetime | None = None
    """When the operator first made pods for the job."""
    completion_time: datetime | None = None
    """When the job ended, well or not."""
    suspended_seconds: int = 0
    """Time that the job was suspended, up to the last resumption."""
    conditions: tuple[JobCondition, ...] = Field(
        default=(),
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """What holds now, each with a reason and a message."""
    slots: tuple[Slot, ...] = ()
    """The pods, one entry for each place and those still leaving it."""
    parameter_servers: ParameterServersStatus = ParameterServersStatus()
    """The parameter servers."""
    workers: WorkersStatus = WorkersStatus()
    """The workers."""
    restarts: Restarts = Restarts()
    """How often a pod was replaced, and why. Only grows."""
    last_disruption: LastDisruption | None = None
    """The last pod that the platform took."""
    last_failure: LastFailure | None = None
    """The last failure that was the job's own fault."""
    training: TrainingProgress = TrainingProgress()
    """How the training goes."""
    data: DataStatus = DataStatus()
    """How far the data was worked through."""
    output: Output | None = None
    """The trained model, when the job has succeeded."""

    def condition(self, kind: str) -> JobCondition | None:
        """The condition of this type, if it is there."""
        return next((c for c in self.conditions if c.type == kind), None)

    @property
    def finished(self) -> bool:
        """Succeeded or failed: nothing is started any more."""
        return any(c.status == "True" and c.type in {"Complete", "Failed"} for c in self.conditions)
