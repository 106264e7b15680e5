"""Plays a scenario of a hidden truth with the real operator, and keeps what an invariant has against it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from shoal.api.training_job import TrainingJob
from shoal.policy.decide.usage import INTERRUPTIONS
from tests.virtual.cluster import Machine
from tests.virtual.hidden import HiddenPool, Scenario
from tests.virtual.loop import BEGIN, now, play, wall
from tests.virtual.script import Killer, Trouble, watch_slots
from tests.virtual.server import Change, Json
from tests.virtual.world import GROUP, World

STEP = 4.0
PROMISED = 0.95
UNSEEN = 10.0
"""Seconds of a node that are not counted where a worker came and went while the operator was down."""
SOON, SAME = 60.0, 0.01
"""A plan that is back within so many seconds went there for nothing, where the speeds that it rests on are the same."""
WAITS = 30.0
"""Seconds of a wait in vain that may have counted as others before it was known to be one: two looks at the pool."""
TWICE = 1.02
"""By so much may be counted more than there was: whole seconds."""


@dataclass(frozen=True)
class PlanChange:
    """A new plan of a job."""

    at: float
    job: str
    before: Mapping[str, int]
    after: Mapping[str, int]
    reason: str


@dataclass
class Told:
    """What became of a scenario."""

    cost: float = 0.0
    """Of all nodes of pools, idle ones too."""
    seconds: dict[str, float] = field(default_factory=dict)
    """From the start of each job to its end."""
    promised: dict[str, float] = field(default_factory=dict)
    """The first confidence of each job, of at least `PROMISED`, that rests on measurements."""
    at_half: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of each job when half of its work was done: seconds since its start, and from its start to the end that was
    predicted then."""
    changes: list[PlanChange] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    worked: Counter[str] = field(default_factory=Counter)
    """Node seconds of workers by pool."""


class _Kills(Killer):
    """Kills the operator at several of its writes."""

    def __init__(self, kills: tuple[tuple[int, bool], ...], told: Callable[[], None]) -> None:
        super().__init__(Trouble())
        self._kills = set(kills)
        self._told = told

    def strikes(self, *, after: bool) -> bool:
        """See `Killer`."""
        strikes = (len(self.sent) - 1, after) in self._kills
        if strikes:
            self._told()
        return strikes


class Story:
    """One scenario."""

    def __init__(self, scenario: Scenario, *, kills: bool = True) -> None:
        self.scenario, self.told = scenario, Told()
        faults = _Kills(scenario.kills if kills else (), self._heard)
        self._news = -SOON
        """When something last happened that a plan may follow."""
        self._stock: dict[str, int] = {}
        self._left: dict[str, tuple[float, Mapping[str, int], float]] = {}
        """By job: when it left its last plan, its counts, and the speed that it was expected to have."""
        self._truths = {job.name: job.truth() for job in scenario.jobs}
        self.world = faults.world = World(
            lambda uid: self._truths[self._name(uid)], faults=faults, step_seconds=STEP
        )
        self._chance = random.Random(scenario.seed + 1)
        self._happened: Counter[str] = Counter()
        self._taken: set[tuple[str, int, int]] = set()
        self._recorded: dict[tuple[str, int, int], str] = {}
        """Pools by worker that is recorded as interrupted."""
        self._sent = 0
        pulls = {pool.name: pool.pull for pool in scenario.pools}
        self.world.cluster.start_seconds = lambda process: pulls.get(process.machine.pool, 2.0)

    def play(self) -> Told:
        """Play it in virtual time."""
        play(self._play, self.scenario.seed)
        return self.told

    async def _play(self) -> None:
        world, scenario = self.world, self.scenario
        world.nodes(0, len(scenario.jobs))
        watch_slots(world)
        for pool in scenario.pools:
            world.cluster.shops[pool.name] = pool.shop()
            rate = self._chance.choice([0.02, 0.1, 0.5])
            spec = pool.manifest(rate, self._chance.choice([30, 60, 180]))
            meta = {"name": pool.name}
            body = {"apiVersion": GROUP, "kind": "CapacityPool", "metadata": meta, "spec": spec}
            world.server.store(("capacitypools", "", pool.name), body)
        world.server.on_change.append(self._plans)
        world.watchers.append(self._look)
        last = max(job.begins_at + job.deadline for job in scenario.jobs)
        async with world.living("a"):
            for job in sorted(scenario.jobs, key=lambda job: job.begins_at):
                await asyncio.sleep(max(0.0, job.begins_at - now()))
                self._apply(job.name)
            await world.until(self._all_ended, 1.5 * last, "the end")
            await asyncio.sleep(60)  # idle nodes are given back
            self._settle()

    def _heard(self) -> None:
        self._news = now()

    def _apply(self, name: str) -> None:
        self._heard()
        job = next(job for job in self.scenario.jobs if job.name == name)
        names = [pool.name for pool in self.scenario.pools]
        self.world.apply(
            name,
            training={"entrypoint": "digits:job", "batchSize": job.batch, "stopAfter": {"epochs": 1}},
            workers={
                "replicas": (job.workers + 1) // 2,
                "minReplicas": 1,
                "maxReplicas": job.workers,
                "pools": names,
            },
            elasticity={"mode": "Auto", "objective": {"deadlineSeconds": job.deadline}},
        )

    def _jobs(self) -> list[TrainingJob]:
        return [self.world.job(job.name) for job in self.scenario.jobs]

    def _all_ended(self) -> bool:
        jobs = self.world.server.all("trainingjobs")
        return all(job.get("status", {}).get("phase") in {"Succeeded", "Failed"} for job in jobs)

    def _name(self, uid: str) -> str:
        return next(
            o["metadata"]["name"]
            for o in self.world.server.all("trainingjobs")
            if o["metadata"]["uid"] == uid
        )

    # --- the cloud

    def _staying(self, pool: HiddenPool) -> list[Machine]:
        found = (m for m in self.world.cluster.machines.values() if m.pool == pool.name)
        return [m for m in found if m.powered and m.leaves_at is None]

    def _look(self) -> None:
        cluster = self.world.cluster
        for process in cluster.processes.values():
            if (
                process.role == "worker"
                and process.end is None
                and process.machine.pool
                and process.machine.powered
            ):
                self.told.worked[process.machine.pool] += STEP  # type: ignore[assignment]
        for pool in self.scenario.pools:
            if pool.nodes_at(now()) != self._stock.setdefault(pool.name, pool.limit):
                self._stock[pool.name] = pool.nodes_at(now())
                self._heard()
            staying = self._staying(pool)
            while self._happened[pool.name] < len(pool.losses):
                at, place = pool.losses[self._happened[pool.name]]
                if at > now():
                    break
                self._happened[pool.name] += 1
                if (index := int(place * pool.limit)) < len(staying):
                    self._take(staying.pop(index))
            while len(staying) > pool.nodes_at(now()):
                self._take(staying.pop(self._chance.randrange(len(staying))))
        self._check()

    def _take(self, machine: Machine) -> None:
        cluster = self.world.cluster
        for process in cluster.processes.values():
            pod = self.world.server.objects.get(process.pod)
            leaving = pod is None or "deletionTimestamp" in pod["metadata"]
            # A worker that ended in this second may count: nobody has seen its end.
            if process.machine is machine and not process.told and not leaving:
                self._taken.add((process.job, process.index, process.incarnation))
        cluster.notice(machine.name)
        self._heard()

    # --- what must hold

    def _check(self) -> None:
        for pool in self.scenario.pools:
            nodes = len(self._staying(pool)) + len(self.world.cluster.shops[pool.name].pending)
            if nodes > pool.limit:
                self._break(f"{nodes} nodes of {pool.name}, whose limit is {pool.limit}")
        for sent in self.world.server.sent[self._sent :]:
            if (
                sent.key[0] in {"trainingjobs", "capacitypools"}
                and sent.sub != "status"
                and sent.status < 300
            ):
                self._break(f"{sent.verb} {sent.key}: a spec was written")
        self._sent = len(self.world.server.sent)

    def _break(self, words: str) -> None:
        self.told.broken.append(f"at {now():.0f}: {words}")

    def _plans(self, change: Change, old: Json | None) -> None:
        if old is not None and _facts(change.object) != _facts(old):
            self._heard()
        if change.key[0] != "trainingjobs" or old is None:
            return
        name = change.key[2]
        for slot in change.object.get("status", {}).get("slots", []):
            if slot.get("cause") in INTERRUPTIONS:
                key = change.object["metadata"]["uid"], slot["index"], slot.get("incarnation", 0)
                self._recorded[key] = slot["pool"]
        before, after = (o.get("status", {}).get("plan") for o in (old, change.object))
        if before is not None and after is None:
            self._break(f"{name} lost its plan")
        if after is None:
            return
        self._half(name, change.object)
        confidence = float(after.get("confidence") or 0)
        basis = change.object["status"].get("prediction", {}).get("basis", "")
        if name not in self.told.promised and confidence >= PROMISED and "measured" in basis:
            self.told.promised[name] = confidence
        was, counts = (before or {}).get("pools", {}), after.get("pools", {})
        if was == counts:
            return
        self.told.changes.append(PlanChange(now(), name, was, counts, after.get("reason", "")))
        if after["revision"] != (before or {}).get("revision", 0) + 1:
            self._break(f"{name}: revision {after['revision']} follows on {before}")
        if not after.get("reason"):
            self._break(f"{name}: {was} -> {counts} without a reason")
        self._back(name, was, counts, old, change.object)
        if was and after["reason"].startswith("the job begins"):
            self._break(f"{name} begins again: {was} -> {counts}")

    def _back(
        self, name: str, was: Mapping[str, int], counts: Mapping[str, int], old: Json, new: Json
    ) -> None:
        """A plan that is left and taken up again, though nothing happened, should have been kept."""
        at, before, speed = self._left.get(name, (-SOON, {}, 0.0))
        same = abs(_speed(new) - speed) <= SAME * speed
        if counts == before and now() - at <= SOON and self._news <= at and same:
            self._break(f"{name} goes back for nothing: {before} -> {was} at {at:.0f} -> {counts}")
        self._left[name] = now(), was, _speed(old)

    def _half(self, name: str, job: Json) -> None:
        """Keep what is predicted when half of the work is done."""
        status = job["status"]
        done, said = status.get("training", {}).get("progressPercent"), status.get("prediction", {})
        if done is None or float(done) < 50 or name in self.told.at_half or "startTime" not in status:
            return
        if (left := said.get("remainingSeconds")) is not None:
            since = _between(datetime.fromisoformat(status["startTime"]), wall())
            self.told.at_half[name] = since, since + left

    def _settle(self) -> None:
        """The accounts, at the end."""
        told, world = self.told, self.world
        for machine in list(world.cluster.machines.values()):
            if machine.pool:
                world.cluster.drop(machine.name)
        told.cost = sum(shop.node_seconds * shop.price for shop in world.cluster.shops.values()) / 3600
        if invented := self._recorded.keys() - self._taken:
            self._break(f"{invented} are recorded as interrupted, and nothing took them")
        usage = [(job, pool, used) for job in self._jobs() for pool, used in job.status.pool_usage.items()]
        for job in self._jobs():
            assert job.status.start_time is not None
            end = job.status.completion_time or BEGIN
            told.seconds[job.metadata.name] = _between(job.status.start_time, end)
        for pool in self.scenario.pools:
            self._stock_counted(pool.name)
            counted = [used for _, name, used in usage if name == pool.name]
            seen = sum(used.interruptions for used in counted)
            lost = sum(name == pool.name for name in self._recorded.values())
            if seen != lost:
                self._break(f"{pool.name}: {lost} workers are recorded as interrupted, {seen} are counted")
            seconds, true = sum(used.node_seconds for used in counted), told.worked[pool.name]
            if not true / TWICE - UNSEEN * pool.limit <= seconds <= TWICE * true + 2 * pool.limit:
                self._break(f"{pool.name}: {true:.0f} node seconds, {seconds} are counted")

    def _stock_counted(self, pool: str) -> None:
        """Each second of the pool's stock counts once at most, also where the operator was killed beside its write."""
        stock = self.world.server.objects["capacitypools", "", pool].get("status", {}).get("stock", {})
        watched, out = (float(stock.get(name, 0)) for name in ("watchedSeconds", "outSeconds"))
        waited = WAITS * float(stock.get("outs", 0))
        if not out <= watched <= now() + waited:
            self._break(f"{pool}: {out:.0f} of {watched:.0f} s are counted as out of stock, in {now():.0f} s")


def _facts(job_or_pool: Json) -> tuple[Any, ...]:
    """What an object says that others plan by: its end, what its speed rests on, whether there are nodes."""
    status = job_or_pool.get("status", {})
    conditions = [(c["type"], c["status"]) for c in status.get("conditions", []) if c["type"] == "Exhausted"]
    return (
        status.get("phase") in {"Succeeded", "Failed"},
        status.get("prediction", {}).get("basis"),
        conditions,
    )


def _speed(job: Json) -> float:
    """Samples/s that a job is expected to make by its plan."""
    return float(job.get("status", {}).get("prediction", {}).get("samplesPerSecond") or 0)


def _between(begin: datetime, end: datetime) -> float:
    return (end - begin).total_seconds()
