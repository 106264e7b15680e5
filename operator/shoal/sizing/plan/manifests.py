"""Read TrainingJobs, CapacityPools and SpeedProfiles from YAML files.

A TrainingJob is read with the model that its CRD is generated from, as strictly as the API server does: no text for a
number or a yes, but for numbers that may be in quotes. The CRD's rules between fields (CEL) are the server's to check.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from shoal.api.base import API_VERSION
from shoal.api.capacity_pool import CapacityPool
from shoal.api.labels import SPEED_PROFILE
from shoal.api.mistakes import mistakes
from shoal.api.rules import AS_WRITTEN
from shoal.api.speed_profile import SpeedProfile
from shoal.api.training_job import TrainingJob
from shoal.errors import UsageError

__all__ = ["profile_for", "read_job", "read_pools", "read_profiles"]

M = TypeVar("M", bound=BaseModel)


def read_job(path: Path) -> TrainingJob:
    """The one TrainingJob in a file."""
    return _only(TrainingJob, path)


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


def read_profiles(path: Path) -> list[SpeedProfile]:
    """The SpeedProfiles in a file."""
    return _resources(SpeedProfile, path)


def profile_for(job: TrainingJob, profiles: Sequence[SpeedProfile], origin: str) -> SpeedProfile:
    """The SpeedProfile of a job: the one in its annotation, the one with its name, or the only one."""
    by_name = {profile.metadata.name: profile for profile in reversed(profiles)}
    annotated = job.metadata.annotations.get(SPEED_PROFILE)
    wanted = annotated or job.metadata.name
    if wanted in by_name:
        return by_name[wanted]
    if len(by_name) == 1 and not annotated:
        return next(iter(by_name.values()))
    names = ", ".join(name or "?" for name in reversed(by_name)) or "none"
    raise UsageError(
        f"{origin} has no SpeedProfile {wanted} (it has {names}): name one of them in the job's annotation "
        f"{SPEED_PROFILE}"
    )


def _only(model: type[M], path: Path) -> M:
    kind = model.__name__
    documents = list(_documents(path, kind))
    if len(documents) != 1:
        raise UsageError(f"{path} holds {len(documents)} {kind}s: give a file with exactly one")
    return _parse(model, documents[0], path)


def _resources(model: type[M], path: Path) -> list[M]:
    found = [_parse(model, document, path) for document in _documents(path, model.__name__)]
    if not found:
        raise UsageError(f"{path} holds no {model.__name__}: give at least one")
    return found


def _documents(path: Path, kind: str) -> Iterator[dict[str, Any]]:
    """The objects of a kind in a file of YAML documents and `kind: List`s."""
    for item in _items(path, kind):
        if not isinstance(item, dict):
            raise UsageError(f"{path} holds {item!r} where a {kind} should be: write kind, metadata and spec")
        if item.get("kind") != kind:
            continue
        version = item.get("apiVersion", API_VERSION)
        if version != API_VERSION:
            raise UsageError(f"{path}: apiVersion of a {kind} must be {API_VERSION}, not {version}")
        yield item


def _items(path: Path, kind: str) -> Iterator[Any]:
    for document in _load(path):
        if isinstance(document, dict) and document.get("kind") in ("List", f"{kind}List"):
            yield from document.get("items") or []
        elif document is not None:
            yield document


def _load(path: Path) -> list[Any]:
    try:
        return list(yaml.safe_load_all(path.read_text()))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" line {where.line + 1}" if where is not None else ""
        raise UsageError(f"{path}{line} is not YAML: {getattr(error, 'problem', None) or error}") from error


def _parse(model: type[M], document: dict[str, Any], path: Path) -> M:
    try:
        text = json.dumps(_as_json(document), default=str)  # a time that YAML reads is a text again
        return model.model_validate_json(text, strict=True, context=AS_WRITTEN)
    except RecursionError:
        raise UsageError(f"{path}, {model.__name__}: a part of it contains itself") from None
    except ValidationError as error:
        metadata = document.get("metadata")
        name = f" {metadata.get('name', '?')}" if isinstance(metadata, dict) else ""
        raise UsageError(f"{path}, {model.__name__}{name}: {mistakes(error, model)[0]}") from error


def _as_json(value: Any) -> Any:
    """What YAML read, as kubectl sends it: keys are text, and whole numbers have no fraction."""
    if isinstance(value, dict):
        return {str(key): _as_json(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_as_json(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
