"""Keeps a cache up to date: lists once, then watches, and relists only when the resource version has expired.

Existing implementations are not sufficient: a relist must report objects deleted in the gap (kopf's does not), an ERROR
event other than 410 must not end the process, and a watch without bookmarks must be detected as dead.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic

from shoal.cluster.cache import Cache, T
from shoal.cluster.cache import version as version_of
from shoal.cluster.clock import loop_time
from shoal.cluster.pages import Pages
from shoal.cluster.pauses import asked, backoff
from shoal.cluster.reader import Reader, Unread
from shoal.cluster.transport import StreamRefused, Transport
from shoal.errors import ClusterError, Expired, StoreWentBack, Unavailable

logger = logging.getLogger(__name__)

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
        self._heard_at = -math.inf
        self._changed = asyncio.Condition()
        self._reader = Reader(source.model)
        self._pages = Pages(transport, source.path, source.query, self._reader)

    @property
    def readable(self) -> bool:
        """Whether the cache is what the last list and its watch said, and no `refresh` waits for a newer list."""
        return self.synced.is_set() and not self.denied and self._ended >= self._awaited

    @property
    def silent_seconds(self) -> float:
        """For how long the API server has said nothing of the collection, not even a bookmark."""
        return loop_time() - max(self._heard_at, self._pages.answered_at)

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
                    await self._pause(backoff(failures))
            except _WatchFailed as error:
                if error.after is None:  # a server that has too much to do is not asked for everything
                    failures = 0 if error.progress else failures + 1
                version = error.version if failures < FAILURES_BEFORE_RELIST else ""
                self._on_restart("broken")
                logger.info("%s: watch failed: %s", self._source.path, error)
                await self._pause(backoff(failures), error.after)
            except StreamRefused as error:
                await self._deny(error)
                self._on_restart("refused")
                version = ""
                failures += 1
                pause = {401: DENIED_SECONDS, 403: DENIED_SECONDS, 404: ABSENT_SECONDS}.get(error.status)
                await self._pause(backoff(failures) if pause is None else pause * random.uniform(0.8, 1))
            except Exception as error:  # broad: what one answer says must not end the process of all
                expected = isinstance(error, (ClusterError, TimeoutError))
                version = ""
                failures += 1
                self._on_restart("unavailable" if expected else "failed")
                logger.warning("%s: %s", self._source.path, error, exc_info=None if expected else error)
                await self._pause(backoff(failures), asked(error))

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

    async def _pause(self, seconds: float, after: float | None = None) -> None:
        """Wait; for less if a list is wanted meanwhile, unless the server asks for the time (`after`).

        Whoever wants lists may want many, so that those which fail wait longer each time, too.
        """
        if after is not None:
            await asyncio.sleep(max(seconds, after))
            return
        least = min(seconds, backoff(self._hurried))
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
        async for page in self._pages.list():
            version = page.version
            for each in page.items:
                self._check(each, _number(version))
                uid, read = self._put(each)
                (listed if read else unread).add(uid)
        self._come_to(_number(version))
        self._cache.keep(listed, self._newest, unread)
        self.denied = False
        self.synced.set()
        await self._end_list()
        return version

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
                version, progress=version != began, why=repr(error), after=asked(error)
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
        kind, found = self._reader.event(line)
        if isinstance(found, Unread):
            told = str(found.meta["resourceVersion"]) or version
            uid = found.meta["uid"]
        else:
            told, uid = found.metadata.resource_version, found.metadata.uid
            at = _number(told)
            if kind == "BOOKMARK" and at < self._newest:  # etcd was restored, or this API server is behind
                raise Expired(f"version {at} after version {self._newest}")
            self._newest = max(self._newest, at)
        if kind == "DELETED":
            self._cache.drop(uid, at=_number(told))
        elif kind != "BOOKMARK":
            self._put(found)
        return told

    def _put(self, found: T | Unread) -> tuple[str, bool]:
        """Take an object, and return its uid; False if it, or what is made of it, is not to be used.

        No one object of a user may end the process of all.
        """
        if isinstance(found, Unread):
            self._unreadable(found)
            return found.meta["uid"], False
        try:
            self._cache.put(found)
        except Exception:  # broad: as said
            meta = found.metadata
            if self._cache.leave_unread(meta.uid, version_of(found)):
                logger.exception("cannot take %s/%s of %s", meta.namespace, meta.name, self._source.path)
                self._on_unread()
            return found.metadata.uid, False
        return found.metadata.uid, True

    def _check(self, listed: T | Unread, at: int) -> None:
        """See an object of a list at version `at`.

        Raises:
            StoreWentBack: it is older than it was known, and the list is not: a store that only goes on has no such
                one, but one that was restored with `--bump-revision`.
        """
        if isinstance(listed, Unread):
            uid, name, shown = listed.meta["uid"], listed.meta["name"], listed.meta["resourceVersion"]
        else:
            meta = listed.metadata
            uid, name, shown = meta.uid, meta.name, meta.resource_version
        if _number(str(shown)) < (newest := self._cache.newest_of(uid)) <= at:
            raise StoreWentBack(
                f"{self._source.path}: {name} at version {shown} in a list at {at}, after version {newest} was seen: "
                "etcd was restored"
            )

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

    def _unreadable(self, unread: Unread) -> None:
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
