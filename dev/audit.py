"""Read the API server's audit log, to measure reaction times.

Its times have microseconds, while creation timestamps in Kubernetes have a resolution of 1 s.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Write:
    """One write request that the API server answered. `received` and `answered` are UTC with microseconds."""

    verb: str
    resource: str
    subresource: str
    namespace: str
    name: str
    user: str
    agent: str
    """The client by its header User-Agent."""
    code: int
    received: dt.datetime
    answered: dt.datetime

    @classmethod
    def parse(cls, event: dict[str, Any]) -> Write:
        """From one audit event."""
        target = event.get("objectRef") or {}
        return cls(
            verb=event["verb"],
            resource=target.get("resource", ""),
            subresource=target.get("subresource", ""),
            namespace=target.get("namespace", ""),
            name=target.get("name", ""),
            user=event["user"]["username"],
            agent=event.get("userAgent", ""),
            code=event.get("responseStatus", {}).get("code", 0),
            received=dt.datetime.fromisoformat(event["requestReceivedTimestamp"]),
            answered=dt.datetime.fromisoformat(event["stageTimestamp"]),
        )


def writes(log: Path, *, namespace: str | None = None) -> Iterator[Write]:
    """Every write so far, or those in one namespace, in the order of the answers.

    An incomplete last line is ignored. Only lines of the namespace are parsed, since tests poll this.
    """
    try:
        text = log.read_text()
    except FileNotFoundError:
        return
    mark = "" if namespace is None else f'"{namespace}"'
    for line in text.splitlines(keepends=True):
        if line.endswith("\n") and mark in line:
            write = Write.parse(json.loads(line))
            if namespace in (None, write.namespace):
                yield write


def creates(log: Path, resource: str, *, namespace: str | None = None) -> list[Write]:
    """The accepted creations of one resource, such as `pods`."""
    return [
        write
        for write in writes(log, namespace=namespace)
        if write.verb == "create"
        and write.resource == resource
        and not write.subresource
        and write.code < 300
    ]
