"""A virtual API server: objects of all kinds with one increasing version, watches, and what goes wrong between.

It behaves as Kubernetes does: conflicts, preconditions, graceful deletion of pods, namespaces that end. It keeps every
version, so that a client may be shown the cluster as it was, and a log of all writes with who sent them.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from shoal.cluster.transport import Answer, Query, StreamRefused
from shoal.errors import Unavailable
from shoal.manifests.workload import ADMISSION_MANAGER
from tests.doubles.patches import json_patched, merged
from tests.virtual.loop import later, now, stamp

Json = dict[str, Any]
Key = tuple[str, str, str]
"""Plural, namespace (empty for cluster-scoped objects), name."""

BOOKMARK_SECONDS = 60.0
_PATH = re.compile(
    r"/(?:api/v1|apis/[^/]+/[^/]+)(?:/namespaces/(?P<ns>[^/]+))?/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>status))?$"
)


@dataclass(frozen=True)
class Change:
    """One version of one object."""

    version: int
    kind: str
    """ADDED, MODIFIED or DELETED."""
    key: Key
    object: Json


@dataclass(frozen=True)
class Sent:
    """A write that reached the server."""

    at: float
    who: str
    verb: str
    key: Key
    sub: str
    status: int
    body: Any = None


@dataclass(eq=False)
class Watch:
    """An open watch."""

    who: str
    plural: str
    namespace: str
    label: str
    selected: str
    bookmarks: bool
    lines: asyncio.Queue[tuple[float, bytes] | None] = field(default_factory=asyncio.Queue)
    frozen: bool = False
    """Half-open: nothing comes any more, and nobody says so."""

    def sees(self, key: Key, found: Json) -> bool:
        """Whether it is about this object."""
        labels = found["metadata"].get("labels") or {}
        here = key[0] == self.plural and self.namespace in {"", key[1]}
        here = here and self.selected in {"", f"metadata.name={found['metadata']['name']}"}
        return here and (not self.label or self.label in labels)

    def send(self, kind: str, found: Json, at: float) -> None:
        """Deliver at this time."""
        if not self.frozen:
            self.lines.put_nowait((at, json.dumps({"type": kind, "object": found}).encode() + b"\n"))


class ApiServer:
    """The objects and their history."""

    def __init__(self) -> None:
        self.version = 0
        self.compacted = 0
        """No watch continues from an earlier version."""
        self.objects: dict[Key, Json] = {}
        self.history: list[Change] = []
        self.sent: list[Sent] = []
        self.watches: list[Watch] = []
        self.namespaces: dict[str, str] = {"team": "Active", "default": "Active"}
        self.page = 3
        self.lag: Callable[[Watch, Change], float] = lambda _watch, _change: 0.0
        """By how many seconds the delivery of a change to a watch is late."""
        self.on_change: list[Callable[[Change, Json | None], None]] = []
        self.admit: Callable[[Key, Json, Json | None], str] = lambda _key, _new, _old: ""
        """Why a new or changed object is refused with 422; empty: it is not."""
        self._uids = 0
        self._dry = False
        """What is being answered asks only what would come of it."""
        self._bookmark_at = BOOKMARK_SECONDS

    # --- what happens in the cluster

    def all(self, plural: str, namespace: str = "") -> list[Json]:
        """All objects of a kind."""
        return [o for (p, ns, _), o in list(self.objects.items()) if p == plural and namespace in {"", ns}]

    def get(self, plural: str, name: str, namespace: str = "") -> Json | None:
        """One object."""
        return self.objects.get((plural, namespace, name))

    def store(self, key: Key, body: Json) -> Json:
        """Create or replace an object as it is given, with a new version."""
        old = self.objects.get(key)
        fresh: Json = json.loads(json.dumps(body))
        meta = fresh.setdefault("metadata", {})
        self.version += 1
        if old is None:
            self._uids += 1
            meta.setdefault("uid", f"{self._uids:08x}-0000-4000-8000-{self._uids:012x}")
            meta |= {"creationTimestamp": stamp(), "generation": 1, "name": key[2]}
            if key[1]:
                meta["namespace"] = key[1]
        elif old.get("spec") != fresh.get("spec"):
            meta["generation"] = old["metadata"]["generation"] + 1
        meta["resourceVersion"] = str(self.version)
        self.objects[key] = fresh
        self._publish(Change(self.version, "MODIFIED" if old else "ADDED", key, fresh), old)
        return fresh

    def change(self, key: Key, **parts: Any) -> Json | None:
        """Replace parts of an object, if it exists and they differ."""
        old = self.objects.get(key)
        if old is None or all(old.get(name) == part for name, part in parts.items()):
            return old
        return self.store(key, {**old, **parts})

    def remove(self, key: Key) -> None:
        """Remove an object at once."""
        if (old := self.objects.pop(key, None)) is not None:
            self.version += 1
            gone = {**old, "metadata": {**old["metadata"], "resourceVersion": str(self.version)}}
            self._publish(Change(self.version, "DELETED", key, gone), old)

    def delete(self, key: Key, grace: int | None = None) -> None:
        """Delete as a client does: pods that run are given their grace period."""
        found = self.objects[key]
        ended = found.get("status", {}).get("phase") in {"Succeeded", "Failed"}
        if key[0] != "pods" or grace == 0 or ended or not found["spec"].get("nodeName"):
            self.remove(key)
        elif "deletionTimestamp" not in found["metadata"]:
            seconds = found["spec"].get("terminationGracePeriodSeconds", 30) if grace is None else grace
            meta = {"deletionTimestamp": later(seconds), "deletionGracePeriodSeconds": seconds}
            self.store(key, {**found, "metadata": {**found["metadata"], **meta}})

    def as_of(self, version: int) -> dict[Key, Json]:
        """The objects as they were."""
        then: dict[Key, Json] = {}
        for change in self.history:
            if change.version > version:
                break
            if change.kind == "DELETED":
                then.pop(change.key, None)
            else:
                then[change.key] = change.object
        return then

    def tick(self) -> None:
        """Send bookmarks when it is time."""
        if now() >= self._bookmark_at:
            self._bookmark_at += BOOKMARK_SECONDS
            for watch in filter(lambda each: each.bookmarks, self.watches):
                watch.send("BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}}, now())

    def _publish(self, change: Change, old: Json | None) -> None:
        self.history.append(change)
        for watch in self.watches:
            if watch.sees(change.key, change.object):
                watch.send(change.kind, change.object, now() + self.lag(watch, change))
            elif old is not None and watch.sees(change.key, old):  # it has lost the label
                watch.send("DELETED", change.object, now() + self.lag(watch, change))
        for told in self.on_change:
            told(change, old)

    # --- requests

    def handle(self, who: str, verb: str, path: str, query: Query, body: Any, past: int | None) -> Answer:
        """Answer a request. `past`: lists are as of this version."""
        match = _PATH.match(path)
        assert match is not None, path
        plural, ns, name, sub = match["plural"], match["ns"] or "", match["name"] or "", match["sub"] or ""
        if verb == "GET":
            if not name:
                return self._list(plural, ns, query, past)
            found = self.objects.get((plural, ns, name))
            return _ok(found) if found else _no(404, "NotFound", f'{plural} "{name}" not found')
        key = (plural, ns, name or body["metadata"].get("name", ""))
        if verb == "PATCH" and plural == "workloads" and key in self.objects:
            body = applied(self.objects[key], body, query["fieldManager"])
        if plural != "events" and verb != "DELETE":
            body = json.loads(json.dumps(body))
        self._dry = "dryRun" in query
        if self._dry:
            return self._write(verb, key, sub, body)
        answer = self._write(verb, key, sub, body)
        self.sent.append(Sent(now(), who, verb, key, sub, answer.status, body))
        return answer

    def _write(self, verb: str, key: Key, sub: str, body: Any) -> Answer:
        plural, _, name = key
        old = self.objects.get(key)
        if verb == "POST":
            return self._create(key, body, old)
        if old is None and verb == "PATCH" and plural == "podgroups":  # an apply
            return self._create(key, body, old)
        if old is None:
            return _no(404, "NotFound", f'{plural} "{name}" not found')
        if verb == "DELETE":
            asked = (body or {}).get("preconditions") or {}
            for name, word in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
                if asked.get(name) not in {None, old["metadata"][name]}:
                    return _no(409, "Conflict", f"the {word} in the precondition does not match")
            self.delete(key, (body or {}).get("gracePeriodSeconds"))
            return _ok(self.objects.get(key, {"kind": "Status", "metadata": {}, **old}))
        if isinstance(body, list) and (body := json_patched(old, body)) is None:
            return _no(422, "Invalid", "the server rejected our request due to an error in our request")
        given = body.get("metadata", {})
        if given.get("uid") not in {None, old["metadata"]["uid"]}:
            return _no(409, "Conflict", "the UID in the precondition does not match")
        if given.get("resourceVersion") not in {None, old["metadata"]["resourceVersion"]}:
            return _no(409, "Conflict", "the object has been modified")
        if verb == "PATCH":
            fresh = merged(old, {k: v for k, v in body.items() if k != "metadata"})
        elif sub:
            fresh = {**old, "status": body["status"]}
        else:
            fresh = {**body, "metadata": {**old["metadata"], **given}, "status": old.get("status", {})}
        if not sub and (why := self.admit(key, fresh, old)):
            return _no(422, "Invalid", why)
        return _ok(self.store(key, fresh) if fresh != old else old)

    def _create(self, key: Key, body: Json, old: Json | None) -> Answer:
        plural, ns, name = key
        state = self.namespaces.get(ns)
        if ns and state is None:
            return _no(404, "NotFound", f'namespaces "{ns}" not found')
        if old is not None:
            return _no(409, "AlreadyExists", f'{plural} "{name}" already exists')
        if state == "Terminating":
            words = f'{plural} "{name}" is forbidden: unable to create new content in namespace {ns} because it is '
            return _no(403, "Forbidden", words + "being terminated")
        if why := self.admit(key, body, None):
            return _no(422, "Invalid", why)
        if plural == "pods":
            body = {**body, "status": {"phase": "Pending"}}
        return _ok(body if self._dry else self.store(key, body), 201)

    def _list(self, plural: str, ns: str, query: Query, past: int | None) -> Answer:
        token = query.get("continue", "")
        # Content with any version, one is shown the oldest that a cache may have.
        newest = 0 if query.get("resourceVersion") == "0" else self.version
        at, begin = map(int, token.split("-")) if token else (newest if past is None else past, 0)
        objects = self.objects if at == self.version else self.as_of(at)
        label, _, value = query.get("labelSelector", "").partition("=")
        only = query.get("fieldSelector", "").removeprefix("metadata.name=")
        found = [
            o
            for (p, n, name), o in sorted(objects.items())
            if p == plural and ns in {"", n} and only in {"", name}
            and (not label or (value in {"", labels_of(o).get(label)} and label in labels_of(o)))
        ]  # fmt: skip
        meta, end = {"resourceVersion": str(at)}, begin + self.page if "limit" in query else len(found)
        if end < len(found):
            meta["continue"] = f"{at}-{end}"
        return _ok({"metadata": meta, "items": found[begin:end]})


class Faults:
    """What may go wrong with a client's requests. The default: nothing."""

    async def before(self, client: Client, verb: str, key: str) -> None:
        """Called before a request takes effect; may wait, or raise `Unavailable`."""

    async def after(self, client: Client, verb: str, key: str) -> None:
        """Called after it took effect and before its answer is received."""


class Client:
    """The `Transport` of one process."""

    def __init__(self, server: ApiServer, who: str, faults: Faults) -> None:
        self.server = server
        self.who = who
        self.faults = faults
        self.dead = False
        """The process was killed: nothing that it still tries reaches the server."""
        self.past: int | None = None
        """Lists and watches are as of this version..."""
        self.past_until = 0.0
        """... until this time..."""
        self.past_kind = ""
        """... of this kind of objects, a plural; of all if it is empty."""
        self.wakes_at = 0.0
        """The process hangs until then: it sends nothing, and hears the answers to what it has sent when it wakes."""

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: Any = None,
        content_type: str = "application/json",
        timeout: float = 30.0,
        urgent: bool = False,
        leaves: Callable[[], object] = lambda: None,
    ) -> Answer:
        try:
            async with asyncio.timeout(timeout):
                await asyncio.sleep(0.003)
                if self.hangs:  # the process would not have come so far
                    await self._awake()
                    raise Unavailable("connection reset")
                leaves()
                self._alive()
                await self.faults.before(self, method, path)
                self._alive()
                past = self.past if now() < self._past_until(path) else None
                answer = self.server.handle(self.who, method, path, query or {}, body, past)
                await self.faults.after(self, method, path)
                await self._awake()
                return answer
        except TimeoutError:
            raise Unavailable(f"{method} {path}: timed out") from None

    @property
    def hangs(self) -> bool:
        """Whether the process does."""
        return now() < self.wakes_at

    async def _awake(self) -> None:
        if self.hangs:
            await asyncio.sleep(self.wakes_at - now())

    def _alive(self) -> None:
        if self.dead:
            raise Unavailable("the process was killed")

    def _past_until(self, path: str) -> float:
        """Until when what is read there is old; 0: it is not."""
        match = _PATH.match(path)
        assert match is not None, path
        return self.past_until if self.past is not None and self.past_kind in ("", match["plural"]) else 0.0

    def stream(self, path: str, query: Query) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        return self._stream(path, query)

    @asynccontextmanager
    async def _stream(self, path: str, query: Query) -> AsyncIterator[AsyncIterator[bytes]]:
        await asyncio.sleep(0.003)
        self._alive()
        await self.faults.before(self, "WATCH", path)
        match = _PATH.match(path)
        assert match is not None, path
        label, bookmarks = query.get("labelSelector", ""), query.get("allowWatchBookmarks") == "true"
        selected = query.get("fieldSelector", "")
        watch = Watch(self.who, match["plural"], match["ns"] or "", label, selected, bookmarks)
        since = int(query["resourceVersion"])
        if since > self.server.version:
            raise StreamRefused(_no(410, "Expired", "too large resource version"))
        if since < self.server.compacted:
            raise StreamRefused(_no(410, "Expired", "too old resource version"))
        past_until = self._past_until(path)
        for change in self.server.history:
            if change.version > since and watch.sees(change.key, change.object):
                due = past_until if change.version > (self.past or 0) else now()
                watch.send(change.kind, change.object, max(due, now()))
        self.server.watches.append(watch)
        try:
            yield self._lines(watch, now() + float(query["timeoutSeconds"]), past_until)
        finally:
            self.server.watches.remove(watch)

    async def _lines(self, watch: Watch, until: float, held: float) -> AsyncIterator[bytes]:
        while True:
            try:
                async with asyncio.timeout_at(until):
                    found = await watch.lines.get()
            except TimeoutError:
                return
            if found is None:
                raise Unavailable("connection reset")
            due, line = found
            if (wait := max(due, held) - now()) > 0:
                await asyncio.sleep(wait)
            await self._awake()
            yield line


def labels_of(found: Json) -> Json:
    """The labels of an object."""
    return found["metadata"].get("labels") or {}


def applied(old: Json, body: Json, manager: str) -> Json:
    """The status of a Workload that one manager applies, as a merge patch: the conditions of others stay."""
    status, fresh = old.get("status", {}), body["status"]
    conditions = {c["type"]: c for c in (*status.get("conditions", []), *fresh.get("conditions", []))}
    gone = {"admission": None} if manager == ADMISSION_MANAGER and "admission" not in fresh else {}
    return {**body, "status": {**fresh, **gone, "conditions": list(conditions.values())}}


def _ok(found: Json, status: int = 200) -> Answer:
    return Answer(status, json.dumps(found).encode())


def _no(status: int, reason: str, message: str) -> Answer:
    return Answer(status, json.dumps({"reason": reason, "message": message}).encode())
