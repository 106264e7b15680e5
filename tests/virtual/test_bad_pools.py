"""What people get wrong about pools: each a condition that says what to change, and no job stops for it."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.virtual.cluster import Machine
from tests.virtual.loop import play, played
from tests.virtual.server import Client, Faults, Json
from tests.virtual.trainer import Truth
from tests.virtual.world import GROUP, World

GOOD: Json = {
    "accelerator": {"name": "T4"},
    "capacityType": "Spot",
    "nodeSelector": {"pool": "good"},
    "limits": {"nodes": 4},
    "price": {"perHour": 0.3},
    "startupSeconds": 10,
}
WRONG: dict[str, tuple[Json, str, str]] = {
    "unlabelled": ({"nodeSelector": {}}, "NoNodeSelector", "set spec.nodeSelector"),
    "priceless": ({"nodeSelector": {"pool": "free"}, "price": None}, "NoPrice", "set spec.price.perHour"),
    "unheard": (
        {"nodeSelector": {"pool": "odd"}, "accelerator": {"name": "Abacus"}},
        "UnknownAccelerator",
        "Abacus is none of the known accelerators, A100-40GB",
    ),
    "twice": ({"nodeSelector": {"half": "yes"}}, "Overlaps", "give each node one pool"),
}


def pool_world(faults: Faults | None = None, samples: float = 400_000) -> World:
    world = World(lambda _uid: Truth(samples=samples), faults=faults, plan_seconds=10.0)
    world.nodes(0, 1)
    for name in ("good", "other"):
        for number in range(4):
            world.cluster.add(Machine(f"{name}-{number}", {"pool": name, "accelerator": "T4"}))
    world.cluster.add(Machine("both", {"pool": "shared", "half": "yes", "accelerator": "T4"}))
    specs = {"good": GOOD, "shared": {**GOOD, "nodeSelector": {"pool": "shared"}}}
    for name, (change, _, _) in WRONG.items():
        specs[name] = {k: v for k, v in {**GOOD, **change}.items() if v is not None}
    for name, spec in specs.items():
        body = {"apiVersion": GROUP, "kind": "CapacityPool", "metadata": {"name": name}, "spec": spec}
        world.server.store(("capacitypools", "", name), body)
    return world


def apply(world: World, name: str, pools: list[str], **objective: Any) -> None:
    world.apply(
        name,
        workers={"replicas": 2, "minReplicas": 1, "maxReplicas": 2, "pools": pools},
        elasticity={"mode": "Auto", "objective": objective},
    )


def condition(found: Json, kind: str) -> Json:
    return next(c for c in found["status"]["conditions"] if c["type"] == kind)


@played
async def test_pool_whose_nodes_give_no_accelerator_is_left_for_another_and_says_so() -> None:
    """Their driver had failed: an Auto job waited beside them for ever, and more of them were recommended."""
    world = World(lambda _uid: Truth(samples=400_000), plan_seconds=10.0)
    world.nodes(0, 1)
    cheap = {**GOOD, "nodeSelector": {"pool": "broken"}, "price": {"perHour": 0.1}}
    for name, spec in (("broken", cheap), ("good", GOOD)):
        for number in range(4):
            labels = {"pool": name, "accelerator": "T4"}
            world.cluster.add(Machine(f"{name}-{number}", labels, broken=name == "broken"))
        body = {"apiVersion": GROUP, "kind": "CapacityPool", "metadata": {"name": name}, "spec": spec}
        world.server.store(("capacitypools", "", name), body)
    async with world.living("a"):
        apply(world, "digits", ["broken", "good"], deadlineSeconds=3600)
        await world.until(lambda: world.job().status.workers.ready >= 2, 300, "it runs")
        found = world.server.objects["capacitypools", "", "broken"]
        ready = condition(found, "Ready")
        assert (ready["status"], ready["reason"]) == ("False", "NodesLackAccelerator")
        assert "see that the driver" in ready["message"]
        assert found["status"]["recommended"]["nodes"] <= 1, "of a parameter server"


@played
async def test_each_wrong_pool_says_what_to_change_and_jobs_run_in_the_others() -> None:
    world = pool_world()
    async with world.living("a"):
        apply(world, "digits", [*WRONG, "gone", "good"], deadlineSeconds=3600)
        await world.until(lambda: world.job().status.workers.ready >= 1, 200, "it runs")
        await asyncio.sleep(60)
        for name, (_, reason, words) in WRONG.items():
            found = world.server.objects["capacitypools", "", name]
            ready = condition(found, "Ready")
            assert (ready["status"], ready["reason"]) == ("False", reason)
            assert words in ready["message"]
            told = [e for e in world.server.all("events") if e["involvedObject"]["name"] == name]
            assert any(e["type"] == "Warning" and e["reason"] == reason for e in told)
        job = world.server.objects["trainingjobs", "team", "digits"]
        degraded = condition(job, "Degraded")["message"]
        assert "gone does not exist: create it, or change workers.pools" in degraded
        assert "unlabelled selects no nodes: set spec.nodeSelector" in degraded
        plan = condition(job, "PlanReady")["message"]
        for words in ("priceless has no price", "unheard is left out", "no CapacityPool gone"):
            assert words in plan
        assert set(job["status"]["plan"]["pools"]) <= {"good", "twice"}
        await world.until(lambda: world.job().status.finished, 1200, "it ends")
        assert world.job().status.phase == "Succeeded"


@played
async def test_a_pool_that_overlaps_is_ready_again_once_its_selector_is_corrected() -> None:
    """A pool of other labels is not told to share nodes that there are not, and so the pool gets its first ones."""
    world = pool_world()
    spec = {**GOOD, "nodeSelector": {"lane": "slow"}}
    body = {"apiVersion": GROUP, "kind": "CapacityPool", "metadata": {"name": "lane"}, "spec": spec}
    world.server.store(("capacitypools", "", "lane"), body)
    async with world.living():
        world.replica("a")

        def ready() -> Json:
            found = world.server.objects["capacitypools", "", "twice"]
            return next(iter(found.get("status", {}).get("conditions", [])), {})

        await world.until(lambda: ready().get("reason") == "Overlaps", 60, "it is told")
        wrong = world.server.objects["capacitypools", "", "twice"]
        right = {**GOOD, "nodeSelector": {"half": "own"}}
        world.server.store(("capacitypools", "", "twice"), {**wrong, "spec": right})
        await world.until(lambda: ready()["status"] == "True", 20, "it is ready")
        await asyncio.sleep(120)
        assert ready()["status"] == "True"


@played
async def test_typing_error_in_a_pool_costs_the_others_nothing_and_heals_when_it_is_corrected() -> None:
    world = pool_world(samples=1e9)

    def pool(name: str, label: str) -> None:
        spec = {**GOOD, "nodeSelector": {"pool": label}, "limits": {"nodes": 2}}
        key = ("capacitypools", "", name)
        body = {"apiVersion": GROUP, "kind": "CapacityPool", "metadata": {"name": name}}
        world.server.store(key, {**world.server.objects.get(key, body), "spec": spec})

    def admit(key: tuple[str, str, str], new: Json, _old: Json | None) -> str:
        labels = (new["spec"].get("nodeSelector") or {}) if key[0] == "pods" else {}
        return "spec.nodeSelector: Invalid value" if any(" " in each for each in labels.values()) else ""

    world.server.admit = admit
    pool("good", "good")
    pool("other", "oth er")  # the CRD refuses it, but an older one did not
    async with world.living("a"):
        workers = {"replicas": 3, "minReplicas": 1, "maxReplicas": 3, "pools": ["good", "other"]}
        world.apply(workers=workers, elasticity={"mode": "Manual"})

        def runs(number: int) -> bool:
            return world.job().status.workers.ready == number

        await world.until(lambda: runs(2), 60, "two run")
        await asyncio.sleep(120)
        assert world.job().status.reason == "Invalid"
        lost = next(p for p in world.server.all("pods") if p["metadata"]["name"] == "digits-worker-0-0")
        world.cluster.kill(lost["spec"]["nodeName"])
        await world.until(lambda: runs(1), 60, "one is lost")
        await world.until(lambda: runs(2), 60, "it is replaced")
        pool("other", "other")
        await world.until(lambda: runs(3), 20, "the third runs")
        await world.until(lambda: not world.job().status.reason, 60, "nothing is told any more")


@played
async def test_running_job_goes_on_after_its_deadline_and_its_budget() -> None:
    world = pool_world()
    async with world.living("a"):
        apply(world, "late", ["good"], deadlineSeconds=60)
        apply(world, "broke", ["good"], maxCost=0.0001)
        said = {
            "late": "The deadline has passed: raise elasticity.objective.deadlineSeconds",
            "broke": "The budget is spent: raise elasticity.objective.maxCost",
        }
        for name, words in said.items():

            def told(name: str = name, words: str = words) -> bool:
                job = world.server.objects["trainingjobs", "team", name]
                found = [c for c in job.get("status", {}).get("conditions", ()) if c["type"] == "PlanReady"]
                return bool(found) and found[0]["reason"] == "NotFeasible" and words in found[0]["message"]

            await world.until(told, 400, f"{name} says it")
        for name in said:

            def ended(name: str = name) -> bool:
                return world.job(name).status.finished

            await world.until(ended, 2000, f"{name} ends")
            assert world.job(name).status.phase == "Succeeded"


def test_pool_whose_status_takes_long_to_write_holds_up_no_other() -> None:
    class SlowWithOne(Faults):
        async def before(self, client: Client, verb: str, key: str) -> None:
            if verb != "GET" and "/capacitypools/free" in key:
                await asyncio.sleep(25.0)

    async def story() -> None:
        world = pool_world(SlowWithOne())
        body = {"apiVersion": GROUP, "kind": "CapacityPool", "metadata": {"name": "free"}, "spec": GOOD}
        world.server.store(("capacitypools", "", "free"), body)
        async with world.living():
            world.replica("a")

            def told() -> set[str]:
                return {
                    each["metadata"]["name"] for each in world.server.all("capacitypools") if "status" in each
                }

            others = {each["metadata"]["name"] for each in world.server.all("capacitypools")} - {"free"}
            await world.until(lambda: told() >= others, 15.0, "the others have a status")
            assert "free" not in told()

    play(story)
