"""What the API server takes, the operator reads: each field of each spec with values that nobody has in mind.

The CRD and the models are made from one source, and a check of a model alone (a validator, a type that converts) would
make an object that is taken and that nobody can read: its fields are immutable, or its pool is gone for all jobs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from dev.kube import ApiError, Kube
from shoal.api.base import API_VERSION, Resource
from shoal.api.crd import KINDS, structural
from shoal.api.mistakes import mistakes
from shoal.api.training_job import MAX_ARGS_BYTES

pytestmark = [pytest.mark.control_plane, pytest.mark.usefixtures("crds")]

Path = tuple[str | int, ...]
GOOD: dict[str, dict[str, Any]] = {
    "TrainingJob": {
        "storage": {"uri": "s3://bucket/runs"},
        "runPolicy": {
            "failureRules": [{"onExitCodes": [3], "action": "Ignore"}],
            "schedulingPolicy": {"queue": "team"},
        },
        "training": {
            "entrypoint": "digits:job",
            "stopAfter": {"epochs": 3},
            "batchSizes": [{"accelerator": "T4", "batchSize": 8}],
            "initialFrom": {"uri": "s3://bucket/runs/a"},
        },
        "workers": {"replicas": 2, "maxReplicas": 8, "pools": ["spot"], "fallback": {}, "nodeExclusion": {}},
        "elasticity": {"mode": "Auto", "objective": {"maxCost": 5}},
    },
    "CapacityPool": {
        "accelerator": {"name": "T4"},
        "nodeSelector": {"pool": "spot"},
        "tolerations": [{"key": "spot"}],
        "limits": {"nodes": 8},
        "price": {"perHour": 0.3},
    },
    "SpeedProfile": {
        "model": {"flopsPerSample": 1000, "parameters": 1000, "tensors": 2},
        "convergence": {"r1": 1, "r2": 1, "r3": 1, "r4": 1},
        "rows": [{"accelerator": "T4", "batchSize": 8, "stepSeconds": 0.1}],
    },
}
NASTY: list[Any] = [
    True, -1, 0, 1, 2**31, 10**18, 1e300, 0.5, "", "a", "A b", "1", "-1", "1e99", "0x1f", "1_000", "1e400",
    "NaN", "yes", "s3://b/p", "a:b", "0" * 64, "x" * (MAX_ARGS_BYTES + 1), [], ["a"], [1] * 40, {}, {"a": "b"},
    {"a": 1}, {"a": "x" * MAX_ARGS_BYTES}, {f"k{number}": "v" for number in range(70)},
]  # fmt: skip
OWN_WORDS = {"TrainingJob spec.training.args": "at most 65536 are possible: put what is large into the code"}
"""What the schema cannot say, as it cannot say the size of what it does not know: the model has the words."""


TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "integer": (int,), "boolean": (bool,),
}  # fmt: skip


def fields(schema: dict[str, Any], path: Path = ()) -> Iterator[tuple[Path, list[Any]]]:
    """The paths of all fields; of a list its first element, of a map its key `a`. With the values of the field's type.

    A template has no model below it: it is merged, and pods of it are the API server's to refuse.
    """
    if path:
        types = TYPES.get(schema.get("type", ""), (object,))
        yield path, [value for value in NASTY if isinstance(value, types)]
    if path[-1:] == ("template",):
        return
    for name, inner in schema.get("properties", {}).items():
        yield from fields(inner, (*path, name))
    if "items" in schema:
        yield from fields(schema["items"], (*path, 0))
    if isinstance(more := schema.get("additionalProperties"), dict):
        yield from fields(more, (*path, "a"))


def with_value(spec: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """The spec with this value there."""
    fresh: dict[str, Any] = json.loads(json.dumps(spec))
    part: Any = fresh
    for step, following in zip(path, (*path[1:], None), strict=True):
        last = following is None
        empty: Any = [] if following == 0 else {}
        if isinstance(step, int):
            part[:] = [value] if last else part or [empty]
        elif last:
            part[step] = value
        else:
            part.setdefault(step, empty)
        part = part[step]
    return fresh


async def taken(kube: Kube, kind: type[Resource], spec: dict[str, Any]) -> dict[str, Any] | None:
    """The object with its defaults, as the server would keep it; None: it refuses it."""
    where = "namespaces/default/" if kind.NAMESPACED else ""
    manifest = {"apiVersion": API_VERSION, "kind": kind.__name__, "metadata": {"name": "a"}, "spec": spec}
    try:
        path = f"/apis/{API_VERSION}/{where}{kind.PLURAL}"
        return await kube.request(
            "POST", path, manifest, params={"dryRun": "All", "fieldValidation": "Strict"}
        )
    except ApiError:
        return None


@pytest.mark.parametrize("kind", KINDS)
async def test_what_the_api_server_takes_the_operator_reads(kube: Kube, kind: type[Resource]) -> None:
    good, tried, unread = GOOD[kind.__name__], 0, dict[str, list[str]]()
    assert await taken(kube, kind, good)
    for path, values in fields(structural(kind)["properties"]["spec"]):
        answers = (taken(kube, kind, with_value(good, path, value)) for value in values)
        for found in filter(None, await asyncio.gather(*answers)):
            tried += 1
            try:
                kind.model_validate_json(json.dumps(found), extra="ignore")
            except ValidationError as error:
                where = f"{kind.__name__} spec.{'.'.join(map(str, path))}"
                unread.setdefault(where, []).append("; ".join(mistakes(error, kind))[:300])
    assert tried > 60
    own = {which for which in OWN_WORDS if which.startswith(kind.__name__)}
    assert unread.keys() == own, unread
    assert all(OWN_WORDS[which] in words for which in own for words in unread[which])
