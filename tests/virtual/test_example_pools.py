"""examples/pools, played to its deadline: the manifests as they are, nodes that are taken, speeds that nobody told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import yaml

from dev.paths import ROOT
from tests.virtual.cluster import Machine, Shop
from tests.virtual.loop import now, play
from tests.virtual.trainer import Truth
from tests.virtual.world import World

FOLDER = ROOT / "examples" / "pools"
SECONDS = {"T4": 0.09, "L4": 0.05}
"""A worker's step."""
TRUTH = Truth(samples=10e6, compute=SECONDS.__getitem__, update=2e-4, batch=64)
TAKEN_EVERY = 900.0
EMPTY = (1500.0, 2400.0)
"""In this time the cheapest spot pool has no nodes."""


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def shop(pool: dict[str, Any]) -> Shop:
    """What a cloud sells as this pool says."""
    spec = pool["spec"]
    taints = ({"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"},)
    labels = {**spec["nodeSelector"], "accelerator": spec["accelerator"]["name"]}
    name = pool["metadata"]["name"]
    return Shop(
        name, labels, limit=spec["limits"]["nodes"], startup=60.0, price=spec["price"]["perHour"], taints=taints,
        stock=lambda at: 0 if name == "t4-spot" and EMPTY[0] <= at < EMPTY[1] else 1_000_000,
    )  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("platform", ["gke", "eks"])
def test_the_deadline_and_the_budget_are_kept(platform: str) -> None:
    [job] = documents("job.yaml")
    objective = job["spec"]["elasticity"]["objective"]
    name = job["metadata"]["name"]
    world = World(lambda _uid: TRUTH, step_seconds=10.0)
    cluster = world.cluster
    plans: list[dict[str, int]] = []
    taken: list[str] = []

    def machines(*pools: str) -> list[Machine]:
        return [each for each in cluster.machines.values() if each.pool in pools and each.powered]

    def phase() -> str:
        return world.job(name).status.phase

    def look() -> None:
        if (plan := world.job(name).status.plan) is not None and (not plans or plan.pools != plans[-1]):
            assert plan.reason
            plans.append(dict(plan.pools))
        spot = [each for each in machines("t4-spot", "l4-spot") if each.leaves_at is None]
        if spot and now() > TAKEN_EVERY * (len(taken) + 1):
            taken.append(spot[0].name)
            cluster.notice(spot[0].name, 25.0)
        if EMPTY[0] <= now() < EMPTY[1]:
            for each in machines("t4-spot"):
                cluster.kill(each.name)

    async def story() -> None:
        world.nodes(0, 1)
        for pool in documents(f"{platform}.yaml"):
            world.server.store(("capacitypools", "", pool["metadata"]["name"]), pool)
            cluster.shops[pool["metadata"]["name"]] = shop(pool)
        world.watchers.append(look)
        async with world.living("a"):
            world.server.store(("trainingjobs", "team", name), job)
            await world.until(
                lambda: phase() in {"Succeeded", "Failed"}, objective["deadlineSeconds"], "the end"
            )
            assert phase() == "Succeeded"
            await asyncio.sleep(120)

    play(story)
    cost = sum(each.node_seconds / 3600 * each.price for each in cluster.shops.values())
    assert cost <= objective["maxCost"]
    assert len(taken) >= 2
    assert any(plan.get("l4-spot") for plan in plans), "it moves to what there is"
    assert cluster.shops["l4-on-demand"].node_seconds == 0, "it has time enough"
