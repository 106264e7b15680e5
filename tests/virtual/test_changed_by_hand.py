"""Objects of a job that a person or a webhook changes: none is asked for again for ever, and a lost one is replaced."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from shoal.cluster.transport import Answer
from tests.virtual.loop import play
from tests.virtual.server import Client, Faults, Json, Key
from tests.virtual.trainer import Truth
from tests.virtual.world import World

SECONDS = 30.0
MOST_REQUESTS = 40
"""In so many seconds, of a job of three workers of which one is replaced."""


class Counted(Faults):
    """Counts requests, each of which takes a while."""

    def __init__(self) -> None:
        self.sent: Counter[tuple[str, str]] = Counter()

    async def before(self, client: Client, verb: str, key: str) -> None:
        self.sent[verb, key] += 1
        await asyncio.sleep(0.01)


def label(**changed: str | None) -> Callable[[Json], None]:
    """Change or remove labels."""

    def edit(found: Json) -> None:
        labels = {**found["metadata"]["labels"], **{f"shoal.dev/{k}": v for k, v in changed.items()}}
        found["metadata"]["labels"] = {k: v for k, v in labels.items() if v is not None}

    return edit


def orphan(found: Json) -> None:
    """Take its owner away."""
    found["metadata"]["ownerReferences"] = []


async def _training(world: World) -> None:
    world.nodes(6, 3)
    world.replica("a")
    world.apply()
    await world.until(lambda: world.job().status.workers.ready == 3, what="it trains")
    await world.quiet()


def _edit(world: World, plural: str, name: str, edit: Callable[[Json], None]) -> None:
    key = (plural, "team", name)
    found = {**world.server.objects[key], "metadata": {**world.server.objects[key]["metadata"]}}
    edit(found)
    world.server.store(key, found)


async def _edit_costs_little(
    world: World, counted: Counted, plural: str, name: str, edit: Callable[[Json], None]
) -> None:
    """Change an object, and see how often the operator asks about anything."""
    counted.sent.clear()
    _edit(world, plural, name, edit)
    await asyncio.sleep(SECONDS)
    assert counted.sent.total() < MOST_REQUESTS, counted.sent.most_common(3)


EDITS = {
    "of another job": label(job="other"),
    "of no job": label(job=None),
    "of no owner": orphan,
    "of no incarnation": label(incarnation=None),
    "of another incarnation": label(incarnation="9"),
    "of another index": label(index="2"),
    "of no role": label(role=None),
}


@pytest.mark.by_day(4)
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
@pytest.mark.parametrize(("role", "name"), [("worker", "digits-worker-1-0"), ("ps", "digits-ps-0-0")])
def test_pod_that_is_not_the_jobs_any_more_is_replaced_and_not_asked_for_again_and_again(
    edit: Callable[[Json], None], role: str, name: str
) -> None:
    counted = Counted()

    async def story() -> None:
        world = World(lambda _uid: Truth(samples=1e9), faults=counted)
        async with world.living():
            await _training(world)
            await _edit_costs_little(world, counted, "pods", name, edit)
            await world.quiet()
            status = world.job().status
            assert (status.workers.ready, status.parameter_servers.ready) == (3, 1), world.tell()
            lost = status.restarts.disruptions + status.parameter_servers.restarts
            assert lost == 1, (status.restarts, status.parameter_servers)

    play(story)


def test_service_that_is_not_the_jobs_any_more_is_made_again() -> None:
    counted = Counted()

    async def story() -> None:
        world = World(lambda _uid: Truth(samples=1e9), faults=counted)
        async with world.living():
            await _training(world)
            await _edit_costs_little(world, counted, "services", "digits-ps-0", label(job="other"))
            found = world.server.objects["services", "team", "digits-ps-0"]
            assert found["metadata"]["labels"]["shoal.dev/job"] == "digits"

    play(story)


def _mutate(world: World, kind: str, of: str, change: Callable[[Any], None]) -> Callable[[], None]:
    """A webhook that changes what is written of a kind by one verb. What is returned ends it."""
    write = world.server._write

    def mutated(verb: str, key: Key, sub: str, body: Any) -> Answer:
        if (key[0], verb) == (kind, of):
            change(body)
        return write(verb, key, sub, body)

    def end() -> None:
        world.server._write = write  # type: ignore[method-assign]

    world.server._write = mutated  # type: ignore[method-assign]
    return end


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("workers", "reason"), [(3, "FieldConflict"), (8, "Unschedulable")])
def test_service_of_which_a_webhook_changes_the_selector_is_asked_for_now_and_then(
    workers: int, reason: str
) -> None:
    """Also where the job has something more important to tell."""
    counted = Counted()

    async def story() -> None:
        world = World(lambda _uid: Truth(samples=1e9), faults=counted)
        _mutate(
            world, "services", "PATCH", lambda body: body["spec"]["selector"].update({"mesh.example/x": "y"})
        )
        async with world.living():
            await _training(world)
            world.edit(workers={"replicas": workers, "maxReplicas": 8})
            await asyncio.sleep(20.0)
            full = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": "0/9 nodes",
            }
            for pod in world.server.all("pods"):
                if not pod["spec"].get("nodeName"):
                    key = ("pods", "team", pod["metadata"]["name"])
                    world.server.change(key, status={**pod["status"], "conditions": [full]})
            await asyncio.sleep(300.0)
            counted.sent.clear()
            _edit(
                world,
                "services",
                "digits-ps-0",
                lambda found: found.update(
                    spec={
                        **found["spec"],
                        "selector": {**found["spec"]["selector"], "mesh.example/x": "y"},
                    }
                ),
            )
            await asyncio.sleep(SECONDS)
            assert counted.sent.total() < MOST_REQUESTS, counted.sent.most_common(3)
            condition = world.job().status.condition("Degraded")
            assert condition is not None
            assert condition.reason == reason

    play(story)


def test_webhook_that_takes_labels_from_new_pods_is_told_and_not_fought() -> None:
    counted = Counted()

    async def story() -> None:
        world = World(lambda _uid: Truth(samples=1e9), faults=counted)
        world.nodes(6, 3)
        end = _mutate(
            world, "pods", "POST", lambda body: body["metadata"]["labels"].update({"shoal.dev/job": "other"})
        )
        async with world.living("a"):
            world.apply()
            await asyncio.sleep(30.0)
            counted.sent.clear()
            await asyncio.sleep(60.0)
            assert counted.sent.total() < MOST_REQUESTS, counted.sent.most_common(3)
            status = world.job().status
            assert (status.reason, status.restarts.disruptions) == ("Forbidden", 0)
            assert "mutating admission webhook" in status.words
            end()
            await world.until(lambda: world.job().status.workers.ready == 3, 60.0, "it trains")

    play(story)
