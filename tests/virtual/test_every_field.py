"""Every field of a running job, changed and changed back: the end is that of a fresh job of the same spec.

Where it is not, a condition says why. What a pod is made of (template, queue, capacity) holds for the pods that are
made afterwards, so that pods are compared by number. `make test` plays a slice; with SHOAL_NIGHTLY=1, all of it.
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

from tests.every_field import BASE, REFUSED, Change, Json, changes
from tests.virtual.loop import play
from tests.virtual.script import watch_slots
from tests.virtual.trainer import Truth
from tests.virtual.world import World

NIGHTLY = bool(os.environ.get("SHOAL_NIGHTLY"))
ADMITTED = [change for change in changes() if str(change) not in REFUSED]
SLICE = ADMITTED if NIGHTLY else ADMITTED[::8]
SEQUENCES = 100 if NIGHTLY else 3
LASTING = {"events", "leases", "nodes", "secrets", "speedprofiles"}
"""Objects that are not compared: a job keeps the Secret that it once had, and what was learned of its model."""
REASONS = {"Failed", "Degraded", "Stalled"}
"""Conditions that say why a job is not as its spec wants it."""
QUIET_SECONDS = 12.0


def shape(world: World) -> Json:
    """What a job has become, without its history and which of its slots it uses."""
    job = world.digest()["jobs"].get("digits")
    objects = Counter(key[0] for key in world.server.objects if key[0] not in LASTING)
    if job is None:
        return {"objects": objects}
    # What is False, or once began, may be of its past.
    slots = Counter((role, state) for role, _, state, _ in job["slots"] if state != "Ended")
    return {
        "objects": objects,
        "phase": job["phase"],
        "observed": job["observed"],
        "conditions": [c for c in job["conditions"] if c[1] == "True" and c[0] != "Initialized"],
        "workers": {name: job["workers"][name] for name in ("desired", "active", "ready", "pending")},
        "slots": slots,
    }


@cache
def fresh(spec: str) -> Json:
    """A job that is applied with this spec."""

    async def story() -> Json:
        world = new_world()
        async with world.living():
            world.replica("a")
            world.apply(**json.loads(spec))
            await world.quiet(QUIET_SECONDS)
            return shape(world)

    return play(story)


def new_world() -> World:
    world = World(lambda _uid: Truth(samples=1e9))
    world.nodes(8, 4)
    watch_slots(world)
    return world


@dataclass(frozen=True)
class End:
    """What a job had become under a spec, and the conditions that say why it is not as it should be."""

    spec: Json
    shape: Json
    because: list[Json]
    tell: str

    @classmethod
    def of(cls, world: World, spec: Json) -> End:
        """As it is now."""
        job = world.server.get("trainingjobs", "digits", "team")
        conditions = job["status"]["conditions"] if job else []
        because = [c for c in conditions if c["type"] in REASONS and c["status"] == "True"]
        return cls(spec, shape(world), because, world.tell())

    def compare(self) -> None:
        """With a fresh job; or else a condition says why it is not the same."""
        same = self.shape == fresh(json.dumps(self.spec))
        assert same or self.because, f"{self.shape}\n{fresh(json.dumps(self.spec))}\n{self.spec}\n{self.tell}"
        assert all(c["reason"] and c["message"] for c in self.because)


@pytest.mark.parametrize("change", SLICE, ids=str)
def test_field_changed_and_changed_back(change: Change) -> None:
    async def story() -> list[End]:
        world = new_world()
        async with world.living():
            world.replica("a")
            world.apply(**BASE)
            await world.quiet(QUIET_SECONDS)
            ends = []
            for spec in (change.of(BASE), BASE):
                world.respec(spec)
                await world.quiet(QUIET_SECONDS)
                ends.append(End.of(world, spec))
        return ends

    for end in play(story):
        end.compare()


@pytest.mark.parametrize("seed", range(SEQUENCES))
def test_sequence_of_changes_ends_as_a_fresh_job(seed: int) -> None:
    """Changes on top of each other, some before the one before has settled; a failed job ends it."""
    chance = random.Random(seed)
    lasting = [change for change in ADMITTED if change.path != "runPolicy.activeDeadlineSeconds"]

    async def story() -> End:
        world = new_world()
        spec = BASE
        async with world.living():
            world.replica("a")
            world.apply(**BASE)
            for _ in range(8):
                await asyncio.sleep(chance.choice([0.0, 0.3, 2.0, 20.0]))
                change = chance.choice(lasting)
                world.respec(change.of(chance.choice([spec, BASE])))
                spec = world.server.objects["trainingjobs", "team", "digits"]["spec"]
            if chance.random() < 0.5:
                world.respec(BASE)
                spec = BASE
            await world.quiet(QUIET_SECONDS)
            return End.of(world, spec)

    play(story, seed).compare()
