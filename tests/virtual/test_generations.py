"""Every kind says which generation of its spec its status is about: kstatus, and with it Flux, waits for that."""

from __future__ import annotations

from tests.virtual.cluster import Machine
from tests.virtual.loop import played
from tests.virtual.server import Json
from tests.virtual.test_bad_pools import GOOD
from tests.virtual.trainer import Truth
from tests.virtual.world import GROUP, World

MODEL: Json = {"flopsPerSample": "8e7", "parameters": 500_000, "tensors": 20}


@played
async def test_every_kind_is_current_after_it_was_made_and_after_it_was_changed() -> None:
    """A SpeedProfile that Git applies was InProgress for ever, once a job had reported."""
    world = World(lambda _uid: Truth(samples=1e9), plan_seconds=10.0)
    world.nodes(0, 1)
    world.cluster.add(Machine("good-0", {"pool": "good", "accelerator": "T4"}))
    specs: dict[tuple[str, str, str], Json] = {
        ("capacitypools", "", "good"): GOOD,
        ("speedprofiles", "team", "mine"): {"model": MODEL},
    }
    kinds = {"capacitypools": "CapacityPool", "speedprofiles": "SpeedProfile"}

    def store(change: Json) -> None:
        for key, spec in specs.items():
            metadata = {"name": key[2], **({"namespace": key[1]} if key[1] else {})}
            body = {"apiVersion": GROUP, "kind": kinds[key[0]], "metadata": metadata}
            world.server.store(
                key, {**world.server.objects.get(key, body), "spec": {**spec, **change.get(key[0], {})}}
            )

    def generations() -> dict[str, tuple[int, int]]:
        objects = [each for kind in ("trainingjobs", *kinds) for each in world.server.all(kind)]
        return {
            f"{each['kind']} {each['metadata']['name']}": (
                each["metadata"]["generation"],
                each.get("status", {}).get("observedGeneration", 0),
            )
            for each in objects
        }

    def current() -> bool:
        return all(generation == seen for generation, seen in generations().values())

    async with world.living("a"):
        store({})
        world.apply(workers={"replicas": 1, "maxReplicas": 1, "pools": ["good"]})
        await world.until(lambda: len(generations()) >= 4, 300, "the job's own profile is made")
        await world.until(current, 60, f"{generations()}")
        store({"capacitypools": {"startupSeconds": 20}, "speedprofiles": {"rows": []}})
        world.edit(suspend=True)
        assert {generation for generation, _ in generations().values()} == {1, 2}
        await world.until(current, 60, f"{generations()}")
