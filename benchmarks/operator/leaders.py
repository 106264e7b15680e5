"""How long nobody decides when the leader is killed, stopped, or restarted in place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime

from benchmarks.harness import Measurement, summary
from benchmarks.operator.reaction import nodes
from benchmarks.operator.world import OPERATOR, World, is_create, job, until
from dev.audit import READS, Write


async def measure(world: World, quick: bool) -> AsyncIterator[Measurement]:
    """The rows; each ends with the CREATE that replaces a pod that was taken just before."""
    workers = 3 if quick else 8
    async with nodes(world, "lead"):
        await world.namespace("lead")
        async with world.operator("operator-a") as first:
            await world.apply(job("lead", "lead", workers))
            await world.run("lead", "lead", workers)
            async with world.operator("operator-b") as second:
                await asyncio.sleep(3.0)  # it reads the cluster and stands by
                killed = await _until_decided(world, "lead-worker-0-0", first.kill)
                await world.run("lead", "lead", workers)
                await first.start()
                await asyncio.sleep(5.0)
                stopped = await _until_decided(world, "lead-worker-1-0", second.stop)
                await world.run("lead", "lead", workers)

                async def restart() -> None:
                    await first.kill()
                    await first.start()

                begun = datetime.now(UTC)
                since = len(world.log.read())
                restarted = await _until_decided(world, "lead-worker-2-0", restart)
                stages = _stages(begun, world.log.read()[since:])
    yield summary("leader killed: next decision", [killed], "s", "", 20.0, at_most=True)
    yield summary("leader stopped: next decision", [stopped], "s", "", 2.0, at_most=True)
    name = "leader restarted in place: next decision"
    yield summary(name, [restarted], "s", "", 3.0, at_most=True)
    for stage, seconds in stages.items():
        yield summary(f"{name}, of that {stage}", [seconds], "s", "")


def _stages(began: datetime, log: Sequence[Write]) -> dict[str, float]:
    """Where the time of a restart went, in seconds, from what the API server was asked."""
    asked = [each for each in log if each.user == OPERATOR and each.received > began]
    lease = next(each for each in asked if each.resource == "leases" and each.verb not in READS)
    made = next(each for each in asked if is_create(each) and each.resource == "pods")
    lists = [each for each in asked if each.verb == "list" and lease.answered < each.received < made.received]
    times = [
        ("until it asked the API server", asked[0].received),
        ("until it had the Lease", lease.answered),
        ("until all was read behind it", max(each.answered for each in lists)),
        ("until the replacement was asked for", made.received),
    ]
    befores = [began, *(at for _, at in times)]
    return {word: (at - before).total_seconds() for (word, at), before in zip(times, befores, strict=False)}


async def _until_decided(world: World, pod: str, end: Callable[[], Awaitable[None]]) -> float:
    """Seconds from the end of the leader to the replacement of a pod that was taken with it."""
    since = len(world.log.read())
    loop = asyncio.get_running_loop()
    await end()
    began = loop.time()
    await world.kube.delete(f"/api/v1/namespaces/lead/pods/{pod}", grace_seconds=0)

    async def made() -> bool:
        return bool(world.creates("lead", since=since))

    await until(made, every=0.02)
    return loop.time() - began
