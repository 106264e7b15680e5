"""The reflector in virtual time, against a server that cuts, compacts, refuses and falls silent."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from shoal.api.kube import Pod
from shoal.api.training_job import TrainingJob
from shoal.cluster.cache import Cache
from shoal.cluster.pages import PAGE
from shoal.cluster.reflector import (
    FAILURES_BEFORE_RELIST,
    SILENCE_SECONDS,
    YIELD_BYTES,
    Reflector,
    Source,
)
from shoal.cluster.transport import Answer, Query
from shoal.errors import StoreWentBack, Unavailable
from tests.meanwhile import during
from tests.unit.cluster.servers import SmallServer
from tests.unit.policy import build

pytestmark = pytest.mark.looptime


class Watched:
    """A server, a cache and the reflector between them."""

    def __init__(self, shared: Callable[[Pod | None, Pod], Pod] = lambda _old, new: new) -> None:
        self.server = SmallServer()
        self.cache: Cache[Pod] = Cache(
            lambda _old, _new, _ours: None, {"node": lambda pod: pod.spec.node_name}, shared=shared
        )
        self.restarts: list[str] = []
        self.unread = 0
        self.unreadable: list[tuple[str, str]] = []
        source = Source("/api/v1/pods", Pod, "shoal.dev/job")
        self.reflector = Reflector(
            self.server,
            source,
            self.cache,
            on_restart=self.restarts.append,
            on_unread=self._count,
            on_unreadable=lambda found, why: self.unreadable.append((found["metadata"]["name"], why)),
        )

    @classmethod
    def of(cls, pods: int, **fields: Any) -> Watched:
        """Where there are so many pods, in pages as large as they are asked for."""
        w = cls()
        w.server.page_size = 10_000
        for number in range(pods):
            w.server.set(f"pod-{number}", **fields)
        return w

    def _count(self) -> None:
        self.unread += 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Watched]:
        async with during(self.reflector.run()):
            yield self

    @property
    def names(self) -> set[str]:
        return {pod.metadata.name for pod in self.cache.all()}


async def test_lists_by_pages_then_follows() -> None:
    w = Watched()
    for name in "abcde":
        w.server.set(name)
    async with w.running():
        await w.reflector.synced.wait()
        assert w.names == set("abcde")
        w.server.set("f", status={"phase": "Running"})
        w.server.remove("a")
        w.server.set("b", status={"phase": "Failed"})
        await asyncio.sleep(1)
        assert w.names == set("bcdef")
        found = w.cache.get("b", "ns")
        assert found is not None
        assert found.status.phase == "Failed"
        assert w.server.lists == 1


@pytest.mark.parametrize("order", [("uid", "resourceVersion"), ("resourceVersion", "uid")])
async def test_what_the_cache_has_already_is_not_read_again(order: tuple[str, str]) -> None:
    """Each write of this process is told by the watch, too, and to read it took as long as to take the answer."""
    w = Watched()
    async with w.running():
        await w.reflector.synced.wait()
        await asyncio.sleep(1)
        pod = w.server.set("a")
        await asyncio.sleep(1)

        def event(version: int, **metadata: object) -> bytes:
            identity = {"uid": pod["metadata"]["uid"], "resourceVersion": str(version)}
            meta = {"name": "a", "namespace": "ns", **{each: identity[each] for each in order}, **metadata}
            found = {"type": "MODIFIED", "object": {"metadata": meta, "status": "what cannot be read"}}
            return json.dumps(found, separators=(",", ":")).encode() + b"\n"

        known = w.server.version
        w.server.send(event(known))
        await asyncio.sleep(1)
        assert w.unreadable == []
        # A label that looks like the identity hides nothing: the object is read.
        w.server.send(event(known + 1, labels={each: {"uid": "x"}.get(each, "1") for each in order}))
        w.server.send(event(known + 1))
        await asyncio.sleep(1)
        assert [name for name, _ in w.unreadable] == ["a", "a"]
        assert w.restarts == []


async def test_broken_watch_continues_from_its_version() -> None:
    w = Watched()
    w.server.set("a")
    async with w.running():
        await asyncio.sleep(1)
        w.server.cut()
        w.server.set("b")
        w.server.remove("a")
        await asyncio.sleep(5)
        assert w.names == {"b"}
        assert w.server.lists == 1
        assert w.restarts == ["broken"]


async def test_server_that_has_too_much_to_do_is_given_the_time_that_it_asks_for() -> None:
    """And it is not asked for a list instead, which is more work."""
    w = Watched()
    w.server.set("a")
    async with w.running():
        await asyncio.sleep(1)
        asked = []

        def refuse(method: str, path: str) -> Unavailable:
            asked.append(f"{method} {path}")
            return Unavailable("429: too many requests", retry_after=30.0)

        w.server.fault = refuse
        w.server.cut()
        await asyncio.sleep(120)
        assert 3 <= len(asked) <= 5
        w.server.fault = lambda _method, _path: None
        w.server.set("b")
        await asyncio.sleep(37)
        assert w.names == {"a", "b"}
        assert w.server.lists == 1


async def test_objects_deleted_in_the_gap_are_dropped() -> None:
    w = Watched()
    w.server.set("a")
    w.server.set("b")
    async with w.running():
        await asyncio.sleep(1)
        w.server.cut()
        w.server.remove("a")
        w.server.set("c")
        w.server.compact()
        await asyncio.sleep(5)
        assert w.names == {"b", "c"}
        assert w.server.lists == 2
        assert "expired" in w.restarts


@pytest.mark.parametrize("code", [410, 500])
async def test_error_event_restarts_the_watch(code: int) -> None:
    w = Watched()
    w.server.set("a")
    async with w.running():
        await asyncio.sleep(1)
        w.server.send(b'{"type":"ERROR","object":{"kind":"Status","code":%d,"message":"no"}}\n' % code)
        w.server.set("b")
        await asyncio.sleep(5)
        assert w.names == {"a", "b"}
        assert w.server.lists == (2 if code == 410 else 1)


async def test_server_that_expires_what_it_has_just_listed_is_asked_less_and_less() -> None:
    w = Watched()
    w.server.set("a")
    w.server.delay, w.server.oldest = 0.001, 1_000_000
    async with w.running():
        await asyncio.sleep(60)
        assert w.server.lists < 20
        w.server.oldest = 0
        w.server.set("b")
        await asyncio.sleep(31)
        assert w.names == {"a", "b"}


async def test_version_that_the_server_cannot_continue_from_is_listed_again() -> None:
    w = Watched()
    w.server.set("a")
    async with w.running():
        await asyncio.sleep(1)
        for _ in range(FAILURES_BEFORE_RELIST):
            w.server.send(b'{"type":"ERROR","object":{"kind":"Status","code":500,"message":"no"}}\n')
            await asyncio.sleep(10)
        assert w.server.lists == 2


async def test_watch_without_bookmarks_is_restarted() -> None:
    w = Watched()
    w.server.set("a")
    async with w.running():
        await asyncio.sleep(1)
        for _ in range(5):
            w.server.bookmark()
            await asyncio.sleep(SILENCE_SECONDS - 5)
        assert w.restarts == []
        w.server.watches[0].put_nowait = lambda _line: None  # type: ignore[method-assign]  no line arrives
        w.server.set("b")
        await asyncio.sleep(SILENCE_SECONDS + 5)
        assert w.names == {"a", "b"}
        assert w.restarts == ["broken"]


async def test_denied_list_is_retried() -> None:
    w = Watched()
    w.server.set("a")
    w.server.fault = lambda method, _path: (
        Answer(403, b'{"message": "forbidden"}') if method == "GET" else None
    )
    async with w.running():
        assert not await w.reflector.refresh()
        assert w.reflector.denied
        assert not w.reflector.synced.is_set()
        w.server.fault = lambda _method, _path: None
        await asyncio.sleep(31)
        assert w.names == {"a"}
        assert not w.reflector.denied


async def test_revoked_permission_is_detected() -> None:
    w = Watched()
    w.server.set("a")
    async with w.running():
        await w.reflector.synced.wait()
        w.server.fault = lambda _method, _path: Answer(403, b'{"message": "forbidden"}')
        w.server.cut()
        await asyncio.sleep(2)
        assert w.reflector.denied
        assert w.names == {"a"}


async def test_unknown_field_of_a_newer_schema_is_ignored() -> None:
    spec = build.job_manifest(fieldOfTheNextVersion={"a": 1})["spec"]
    server = SmallServer()
    cache: Cache[TrainingJob] = Cache(lambda _old, _new, _ours: None)
    reflector = Reflector(server, Source("/jobs", TrainingJob), cache)
    server.set("a", kind="TrainingJob", spec=spec)
    async with during(reflector.run()):
        await reflector.synced.wait()
        server.set("b", kind="TrainingJob", spec=spec)
        await asyncio.sleep(1)
    assert {job.metadata.name for job in cache.all()} == {"a", "b"}


async def test_unparsable_object_is_complained_about_once(caplog: pytest.LogCaptureFixture) -> None:
    w = Watched()
    w.server.set("bad", status={"conditions": "?"})
    async with w.running():
        for _ in range(3):
            await w.reflector.refresh()
        complaints = [each for each in caplog.records if each.levelname == "ERROR"]
        assert len(complaints) == 1
        w.server.set("bad", status={"conditions": "!"})
        await asyncio.sleep(1)
        assert len([each for each in caplog.records if each.levelname == "ERROR"]) == 2
        uid = w.server.objects["bad"]["metadata"]["uid"]
        assert w.cache.is_unread(uid)
        w.server.set("bad", status={"phase": "Running"})
        await asyncio.sleep(1)
        assert not w.cache.is_unread(uid)


@pytest.mark.parametrize("depth", [250, 5000])
async def test_object_that_is_nested_too_deeply_does_not_stop_the_others(depth: int) -> None:
    """Neither Python's parser nor pydantic's reads it, and any user may write such arguments."""
    w = Watched()

    def text(name: str, version: int, labels: str = "{}") -> str:
        where = f'"name":"{name}","namespace":"ns","uid":"{name}","resourceVersion":"{version}"'
        return f'{{"metadata":{{{where},"labels":{labels}}}}}'

    deep = '{"a]\\"[":' + "[" * depth + "]" * depth + "}"
    items = ",".join([text("a", 7, deep), text("b", 7)])
    page = f'{{"metadata":{{"resourceVersion":"9"}},"items":[{items}]}}'
    answers = [Answer(200, page.encode())]
    w.server.fault = lambda _method, _path: answers.pop() if answers else None
    async with w.running():
        await asyncio.sleep(1)
        w.server.send(f'{{"type":"MODIFIED","object":{text("a", 10, deep)}}}\n'.encode())
        w.server.send(f'{{"type":"ADDED","object":{text("c", 11)}}}\n'.encode())
        await asyncio.sleep(1)
        assert w.names == {"b", "c"}
        assert [name for name, _ in w.unreadable] == ["a", "a"]
        assert "recursion limit" in w.unreadable[0][1]
        assert w.reflector.readable


async def test_unparsable_object_does_not_stop_the_others() -> None:
    w = Watched()
    w.server.set("a", status={"phase": "Running"})
    w.server.set("bad", status={"conditions": "?"})
    async with w.running():
        await w.reflector.synced.wait()
        assert w.names == {"a"}
        [(name, why)] = w.unreadable
        assert name == "bad"
        assert "status.conditions" in why
        w.server.set("a", status={"conditions": "?"})
        w.server.set("c")
        await asyncio.sleep(1)
        assert w.names == {"a", "c"}
        w.server.cut()
        w.server.compact()
        w.server.set("d")
        await asyncio.sleep(5)
        assert w.names == {"a", "c", "d"}
        w.server.remove("a")
        await asyncio.sleep(1)
        assert w.names == {"c", "d"}


@pytest.mark.parametrize("seed", range(25))
async def test_cache_converges_after_random_faults(seed: int) -> None:
    dice, w = random.Random(seed), Watched()
    broken = False

    def fault(_method: str, _path: str) -> Exception | None:
        return Unavailable("chaos") if broken and dice.random() < 0.5 else None

    w.server.fault = fault
    async with w.running():
        for _ in range(60):
            broken = dice.random() < 0.7
            name = dice.choice("abcdefgh")
            match dice.choice(["set", "set", "remove", "cut", "compact", "wait"]):
                case "set":
                    w.server.set(name)
                case "remove" if name in w.server.objects:
                    w.server.remove(name)
                case "cut":
                    w.server.cut()
                case "compact":
                    w.server.compact()
                case _:
                    await asyncio.sleep(dice.random() * 3)
        broken = False
        await asyncio.sleep(SILENCE_SECONDS * 2)
        known = {pod.metadata.uid: pod.metadata.resource_version for pod in w.cache.all()}
        truth = {o["metadata"]["uid"]: o["metadata"]["resourceVersion"] for o in w.server.objects.values()}
        assert known == truth


async def test_watch_that_ends_at_once_is_opened_again_after_a_pause() -> None:
    """B7: a proxy, or an API server that shuts down, ends each watch with 200 and no line."""
    w = Watched()
    w.server.set("a")
    opened = 0

    @asynccontextmanager
    async def ends(_path: str, _query: Query) -> AsyncIterator[AsyncIterator[bytes]]:
        nonlocal opened
        opened += 1

        async def nothing() -> AsyncIterator[bytes]:
            return
            yield b""

        yield nothing()

    follow, w.server.stream = w.server.stream, ends  # type: ignore[method-assign]
    async with w.running():
        await asyncio.sleep(60)
        assert opened < 20
        w.server.set("b")
        w.server.stream = follow  # type: ignore[method-assign]
        await asyncio.sleep(31)
        assert w.names == {"a", "b"}


@pytest.mark.parametrize(
    "line",
    [
        b'{"type":"MODIFIED","object":{"metadata":{"na',  # cut off by a proxy that ends the stream as if complete
        b"<html>502</html>\n",
        b"[]\n",
        b'{"type":"ADDED","object":{"metadata":{"name":"x","uid":"x","resourceVersion":"abc"}}}\n',
        b'{"object":{"kind":"Status","code":500,"message":"no"}, "type":"ERROR"}\n',
    ],
)
async def test_line_that_is_no_event_restarts_the_watch(line: bytes) -> None:
    """B8: such a line ended the process."""
    w = Watched()
    w.server.set("a")
    async with w.running():
        await asyncio.sleep(1)
        w.server.send(line)
        w.server.set("b")
        await asyncio.sleep(5)
        assert w.names == {"a", "b"}
        assert w.restarts == ["broken"]


async def test_error_with_another_order_of_keys_expires_the_version() -> None:
    w = Watched()
    async with w.running():
        await asyncio.sleep(1)
        w.server.send(b'{"object": {"kind":"Status","code":410,"message":"too old"},  "type": "ERROR"}\n')
        await asyncio.sleep(1)
        assert w.server.lists == 2


async def test_refresh_reads_what_a_silent_watch_has_not_reported() -> None:
    w = Watched()
    w.server.set("a")
    async with w.running():
        await w.reflector.synced.wait()
        await asyncio.sleep(1)
        w.server.watches[0].put_nowait = lambda _line: None  # type: ignore[method-assign]  it is dead
        w.server.remove("a")
        w.server.set("b")
        await asyncio.sleep(1)
        assert w.names == {"a"}
        assert await w.reflector.refresh()
        assert w.names == {"b"}


async def test_refresh_waits_for_a_list_that_began_after_it() -> None:
    w = Watched()
    w.server.set("a")
    w.server.delay = 2.0
    async with w.running():
        await asyncio.sleep(1)  # the first list is under way
        refreshed = asyncio.create_task(w.reflector.refresh())
        await w.reflector.synced.wait()
        w.server.set("b")
        await refreshed
        assert w.names == {"a", "b"}
        assert w.server.lists == 2


async def test_refresh_goes_on_until_a_list_succeeds() -> None:
    w = Watched()
    w.server.set("a")
    async with w.running():
        await w.reflector.synced.wait()
        w.server.fault = lambda _method, _path: Unavailable("chaos")
        refreshed = asyncio.create_task(w.reflector.refresh())
        await asyncio.sleep(60)
        assert not refreshed.done()
        w.server.fault = lambda _method, _path: None
        await asyncio.sleep(31)
        assert await refreshed


async def test_large_batch_of_events_lets_others_have_the_loop_meanwhile() -> None:
    w = Watched()
    passes, taken = 0, Counter[int]()
    w.reflector = Reflector(
        w.server,
        Source("/api/v1/pods", Pod, "shoal.dev/job"),
        Cache(lambda _old, _new, _ours: taken.update([passes])),
    )
    async with w.running():
        await w.reflector.synced.wait()
        await asyncio.sleep(1)
        for number in range(400):  # 2 MiB: what a connection has buffered while the loop was held
            w.server.set(f"pod-{number}", status={"message": 5000 * "x"})
        while passes < 500:
            await asyncio.sleep(0)
            passes += 1
    assert taken.total() == 400
    assert max(taken.values()) * 5000 <= YIELD_BYTES + 5000


async def test_long_list_lets_others_have_the_loop_meanwhile() -> None:
    """A page of 100 pods takes 5 ms, and one of 500 took 30 ms, and all of them together at the end."""
    w = Watched()
    passes, taken = 0, Counter[int]()
    w.server.page_size = 10_000
    for number in range(450):
        w.server.set(f"pod-{number}")
    w.reflector = Reflector(
        w.server,
        Source("/api/v1/pods", Pod, "shoal.dev/job"),
        Cache(lambda _old, _new, _ours: taken.update([passes])),
    )
    w.server.delay = 0.01
    async with w.running():
        while not w.reflector.synced.is_set():
            await asyncio.sleep(0.001)
            passes += 1
    assert taken.total() == 450
    assert max(taken.values()) == PAGE


async def test_object_that_cannot_be_taken_keeps_no_other_from_it(caplog: pytest.LogCaptureFixture) -> None:
    """What a user writes must not end the process that all depend on, whatever is made of it."""

    def fails(_old: Pod | None, new: Pod) -> Pod:
        if new.status.phase == "odd":
            raise OverflowError("date value out of range")
        return new

    w = Watched(fails)
    w.server.set("a")
    w.server.set("b", status={"phase": "odd"})
    async with w.running():
        await w.reflector.synced.wait()
        assert w.names == {"a"}
        w.server.set("a", status={"phase": "odd"})
        w.server.set("c")
        await asyncio.sleep(1)
        assert w.names == {"a", "c"}
        assert w.cache.is_unread(known_uid(w, "a"))
        w.reflector.request_refresh()
        await asyncio.sleep(1)
        assert w.names == {"a", "c"}  # as it was last known
        assert w.unread == 2
        w.server.set("a", status={"phase": "Running"})
        await asyncio.sleep(1)
        assert not w.cache.is_unread(known_uid(w, "a"))
    assert "cannot take ns/b of /api/v1/pods" in caplog.text
    assert "date value out of range" in caplog.text


def known_uid(w: Watched, name: str) -> str:
    found = w.cache.get(name, "ns")
    assert found is not None
    return found.metadata.uid


async def test_list_is_read_in_pages_that_are_not_too_long() -> None:
    """Of a hundred pods, each could be told in 9 MB."""
    w = Watched()
    w.server.page_size = 10_000
    for number in range(120):
        large = number in range(40, 60)
        w.server.set(f"pod-{number}", status={"message": "x" * (90_000 if large else 100)})
    w.server.most_bytes = 100_000
    asked: list[str] = []
    w.server.fault = lambda method, _path: asked.append(method)
    async with w.running():
        await asyncio.wait_for(w.reflector.synced.wait(), 60)
        assert len(w.names) == 120
        assert w.restarts == []
        assert len(asked) < 60, "what is small is read in large pages again"


async def test_object_that_is_too_long_to_be_read_is_no_end() -> None:
    w = Watched()
    w.server.set("a", status={"message": "x" * 1000})
    w.server.most_bytes = 1000
    async with w.running():
        await asyncio.sleep(60)
        assert 5 <= len(w.restarts) <= 15
        assert set(w.restarts) == {"unavailable"}
        w.server.remove("a")
        await asyncio.sleep(31)
        assert w.reflector.readable


async def test_list_that_outlasts_its_token_begins_anew_with_larger_pages(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At 5 s a page, 70 of them were never read within the five minutes that etcd keeps a version."""
    w = Watched.of(1500)
    w.server.delay, w.server.token_seconds = 25.0, 300.0
    async with w.running():
        await asyncio.wait_for(w.reflector.synced.wait(), 600)
        assert len(w.names) == 1500
        assert w.server.lists == 2
        assert w.restarts == ["expired"]
    assert "page 14 of a list is gone after 350 s; the next has pages of 400" in caplog.text


async def test_pages_that_take_too_long_become_smaller_again() -> None:
    """They only grew: what was too large for a slow server was asked for without end, though it had recovered."""
    w = Watched.of(1400)
    w.server.object_seconds, w.server.token_seconds = 0.25, 300.0
    async with w.running():
        await asyncio.sleep(1800)
        assert not w.reflector.synced.is_set(), "no page size is both fast enough and few enough"
        assert 400 in w.server.limits
        w.server.object_seconds = 0.1
        await asyncio.wait_for(w.reflector.synced.wait(), 1800)
        assert len(w.names) == 1400
        w.server.object_seconds = 0.0
        for _ in range(3):
            await w.reflector.refresh()
        w.server.limits.clear()
        await w.reflector.refresh()
        assert set(w.server.limits) == {PAGE}


async def test_pages_that_outlast_a_token_and_are_too_long_then_are_asked_for_once() -> None:
    w = Watched.of(1500, status={"message": "x" * 1000})
    w.server.delay, w.server.token_seconds, w.server.most_bytes = 22.0, 300.0, 250_000
    async with w.running():
        await asyncio.wait_for(w.reflector.synced.wait(), 1800)
        assert len(w.names) == 1500
        assert w.server.limits.count(400) == 1, "of each larger page, half would be asked for after it"


async def test_pages_of_large_objects_are_not_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second one was thrown away, since the next was twice as long again."""
    monkeypatch.setattr("shoal.cluster.pages.PAGE_BYTES", 100_000)
    w = Watched.of(600, status={"message": "x" * 1200})
    async with w.running():
        await asyncio.wait_for(w.reflector.synced.wait(), 60)
        assert len(w.names) == 600
        assert len(w.server.limits) <= 1 + 600 / 50


async def test_few_large_objects_are_asked_for_again_once() -> None:
    """The last page has fewer objects than were asked for: their size says how many fit."""
    w = Watched.of(5, status={"message": "x" * 1_000_000})
    async with w.running():
        await w.reflector.synced.wait()
    assert w.server.limits == [PAGE, 1, 1, 1, 1, 1]


async def test_pages_that_outlast_a_token_grow_beyond_what_is_parsed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the list would never be read: each page that was large enough was thrown away."""
    monkeypatch.setattr("shoal.cluster.pages.PAGE_BYTES", 15_000)
    w = Watched.of(1500)
    w.server.delay, w.server.token_seconds = 25.0, 300.0
    async with w.running():
        await asyncio.wait_for(w.reflector.synced.wait(), 600)
        assert len(w.names) == 1500
        assert w.restarts == ["expired"]


async def test_page_that_is_not_answered_is_asked_for_again_and_those_before_it_are_not() -> None:
    """Where one of twenty requests was shed, 10,000 pods were listed after 41 minutes: each began at the first page."""
    w, dice = Watched.of(50 * PAGE), random.Random(1)
    asked: list[str] = []

    def shed(method: str, _path: str) -> Unavailable | None:
        asked.append(method)
        return Unavailable("429: too many requests", retry_after=1.0) if dice.random() < 0.2 else None

    w.server.fault = shed
    async with w.running():
        await asyncio.wait_for(w.reflector.synced.wait(), 60)
        assert len(w.names) == 50 * PAGE
        assert w.server.lists == 1
        assert len(asked) < 80


async def test_page_that_is_never_answered_ends_the_list_before_its_token_does() -> None:
    """Not as one whose pages are too small to be read in time."""
    w = Watched.of(3 * PAGE)
    w.server.token_seconds = 300.0
    async with w.running():
        await w.reflector.synced.wait()
        await asyncio.sleep(1)
        w.server.fault = lambda _method, _path: setattr(w.server, "delay", 31.0)  # from its second page on
        w.reflector.request_refresh()
        await asyncio.sleep(270)
        assert w.restarts == ["unavailable"]
        w.server.delay, w.server.fault = 0.0, lambda _method, _path: None
        assert await asyncio.wait_for(w.reflector.refresh(), 61)
        assert set(w.server.limits) == {PAGE}


async def test_page_that_a_server_in_trouble_puts_off_ends_the_list_before_its_token_does() -> None:
    """It was waited for seven times a minute, beyond that, and each next list had pages four times as large."""
    w = Watched.of(3 * PAGE)
    w.server.token_seconds = 300.0
    answered = iter([None])

    def shed(_method: str, _path: str) -> Unavailable | None:
        return next(answered, Unavailable("429: too many requests", retry_after=60.0))

    w.server.fault = shed
    async with w.running():
        await asyncio.sleep(300)
        assert set(w.restarts) == {"unavailable"}
        w.server.fault = lambda _method, _path: None
        await asyncio.wait_for(w.reflector.synced.wait(), 80)
        assert set(w.server.limits) == {PAGE}


@pytest.mark.parametrize("asked", [10.0, None])
async def test_whoever_wants_lists_again_and_again_has_them_no_sooner_from_a_server_in_trouble(
    asked: float | None,
) -> None:
    """As kopf does for each change that the cache has not seen: there were four a second."""
    w = Watched()
    lists = 0

    def fault(_method: str, _path: str) -> Unavailable:
        nonlocal lists
        lists += 1
        return Unavailable("429", asked, of_one=True)

    async with w.running():
        await asyncio.sleep(1)
        w.server.fault = fault
        for _ in range(300):
            w.reflector.request_refresh()
            await asyncio.sleep(0.4)
        assert 8 <= lists <= 20
        w.server.fault = lambda _method, _path: None
        await asyncio.sleep(31)
        before = w.server.lists
        w.reflector.request_refresh()
        await asyncio.sleep(0.2)
        assert w.server.lists == before + 1


async def test_list_that_is_wanted_first_waits_for_no_pause_of_an_outage() -> None:
    """A standby's pauses have become long when the API server is back, and it leads."""
    w = Watched()
    w.server.fault = lambda _method, _path: Unavailable("no connection")
    async with w.running():
        await asyncio.sleep(600)
        w.server.fault = lambda _method, _path: None
        assert await asyncio.wait_for(w.reflector.refresh(), 0.5)


async def test_cache_is_not_readable_while_any_refresh_waits() -> None:
    w = Watched()
    async with w.running():
        await w.reflector.synced.wait()
        before = w.reflector.begun
        await w.reflector.refresh()
        w.server.delay = 5.0
        first = asyncio.create_task(w.reflector.refresh())
        await asyncio.sleep(1)
        assert await w.reflector.refresh(before - 1), "a list that ended already is enough"
        assert not w.reflector.readable
        await first
        assert w.reflector.readable


@pytest.mark.parametrize("kind", ["DELETED", "a list"])
async def test_what_fails_with_an_object_that_is_gone_ends_nothing(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    w = Watched()

    def changed(_old: Pod | None, new: Pod | None, _ours: bool) -> None:
        if new is None:
            raise KeyError("what is made of it")

    w.reflector._cache = w.cache = Cache(changed)
    for name in "abc":
        w.server.set(name)
    async with w.running():
        await w.reflector.synced.wait()
        await asyncio.sleep(2)
        if kind == "a list":
            w.server.watches[0].put_nowait = lambda _line: None  # type: ignore[method-assign]  it is dead
            w.reflector.request_refresh()
        w.server.remove("a")
        w.server.remove("b")
        w.server.set("d")
        await asyncio.sleep(10)
        assert w.names == {"c", "d"}
        assert set(w.restarts) == {"failed"}
    assert "what is made of it" in caplog.text


@pytest.mark.parametrize("seen", ["bookmark", "list"])
async def test_store_that_went_back_ends_the_process(seen: str) -> None:
    """As after a restore of etcd: what is newer in the caches never was, and what comes would be too old for them."""
    w = Watched()
    w.server.set("a")
    running = asyncio.create_task(w.reflector.run())
    await asyncio.sleep(1)
    before = w.server.version
    for _ in range(5):
        w.server.set("b")
    await asyncio.sleep(1)
    w.server.version = before
    if seen == "bookmark":
        w.server.bookmark()
    else:
        w.server.send(b'{"type":"ERROR","object":{"kind":"Status","code":410,"message":"no"}}\n')
    with pytest.raises(StoreWentBack, match="etcd was restored"):
        await asyncio.wait_for(running, 60)


@pytest.mark.parametrize("since", ["changed", "cannot be read", "deleted"])
async def test_object_that_is_older_than_it_was_in_a_list_that_is_not_ends_the_process(since: str) -> None:
    """etcd restored with `--bump-revision`: its version is far ahead, and each object has that of the backup."""
    w = Watched.of(3)
    of_the_backup = w.server.objects["pod-1"]
    running = asyncio.create_task(w.reflector.run())
    await asyncio.sleep(1)
    match since:
        case "changed":
            w.server.set("pod-1", status={"phase": "Failed"})
        case "cannot be read":
            w.server.set("pod-1", status="what cannot be read")
        case _:
            w.server.remove("pod-1")
            of_the_backup["metadata"]["resourceVersion"] = "102"
    await asyncio.sleep(1)
    w.server.objects["pod-1"] = of_the_backup
    w.server.version += 10**9
    w.server.compact()
    w.server.cut()
    with pytest.raises(
        StoreWentBack, match=r"pod-1 at version 102 .* after version 104 .* etcd was restored"
    ):
        await asyncio.wait_for(running, 60)


async def test_object_that_changed_while_it_was_listed_is_no_store_that_went_back() -> None:
    """The answer to a write of this process is newer than the list, of which a later page has the object as it was."""
    w = Watched.of(3 * PAGE)
    async with w.running():
        await w.reflector.synced.wait()
        w.server.delay = 1.0
        listed = asyncio.create_task(w.reflector.refresh())
        await asyncio.sleep(1.5)
        for name in ("pod-150", "pod-299"):
            w.cache.put(Pod.model_validate(w.server.set(name, status={"phase": "Failed"})))
        w.cache.drop(known_uid(w, "pod-250"))
        assert await listed
        assert len(w.names) == 3 * PAGE - 1
        assert w.server.lists == 2
