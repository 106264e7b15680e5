"""A TrainingJob, and the ConfigMap of its code, from the arguments of `submit`. Pure but for reading the code (`code`).

Types and patterns are checked by the models from which the CRD is generated. The CRD's rules across fields only the API
server knows: `Client.check` asks it.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pydantic.dataclasses
from pydantic import ConfigDict, ValidationError

from shoal.api.base import API_VERSION
from shoal.api.mistakes import mistakes
from shoal.api.roles import Capacity
from shoal.api.training_job import TrainingJob
from shoal.client import code, template
from shoal.errors import UsageError
from shoal_trainer.contract import BATCH_SIZE
from shoal_trainer.script import (
    beside,
    module_of,
    must_define,
    must_take_arguments,
    no_entrypoint,
    training_in,
)

_CLAIM = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")

Json = dict[str, Any]


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Submission:
    """What `submit` was asked for. Only `entrypoint` and `storage` have no default.

    Raises:
        ValidationError: an argument has another type, or is unknown.
    """

    entrypoint: str
    storage: str
    workers: int = 1
    image: str | None = None
    name: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    files: Sequence[str | Path] = ()
    batch_size: int = BATCH_SIZE
    epochs: int | None = None
    steps: int | None = None
    until: tuple[str, float] | None = None
    mode: Literal["Min", "Max"] | None = None
    max_workers: int | None = None
    parameter_servers: int = 1
    pools: Sequence[str] = ()
    capacity: Capacity | None = None
    deadline_seconds: int | None = None
    max_cost: float | None = None
    run: str | None = None
    initial_from: str | None = None
    weights_only: bool = False
    snapshot_seconds: int | None = None
    max_staleness: int | None = None
    tls: bool = False
    template: Mapping[str, Any] | str | Path | None = None


@dataclass(frozen=True)
class Manifests:
    """What is to be created: the job; and its code, if it is not in the image, as a ConfigMap or for the storage."""

    job: Json
    code: Json | None = None
    archive: bytes | None = None

    @property
    def name(self) -> str:
        """The job's name."""
        return str(self.job["metadata"]["name"])

    def with_new_code(self) -> Manifests:
        """The same, with code of a name that is free: that of a deleted job of this name goes only a while later."""
        if self.code is None:
            return self
        name = f"{self.name}-code-{secrets.token_hex(4)}"
        spec = self.job["spec"]
        training = {**spec["training"], "code": {"configMap": name}}
        return replace(
            self,
            job={**self.job, "spec": {**spec, "training": training}},
            code={**self.code, "metadata": {**self.code["metadata"], "name": name}},
        )


def manifests(wanted: Submission) -> Manifests:
    """The objects to create.

    Raises:
        UsageError: an argument is wrong; the message says what to change.
    """
    entrypoint, sources = _entrypoint(wanted)
    name = wanted.name or _name(entrypoint.partition(":")[0])
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):  # the ConfigMap's is derived from it
        raise UsageError(
            f"the name {name!r} must begin with a letter and have only a-z, 0-9 and '-', at most 40 characters"
        )
    pods = template.read(wanted.template)
    servers: Json = {"replicas": wanted.parameter_servers}
    if of_servers := template.of_role(pods, "ps"):
        servers["template"] = of_servers
    if wanted.snapshot_seconds is not None:
        servers["snapshot"] = {"everySeconds": wanted.snapshot_seconds}
    training, storage = _training(wanted, entrypoint), _storage(wanted)
    config_map = archive = None
    if sources:
        packed = code.content(sources)
        if isinstance(packed, bytes):
            _must_be_reachable(storage, len(packed))
            training["code"], archive = {"digest": hashlib.sha256(packed).hexdigest()}, packed
        else:
            config_map = _config_map(name, packed)
            training["code"] = {"configMap": config_map["metadata"]["name"]}
    spec = {
        "storage": storage,
        "training": training,
        "parameterServers": servers,
        "workers": _workers(wanted, pods),
        **_elasticity(wanted),
    }
    job = {"apiVersion": API_VERSION, "kind": "TrainingJob", "metadata": {"name": name}, "spec": spec}
    check(job)
    return Manifests(job, config_map, archive)


def _entrypoint(wanted: Submission) -> tuple[str, dict[str, str]]:
    """MODULE:OBJECT, and the files that travel with the job."""
    path, _, attribute = wanted.entrypoint.partition(":")
    is_file = path.endswith(".py") or "/" in path
    if not attribute and not is_file:
        raise UsageError(f"the entrypoint {no_entrypoint(wanted.entrypoint)}")
    if not is_file:
        if (wanted.image or template.image_in(template.read(wanted.template))) is None:
            raise UsageError(
                f"{path} is a module of an image: say which with image=… (--image), or give a file: "
                f"{path}.py:{attribute}"
            )
        return f"{path}:{attribute}", code.read(wanted.files)
    if Path(path).is_dir():
        raise UsageError(
            f"{path} is a folder: name a file in it, such as {Path(path)}/train.py:{attribute or 'job'}; files=… "
            "(--file) takes folders along"
        )
    file = Path(path).name
    text = code.read([path])[file]
    try:
        module = module_of(file)
        attribute = attribute or training_in(file, text)
        must_define(file, text, attribute)
        if wanted.args:
            must_take_arguments(file, text, attribute, wanted.args)
        near = beside(Path(path))
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    return f"{module}:{attribute}", code.read([path, *near, *wanted.files])


def _training(wanted: Submission, entrypoint: str) -> Json:
    training: Json = {"entrypoint": entrypoint, "stopAfter": _stop_after(wanted)}
    if wanted.args:
        training["args"] = {key: _argument(key, value) for key, value in wanted.args.items()}
    training["batchSize"] = wanted.batch_size
    if wanted.initial_from is not None:
        training["initialFrom"] = {"uri": wanted.initial_from, "weightsOnly": wanted.weights_only}
    elif wanted.weights_only:
        raise UsageError("weights_only=True (--weights-only) needs initial_from=… (--initial-from)")
    if wanted.max_staleness is not None:
        training["staleness"] = {"max": wanted.max_staleness}
    if wanted.tls:
        training["dataTls"] = True
    return training


def _elasticity(wanted: Submission) -> Json:
    objective = {"deadlineSeconds": wanted.deadline_seconds, "maxCost": wanted.max_cost}
    objective = {key: value for key, value in objective.items() if value is not None}
    if not objective:
        return {}
    if not wanted.pools or wanted.max_workers is None:
        raise UsageError(
            "with a deadline or a budget Shoal chooses the workers: say from which pools (pools=…, accelerator=…, "
            "--pool, --accelerator) and how many at most (max_workers=…, --max-workers)"
        )
    return {"elasticity": {"mode": "Auto", "objective": objective}}


def _config_map(name: str, content: Json) -> Json:
    """The code. Applied again after an edit, it is another object: what it was, a job may still run."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]
    metadata = {"name": f"{name}-code-{digest}", "labels": {"shoal.dev/job": name}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, **content, "immutable": True}


def check(job: Json) -> TrainingJob:
    """The manifest as a TrainingJob. Raises UsageError with every field that is wrong."""
    try:
        return TrainingJob.model_validate(job)
    except ValidationError as error:
        raise UsageError("; ".join(mistakes(error, TrainingJob))) from error


def _name(module: str) -> str:
    base = re.sub(r"[^a-z0-9]+", "-", module.rpartition(".")[2].lower()).strip("-")[:33] or "job"
    base = base if base[0].isalpha() else f"job-{base}"
    return f"{base[:33].strip('-')}-{secrets.token_hex(3)}"


def _stop_after(wanted: Submission) -> Json:
    given: Json = {"epochs": wanted.epochs, "steps": wanted.steps}
    if wanted.until is not None:
        metric, value = wanted.until
        given |= {"metric": metric, "value": value, "mode": wanted.mode}
    elif wanted.mode is not None:
        raise UsageError(
            "mode=… (--mode) says whether the metric of until=… (--until) falls or rises: give both"
        )
    return {key: value for key, value in given.items() if value is not None} or {"epochs": 1}


def _argument(name: str, value: Any) -> Any:
    """The value, which JSON can hold."""
    if value is None:
        raise UsageError(
            f"the argument {name} is None: Kubernetes drops null: leave it out, so that its default counts"
        )
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the argument {name} is not JSON ({error}): it may be a finite number, a string, a boolean, or a list or "
            "map of these"
        ) from error


def _storage(wanted: Submission) -> Json:
    uri = wanted.storage
    storage: Json
    if uri == "ephemeral":
        storage = {"ephemeral": {}}
    elif (claim := uri.removeprefix("claim:")) != uri:
        if not _CLAIM.fullmatch(claim):
            raise UsageError(
                f"storage={uri!r}: a PersistentVolumeClaim's name has only a-z, 0-9, '-' and '.'"
            )
        storage = {"volumeClaim": {"name": claim}}
    elif re.match("(s3|gs|file)://.", uri):
        storage = {"uri": uri}
    else:
        kinds = (
            "s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, claim:NAME (a PersistentVolumeClaim of the namespace), or "
            "ephemeral, which loses everything with the pod"
        )
        if not uri:
            raise UsageError(f"say where snapshots and the model go (storage=…, --storage): {kinds}")
        raise UsageError(f"the storage (storage=…, --storage) must be {kinds}, not {uri!r}")
    return storage | ({"run": wanted.run} if wanted.run else {})


def _must_be_reachable(storage: Json, size: int) -> None:
    """Raise UsageError if an archive of code cannot be put into the storage from here."""
    if not storage.get("uri", "file:").startswith("file:"):
        return
    where = "storage that is ephemeral" if "ephemeral" in storage else "a volume of the cluster"
    raise UsageError(
        f"the code has {size / 1024:.0f} KiB, compressed: more than the {code.MAX_BYTES // 1024} KiB of a ConfigMap "
        f"travel through the storage, and {where} cannot be reached from here. Take a bucket (s3://…, gs://…), or put "
        "the code into an image made FROM Shoal's worker image; data do not belong to the code"
    )


def _workers(wanted: Submission, pods: Json) -> Json:
    workers: Json = {"replicas": wanted.workers}
    if wanted.max_workers is not None:
        workers["maxReplicas"] = wanted.max_workers
    if wanted.pools and wanted.capacity is not None:
        raise UsageError(
            "CapacityPools say what their nodes are (capacityType): with pools=… (--pool) leave out capacity=… "
            "(--capacity)"
        )
    if wanted.pools:
        workers["pools"] = list(wanted.pools)
    if wanted.capacity is not None:
        workers["capacity"] = wanted.capacity
    if of_workers := template.of_role(pods, "worker", wanted.image):
        workers["template"] = of_workers
    return workers
