"""Keeps a cache up to date: lists once, then watches, and relists only when the resource version has expired.

Existing implementations are not sufficient: a relist must report objects deleted in the gap (kopf's does not), an ERROR
event other than 410 must not end the process, and a watch without bookmarks must be detected as dead. Objects are
parsed straight into slim models. Fields that the models do not know are ignored, since the CRD may be newer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Generic, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic.alias_generators import to_camel

from shoal.cluster.cache import Cache, T
from shoal.cluster.cache import version as version_of
from shoal.cluster.clock import loop_time
from shoal.cluster.deep_json import loads
from shoal.cluster.transport import StreamRefused, Transport
from shoal.errors import ClusterError, StoreWentBack, TooLong, Unavailable

logger = logging.getLogger(__name__)

PAGE = 100
"""Objects of a list that are taken before others have the event loop: 100 pods are 0.6 MB, some ms."""
PAGE_BYTES = 2**21
"""That are parsed at once, unless it is one object: JSON of a user's own making takes fifty times as much meanwhile."""
LARGEST_PAGE = 10_000
"""Where a list takes so long that its later pages are gone."""
WATCH_SECONDS = 300
"""The shortest time that a watch is asked for; the longest is twice that, so that not all end together."""
SILENCE_SECONDS = 75.0
"""The server sends a bookmark every minute, so a watch without events for this long is dead."""
YIELD_BYTES = 2**17
"""Of events that are taken before others have the event loop: 1 ms. What a connection has buffered may be more."""
FAILURES_BEFORE_RELIST = 5
"""Watches that fail in a row without an event: the version itself may be what the server cannot continue from."""
DENIED_SECONDS = 30.0
"""Interval of retries of a list that RBAC forbids."""
SHORT_WATCH_SECONDS = 1.0
"""A watch that ends sooner, without an error, has failed. After a version that expires sooner, a list waits a pause."""
ABSENT_SECONDS = 3.0
"""Interval of retries of a list whose CRD does not exist yet."""

_IDENTITY = re.compile(
    rb'"resourceVersion":"(\d+)","uid":"([^"]+)"|"uid":"([^"]+)","resourceVersion":"(\d+)"'
)
"""Of an object, as the API server writes it: in the order of the alphabet, or of Kubernetes' own types."""


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


class _LooseFrame(_Wire):
    type: str
    object: dict[str, Any]


@dataclass(frozen=True)
class _Unread:
    """An object that cannot be parsed: its metadata and conditions, and why.

    Nothing of the error is kept: it holds all of the object, in a cycle that no garbage collection sees.
    """

    meta: Mapping[str, Any]
    status: Mapping[str, Any]
    why: str


def _unread(found: Any, error: ValidationError) -> _Unread:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = [str(part) for part in first["loc"]]
    field = ".".join(place[2:] if place[:1] == ["items"] else place[place[:1] == ["object"] :])
    why = f"{field or 'the object'}: {first['msg'].removeprefix('Value error, ')}"
    parts = ((found.get(name) if isinstance(found, dict) else None) for name in ("metadata", "status"))
    meta, status = (part if isinstance(part, dict) else {} for part in parts)
    return _Unread(
        {
            **{name: meta.get(name, "") for name in ("name", "namespace", "uid", "resourceVersion")},
            "generation": meta.get("generation", 0),
        },
        {"conditions": status.get("conditions") or []},
        why,
    )


def _tolerant(value: Any, read: ValidatorFunctionWrapHandler) -> object:
    """One object of a page. Those that cannot be parsed are Python's objects one by one, since each may be large."""
    try:
        return read(value)
    except ValidationError as error:
        return _unread(value, error)


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
    """Lists and watches one collection.

    `on_unread` hears of each state of an object that cannot be taken. `on_unreadable` is given one that cannot be
    parsed, and why: its owner has to learn it.
    """

    def __init__(
        self,
        transport: Transport,
        source: Source[T],
        cache: Cache[T],
        *,
        on_restart: Callable[[str], None] = lambda _why: None,
        on_unread: Callable[[], None] = lambda: None,
        on_unreadable: Callable[[Mapping[str, Any], str], None] = lambda _object, _why: None,
    ) -> None:
        self.synced = asyncio.Event()
        """Set after the first list."""
        self.denied = False
        """RBAC forbids the list, or the CRD does not exist."""
        self._transport = transport
        self._source = source
        self._cache = cache
        self._on_restart = on_restart
        self._on_unread = on_unread
        self._on_unreadable = on_unreadable
        self._wanted = asyncio.Event()
        """A list was asked for that begins from now on."""
        self._newest = 0
        """The newest version that a list or a watch told."""
        self._begun = 0
        self._ended = 0
        """The number of the newest list that succeeded or was refused."""
        self._awaited = 0
        """The number of the newest list that a `refresh` waits for."""
        self._hurried = 0
        """Pauses that were cut short since a list was answered."""
        self._page_size = PAGE
        """The most that a page may have."""
        self._heard_at = -math.inf
        self._changed = asyncio.Condition()
        model: Any = source.model
        self._page: Any = _page_of(model)
        self._tolerant_page: Any = _page_of(Annotated[model, WrapValidator(_tolerant)])
        self._frame: Any = _frame_of(model)

    @property
    def readable(self) -> bool:
        """Whether the cache is what the last list and its watch said, and no `refresh` waits for a newer list."""
        return self.synced.is_set() and not self.denied and self._ended >= self._awaited

    @property
    def silent_seconds(self) -> float:
        """For how long the API server has said nothing of the collection, not even a bookmark."""
        return loop_time() - self._heard_at

    async def run(self) -> None:
        """List and watch until cancelled. Whatever fails is tried again, with jitter.

        Raises:
            StoreWentBack: what is known never was. Only a process that begins anew knows nothing of it.
        """
        version, failures = "", 0
        while True:
            began = loop_time()
            try:
                if not version or self._wanted.is_set():
                    version = ""  # a list that fails is tried again, whatever the watch could continue from
                    version = await self._relist()
                version = await self._watch_until_wanted(version)
                failures = 0
            except StoreWentBack:
                raise
            except Expired as error:
                version = ""
                failures = 0 if loop_time() - began > SHORT_WATCH_SECONDS else failures + 1
                self._on_restart("expired")
                logger.info("%s: relisting: %s", self._source.path, error)
                if failures:
                    await self._pause(_backoff(failures))
            except _WatchFailed as error:
                if error.after is None:  # a server that has too much to do is not asked for everything
                    failures = 0 if error.progress else failures + 1
                version = error.version if failures < FAILURES_BEFORE_RELIST else ""
                self._on_restart("broken")
                logger.info("%s: watch failed: %s", self._source.path, error)
                await self._pause(_backoff(failures), error.after)
            except StreamRefused as error:
                await self._deny(error)
                self._on_restart("refused")
                version = ""
                failures += 1
                pause = {401: DENIED_SECONDS, 403: DENIED_SECONDS, 404: ABSENT_SECONDS}.get(error.status)
                await self._pause(_backoff(failures) if pause is None else pause * random.uniform(0.8, 1))
            except Exception as error:  # broad: what one answer says must not end the process of all
                expected = isinstance(error, (ClusterError, TimeoutError))
                version = ""
                failures += 1
                self._on_restart("unavailable" if expected else "failed")
                logger.warning("%s: %s", self._source.path, error, exc_info=None if expected else error)
                await self._pause(_backoff(failures), _asked(error))

    @property
    def begun(self) -> int:
        """How many lists have begun so far."""
        return self._begun

    async def refresh(self, begun: int | None = None) -> bool:
        """Wait until a list has ended that began after this call, or after `begun` others; False if it was refused.

        What a watch has not reported is not known to be so: a watch may be behind, or silently dead.
        """
        async with self._changed:
            begins = (self._begun if begun is None else begun) + 1
            self._awaited = max(self._awaited, begins)
            if self._begun < begins:
                self._wanted.set()
            await self._changed.wait_for(lambda: self._ended >= begins)
        return not self.denied

    def request_refresh(self) -> None:
        """List again soon."""
        self._wanted.set()

    async def _pause(self, seconds: float, asked: float | None = None) -> None:
        """Wait; for less if a list is wanted meanwhile, unless the server `asked` for the time.

        Whoever wants lists may want many, so that those which fail wait longer each time, too.
        """
        if asked is not None:
            await asyncio.sleep(max(seconds, asked * random.uniform(1.0, 1.2)))
            return
        least = min(seconds, _backoff(self._hurried))
        await asyncio.sleep(least)
        try:
            async with asyncio.timeout(seconds - least):
                await self._wanted.wait()
            self._hurried += 1
        except TimeoutError:
            pass

    async def _deny(self, error: StreamRefused) -> None:
        if not self.denied:
            logger.warning("cannot list or watch %s: %s", self._source.path, error)
        self.denied = True
        await self._end_list()

    async def _end_list(self) -> None:
        self._hurried = 0
        async with self._changed:
            self._ended = self._begun
            self._changed.notify_all()

    async def _relist(self) -> str:
        self._begun += 1
        self._wanted.clear()
        listed, unread = set[str](), set[str]()
        version = ""
        async for meta, items, bad in self._pages():
            version = meta.resource_version
            taken = {each.metadata.uid: self._put(each) for each in items}
            listed |= {uid for uid, read in taken.items() if read}
            unread |= {*bad, *(uid for uid, read in taken.items() if not read)}
        self._come_to(_number(version))
        self._cache.keep(listed, self._newest, unread)
        self.denied = False
        self.synced.set()
        await self._end_list()
        return version

    async def _pages(self) -> AsyncIterator[tuple[ListMeta, list[T], list[str]]]:
        """The pages of a list, as `_parse` has them: fewer objects while they are too long to be read at once.

        Each page takes the server its time: where the rest is gone before its turn, the next list has larger ones.
        They become smaller again where one is too large to be answered, and after each list that succeeds.
        """
        began, pages, limit = loop_time(), 1, self._page_size
        # No resource version: what etcd has now, never what a cache of the API server had a while ago.
        query = dict(self._source.query)
        while True:
            try:
                answer = await self._transport.request(
                    "GET", self._source.path, query={**query, "limit": str(limit)}
                )
            except Unavailable as error:
                if limit > PAGE:
                    self._page_size = max(PAGE, limit // 2)
                if not isinstance(error, TooLong) or limit == 1:
                    raise
                limit //= 2
                continue
            self._heard_at = loop_time()
            if answer.status == 410:  # the page token has expired
                self._page_size = min(4 * self._page_size, LARGEST_PAGE)
                logger.warning(
                    "%s: page %d of a list is gone after %.0f s; the next has pages of %d: %s",
                    self._source.path,
                    pages,
                    loop_time() - began,
                    self._page_size,
                    answer.message,
                )
                raise Expired(answer.message)
            if not answer.ok:
                raise StreamRefused(answer)
            most = (
                PAGE_BYTES * self._page_size // PAGE
            )  # where pages are too late to be smaller, they are read whole
            fitting = max(1, 3 * limit * most // (4 * max(1, len(answer.body))))
            if len(answer.body) > most and limit > 1:
                limit = fitting
                continue
            found = self._parse(answer.body)
            yield found
            if not found[0].continue_:
                self._page_size = max(PAGE, self._page_size // 2)
                return
            query["continue"] = found[0].continue_
            pages, limit = pages + 1, min(2 * limit, self._page_size, fitting)

    async def _watch_until_wanted(self, version: str) -> str:
        """Watch until the server ends it or a list is wanted; returns the resource version to continue from."""
        watch = asyncio.create_task(self._watch(version))
        wanted = asyncio.create_task(self._wanted.wait())
        try:
            await asyncio.wait({watch, wanted}, return_when=asyncio.FIRST_COMPLETED)
            return await watch if watch.done() else ""
        finally:
            for task in (watch, wanted):
                task.cancel()
            await asyncio.gather(watch, wanted, return_exceptions=True)

    async def _watch(self, version: str) -> str:
        """Watch until the server ends it; returns the resource version to continue from."""
        query = {
            **self._source.query,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(int(WATCH_SECONDS * random.uniform(1, 2))),
        }
        began = version
        opened = loop_time()
        try:
            async with (
                asyncio.timeout(SILENCE_SECONDS) as silence,
                self._transport.stream(self._source.path, query) as lines,
            ):
                taken, self._heard_at = 0, opened
                async for line in lines:
                    self._heard_at = loop_time()
                    silence.reschedule(self._heard_at + SILENCE_SECONDS)
                    version = self._take(line, version)
                    if (taken := taken + len(line)) > YIELD_BYTES:
                        taken = 0
                        await asyncio.sleep(0)
        except StreamRefused as error:
            if error.status == 410:
                raise Expired(str(error)) from error
            raise
        except (Unavailable, TimeoutError) as error:
            raise _WatchFailed(
                version, progress=version != began, why=repr(error), after=_asked(error)
            ) from error
        if loop_time() - opened < SHORT_WATCH_SECONDS:
            # A proxy, or a server that shuts down: without a pause this would be a request per round trip.
            raise _WatchFailed(version, progress=version != began, why="it ended at once")
        return version

    def _take(self, line: bytes, version: str) -> str:
        """Apply one event; returns its resource version."""
        if (known := self._known(line)) is not None:
            self._newest = max(self._newest, int(known))
            return known
        try:
            frame = self._frame.model_validate_json(line, extra="ignore")
        except ValidationError as error:
            return self._take_other(line, version, error)
        fresh: T = frame.object
        at = _number(fresh.metadata.resource_version)
        if frame.type == "BOOKMARK" and at < self._newest:  # etcd was restored, or this API server is behind
            raise Expired(f"version {at} after version {self._newest}")
        self._newest = max(self._newest, at)
        if frame.type == "DELETED":
            self._cache.drop(fresh.metadata.uid, at=at)
        elif frame.type != "BOOKMARK":
            self._put(fresh)
        return fresh.metadata.resource_version

    def _put(self, fresh: T) -> bool:
        """Take an object; False if what is made of it fails: no one object of a user may end the process of all."""
        try:
            self._cache.put(fresh)
        except Exception:  # broad: as said
            meta = fresh.metadata
            if self._cache.leave_unread(meta.uid, version_of(fresh)):
                logger.exception("cannot take %s/%s of %s", meta.namespace, meta.name, self._source.path)
                self._on_unread()
            return False
        return True

    def _come_to(self, at: int) -> None:
        """Take the version of a list, which is what etcd has.

        Raises:
            StoreWentBack: it is older than what was seen before.
        """
        if at < self._newest:
            raise StoreWentBack(
                f"{self._source.path}: a list at version {at} after version {self._newest} was seen: etcd was restored"
            )
        self._newest = at

    def _known(self, line: bytes) -> str | None:
        """The resource version of an event that tells what the cache has, as after each write of this process.

        That is seen without reading the object. In texts quotes are escaped, so that none looks like these fields;
        where a user's own fields do, the object is read.
        """
        if not line.startswith((b'{"type":"ADDED"', b'{"type":"MODIFIED"')):
            return None
        found = _IDENTITY.findall(line)
        if len(found) != 1:
            return None
        version, uid = (each.decode() for each in (found[0][:2] if found[0][0] else found[0][:1:-1]))
        known = self._cache.by_uid(uid)
        return version if known is not None and version_of(known) >= int(version) else None

    def _take_other(self, line: bytes, version: str, error: ValidationError) -> str:
        """An error of the server, or an object that cannot be parsed, of which the last known state is kept."""
        try:
            try:
                event = _LooseFrame.model_validate_json(line)
            except ValidationError:
                event = _LooseFrame.model_validate(loads(line))
            kind, found = event.type, event.object
            meta: dict[str, Any] = found.get("metadata") or {}
        except ValueError as broken:  # also of pydantic
            raise Unavailable(f"watch: a line that is no event: {line[:100]!r}") from broken
        if kind == "ERROR":
            if found.get("code") == 410:
                raise Expired(found.get("message", ""))
            raise Unavailable(f"watch: {found.get('message', found)}")
        at = str(meta.get("resourceVersion", version))
        if kind == "DELETED":
            self._cache.drop(meta.get("uid", ""), at=_number(at))
        elif kind != "BOOKMARK":
            self._unreadable(_unread(found, error))
        return at

    def _parse(self, body: bytes) -> tuple[ListMeta, list[T], list[str]]:
        """The metadata of a page, its objects, and the uids of objects that cannot be parsed."""
        try:
            page = self._page.model_validate_json(body, extra="ignore")
            return page.metadata, page.items, []
        except ValidationError:
            pass
        try:
            page = self._tolerant_page.model_validate_json(body, extra="ignore")
            return page.metadata, *self._readable(page.items)
        except ValidationError:
            try:
                loose = _LoosePage.model_validate(loads(body))
            except ValueError as broken:  # also of pydantic
                raise Unavailable(
                    f"{self._source.path}: an answer that is no list: {body[:100]!r}"
                ) from broken
            return loose.metadata, *self._readable(map(self._alone, loose.items))

    def _alone(self, item: dict[str, Any]) -> T | _Unread:
        try:
            alone: T = self._page.model_validate_json(json.dumps({"items": [item]}), extra="ignore").items[0]
            return alone
        except ValidationError as error:
            return _unread(item, error)

    def _readable(self, items: Iterable[T | _Unread]) -> tuple[list[T], list[str]]:
        """Those that can be parsed, and the uids of the others, which are told."""
        readable: list[T] = []
        unread: list[str] = []
        for each in items:
            if isinstance(each, _Unread):
                self._unreadable(each)
                unread.append(each.meta["uid"])
            else:
                readable.append(each)
        return readable, unread

    def _unreadable(self, unread: _Unread) -> None:
        meta = unread.meta
        if self._cache.leave_unread(meta["uid"], _number(str(meta["resourceVersion"]))):
            logger.error("cannot parse %s/%s: %.1000s", meta["namespace"], meta["name"], unread.why)
            self._on_unread()
        self._on_unreadable({"metadata": meta, "status": unread.status}, unread.why)


def _number(version: str) -> int:
    """A resource version as a number (KEP-5504).

    Raises:
        Unavailable: it is none.
    """
    try:
        return int(version)
    except ValueError:
        raise Unavailable(f"resourceVersion {version!r} is not a number") from None


class _WatchFailed(Exception):
    """A watch failed; it continues from `version`. `after`: seconds that the server asks to wait, if it does."""

    def __init__(self, version: str, *, progress: bool, why: str, after: float | None = None) -> None:
        super().__init__(why)
        self.version = version
        self.progress = progress
        self.after = after


def _asked(error: Exception) -> float | None:
    return error.retry_after if isinstance(error, Unavailable) else None


def _backoff(failures: int) -> float:
    """The pause in seconds."""
    return float(min(30.0, 0.1 * 2 ** min(failures, 10))) * random.uniform(0.5, 1.0)


@cache
def _page_of(model: Any) -> type[BaseModel]:
    class Page(_Wire):
        metadata: ListMeta = ListMeta()
        items: list[model] = []

    return Page


@cache
def _frame_of(model: type[BaseModel]) -> type[BaseModel]:
    class Frame(_Wire):
        type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
        object: model  # type: ignore[valid-type]

    return Frame
