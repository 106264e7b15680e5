"""kopf's watch: whatever ends kopf, it is started again, and nothing else ends."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import kopf
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from shoal.runtime import kopf_watch
from shoal.runtime.kopf_watch import KopfWatch
from tests.meanwhile import during

RAISED: list[Callable[[], BaseException]] = [
    lambda: RuntimeError("a watch ERROR that is no 410"),
    lambda: kopf.PermanentError("8 tries of 403"),
    lambda: SystemExit(1),
    asyncio.CancelledError,
]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kopf_watch, "RESTART_SECONDS", 0.01)
    monkeypatch.setattr(kopf_watch, "REFUSE_SECONDS", 0.01)


async def login() -> kopf.ConnectionInfo:
    return kopf.ConnectionInfo(server="https://127.0.0.1:1")


@pytest.mark.parametrize("fault", RAISED)
async def test_kopf_that_ends_is_started_again_and_ends_nothing(
    fault: Callable[[], BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B4: a watch ERROR or a minute of 5xx ended the process; and kopf cancels all later tasks of its loop."""
    began, again = 0, asyncio.Event()
    loop = asyncio.get_running_loop()

    async def operator(**_: Any) -> None:
        nonlocal began
        began += 1
        if began >= 3:
            loop.call_soon_threadsafe(again.set)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()  # as kopf does
        raise fault()

    monkeypatch.setattr(kopf, "operator", operator)
    restarts = []
    watch = KopfWatch(["trainingjobs"], "", lambda *_: None, login, on_restart=lambda: restarts.append(1))
    task = asyncio.create_task(watch.run())
    async with asyncio.timeout(60):
        await again.wait()
    assert len(restarts) >= 2
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_kopf_runs_beside_the_loop_and_stops_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    stopped = threading.Event()
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def operator(stop_flag: threading.Event, **_: Any) -> None:
        threads.append(threading.current_thread())
        loop.call_soon_threadsafe(started.set)
        await asyncio.to_thread(stop_flag.wait, 60)
        stopped.set()

    monkeypatch.setattr(kopf, "operator", operator)
    async with during(KopfWatch(["trainingjobs"], "ns", lambda *_: None, login).run()), asyncio.timeout(60):
        await started.wait()
    assert await asyncio.to_thread(stopped.wait, 60)
    assert threads[0] is not threading.main_thread()


async def test_handlers_tell_of_each_change() -> None:
    heard: list[tuple[str, ...]] = []
    watch = KopfWatch(["trainingjobs", "capacitypools"], "", lambda *change: heard.append(change), login)
    registry = watch._registry(asyncio.get_running_loop(), threading.Event(), asyncio.Event())
    handlers = registry._watching.get_all_handlers()
    assert {
        handler.selector.any_name or handler.selector.plural for handler in handlers if handler.selector
    } == {
        "trainingjobs",
        "capacitypools",
    }
    meta = {"name": "a", "namespace": "ns", "uid": "u", "resourceVersion": "7"}
    found = {"metadata": {**meta, "managedFields": [{}]}, "spec": {"suspend": False}, "status": {}}
    resource = kopf.Resource("shoal.dev", "v1alpha1", "trainingjobs")
    await handlers[0].fn(resource=resource, event={"type": "MODIFIED", "object": found})
    await asyncio.sleep(0)
    assert heard == [("trainingjobs", "ns", "a", "u", "7")]
    assert found == {"metadata": meta}, "kopf holds the rest until a full garbage collection"


VERBS = {"verbs": ["list", "watch"], "singularName": ""}
GROUP = {
    "name": "shoal.dev",
    "versions": [{"version": "v1alpha1"}],
    "preferredVersion": {"version": "v1alpha1"},
}
JOBS = "/apis/shoal.dev/v1alpha1/trainingjobs"
FOUND: dict[str, Any] = {
    "/api": {"versions": ["v1"]},
    "/api/v1": {"resources": [{**VERBS, "name": "namespaces", "kind": "Namespace", "namespaced": False}]},
    "/apis": {"groups": [GROUP]},
    "/apis/shoal.dev/v1alpha1": {
        "resources": [{**VERBS, "name": "trainingjobs", "kind": "TrainingJob", "namespaced": True}]
    },
    JOBS: {
        "metadata": {"resourceVersion": "9"},
        "items": [
            {"metadata": {"name": f"job-{each}", "uid": f"u{each}", "resourceVersion": "8"}}
            for each in range(3)
        ],
    },
}
"""What an API server says, as far as kopf asks."""


async def test_kopf_asks_for_metadata_and_keeps_nothing_of_an_object_that_changes_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In workers that lived for 5 s it held 34 MiB of 500 jobs that began at once, and at its start all of 20 MB."""
    loops, heard, all_heard = [], set[str](), asyncio.Event()
    accepted, watches = dict[str, str](), asyncio.Event()
    operator = KopfWatch._operator

    async def in_its_loop(self: KopfWatch, *given: Any) -> None:
        loops.append(asyncio.get_running_loop())
        await operator(self, *given)

    async def answer(request: web.Request) -> web.Response:
        accepted["watch" if "watch" in request.query else request.path] = request.headers.get("Accept", "")
        if "watch" in request.query:
            watches.set()
            await asyncio.Event().wait()
        if request.path == JOBS:
            assert int(request.query["limit"]) <= 10
        return web.json_response(FOUND[request.path])

    def changed(_plural: str, _namespace: str, name: str, *_more: str) -> None:
        heard.add(name)
        if len(heard) == len(FOUND[JOBS]["items"]):
            all_heard.set()

    async def workers_end() -> None:
        workers = [task for task in asyncio.all_tasks() if "worker for" in task.get_name()]
        await asyncio.gather(*workers)

    def settings() -> kopf.OperatorSettings:
        choices = own_settings()
        choices.queueing.idle_timeout = 600.0  # for kopf's own 5 s, which are few on a slow machine
        return choices

    own_settings = kopf.OperatorSettings
    monkeypatch.setattr(kopf, "OperatorSettings", settings)
    monkeypatch.setattr(KopfWatch, "_operator", in_its_loop)
    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as api, asyncio.timeout(120):

        async def login() -> kopf.ConnectionInfo:
            return kopf.ConnectionInfo(server=str(api.make_url("")).rstrip("/"))

        async with during(KopfWatch(["trainingjobs"], "", changed, login).run()):
            await all_heard.wait()
            await watches.wait()
            async with asyncio.timeout(60):
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(workers_end(), loops[0]))
    assert "as=PartialObjectMetadataList;" in accepted[JOBS]
    assert "as=PartialObjectMetadata;" in accepted["watch"]
    assert "PartialObjectMetadata" not in accepted["/apis"]


async def test_kopf_watches_where_there_is_nothing_yet() -> None:
    """The items of an empty list of metadata are null, of which kopf's watch ended."""
    watches = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if "watch" in request.query:
            watches.set()
            await asyncio.Event().wait()
        empty = {"metadata": {"resourceVersion": "9"}, "items": None}
        return web.json_response(empty if request.path == JOBS else FOUND[request.path])

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as api, asyncio.timeout(60):

        async def login() -> kopf.ConnectionInfo:
            return kopf.ConnectionInfo(server=str(api.make_url("")).rstrip("/"))

        async with during(KopfWatch(["trainingjobs"], "", lambda *_: None, login).run()):
            await watches.wait()


@pytest.mark.parametrize("early", [{}, {"resources": []}, None])
async def test_what_was_not_served_when_kopf_looked_is_watched_later(early: dict[str, Any] | None) -> None:
    """It looks once, and then ran on without a watch. `early`: what discovery says at first; None: 404."""
    asked, heard, told = 0, asyncio.Event(), list[int]()

    async def answer(request: web.Request) -> web.Response:
        nonlocal asked
        if "watch" in request.query:
            await asyncio.Event().wait()
        if request.path != "/apis/shoal.dev/v1alpha1":
            return web.json_response(FOUND[request.path])
        asked += 1
        if asked > 1:
            return web.json_response(FOUND[request.path])
        return web.json_response(early or {}, status=200 if early is not None else 404)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as api, asyncio.timeout(120):

        async def login() -> kopf.ConnectionInfo:
            return kopf.ConnectionInfo(server=str(api.make_url("")).rstrip("/"))

        watch = KopfWatch(
            ["trainingjobs"], "", lambda *_: heard.set(), login, on_restart=lambda: told.append(asked)
        )
        async with during(watch.run()):
            await heard.wait()
    assert told == [1]


async def test_a_resource_that_is_forbidden_for_a_while_ends_no_watch_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a minute of 403 kopf gave up its watch, and it and all others hung: nothing was witnessed any more."""
    plurals = ("trainingjobs", "speedprofiles", "capacitypools")
    served = [{**VERBS, "name": each, "kind": each, "namespaced": True} for each in plurals]
    refusals, watched, told = 10, Counter[str](), list[dict[str, int]]()
    all_again = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        nonlocal refusals
        plural = request.path.rpartition("/")[2]
        if plural not in plurals:
            return web.json_response(
                {"resources": served} if request.path.endswith("v1alpha1") else FOUND[request.path]
            )
        if plural == "capacitypools" and refusals:
            refusals -= 1
            return web.json_response({"kind": "Status", "code": 403}, status=403)
        if "watch" not in request.query:
            return web.json_response({"metadata": {"resourceVersion": "9"}, "items": []})
        watched[plural] += 1
        if told and all(watched[each] > told[0].get(each, 0) for each in plurals):
            all_again.set()
        await asyncio.Event().wait()
        raise AssertionError

    def settings() -> kopf.OperatorSettings:
        choices = own_settings()
        choices.networking.error_backoffs = [0.01] * 8  # for kopf's own, which are 54 s together
        return choices

    own_settings = kopf.OperatorSettings
    monkeypatch.setattr(kopf, "OperatorSettings", settings)
    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as api, asyncio.timeout(60):

        async def login() -> kopf.ConnectionInfo:
            return kopf.ConnectionInfo(server=str(api.make_url("")).rstrip("/"))

        watch = KopfWatch(plurals, "", lambda *_: None, login, on_restart=lambda: told.append(dict(watched)))
        async with during(watch.run()):
            await all_again.wait()
    assert (refusals, len(told)) == (0, 1)


def test_kopf_kills_no_process_that_it_does_not_end_in() -> None:
    """By default it does, with SIGKILL, 10 minutes after one of its watches has failed and others hang."""
    assert kopf.OperatorSettings().process.ultimate_exiting_timeout == 600
    assert kopf_watch._settings().process.ultimate_exiting_timeout is None
