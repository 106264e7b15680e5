"""The page's answers: three static files, JSON, and a stream of changes (server-sent events).

They share the event loop with the operator, which replaces pods. So what is sent is made once for all who look at it,
one thing at a time, and the loop turns in between: viewers cost it the sending. Where so much is looked at that the
making takes more than a tenth of the loop's time, it is made less often.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web

from shoal.api.capacity_pool import CapacityPool
from shoal.api.training_job import TrainingJob
from shoal.page.memory import Memory
from shoal.page.view import Json, detail, overview

log = logging.getLogger(__name__)

STATIC = Path(__file__).with_name("static")
FILES = {"/": ("index.html", "text/html"), "/app.js": ("app.js", "text/javascript"),
         "/draw.js": ("draw.js", "text/javascript"), "/style.css": ("style.css", "text/css")}  # fmt: skip
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
LOOK_SECONDS = 2.0
LONGEST_PAUSE = 30.0
"""Seconds between two looks, however much one costs: the page says that it hears nothing after twice as many."""
SHARE = 0.1
"""Of the event loop's time, for looking and for making what is sent."""
QUIET_SECONDS = 15.0
"""A stream without changes says so this often, which keeps proxies open and tells the page that it is up to date."""
STREAMS = 100
WRITE_SECONDS = 30.0
"""A viewer that takes nothing for so long is left: others want its place."""
CLOCK = frozenset({"now", "finish"})
"""What changes with the time alone."""

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Told:
    """What is told of a topic: as JSON, and the part of it by which a change is noticed."""

    lasting: str
    json: bytes


class Page:
    """The page over the operator's caches.

    `jobs`, `pools`: what there is now. `run` looks at it every `look_seconds`, or less often where that costs too much,
    for as long as the page should remember. `hosts`: names by which browsers may ask for it, beside `localhost`,
    addresses and those of a Service.
    """

    def __init__(
        self,
        jobs: Callable[[], Iterable[TrainingJob]],
        pools: Callable[[], Iterable[CapacityPool]],
        *,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.perf_counter,
        look_seconds: float = LOOK_SECONDS,
        hosts: Collection[str] = (),
    ) -> None:
        self._hosts = hosts
        self._jobs, self._pools, self._wall, self._look_seconds = jobs, pools, wall, look_seconds
        self._clock, self._spent, self.pause = clock, 0.0, look_seconds
        self._memory = Memory()
        self._streams = 0
        self._told: dict[str, Told | None] = {}
        self._fresh: set[str] = set()
        self._looked = asyncio.Event()
        self._making = asyncio.Lock()

    @property
    def answers(self) -> Mapping[str, Answer]:
        """A handler of GET for each path."""
        answers: dict[str, Answer] = {
            **{path: _static(*file) for path, file in FILES.items()},
            "/api/overview": self._overview,
            "/api/jobs/{namespace}/{name}": self._job,
            "/api/stream": self._stream,
        }
        return {path: self._for_known_hosts(answer) for path, answer in answers.items()}

    def _for_known_hosts(self, answer: Answer) -> Answer:
        """There is no login: a name that somebody has point here would let his page read all jobs (DNS rebinding)."""

        async def checked(request: web.Request) -> web.StreamResponse:
            host = _host(request.host)
            if host in self._hosts or _is_own(host):
                return await answer(request)
            words = f"the page is not asked for as {host[:255]}: name it in page.hosts of the chart's values"
            return web.json_response({"error": words}, status=421, headers=HEADERS)

        return checked

    def look(self) -> None:
        """Remember what there is now, and wake the streams. `pause`: seconds until this should be done again."""
        self.pause = min(max(self._look_seconds, self._spent / SHARE), LONGEST_PAUSE)
        self._spent = 0.0
        began = self._clock()
        self._memory.see(self._jobs(), self._wall())
        self._told = {topic: told for topic, told in self._told.items() if topic in self._fresh}
        self._fresh.clear()
        self._looked.set()
        self._looked = asyncio.Event()
        self._spent += self._clock() - began

    async def run(self) -> None:
        """Look again and again, until cancelled. A look that fails is logged, and tried again."""
        while True:
            try:
                self.look()
            except Exception:  # whatever it is: the page would stand still, and nobody know why
                log.exception("the page could not be brought up to date; it is tried again")
            await asyncio.sleep(self.pause)

    def overview(self) -> Json:
        """All jobs and pools."""
        return overview(self._jobs(), self._pools(), self._wall())

    def job(self, namespace: str, name: str) -> Json | None:
        """One job; None if it does not exist."""
        for job in self._jobs():
            if (job.metadata.namespace, job.metadata.name) == (namespace, name):
                return detail(job, self._memory.of(namespace, name), self._wall())
        return None

    async def tell(self, topic: str) -> Told | None:
        """The overview (""), or the job NAMESPACE/NAME: None if it does not exist. The same object until it changes."""
        async with self._making:
            if topic not in self._fresh:
                began = self._clock()
                namespace, _, name = topic.partition("/")
                value = self.job(namespace, name) if topic else self.overview()
                told, before = _told(value), self._told.get(topic)
                same = told is not None and before is not None and told.lasting == before.lasting
                self._told[topic] = before if same else told
                self._fresh.add(topic)
                self._spent += self._clock() - began
                await asyncio.sleep(0)
            return self._told[topic]

    async def _overview(self, _: web.Request) -> web.StreamResponse:
        return _json(await self.tell(""))

    async def _job(self, request: web.Request) -> web.StreamResponse:
        return _json(await self.tell("{namespace}/{name}".format(**request.match_info)))

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Send the overview, and with `?job=NAMESPACE/NAME` that job, whenever they change."""
        if self._streams >= STREAMS:
            return web.json_response(
                {"error": f"{STREAMS} pages are open already"}, status=503, headers=HEADERS
            )
        job = request.query.get("job", "")
        response = web.StreamResponse(
            headers={**HEADERS, "Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
        )
        await response.prepare(request)
        sent: dict[str, Told | None] = {}
        quiet = 0.0
        self._streams += 1
        try:
            while True:
                looked = self._looked
                for kind, topic in {"overview": "", **({"job": job} if job else {})}.items():
                    told = await self.tell(topic)
                    if kind not in sent or told is not sent[kind]:
                        sent[kind], quiet = told, 0.0
                        body = told.json if told else b"null"
                        await _write(response, b"event: %s\ndata: %s\n\n" % (kind.encode(), body))
                if quiet >= QUIET_SECONDS:
                    quiet = 0.0
                    await _write(response, b"event: alive\ndata: null\n\n")
                await looked.wait()
                quiet += self.pause
        except (ConnectionError, TimeoutError, asyncio.CancelledError):
            return response
        finally:
            self._streams -= 1


async def _write(response: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(WRITE_SECONDS):
        await response.write(data)


def _static(name: str, kind: str) -> Answer:
    body = (STATIC / name).read_bytes()

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)

    return answer


def _host(said: str) -> str:
    """The name, without its port and the dot that may end it."""
    try:
        return (urlsplit(f"//{said}").hostname or "").removesuffix(".")
    except ValueError:
        return "."


def _is_own(host: str) -> bool:
    """Whether it is a name that nobody else can have: an address, this machine, or one within the cluster."""
    try:
        return bool(ip_address(host))
    except ValueError:
        return "." not in host or host.endswith((".localhost", ".svc", ".svc.cluster.local"))


def _json(told: Told | None) -> web.Response:
    if told is None:
        return web.json_response({"error": "there is no such job"}, status=404, headers=HEADERS)
    return web.Response(body=told.json, content_type="application/json", headers=HEADERS)


def _told(value: Json | None) -> Told | None:
    if value is None:
        return None
    clock = json.dumps({key: each for key, each in value.items() if key in CLOCK})
    lasting = json.dumps({key: each for key, each in value.items() if key not in CLOCK})
    return Told(lasting, f"{clock[:-1]}, {lasting[1:]}".encode())  # both have at least one member
