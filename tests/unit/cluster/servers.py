"""A fake API server behind the transport: objects with versions, watches that can be cut, faults on demand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from shoal.cluster.transport import Answer, Query, StreamRefused
from shoal.errors import TooLong, Unavailable

Json = dict[str, Any]


class SmallServer:
    """One collection of objects; every write is recorded in `writes`."""

    def __init__(self) -> None:
        self.version = 100
        self.objects: dict[str, Json] = {}
        self.writes: list[tuple[str, str, Any]] = []
        self.watches: list[asyncio.Queue[bytes | Exception]] = []
        self.told_of_progress: list[asyncio.Queue[bytes | Exception]] = []
        """Those that asked for bookmarks."""
        self.cached: list[Json] = []
        """What is listed to whoever is content with any version."""
        self.history: list[tuple[int, bytes]] = []
        self.oldest = 0
        self.lists = 0
        self.page_size = 2
        self.most_bytes = 10**9
        """Of an answer that its client reads."""
        self.token_seconds = float("inf")
        """After which the rest of a list is gone: 410."""
        self.fault: Callable[[str, str], Answer | Exception | None] = lambda _method, _path: None
        self.delay = 0.0
        self.object_seconds = 0.0
        """What each object of a page takes."""
        self.limits: list[int] = []
        """Of the pages that were asked for."""
        self._pages: dict[str, tuple[list[Json], int, float]] = {}
        """What is left of a list, its version, and when it began."""

    # --- changes by the test

    def set(self, name: str, **fields: Any) -> Json:
        """Create or change an object."""
        self.version += 1
        kind = "MODIFIED" if name in self.objects else "ADDED"
        old = self.objects.get(
            name, {"metadata": {"name": name, "namespace": "ns", "uid": f"uid-{self.version}"}}
        )
        fresh = {**old, **fields}
        fresh["metadata"] = {
            **old["metadata"],
            "resourceVersion": str(self.version),
            **fields.get("metadata", {}),
        }
        self.objects[name] = fresh
        self._publish(kind, fresh)
        return fresh

    def remove(self, name: str) -> None:
        """Delete an object."""
        self.version += 1
        gone = self.objects.pop(name)
        gone["metadata"]["resourceVersion"] = str(self.version)
        self._publish("DELETED", gone)

    def bookmark(self) -> None:
        """Send a bookmark to all watches that asked for them."""
        line = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(self.version)}}}
        for watch in self.told_of_progress:
            watch.put_nowait(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def send(self, line: bytes) -> None:
        """Send a line to all watches."""
        for watch in self.watches:
            watch.put_nowait(line)

    def cut(self) -> None:
        """Break all connections."""
        for watch in self.watches:
            watch.put_nowait(Unavailable("connection reset"))

    def compact(self) -> None:
        """Drop the history: watches from earlier versions are answered with 410."""
        self.oldest = self.version
        self.history.clear()

    def _publish(self, kind: str, published: Json) -> None:
        line = json.dumps({"type": kind, "object": published}, separators=(",", ":")).encode() + b"\n"
        self.history.append((self.version, line))
        self.send(line)

    # --- the transport

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: Any = None,
        content_type: str = "application/json",
        timeout: float = 30.0,
        leaves: Callable[[], object] = lambda: None,
    ) -> Answer:
        leaves()
        self.limits += [int(query["limit"])] if query and "limit" in query else []
        if delay := self.delay + self.object_seconds * (self.limits[-1] if self.limits else 0):
            try:
                await asyncio.wait_for(asyncio.sleep(delay), timeout)
            except TimeoutError:
                raise Unavailable("timeout") from None
        await asyncio.sleep(0)
        if method != "GET":
            self.writes.append((method, path, body))
        fault = self.fault(method, path)
        if isinstance(fault, Exception):
            raise fault
        if fault is not None:
            return fault
        return self.answer(method, path, query or {}, body)

    def answer(self, method: str, path: str, query: Query, body: Any) -> Answer:
        """A list, page by page. Subclasses override it."""
        return self._list(query)

    def _list(self, query: Query) -> Answer:
        token, now = query.get("continue", ""), asyncio.get_running_loop().time()
        if token:
            items, at, began = self._pages[token]
            if now - began > self.token_seconds:
                return Answer(410, b'{"message": "The provided continue parameter is too old"}')
        else:
            self.lists += 1
            fresh = query.get("resourceVersion") != "0"
            items, at = (list(self.objects.values()), self.version) if fresh else (self.cached, self.oldest)
            began = now
        size = min(self.page_size, int(query.get("limit", self.page_size)))
        page, rest = items[:size], items[size:]
        meta = {"resourceVersion": str(at)}
        if rest:
            meta["continue"] = f"token-{len(self._pages)}-{len(rest)}"
            self._pages[meta["continue"]] = (rest, at, began)
        body = json.dumps({"metadata": meta, "items": page}, separators=(",", ":")).encode()
        if len(body) > self.most_bytes:
            raise TooLong(f"more than {self.most_bytes} bytes")
        return Answer(200, body)

    def stream(self, path: str, query: Query) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        return self._stream(path, query)

    @asynccontextmanager
    async def _stream(self, path: str, query: Query) -> AsyncIterator[AsyncIterator[bytes]]:
        await asyncio.sleep(0)
        fault = self.fault("WATCH", path)
        if isinstance(fault, Exception):
            raise fault
        if fault is not None:
            raise StreamRefused(fault)
        since = int(query["resourceVersion"])
        if since < self.oldest:
            raise StreamRefused(Answer(410, b'{"message": "too old resource version"}'))
        watch: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        for version, line in self.history:
            if version > since:
                watch.put_nowait(line)
        self.watches.append(watch)
        if query.get("allowWatchBookmarks") == "true":
            self.told_of_progress.append(watch)
        try:
            yield self._lines(watch)
        finally:
            self.watches.remove(watch)
            if watch in self.told_of_progress:
                self.told_of_progress.remove(watch)

    @staticmethod
    async def _lines(watch: asyncio.Queue[bytes | Exception]) -> AsyncIterator[bytes]:
        while True:
            line = await watch.get()
            if isinstance(line, Exception):
                raise line
            if line == b"":
                return
            yield line
