"""A proxy before kube-apiserver that plays its faults, and those of what lies between it and a client.

```python
async with FaultyApi(plane.kubeconfig, Weather(random.Random(7))) as api:
    kubeconfig = await api.door("replica-a", "system:serviceaccount:shoal:shoal", folder)
    api.weather.share = 0.1            # of requests that meet a fault
    api.disturb(0.5, Trouble.FROZEN)   # half of the open watches
    api.watches("replica-a", "pods")[0].drops = b"x"  # its next event with an x, for good: it goes on
    held = api.hold("replica-a")       # its next write: done, when `held.done`, and answered after `held.answer.set()`
    api.cut()                          # nobody is answered; api.cut("replica-a"): this client is not
    api.heal()                         # the end of all faults
```
Each client has a door of its own. The API server knows it as the user of the door, whose RBAC holds, by impersonation;
the audit log has the door's name as the user agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from dev.kube import Json, Kube

LONGEST_DELAY_SECONDS = 3.0
RETRY_AFTER_SECONDS = 1
SHED = "Too many requests, please try again later."
"""As an API server says it that sheds load: in plain words."""
_NOT_FORWARDED = {"host", "connection", "transfer-encoding", "content-length", "authorization", "user-agent"}
_NOT_RETURNED = {"connection", "transfer-encoding", "content-length", "content-encoding"}


class Fault(StrEnum):
    """What may happen to a request."""

    TOO_MANY = "429"
    BROKEN = "500"
    CONFLICT = "409"  # of an update: somebody else was faster
    EXPIRED = "410"  # of a list or a watch: the version is too old
    LATE = "late"
    UNANSWERED = "unanswered"  # half-open: it is neither done nor answered
    ANSWER_LOST = "answer lost"  # it is done, and the connection ends
    TWICE = "twice"  # a write is done twice, and the second answer is given


class Trouble(StrEnum):
    """What may happen to a watch that is open."""

    ENDED = "ended"  # in peace
    TRUNCATED = "truncated"  # in the middle of a line
    RESET = "reset"
    FROZEN = "frozen"  # half-open
    EXPIRED = "expired"  # an ERROR event with 410
    DEAF = "deaf"  # events are dropped until another ERROR event with 410 tells so


Kind = TypeVar("Kind", bound=Fault | Trouble)


@dataclass(eq=False)
class OpenWatch:
    """A watch of one client."""

    door: str
    path: str
    trouble: asyncio.Future[Trouble]
    """What happens to it."""
    drops: bytes = b""
    """The next event with this in it never comes; empty: none."""

    def passes(self, line: bytes) -> bool:
        """Whether a line is to be delivered."""
        if not self.drops or self.drops not in line:
            return True
        self.drops = b""
        return False


@dataclass(eq=False)
class Held:
    """The next write of a client, whose answer waits."""

    door: str
    done: bool = False
    answer: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: the client may have it."""


@dataclass
class Weather:
    """How bad it is; may be changed at any time."""

    chance: random.Random
    share: float = 0.0
    """Of requests that meet a fault."""
    repeated: float = 0.0
    """Of a watch's events that come twice."""
    met: Counter[str] = field(default_factory=Counter)
    """How often each fault and trouble was met."""

    def strikes(self, method: str, *, watch: bool) -> Fault | None:
        """The fault of one request."""
        if self.chance.random() >= self.share:
            return None
        kinds = [Fault.TOO_MANY, Fault.BROKEN, Fault.LATE, Fault.UNANSWERED, Fault.ANSWER_LOST]
        if method in {"PUT", "PATCH"}:
            kinds.append(Fault.CONFLICT)
        if method in {"POST", "DELETE"}:
            kinds.append(Fault.TWICE)
        if method == "GET":
            kinds = [*(kinds[:-1] if watch else kinds), Fault.EXPIRED]
        return self.rarest(kinds)

    def rarest(self, kinds: Sequence[Kind]) -> Kind:
        """The one that was met least so far: they are dealt, as those that chance forgets would test nothing."""
        least = min(self.met[_name(kind)] for kind in kinds)
        return self.chance.choice([kind for kind in kinds if self.met[_name(kind)] == least])

    def meet(self, what: Fault | Trouble) -> None:
        """Count it."""
        self.met[_name(what)] += 1

    def unmet(self) -> list[str]:
        """The kinds that nobody has met."""
        kinds: list[Fault | Trouble] = [*Fault, *Trouble]
        return [name for kind in kinds if not self.met[name := _name(kind)]]


def _name(what: Fault | Trouble) -> str:
    return f"{type(what).__name__.lower()} {what}"


class FaultyApi:
    """The proxy, on loopback, as an asynchronous context manager."""

    def __init__(self, kubeconfig: Path, weather: Weather) -> None:
        self.weather = weather
        self._kube = Kube(kubeconfig)
        self._runners: list[web.AppRunner] = []
        self._watches: list[OpenWatch] = []
        """Those that are open, in that order."""
        self._doors: set[str] = set()
        self._out: set[str] = set()
        """Doors that are cut."""
        self._healed = asyncio.Event()
        self._held: Held | None = None

    async def __aenter__(self) -> Self:
        await self._kube.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(runner.cleanup() for runner in self._runners))
        await self._kube.__aexit__(kind, error, trace)

    async def door(self, name: str, user: str, folder: Path) -> Path:
        """The kubeconfig of one client."""

        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._handle(request, name, {"Impersonate-User": user, "User-Agent": name})

        self._doors.add(name)
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", handle)
        # A request whose client has gone must not be forwarded later: `handler_cancellation`.
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        self._runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address, port = runner.addresses[0][:2]
        return _kubeconfig(f"http://{address}:{port}", folder)

    def disturb(self, share: float, trouble: Trouble, door: str = "") -> int:
        """Trouble for this share of the watches that are open: of one client, or of all. Returns of how many."""
        here = [w for w in self._watches if not w.trouble.done() and door in {"", w.door}]
        struck = [watch for watch in here if self.weather.chance.random() < share]
        for watch in struck:
            watch.trouble.set_result(trouble)
        return len(struck)

    def hold(self, door: str) -> Held:
        """The next write of this client is done, and answered when `Held.answer` is set."""
        self._held = Held(door)
        return self._held

    def watches(self, door: str, plural: str) -> list[OpenWatch]:
        """Those of one client and kind that are open, in that order."""
        return [each for each in self._watches if each.door == door and each.path.endswith(f"/{plural}")]

    def cut(self, door: str = "") -> None:
        """From now on this client, or nobody, is answered: connections are reset."""
        self._out |= {door} if door else self._doors
        self.weather.met["partition" if door else "outage"] += 1
        self.disturb(1.0, Trouble.RESET, door)

    def restore(self) -> None:
        """The end of that."""
        self._out.clear()

    def heal(self) -> None:
        """The end of all faults. What is half-open is reset, as when a network is whole again."""
        self.restore()
        self.weather.share = self.weather.repeated = 0.0
        self._healed.set()
        self._healed = asyncio.Event()

    async def _handle(self, request: web.Request, door: str, headers: dict[str, str]) -> web.StreamResponse:
        watch = request.query.get("watch", "") in {"1", "true"}
        if door in self._out:
            return _reset(request)
        fault = self.weather.strikes(request.method, watch=watch)
        if fault is not None:
            self.weather.meet(fault)
        match fault:
            case Fault.TOO_MANY:
                return web.Response(status=429, text=SHED, headers={"Retry-After": f"{RETRY_AFTER_SECONDS}"})
            case Fault.BROKEN:
                return _refusal(500, "InternalError", "etcdserver: request timed out")
            case Fault.CONFLICT:
                return _refusal(409, "Conflict", "the object has been modified")
            case Fault.EXPIRED:
                return _refusal(410, "Expired", "too old resource version")
            case Fault.LATE:
                await asyncio.sleep(self.weather.chance.uniform(0.05, LONGEST_DELAY_SECONDS))
            case Fault.UNANSWERED:
                await self._healed.wait()  # unless the client gives up before
                return _reset(request)
        async with self._forward(request, headers) as answer:
            if watch and answer.status == 200:
                return await self._watch(request, door, answer)
            response = web.Response(status=answer.status, headers=_returned(answer), body=await answer.read())
        await self._hold(request, door)
        if response.status == 403:
            self.weather.met["forbidden"] += 1
        if fault is Fault.TWICE:
            async with self._forward(request, headers) as answer:
                response = web.Response(
                    status=answer.status, headers=_returned(answer), body=await answer.read()
                )
        return _reset(request) if fault is Fault.ANSWER_LOST else response

    async def _hold(self, request: web.Request, door: str) -> None:
        held = self._held
        if (
            held
            and not held.done
            and held.door == door
            and request.method != "GET"
            and "/leases" not in request.path
        ):
            held.done = True
            await held.answer.wait()

    @contextlib.asynccontextmanager
    async def _forward(
        self, request: web.Request, headers: dict[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        kept = {n: value for n, value in request.headers.items() if n.lower() not in _NOT_FORWARDED}
        async with self._kube.session.request(
            request.method,
            request.rel_url.raw_path_qs,
            headers={**kept, **headers},
            data=await request.read() or None,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            read_bufsize=1 << 22,
        ) as answer:
            yield answer

    async def _watch(
        self, request: web.Request, door: str, answer: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=_returned(answer))
        await response.prepare(request)
        trouble: asyncio.Future[Trouble] = asyncio.get_running_loop().create_future()
        self._watches.append(watch := OpenWatch(door, request.path, trouble))
        try:
            await self._pump(answer.content, response, watch)
            if trouble.done():
                self.weather.meet(trouble.result())
                await self._end(trouble.result(), request, response)
        except (ConnectionError, aiohttp.ClientError):
            request.protocol.force_close()
        finally:
            self._watches.remove(watch)
        return response

    async def _pump(
        self, lines: aiohttp.StreamReader, response: web.StreamResponse, watch: OpenWatch
    ) -> None:
        """Copy lines until the server ends the watch or there is trouble."""
        trouble = watch.trouble
        while True:
            reading = asyncio.ensure_future(lines.readline())
            either: set[asyncio.Future[Any]] = {reading, trouble}
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if trouble.done():
                    return
            finally:
                if not reading.done():
                    reading.cancel()
                    await asyncio.gather(reading, return_exceptions=True)
            if not (line := reading.result()):
                return
            if not watch.passes(line):
                self.weather.met["event dropped"] += 1
                continue
            await response.write(line)
            if self.weather.chance.random() < self.weather.repeated:
                self.weather.met["event repeated"] += 1
                await response.write(line)

    async def _end(self, trouble: Trouble, request: web.Request, response: web.StreamResponse) -> None:
        match trouble:
            case Trouble.TRUNCATED:
                await response.write(b'{"type":"MODIFIED","object":{"kind":"Pod","meta')
            case Trouble.RESET:
                _abort(request)
            case Trouble.FROZEN:
                await self._healed.wait()  # unless the client gives up before
                _abort(request)
            case Trouble.DEAF | Trouble.EXPIRED:
                if trouble is Trouble.DEAF:
                    await asyncio.sleep(self.weather.chance.uniform(1.0, 10.0))
                status = _status(410, "Expired", "too old resource version")
                await response.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")


def _kubeconfig(server: str, folder: Path) -> Path:
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "faulty", "cluster": {"server": server}}],
        "users": [{"name": "door", "user": {}}],
        "contexts": [{"name": "faulty", "context": {"cluster": "faulty", "user": "door"}}],
        "current-context": "faulty",
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "kubeconfig"
    path.write_text(json.dumps(content))
    return path


def _status(code: int, reason: str, message: str) -> Json:
    kind = {"apiVersion": "v1", "kind": "Status", "status": "Failure"}
    return {**kind, "code": code, "reason": reason, "message": f"{message} (injected)"}


def _refusal(code: int, reason: str, message: str) -> web.Response:
    return web.json_response(_status(code, reason, message), status=code)


def _returned(answer: aiohttp.ClientResponse) -> CIMultiDict[str]:
    return CIMultiDict((n, value) for n, value in answer.headers.items() if n.lower() not in _NOT_RETURNED)


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def _reset(request: web.Request) -> web.Response:
    """End the connection without an answer."""
    _abort(request)
    return web.Response()
