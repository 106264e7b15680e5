"""One job's whole life, as a script: a reclaim, the loss of a parameter server, scaling, suspension, the end.

That of a job in a queue: it waits, is admitted, preempted, and admitted again. And that of a job in CapacityPools: it
loses nodes, is sent from one pool to another, and goes on while its pool is gone.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from shoal.api.labels import INCARNATION, INDEX, ROLE
from tests.virtual.cluster import SPOT, Machine
from tests.virtual.kueue import Kueue
from tests.virtual.loop import now, play
from tests.virtual.server import Change, Client, Faults, Json, Watch
from tests.virtual.trainer import Truth
from tests.virtual.world import GROUP, World

KINDS = (
    "pods",
    "trainingjobs",
    "services",
    "nodes",
    "poddisruptionbudgets",
    "workloads",
    "resourceflavors",
    "capacitypools",
    "speedprofiles",
)
"""What a leader reads of a cluster, each from a cache of its own in an API server."""
FRESH_SECONDS = 8.0
"""A leader that sees an old cluster sees the newest one after so long."""

LATE_SECONDS = 20.0
QUIET_SECONDS = 40.0
"""Longer than it takes another replica to lead."""


@dataclass(frozen=True)
class Trouble:
    """What goes wrong once. All None: nothing."""

    write: int | None = None
    """The operator is killed at its write of this number..."""
    after: bool = False
    """... after it took effect, and before the answer; else before it."""
    past: int | None = None
    """The next leader sees the cluster as it was so many versions ago, until its watches catch up..."""
    kind: str = ""
    """... only this one of `KINDS`, if it is not empty."""
    event: int | None = None
    """The watch event of this number, and all after it of the same watch, are 20 s late."""
    vanish: bool = False
    """Before the next leader begins, the worker pods vanish that no status knows of."""
    other: bool = False
    """Another replica takes over, instead of the same one after its restart."""


@dataclass
class Told:
    """What became of the script."""

    digest: Json
    events: int
    sent: list[str]
    """The writes, without events."""
    tell: str = ""
    interruptions: Counter[str] = field(default_factory=Counter)
    """Of each pool, as the job has counted them."""

    @property
    def writes(self) -> int:
        """How many there were."""
        return len(self.sent)


class Killer(Faults):
    """Kills the operator at one of its writes."""

    def __init__(self, trouble: Trouble) -> None:
        self.trouble = trouble
        self.sent: list[str] = []
        self.world: World | None = None

    async def before(self, client: Client, verb: str, key: str) -> None:
        if verb in {"GET", "WATCH"} or "/events" in key:
            return
        self.sent.append(f"{verb} {key}")
        if self.strikes(after=False):
            await self._kill(client)

    async def after(self, client: Client, verb: str, key: str) -> None:
        if verb in {"GET", "WATCH"} or "/events" in key:
            return
        if self.strikes(after=True):
            await self._kill(client)

    def strikes(self, *, after: bool) -> bool:
        """Whether the operator is killed before, or after, this write."""
        return (len(self.sent) - 1, after) == (self.trouble.write, self.trouble.after)

    async def _kill(self, client: Client) -> None:
        world = self.world
        assert world is not None
        replica = next(each for each in world.replicas if each.client is client)
        client.dead = True

        async def kill() -> None:
            await replica.kill()
            if self.trouble.vanish:
                _drop_unrecorded(world)
            await asyncio.sleep(2.0)
            if self.trouble.past is not None:
                version = max(1, world.server.version - self.trouble.past)
                replica.past = version, FRESH_SECONDS, self.trouble.kind
            if self.trouble.other:
                replica.name = "b"
            replica.start()

        self._killing = asyncio.create_task(kill())
        await asyncio.Event().wait()


def _drop_unrecorded(world: World) -> None:
    recorded = {(slot.role, slot.index, slot.incarnation) for slot in world.job().status.slots}
    for pod in world.server.all("pods"):
        labels = pod["metadata"]["labels"]
        place = (labels[ROLE], int(labels[INDEX]), int(labels[INCARNATION]))
        if labels[ROLE] == "worker" and place not in recorded:
            world.server.delete(("pods", pod["metadata"]["namespace"], pod["metadata"]["name"]), 0)


Life = Callable[[World], Coroutine[Any, Any, None]]


def tell_script(trouble: Trouble, life: Life | None = None) -> Told:
    """Play it."""
    return play(lambda: _script(trouble, life or eventful_life))


async def _script(trouble: Trouble, life: Life) -> Told:
    killer = Killer(trouble)
    world = killer.world = World(lambda _uid: Truth(samples=1e9), faults=killer, kueue=life is queued_life)
    world.nodes(6, 3)
    events = 0

    def lag(_watch: Watch, _change: Change) -> float:
        nonlocal events
        events += 1
        return LATE_SECONDS if events - 1 == trouble.event else 0.0

    world.server.lag = lag
    watch_slots(world)
    async with world.living("a"):
        await life(world)
        await world.quiet(QUIET_SECONDS)
        used = world.job().status.pool_usage
        interruptions = Counter({name: usage.interruptions for name, usage in used.items()})
        return Told(world.digest(), events, killer.sent, world.tell(), interruptions)


async def eventful_life(world: World) -> None:
    """Of a job that is not queued."""
    world.apply(runPolicy={"cleanPodPolicy": "All"})

    def ready(workers: int, disruptions: int = 0, restarts: int = 0) -> bool:
        status = world.job().status
        return (
            status.workers.ready == workers
            and len(
                [p for p in world.server.all("pods") if p["metadata"]["labels"]["shoal.dev/role"] == "worker"]
            )
            == workers
            and status.parameter_servers.ready == 1
            and status.restarts.disruptions == disruptions
            and status.parameter_servers.restarts == restarts
            and status.observed_generation == world.job().metadata.generation
            and not world.lacking()
        )

    await world.until(lambda: ready(3), 200, "three workers run")
    pod: Any = world.pod_at("worker", 1)
    world.cluster.notice(pod["spec"]["nodeName"])
    await world.until(lambda: ready(3, 1), 200, "the reclaimed worker is replaced")
    pod = world.pod_at("ps", 0)
    world.cluster.kill(pod["spec"]["nodeName"])
    await world.until(lambda: ready(3, 1, 1), 400, "the lost server is replaced")
    world.edit(workers={"replicas": 4, "maxReplicas": 6, "maxSurge": 1})
    await world.until(lambda: ready(4, 1, 1), 200, "scaled up")
    world.edit(workers={"replicas": 2, "maxReplicas": 6, "maxSurge": 1})
    await world.until(lambda: ready(2, 1, 1), 200, "scaled down")
    world.edit(suspend=True)
    await world.until(lambda: world.job().status.phase == "Suspended", 200, "suspended")
    world.edit(suspend=False)
    await world.until(lambda: ready(2, 1, 1), 200, "resumed")
    for run in world.trainers.runs.values():
        run.done = run.truth.samples
    await world.until(lambda: world.job().status.finished, 200, "the end")


async def queued_life(world: World) -> None:
    """Of a job that waits in Kueue as one Workload."""
    kueue = Kueue(world)
    workers = {"replicas": 3, "minReplicas": 2, "maxReplicas": 6, "maxSurge": 1}
    policy = {"queue": "team", "queueAs": "Workload"}
    world.apply(runPolicy={"cleanPodPolicy": "All", "schedulingPolicy": policy}, workers=workers)

    def runs() -> bool:
        status = world.job().status
        settled = status.observed_generation == world.job().metadata.generation and kueue.is_told_ready()
        whole = (status.parameter_servers.ready, status.workers.ready) == (1, 3) and not world.lacking()
        return settled and whole

    def waits(reason: str = "Queued") -> bool:
        return not world.server.all("pods") and world.job().status.reason == reason

    await world.until(waits, 200, "queued")
    kueue.room = True
    await world.until(runs, 200, "admitted")
    pod: Any = world.pod_at("worker", 1)
    world.cluster.notice(pod["spec"]["nodeName"])
    await world.until(lambda: runs() and world.job().status.restarts.disruptions == 1, 200, "replaced")
    kueue.preempt()
    await world.until(lambda: waits() and kueue.is_free(), 200, "preempted")
    kueue.room = True
    await world.until(runs, 200, "admitted again")
    uids = {pod["metadata"]["uid"] for pod in world.server.all("pods")}
    [workload] = world.server.all("workloads")
    world.server.remove(("workloads", "team", workload["metadata"]["name"]))
    await world.until(runs, 200, "another Workload is admitted")
    if {pod["metadata"]["uid"] for pod in world.server.all("pods")} != uids:
        world.faults_of_the_operator.append(AssertionError("a pod ended because its Workload was gone"))
    world.edit(workers={**workers, "minReplicas": 3})
    await world.until(lambda: runs() and kueue.asks() == {"ps": 1, "worker": 3}, 200, "queued for more")
    world.edit(suspend=True)
    await world.until(lambda: waits("Suspended") and not world.server.all("workloads"), 200, "suspended")
    world.edit(suspend=False)
    await world.until(runs, 200, "resumed")
    for run in world.trainers.runs.values():
        if run.repeated or not run.done:
            world.faults_of_the_operator.append(AssertionError(f"{run.repeated} samples were trained twice"))
        run.done = run.truth.samples
    await world.until(lambda: world.job().status.finished and kueue.is_told_finished(), 200, "the end")


async def pooled_life(world: World) -> None:
    """Of a job whose workers and server live in CapacityPools."""
    pools = {"a": ("Spot", 2, 4), "b": ("Spot", 4, 4), "s": ("OnDemand", 2, 2)}

    def describe(name: str) -> None:
        kind, limit, _ = pools[name]
        spec: Json = {"capacityType": kind, "nodeSelector": {"pool": name}, "limits": {"nodes": limit}}
        spec |= {"price": {"perHour": 0.3}, "startupSeconds": 10}
        body = {"apiVersion": GROUP, "kind": "CapacityPool", "metadata": {"name": name}, "spec": spec}
        world.server.store(("capacitypools", "", name), body)

    for name, (_, _, number) in pools.items():
        describe(name)
        for i in range(number):
            world.cluster.add(Machine(f"{name}-{i}", {"pool": name} | (SPOT if name != "s" else {})))
    workers = {"replicas": 3, "minReplicas": 1, "maxReplicas": 6, "maxSurge": 1}
    world.apply(
        runPolicy={"cleanPodPolicy": "All"},
        parameterServers={"replicas": 1, "pools": ["s"]},
        workers={**workers, "pools": ["a", "b"]},
    )

    def runs(a: int, b: int, disruptions: int = 0, restarts: int = 0) -> bool:
        status = world.job().status
        counts = Counter(slot.pool for slot in status.slots if slot.role == "worker")
        return (
            counts == +Counter(a=a, b=b)
            and (status.workers.ready, status.parameter_servers.ready) == (3, 1)
            and (status.restarts.disruptions, status.parameter_servers.restarts) == (disruptions, restarts)
            and status.observed_generation == world.job().metadata.generation
            and not world.lacking()
        )

    await world.until(lambda: runs(2, 1), 200, "three workers run")
    pod: Any = world.pod_at("worker", 0)
    world.cluster.notice(pod["spec"]["nodeName"])
    await world.until(lambda: runs(2, 1, 1), 200, "the reclaimed worker is replaced in its pool")
    pod = world.pod_at("worker", 1)
    world.cluster.kill(pod["spec"]["nodeName"])
    await world.until(lambda: runs(2, 1, 2), 400, "the lost worker is replaced")
    world.edit(workers={**workers, "pools": ["b"]})
    await world.until(lambda: runs(0, 3, 2), 300, "all are in the other pool")
    uids = {pod["metadata"]["uid"] for pod in world.server.all("pods")}
    world.server.remove(("capacitypools", "", "b"))
    await asyncio.sleep(30.0)
    describe("b")
    await world.until(lambda: runs(0, 3, 2), 200, "its pool is back")
    if {pod["metadata"]["uid"] for pod in world.server.all("pods")} != uids:
        world.faults_of_the_operator.append(AssertionError("a pod ended because its pool was gone"))
    pod = world.pod_at("ps", 0)
    world.cluster.kill(pod["spec"]["nodeName"])
    await world.until(lambda: runs(0, 3, 2, 1), 400, "the lost server is replaced")
    for run in world.trainers.runs.values():
        run.done = run.truth.samples
    await world.until(lambda: world.job().status.finished, 200, "the end")


def watch_slots(world: World) -> None:
    """No pod of a slot and incarnation twice; counters only grow; who trained trains.

    And clients of a server that there is are never sent back to an earlier one.

    What is broken is told when the world ends: an error would be raised in the operator, which goes on.
    """

    def broken(words: str) -> None:
        world.faults_of_the_operator.append(AssertionError(words))

    made: dict[tuple[str, str, str], str] = {}
    counters: dict[str, tuple[int, ...]] = {}

    def told(change: Change, old: Json | None) -> None:
        plural, _, name = change.key
        found = change.object
        if plural == "pods" and change.kind == "ADDED":
            key = (found["metadata"]["ownerReferences"][0]["uid"], name, "")
            if key in made:
                broken(f"{name} is made a second time at {now()}")
            made[key] = found["metadata"]["uid"]
        if plural == "services" and change.kind == "MODIFIED" and old is not None:
            before_it, after_it = (int(each["spec"]["selector"][INCARNATION]) for each in (old, found))
            newer = ("pods", change.key[1], f"{name}-{before_it}")
            if after_it < before_it and newer in world.server.objects:
                broken(f"{name} goes from {before_it} back to {after_it} at {now()}")
        if plural == "trainingjobs" and change.kind == "MODIFIED":
            status = found.get("status", {})
            fresh = (
                status.get("restarts", {}).get("failures", 0),
                status.get("restarts", {}).get("disruptions", 0),
                status.get("parameterServers", {}).get("restarts", 0),
            )
            before = counters.get(found["metadata"]["uid"], (0, 0, 0))
            if any(a < b for a, b in zip(fresh, before, strict=True)):
                broken(f"a counter goes from {before} to {fresh}")
            counters[found["metadata"]["uid"]] = fresh
            was, phase = ((each or {}).get("status", {}).get("phase", "") for each in (old, found))
            wanted = status.get("workers", {}).get("desired", 0)
            if was == "Running" and phase in {"Pending", "Starting"} and wanted:
                broken(f"the phase goes from {was} to {phase} at {now()}")

    world.server.on_change.append(told)
