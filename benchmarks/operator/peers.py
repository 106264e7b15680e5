"""Shoal beside Kubeflow's TFJob and JobSet: the same jobs, nodes and losses, on control planes alike, in turns.

Each turn is one system's: what it makes of many jobs, between two runs of a bare client that makes its objects; or what
it does about losses, before a bare client that replaces its pods.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from benchmarks.harness import Measurement, summary
from benchmarks.operator.reaction import QUIET_SECONDS, nodes
from benchmarks.operator.sample import KINDS, sample
from benchmarks.operator.systems import LIMITED, System, systems
from benchmarks.operator.throughput import window
from benchmarks.operator.world import World, is_create, is_loss, milliseconds, rate, until
from dev.audit import Write
from dev.kube import Json
from tests.doubles.fake_kubelet import FakeKubelet
from tests.doubles.pod_status import condition

Turn = Callable[[World, bool], AsyncIterator[Measurement]]
WORKERS = 4
"""And a parameter server: a job of five pods."""
SETTLE_SECONDS = 3.0
SPACING_SECONDS = 0.5
"""Between two losses that are to be alone, each of another job."""
PATIENCE_SECONDS = 60.0
"""For all pods of many jobs, and for replacements: what is not made then, is not."""
DELETED, FAILED = "deleted", "Failed (137, DisruptionTarget)"
TAKES = (DELETED, FAILED)


def turns() -> Iterator[Turn]:
    """One after another, each for a control plane of its own. The peers are built first."""
    compared = systems()
    for measured in (started, losses):
        yield from (
            partial(measured, each) for each in compared if measured is started or each.name != LIMITED
        )


async def started(system: System, world: World, quick: bool) -> AsyncIterator[Measurement]:
    """Jobs of five pods, applied together; then larger ones, until there are 5,000 pods."""
    jobs, larger, workers = (4, 1, 9) if quick else (200, 40, 99)
    wanted, more = jobs * (WORKERS + 1), larger * (workers + 1)
    async with system.running(world):
        await asyncio.sleep(SETTLE_SECONDS)
        await _apply(world, system, "sample", 1, WORKERS)
        await until(partial(_made, world, "sample", WORKERS + 1))
        await asyncio.sleep(SETTLE_SECONDS)
        like = await _sample(world, system, "sample")
    before = await _bare_made(world, "bare-before", jobs, like)
    async with system.running(world) as operator:
        await asyncio.sleep(SETTLE_SECONDS)
        memory, cpu = {"idle": operator.resident_mib}, operator.cpu_seconds
        await _apply(world, system, "many", jobs, WORKERS)
        await _within_patience(partial(_made, world, "many", wanted))
        pods = world.creates("many")[:wanted]
        cpu = operator.cpu_seconds - cpu
        await asyncio.sleep(SETTLE_SECONDS)
        if len(pods) == wanted:
            memory[f"{wanted} pods"] = operator.resident_mib
        ours = [each for each in world.writes("many") if each.user in system.users]
        if system.name != LIMITED:
            await _apply(world, system, "larger", larger, workers)
            await until(partial(_made, world, "larger", more), every=0.2)
            await asyncio.sleep(SETTLE_SECONDS)
            memory[f"{wanted + more} pods"] = operator.resident_mib
    after = await _bare_made(world, "bare-after", jobs, like)
    applied = min(each.received for each in world.writes("many") if each.resource == system.plural)
    made = [each for each in ours if is_create(each) and each.resource in KINDS]
    name = f"{system.name}: {jobs} jobs of {WORKERS + 1} pods"
    bare = [rate(_pods(each)) for each in (before, after)]
    yield summary(f"{name}: pods a second", [rate(pods)], "", "")
    against = "a bare client that makes the same objects"
    yield summary(f"{name}: pods a second, {against}", bare, "", "")
    yield summary(f"{name}: pods a second, ratio", [rate(pods) / statistics.mean(bare)], "x", against)
    yield summary(f"{name}: objects a second", [rate(made)], "", "")
    yield summary(f"{name}: pods made within {PATIENCE_SECONDS:.0f} s", [len(pods)], "", "")
    if len(pods) == wanted:
        last = (pods[-1].answered - applied).total_seconds()
        yield summary(f"{name}: first job applied to last pod made", [last], "s", "")
    yield summary(
        f"{name}: processor time of the controller for each pod", [cpu / len(pods) * 1000], "ms", ""
    )
    yield summary(f"{name}: writes for each pod", [len(ours) / len(pods)], "", "")
    yield summary(f"{system.name}: ended by itself while it made 5,000 pods", [operator.restarts], "", "")
    for what, mib in memory.items():
        yield summary(f"{system.name}: resident memory, {what}", [mib], "MiB", "")


async def losses(system: System, world: World, quick: bool) -> AsyncIterator[Measurement]:
    """Workers lost one by one, each of another job; then half of those of some larger jobs at once."""
    count, jobs, workers, quiet = (2, 2, 4, 1.0) if quick else (16, 10, 60, QUIET_SECONDS)
    async with nodes(world, "peer") as kubelet:
        async with system.running(world):
            await asyncio.sleep(SETTLE_SECONDS)
            spaces = {
                f"{kind.split()[0].lower()}-{number}": kind for kind in TAKES for number in range(count)
            }
            for space in spaces:
                await _apply(world, system, space, 1, WORKERS)
            await _apply(world, system, "mass", jobs, workers)
            await _run(world, "mass", (workers + 1) * jobs)
            for space in spaces:
                await _run(world, space, WORKERS + 1)
            await asyncio.sleep(quiet)  # what is told of the start belongs to no loss
            async for row in _one_by_one(system, world, kubelet, spaces, quiet):
                yield row
            like = await _sample(world, system, "mass")
            lost, made = await _take_half(world, system, "mass")
            ended = await _ended(world, system, "mass")
        bare = "bare-mass"
        await world.namespace(bare)
        await world.make_bare(bare, jobs=jobs, like=like)
        await _run(world, bare, (workers + 1) * jobs)
        async with world.bare("replace", bare, like=like):
            bare_lost, bare_made = await _take_half(world, system, bare)
    name = f"{system.name}: {len(lost)} of {workers * jobs} workers lost at once"
    yield summary(f"{name}: replaced within {PATIENCE_SECONDS:.0f} s", [len(made)], "", "")
    yield summary(f"{name}: jobs that it ended as Failed", [ended], "", "")
    if made:
        speed, limit = 1 / window(lost, made), 1 / window(bare_lost, bare_made)
        late = (made[-1].received - lost[-1].answered).total_seconds()
        yield summary(f"{name}: replaced a second", [speed], "", "")
        against = "a bare client's watch and POST"
        yield summary(f"{name}: replaced a second, {against}", [limit], "", "")
        yield summary(f"{name}: replaced a second, ratio", [speed / limit], "x", against)
        yield summary(f"{name}: last loss to last CREATE", [late], "s", "")


async def _one_by_one(
    system: System, world: World, kubelet: FakeKubelet, spaces: Mapping[str, str], quiet: float
) -> AsyncIterator[Measurement]:
    """The platform takes a worker of each job, by a deletion or by an end of its containers."""

    async def delete(space: str, name: str) -> None:
        await world.kube.delete(f"/api/v1/namespaces/{space}/pods/{name}", grace_seconds=0)

    async def fail(space: str, name: str) -> None:
        why = condition("DisruptionTarget", "True", "TerminationByKubelet", "the node is going")
        await kubelet.fail_pod(space, name, exit_code=137, extra=why)

    since = len(world.log.read())
    taken = {}
    for space, kind in spaces.items():
        taken[space] = (await _workers(world, system, space))[0]
        await (delete if kind == DELETED else fail)(space, taken[space])
        await asyncio.sleep(SPACING_SECONDS)

    async def replaced() -> bool:
        return all(world.creates(space, since=since) for space in spaces)

    await _within_patience(replaced)
    await asyncio.sleep(quiet)
    for kind in TAKES:
        times, writes, ended = [], [], 0
        for space in (each for each in spaces if spaces[each] == kind):
            written = world.writes(space, since=since)
            ended += await _ended(world, system, space)
            writes.append(sum(each.user in system.users for each in written))
            lost = next(each for each in written if _took(each, taken[space]))
            if made := world.creates(space, since=since):
                times.append(milliseconds(lost.answered, made[0].received))
        name = f"{system.name}: worker {kind} to CREATE"
        yield summary(f"{name}: replaced of {len(writes)}", [len(times)], "", "")
        yield summary(f"{name}: jobs that it ended as Failed", [ended], "", "")
        if times:
            yield summary(f"{name}: median", times, "ms", "")
            yield summary(f"{name}: worst", [max(times)], "ms", "")
        yield summary(f"{system.name}: worker {kind}: writes for it", [statistics.mean(writes)], "", "")


async def _apply(world: World, system: System, space: str, jobs: int, workers: int) -> None:
    """Jobs in a namespace of their own."""
    await world.namespace(space)
    places = asyncio.Semaphore(32)

    async def apply(number: int) -> None:
        async with places:
            await world.kube.create(system.path.format(space), system.job(space, f"job-{number}", workers))

    await asyncio.gather(*(apply(number) for number in range(jobs)))


async def _made(world: World, space: str, count: int) -> bool:
    return await world.count(space) >= count


async def _run(world: World, space: str, count: int) -> None:
    """Wait until so many pods of a namespace run."""

    async def run() -> bool:
        return len(await _running(world, space, "")) >= count

    await until(run, every=0.2)


async def _running(world: World, space: str, label: str) -> list[str]:
    listed = await world.kube.get(KINDS["pods"].format(space), labelSelector=label)
    return sorted(
        pod["metadata"]["name"]
        for pod in listed["items"]
        if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
    )


async def _workers(world: World, system: System, space: str) -> list[str]:
    return await _running(world, space, system.workers)


async def _sample(world: World, system: System, space: str) -> Path:
    """A file with the objects that the system made of the first job."""
    names: dict[str, set[str]] = {}
    for each in world.writes(space):
        if is_create(each) and each.user in system.users and each.resource != "events":
            names.setdefault(each.resource, set()).add(each.name)
    found: list[tuple[str, Json]] = []
    for kind in names:
        listed = await world.kube.get(KINDS[kind].format(space))
        found += [
            (kind, body) for body in listed["items"] if f"{body['metadata']['name']}-".startswith("job-0-")
        ]
    return sample("job-0", found, system.workers).write(world.folder / f"{space}.json")


async def _bare_made(world: World, space: str, jobs: int, like: Path) -> list[Write]:
    """All that the bare client made of so many jobs."""
    await world.namespace(space)
    await world.make_bare(space, jobs=jobs, like=like)
    return [each for each in world.writes(space) if is_create(each) and each.resource in KINDS]


async def _take_half(world: World, system: System, space: str) -> tuple[list[Write], list[Write]]:
    """Take every second worker at once; the losses and the replacements, in order."""
    names = (await _workers(world, system, space))[::2]
    since = len(world.log.read())
    path = KINDS["pods"].format(space)
    await asyncio.gather(*(world.kube.delete(f"{path}/{name}", grace_seconds=0) for name in names))

    async def replaced() -> bool:
        return len(world.creates(space, since=since)) >= len(names)

    await _within_patience(replaced)
    taken = {each.name: each for each in reversed(world.writes(space, since=since)) if is_loss(each)}
    lost = sorted((taken[name] for name in names), key=lambda each: each.answered)
    return lost, world.creates(space, since=since)[: len(names)]


async def _ended(world: World, system: System, space: str) -> int:
    """How many jobs of a namespace have failed."""
    listed = await world.kube.get(system.path.format(space))
    conditions = (each.get("status", {}).get("conditions", []) for each in listed["items"])
    return sum(
        any(one["type"] == "Failed" and one["status"] == "True" for one in each) for each in conditions
    )


async def _within_patience(reached: Callable[[], Awaitable[bool]]) -> None:
    """Wait for it, but no longer than that."""
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await until(reached, every=0.1)
    except TimeoutError:
        pass


def _took(write: Write, name: str) -> bool:
    """Whether it is the pod's deletion, or the first word of its end."""
    ended = write.verb == "patch" and write.subresource == "status"
    return write.resource == "pods" and write.name == name and (ended or is_loss(write))


def _pods(writes: list[Write]) -> list[Write]:
    return [each for each in writes if each.resource == "pods"]
