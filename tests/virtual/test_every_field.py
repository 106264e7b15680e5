"""Every field of a running job, changed and changed back: the end is that of a fresh job of the same spec.

Where it is not, a condition says why. What a pod is made of (template, queue, capacity) holds for the pods that are
made afterwards, so that pods are compared by number. Of a job with pools, the planner decides the number; what may not
change while a job runs is changed while it is suspended. `make test` plays a slice; with SHOAL_NIGHTLY=1, all of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from dataclasses import dataclass
from functools import cache

import pytest

from shoal.policy.decide.members import MOVED
from tests.every_field import (
    BASE,
    POOLED,
    POOLED_REFUSED,
    REFUSED,
    WHEN_SUSPENDED,
    Change,
    Json,
    changes,
)
from tests.virtual.cluster import SPOT, Machine
from tests.virtual.kueue import Kueue
from tests.virtual.loop import play
from tests.virtual.script import watch_slots
from tests.virtual.trainer import Truth
from tests.virtual.world import GROUP, World

NIGHTLY = bool(os.environ.get("SHOAL_NIGHTLY"))
ADMITTED = [change for change in changes() if str(change) not in REFUSED]
POOLED_ADMITTED = sorted(
    (change for change in changes(POOLED) if str(change) not in POOLED_REFUSED),
    key=lambda change: not change.path.startswith("elasticity."),
)
"""By day the first one is played: what the other base has not."""
SLICE = ADMITTED if NIGHTLY else ADMITTED[::8]
SEQUENCES = 100 if NIGHTLY else 3
LASTING = {"events", "leases", "nodes", "podgroups", "secrets", "speedprofiles"}
"""Objects that are not compared: a job keeps the Secret and the PodGroup that it once had, and what was learned."""
NUMBERS = {"pods", "workers", "slots"}
EXCUSED = {
    "DeadlineExceeded": {*NUMBERS, "phase", "conditions", "objects"},
    "PoolNotFound": {*NUMBERS, "phase", "conditions"},
    "NotFeasible": NUMBERS,
}
"""What a reason explains that a condition tells: it has failed, its pods stay where no new one may go, or no number of
workers is what its objective asks for. Of what has not failed, a fresh job tells the same reason."""
QUIET_SECONDS = 12.0
TOLD_SECONDS = 31.0
"""That the last replacement runs, or the successor of a worker that moves, is written with the next telemetry."""
PLAN_SECONDS = 10.0
PLANNED_SECONDS = 45.0
"""Quiet for so long, a plan has been made of what was measured."""


def shape(world: World) -> Json:
    """What a job has become, without its history and which of its slots it uses."""
    job = world.digest()["jobs"].get("digits")
    objects = Counter(key[0] for key in world.server.objects if key[0] not in LASTING)
    pods = objects.pop("pods", 0)
    if job is None:
        return {"objects": objects, "pods": pods}
    # What is False, or once began, may be of its past.
    slots = Counter((role, state) for role, _, state, _ in job["slots"] if state != "Ended")
    return {
        "objects": objects,
        "pods": pods,
        "lacks": world.lacking() if slots["ps", "Running"] else [],
        "phase": job["phase"],
        "observed": job["observed"],
        "conditions": [c for c in job["conditions"] if c[1] == "True" and c[0] != "Initialized"],
        "workers": {name: job["workers"][name] for name in ("desired", "active", "ready", "pending")},
        "slots": slots,
    }


@cache
def fresh(spec: str) -> End:
    """A job that is applied with this spec."""

    async def story() -> End:
        world = new_world()
        async with world.living("a"):
            world.apply(**json.loads(spec))
            await settled(world)
            return End.of(world, json.loads(spec))

    return play(story)


def begun(spec: Json) -> Json:
    """The spec without a change that means nothing later: in mode Auto, `replicas` is where a job begins."""
    if spec.get("elasticity", {}).get("mode") != "Auto":
        return spec
    return {**spec, "workers": {**spec["workers"], "replicas": POOLED["workers"]["replicas"]}}


def new_world() -> World:
    """Nodes of two pools, one of them spot, and of none; a queue with room."""
    world = World(lambda _uid: Truth(samples=1e9, update=0.02), plan_seconds=PLAN_SECONDS, kueue=True)
    world.nodes(8, 4)
    for name, label, price in (("spot", SPOT, 0.3), ("safe", {}, 1.0)):
        selector = {"pool": name}
        for number in range(8):
            world.cluster.add(Machine(f"{name}-pool-{number}", {**label, **selector, "accelerator": "T4"}))
        spec = {
            "accelerator": {"name": "T4"}, "capacityType": "Spot" if label else "OnDemand", "nodeSelector": selector,
            "limits": {"nodes": 8}, "price": {"perHour": price}, "startupSeconds": 10,
        }  # fmt: skip
        body = {"apiVersion": GROUP, "kind": "CapacityPool", "metadata": {"name": name}, "spec": spec}
        world.server.store(("capacitypools", "", name), body)
    Kueue(world).room = True
    watch_slots(world)
    return world


async def settled(world: World) -> None:
    """Wait until nothing changes any more."""
    job = world.server.get("trainingjobs", "digits", "team")
    planned = job is not None and job["spec"]["workers"].get("pools")
    await world.quiet(PLANNED_SECONDS if planned else QUIET_SECONDS)
    if job is None:
        return
    status = world.job().status
    if status.reason == "ReplacementOutstanding" or any(slot.cause == MOVED for slot in status.slots):
        await world.quiet(TOLD_SECONDS)


@dataclass(frozen=True)
class End:
    """What a job had become under a spec, and what its conditions say of why it is not as it should be."""

    spec: Json
    shape: Json
    because: frozenset[str]
    """Reasons, of those in `EXCUSED`."""
    failed: bool
    tell: str

    @classmethod
    def of(cls, world: World, spec: Json) -> End:
        """As it is now."""
        job = world.server.get("trainingjobs", "digits", "team")
        told = [c for c in (job["status"]["conditions"] if job else []) if c["reason"] in EXCUSED]
        assert all(c["message"] for c in told)
        failed = job is not None and job["status"]["phase"] == "Failed"
        return cls(spec, shape(world), frozenset(c["reason"] for c in told), failed, world.tell())

    def compare(self, *, back: bool = False) -> None:
        """With a fresh job; what is not the same a reason explains. `back`: then only that it has failed."""
        expected = fresh(json.dumps(begun(self.spec)))
        because = self.because if self.failed else frozenset() if back else self.because & expected.because
        excused = set[str]().union(*(EXCUSED[reason] for reason in because))
        parts = (self.shape.keys() | expected.shape.keys()) - excused
        different = {part for part in parts if self.shape.get(part) != expected.shape.get(part)}
        assert not different, f"{different}: {self.shape}\n{expected.shape}\n{self.spec}\n{self.tell}"


def changed_and_back(base: Json, change: Change, *, suspended: bool = False) -> list[End]:
    """What a job became after the change, and after the change back. `suspended`: each is made while it is."""

    async def story() -> list[End]:
        world, ends = new_world(), []
        async with world.living("a"):
            world.apply(**base)
            await settled(world)
            for before, after in ((base, change.of(base)), (change.of(base), base)):
                on_the_way = [{**before, "suspend": True}, {**after, "suspend": True}] if suspended else []
                for spec in (*on_the_way, after):
                    world.respec(spec)
                    await settled(world)
                ends.append(End.of(world, after))
        return ends

    return play(story)


@pytest.mark.parametrize("change", SLICE, ids=str)
def test_field_changed_and_changed_back(change: Change) -> None:
    there, back = changed_and_back(BASE, change)
    there.compare()
    back.compare(back=True)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("change", POOLED_ADMITTED, ids=str)
def test_field_of_a_job_with_pools_changed_and_changed_back(change: Change) -> None:
    there, back = changed_and_back(POOLED, change)
    there.compare()
    back.compare(back=True)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("change", WHEN_SUSPENDED, ids=str)
def test_field_changed_while_the_job_is_suspended_and_changed_back(change: Change) -> None:
    there, back = changed_and_back(BASE, change, suspended=True)
    there.compare()
    back.compare(back=True)


@pytest.mark.parametrize("seed", range(SEQUENCES))
def test_sequence_of_changes_ends_as_a_fresh_job(seed: int) -> None:
    """Changes on top of each other, some before the one before has settled; every third job has pools."""
    chance = random.Random(seed)
    base, admitted = (POOLED, POOLED_ADMITTED) if seed % 3 == 2 else (BASE, ADMITTED)
    lasting = [change for change in admitted if change.path != "runPolicy.activeDeadlineSeconds"]

    async def story() -> End:
        world = new_world()
        spec = base
        async with world.living("a"):
            world.apply(**base)
            for _ in range(8):
                await asyncio.sleep(chance.choice([0.0, 0.3, 2.0, 20.0]))
                change = chance.choice(lasting)
                world.respec(change.of(chance.choice([spec, base])))
                spec = world.server.objects["trainingjobs", "team", "digits"]["spec"]
            if chance.random() < 0.5:
                world.respec(base)
                spec = base
            await settled(world)
            return End.of(world, spec)

    play(story, seed).compare()
