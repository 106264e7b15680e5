"""The page's answers: three static files, JSON, and a stream of changes (server-sent events)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from aiohttp import web

from shoal.api.capacity_pool import CapacityPool
from shoal.api.training_job import TrainingJob
from shoal.page.memory import Memory
from shoal.page.view import Json, detail, overview

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
QUIET_SECONDS = 15.0
"""A stream without changes says so this often, so that proxies keep it open."""
STREAMS = 100

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Page:
    """The page over the operator's caches.

    `jobs`, `pools`: what there is now. `run` looks at it every `look_seconds` for as long as the page should remember.
    """

    def __init__(
        self,
        jobs: Callable[[], Iterable[TrainingJob]],
        pools: Callable[[], Iterable[CapacityPool]],
        *,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._jobs, self._pools, self._wall, self._look_seconds = jobs, pools, wall, look_seconds
        self._memory = Memory()
        self._streams = 0

    @property
    def answers(self) -> Mapping[str, Answer]:
        """A handler of GET for each path."""
        return {
            **{path: _static(*file) for path, file in FILES.items()},
            "/api/overview": self._overview,
            "/api/jobs/{namespace}/{name}": self._job,
            "/api/stream": self._stream,
        }

    def look(self) -> None:
        """Remember what there is now."""
        self._memory.see(self._jobs(), self._wall())

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(self._look_seconds)

    def overview(self) -> Json:
        """All jobs and pools."""
        return overview(self._jobs(), self._pools(), self._wall())

    def job(self, namespace: str, name: str) -> Json | None:
        """One job; None if it does not exist."""
        for job in self._jobs():
            if (job.metadata.namespace, job.metadata.name) == (namespace, name):
                return detail(job, self._memory.of(namespace, name), self._wall())
        return None

    async def _overview(self, _: web.Request) -> web.StreamResponse:
        return web.json_response(self.overview(), headers=HEADERS)

    async def _job(self, request: web.Request) -> web.StreamResponse:
        found = self.job(request.match_info["namespace"], request.match_info["name"])
        return web.json_response(
            found or {"error": "there is no such job"}, status=200 if found else 404, headers=HEADERS
        )

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Send the overview, and with `?job=NAMESPACE/NAME` that job, whenever they change."""
        if self._streams >= STREAMS:
            return web.json_response(
                {"error": f"{STREAMS} pages are open already"}, status=503, headers=HEADERS
            )
        namespace, _, name = request.query.get("job", "").partition("/")
        response = web.StreamResponse(
            headers={**HEADERS, "Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
        )
        await response.prepare(request)
        sent: dict[str, str] = {}
        quiet = 0.0
        self._streams += 1
        try:
            while True:
                news = {"overview": self.overview(), **({"job": self.job(namespace, name)} if name else {})}
                for kind, value in news.items():
                    if (same := _without_clock(value)) != sent.get(kind):
                        sent[kind], quiet = same, 0.0
                        await response.write(f"event: {kind}\ndata: {json.dumps(value)}\n\n".encode())
                if quiet >= QUIET_SECONDS:
                    quiet = 0.0
                    await response.write(b": still here\n\n")
                await asyncio.sleep(self._look_seconds)
                quiet += self._look_seconds
        except (ConnectionResetError, asyncio.CancelledError):
            return response
        finally:
            self._streams -= 1


def _static(name: str, kind: str) -> Answer:
    body = (STATIC / name).read_bytes()

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)

    return answer


def _without_clock(value: Json | None) -> str:
    """Without what changes with the time alone."""
    if value is None:
        return "null"
    return json.dumps({key: each for key, each in value.items() if key not in {"now", "finish"}})
