"""TrainingJobs, CapacityPools and SpeedProfiles from YAML files, as `kubectl get -o yaml` would print them.

Of the job only what planning needs is read, in a view of its own: a job that some newer or older operator accepts can
be planned too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import AwareDatetime, BaseModel, Field, ValidationError

from shoal.api.base import API_VERSION, ObjectMeta, Resource, Status
from shoal.api.capacity_pool import CapacityPool
from shoal.api.rules import DECIMAL
from shoal.api.speed_profile import SpeedProfile
from shoal.errors import UsageError

__all__ = ["JobView", "read_job", "read_pools", "read_profile"]

PROFILE_ANNOTATION = "shoal.dev/speed-profile"
R = TypeVar("R", bound=Resource)


class StopView(Status):
    """`spec.training.stopAfter`."""

    epochs: int | None = Field(None, ge=1)
    steps: int | None = Field(None, ge=1)
    metric: str | None = None
    value: str | None = Field(None, pattern=DECIMAL)


class TrainingView(Status):
    """`spec.training`."""

    batch_size: int = Field(128, ge=1)
    stop_after: StopView


class SnapshotView(Status):
    """`spec.parameterServers.snapshot`."""

    every_seconds: int = Field(60, ge=1)


class ServersView(Status):
    """`spec.parameterServers`."""

    replicas: int = Field(1, ge=1, le=16)
    pools: tuple[str, ...] = ()
    snapshot: SnapshotView = SnapshotView()


class WorkersView(Status):
    """`spec.workers`."""

    replicas: int = Field(4, ge=0)
    min_replicas: int = Field(1, ge=0)
    max_replicas: int | None = Field(None, ge=1)
    pools: tuple[str, ...] = ()
    zone_policy: Literal["Same", "Preferred", "Any"] = "Same"
    on_demand_base: int = Field(0, ge=0)


class ObjectiveView(Status):
    """`spec.elasticity.objective`."""

    deadline_seconds: int | None = Field(None, ge=1)
    max_cost: str | None = Field(None, pattern=DECIMAL)
    prefer: Literal["MinCost", "MinTime"] = "MinCost"


class ElasticityView(Status):
    """`spec.elasticity`."""

    objective: ObjectiveView = ObjectiveView()


class SpecView(Status):
    """`spec`."""

    training: TrainingView
    parameter_servers: ServersView = ServersView()
    workers: WorkersView = WorkersView()
    elasticity: ElasticityView = ElasticityView()


class SlotView(Status):
    """One of `status.slots`."""

    role: str = ""
    state: str = ""
    pool: str = ""


class ProgressView(Status):
    """`status.training`."""

    step: int = 0
    epoch: float = 0.0
    loss: str | None = None


class DataView(Status):
    """`status.data`: samples of the pass that is being made."""

    done: int = Field(0, ge=0)
    total: int | None = None


class ServersStatusView(Status):
    """`status.parameterServers`."""

    ready: int = Field(0, ge=0)


class StatusView(Status):
    """`status`."""

    start_time: AwareDatetime | None = None
    slots: tuple[SlotView, ...] = ()
    parameter_servers: ServersStatusView = ServersStatusView()
    training: ProgressView | None = None
    data: DataView = DataView()


class JobView(Status):
    """The parts of a TrainingJob that planning needs."""

    metadata: ObjectMeta = ObjectMeta()
    spec: SpecView
    status: StatusView = StatusView()


def read_job(path: Path) -> JobView:
    """The one TrainingJob in a file."""
    documents = _documents(path, "TrainingJob")
    if len(documents) != 1:
        raise UsageError(f"{path} holds {len(documents)} TrainingJobs: give a file with exactly one")
    return _parse(JobView, documents[0], path, "TrainingJob")


def read_pools(path: Path) -> list[CapacityPool]:
    """The CapacityPools in a file."""
    pools = _resources(CapacityPool, path)
    names = [pool.metadata.name for pool in pools]
    if "" in names:
        raise UsageError(f"{path}: a CapacityPool has no metadata.name: give it one")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"{path} has two CapacityPools called {twice[0]}: rename or remove one")
    return pools


def read_profile(path: Path, job: JobView) -> SpeedProfile:
    """The SpeedProfile for a job: named in its annotation, or called as the job is, or the only one."""
    profiles = _resources(SpeedProfile, path)
    wanted = job.metadata.annotations.get(PROFILE_ANNOTATION)
    for name in (wanted,) if wanted else (job.metadata.name,):
        for profile in profiles:
            if profile.metadata.name == name:
                return profile
    if len(profiles) == 1 and not wanted:
        return profiles[0]
    names = ", ".join(profile.metadata.name or "?" for profile in profiles)
    raise UsageError(
        f"{path} has no SpeedProfile {wanted or job.metadata.name} (it has {names}): name one of them in the job's "
        f"annotation {PROFILE_ANNOTATION}"
    )


def _resources(model: type[R], path: Path) -> list[R]:
    kind = model.__name__
    documents = _documents(path, kind)
    if not documents:
        raise UsageError(f"{path} holds no {kind}: give at least one")
    return [_parse(model, document, path, kind) for document in documents]


def _documents(path: Path, kind: str) -> list[dict[str, Any]]:
    """The objects of a kind in a file of YAML documents and `kind: List`s."""
    try:
        loaded = list(yaml.safe_load_all(path.read_text()))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" line {where.line + 1}" if where is not None else ""
        raise UsageError(f"{path}{line} is not YAML: {getattr(error, 'problem', None) or error}") from error
    found = []
    for document in loaded:
        items = [document]
        if isinstance(document, dict) and document.get("kind") in ("List", f"{kind}List"):
            items = document.get("items") or []
        for item in items:
            if item is None:
                continue
            if not isinstance(item, dict):
                raise UsageError(
                    f"{path} holds {item!r} where a {kind} should be: write kind, metadata and spec"
                )
            version = item.get("apiVersion", API_VERSION)
            if item.get("kind") == kind and version != API_VERSION:
                raise UsageError(f"{path}: apiVersion of a {kind} must be {API_VERSION}, not {version}")
            if item.get("kind") == kind:
                found.append(item)
    return found


M = TypeVar("M", bound=BaseModel)


def _parse(model: type[M], document: dict[str, Any], path: Path, kind: str) -> M:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        metadata = document.get("metadata")
        name = metadata.get("name", "?") if isinstance(metadata, dict) else "?"
        raise UsageError(f"{path}, {kind} {name}: {field}: {_mend(first)}") from error


def _mend(error: Any) -> str:
    """What to change, for the mistakes that happen most."""
    message = str(error["msg"]).rstrip(".")
    if error["type"] == "string_type" and isinstance(error.get("input"), int | float):
        return f'write the number as a string in quotes, "{error["input"]}"'
    if error["type"] == "missing":
        return "this field is needed: add it"
    if error["type"] == "extra_forbidden":
        return "there is no such field: check its spelling or remove it"
    if error["type"] == "string_pattern_mismatch" and (error.get("ctx") or {}).get("pattern") == DECIMAL:
        return f'must be a decimal number in quotes such as "0.35", not {error["input"]!r}'
    return f"{message[0].lower()}{message[1:]}, not {error.get('input')!r}"


def running(job: JobView, pools: Sequence[CapacityPool]) -> tuple[dict[str, int], tuple[str, ...]]:
    """How many workers of the job run in each of these pools, and the node pools of those that run in none.

    The status has the name of a worker's node pool as the cloud labels it. That is a CapacityPool's if it is called so,
    or if its nodeSelector asks for that label; an empty name is in no pool.
    """
    slots = [s for s in job.status.slots if s.role == "worker" and s.state in ("Starting", "Running")]
    there = {pool.metadata.name: 0 for pool in pools}
    strange = []
    for slot in slots:
        labelled = (p.metadata.name for p in pools if slot.pool in p.spec.node_selector.values())
        name = slot.pool if slot.pool in there else next(labelled, None) if slot.pool else None
        if name is None:
            strange.append(slot.pool)
        else:
            there[name] += 1
    return there, tuple(strange)
