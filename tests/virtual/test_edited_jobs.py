"""Jobs that somebody else has changed: what the operator cannot read, or knows nothing about, harms no other job."""

from __future__ import annotations

import asyncio
from collections import Counter

from prometheus_client import generate_latest

from tests.virtual.loop import play, played
from tests.virtual.server import Client, Faults, Json
from tests.virtual.trainer import Truth
from tests.virtual.world import World

TOO_LARGE = {"entrypoint": "digits:job", "args": {"x": "y" * 70_000}, "stopAfter": {"epochs": 1}}


class Counted(Faults):
    """Counts requests."""

    def __init__(self) -> None:
        self.sent: Counter[tuple[str, str]] = Counter()

    async def before(self, client: Client, verb: str, key: str) -> None:
        self.sent[verb, key] += 1


def _status(world: World, name: str = "digits") -> Json:
    found: Json = world.server.objects["trainingjobs", "team", name].get("status") or {}
    return found


def test_leader_that_comes_after_a_job_that_it_cannot_read_tells_its_owner() -> None:
    counted = Counted()

    async def story() -> None:
        world = World(lambda _uid: Truth(samples=1e9), faults=counted)
        world.nodes(3, 1)
        async with world.living():
            world.apply("big", training=TOO_LARGE)
            replica = world.replica("a")
            await world.until(lambda: _status(world, "big").get("reason") == "Unreadable", 30.0, "it is told")
            [stalled] = [c for c in _status(world, "big")["conditions"] if c["type"] == "Stalled"]
            assert "no lost pod is replaced" in stalled["message"]
            said = "spec.training.args: the arguments have "
            assert f"cannot read {said}" in stalled["message"], "the API server cannot count their bytes"
            assert "one that is immutable, in a new job" in stalled["message"]
            await asyncio.sleep(5.0)
            operator = replica.operator
            assert operator is not None
            found = world.server.objects["trainingjobs", "team", "big"]
            meta = found["metadata"]
            assert not operator.missed("trainingjobs", meta["uid"], meta["resourceVersion"]), "it was seen"

    play(story)


@played
async def test_condition_of_another_controller_stays() -> None:
    world = World(lambda _uid: Truth(samples=1e9))
    world.nodes(3, 1)
    async with world.living("a"):
        world.apply()
        await world.until(lambda: world.job().status.phase == "Starting", what="it begins")
        key = ("trainingjobs", "team", "digits")
        approved = {
            "type": "example.com/Approved",
            "status": "True",
            "reason": "Yes",
            "message": "",
            "lastTransitionTime": "2026-03-02T08:00:00Z",
        }
        before = _status(world)
        status = {**before, "conditions": [*before["conditions"], approved]}
        world.server.store(key, {**world.server.objects[key], "status": status})
        await world.until(lambda: world.job().status.phase == "Running", what="it trains")
        assert "example.com/Approved" in {c["type"] for c in _status(world)["conditions"]}


@played
async def test_cost_that_is_no_number_does_not_end_the_metrics_of_all_jobs() -> None:
    world = World(lambda _uid: Truth(samples=1e9))
    world.nodes(3, 1)
    async with world.living():
        replica = world.replica("a")
        world.apply()
        await world.until(lambda: world.job().status.workers.ready == 3, what="it trains")
        key = ("trainingjobs", "team", "digits")
        status = {**_status(world), "cost": {"perHour": "x", "accumulated": "y"}}
        world.server.store(key, {**world.server.objects[key], "status": status})
        await asyncio.sleep(5.0)
        assert replica.operator is not None
        told = generate_latest(replica.operator.metrics.registry).decode()
        assert "shoal_cost_per_hour 0.0" in told
        assert 'shoal_jobs{phase="Running"} 1.0' in told


@played
async def test_finished_job_that_is_kept_at_the_last_moment_stays() -> None:
    """The watch of jobs was three seconds late: it was deleted after somebody had taken its time to live away."""
    world = World(lambda _uid: Truth(samples=1e9))
    world.nodes(3, 1)
    async with world.living("a"):
        world.apply(runPolicy={"ttlSecondsAfterFinished": 120})
        await world.until(lambda: world.job().status.workers.ready == 3, what="it trains")
        for run in world.trainers.runs.values():
            run.done = run.truth.samples
        await world.until(lambda: world.job().status.finished, 200.0, "it ends")
        await asyncio.sleep(117.0)
        world.server.lag = lambda watch, _change: 3.0 if watch.plural == "trainingjobs" else 0.0
        world.edit(runPolicy={"ttlSecondsAfterFinished": None})
        await asyncio.sleep(10.0)
        assert _status(world)["phase"] == "Succeeded"
        world.edit(runPolicy={"ttlSecondsAfterFinished": 120})
        await asyncio.sleep(10.0)
        assert world.server.get("trainingjobs", "digits", "team") is None
