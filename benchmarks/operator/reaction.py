"""From a loss to the CREATE of its replacement: alone, beside a job that ramps up, and for a wave that is announced."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime

from benchmarks.harness import Measurement, summary
from benchmarks.operator import traced
from benchmarks.operator.world import OPERATOR, World, is_loss, job, milliseconds, until
from dev.audit import Write
from dev.kube import Json
from shoal.policy.decide.cleanup import MOST_KEPT
from tests.doubles.fake_kubelet import FakeKubelet
from tests.doubles.pod_status import condition

NODES = 4
ROUNDS = 6
"""In which workers of a job are lost one by one, so that there are 96 losses: the largest is the 99th percentile."""
QUIET_SECONDS = 32.0
"""Before a loss that is alone: longer than the interval of telemetry, so that nothing of before is written with it."""


@dataclass(frozen=True)
class Loss:
    """A pod that was taken, and its replacement: the answer to the one's DELETE, and the other's POST as received."""

    name: str
    replacement: str
    answered: datetime
    received: datetime

    @property
    def ms(self) -> float:
        """How long it took, in milliseconds."""
        return milliseconds(self.answered, self.received)


@asynccontextmanager
async def nodes(world: World, prefix: str, count: int = NODES) -> AsyncIterator[FakeKubelet]:
    """Fake nodes with room for all."""
    async with FakeKubelet(world.plane.kubeconfig) as kubelet:
        size = {"pods": "2000", "cpu": "2000", "memory": "2000Gi"}
        unloved = [
            {"key": "example.com/safe", "effect": "PreferNoSchedule"}
        ]  # the workers live on the others
        await kubelet.add_node(f"{prefix}-safe", capacity=size, taints=unloved)
        for number in range(count):
            await kubelet.add_node(f"{prefix}-{number}", spot=True, capacity=size)
        yield kubelet
        for name in list(kubelet.nodes):
            await kubelet.remove_node(name)


async def measure(world: World, quick: bool) -> AsyncIterator[Measurement]:
    """The rows."""
    workers, big, losses = (8, 60, 4) if quick else (32, 1000, 16)
    trace = world.folder / "trace"
    async with nodes(world, "react") as kubelet, world.operator(trace=trace):
        led = time.time()  # before, it collects garbage on purpose
        await world.namespace("one")
        # An announced wave is of more pods than that.
        await world.apply(job("one", "one", workers, surge=1))
        await world.run("one", "one", workers)
        rounds = [losses] * (1 if quick else ROUNDS)
        alone = [each for most in rounds for each in await _lose_some(world, "one", most)]
        wave = await _wave(world, kubelet, "one")
        await world.run("one", "one", workers)
        await world.namespace("bare-one")
        await bare_pods(world, "bare-one", 1, workers)
        async with world.bare("replace", "bare-one"):
            bare = [each for most in rounds for each in await _lose_some(world, "bare-one", most)]
            bare_wave = await _wave(world, kubelet, "bare-one")
            await world.run("one", "one", workers)
            await world.namespace("big")
            await world.apply(job("big", "big", big))
            await until(lambda: _made(world, "big", big // 20))
            beside, bare_beside = await _lose_while_it_ramps(world, ("one", "bare-one"), losses, "big", big)
        own = [await _lose_own(world, "big", name) for name in await _workers(world, "big", losses // 2)]
        await world.run("big", "big", big)
        statuses = [each for each in world.writes("big", user=OPERATOR) if each.subresource == "status"]
        spread = (statuses[-1].answered - statuses[0].answered).total_seconds()
    moments = list(traced.read(trace))
    for name, found, limit, goals in (
        (f"taken pod to CREATE, {workers} workers", alone, bare, (15.0, 50.0)),
        (f"the same beside {big} workers that ramp up", beside, bare_beside, (None, 100.0)),
    ):
        middle = statistics.median(each.ms for each in found)
        yield summary(f"{name}: median", [middle], "ms", "", goals[0], at_most=True)
        for row in _largest(name, found, moments, goals[1]):
            yield row
        bare_middle = statistics.median(each.ms for each in limit)
        against = "a bare client's watch and POST"
        # A busy API server answers a DELETE after it has told the watches: both may be negative.
        yield summary(f"{name}: median, beyond", [middle - bare_middle], "ms", against)
        worst = max(each.ms for each in limit)
        yield summary(f"{name}: largest of {len(limit)}, {against}", [worst], "ms", "")
        yield summary(f"{name}: largest, ratio", [max(each.ms for each in found) / worst], "x", against)
    name = f"the same of the {big} themselves, amid their ramp"
    yield summary(f"{name}: median", [each.ms for each in own], "ms", "")
    for row in _largest(name, own, moments, 100.0):
        yield row
    held = [each for each in moments if each.what == traced.HELD and each.at > led]
    name = "event loop held by one callback, all this time: longest"
    yield summary(name, [max((each.seconds * 1000 for each in held), default=0.0)], "ms", "")
    most = max(held, key=lambda each: each.cpu, default=traced.Moment(0.0, traced.HELD, "nothing"))
    yield summary(f"{name} by its processor time, {most.name}", [most.cpu * 1000], "ms", "")
    yield summary("announced wave, of a job with maxSurge 1: pods", [len(wave)], "", "")
    yield summary("announced wave: notice to each CREATE", wave, "ms", "")
    yield summary("announced wave: notice to last CREATE", [max(wave)], "ms", "", 30.0, at_most=True)
    yield summary("announced wave: last CREATE, ratio", [max(wave) / max(bare_wave)], "x", "a bare client")
    interval = spread / (len(statuses) - 1)
    yield summary(f"status writes of {big} workers that ramp up", [1 / interval], "/s", "", 1.0, at_most=True)


def _largest(
    name: str, found: list[Loss], moments: list[traced.Moment], goal: float
) -> Iterator[Measurement]:
    """The slowest replacement, and where its time was spent."""
    worst = max(found, key=lambda each: each.ms)
    name = f"{name}: largest of {len(found)}"
    yield summary(name, [worst.ms], "ms", "", goal, at_most=True)
    parts = traced.parts(moments, worst.name, worst.replacement, worst.answered, worst.received)
    for words, part in parts.items():
        yield summary(f"{name}, of that {words}", [part], "ms", "")


async def measure_lone(world: World, quick: bool) -> AsyncIterator[Measurement]:
    """The writes that one loss costs while nothing else happens."""
    workers, losses = (12, 1) if quick else (32, 5)
    async with nodes(world, "lone") as kubelet, world.operator():
        await world.namespace("one")
        await world.apply(job("one", "one", workers))
        await world.run("one", "one", workers)

        async def taken(name: str) -> None:
            await world.kube.delete(f"/api/v1/namespaces/one/pods/{name}", grace_seconds=0)

        async def failed(name: str) -> None:
            await kubelet.fail_pod("one", name)

        for what, lose in (("lost", taken), ("that failed", failed)):
            found = [await _writes_of_a_loss(world, workers, lose, number) for number in range(losses)]
            at_once, all_told = zip(*found, strict=True)
            words = f"writes for a pod {what} alone"
            yield summary(f"{words}, until its replacement runs", list(at_once), "", "", 3.0, at_most=True)
            yield summary(f"{words}, until the status says so", list(all_told), "", "", 3.0, at_most=True)
        for name in (await _workers(world, "one", workers))[losses:MOST_KEPT]:
            await failed(name)
        await world.run("one", "one", workers)
        fresh = range(MOST_KEPT, MOST_KEPT + losses)  # those that fail again wait for longer
        found = [await _writes_of_a_loss(world, workers, failed, number) for number in fresh]
        words = f"writes for a pod that failed alone where {MOST_KEPT} are kept, until the status says so"
        yield summary(words, [all_told for _, all_told in found], "", "", 3.0, at_most=True)

        async def shut_down(name: str) -> None:
            by_kubelet = condition("DisruptionTarget", "True", "TerminationByKubelet")
            await kubelet.fail_pod("one", name, exit_code=143, pod_reason="Terminated", extra=by_kubelet)

        others = range(fresh.stop, fresh.stop + losses)
        found = [await _writes_of_a_loss(world, workers, shut_down, number) for number in others]
        words = "writes for a pod that its node ended alone, until the status says so"
        yield summary(words, [all_told for _, all_told in found], "", "", 3.0, at_most=True)


async def _workers(world: World, namespace: str, count: int) -> list[str]:
    """Workers that run, on nodes that stay."""
    nodes = (await world.kube.get("/api/v1/nodes"))["items"]
    staying = {
        node["metadata"]["name"]
        for node in nodes
        if any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"]["conditions"])
    }
    listed = await world.kube.get(
        f"/api/v1/namespaces/{namespace}/pods", labelSelector="shoal.dev/role=worker"
    )
    found = [
        pod["metadata"]["name"]
        for pod in listed["items"]
        if pod["status"].get("phase") == "Running"
        and "deletionTimestamp" not in pod["metadata"]
        and pod["spec"].get("nodeName") in staying
    ]
    return sorted(found)[:count]


async def _lose_some(world: World, namespace: str, most: int) -> list[Loss]:
    """Lose workers one by one, and wait until all run again."""
    found = [await _lose(world, namespace, name) for name in await _workers(world, namespace, most)]
    await _all_run(world, namespace)
    return found


async def _lose_while_it_ramps(
    world: World, namespaces: tuple[str, str], most: int, ramp: str, workers: int
) -> tuple[list[Loss], list[Loss]]:
    """Lose a worker of either namespace in turn, until those of the other job are all made."""
    found: tuple[list[Loss], list[Loss]] = ([], [])
    names = [await _workers(world, namespace, most) for namespace in namespaces]
    for pair in zip(*names, strict=False):
        for namespace, name, losses in zip(namespaces, pair, found, strict=True):
            losses.append(await _lose(world, namespace, name))
        if await _made(world, ramp, workers):
            break
    return found


async def _made(world: World, namespace: str, count: int, since: int = 0) -> bool:
    return len(world.creates(namespace, since=since)) >= count


async def _lose(world: World, namespace: str, name: str, successor: str = "") -> Loss:
    """The platform takes a pod, gone at once; until the CREATE of its `successor`, by default of any other."""
    since = len(world.log.read())
    await world.kube.delete(f"/api/v1/namespaces/{namespace}/pods/{name}", grace_seconds=0)

    async def made() -> Write | None:
        found = world.creates(namespace, since=since)
        return next((each for each in found if each.name == (successor or each.name)), None)

    created: Write = await until(made, every=0.02)
    lost = next(each for each in world.writes(namespace, since=since) if is_loss(each) and each.name == name)
    return Loss(name, created.name, lost.answered, created.received)


async def _writes_of_a_loss(
    world: World, workers: int, lose: Callable[[str], Awaitable[None]], number: int
) -> tuple[int, int]:
    """Lose the pod of this number when nothing else happens.

    The operator's writes until all run again, and until that is told.
    """
    await asyncio.sleep(QUIET_SECONDS)
    name = (await _workers(world, "one", workers))[number]
    since = len(world.log.read())
    await lose(name)
    await until(lambda: _made(world, "one", 1, since), every=0.02)

    async def run() -> bool:
        return len(await _workers(world, "one", workers)) == workers

    await until(run)
    await asyncio.sleep(2.0)  # what is told at once, and events
    at_once = len(world.writes("one", user=OPERATOR, since=since))
    await world.run("one", "one", workers)
    return at_once, len(world.writes("one", user=OPERATOR, since=since))


async def _lose_own(world: World, namespace: str, name: str) -> Loss:
    """The same of a job that makes other pods meanwhile."""
    before, _, incarnation = name.rpartition("-")
    return await _lose(world, namespace, name, f"{before}-{int(incarnation) + 1}")


async def _wave(world: World, kubelet: FakeKubelet, namespace: str) -> list[float]:
    """A node announces its end: milliseconds from the answer to the CREATE of each replacement.

    Of the spot nodes, the one with the most usual number of pods of the namespace: each pod more takes an API server on
    two cores 5 ms.
    """

    def of_namespace(name: str) -> list[Json]:
        return [pod for pod in kubelet.pods_on(name) if pod["metadata"]["namespace"] == namespace]

    pods = {name: len(of_namespace(name)) for name in kubelet.nodes if "-safe" not in name}
    usual = sum(pods.values()) / len(pods)
    node = min((name for name in pods if pods[name] > 1), key=lambda name: abs(pods[name] - usual))
    leaving = of_namespace(node)
    since = len(world.log.read())
    await kubelet.notice(node)
    told: datetime | None = None

    async def replaced() -> bool:
        return len(world.creates(namespace, since=since)) >= len(leaving)

    await until(replaced, every=0.02)
    for each in world.log.read()[since:]:
        if each.resource == "nodes" and each.name == node and each.verb == "patch" and told is None:
            told = each.answered
    assert told is not None
    return [milliseconds(told, each.received) for each in world.creates(namespace, since=since)]


async def bare_pods(world: World, namespace: str, jobs: int, workers: int) -> None:
    """Have the bare client make the objects of these jobs, and wait until their pods run."""
    await world.make_bare(namespace, jobs=jobs, workers=workers)
    await _all_run(world, namespace)


async def _all_run(world: World, namespace: str) -> None:
    async def run() -> bool:
        listed = await world.kube.get(f"/api/v1/namespaces/{namespace}/pods")
        return all(pod["status"].get("phase") == "Running" for pod in listed["items"])

    await until(run)
