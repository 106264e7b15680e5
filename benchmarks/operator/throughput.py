"""How fast objects are made: many jobs at once, and many losses at once, with where the processor time goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

from benchmarks.harness import Measurement, summary
from benchmarks.operator import traced
from benchmarks.operator.reaction import bare_pods, nodes
from benchmarks.operator.world import (
    JOBS,
    OBJECTS,
    OPERATOR,
    Operator,
    World,
    is_create,
    is_loss,
    job,
    rate,
    until,
)
from dev.audit import Write

PS_AND_WORKERS = 5


async def started(world: World, quick: bool) -> AsyncIterator[Measurement]:
    """Jobs of five pods, applied together, between two runs of the bare client, since the machine's load drifts.

    The jobs are applied beside the bare client, too, and nobody acts on them: applying is not the operator's work.
    """
    jobs = 20 if quick else 200
    idle = world.processes()
    bare = await _bare_made(world, "bare-before", jobs)
    before, bare_cpu = rate(bare), _since(idle, world.processes())
    async with world.operator() as operator:
        await asyncio.sleep(3.0)
        yield summary("resident memory, idle", [operator.resident_mib], "MiB", "", 90.0, at_most=True)
        await world.namespace("many")
        cpu = _cpu(world, operator)
        await _apply(world, "many", jobs)

        async def all_made() -> bool:
            pods, services = await world.count("many"), await world.count("many", "services")
            return pods >= PS_AND_WORKERS * jobs and services >= jobs

        await until(all_made, every=1.0)
        spent = _since(cpu, _cpu(world, operator))
        memory = operator.resident_mib
        writes = world.writes("many", user=OPERATOR)
    after = rate(await _bare_made(world, "bare-after", jobs))
    made = [each for each in writes if is_create(each) and each.resource in OBJECTS]
    limit = (before + after) / 2
    name = f"{jobs} jobs of {PS_AND_WORKERS} pods"
    yield summary(f"{name}: objects a second", [rate(made)], "", "")
    yield summary(f"{name}: objects a second, a bare client", [before, after], "", "")
    yield summary(f"{name}: objects a second, ratio", [rate(made) / limit], "x", "a bare client", 0.7)
    yield summary(f"{name}: first to last CREATE", [len(made) / rate(made)], "s", "")
    for process, seconds in spent.items():
        yield summary(f"{name}: CPU of {process} for each object", [seconds / len(made) * 1000], "ms", "")
    for process, seconds in bare_cpu.items():
        what = f"{name}, a bare client: processor time of {process} for each object"
        yield summary(what, [seconds / len(bare) * 1000], "ms", "")
    yield summary(f"{name}: writes for each object", [len(writes) / len(made)], "", "")
    yield summary(f"resident memory, {jobs * PS_AND_WORKERS} pods", [memory], "MiB", "")


async def _bare_made(world: World, namespace: str, jobs: int) -> list[Write]:
    applied = f"{namespace}-applied"
    await world.namespace(applied)
    made, _ = await asyncio.gather(
        world.bare_made(namespace, jobs, PS_AND_WORKERS - 1), _apply(world, applied, jobs)
    )
    await world.kube.delete(JOBS.format(applied))
    return made


async def _apply(world: World, namespace: str, jobs: int) -> None:
    places = asyncio.Semaphore(32)

    async def apply(number: int) -> None:
        async with places:
            await world.apply(job(namespace, f"job-{number}", PS_AND_WORKERS - 1))

    await asyncio.gather(*(apply(number) for number in range(jobs)))


async def lost_of_one(world: World, quick: bool) -> AsyncIterator[Measurement]:
    """Half of one job's workers taken at once."""
    async for row in _lost(world, 20 if quick else 600, 1):
        yield row


async def lost_of_two(world: World, quick: bool) -> AsyncIterator[Measurement]:
    """Half of the workers of two jobs taken at once."""
    async for row in _lost(world, 40 if quick else 1000, 2):
        yield row


async def _lost(world: World, workers: int, jobs: int) -> AsyncIterator[Measurement]:
    half, everything = workers // 2, workers // 2 * jobs
    tag = f"{everything} of {workers * jobs} lost at once"
    trace = world.folder / "trace"
    async with nodes(world, f"lose-{workers}-{jobs}"):
        async with world.operator(trace=trace):
            space = f"lost-{workers}-{jobs}"
            await world.namespace(space)
            for number in range(jobs):
                await world.apply(job(space, f"big-{number}", workers))
            for number in range(jobs):
                await world.run(space, f"big-{number}", workers)
            await asyncio.sleep(2.0)
            names = [f"big-{j}-worker-{i}-0" for j in range(jobs) for i in range(half)]
            since = len(world.log.read())
            losses, made = await _take(world, space, names)
            await asyncio.sleep(2.0)  # the events and the last status
            writes = len(world.writes(space, user=OPERATOR, since=since))
            await world.kube.delete(f"/api/v1/namespaces/{space}")
        bare_space = f"bare-{space}"
        await world.namespace(bare_space)
        await bare_pods(world, bare_space, jobs, workers)
        async with world.bare("replace", bare_space):
            bare_names = [f"bare-{j}-worker-{i}-0" for j in range(jobs) for i in range(half)]
            bare_losses, bare_made = await _take(world, bare_space, bare_names)
        await world.kube.delete(f"/api/v1/namespaces/{bare_space}")
    late, bare_late = (
        (made[-1].received - losses[-1].answered).total_seconds()
        for losses, made in ((losses, made), (bare_losses, bare_made))
    )
    lost = {each.name for each in losses}
    seen = {each.name: each.at for each in reversed([*traced.read(trace)]) if each.what == traced.SEEN}
    since_seen = made[-1].received.timestamp() - max(at for name, at in seen.items() if name in lost)
    limit = 0.5 if jobs == 1 else None
    yield summary(f"{tag}: last loss seen to last CREATE", [since_seen], "s", "", limit, at_most=True)
    yield summary(f"{tag}: last loss to last CREATE", [late], "s", "")
    yield summary(f"{tag}: last loss to last CREATE, a bare client", [bare_late], "s", "")
    if late > 0:
        yield summary(f"{tag}: last loss to last CREATE, ratio", [bare_late / late], "x", "a bare client")
    goal = None if jobs == 1 else 0.8
    ratio = window(bare_losses, bare_made) / window(losses, made)
    yield summary(f"{tag}: losses replaced a second, ratio", [ratio], "x", "a bare client", goal)
    yield summary(f"{tag}: writes for each pod", [writes / everything], "", "", 1.5, at_most=True)


async def _take(world: World, space: str, names: list[str]) -> tuple[list[Write], list[Write]]:
    """Take these pods at once; the losses and the replacements, in order.

    Who deletes a pod first is answered that it did; the kubelet may be answered so, too.
    """
    since, before = len(world.log.read()), await world.count(space)
    await asyncio.gather(
        *(world.kube.delete(f"/api/v1/namespaces/{space}/pods/{name}", grace_seconds=0) for name in names)
    )

    async def replaced() -> bool:
        return await world.count(space) >= before

    await until(replaced, every=0.2)
    taken = {each.name: each for each in reversed(world.writes(space, since=since)) if is_loss(each)}
    lost = sorted((taken[name] for name in names), key=lambda each: each.answered)
    return lost, world.creates(space, since=since)[: len(names)]


def window(losses: list[Write], made: list[Write]) -> float:
    """Seconds from the first loss to the last replacement, for each of them."""
    return (made[-1].answered - losses[0].answered).total_seconds() / len(made)


def _since(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    return {name: seconds - before[name] for name, seconds in now.items()}


def _cpu(world: World, operator: Operator) -> dict[str, float]:
    return {"the operator": operator.cpu_seconds, **world.processes()}
