"""The TrainingJob's spec; its status is in `training_job_status`.

These classes define the API: the CRD, docs/api.md and the parsing of watch events are all generated from them.
Docstrings are shown by `kubectl explain`, so they address users. Rules across fields are CEL, so `kubectl apply`
rejects a bad manifest with a message that says what to change.

Numbers of the spec are as the user writes them, in quotes or not; those of the status are decimal strings. Times are
whole seconds.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, JsonValue, WithJsonSchema, field_validator, model_validator

from shoal.api.base import Column, Resource, Scale, Strict
from shoal.api.elasticity import Elasticity
from shoal.api.json_text import NOTHING, JsonText, Kept
from shoal.api.roles import ParameterServers, Workers
from shoal.api.rules import MOST, NAME, STORED, Natural, Number, Positive, explained, rules, unchanging
from shoal.api.training_job_status import TrainingJobStatus
from shoal_trainer.contract import AT_MOST_ONE, BATCH_SIZE, FALLS, RISES, names_of

MANAGED_BY = "shoal.dev/operator"
"""The value of `spec.managedBy` that means Shoal itself, as an unset field does."""

_URI = "^((s3|gs)://[^/]|file:///.)"
_TWO_SLASHES = "^s3://[^/]+//+[^/]"
"""Clients of S3 write such objects below another name than the one by which they list them. The CRD alone refuses it:
a job that an older one took is read."""
_ENTRYPOINT = "^[A-Za-z_][A-Za-z0-9_]*([.][A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$"
_ABOVE_ONE = "^[+]?0*(([2-9]|[1-9][0-9]+|1[.]0*[1-9])[0-9.]*|[1-9][0-9.]*[eE][+]?0*[1-9][0-9]*)$"
"""A number in quotes, but for those that an exponent lifts from below one."""
_RUN = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_RUN_WORDS = "must contain only a-z, 0-9 and '-', and begin and end with a letter or digit: it names a folder"
_DIGEST = "^[0-9a-f]{64}$"
_DIGEST_WORDS = "must be a SHA-256: 64 hexadecimal digits, as shoal submit writes them"
StorageUri = Annotated[
    str,
    Field(
        max_length=1024,
        pattern=_URI,
        json_schema_extra=explained(_URI, "must be s3://bucket/path, gs://bucket/path or file:///path"),
    ),
]
Entrypoint = Annotated[
    str,
    Field(
        max_length=253,
        pattern=_ENTRYPOINT,
        json_schema_extra=explained(
            _ENTRYPOINT,
            "must be module:object, for example digits:job for job in digits.py",
            " && !self.contains('.py:')",
        ),
    ),
]


Arguments = Annotated[
    JsonText,
    Kept(Annotated[dict[str, JsonValue], Field(max_length=64)]),
    WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True, "maxProperties": 64}),
]
MAX_ARGS_BYTES = 64 << 10
"""Of the arguments as JSON: Linux starts no process with an environment variable above 128 KiB."""


class VolumeClaim(Strict):
    """A PersistentVolumeClaim in the job's namespace."""

    name: str = Field(
        min_length=1,
        max_length=253,
        pattern=NAME,
        json_schema_extra=explained(
            NAME, "must be the name of a PersistentVolumeClaim: a-z, 0-9, '-' and '.'"
        ),
    )
    """Name of an existing PersistentVolumeClaim. With more than one parameter server it must be ReadWriteMany,
    or all parameter servers must run on one node."""


class Ephemeral(Strict):
    """No storage, for experiments.

    When a parameter-server pod is lost, so are its snapshots; the trained model is lost with the job's pods. Several
    parameter servers have none: each has a folder of its own, and the job is Degraded (SnapshotsFail).
    """


class Storage(Strict):
    """Where snapshots, the trained model and the logs of a run go. Set exactly one field.

    A run is stored under `<namespace>/<job>/<uid>/`, or, with `run`, under `<namespace>/<job>/<run>/`.
    """

    model_config = ConfigDict(
        json_schema_extra=unchanging(
            (
                "[has(self.uri), has(self.volumeClaim), has(self.ephemeral)].filter(x, x).size() == 1",
                "set exactly one of uri, volumeClaim, ephemeral",
            ),
            (
                "!has(self.run) || !has(self.ephemeral)",
                "a run that is to be continued needs a storage: set uri or volumeClaim, or remove run",
            ),
        )
    )

    uri: StorageUri | None = None
    """An object store or a folder: `s3://bucket/path`, `gs://bucket/path`, or `file:///path` mounted by
    the template of the parameter servers. Credentials come from their service account or template."""
    volume_claim: VolumeClaim | None = None
    """A PersistentVolumeClaim, mounted by the parameter servers only."""
    ephemeral: Ephemeral | None = None
    """No storage (`{}`): snapshots and the model are lost with the pods. With several parameter servers there are no
    snapshots."""
    run: str | None = Field(
        None, min_length=1, max_length=63, json_schema_extra=explained(_RUN, _RUN_WORDS), pattern=_RUN
    )
    """A name for the run, instead of the job's uid: `<namespace>/<job>/<run>/`. A job with the same name, namespace and
    run continues what lies there, also if a GitOps controller has deleted and created the TrainingJob. Unset: each
    TrainingJob is a new run."""


class FailureRule(Strict):
    """What to do when a training container exits with one of these codes."""

    on_exit_codes: list[Annotated[int, Field(ge=1, le=255)]] = Field(min_length=1, max_length=32)
    """Exit codes, 1 to 255."""
    action: Literal["FailJob", "Restart", "Ignore", "CountAsDisruption"]
    """FailJob: the job fails at once. Restart: a failure that counts against backoffLimit. Ignore: the pod is
    replaced and nothing is counted. CountAsDisruption: the pod is replaced and a disruption is counted."""


class SchedulingPolicy(Strict):
    """How the job's pods are queued and scheduled."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.queueAs) || self.queueAs == 'Pods' || (has(self.queue) && self.queue != '')",
                "queueAs Workload needs a queue: set queue to the name of a LocalQueue",
            ),
        )
    )

    gang: Literal["None", "PodGroup"] = "None"
    """PodGroup: no pod starts before there is room for all parameter servers and workers.minReplicas. It needs the
    PodGroups of scheduler-plugins and a scheduler with its plugin Coscheduling, which the templates name in
    schedulerName unless it is the default one. Where PodGroups are not installed, the job runs without, and is Degraded
    with reason NoPodGroup. Can change only while the job is suspended."""
    queue: str = Field(
        "",
        max_length=63,
        pattern=f"^$|{NAME}",
        json_schema_extra=explained(f"^$|{NAME}", "must be the name of a LocalQueue: a-z, 0-9, '-' and '.'"),
    )
    """The LocalQueue of Kueue. Empty: pods are not queued."""
    queue_as: Literal["Pods", "Workload"] = "Pods"
    """What waits in the queue. Pods: each pod by itself (Kueue's integration for plain pods), so training begins with
    those that are admitted. Workload: all parameter servers and workers.minReplicas together, as one Workload that
    Shoal makes; until it is admitted the job has no pods, and where it is preempted the job is suspended. Workers above
    minReplicas wait as Pods. It needs the chart's value kueue.enabled, and Kueue chooses the nodes, so that pools,
    onDemandBase, fallback and elasticity.mode Advise and Auto are not available. Can change only while the job is
    suspended."""


class RunPolicy(Strict):
    """How long the job may run, what it tolerates, and what is cleaned up when it finishes."""

    clean_pod_policy: Literal["None", "Running", "All"] = "Running"
    """Which pods are deleted when the job finishes: None, those still Running, or All."""
    ttl_seconds_after_finished: Natural | None = None
    """Delete the TrainingJob this many seconds after it finishes. Its storage is kept. Unset: never. A GitOps
    controller would create the job again, and train again: do not set it in a repository."""
    active_deadline_seconds: Positive | None = None
    """The job fails when it has been active for this many seconds. Suspended time does not count."""
    backoff_limit: Natural = 6
    """How many failures are retried before the job fails. Disruptions do not count."""
    max_disruptions: Natural | None = None
    """How many disruptions of workers (spot reclaims, drains, lost nodes) the job tolerates. Unset: no limit."""
    progress_deadline_seconds: Annotated[int, Field(ge=10, le=MOST), STORED] | None = None
    """Report Degraded with reason NoProgress when no training step completes for this many seconds."""
    force_delete_after_seconds: Natural = 60
    """Force-delete a pod that is Terminating on a lost node after this many seconds. Where nodes cannot be read, any
    pod that is still Terminating as long after its grace period."""
    failure_rules: list[FailureRule] = Field(default=[], max_length=16)
    """What exit codes mean; the first match applies. Unset: any code is a failure, unless the pod was disrupted."""
    scheduling_policy: SchedulingPolicy = SchedulingPolicy()
    """How the job's pods are queued."""


def _requires(field: str, other: str) -> dict[str, Any]:
    """The schema that refuses the one without the other, where CEL does not see one of them."""
    return {"anyOf": [{"required": [other]}, {"not": {"required": [field]}}]}


_REACHED: dict[str, Any] = {
    "anyOf": [
        {"required": ["mode"]},
        {
            "not": {
                "required": ["metric", "value"],
                "properties": {
                    "metric": {"pattern": names_of(*AT_MOST_ONE)},
                    # Of these two, the one says something of numbers only, and the other of numbers in quotes.
                    "value": {"minimum": 1, "exclusiveMinimum": True, "pattern": _ABOVE_ONE},
                },
            }
        },
    ]
}
"""Refuses what `StopAfter._is_reached` does, which has the words."""


class StopAfter(Strict):
    """When training ends: at the first of these that is reached."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "has(self.epochs) || has(self.steps) || has(self.metric)",
                "set at least one of epochs, steps, or metric with value",
            ),
            (
                "!has(self.mode) || has(self.metric)",
                "mode requires metric and value: set both, or remove mode",
            ),
            (
                f"!has(self.metric) || has(self.mode) || self.metric.matches('{names_of(*FALLS, *RISES)}')",
                "mode is required for this metric: set Min to stop when it falls to value, or Max to stop when it"
                " rises to value",
            ),
        )
        | {"allOf": [_requires("metric", "value"), _requires("value", "metric"), _REACHED]}
    )

    epochs: Positive | None = None
    """After this many passes over the data."""
    steps: Positive | None = None
    """After this many training steps of the whole job. A step is one batch of one worker, also where several batches
    make one update (gradient_accumulation_steps) or one push (batches_per_push)."""
    metric: str | None = Field(None, min_length=1, max_length=63)
    """When this metric of the validation data, as Keras names it, reaches `value`."""
    value: Number | None = None
    """The metric's target: `0.97`."""
    mode: Literal["Min", "Max"] | None = None
    """Whether training ends when the metric falls to `value` (Min) or rises to it (Max). Unset: Min for losses and
    errors of Keras (`loss`, `mse`, `mean_absolute_error`, `sparse_categorical_crossentropy`, `perplexity`, …); Max
    for accuracies, `auc`, `precision`, `recall`, `f1_score`, `mean_io_u`, `r2_score`, `cosine_similarity` and the
    like. Required for any other name."""

    @model_validator(mode="after")
    def _is_reached(self) -> StopAfter:
        if self.epochs is None and self.steps is None and self.metric is None and self.value is None:
            raise ValueError("set at least one of epochs, steps, or metric with value")
        if (self.metric is None) != (self.value is None):
            raise ValueError("metric and value must be set together")
        shares = self.metric is not None and re.match(names_of(*AT_MOST_ONE), self.metric)
        if shares and self.mode is None and (self.value or 0.0) > 1.0:
            raise ValueError(
                "this metric is at most 1 and never rises to value: set a value below 1, for example 0.97,"
                " or, if it is a metric of your own, mode: Max"
            )
        return self


class InitialFrom(Strict):
    """Another run to start from."""

    uri: StorageUri
    """Folder of that run: `<storage>/<namespace>/<job>/<uid>`. In the volumeClaim of this job's storage, `<storage>` is
    `file:///var/run/shoal/storage`."""
    weights_only: bool = False
    """Load only the weights: the optimizer and the data start anew."""


class Staleness(Strict):
    """How a gradient computed on older parameters is weighted.

    The learning rate is divided by n**p, where n is the normal staleness, which grows with the number of workers; for a
    gradient that is staler than normal it is also divided by how many times as stale it is.
    """

    max: Natural | None = None
    """Most updates that a slow worker's gradient may be behind: a push that would exceed this for another worker
    waits, unless its own is as old. So no gradient is further behind than this and 2 for each other worker. 0: each
    worker waits for its push before its next step. Unset: no limit."""
    policy: Literal["Constant", "InverseSquareRoot", "Inverse"] = "InverseSquareRoot"
    """Constant (p = 0), InverseSquareRoot (p = 1/2) or Inverse (p = 1)."""
    rounds: bool = True
    """Whether workers of about equal speed wait for each other after each push, so that gradients are less stale. A
    worker does so only where a push and a pull take a small part of its time."""


class AcceleratorBatchSize(Strict):
    """The batch size of workers on one kind of accelerator."""

    accelerator: str = Field(max_length=63, pattern=r"^[A-Za-z0-9]+([ -][A-Za-z0-9]+)*$")
    """Words that the device's name must contain, TensorFlow's or Shoal's own: `T4` matches `Tesla T4`,
    `A100 80GB` matches `NVIDIA A100-SXM4-80GB`. `CPU` matches a worker without an accelerator."""
    batch_size: Positive
    """Samples in one step of such a worker."""


class CodeSource(Strict):
    """Python files outside of the image. Set exactly one field."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("has(self.configMap) != has(self.digest)", "set exactly one of configMap, digest")
        )
    )

    config_map: str | None = Field(None, min_length=1, max_length=253)
    """A ConfigMap of the job's namespace, whose keys are the names of files: `digits.py`; or an archive with packages,
    `code.zip`."""
    digest: str | None = Field(
        None, pattern=_DIGEST, json_schema_extra=explained(_DIGEST, _DIGEST_WORDS), max_length=64
    )
    """The SHA-256 of an archive in the job's storage, `<storage>/<namespace>/code-<digest>.zip`, which parameter server
    0 hands to the workers: for code that is too large for a ConfigMap."""


class TrainingSpec(Strict):
    """What is trained. Immutable."""

    model_config = ConfigDict(json_schema_extra=unchanging())

    entrypoint: Entrypoint
    """`module:object` in the worker image: a shoal_trainer.Training, or a function that returns one."""
    args: Arguments = Field(default_factory=lambda: NOTHING)
    """Arguments of the entrypoint function, of at most 64 KiB: numbers, strings, booleans, lists and maps. A decimal
    in quotes is a float too, unless the function's parameter is a string."""
    code: CodeSource | None = None
    """Code that is not in the image. Its modules are first on Python's path of the workers."""
    batch_size: Positive = BATCH_SIZE
    """Samples in one step of one worker. A push is weighted by its samples; this many have weight 1."""
    batch_sizes: list[AcceleratorBatchSize] = Field(
        default=[],
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["accelerator"]},
    )
    """Batch sizes of particular accelerators: a worker uses the first entry that matches its accelerator when it
    starts. Without a match: batchSize. That of its CapacityPool takes precedence over both."""
    stop_after: StopAfter
    """When training ends."""
    initial_from: InitialFrom | None = None
    """Start from another run."""
    staleness: Staleness = Staleness()
    """How stale gradients are weighted."""
    data_tls: bool = False
    """Encrypt gradients and parameters on the network with TLS 1.3, at the cost of CPU time. false: connections are
    authenticated with the job's key, but their traffic is not encrypted."""

    @cached_property
    def args_digest(self) -> str:
        """A digest of the arguments: the API server takes a renamed one.

        To its rules, two objects of fields that no schema names are equal if they have as many, and if those that both
        have are equal.
        """
        return hashlib.sha256(json.dumps(self.args.read(), sort_keys=True).encode()).hexdigest()[:12]

    def short_epoch(self, samples: int | None) -> str:
        """What is to be said of a batch that no epoch of so many samples fills; otherwise empty."""
        if not samples or samples >= self.batch_size:
            return ""
        sizes = f"an epoch has {samples:,} samples and a batch {self.batch_size:,}"
        return f"{sizes}: each epoch was one step of one worker"

    @field_validator("args")
    @classmethod
    def _fits_into_an_environment(cls, args: JsonText) -> JsonText:
        if (size := len(json.dumps(args.read()))) > MAX_ARGS_BYTES:
            raise ValueError(
                f"the arguments have {size} bytes, at most {MAX_ARGS_BYTES} are possible: put what is large into the "
                "code or the data"
            )
        return args


class TrainingJobSpec(Strict):
    """The desired state. The operator never changes it."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "has(self.managedBy) == has(oldSelf.managedBy)"
                " && (!has(self.managedBy) || self.managedBy == oldSelf.managedBy)",
                "managedBy is immutable: delete the job and apply it again",
            ),
            (
                "!has(self.training.code) || !has(self.training.code.digest) || !has(self.storage.ephemeral)",
                "training.code.digest is an archive in the storage, and storage.ephemeral has none: set storage.uri or"
                " volumeClaim",
            ),
            (
                "self.parameterServers.replicas == oldSelf.parameterServers.replicas"
                " || (self.suspend && oldSelf.suspend)",
                "parameterServers.replicas can change only while the job is suspended: set suspend to true first",
            ),
            (
                # The pods that run would not be in the group that their successors wait for.
                "self.runPolicy.schedulingPolicy.gang == oldSelf.runPolicy.schedulingPolicy.gang"
                " || (self.suspend && oldSelf.suspend)",
                "runPolicy.schedulingPolicy.gang can change only while the job is suspended: set suspend to true first",
            ),
            (
                "self.runPolicy.schedulingPolicy.queueAs == oldSelf.runPolicy.schedulingPolicy.queueAs"
                " || (self.suspend && oldSelf.suspend)",
                "runPolicy.schedulingPolicy.queueAs can change only while the job is suspended: set suspend to true"
                " first",
            ),
            (
                "self.runPolicy.schedulingPolicy.queueAs != 'Workload'"
                " || (!(has(self.workers.pools) && size(self.workers.pools) > 0)"
                " && !(has(self.parameterServers.pools) && size(self.parameterServers.pools) > 0)"
                " && self.workers.onDemandBase == 0 && !has(self.workers.fallback)"
                " && !(self.elasticity.mode in ['Advise', 'Auto']))",
                "with runPolicy.schedulingPolicy.queueAs Workload Kueue chooses the nodes, and admits minReplicas:"
                " remove pools, onDemandBase, fallback and elasticity.mode Advise or Auto, or set queueAs to Pods",
            ),
            (
                "!(self.elasticity.mode in ['Advise', 'Auto'])"
                " || self.runPolicy.schedulingPolicy.queueAs == 'Workload'"
                " || (has(self.workers.pools) && size(self.workers.pools) > 0)",
                "elasticity.mode Advise and Auto need workers.pools: name the CapacityPools to choose from",
            ),
            (
                "self.elasticity.mode != 'Auto' || has(self.workers.maxReplicas)",
                "elasticity.mode Auto needs workers.maxReplicas: set the most workers that you want",
            ),
        )
    )

    suspend: bool = False
    """Stop all pods after a final snapshot. Training resumes from it when this is false again."""
    managed_by: str | None = Field(None, min_length=1, max_length=253)
    """The controller that manages this job. Shoal ignores jobs of other controllers. Immutable."""
    storage: Storage
    """Where snapshots, the trained model and the logs go: set exactly one of the fields. Immutable."""
    run_policy: RunPolicy = RunPolicy()
    """How long the job may run, what it tolerates, and what is cleaned up when it finishes."""
    training: TrainingSpec
    """What is trained. Immutable."""
    parameter_servers: ParameterServers = ParameterServers()
    """The processes that hold the model, on nodes without a known spot label."""
    workers: Workers
    """The processes that compute gradients, on spot nodes. They may join and leave at any time."""
    elasticity: Elasticity = Elasticity()
    """Who decides how many workers there are, and on which pools: you, or Shoal by an objective."""

    @property
    def roles(self) -> tuple[ParameterServers, Workers]:
        """Both roles."""
        return self.parameter_servers, self.workers

    @property
    def ours(self) -> bool:
        """Whether it is Shoal that manages the job, and not another controller."""
        return self.managed_by in {None, MANAGED_BY}


class TrainingJob(Resource):
    """A TensorFlow training job that keeps training while its spot workers come and go.

    Parameter servers, on on-demand nodes, hold the model; workers, on spot nodes, compute gradients.
    """

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.metadata.name.size() <= 40",
                "metadata.name must be at most 40 characters: names of pods and Services are derived from it",
            ),
            (
                "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
                "metadata.name must begin with a letter and contain only a-z, 0-9 and '-':"
                " names of Services are derived from it",
            ),
            (
                # What is stored keeps its storage, or its status could not be written: its servers say it. Of what is
                # new, the API server drops the status.
                "has(self.status)"
                f" || !(has(self.spec.storage.uri) && self.spec.storage.uri.matches('{_TWO_SLASHES}')"
                " || has(self.spec.training.initialFrom)"
                f" && self.spec.training.initialFrom.uri.matches('{_TWO_SLASHES}'))",
                "spec.storage.uri and initialFrom.uri must have one slash after the bucket of s3://: write"
                " s3://bucket/path, as nothing that is in s3://bucket//path would be found again",
            ),
        )
    )

    PLURAL: ClassVar[str] = "trainingjobs"
    SHORT_NAMES: ClassVar[tuple[str, ...]] = ("etj",)
    SCALE: ClassVar[Scale | None] = Scale(
        ".spec.workers.replicas", ".status.workers.active", ".status.workers.selector"
    )
    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column("Phase", ".status.phase"),
        Column("PS", ".status.parameterServers.ready", "integer", description="Parameter servers ready"),
        Column("Workers", ".status.workers.ready", "integer", description="Workers ready"),
        Column("Desired", ".status.workers.desired", "integer", description="Desired workers"),
        Column("Samples/s", ".status.training.samplesPerSecond", description="Samples per second of the job"),
        Column(
            "Progress(%)", ".status.training.progressPercent", "integer", description="Progress in percent"
        ),
        Column(
            "Disruptions", ".status.restarts.disruptions", "integer", description="Disruptions of workers"
        ),
        Column(
            "PS-Restarts",
            ".status.parameterServers.restarts",
            "integer",
            description="Parameter servers lost and restarted",
        ),
        Column("Reason", ".status.reason", description="Reason of the most important condition"),
        Column("Age", ".metadata.creationTimestamp", "date"),
        Column(
            "ETA(s)",
            ".status.training.remainingSeconds",
            "integer",
            wide=True,
            description="Expected seconds to completion",
        ),
        Column(
            "Last-Step",
            ".status.training.lastProgressTime",
            "date",
            wide=True,
            description="How long ago a step was last known: it grows while training stands, or no operator runs",
        ),
        Column(
            "Spent",
            ".status.cost.accumulated",
            wide=True,
            description="Cost of the nodes so far, in the currency of the pools' prices",
        ),
        Column("Plan", ".status.plan.summary", wide=True, description="Workers wanted by pool"),
        Column(
            "Failures",
            ".status.restarts.failures",
            "integer",
            wide=True,
            description="Failures of the job itself",
        ),
    )

    kind: Literal["TrainingJob"] = "TrainingJob"
    spec: TrainingJobSpec
    """The desired state."""
    status: TrainingJobStatus = TrainingJobStatus()
    """The observed state, written only by the operator."""

    @property
    def wanted(self) -> int:
        """How many workers are wanted: by the operator, or, before it has looked at the job, by the spec."""
        return self.status.workers.desired if self.status.phase else self.spec.workers.replicas
