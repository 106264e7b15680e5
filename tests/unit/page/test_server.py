"""The page's answers over HTTP: files, JSON, a stream, and headers that let it load nothing from elsewhere."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from shoal.api.training_job import TrainingJob
from shoal.page import Page
from shoal.page.server import FILES, STATIC
from shoal.process.endpoints import serving
from tests.meanwhile import during
from tests.unit.policy.build import NOW, job

RUNNING = {"phase": "Running", "workers": {"ready": 2}}


@pytest.fixture
def jobs() -> list[TrainingJob]:
    return [job(RUNNING)]


@pytest.fixture
def page(jobs: list[TrainingJob]) -> Page:
    """One that looks when the test says so, so that no look falls between two events."""
    return Page(lambda: jobs, lambda: (), wall=lambda: NOW)


@pytest.fixture
async def session(page: Page) -> AsyncIterator[aiohttp.ClientSession]:
    async with serving(0, page.answers) as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        yield session


async def test_what_is_told_is_made_once_for_all_who_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred open pages cost the operator's event loop no more than one, but for the sending."""
    made = []
    monkeypatch.setattr(
        "shoal.page.server.overview", lambda *_: made.append("overview") or {"now": 1, "jobs": []}
    )
    monkeypatch.setattr(
        "shoal.page.server.detail", lambda *_: made.append("job") or {"now": 1, "name": "digits"}
    )
    page = Page(lambda: [job(RUNNING)], lambda: (), wall=lambda: NOW)
    seen = []
    for _ in range(3):
        page.look()
        told = await asyncio.gather(*(page.tell(topic) for topic in ("", "team/digits") * 100))
        assert len(set(map(id, told))) == 2
        seen.append(told[:2])
    assert made == ["overview", "job"] * 3
    assert all(one is two for each in seen for one, two in zip(each, seen[0], strict=True)), (
        "nothing has changed"
    )


async def test_the_loop_turns_while_much_is_made() -> None:
    """Each job that somebody looks at is made in a turn of its own, so that a pod's loss waits for one at most."""
    page = Page(lambda: [job(RUNNING)], lambda: (), wall=lambda: NOW)
    telling = asyncio.gather(*(page.tell(f"team/job-{number}") for number in range(20)))
    turns = 0
    while not telling.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 20


@pytest.mark.parametrize(("seconds", "pause"), [(0.001, 2.0), (0.05, 8.0)])
async def test_the_more_the_pages_cost_the_less_often_they_are_made(seconds: float, pause: float) -> None:
    """A tenth of the event loop's time, whatever is open."""
    now = 0.0

    def clock() -> float:  # each look, and each job, takes so long
        nonlocal now
        now += seconds
        return now

    page = Page(lambda: [job(RUNNING)], lambda: (), wall=lambda: NOW, clock=clock)
    page.look()
    for number in range(15):
        await page.tell(f"team/job-{number}")
    page.look()
    assert page.pause == pytest.approx(pause)
    page.look()
    assert page.pause == 2.0


async def test_what_nobody_looks_at_is_forgotten() -> None:
    page = Page(lambda: [job({"phase": ""})], lambda: (), wall=lambda: NOW)
    first = await page.tell("team/digits")
    page.look()
    assert await page.tell("team/digits") is first
    page.look()
    page.look()
    assert await page.tell("team/digits") is not first


@pytest.mark.parametrize("path", FILES)
async def test_files_load_nothing_from_elsewhere(session: aiohttp.ClientSession, path: str) -> None:
    async with session.get(path) as answer:
        assert answer.status == 200
        policy = answer.headers["Content-Security-Policy"]
        text = await answer.text()
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert set(re.findall(r"https?://[^\s\"'`]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<script>|<style>|\sstyle=|\son[a-z]+=", text)


def test_the_html_refers_only_to_files_that_there_are() -> None:
    html = (STATIC / "index.html").read_text(encoding="utf-8")
    named = set(re.findall(r'(?:src|href)="([^"#:]+)"', html))
    assert named == {"app.js", "style.css"}, "and beside it: the page may be behind a path"
    assert {f"/{each}" for each in named} <= set(FILES)
    assert '<html lang="en">' in html
    assert all(each in html for each in ("<header>", "<main", "<h1>", 'role="status"', "<label>"))


async def test_json(session: aiohttp.ClientSession) -> None:
    async with session.get("/api/overview") as answer:
        found = await answer.json()
    assert [each["name"] for each in found["jobs"]] == ["digits"]
    async with session.get("/api/jobs/team/digits") as answer:
        assert (await answer.json())["ready"] == 2
    async with session.get("/api/jobs/team/none") as answer:
        assert answer.status == 404


async def test_the_stream_says_what_changes_and_only_that(
    session: aiohttp.ClientSession, page: Page, jobs: list[TrainingJob]
) -> None:
    page.look()
    async with session.get("/api/stream", params={"job": "team/digits"}) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")

        async def event() -> tuple[str, Any]:
            kind = (await answer.content.readline()).decode().strip().removeprefix("event: ")
            data = (await answer.content.readline()).decode().removeprefix("data: ")
            await answer.content.readline()
            return kind, json.loads(data)

        first = [await event(), await event()]
        assert [(kind, told["now"]) for kind, told in first] == [
            ("overview", NOW.timestamp()),
            ("job", NOW.timestamp()),
        ]
        page.look()  # nothing has changed but that the curves have one point more
        kind, longer = await event()
        assert (kind, len(longer["samples"])) == ("job", len(first[1][1]["samples"]) + 1)
        jobs[:] = [job(RUNNING | {"workers": {"ready": 3}})]
        page.look()
        changed = [await event(), await event()]
        assert [kind for kind, _ in changed] == ["overview", "job"]
        assert changed[0][1]["jobs"][0]["ready"] == changed[1][1]["ready"] == 3
        jobs.clear()
        page.look()
        nothing = {"now": NOW.timestamp(), "jobs": [], "pools": []}
        assert [await event(), await event()] == [("overview", nothing), ("job", None)]


async def test_so_many_open_pages_and_no_more(
    session: aiohttp.ClientSession, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds a connection and is told of each change; one that is closed makes room at the next."""
    monkeypatch.setattr("shoal.page.server.STREAMS", 2)
    monkeypatch.setattr("shoal.page.server.QUIET_SECONDS", 0.01)
    first, second = [await session.get("/api/stream") for _ in range(2)]
    async with session.get("/api/stream") as third:
        assert third.status == 503
        assert "2 pages are open already" in await third.text()
    first.close()
    for _ in range(100):
        page.look()
        async with session.get("/api/stream") as third:
            if third.status == 200:
                break
    assert third.status == 200
    second.close()


async def test_a_viewer_that_takes_nothing_is_left(
    page: Page, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each held a place and what was not sent yet, and one that went then was an error with a traceback."""
    monkeypatch.setattr("shoal.page.server.WRITE_SECONDS", 0.05)
    monkeypatch.setattr("shoal.page.server.overview", lambda *_: {"now": 1, "jobs": ["x" * (8 << 20)]})
    async with serving(0, page.answers) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET /api/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readline()
        while page._streams:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        writer.transport.abort()
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8082", 200),
        ("127.0.0.1:8082", 200),
        ("[::1]:8082", 200),
        ("shoal-metrics", 200),
        ("shoal-metrics.shoal-system.svc", 200),
        ("shoal.example.com", 200),
        ("localhost.", 200),
        ("[", 421),
        ("evil.example", 421),
        ("evil.svc.example:8082", 421),
        ("127.0.0.1.evil.example", 421),
    ],
)
async def test_the_page_answers_to_no_name_that_somebody_else_may_have(host: str, status: int) -> None:
    """It has no login: a web page whose name was pointed at localhost read all jobs."""
    page = Page(list, lambda: (), wall=lambda: NOW, hosts=["shoal.example.com"])
    async with (
        serving(0, page.answers) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
        session.get("/api/overview", headers={"Host": host}) as answer,
    ):
        assert answer.status == status
        assert ("page.hosts" in await answer.text()) == (status == 421)


async def test_a_stream_without_changes_says_that_it_is_alive(
    session: aiohttp.ClientSession, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.page.server.QUIET_SECONDS", 0.01)
    page.look()
    async with session.get("/api/stream") as answer:
        await answer.content.readuntil(b"\n\n")
        page.look()
        assert await answer.content.readuntil(b"\n\n") == b"event: alive\ndata: null\n\n"


async def test_a_look_that_fails_is_told_and_not_the_last(
    page: Page, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The page is beside the operator: it neither ends with it nor takes it along."""
    looks, thrice = [], asyncio.Event()

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            thrice.set()
        if len(looks) == 1:
            raise ValueError("a status that nobody thought of")

    monkeypatch.setattr(page, "look", look)
    page.pause = 0.0
    async with during(page.run()):
        await thrice.wait()
    assert "a status that nobody thought of" in caplog.text


def test_however_much_a_look_costs_the_next_one_comes() -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 60.0
        return now

    page = Page(list, lambda: (), wall=lambda: NOW, clock=clock)
    page.look()
    page.look()
    assert page.pause == 30.0


async def test_only_reading(session: aiohttp.ClientSession) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        async with session.request(method, "/api/jobs/team/digits") as answer:
            assert answer.status == 405


@pytest.mark.parametrize("value", ["12,5", "NaN", "1e400"])
async def test_a_number_that_is_none_takes_the_page_from_nobody(
    jobs: list[TrainingJob], page: Page, value: str
) -> None:
    """A status may be another controller's, or restored; browsers read no NaN, and all jobs are one answer."""
    training = {"step": 5, "samplesPerSecond": value, "metrics": {"a": value}}
    others = {"prediction": {"relativeError": value, "remainingSeconds": 60}, "cost": {"accumulated": value}}
    jobs.append(job({"phase": "Running", "training": training, **others}))
    page.look()

    def refuse(word: str) -> None:
        raise ValueError(f"no JSON of a browser: {word}")

    for topic in ("", f"{jobs[1].metadata.namespace}/{jobs[1].metadata.name}"):
        assert json.loads((await page.tell(topic)).json, parse_constant=refuse)
