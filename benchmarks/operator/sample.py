"""The objects that a system was seen to make of one job, for a bare client that makes the same of many."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dev.kube import Json

KINDS = {
    "pods": "/api/v1/namespaces/{}/pods",
    "services": "/api/v1/namespaces/{}/services",
    "secrets": "/api/v1/namespaces/{}/secrets",
    "poddisruptionbudgets": "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
    "jobs": "/apis/batch/v1/namespaces/{}/jobs",
}
GIVEN = ("annotations", "labels", "name")
"""What a client says of an object's metadata. Owners and finalizers need a controller."""
NOBODY = "shoal.dev/nobody"
"""Manages the Jobs of the bare client, which makes their pods."""
TOKEN = "kube-api-access-"
"""The volume that is added to a pod when it is made."""


@dataclass(frozen=True)
class Sample:
    """One job's objects, each with its kind; `worker`: one of the pods."""

    job: str
    objects: list[tuple[str, Json]]
    worker: Json

    @classmethod
    def read(cls, file: Path) -> Sample:
        """From the file that `write` made."""
        return cls(**json.loads(file.read_text()))

    def write(self, file: Path) -> Path:
        """To a file."""
        file.write_text(json.dumps(asdict(self)))
        return file

    def renamed(self, name: str) -> Iterator[tuple[str, Json]]:
        """The objects of another job like it."""
        for kind, body in self.objects:
            yield kind, json.loads(json.dumps(body).replace(self.job, name))


def sample(job: str, found: Iterable[tuple[str, Json]], worker: str) -> Sample:
    """Of the job's objects as the API server has them. `worker`: the label of a worker's pod."""
    objects = [(kind, as_asked(kind, body)) for kind, body in found]
    key, _, value = worker.partition("=")
    workers = [
        body for kind, body in objects if kind == "pods" and body["metadata"]["labels"].get(key) == value
    ]
    return Sample(job, objects, workers[0])


def as_asked(kind: str, body: Json) -> Json:
    """What a client sends to make such an object: without what the API server and the controllers add."""
    metadata = {key: body["metadata"][key] for key in GIVEN if key in body["metadata"]}
    asked = {key: part for key, part in body.items() if key not in ("metadata", "status")}
    return {**asked, "metadata": metadata, **_SPECS.get(kind, _as_it_is)(body)}


def _as_it_is(_: Json) -> Json:
    return {}


def _pod(body: Json) -> Json:
    spec = _without(body["spec"], "nodeName")
    spec["volumes"] = _not_the_token(spec.get("volumes", []))
    for containers in ("containers", "initContainers"):
        if containers in spec:
            spec[containers] = [
                {**each, "volumeMounts": _not_the_token(each.get("volumeMounts", []))}
                for each in spec[containers]
            ]
    return {"spec": spec}


def _service(body: Json) -> Json:
    headless = body["spec"].get("clusterIP") == "None"
    spec = _without(body["spec"], "clusterIP", "clusterIPs")
    return {"spec": {**spec, "clusterIP": "None"} if headless else spec}


def _job(body: Json) -> Json:
    """Its selector is the API server's, by labels with the Job's uid."""
    spec = _without(body["spec"], "selector")
    template = spec["template"]
    labels = {
        key: value
        for key, value in template["metadata"].get("labels", {}).items()
        if "controller-uid" not in key
    }
    spec["template"] = {**template, "metadata": {**template["metadata"], "labels": labels}}
    return {"spec": {**spec, "managedBy": NOBODY}}


_SPECS = {"pods": _pod, "services": _service, "jobs": _job}


def _without(fields: Json, *names: str) -> Json:
    return {key: value for key, value in fields.items() if key not in names}


def _not_the_token(named: list[Any]) -> list[Any]:
    return [each for each in named if not each["name"].startswith(TOKEN)]
