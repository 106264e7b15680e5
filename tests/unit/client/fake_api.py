"""An API server of `shoal.client` in memory, that loses answers and goes away as told."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shoal.client import Client
from shoal.client.api import Api, refusal
from shoal.errors import ClusterError, NotFound, Unavailable

Json = dict[str, Any]


class FakeApi(Api):
    """Objects by path. `fails[verb, plural]`: what such a request raises; `stored`: whether it took effect before."""

    def __init__(self) -> None:
        self.namespace = "team"
        self.objects: dict[str, Json] = {}
        self.fails: dict[tuple[str, str], ClusterError | KeyboardInterrupt] = {}
        self.stored = False
        self.away: list[bool] = []
        """Whether nobody answers the next requests for an object."""
        self.changes: list[Json] = []
        """What the next watch tells."""
        self.patches: list[Json] = []
        self.queries: list[Mapping[str, str]] = []
        self.files: dict[str, bytes] = {}
        """What pods can read."""
        self.logs: defaultdict[tuple[str, bool], list[str]] = defaultdict(list)
        """Of a pod, now or before its container was restarted."""
        self.phases: list[str] = []
        """Of the pod that is created next, each time that it is asked for; then it runs."""

    def get(self, path: str, **query: str) -> Json:
        self.queries.append(query)
        if self.away and self.away.pop(0):
            raise Unavailable("the API server does not answer: connection refused.")
        plural = path.rpartition("/")[2]
        if ("GET", plural) in self.fails:
            raise self.fails["GET", plural]
        if path in self.objects:
            if self.objects[path]["kind"] == "Pod":
                phase = self.phases.pop(0) if self.phases else "Running"
                said = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}
                return self.objects[path] | {"status": {"phase": phase, "conditions": [said]}}
            return self.objects[path]
        if below := [each for at, each in self.objects.items() if at.rpartition("/")[0] == path]:
            wanted = {tuple(each.split("=")) for each in query.get("labelSelector", "").split(",") if each}
            return {"items": [e for e in below if wanted <= e.get("metadata", {}).get("labels", {}).items()]}
        if plural in {"events", "pods", "capacitypools", "trainingjobs", "persistentvolumeclaims"}:
            return {"items": []}
        if path == f"/api/v1/namespaces/{self.namespace}":
            return {}
        raise NotFound(f"{path} not found")

    def create(self, path: str, body: Json, *, dry_run: bool = False) -> Json:
        plural, name = path.rpartition("/")[2], body["metadata"]["name"]
        if f"{path}/{name}" in self.objects:
            raise refusal(409, json.dumps({"message": f'{plural} "{name}" already exists'}).encode(), path)
        error = self.fails.get(("dry-run" if dry_run else "POST", plural))
        created = {
            **body,
            "metadata": {"namespace": self.namespace, "uid": f"uid-{name}", **body["metadata"]},
        }
        if not dry_run and (error is None or self.stored):
            self.objects[f"{path}/{name}"] = created
        if error is not None:
            raise error
        return created

    def patch(self, path: str, body: Json) -> Json:
        self.patches.append(body)
        return self.objects[path]

    def delete(self, path: str, uid: str | None = None) -> None:
        if path in self.objects and uid not in {None, self.objects[path]["metadata"]["uid"]}:
            raise refusal(409, b'{"message": "the UID in the precondition does not match"}', path)
        if self.objects.pop(path, None) is None:
            raise NotFound(f"{path} not found")

    def lines(self, path: str, query: Mapping[str, str], *, seconds: float | None = None) -> Iterator[str]:
        del seconds
        self.queries.append(query)
        if path.endswith("/log"):
            yield from self.logs[path.split("/")[-2], query.get("previous") == "true"]
        while self.changes:
            yield json.dumps({"type": "MODIFIED", "object": self.changes.pop(0)})

    def run(self, pod: str, command: Sequence[str]) -> Iterator[bytes]:
        [cat, file] = command
        assert (cat, pod in self.objects) == ("cat", True)
        if file not in self.files:
            raise Unavailable(f"cat {file} failed")
        content = self.files[file]
        yield from (content[:3], content[3:])

    def names(self) -> list[str]:
        """Kind/name of all objects."""
        return sorted(f"{each['kind']}/{each['metadata']['name']}" for each in self.objects.values())


def client_of(api: FakeApi) -> Client:
    """A client of it."""
    client = Client()
    client.__dict__["api"] = api
    return client
