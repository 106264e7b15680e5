"""The CapacityBuffer of a pool: its unit goes where the pool's workers go, also when the pool changes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shoal.api.capacity_pool import CapacityPool
from shoal.api.capacity_pool_status import Sized
from shoal.api.labels import Place
from shoal.api.training_job import TrainingJob
from shoal.cluster.transport import Answer, Wrapper
from shoal.errors import Unavailable
from shoal.manifests.placement import Where
from shoal.manifests.platforms import GENERIC, GKE, Platform, platform_of
from shoal.manifests.pods import Images, pod
from shoal.pools.buffer import BufferDriver
from shoal.pools.ownership import MANAGER
from shoal.pools.rules import Wish, decide, release
from tests.unit.controllers.clusters import ABSENT, NOW

AMD64 = {"kubernetes.io/arch": "amd64"}
OWN = Platform("own", taints={"example.com/reclaimable": "true"})
TEMPLATE, BUFFER = "podtemplates", "capacitybuffers"


class Server(Wrapper):
    """Keeps what is applied, by its resource."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.unserved = ""
        """A resource of which it serves another version right now."""

    async def request(self, method: str, path: str, **options: Any) -> Answer:
        if path == "/apis/autoscaling.x-k8s.io":
            return Answer(200, b'{"preferredVersion": {"version": "v1beta1"}}')
        resource = path.split("/")[-2]
        if resource == self.unserved:
            return Answer(404, b"404 page not found\n")
        if method == "DELETE":
            return ABSENT if self.objects.pop(resource, None) is None else Answer(200, b"{}")
        if method == "GET":
            found = self.objects.get(resource)
            return ABSENT if found is None else Answer(200, json.dumps(found).encode())
        body = options["body"]
        meta = {**body["metadata"], "managedFields": [{"manager": MANAGER}]}
        self.objects[resource] = {**body, "metadata": meta}
        return Answer(200, b"{}")


def pool(**spec: Any) -> CapacityPool:
    buffer = {"namespace": "buffers", "requests": {"cpu": "7"}}
    scaling = {"mode": "Buffer", "buffer": buffer}
    whole = {"limits": {"nodes": 8}, "nodeSelector": {"pool": "l4"}, "scaling": scaling, **spec}
    return CapacityPool.model_validate({"metadata": {"name": "l4", "uid": "p"}, "spec": whole})


def driver(server: Server, of: CapacityPool, platform: Platform = GENERIC) -> BufferDriver:
    assert of.spec.scaling.buffer is not None
    return BufferDriver(server, of, of.spec.scaling.buffer, platform, AMD64)


async def unit(of: CapacityPool, platform: Platform) -> dict[str, Any]:
    server = Server()
    sized = driver(server, of, platform)
    await sized.resize(3, await sized.read())
    found: dict[str, Any] = server.objects[TEMPLATE]["template"]["spec"]
    return found


@pytest.mark.parametrize("platform", [GKE, platform_of((), None, OWN)], ids=["gke", "not known, and its own"])
@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"zone": "a"},
        {"accelerator": {"name": "L4", "count": 2}},
        {"capacityType": "Spot", "tolerations": [{"key": "team", "value": "a"}]},
        {"nodeSelector": {"kubernetes.io/arch": "arm64"}},
    ],
    ids=["plain", "zone", "GPUs", "spot", "another architecture"],
)
async def test_the_unit_goes_where_a_worker_goes(spec: dict[str, Any], platform: Platform) -> None:
    """It had the labels and tolerations of the pool alone: nodes came in other zones, or for no taint at all."""
    job = TrainingJob.model_validate(
        {
            "metadata": {"name": "j", "namespace": "n", "uid": "u"},
            "spec": {
                "storage": {"uri": "s3://b/r"},
                "training": {"entrypoint": "m:f", "batchSize": 8, "stopAfter": {"epochs": 1}},
                "workers": {"replicas": 1, "zonePolicy": "Any", "pools": ["l4"]},
            },
        }
    )
    of = pool(**spec)
    worker = pod(job, Place("worker", 0, 0), Images("ps", "w", "g", AMD64), Where("Spot", of), platform)
    buffered = await unit(of, platform)
    for name in ("nodeSelector", "affinity", "tolerations"):
        assert buffered[name] == worker["spec"][name], name


async def test_a_pool_that_changes_has_units_of_its_new_nodes_though_there_are_as_many() -> None:
    """The former ones stayed for as long as the number did."""
    server = Server()
    before = driver(server, pool())
    await before.resize(3, await before.read())
    assert not (await before.read()).outdated
    after = driver(server, pool(nodeSelector={"pool": "h100"}))
    seen = await after.read()
    decision = decide(Wish(3, 8), Sized(original_nodes=0, nodes=3), seen, NOW, after.pace)
    assert decision.resize == 3
    await after.resize(decision.resize, seen)
    assert server.objects[TEMPLATE]["template"]["spec"]["nodeSelector"] == {**AMD64, "pool": "h100"}
    assert decide(Wish(3, 8), decision.memory, await after.read(), NOW, after.pace).scaled


async def test_a_buffer_that_is_gone_is_made_again() -> None:
    """Its CRD was installed anew, or its namespace deleted: somebody had set 0 nodes, it said, and had to set 4."""
    server, of = Server(), pool()
    sized = driver(server, of)
    memory: Sized | None = None
    for _ in range(3):
        for resize in (4, None):
            seen = await sized.read()
            decision = decide(Wish(4, 8), memory, seen, NOW, sized.pace)
            memory = decision.memory
            assert decision.resize == resize
            await sized.resize(4, seen)
        server.objects.clear()
    assert decide(Wish(0, 8), memory, await sized.read(), NOW, sized.pace).scaled


@pytest.mark.parametrize("found", [0, 3])
async def test_a_buffer_that_is_gone_is_let_go(found: int) -> None:
    seen = await driver(Server(), pool()).read()
    memory = Sized(original_nodes=found, nodes=4)
    assert release(memory, seen, NOW, BufferDriver.pace).ended


async def test_a_buffer_is_not_gone_while_its_kind_is_not_served() -> None:
    """Its CRD is being updated: its size was forgotten. Released then, its nodes stayed for good; if none was wanted,
    somebody else had set it when it was seen again."""
    server = Server()
    sized = driver(server, pool())
    await sized.resize(4, await sized.read())
    for unserved in (BUFFER, TEMPLATE):
        server.unserved = unserved
        with pytest.raises(Unavailable, match="page not found"):
            await (sized.read() if unserved == BUFFER else sized.let_go())
    server.unserved = ""
    for _ in range(2):
        await sized.let_go()
    assert not server.objects


async def test_a_buffer_that_somebody_else_sizes_is_left() -> None:
    """Also at 0 nodes: it is there."""
    server = Server()
    sized = driver(server, pool())
    await sized.resize(0, await sized.read())
    decision = decide(Wish(4, 8), Sized(original_nodes=0, nodes=4), await sized.read(), NOW, sized.pace)
    assert decision.resize is None
    assert decision.conflict is not None
