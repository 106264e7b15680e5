"""Of a job that is gone nothing is left in the operator: no store knows its uid, whatever its end was."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Set
from typing import Any

import pytest

from shoal.process.operator import Operator
from tests.virtual.loop import play
from tests.virtual.test_bad_pools import pool_world
from tests.virtual.test_chaos import Weather
from tests.virtual.world import World

BOUNDED = ("_deleted", "recorder._counts", "recorder._windows")
"""What is kept of a bounded number of objects that are gone, the newest."""
CONTAINERS = (Mapping, Set, list, tuple, deque)
JOBS = 12
LIVES = ("ends", "fails", "is deleted", "is suspended", "never begins", "is planned")
PATIENCE_SECONDS = 90.0
"""Longer than a plan of all jobs is awaited, a write is tried again, and a profile waits for its own."""


@pytest.mark.nightly
def test_nothing_is_kept_of_jobs_that_came_and_went() -> None:
    play(_many_lives)


async def _many_lives() -> None:
    weather = Weather(random.Random(3), share=0.0)
    world = pool_world(weather)
    world.nodes(6, 0)
    async with world.living():
        replica = world.replica("a")
        await _live(world, "first")
        before = _sizes(replica.operator)
        weather.share = 0.05
        uids = {await _live(world, f"{number}") for number in range(JOBS)}
        weather.share = 0.0
        await asyncio.sleep(PATIENCE_SECONDS)
        assert replica.starts == 1, "what is looked at has seen all of them"
        assert replica.operator is not None
        kept = {
            path for path, found in _everything(replica.operator) if isinstance(found, str) and found in uids
        }
        assert not kept, sorted(kept)
        grown = {path: (before[path], size) for path, size in _sizes(replica.operator).items()
                 if size >= before[path] + JOBS}  # fmt: skip
        assert not grown, grown


async def _live(world: World, name: str) -> str:
    """A job, from its beginning to its deletion; its uid."""
    life = LIVES[int(name) % len(LIVES)] if name.isdecimal() else "is planned"
    workers: dict[str, Any] = {"replicas": 2, "maxReplicas": 3, "maxSurge": 1}
    if life == "is planned":
        workers |= {"pools": ["good"], "minReplicas": 1}
    made = world.apply(
        name,
        suspend=life == "never begins",
        runPolicy={"backoffLimit": 0},
        workers=workers,
        elasticity={"mode": "Auto" if "pools" in workers else "Manual"},
    )
    uid = str(made["metadata"]["uid"])

    def status() -> Any:
        return world.job(name).status

    if life != "never begins":
        await world.until(lambda: status().workers.ready == 2, 200, f"{name} runs")
    else:
        await asyncio.sleep(5)
    pod: Any = world.pod_at("worker", 0)
    process = world.cluster.process_of(pod["metadata"]["name"]) if pod else None
    if life in {"ends", "is planned"}:
        await asyncio.sleep(30)
        run = world.trainers.runs[uid]
        run.done = run.truth.samples
        await world.until(lambda: status().finished, 200, f"{name} ends")
    elif life == "fails":
        assert process is not None
        world.cluster.crash(process, 1)
        await world.until(lambda: status().finished, 200, f"{name} fails")
    elif life == "is suspended":
        world.edit(name, suspend=True)
        await asyncio.sleep(3)
    elif life == "is deleted":
        world.cluster.notice(pod["spec"]["nodeName"])
        await asyncio.sleep(0.5)
    world.server.delete(("trainingjobs", "team", name))
    await world.until(
        lambda: not any(p["metadata"]["ownerReferences"][0]["uid"] == uid for p in world.server.all("pods")),
        200, f"{name} is collected",
    )  # fmt: skip
    return uid


def _everything(operator: Operator | None) -> Iterator[tuple[str, Any]]:
    """What objects of Shoal and containers of them hold, each with the attributes that lead to it."""
    seen: set[int] = set()
    waiting = deque[tuple[str, Any]]([("", operator)])
    while waiting:
        path, found = waiting.popleft()
        if path.endswith(BOUNDED) or (id(found) in seen and not isinstance(found, str)):
            continue
        seen.add(id(found))
        yield path, found
        if isinstance(found, CONTAINERS):
            waiting.extend(
                (path, each) for each in [*found, *(found.values() if isinstance(found, Mapping) else ())]
            )
        elif type(found).__module__.startswith("shoal."):
            waiting.extend((f"{path}.{name}", value) for name, value in _attributes(found))


def _attributes(found: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(found, "__dict__", {}).items()
    for kind in type(found).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(found, name):
                yield name, getattr(found, name)


def _sizes(operator: Operator | None) -> Counter[str]:
    """How much is in each container, but those of the objects that the cluster has."""
    sizes = Counter[str]()
    for path, found in _everything(operator):
        if isinstance(found, CONTAINERS) and not path.startswith(".state."):
            sizes[path] += len(found)
    return sizes
