"""A GitOps controller deletes a job and creates it again: with `storage.run` its training goes on where it was."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from tests.virtual.loop import play
from tests.virtual.script import watch_slots
from tests.virtual.trainer import SNAPSHOT_SECONDS, Truth
from tests.virtual.world import World

SERVER = "safe-0"
ENDING_SECONDS = 4.0
"""No server that was told to stop takes longer here."""


@dataclass(frozen=True)
class Replacement:
    """Samples: where the first job was, and its newest snapshot; where the second one began, and what it then says."""

    trained: float
    saved: float
    begun: float
    told: int


def replaced(run: str | None, pause: float, *, lost: bool) -> Replacement:
    """A job that is deleted while it trains, and created again after so many seconds, whose workers then all run.

    `lost`: the server's machine ends in the same moment, so that it takes no last snapshot.
    """
    begun: dict[str, float] = {}

    async def story() -> Replacement:
        world = World(lambda _uid: Truth(samples=1e9))
        world.nodes(6, 2)
        watch_slots(world)

        def look() -> None:
            for uid, training in world.trainers.runs.items():
                if training.serving:
                    begun.setdefault(uid, training.done)

        async def one() -> str:
            made = world.apply(storage={"uri": "s3://bucket/runs", **({"run": run} if run else {})})

            def runs() -> bool:
                status = world.job().status
                return (status.workers.ready, status.parameter_servers.ready) == (3, 1)

            await world.until(runs, 400, "it runs")
            await asyncio.sleep(1.5 * SNAPSHOT_SECONDS)
            return str(made["metadata"]["uid"])

        world.watchers.append(look)
        async with world.living("a"):
            first = world.trainers.runs[await one()]
            trained, saved = first.done, first.saved
            world.server.remove(("trainingjobs", "team", "digits"))
            if lost:
                world.cluster.kill(SERVER)
            await asyncio.sleep(pause)
            second = await one()
            status = world.job().status
            assert (status.restarts.disruptions, status.restarts.failures) == (0, 0)
            told = (status.training.step or 0) * first.truth.batch
            return Replacement(trained, saved, begun[second], told)

    return play(story)


@pytest.mark.by_day(2)
@pytest.mark.parametrize("lost", [False, True], ids=["stopped", "lost"])
@pytest.mark.parametrize("pause", [0.0, 0.4, 8.0, 90.0], ids="{:g} s later".format)
def test_training_goes_on_where_the_deleted_job_was(pause: float, lost: bool) -> None:
    """Its server's last snapshot counts, unless that server still ends when the next one begins, which fences it."""
    seen = replaced("main", pause, lost=lost)
    assert 0 < seen.saved < seen.trained
    if lost or pause < ENDING_SECONDS:
        assert seen.begun == seen.saved
    else:
        assert seen.begun >= seen.trained
    assert seen.told > seen.begun


def test_a_job_without_a_name_for_its_run_begins_anew() -> None:
    seen = replaced(None, 0.0, lost=False)
    assert seen.begun == 0
    assert 0 < seen.told < seen.trained
