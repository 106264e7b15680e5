"""A TrainingJob, and the ConfigMap of its code, from the arguments of `submit`. Pure but for reading the code (`code`).

Types and patterns are checked by the models from which the CRD is generated. The CRD's rules across fields only the API
server knows: `Client.check` asks it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from shoal.api.base import API_VERSION
from shoal.api.mistakes import words_of
from shoal.api.training_job import TrainingJob
from shoal.client import code
from shoal.errors import UsageError
from shoal_trainer.contract import BATCH_SIZE

_CLAIM = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What `submit` was asked for. Only `entrypoint` and `storage` have no default."""

    entrypoint: str
    storage: str
    workers: int = 1
    image: str | None = None
    name: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    files: Sequence[str] = ()
    batch_size: int = BATCH_SIZE
    epochs: int | None = None
    steps: int | None = None
    until: tuple[str, float] | None = None
    mode: Literal["Min", "Max"] | None = None
    max_workers: int | None = None
    parameter_servers: int = 1
    pools: Sequence[str] = ()
    capacity: str | None = None
    gpus: int = 0
    deadline_seconds: int | None = None
    max_cost: str | None = None
    run: str | None = None
    initial_from: str | None = None
    weights_only: bool = False
    snapshot_seconds: int | None = None
    max_staleness: int | None = None
    tls: bool = False


@dataclass(frozen=True)
class Manifests:
    """What is to be created: the job, and the ConfigMap of its code if it is not in the image."""

    job: Json
    code: Json | None

    @property
    def name(self) -> str:
        """The job's name."""
        return str(self.job["metadata"]["name"])


def manifests(wanted: Submission) -> Manifests:
    """The objects to create.

    Raises:
        UsageError: an argument is wrong; the message says what to change.
    """
    path, _, attribute = wanted.entrypoint.partition(":")
    is_file = path.endswith(".py") or "/" in path
    if not attribute and not is_file:
        raise UsageError(
            f"the entrypoint {wanted.entrypoint!r} must be FILE.py, FILE.py:OBJECT or MODULE:OBJECT, for example "
            "digits.py:job"
        )
    module = Path(path).stem if is_file else path
    name = wanted.name or _name(module)
    files = [*([path] if is_file else []), *wanted.files]
    sources = code.read(files) if files else None
    if sources is not None and is_file:
        text = sources[Path(path).name]
        attribute = attribute or code.training_in(Path(path).name, text)
        code.must_define(Path(path).name, text, attribute)
    if wanted.image is None and not is_file:
        raise UsageError(
            f"{module} is a module of an image: say which with image=…, or give a file: {module}.py:{attribute}"
        )
    training: Json = {"entrypoint": f"{module}:{attribute}", "stopAfter": _stop_after(wanted)}
    if wanted.args:
        training["args"] = {key: _argument(key, value) for key, value in wanted.args.items()}
    training["batchSize"] = wanted.batch_size
    if sources is not None:
        training["code"] = {"configMap": f"{name}-code"}
    if wanted.initial_from is not None:
        training["initialFrom"] = {"uri": wanted.initial_from, "weightsOnly": wanted.weights_only}
    elif wanted.weights_only:
        raise UsageError("weights_only=True (--weights-only) needs initial_from=… (--initial-from)")
    if wanted.max_staleness is not None:
        training["staleness"] = {"max": wanted.max_staleness}
    if wanted.tls:
        training["dataTls"] = True
    servers: Json = {"replicas": wanted.parameter_servers}
    if wanted.snapshot_seconds is not None:
        servers["snapshot"] = {"everySeconds": wanted.snapshot_seconds}
    spec: Json = {
        "storage": _storage(wanted),
        "training": training,
        "parameterServers": servers,
        "workers": _workers(wanted),
    }
    if wanted.deadline_seconds is not None or wanted.max_cost is not None:
        if not wanted.pools or wanted.max_workers is None:
            raise UsageError(
                "with a deadline or a budget Shoal chooses the workers: say from which pools (pools=…, accelerator=…, "
                "--pool, --accelerator) and how many at most (max_workers=…, --max-workers)"
            )
        objective = {"deadlineSeconds": wanted.deadline_seconds, "maxCost": wanted.max_cost}
        spec["elasticity"] = {
            "mode": "Auto",
            "objective": {k: v for k, v in objective.items() if v is not None},
        }
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):  # the ConfigMap's is derived from it
        raise UsageError(
            f"the name {name!r} must begin with a letter and have only a-z, 0-9 and '-', at most 40 characters"
        )
    job = {"apiVersion": API_VERSION, "kind": "TrainingJob", "metadata": {"name": name}, "spec": spec}
    check(job)
    config_map = None
    if sources is not None:
        metadata = {"name": f"{name}-code", "labels": {"shoal.dev/job": name}}
        config_map = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata,
            **code.content(sources),
            "immutable": True,
        }
    return Manifests(job, config_map)


def check(job: Json) -> TrainingJob:
    """The manifest as a TrainingJob. Raises UsageError with every field that is wrong."""
    try:
        return TrainingJob.model_validate(job)
    except ValidationError as error:
        raise UsageError(words_of(error, TrainingJob)) from error


def _name(module: str) -> str:
    base = re.sub(r"[^a-z0-9]+", "-", module.rpartition(".")[2].lower()).strip("-")[:33] or "job"
    base = base if base[0].isalpha() else f"job-{base}"
    return f"{base[:33].strip('-')}-{secrets.token_hex(3)}"


def _stop_after(wanted: Submission) -> Json:
    given: Json = {"epochs": wanted.epochs, "steps": wanted.steps}
    if wanted.until is not None:
        metric, value = wanted.until
        given |= {"metric": metric, "value": str(value), "mode": wanted.mode}
    elif wanted.mode is not None:
        raise UsageError(
            "mode=… (--mode) says whether the metric of until=… (--until) falls or rises: give both"
        )
    return {key: value for key, value in given.items() if value is not None} or {"epochs": 1}


def _argument(name: str, value: Any) -> int | str:
    """As the API has it: integers and strings; the trainer makes floats of decimals again."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise UsageError(
            f"the argument {name} is a {type(value).__name__}; it may be an integer, a float or a string"
        )
    if isinstance(value, float):
        text = repr(value)
        if text in {"inf", "-inf", "nan"}:
            raise UsageError(f"the argument {name} is {text}; it must be finite")
        return text
    return value


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
        raise UsageError(
            f"storage={uri!r} must be s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, claim:NAME (a PersistentVolumeClaim of "
            "the namespace), or ephemeral, which loses everything with the pod"
        )
    return storage | ({"run": wanted.run} if wanted.run else {})


def _workers(wanted: Submission) -> Json:
    workers: Json = {"replicas": wanted.workers}
    if wanted.max_workers is not None:
        workers["maxReplicas"] = wanted.max_workers
    if wanted.pools:
        workers["pools"] = list(wanted.pools)
    if wanted.capacity is not None:
        workers["capacity"] = wanted.capacity
    container: Json = {"name": "worker"}
    if wanted.image is not None:
        container["image"] = wanted.image
    if wanted.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": wanted.gpus}}
    if len(container) > 1:
        workers["template"] = {"spec": {"containers": [container]}}
    return workers
