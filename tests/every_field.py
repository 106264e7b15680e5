"""Changes of every field of a TrainingJob's spec that may change while it runs, made from the CRD's schema.

The way of Acto (SOSP 2023): what the schema alone does not say, such as a list's entries, is in `EXPLICIT`; a field
that is in neither fails a test. There are two base specs, without and with pools. What admission does not let pass
while such a job runs is in `REFUSED` and `POOLED_REFUSED`, with the words of the refusal: a test on a real API server
compares. What may change only while a job is suspended is in `WHEN_SUSPENDED`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CRD = Path(__file__).parents[1] / "crds" / "shoal.dev_trainingjobs.yaml"
Json = dict[str, Any]

IMMUTABLE = ("storage", "training")
BASE: Json = {
    "storage": {"uri": "s3://bucket/runs"},
    "training": {"entrypoint": "digits:job", "stopAfter": {"epochs": 1}},
    "workers": {"replicas": 3, "maxReplicas": 6, "maxSurge": 1},
}

REFUSED = {
    'managedBy="kueue.x-k8s.io/multikueue"': "managedBy is immutable",
    "parameterServers.replicas=2": "can change only while the job is suspended",
    'runPolicy.schedulingPolicy.gang="PodGroup"': "can change only while the job is suspended",
    'runPolicy.schedulingPolicy.queueAs="Workload"': "can change only while the job is suspended",
    "workers.minReplicas=4": "replicas must not be less than minReplicas",
    "workers.maxReplicas=2": "replicas must not exceed maxReplicas",
    'elasticity.mode="Advise"': "need workers.pools",
    'elasticity.mode="Auto"': "need workers.pools",
    "elasticity.objective.deadlineSeconds=3600": "objective is used by mode Advise and Auto only",
    "elasticity.objective.maxCost=5.5": 'mode: Unsupported value: "Manual": supported values: "Advise", "Auto"',
}

POOLED: Json = {
    **BASE,
    "workers": {**BASE["workers"], "pools": ["spot", "safe"]},
    "elasticity": {
        "mode": "Auto",
        "objective": {"deadlineSeconds": 360_000},
        "stabilizationSeconds": {"up": 1, "down": 1},
    },
}
"""The planner decides how many workers of which pool: more than `replicas`, to keep the deadline."""

POOLED_REFUSED = {which: words for which, words in REFUSED.items() if not which.startswith("elasticity.")} | {
    f'elasticity.mode="{mode}"': "objective is used by mode Advise and Auto only"
    for mode in ("Off", "Manual")
}

EXPLICIT: dict[str, list[Any]] = {
    "managedBy": ["kueue.x-k8s.io/multikueue"],
    "runPolicy.activeDeadlineSeconds": [100_000, 1],
    "runPolicy.ttlSecondsAfterFinished": [0],
    "runPolicy.maxDisruptions": [5],
    "runPolicy.progressDeadlineSeconds": [600],
    "runPolicy.failureRules": [[{"onExitCodes": [3], "action": "FailJob"}]],
    "runPolicy.schedulingPolicy.queue": ["team"],
    "parameterServers.pools": [["absent"]],
    "parameterServers.capacity": ["Any"],
    "workers.replicas": [0, 1, 5],
    "workers.minReplicas": [0, 3, 4],
    "workers.maxReplicas": [3, 8, 2],
    "workers.maxSurge": ["100%", 0],
    "workers.pools": [["absent"]],
    "elasticity.objective.deadlineSeconds": [3600],
    "elasticity.objective.maxCost": [5.5],
    "elasticity.objective.confidence": [0.9],
    **{
        f"{role}.template.{part}": [value]
        for role in ("workers", "parameterServers")
        for part, value in (
            ("metadata.labels", {"team": "vision"}),
            ("metadata.annotations", {"note": "changed"}),
            ("spec", {"priorityClassName": "low"}),
        )
    },
}


@dataclass(frozen=True)
class Change:
    """One field, and the value that it gets."""

    path: str
    value: Any

    def __str__(self) -> str:
        return f"{self.path}={json.dumps(self.value)}"

    def of(self, spec: Json) -> Json:
        """The spec with this change."""
        fresh: Json = json.loads(json.dumps(spec))
        *parents, last = self.path.split(".")
        inner = fresh
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = self.value
        return fresh


WHEN_SUSPENDED = [
    Change("parameterServers.replicas", 2),
    Change("runPolicy.schedulingPolicy", {"gang": "PodGroup"}),
    Change("runPolicy.schedulingPolicy", {"queue": "team", "queueAs": "Workload"}),
]


def changes(base: Json = BASE) -> list[Change]:
    """Every field, with each of the values that it does not have in the base."""
    with CRD.open() as file:
        crd = yaml.load(file, yaml.CSafeLoader)  # eight times as fast
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    found = []
    for path, schema in _leaves("", spec):
        values = EXPLICIT[path] if path in EXPLICIT else _values(path, schema, _value(base, path, schema))
        found += [Change(path, value) for value in values]
    if "elasticity" in base:  # without its objective
        found += [Change("elasticity", {"mode": mode}) for mode in ("Off", "Manual")]
    return found


def _leaves(path: str, schema: Json) -> Iterator[tuple[str, Json]]:
    if "properties" not in schema or path in EXPLICIT:
        yield path, schema
        return
    for name, inner in schema["properties"].items():
        if path or name not in IMMUTABLE:
            yield from _leaves(f"{path}.{name}" if path else name, inner)


def _value(spec: Json, path: str, schema: Json) -> Any:
    inner: Any = spec
    for name in path.split("."):
        inner = inner.get(name, {})
    return inner if inner != {} else schema.get("default")


def _values(path: str, schema: Json, now: Any) -> list[Any]:
    """Other values than what it has now."""
    if "enum" in schema:
        return [value for value in schema["enum"] if value != now]
    if schema.get("type") == "boolean":
        return [not now]
    if schema.get("type") == "integer" and now is not None:
        return [now + 1 if now < schema["maximum"] else now - 1]
    raise AssertionError(f"say in EXPLICIT how to change spec.{path}")
