"""Chaos by seed: two replicas, and all kinds of faults of the API server, the network, the machines and the users.

By turns of seeds the job is plain, has two shards, is planned on two pools, which people break, or waits in a queue;
beside each third one is a job whose namespace is deleted midway. Checked all the while: one pod of a slot and
incarnation, no write without the Lease, no healthy server deleted, counters that only grow, and no further than what
was done to pods. Afterwards the world is as specified, and nothing writes in a hot loop.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from shoal.cluster.transport import Answer
from shoal.errors import Unavailable
from tests.virtual.cluster import SPOT, Machine
from tests.virtual.judge import Judge
from tests.virtual.kueue import Kueue
from tests.virtual.loop import now, play
from tests.virtual.script import KINDS, watch_slots
from tests.virtual.server import Change, Client, Faults, Json, Watch
from tests.virtual.trainer import Truth
from tests.virtual.world import GROUP, World

FIRST = int(os.environ.get("SHOAL_CHAOS_FIRST", "0"))
SEEDS = int(os.environ.get("SHOAL_CHAOS_SEEDS", "10"))
FAULTY_SECONDS = 240.0
GUEST = "guest"
"""The namespace that is deleted midway, and the job in it."""
QUIET_WRITES = 20
"""In a minute in which nothing happens, telemetry included: more is a hot loop."""


@dataclass
class Weather(Faults):
    """Faults at random, until it clears."""

    chance: random.Random
    share: float = 0.08
    out_until: float = 0.0
    """The API server answers nobody until then."""
    unstored_until: float = 0.0
    """A webhook that every status is shown to is down until then."""
    denied: tuple[str, tuple[str, ...]] = "", ()
    """What roles or a quota refuse until `denied_until`: a part of a path, and the verbs."""
    denied_until: float = 0.0

    def over(self) -> None:
        """It clears."""
        self.share = self.out_until = self.unstored_until = self.denied_until = 0.0

    def deny(self, handle: Callable[..., Answer]) -> Callable[..., Answer]:
        """What the API server answers, unless that is denied."""

        def answer(who: str, verb: str, path: str, *rest: Any) -> Answer:
            part, verbs = self.denied
            if now() < self.denied_until and verb in verbs and part in path:
                return Answer(403, b'{"reason": "Forbidden", "message": "exceeded quota: few"}')
            return handle(who, verb, path, *rest)

        return answer

    async def before(self, client: Client, verb: str, key: str) -> None:
        if now() < self.out_until:
            await asyncio.sleep(0.2)
            raise Unavailable("connection refused")
        if now() < self.unstored_until and verb == "PUT" and key.endswith("/status"):
            raise Unavailable("500 failed calling webhook")
        if self.chance.random() < self.share:
            match self.chance.randrange(4):
                case 0:
                    raise Unavailable("500 internal error")
                case 1:
                    raise Unavailable("429 too many requests", retry_after=1.0)
                case 2:
                    await asyncio.sleep(self.chance.uniform(0.1, 3.0))
                case _:
                    await asyncio.sleep(40.0)

    async def after(self, client: Client, verb: str, key: str) -> None:
        if self.chance.random() < self.share / 3:
            raise Unavailable("connection reset after the request was done")


@dataclass
class LeaseWeather(Faults):
    """Of the Lease's own connections."""

    weather: Weather
    lost: str = ""
    """The replica whose renewals nobody answers until `lost_until`, while all else that it sends arrives."""
    lost_until: float = 0.0

    async def before(self, client: Client, verb: str, key: str) -> None:
        if now() < self.weather.out_until or (client.who == self.lost and now() < self.lost_until):
            await asyncio.sleep(0.2)
            raise Unavailable("connection refused")


POOLS: Json = {
    name: {
        "accelerator": {"name": "T4"},
        "capacityType": kind,
        "nodeSelector": {"pool": name},
        "limits": {"nodes": 6},
        "price": {"perHour": price},
        "startupSeconds": 10,
    }
    for name, kind, price in (("spot", "Spot", 0.3), ("safe", "OnDemand", 0.9))
}


class Chaos:
    """One seed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.weather = Weather(random.Random(seed + 1))
        kind = ("plain", "sharded", "pooled", "queued")[seed % 4]
        self.shards, self.pooled, queued = 1 + (kind == "sharded"), kind == "pooled", kind == "queued"
        truth = Truth(samples=1e9)
        self.world = World(lambda _uid: truth, faults=self.weather, plan_seconds=20.0, kueue=queued)
        self.world.lease_faults = self.leases = LeaseWeather(self.weather)
        self.world.server.handle = self.weather.deny(self.world.server.handle)  # type: ignore[method-assign]
        self.kueue = Kueue(self.world, strict=False) if queued else None
        self.judge = Judge(self.world, self.kueue)
        self.told: list[str] = []
        self.deaf_until = 0.0
        """The operator reaches no coordinator until then, so that nothing else tells it that pods work on."""
        self.world.trainers.deaf = lambda _uid: now() < self.deaf_until
        self.has_guest = seed % 3 == 0
        self.world.cluster.pods_first = seed % 5 < 3

    async def play(self) -> None:
        world = self.world
        for number in range(12):
            name, kind = ("spot", SPOT) if number < 8 else ("safe", {})
            world.cluster.add(self._machine(f"{name}-{number % 8}", name, kind))
        if self.pooled:
            self._pools()
        watch_slots(world)
        world.server.lag = self._lag
        world.watchers.append(self.judge.look)
        async with world.living("a"):
            world.replica("b")
            self._apply()
            if self.has_guest:
                world.server.namespaces[GUEST] = "Active"
                world.apply(GUEST, GUEST, workers={"replicas": 2, "maxReplicas": 2})
            if self.kueue:
                self.kueue.room = True
            await asyncio.sleep(20)
            end, lost = now() + FAULTY_SECONDS, False
            while now() < end:
                await asyncio.sleep(self.chance.uniform(2, 15))
                await self._something()
                if now() > end - FAULTY_SECONDS / 2:
                    self._delete_namespace()
                    lost = lost or self._lose_server()
            await self._clear()
            await self._as_specified()
        assert not self.judge.broken, "\n".join([*self.judge.broken[:10], *self.told])

    @staticmethod
    def _machine(name: str, pool: str, kind: dict[str, str]) -> Machine:
        return Machine(name, {**kind, "pool": pool, "accelerator": "T4"})

    def _pools(self, **change: Any) -> None:
        for name, spec in POOLS.items():
            known = self.world.server.get("capacitypools", name) or {
                "apiVersion": GROUP, "kind": "CapacityPool", "metadata": {"name": name}
            }  # fmt: skip
            self.world.server.store(("capacitypools", "", name), {**known, "spec": {**spec, **change}})

    def _apply(self) -> None:
        spec: Json = {"storage": {"uri": "s3://bucket/runs", "run": "digits"}, "workers": self._workers(3)}
        if self.pooled:
            spec["elasticity"] = {"mode": "Auto", "objective": {"deadlineSeconds": 30 * 24 * 3600}}
        policy: Json = {"backoffLimit": 1000}
        if self.kueue is not None:
            policy["schedulingPolicy"] = {"queue": "team", "queueAs": "Workload"}
        self.world.apply(parameterServers={"replicas": self.shards}, runPolicy=policy, **spec)

    def _workers(self, replicas: int) -> Json:
        pools = {"pools": list(POOLS)} if self.pooled else {}
        return {"replicas": replicas, "minReplicas": 1, "maxReplicas": 6, "maxSurge": 1, **pools}

    def _lag(self, watch: Watch, change: Change) -> float:
        late = self.chance.uniform(0.5, 20.0) if self.weather.share and self.chance.random() < 0.03 else 0.0
        # Of nodes that fall silent together, a watch that stops in their midst shows few: without the coordinators
        # nobody could know that it is all.
        return 0.0 if change.key[0] == "nodes" and now() < self.deaf_until else late

    async def _something(self) -> None:
        world, chance = self.world, self.chance
        machines = [m for m in world.cluster.machines.values() if m.powered and m.leaves_at is None]
        machine = chance.choice(machines)
        what = chance.choice(
            [
                "kill",
                "notice",
                "power",
                "blip",
                "all",
                "cut",
                "freeze",
                "out",
                "crash",
                "scale",
                "suspend",
                "hang",
                "unstored",
                "deny",
                "force",
                "replace",
                "lease",
                "stop",
                *(("limit", "misspelled", "drop") if self.pooled else ()),
                *(("preempt", "admit", "admit", "unqueue") if self.kueue else ()),
            ]
        )
        self.told.append(f"{now():.1f} {what} {machine.name}")
        match what:
            case "kill":
                replica = chance.choice(world.replicas)
                await replica.kill()
                if chance.random() < 0.4:  # it reads old lists, of all kinds or of one
                    version = max(1, world.server.version - chance.randint(1, 60))
                    kind = ("", *KINDS)[
                        version % (1 + len(KINDS))
                    ]  # drawn, it would make each seed another one
                    replica.past = version, chance.uniform(1.0, 20.0), kind
                asyncio.get_running_loop().call_later(2.0, replica.start)
            case "lease" | "stop":
                self._without_the_lease(what)
            case "notice" | "power" if len(machines) > 9 and len(world.cluster.machines) > 9:
                self._strike(machine)
                world.cluster.notice(machine.name) if what == "notice" else world.cluster.kill(machine.name)
            case "blip":
                self._strike(machine)
                await self._away([machine.name], chance.uniform(5, 60))
            case "all":  # no loss, whether or not their coordinator is heard
                seconds = chance.uniform(30, 90)
                self.deaf_until = now() + seconds * (len(self.told) % 2)
                await self._away([m.name for m in machines], seconds)
            case "cut" | "freeze":
                for watch in world.server.watches:
                    if chance.random() < 0.5 and what == "cut":
                        watch.lines.put_nowait(None)
                    elif chance.random() < 0.2:
                        watch.frozen = True
            case "out":
                self.weather.out_until = now() + chance.choice([3.0, 15.0, 60.0])
            case "crash" | "hang":
                running = [p for p in world.cluster.processes.values() if p.runs and p.role == "worker"]
                if running and what == "crash":
                    self.judge.strike([process := chance.choice(running)], crash=True)
                    world.cluster.crash(process, 1)
                elif running:
                    self.judge.strike([process := chance.choice(running)])
                    process.extra["hangs_until"] = now() + chance.uniform(3, 40)
            case "deny":
                self.weather.denied = chance.choice(
                    [
                        ("/pods", ("POST",)),
                        ("/services", ("POST", "DELETE")),
                        ("/pods", ("GET",)),
                        ("/nodes", ("GET",)),
                        ("/status", ("PUT",)),
                        ("/apis/shoal.dev", ("GET", "PUT")),
                    ]
                )
                self.weather.denied_until = now() + chance.uniform(3.0, 40.0)
            case "unstored":
                self.weather.unstored_until = now() + chance.choice([10.0, 60.0, 120.0])
            case "force" if pods := world.server.all("pods"):
                self._force(chance.choice(pods)["metadata"])
            case _:
                await self._people(what)

    def _without_the_lease(self, what: str) -> None:
        """The leader, if there is one, hangs, or nobody answers its renewals."""
        replica = next((each for each in self.world.replicas if each.leads), self.world.replicas[0])
        seconds = self.chance.uniform(5, 60)
        if what == "stop":
            replica.hang(seconds)
        else:
            self.leases.lost, self.leases.lost_until = replica.name, now() + seconds

    def _lose_server(self) -> bool:
        """The machine of a server that works loses its power, if there is one: chance alone rarely strikes it."""
        servers = [
            p
            for p in self.world.cluster.processes.values()
            if p.runs and p.role == "ps" and p.pod[1] != GUEST
        ]
        if not servers or len(self.world.cluster.machines) <= 9:
            return False
        self.told.append(f"{now():.1f} server {servers[0].machine.name}")
        self._strike(servers[0].machine)
        self.world.cluster.kill(servers[0].machine.name)
        return True

    def _delete_namespace(self) -> None:
        """The guest's, if it is there: all its pods are lost, and nothing can be made in their place."""
        if self.world.server.namespaces.get(GUEST) == "Active":
            self.told.append(f"{now():.1f} namespace {GUEST}")
            self.world.server.namespaces[GUEST] = "Terminating"
            for pod in self.world.server.all("pods", GUEST):
                self._strike_pod(pod["metadata"])

    def _force(self, meta: Json) -> None:
        self._strike_pod(meta)
        self.world.server.delete(("pods", meta["namespace"], meta["name"]), 0)

    def _strike_pod(self, meta: Json) -> None:
        """Also one that has no node yet."""
        if meta["labels"]["shoal.dev/role"] == "worker":
            self.judge.struck[meta["ownerReferences"][0]["uid"]].add(meta["uid"])

    def _strike(self, machine: Machine) -> None:
        self.judge.strike(p for p in self.world.cluster.processes.values() if p.machine is machine)

    async def _people(self, what: str) -> None:
        """What users, the platform's team and the queue do."""
        world, chance = self.world, self.chance
        match what:
            case "scale":
                world.edit(workers=self._workers(chance.randint(1, 5)))
            case "suspend":
                world.edit(suspend=chance.random() < 0.3)
            case "replace" if chance.random() < 0.3:
                world.server.remove(("trainingjobs", "team", "digits"))
                await asyncio.sleep(chance.choice([0.0, 5.0, 40.0]))
                self._apply()
            case "limit":
                self._pools(limits={"nodes": chance.randint(0, 6)})
            case "misspelled":
                self._pools(limits={"nodes": "many"})
            case "drop" if pools := world.server.all("capacitypools"):
                world.server.remove(("capacitypools", "", chance.choice(pools)["metadata"]["name"]))
            case "preempt" if self.kueue:
                self.kueue.preempt()
            case "admit" if self.kueue:
                self.kueue.room = True
            case "unqueue" if workloads := world.server.all("workloads"):
                world.server.remove(("workloads", "team", workloads[0]["metadata"]["name"]))

    async def _away(self, names: list[str], seconds: float) -> None:
        for name in names:
            self.world.cluster.disconnect(name)
        await asyncio.sleep(seconds)
        for name in names:
            if name in self.world.cluster.machines:
                self.world.cluster.reconnect(name)

    async def _clear(self) -> None:
        self.weather.over()
        self.leases.lost_until = 0.0
        self.world.edit(suspend=False, workers=self._workers(3))
        if self.pooled:
            self._pools()
        if self.kueue:
            self.kueue.room = True
        machines = [m for m in self.world.cluster.machines.values() if m.powered and m.leaves_at is None]
        spot = sum(m.name.startswith("spot") for m in machines)
        for number in range(max(0, 6 - spot)):
            self.world.cluster.add(self._machine(f"new-{number}", "spot", SPOT))
        # What was in flight ends first: the Lease, machines that are gone, half-open watches, the longest back-off.
        await asyncio.sleep(150)

    def _left_behind(self) -> set[str]:
        """The jobs that are gone, and have something left."""
        world = self.world
        jobs = {job["metadata"]["uid"] for job in world.server.all("trainingjobs")}
        owners = {
            owner["uid"]
            for found in world.server.objects.values()
            for owner in found["metadata"].get("ownerReferences", ())
            if owner["kind"] == "TrainingJob"
        }
        ended = {GUEST} & world.server.namespaces.keys()
        return (owners | {process.job for process in world.cluster.processes.values()}) - jobs | ended

    async def _as_specified(self) -> None:
        world = self.world
        words = "\n".join(self.told)

        def right() -> bool:
            status = world.job().status
            pods = world.server.all("pods")
            # Which workers stay is the operator's choice: a scale-down takes those that are most at risk.
            places = [
                p["metadata"]["name"].rpartition("-")[0] for p in pods if p["status"]["phase"] == "Running"
            ]
            workers = status.workers.desired
            return (
                (workers >= 1 if self.pooled else workers == 3)
                and status.workers.ready == workers
                and status.parameter_servers.ready == self.shards
                and len(places) == len(set(places)) == workers + self.shards
                and {f"digits-ps-{shard}" for shard in range(self.shards)} < set(places)
                and not any("deletionTimestamp" in p["metadata"] for p in pods)
                and not world.lacking()
                and not self._left_behind()
            )

        def pools_are_read() -> bool:
            """Also those that were dropped, or could not be read for a while."""
            return all(
                pool.get("status", {}).get("observedGeneration") == pool["metadata"]["generation"]
                and ("Ready", "True") in {(c["type"], c["status"]) for c in pool["status"]["conditions"]}
                for pool in world.server.all("capacitypools")
            )

        await world.until(right, 60, f"as specified\n{words}")
        await world.until(pools_are_read, 60, f"pools that are ready\n{words}")
        began, sent = now(), len(world.server.sent)
        await asyncio.sleep(60)
        writes = sum(1 for s in world.server.sent[sent:] if s.key[0] not in {"leases"})
        assert writes <= QUIET_WRITES, f"{writes} writes in {now() - began:.0f} quiet seconds"
        assert right(), world.tell()
        for run in world.trainers.runs.values():
            run.done = run.truth.samples
        await world.until(lambda: world.job().status.finished, 120, "the end")


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
def test_whatever_happens_nothing_is_lost_doubled_or_left(seed: int) -> None:
    async def story() -> None:
        await Chaos(seed).play()

    play(story, seed)
