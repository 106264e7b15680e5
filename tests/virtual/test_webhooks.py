"""Admission webhooks that are slow or broken: pods are made all the same, or the job says why there are none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shoal.errors import Unavailable
from tests.virtual.cluster import Machine
from tests.virtual.loop import now, play
from tests.virtual.server import Client, Faults
from tests.virtual.trainer import Truth
from tests.virtual.world import World

WORDS = 'failed calling webhook "verify.kyverno.svc": connection refused'


class Webhook(Faults):
    """Is asked about every pod, or about more, of all namespaces, or of one."""

    seconds = 0.0
    broken = False
    space = ""
    kinds: tuple[str, ...] = ("pods",)

    async def before(self, client: Client, verb: str, key: str) -> None:
        if verb == "POST" and f"/namespaces/{self.space}" in key and key.endswith(self.kinds):
            await asyncio.sleep(self.seconds)
            if self.broken:
                raise Unavailable(f"POST {key}: 500 Internal error occurred: {WORDS}")


@asynccontextmanager
async def _applied(webhook: Webhook) -> AsyncIterator[World]:
    """A job was applied, where there is room for it."""
    world = World(lambda _uid: Truth(samples=1e9), faults=webhook)
    world.nodes(3, 1)
    async with world.living("a"):
        world.apply()
        yield world


def test_job_begins_though_each_pod_takes_longer_than_a_renewal_of_the_lease_is_good_for() -> None:
    webhook = Webhook()
    webhook.seconds = 11.0

    async def story() -> None:
        async with _applied(webhook) as world:
            await world.until(lambda: world.job().status.workers.ready == 3, 120.0, "it trains")

    play(story)


def test_job_says_for_which_reason_it_has_no_pods_and_no_more_when_it_has() -> None:
    webhook = Webhook()
    webhook.broken = True

    async def story() -> None:
        async with _applied(webhook) as world:

            def degraded() -> str:
                found = world.job().status.condition("Degraded")
                return found.reason if found is not None and found.status == "True" else ""

            await world.until(lambda: degraded() == "ApiServerRefuses", 45.0, "it says so")
            condition = world.job().status.condition("Degraded")
            assert condition is not None
            assert WORDS in condition.message
            writes = world.writes()["PUT trainingjobs/status"]
            await asyncio.sleep(120.0)
            assert world.writes()["PUT trainingjobs/status"] - writes <= 2, "the words change with each try"
            webhook.broken = False
            await world.until(lambda: world.job().status.workers.ready == 3, 60.0, "it trains")
            await world.until(lambda: not degraded(), 40.0, "it is told no more")

    play(story)


def test_server_on_a_cordoned_node_works_until_another_can_be_made() -> None:
    """It was ended, and nothing trained for as long as the webhook was broken."""
    webhook = Webhook()

    async def story() -> None:
        async with _applied(webhook) as world:
            world.cluster.add(Machine("safe-1", {}))
            await world.until(lambda: world.job().status.workers.ready == 3, 60.0, "it trains")
            webhook.broken = True
            server = world.pod_at("ps", 0)
            assert server is not None
            node = ("nodes", "", server["spec"]["nodeName"])
            taints = [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}]
            world.server.change(node, spec={"taints": taints})
            step = world.job().status.training.step
            await asyncio.sleep(120.0)
            assert world.pod_at("ps", 0) == server
            assert (world.job().status.training.step or 0) > (step or 0) + 100
            assert world.job().status.reason == "ApiServerRefuses"
            webhook.broken = False
            await world.until(lambda: world.pod_at("ps", 0) not in (None, server), 30.0, "it is moved")

    play(story)


def test_server_whose_node_ends_soon_is_ended_in_time_whether_another_can_be_made_or_not() -> None:
    """Its final snapshot is not to be lost."""
    webhook = Webhook()

    async def story() -> None:
        async with _applied(webhook) as world:
            await world.until(lambda: world.job().status.workers.ready == 3, 60.0, "it trains")
            webhook.broken = True
            node = ("nodes", "", "safe-0")
            taints = [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}]
            world.server.change(node, spec={"taints": taints})
            await asyncio.sleep(60.0)
            assert world.pod_at("ps", 0) is not None
            taints.append({"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"})
            world.server.change(node, spec={"taints": taints})
            await world.until(lambda: world.pod_at("ps", 0) is None, 15.0, "it takes its final snapshot")

    play(story)


def test_what_failed_and_is_wanted_no_more_is_told_no_more() -> None:
    webhook = Webhook()
    webhook.broken = True

    async def story() -> None:
        async with _applied(webhook) as world:
            await world.until(lambda: world.job().status.reason == "ApiServerRefuses", 45.0, "it says so")
            world.edit(suspend=True)
            await world.until(lambda: world.job().status.reason == "Suspended", 30.0, "it is suspended")

    play(story)


def test_namespace_whose_webhook_times_out_keeps_no_job_of_another_from_training() -> None:
    """Their Services had four places in the order in which they came: the name of a server was there after 41 s."""
    webhook = Webhook()
    webhook.seconds, webhook.broken = 10.0, True
    webhook.space, webhook.kinds = "slow/", ("pods", "services", "events")

    async def story() -> None:
        world = World(lambda _uid: Truth(samples=1e9), faults=webhook)
        world.nodes(3, 1)
        world.server.namespaces["slow"] = "Active"
        async with world.living("a"):
            for number in range(20):
                world.apply(f"slow-{number}", "slow")
            await asyncio.sleep(60.0)
            applied = now()
            world.apply()
            await world.until(lambda: world.job().status.workers.ready == 3, 10.0, "it trains")
            made = next(
                each.at for each in world.server.sent if each.key == ("services", "team", "digits-ps-0")
            )
            assert made - applied < 1.0

    play(story)
