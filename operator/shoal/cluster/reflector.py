"""Keeps a cache up to date: lists once, then watches, and relists only when the resource version has expired.

Existing implementations are not sufficient: a relist must report objects deleted in the gap (kopf's does not), an ERROR
event other than 410 must not end the process, and a watch without bookmarks must be detected as dead. Objects are
parsed straight into slim models. Fields that the models do not know are ignored, since the CRD may be newer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from shoal.cluster.cache import Cache, T
from shoal.cluster.transport import StreamRefused, Transport
from shoal.errors import ClusterError, Unavailable

logger = logging.getLogger(__name__)

PAGE = 500
WATCH_SECONDS = 300
SILENCE_SECONDS = 75.0
"""The server sends a bookmark every minute, so a watch without events for this long is dead."""
FAILURES_BEFORE_RELIST = 5
"""Watches that fail in a row without an event: the version itself may be what the server cannot continue from."""
DENIED_SECONDS = 30.0
"""Interval of retries of a list that RBAC forbids."""
ABSENT_SECONDS = 3.0
"""Interval of retries of a list whose CRD does not exist yet."""


class Expired(Exception):
    """The API server no longer knows the resource version: 410 Gone."""


class _Wire(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore")


class ListMeta(_Wire):
    """metav1.ListMeta."""

    resource_version: str = ""
    continue_: str = Field("", alias="continue")


class _LoosePage(_Wire):
    metadata: ListMeta = ListMeta()
    items: list[dict[str, Any]] = []


@dataclass(frozen=True)
class Source(Generic[T]):
    """What to list and watch: path of the collection, model of its objects, label selector."""

    path: str
    model: type[T]
    label_selector: str = ""

    @property
    def query(self) -> dict[str, str]:
        """Query parameters shared by lists and watches."""
        return {"labelSelector": self.label_selector} if self.label_selector else {}


class Reflector(Generic[T]):
    """Lists and watches one collection. `synced` is set after the first list; `denied`: RBAC forbids it."""

    def __init__(
        self,
        transport: Transport,
        source: Source[T],
        cache: Cache[T],
        *,
        on_restart: Callable[[str], None] = lambda _why: None,
    ) -> None:
        self.synced = asyncio.Event()
        self.denied = False
        self.first_try = asyncio.Event()
        """Set when the first list has succeeded or failed."""
        self._transport = transport
        self._source = source
        self._cache = cache
        self._on_restart = on_restart
        model: Any = source.model
        self._page: Any = _page_of(model)
        self._frame: Any = _frame_of(model)

    async def run(self) -> None:
        """List and watch until cancelled. Errors are retried with jitter."""
        version, failures = "", 0
        while True:
            try:
                if not version:
                    version = await self._relist()
                version = await self._watch(version)
                failures = 0
            except Expired as error:
                version = ""
                self._on_restart("expired")
                logger.info("%s: relisting: %s", self._source.path, error)
            except _WatchFailed as error:
                failures = 0 if error.progress else failures + 1
                version = error.version if failures < FAILURES_BEFORE_RELIST else ""
                self._on_restart("broken")
                logger.info("%s: watch failed: %s", self._source.path, error)
                await asyncio.sleep(_backoff(failures))
            except (ClusterError, TimeoutError) as error:
                failures += 1
                self._on_restart("unavailable")
                logger.warning("%s: %s", self._source.path, error)
                await asyncio.sleep(_backoff(failures))
            except StreamRefused as error:
                self._deny(error)
                self._on_restart("refused")
                version = ""
                failures += 1
                pause = {401: DENIED_SECONDS, 403: DENIED_SECONDS, 404: ABSENT_SECONDS}.get(error.status)
                await asyncio.sleep(_backoff(failures) if pause is None else pause * random.uniform(0.8, 1))

    def _deny(self, error: StreamRefused) -> None:
        if not self.denied:
            logger.warning("cannot list or watch %s: %s", self._source.path, error)
        self.denied = True
        self.first_try.set()

    async def _relist(self) -> str:
        listed: list[T] = []
        unread: list[str] = []
        query = {**self._source.query, "limit": str(PAGE)}
        while True:
            answer = await self._transport.request("GET", self._source.path, query=query)
            if answer.status == 410:  # the page token has expired
                raise Expired(answer.message)
            if not answer.ok:
                raise StreamRefused(answer)
            meta, items, bad = self._parse(answer.body)
            listed += items
            unread += bad
            if not meta.continue_:
                break
            query["continue"] = meta.continue_
        self._cache.replace(listed, int(meta.resource_version), unread)
        self.denied = False
        self.synced.set()
        self.first_try.set()
        return meta.resource_version

    async def _watch(self, version: str) -> str:
        """Watch until the server ends it; returns the resource version to continue from."""
        query = {
            **self._source.query,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        began = version
        loop = asyncio.get_running_loop()
        try:
            async with (
                asyncio.timeout(SILENCE_SECONDS) as silence,
                self._transport.stream(self._source.path, query) as lines,
            ):
                async for line in lines:
                    silence.reschedule(loop.time() + SILENCE_SECONDS)
                    version = self._take(line, version)
        except StreamRefused as error:
            if error.status == 410:
                raise Expired(str(error)) from error
            raise
        except (Unavailable, TimeoutError) as error:
            raise _WatchFailed(version, progress=version != began, why=repr(error)) from error
        return version

    def _take(self, line: bytes, version: str) -> str:
        """Apply one event; returns its resource version."""
        if line.startswith(b'{"type":"ERROR"'):
            status = json.loads(line)["object"]
            if status.get("code") == 410:
                raise Expired(status.get("message", ""))
            raise Unavailable(f"watch: {status.get('message', status)}")
        try:
            frame = self._frame.model_validate_json(line, extra="ignore")
        except ValidationError as error:
            return self._skip(line, version, error)
        fresh: T = frame.object
        if frame.type == "DELETED":
            self._cache.drop(fresh.metadata.uid, at=int(fresh.metadata.resource_version))
        elif frame.type != "BOOKMARK":
            self._cache.put(fresh)
        return fresh.metadata.resource_version

    def _skip(self, line: bytes, version: str, error: ValidationError) -> str:
        """Skip an object that cannot be parsed, and keep its last known state."""
        event = json.loads(line)
        meta = event["object"].get("metadata", {})
        if event["type"] == "DELETED":
            self._cache.drop(meta.get("uid", ""), at=int(meta.get("resourceVersion", version)))
        elif event["type"] != "BOOKMARK":
            _unreadable(meta, error)
        return str(meta.get("resourceVersion", version))

    def _parse(self, body: bytes) -> tuple[ListMeta, list[T], list[str]]:
        """The metadata of a page, its objects, and the uids of objects that cannot be parsed."""
        try:
            page = self._page.model_validate_json(body, extra="ignore")
        except ValidationError:
            loose = _LoosePage.model_validate_json(body)
            readable: list[T] = []
            unread: list[str] = []
            for item in loose.items:
                try:
                    readable.append(self._page.model_validate({"items": [item]}, extra="ignore").items[0])
                except ValidationError as error:
                    _unreadable(item.get("metadata", {}), error)
                    unread.append(item.get("metadata", {}).get("uid", ""))
            return loose.metadata, readable, unread
        return page.metadata, page.items, []


def _unreadable(meta: dict[str, Any], error: ValidationError) -> None:
    logger.error("cannot parse %s/%s: %s", meta.get("namespace"), meta.get("name"), error)


class _WatchFailed(Exception):
    """A watch failed; it continues from `version`."""

    def __init__(self, version: str, *, progress: bool, why: str) -> None:
        super().__init__(why)
        self.version = version
        self.progress = progress


def _backoff(failures: int) -> float:
    return float(min(30.0, 0.1 * 2 ** min(failures, 10))) * random.uniform(0.5, 1.0)


def _page_of(model: type[BaseModel]) -> type[BaseModel]:
    class Page(_Wire):
        metadata: ListMeta = ListMeta()
        items: list[model] = []  # type: ignore[valid-type]

    return Page


def _frame_of(model: type[BaseModel]) -> type[BaseModel]:
    class Frame(_Wire):
        type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
        object: model  # type: ignore[valid-type]

    return Frame
