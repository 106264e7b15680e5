"""Read the API server's audit log, to measure reaction times.

Its times have microseconds, while creation timestamps in Kubernetes have a resolution of 1 s.
"""

from __future__ import annotations

import datetime as dt
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dev.errors import DevError


@dataclass(frozen=True)
class Write:
    """One request that the API server answered. `received` and `answered` are UTC with microseconds."""

    verb: str
    resource: str
    subresource: str
    namespace: str
    name: str
    user: str
    agent: str
    """The client by its header User-Agent."""
    code: int
    group: str
    """The API group of the resource; empty for core."""
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
            group=target.get("apiGroup", ""),
            received=dt.datetime.fromisoformat(event["requestReceivedTimestamp"]),
            answered=dt.datetime.fromisoformat(event["stageTimestamp"]),
        )


READS = frozenset({"get", "list", "watch"})


def writes(log: Path, *, namespace: str | None = None) -> Iterator[Write]:
    """Every write so far, or those in one namespace, in the order of the answers.

    An incomplete last line is ignored. Only lines of the namespace are parsed, since tests poll this.
    """
    yield from (each for each in AuditTail(log, namespace=namespace).read() if each.verb not in READS)


class AuditTail:
    """Reads an audit log that grows: each line once, though asked again and again."""

    def __init__(self, log: Path, *, namespace: str | None = None) -> None:
        self._log = log
        self._namespace = namespace
        self._mark = b"" if namespace is None else f'"{namespace}"'.encode()
        self._offset = 0
        self.seen: list[Write] = []

    @classmethod
    def from_now(cls, log: Path) -> AuditTail:
        """Of what is written from now on: earlier tests of one account wrote, too."""
        tail = cls(log)
        tail._offset = log.stat().st_size
        return tail

    def read(self) -> list[Write]:
        """Every request so far, those of earlier calls included. An incomplete last line is left for the next.

        Raises:
            DevError: the log is shorter than it was.
        """
        try:
            with self._log.open("rb") as lines:
                if lines.seek(0, os.SEEK_END) < self._offset:
                    raise DevError(f"{self._log} was rotated: what it lost is not seen")
                lines.seek(self._offset)
                for line in lines:
                    if not line.endswith(b"\n"):
                        break
                    self._offset += len(line)
                    if self._mark in line:
                        self._take(Write.parse(json.loads(line)))
        except FileNotFoundError:
            pass
        return self.seen

    def _take(self, write: Write) -> None:
        if self._namespace in (None, write.namespace):
            self.seen.append(write)


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
