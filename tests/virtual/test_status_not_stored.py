"""A job whose status cannot be stored: of no place two pods have one number, since a push tells them apart by it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from shoal.cluster.transport import Answer
from shoal.errors import Unavailable
from tests.virtual.loop import play, played
from tests.virtual.script import watch_slots
from tests.virtual.server import Client, Faults
from tests.virtual.trainer import Truth
from tests.virtual.world import Replica, World

JOB = ("trainingjobs", "team", "digits")
WORDS = "500 Internal error occurred: failed calling webhook"


class Webhook(Faults):
    """Is asked about every status, and may be broken."""

    broken = False

    async def before(self, client: Client, verb: str, key: str) -> None:
        if self.broken and verb == "PUT" and key.endswith("/digits/status"):
            raise Unavailable(WORDS)


def _spec(world: World, **changed: object) -> None:
    found = world.server.objects[JOB]
    world.server.store(JOB, {**found, "spec": {**found["spec"], **changed}})


async def _training(world: World) -> Replica:
    world.nodes(8, 2)
    watch_slots(world)
    replica = world.replica("a")
    world.apply()
    await world.until(lambda: world.job().status.workers.ready == 3, what="it trains")
    await world.quiet()
    return replica


def _made(world: World) -> list[str]:
    """The pods that were made, in this order."""
    return [
        sent.key[2]
        for sent in world.server.sent
        if (sent.verb, sent.key[0], sent.status) == ("POST", "pods", 201)
    ]


async def _lose(world: World, index: int) -> None:
    """The machine of a worker vanishes."""
    pod = world.pod_at("worker", index)
    assert pod is not None
    world.cluster.kill(pod["spec"]["nodeName"])


def _force_delete(world: World, index: int) -> None:
    """With a grace period of 0 nothing is announced."""
    pod = world.pod_at("worker", index)
    assert pod is not None
    world.server.delete(("pods", "team", pod["metadata"]["name"]), 0)


def _unlabel(world: World, index: int) -> None:
    """It runs on, and no watch shows it any more."""
    pod = world.pod_at("worker", index)
    assert pod is not None
    world.server.store(
        ("pods", "team", pod["metadata"]["name"]), {**pod, "metadata": {**pod["metadata"], "labels": {}}}
    )


@pytest.mark.parametrize("gone", [_force_delete, _unlabel])
def test_pod_that_no_status_records_is_not_made_again(gone: Callable[[World, int], None]) -> None:
    webhook = Webhook()

    async def story() -> None:
        world = World(lambda _uid: Truth(samples=1e9), faults=webhook)
        async with world.living():
            await _training(world)
            webhook.broken = True
            await _lose(world, 0)
            await world.until(lambda: world.pod_at("worker", 0) is not None, 150.0, "it is replaced")
            await world.until(lambda: "digits-worker-0-1" in _made(world), 150.0, "it is replaced")
            await asyncio.sleep(20.0)
            gone(world, 0)
            await asyncio.sleep(30.0)
            webhook.broken = False
            await world.until(lambda: world.job().status.workers.ready == 3, 150.0, "all train")
            await world.quiet()
            assert _made(world)[4:] == ["digits-worker-0-1", "digits-worker-0-2"]

    play(story)


def test_slot_whose_loss_cannot_be_recorded_is_replaced_once_whoever_leads() -> None:
    webhook = Webhook()

    async def story() -> None:
        world = World(lambda _uid: Truth(samples=1e9), faults=webhook)
        async with world.living():
            replica = await _training(world)
            webhook.broken = True
            for _ in range(2):
                await _lose(world, 0)
                await asyncio.sleep(150.0)
            assert _made(world)[4:] == ["digits-worker-0-1"], (
                "the second would be made again by the next leader"
            )
            await replica.kill()
            replica.start()
            await asyncio.sleep(60.0)
            assert len(_made(world)) == 5
            webhook.broken = False
            await world.until(lambda: world.job().status.workers.ready == 3, 150.0, "all train")

    play(story)


@pytest.mark.parametrize("restarted", [False, True])
@played
async def test_of_a_job_that_cannot_be_read_nothing_is_made(restarted: bool) -> None:
    """It says so, and does: whether the operator has known an earlier state of it or not."""
    world = World(lambda _uid: Truth(samples=1e9))
    async with world.living():
        replica = await _training(world)
        before = _made(world)
        elasticity = world.server.objects[JOB]["spec"].get("elasticity", {})
        _spec(world, elasticity={**elasticity, "mode": "Future"})
        if restarted:
            await replica.kill()
            replica.start()
        await asyncio.sleep(10.0)
        await _lose(world, 0)
        server = world.pod_at("ps", 0)
        assert server is not None
        world.server.delete(("pods", "team", server["metadata"]["name"]))
        await asyncio.sleep(150.0)
        assert _made(world) == before
        stalled = next(c for c in world.server.objects[JOB]["status"]["conditions"] if c["type"] == "Stalled")
        assert (stalled["status"], stalled["reason"]) == ("True", "Unreadable")
        assert "no lost pod is replaced" in stalled["message"]
        _spec(world, elasticity=elasticity)
        await world.until(
            lambda: (world.job().status.workers.ready, world.job().status.parameter_servers.ready) == (3, 1),
            150.0,
            "all is replaced",
        )


@played
async def test_job_whose_status_is_not_there_for_a_while_is_not_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So answers a CRD without its subresource, as an older one or one that somebody edited. The job was taken for
    deleted until the operator was started again, though each list had it: no lost pod of it was replaced."""
    world = World(lambda _uid: Truth(samples=1e9))
    async with world.living():
        await _training(world)
        handle, asked = world.server.handle, []

        def without_statuses(who: str, verb: str, path: str, *more: Any) -> Answer:
            if path.endswith("/trainingjobs/digits/status"):
                asked.append(path)
                return Answer(
                    404, b'{"reason": "NotFound", "message": "trainingjobs \\"digits\\" not found"}'
                )
            return handle(who, verb, path, *more)

        monkeypatch.setattr(world.server, "handle", without_statuses)
        await _lose(world, 0)
        await asyncio.sleep(600.0)
        assert 2 <= len(asked) < 100, "it is tried again, ever less often"
        monkeypatch.setattr(world.server, "handle", handle)
        await _lose(world, 1)
        await world.until(lambda: world.job().status.workers.ready == 3, 150.0, "all train")
        await world.until(lambda: world.job().status.restarts.disruptions == 2, 150.0, "both are counted")
