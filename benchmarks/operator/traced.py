"""The operator's process with a trace: when it saw a pod go, and what it did until the replacement was answered.

`command` is the operator with the service account in a folder. It appends a line of JSON to a file for each `Moment`,
in the time of the wall clock, as the API server's audit log has it. What is wrapped for that costs microseconds.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Unpack

import aiohttp

import shoal.cluster.server
from shoal.api.training_job import TrainingJob
from shoal.cluster.http import HttpTransport
from shoal.cluster.transport import Answer, Options, Query
from shoal.controllers.trainingjob.apply import Applier
from shoal.controllers.trainingjob.reconcile import Reconciler
from shoal.policy.actions import Action, CreatePod
from shoal.policy.facts.sightings import Memory
from shoal.policy.model import Observation, Plan
from shoal.process.main import main
from shoal.runtime.controller import Key

HELD_SECONDS = 0.02
"""Callbacks of the event loop that took longer are told."""
SEEN, TAKEN, PLANNED, ASKED, PLACED, SENT = "seen", "taken", "planned", "asked", "placed", "sent"
"""A pod that goes was read from the watch; its job's key was taken; the replacement was planned, asked for in the
process, has a place among the requests, and was written to its connection."""
HELD = "held"
"""The event loop was held by one callback."""
STAGES = (TAKEN, PLANNED, ASKED, PLACED, SENT)
_NAME = re.compile(rb'"name":"([^"]*)"')


@dataclass(frozen=True)
class Moment:
    """Something happened `at` a time (seconds of the wall clock) to `name`: a pod, or a callback.

    `seconds`, `cpu`, `garbage`: of a callback, how long it took, the processor time of its thread in it, and that of
    the garbage collections among it.
    """

    at: float
    what: str
    name: str
    seconds: float = 0.0
    cpu: float = 0.0
    garbage: float = 0.0


def command(account: Path, trace: Path) -> list[str]:
    """The operator's command with this service account, that writes a trace."""
    words = "from benchmarks.operator.traced import run; run()"
    return [sys.executable, "-c", words, str(account), str(trace)]


def run() -> None:
    """Run the operator as `command` says."""
    shoal.cluster.server.SERVICE_ACCOUNT = Path(sys.argv.pop(1))
    trace(Path(sys.argv.pop(1)))
    main()


def read(trace: Path) -> Iterator[Moment]:
    """The moments so far."""
    for line in trace.read_bytes().split(b"\n")[:-1]:
        yield Moment(**json.loads(line))


def parts(
    moments: list[Moment], lost: str, replacement: str, answered: datetime, received: datetime
) -> Mapping[str, float]:
    """Where the time between a pod's end and the request for its replacement was spent, in milliseconds.

    `answered`: the answer to its DELETE; `received`: when the API server had the POST. All in words, in order.
    """
    first: dict[str, float] = {}
    for each in moments:
        if each.name == (lost if each.what == SEEN else replacement):
            first.setdefault(each.what, each.at)
    times = [answered.timestamp(), *(first[what] for what in (SEEN, *STAGES)), received.timestamp()]
    words = (
        "until the watch told it",
        "until the job was looked at",
        "the plan",
        "until it was asked for",
        "until there was a place",
        "until it was written",
        "until the API server had it",
    )
    return {
        word: (after - before) * 1000 for word, before, after in zip(words, times, times[1:], strict=False)
    }


def trace(path: Path) -> None:
    """Have this process write its moments to a file."""
    file = path.open("a", buffering=1)

    def tell(what: str, name: str, at: float | None = None, **more: float) -> None:
        file.write(json.dumps(asdict(Moment(at or time.time(), what, name, **more))) + "\n")

    _trace_watches(tell)
    _trace_plans(tell)
    _trace_requests(tell)
    _trace_loop(tell)


def _trace_watches(tell: Any) -> None:
    stream = HttpTransport.stream

    @asynccontextmanager
    async def traced(self: HttpTransport, path: str, query: Query) -> AsyncIterator[AsyncIterator[bytes]]:
        async with stream(self, path, query) as lines:
            yield told(lines) if path.endswith("/pods") else lines

    async def told(lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for line in lines:
            if b'"deletionTimestamp"' in line and (name := _NAME.search(line)):
                tell(SEEN, name[1].decode())
            yield line

    HttpTransport.stream = traced  # type: ignore[method-assign]


def _trace_plans(tell: Any) -> None:
    call, plan = Reconciler.__call__, Reconciler._plan
    taken = 0.0

    async def traced_call(self: Reconciler, key: Key) -> float | None:
        nonlocal taken
        taken = time.time()
        return await call(self, key)

    def traced_plan(self: Reconciler, seen: Observation, memory: Memory) -> Plan:
        decided = plan(self, seen, memory)
        for each in decided.actions:
            if isinstance(each, CreatePod) and each.replaces:
                tell(TAKEN, each.name, taken)
                tell(PLANNED, each.name)
        return decided

    Reconciler.__call__ = traced_call  # type: ignore[method-assign]
    Reconciler._plan = traced_plan  # type: ignore[method-assign]


def _trace_requests(tell: Any) -> None:
    asked, placed, written = Applier.carry_out, HttpTransport.request, aiohttp.ClientRequest.write_bytes
    pod = ContextVar("pod", default="")

    async def traced_asked(self: Applier, job: TrainingJob, action: Action) -> bool:
        if not isinstance(action, CreatePod):
            return await asked(self, job, action)
        tell(ASKED, action.name)
        token = pod.set(action.name)
        try:
            return await asked(self, job, action)
        finally:
            pod.reset(token)  # what this request's answer leads to is another request

    async def traced_placed(
        self: HttpTransport, method: str, path: str, **options: Unpack[Options]
    ) -> Answer:
        if name := pod.get():
            tell(PLACED, name)
        return await placed(self, method, path, **options)

    async def traced_written(self: aiohttp.ClientRequest, *given: Any) -> None:
        await written(self, *given)
        if name := pod.get():
            tell(SENT, name)

    Applier.carry_out = traced_asked  # type: ignore[method-assign]
    HttpTransport.request = traced_placed  # type: ignore[method-assign]
    aiohttp.ClientRequest.write_bytes = traced_written  # type: ignore[assignment, method-assign]


def _trace_loop(tell: Any) -> None:
    run = asyncio.Handle._run
    began = collected = 0.0

    def collects(phase: str, _info: Any) -> None:
        nonlocal began, collected
        if phase == "start":
            began = time.thread_time()
        else:
            collected += time.thread_time() - began

    def traced(handle: Any) -> None:
        at, cpu, before = time.perf_counter(), time.thread_time(), collected
        run(handle)
        took, cpu = time.perf_counter() - at, time.thread_time() - cpu
        if took > HELD_SECONDS:
            tell(HELD, _what(handle), seconds=took, cpu=cpu, garbage=collected - before)

    gc.callbacks.append(collects)
    asyncio.Handle._run = traced  # type: ignore[assignment, method-assign]


def _what(handle: Any) -> str:
    """What a callback does: for a step of a task, which coroutine goes on."""
    owner = getattr(handle._callback, "__self__", None)
    if not isinstance(owner, asyncio.Task):
        return repr(handle)[:300]
    coroutine: Any = owner.get_coro()
    return f"a step of {coroutine.__qualname__}"
