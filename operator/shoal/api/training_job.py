"""The TrainingJob: what a user applies. Its status is in `training_job_status`.

These classes are the API: the CRD, the reference in docs/api.md and the parsing of what the API server sends are all
made from them. Docstrings are what `kubectl explain` shows, so they speak to users. Rules that cross fields are CEL,
checked by the API server, so that a bad manifest is refused by `kubectl apply` with a message that says what to change.

No floats: losses and ratios are decimal strings, times are whole seconds.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from shoal.api.base import Resource, Strict
from shoal.api.pod_template import pod_template_schema
from shoal.api.rules import DECIMAL, MOST, STORED, Natural, Positive, explained, rules
from shoal.api.training_job_status import TrainingJobStatus
from shoal_trainer.contract import FALLS, RISES, names_of

MANAGED_BY = "shoal.dev/operator"
"""The value of `spec.managedBy` that means Shoal itself, as an absent one does."""
MOST_SHARDS = 16

_URI = "^(s3|gs|file)://.+"
_ENTRYPOINT = "^[A-Za-z_][A-Za-z0-9_]*([.][A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$"
StorageUri = Annotated[
    str,
    Field(
        max_length=1024,
        pattern=_URI,
        json_schema_extra=explained(
            _URI, "must begin with s3://, gs:// or file://, as s3://bucket/path does"
        ),
    ),
]
Entrypoint = Annotated[
    str,
    Field(
        max_length=253,
        pattern=_ENTRYPOINT,
        json_schema_extra=explained(_ENTRYPOINT, "must be module:object: digits:job for job in digits.py"),
    ),
]
PsTemplate = Annotated[dict[str, Any], Field(json_schema_extra=lambda s: s.update(pod_template_schema("ps")))]
WorkerTemplate = Annotated[
    dict[str, Any], Field(json_schema_extra=lambda s: s.update(pod_template_schema("worker")))
]


class VolumeClaim(Strict):
    """A PersistentVolumeClaim in the job's namespace."""

    name: str = Field(min_length=1, max_length=253)
    """Name of a PersistentVolumeClaim that exists. With more than one parameter server it must be
    ReadWriteMany, or all of them must fit on one node."""


class Ephemeral(Strict):
    """No storage, for trying things out.

    When a parameter-server pod is lost, so are its snapshots; the trained model is lost with the job's pods.
    """


class Storage(Strict):
    """Where snapshots, the trained model and the logs of a run go. Set exactly one field.

    Everything of a run lies under `<namespace>/<job>/<uid>/`.
    """

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "[has(self.uri), has(self.volumeClaim), has(self.ephemeral)].filter(x, x).size() == 1",
                "set exactly one of uri, volumeClaim, ephemeral",
            )
        )
    )

    uri: StorageUri | None = None
    """An object store or a folder: `s3://bucket/path`, `gs://bucket/path`, or `file:///path` that the
    template of the parameter servers mounts. Credentials come from their service account or template."""
    volume_claim: VolumeClaim | None = None
    """A PersistentVolumeClaim, mounted by the parameter servers only."""
    ephemeral: Ephemeral | None = None
    """No storage (`{}`): snapshots and the model are lost with the pods."""


class FailureRule(Strict):
    """What to do when a training container exits with one of these codes."""

    on_exit_codes: list[Annotated[int, Field(ge=1, le=255)]] = Field(min_length=1, max_length=32)
    """Exit codes, 1 to 255."""
    action: Literal["FailJob", "Restart", "Ignore", "CountAsDisruption"]
    """FailJob: the job fails at once. Restart: a failure, which counts against backoffLimit. Ignore:
    replaced, and counted nowhere. CountAsDisruption: replaced, counted as the platform's doing."""


class RunPolicy(Strict):
    """How long the job may run, what it may survive, and what is left when it has ended."""

    clean_pod_policy: Literal["None", "Running", "All"] = "Running"
    """Which pods are deleted when the job has ended: None, those still Running, or All."""
    ttl_seconds_after_finished: Natural | None = None
    """Delete the TrainingJob so many seconds after its end. Storage stays. Unset: keep it."""
    active_deadline_seconds: Positive | None = None
    """The job fails when it has been active for so long. Time suspended does not count."""
    backoff_limit: Natural = 6
    """How many failures (the job's own fault) are retried before the job fails. Disruptions do not count."""
    max_disruptions: Natural | None = None
    """How many disruptions of workers (spot reclaims, drains, lost nodes) are survived. Unset: any number."""
    progress_deadline_seconds: Annotated[int, Field(ge=10, le=MOST), STORED] | None = None
    """Report Degraded, reason NoProgress, when no training step was made in this time."""
    force_delete_after_seconds: Natural = 60
    """A pod that is Terminating on a node that is gone is deleted by force after so many seconds."""
    failure_rules: list[FailureRule] = Field(default=[], max_length=16)
    """What exit codes mean, first match first. Unset: any code is a failure, unless the platform took the
    pod."""


class StopAfter(Strict):
    """When training ends: at whichever is reached first."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "has(self.epochs) || has(self.steps) || has(self.metric)",
                "say when training ends: set epochs, steps, or metric with value",
            ),
            ("has(self.metric) == has(self.value)", "metric and value go together: set both or neither"),
            (
                "!has(self.mode) || has(self.metric)",
                "mode says how metric and value are meant: set all three",
            ),
            (
                f"!has(self.metric) || has(self.mode) || self.metric.matches('{names_of(*FALLS, *RISES)}')",
                "the name of this metric does not say which way is better: set mode to Min if it is to fall to value,"
                " or to Max if it is to rise to it",
            ),
        )
    )

    epochs: Positive | None = None
    """After so many passes over the data."""
    steps: Positive | None = None
    """After so many training steps of the whole job. A step is one batch of one worker, also where several make one
    update (gradient_accumulation_steps) or one push (steps_per_execution)."""
    metric: str | None = Field(None, min_length=1, max_length=63)
    """When this metric of the validation data, as Keras names it, reaches `value`."""
    value: str | None = Field(
        None,
        max_length=32,
        json_schema_extra=rules(
            (f"self.matches('{DECIMAL}')", 'must be a decimal number in quotes, as "0.97" or "1e-3" is')
        ),
    )
    """The metric's target, a decimal in quotes: `"0.97"`."""
    mode: Literal["Min", "Max"] | None = None
    """Whether the metric is to fall to `value` (Min) or to rise to it (Max). Unset: Keras' losses and errors
    (`loss`, `mse`, `mean_absolute_error`, `sparse_categorical_crossentropy`, `perplexity`, …) fall; accuracies,
    `auc`, `precision`, `recall`, `f1_score`, `mean_io_u`, `r2_score`, `cosine_similarity` and the like rise;
    for any other name it must be set."""


class InitialFrom(Strict):
    """Another run to begin from."""

    uri: StorageUri
    """Folder of the other run: `<storage>/<namespace>/<job>/<uid>`."""
    weights_only: bool = False
    """Take the weights only: the optimizer and the data begin anew."""


class Staleness(Strict):
    """How a gradient that was computed on older parameters is weighted: learning rate / staleness**p."""

    max: Natural | None = None
    """Most updates that a gradient may be behind when it is applied: a push that would exceed this for another worker
    waits. 0: each worker waits for its push before its next step. Unset: no limit."""
    policy: Literal["Constant", "InverseSquareRoot", "Inverse"] = "InverseSquareRoot"
    """Constant (p = 0), InverseSquareRoot (p = 1/2) or Inverse (p = 1)."""


class AcceleratorBatchSize(Strict):
    """The batch size of workers on one kind of accelerator."""

    accelerator: str = Field(max_length=63, pattern=r"^[A-Za-z0-9]+([ -][A-Za-z0-9]+)*$")
    """Words that the device's name must have, as TensorFlow names it: `T4` fits `Tesla T4`, `A100 80GB` fits
    `NVIDIA A100-SXM4-80GB`. `CPU` is a worker without an accelerator."""
    batch_size: Positive
    """Samples in one step of a worker there."""


class TrainingSpec(Strict):
    """What is trained. It cannot change while the job exists."""

    entrypoint: Entrypoint
    """`module:object` in the worker image: a shoal_trainer.Training, or a function that returns one."""
    args: dict[str, int | str] = Field(default_factory=dict, max_length=64)
    """Arguments of the entrypoint function. Whole numbers, or strings: write `"0.1"` and `"true"` in
    quotes."""
    batch_size: Positive = 128
    """Samples in one step of one worker. Pushes are weighted by their samples; so many have weight 1."""
    batch_sizes: list[AcceleratorBatchSize] = Field(
        default=[],
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["accelerator"]},
    )
    """Another batch size where workers run on unequal accelerators: the first that fits the one that a worker
    finds when it starts. Unset, or none fits: batchSize."""
    stop_after: StopAfter
    """When training ends."""
    initial_from: InitialFrom | None = None
    """Begin from another run."""
    staleness: Staleness = Staleness()
    """How stale gradients are weighted."""
    data_tls: bool = False
    """Encrypt gradients and parameters on the network with TLS 1.3, at the cost of CPU time. false: connections are
    authenticated with the job's key, but their traffic is not encrypted."""


class SnapshotSpec(Strict):
    """How often parameters, optimizer and the record of the data are saved together."""

    every_seconds: Positive = 60
    """Seconds between snapshots."""
    retain: int = Field(3, ge=1, le=100)
    """How many snapshots are kept."""


class ParameterServers(Strict):
    """The processes that own the model. They run on nodes that carry no known spot label."""

    replicas: int = Field(1, ge=1, le=MOST_SHARDS)
    """How many shards the parameters are cut into. May change while the job is suspended."""
    snapshot: SnapshotSpec = SnapshotSpec()
    """How often the model is saved."""
    template: PsTemplate = Field(default_factory=dict)
    """What to add to the pods: a PodTemplateSpec, merged over Shoal's defaults as `kubectl patch` does. The
    container is `ps`. Pods that run keep what they have; a change holds for the others."""


class Workers(Strict):
    """The processes that compute gradients.

    They run on spot nodes, unless the template's nodeAffinity says otherwise.
    """

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.maxReplicas) || self.replicas <= self.maxReplicas",
                "replicas must not be more than maxReplicas: lower replicas or raise maxReplicas",
            ),
            (
                "!has(self.minReplicas) || self.replicas == 0 || self.minReplicas <= self.replicas",
                "replicas must not be less than minReplicas: raise replicas or lower minReplicas",
            ),
        )
    )

    replicas: int = Field(ge=0, le=1000)
    """How many workers are wanted. `kubectl scale` changes it; training goes on meanwhile. 0: none for now."""
    min_replicas: int = Field(1, ge=0, le=1000)
    """With fewer workers ready than this the job is Degraded. It trains on with as many as there are."""
    max_replicas: int | None = Field(None, ge=1, le=1000)
    """The most that `replicas` may be scaled to. Unset: no limit."""
    max_surge: int | str = Field(
        "25%",
        json_schema_extra={
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            **rules(
                (
                    "type(self) == int ? self >= 0 : self.matches('^(100|[1-9]?[0-9])%$')",
                    'must be a whole number from 0, or a percentage in quotes such as "25%"',
                )
            ),
        },
    )
    """How many replacements may run beside pods that are still on their way out: a number, or a percentage
    of replicas, rounded up."""
    template: WorkerTemplate = Field(default_factory=dict)
    """What to add to the pods: a PodTemplateSpec, merged over Shoal's defaults as `kubectl patch` does. The
    container is `worker`. Pods that run keep what they have; a change holds for the others."""


class TrainingJobSpec(Strict):
    """What the user wants. The operator never writes here."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "has(self.managedBy) == has(oldSelf.managedBy)"
                " && (!has(self.managedBy) || self.managedBy == oldSelf.managedBy)",
                "managedBy cannot change: delete the job and apply it again",
            ),
            (
                "self.storage == oldSelf.storage",
                "storage cannot change: make a new TrainingJob and begin it with training.initialFrom",
            ),
            (
                "self.training == oldSelf.training",
                "training cannot change: make a new TrainingJob and begin it with training.initialFrom",
            ),
            (
                "self.parameterServers.replicas == oldSelf.parameterServers.replicas"
                " || (self.suspend && oldSelf.suspend)",
                "parameterServers.replicas can change only while the job is suspended: set suspend to true first",
            ),
        )
    )

    suspend: bool = False
    """Stop all pods after a last snapshot, and go on from there when it is false again."""
    managed_by: str | None = Field(None, min_length=1, max_length=253)
    """Another controller that takes care of this job: Shoal leaves it alone. Cannot change."""
    storage: Storage
    """Where snapshots, the trained model and the logs go: set exactly one of the fields. Cannot change."""
    run_policy: RunPolicy = RunPolicy()
    """How long the job may run, what it may survive, and what is left at the end."""
    training: TrainingSpec
    """What is trained. Cannot change."""
    parameter_servers: ParameterServers = ParameterServers()
    """The processes that own the model, on nodes that carry no known spot label."""
    workers: Workers
    """The processes that compute gradients, on spot nodes. They may come and go at any time."""


class TrainingJob(Resource):
    """A TensorFlow training that keeps going while its spot workers come and go.

    Parameter servers, on safe nodes, own the model; workers, on spot nodes, compute gradients.
    """

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.metadata.name.size() <= 40",
                "metadata.name must be at most 40 characters: the names of pods and Services are made from it",
            ),
            (
                "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
                "metadata.name must begin with a letter and hold only a-z, 0-9 and '-':"
                " the names of Services are made from it",
            ),
        )
    )

    PLURAL: ClassVar[str] = "trainingjobs"
    SHORT_NAMES: ClassVar[tuple[str, ...]] = ("etj",)

    kind: Literal["TrainingJob"] = "TrainingJob"
    spec: TrainingJobSpec
    """What the user wants."""
    status: TrainingJobStatus = TrainingJobStatus()
    """What the operator sees and did. Written by the operator alone."""
