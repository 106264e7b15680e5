"""Posts events in the background, so that no reconcile waits for one.

The queue is bounded, and a wave of losses is a handful of requests: the first events of an object with one reason are
posted as they are, the others are combined into one event with a count. An event's name is derived from the object,
the reason and the message, so that a repetition, even after a restart, is a 409 and increments the count that is
stored. Kubernetes deletes events after an hour. Losing an event is not an error, since the status has the same
information.

Events of a namespace are posted one after another, and those of a few namespaces at once: where each takes long, it is
that namespace's which wait, and which are lost.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from pydantic import BaseModel, ValidationError

from shoal.api.base import API_VERSION, Resource
from shoal.api.events import Event
from shoal.cluster.clock import loop_time
from shoal.cluster.transport import MERGE_PATCH, Answer, Transport
from shoal.errors import ClusterError
from shoal.runtime.shares import Shares
from shoal.words import stamp

logger = logging.getLogger(__name__)

MAX_WAITING = 2048
"""Events that wait to be posted; beyond it the oldest are dropped, of the namespace that has most."""
POSTERS = 4
"""Namespaces whose events are posted at once."""
MAX_COUNTS = 4096
MAX_MESSAGE_LENGTH = 1024  # limit of core/v1 Event
BURST = {"Warning": 5, "Normal": 2}
"""Events of one object and reason that are posted singly within a window: that all is well again is worth fewer."""
WINDOW_SECONDS = 60.0
PAUSE_SECONDS = 0.5
"""Between the writes of one combined event, so that a wave is few of them."""


@dataclass
class _Waiting:
    about: Resource
    event: Event
    count: int = 1
    """Repetitions that this write stands for."""
    combined: bool = False


class _Stored(BaseModel):
    """What is read of a stored event."""

    count: int = 1


class Recorder:
    """Takes events with `record`, posts them in `run`. `on_result` is told: posted, dropped or failed."""

    def __init__(
        self,
        transport: Transport,
        *,
        reporter: str,
        wall: Callable[[], datetime],
        on_result: Callable[[str], None] = lambda _result: None,
    ) -> None:
        self._transport = transport
        self._reporter = reporter
        self._wall = wall
        self._on_result = on_result
        self._waiting: dict[str, OrderedDict[str, _Waiting]] = {}
        """By namespace; none is empty."""
        self._posters = Shares(POSTERS)
        self._counts: OrderedDict[str, int] = OrderedDict()
        self._windows: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()
        self._resting: dict[str, _Waiting | None] = {}
        """Combined events that were posted just now, each with what came since."""
        self._filled = asyncio.Event()

    def record(self, about: Resource, events: Iterable[Event]) -> None:
        """Queue events about an object. Never waits, never fails."""
        # Thousands may wait: each with what the object is called, and not with its status.
        which = Resource(kind=about.kind, metadata=about.metadata)
        for event in dict.fromkeys(events):
            self._add(which, event)

    async def run(self) -> None:
        """Post events until cancelled."""
        posting: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._filled.clear()
                posting = {space: task for space, task in posting.items() if not task.done()}
                for space in self._waiting:
                    if space not in posting:
                        posting[space] = tasks.create_task(self._post_all(space))
                await self._filled.wait()

    async def drain(self) -> None:
        """Post what still waits, after `run` was cancelled."""
        for name in list(self._resting):
            self._rested(name)
        async with asyncio.TaskGroup() as tasks:
            for space in self._waiting:
                tasks.create_task(self._post_all(space))

    async def _post_all(self, space: str) -> None:
        """Post the events of a namespace, one after another, until none waits."""
        while space in self._waiting:
            async with self._posters.place(space):
                if space in self._waiting:  # not dropped meanwhile
                    await self._post_first(space)

    async def _post_first(self, space: str) -> None:
        name, waiting = self._next(space)
        try:
            await self._post(name, waiting)
        except asyncio.CancelledError:
            self._waiting.setdefault(space, OrderedDict())[name] = waiting  # for `drain`
            raise
        if waiting.combined:
            self._resting[name] = None
            asyncio.get_running_loop().call_later(PAUSE_SECONDS, self._rested, name)

    def _next(self, space: str) -> tuple[str, _Waiting]:
        """Take the oldest that waits."""
        waiting = self._waiting[space]
        first = waiting.popitem(last=False)
        if not waiting:
            del self._waiting[space]
        return first

    def _add(self, about: Resource, event: Event) -> None:
        combined = self._in_window(about.metadata.uid, event.reason) > BURST.get(event.type, 2)
        content = "combined" if combined else event.message
        name = _name(about, event.reason, content)
        beside = self._waiting.get(_namespace(about), OrderedDict[str, _Waiting]())
        if (known := beside.get(name) or self._resting.get(name)) is not None:
            known.about, known.event, known.count = about, event, known.count + 1
        elif name in self._resting:
            self._resting[name] = _Waiting(about, event, combined=combined)
        else:
            self._wait(name, _Waiting(about, event, combined=combined))

    def _wait(self, name: str, waiting: _Waiting) -> None:
        self._waiting.setdefault(_namespace(waiting.about), OrderedDict())[name] = waiting
        if sum(map(len, self._waiting.values())) > MAX_WAITING:
            self._next(max(self._waiting, key=lambda space: len(self._waiting[space])))
            self._on_result("dropped")
        self._filled.set()

    def _rested(self, name: str) -> None:
        if (since := self._resting.pop(name, None)) is not None:
            self._wait(name, since)

    def _in_window(self, uid: str, reason: str) -> int:
        """How many events of this object and reason there were in the current window, this one included."""
        now = loop_time()
        began, count = self._windows.pop((uid, reason), (now, 0))
        if now - began > WINDOW_SECONDS:
            began, count = now, 0
        self._windows[uid, reason] = began, count + 1
        if len(self._windows) > MAX_COUNTS:
            self._windows.popitem(last=False)
        return count + 1

    async def _post(self, name: str, waiting: _Waiting) -> None:
        try:
            count = await self._write(name, waiting)
        except Exception as error:  # broad: losing an event is no error, whatever is in it
            self._on_result("failed")
            logger.warning(
                "cannot record event %s of %s: %s",
                waiting.event.reason,
                waiting.about.metadata.name,
                error,
                exc_info=None if isinstance(error, ClusterError | ValidationError) else error,
            )
            return
        self._on_result("posted")
        self._counts.pop(name, None)  # so that the last one is the newest
        self._counts[name] = count
        if len(self._counts) > MAX_COUNTS:
            self._counts.popitem(last=False)

    async def _write(self, name: str, waiting: _Waiting) -> int:
        """Create the event, or count a repetition of it; returns its count.

        Raises:
            ClusterError: no answer, or a refusal.
            ValidationError: an answer that is no event.
        """
        if (known := self._counts.get(name)) is not None:
            count = known + waiting.count
            if (updated := await self._patch(name, waiting, self._repeated(waiting, count))).status != 404:
                updated.accept()
                return count
        created = await self._create(name, waiting)
        if created.status != 409:
            created.accept()
            return waiting.count
        # An earlier process posted it. To patch nothing is to read, which takes no other right.
        stored = await self._patch(name, waiting, {})
        stored.accept()
        count = _Stored.model_validate_json(stored.body, extra="ignore").count + waiting.count
        (await self._patch(name, waiting, self._repeated(waiting, count))).accept()
        return count

    async def _create(self, name: str, waiting: _Waiting) -> Answer:
        about, event, now = waiting.about, waiting.event, self._now()
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": _namespace(about)},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": about.kind,
                "name": about.metadata.name,
                "namespace": about.metadata.namespace,
                "uid": about.metadata.uid,
                "resourceVersion": about.metadata.resource_version,
            },
            "type": event.type,
            "reason": event.reason,
            "firstTimestamp": now,
            **self._repeated(waiting, waiting.count),
            "source": {"component": "shoal"},
            "reportingComponent": "shoal.dev/operator",
            "reportingInstance": self._reporter[:128],
        }
        return await self._transport.request("POST", _path(about), body=body)

    async def _patch(self, name: str, waiting: _Waiting, body: Mapping[str, object]) -> Answer:
        path = f"{_path(waiting.about)}/{name}"
        return await self._transport.request("PATCH", path, body=body, content_type=MERGE_PATCH)

    def _repeated(self, waiting: _Waiting, count: int) -> dict[str, object]:
        """What of an event each repetition changes."""
        message = waiting.event.message
        if waiting.combined:
            message = f"{count} more of these; the last: {message}"
        return {"lastTimestamp": self._now(), "message": message[:MAX_MESSAGE_LENGTH], "count": count}

    def _now(self) -> str:
        return stamp(self._wall())


def _name(about: Resource, reason: str, content: str) -> str:
    digest = hashlib.sha256(f"{about.metadata.uid}\0{reason}\0{content}".encode()).hexdigest()[:16]
    return f"{about.metadata.name}.{digest}"


def _namespace(about: Resource) -> str:
    """Events about cluster-scoped objects are in the namespace `default`, as those about nodes."""
    return about.metadata.namespace or "default"


def _path(about: Resource) -> str:
    return f"/api/v1/namespaces/{_namespace(about)}/events"
