"""`shoal-pools` on a real API server: what it sizes, what stops it, and how it lets go.

The test plays the operator: it writes recommendations, and that it runs. The wall clock is the test's.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dev.cluster import ControlPlane
from dev.kube import ApiError, Json, Kube
from shoal.pools.metrics import LEADING
from shoal.pools.scaler import FINALIZER
from shoal.process.pools import NodePools, PoolSettings
from tests.control_plane.operators import eventually, running_operator, transport
from tests.meanwhile import during

pytestmark = pytest.mark.usefixtures("crds")

POOLS = "/apis/shoal.dev/v1alpha1/capacitypools"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
APPLY = "application/apply-patch+yaml"


def definition(group: str, version: str, kind: str, scale: bool) -> Json:
    plural = f"{kind.lower()}s"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    replicas = {"type": "object", "properties": {"replicas": {"type": "integer", "default": 1}}}
    whole = {"type": "object", "properties": {"spec": {**schema, **replicas}, "status": schema}}
    served: Json = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": whole}}
    if scale:
        paths = {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}
        served["subresources"] = {"status": {}, "scale": paths}
    meta: Json = {"name": f"{plural}.{group}"}
    if group.endswith(".x-k8s.io"):
        meta["annotations"] = {"api-approved.kubernetes.io": "unapproved, for a test"}
    names = {"kind": kind, "plural": plural}
    return {
        "metadata": meta,
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [served]},
    }


async def serve(kube: Kube, group: str, version: str, kind: str, *, scale: bool) -> None:
    """Define a resource and wait until it is served."""
    with contextlib.suppress(ApiError):  # an earlier test has
        await kube.create(CRDS, definition(group, version, kind, scale))

    async def served() -> bool:
        found = await kube.get(f"/apis/{group}/{version}")
        return any(each["kind"] == kind for each in found["resources"])

    await eventually(served, what=f"{kind} is served")


class World:
    """A pool, the object that it sizes, the operator's part, and a clock."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self.kube, self.namespace = kube, namespace
        self.now = datetime(2026, 1, 1, 12, tzinfo=UTC)
        self.name = f"pool-{os.urandom(3).hex()}"
        self.path = f"{POOLS}/{self.name}"
        self.fleet_path = f"/apis/test.shoal.dev/v1/namespaces/{namespace}/fleets/blue"
        self.target = {
            "apiVersion": "test.shoal.dev/v1",
            "kind": "Fleet",
            "name": "blue",
            "namespace": namespace,
        }

    async def create_fleet(self, replicas: int, **meta: Any) -> None:
        body = {
            "apiVersion": "test.shoal.dev/v1",
            "kind": "Fleet",
            "metadata": {"name": "blue", **meta},
            "spec": {"replicas": replicas},
        }
        await self.kube.create(self.fleet_path.rpartition("/")[0], body)

    async def create_pool(self, finalizers: tuple[str, ...] = (), **scaling: Any) -> None:
        spec = {
            "nodeSelector": {"pool": self.name},
            "limits": {"nodes": 8},
            "price": {"perHour": 0.3},
            "scaling": scaling
            or {"mode": "Scale", "target": self.target, "shrinkAfterSeconds": 60, "minNodes": 0},
        }
        body = {"apiVersion": "shoal.dev/v1alpha1", "kind": "CapacityPool"}
        meta = {"name": self.name, "finalizers": list(finalizers)}
        await self.kube.create(POOLS, {**body, "metadata": meta, "spec": spec})

    async def recommend(self, nodes: int, *, runs: bool = True, **status: int) -> None:
        """Write the operator's part of the status. `runs`: it says so now, not an hour ago."""
        pool = await self.pool()
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "Valid",
            "message": "",
            "lastTransitionTime": "2026-01-01T12:00:00Z",
        }
        others = [c for c in pool.get("status", {}).get("conditions", ()) if c["type"] != "Ready"]
        said = self.now - timedelta(hours=0 if runs else 1)
        body = {
            "status": {
                **status,
                "observedGeneration": pool["metadata"]["generation"],
                "recommended": {"nodes": nodes, "reason": "a test"},
                "shares": [{"operator": "test/shoal", "at": said.isoformat()}],
                "conditions": [ready, *others],
            },
            "metadata": {"resourceVersion": pool["metadata"]["resourceVersion"]},
        }
        try:
            await self.kube.patch(f"{self.path}/status", body)
        except ApiError as error:
            if error.status != 409:
                raise
            await self.recommend(nodes, runs=runs, **status)

    async def pool(self) -> Json:
        return await self.kube.get(self.path)

    async def condition(self, kind: str) -> Json:
        conditions = (await self.pool()).get("status", {}).get("conditions", ())
        return next((dict(c) for c in conditions if c["type"] == kind), {})

    async def has_condition(self, kind: str, status: str, reason: str) -> Json:
        async def found() -> Json | None:
            condition = await self.condition(kind)
            return (
                condition if (condition.get("status"), condition.get("reason")) == (status, reason) else None
            )

        try:
            return dict(await eventually(found))
        except AssertionError as error:
            raise AssertionError(f"{error}: {(await self.pool()).get('status')}") from None

    async def replicas(self) -> int:
        return int((await self.kube.get(self.fleet_path))["spec"].get("replicas", 0))

    async def has_replicas(self, wanted: int) -> None:
        async def found() -> bool:
            return await self.replicas() == wanted

        try:
            await eventually(found, what=f"{wanted} replicas")
        except AssertionError as error:
            raise AssertionError(f"{error}: {(await self.pool()).get('status')}") from None

    async def is_gone(self) -> None:
        async def gone() -> bool:
            try:
                await self.pool()
            except ApiError as error:
                return error.status == 404
            return False

        await eventually(gone, what="the pool is gone")

    def passes(self, seconds: int) -> None:
        self.now += timedelta(seconds=seconds)

    async def nudge(self) -> None:
        """Wake the pool's reconcile."""
        await self.kube.patch(self.path, {"metadata": {"labels": {"nudged": os.urandom(3).hex()}}})


@contextlib.asynccontextmanager
async def running_pools(
    plane: ControlPlane, world: World, identity: str = "shoal-pools"
) -> AsyncIterator[NodePools]:
    http = await transport(plane.kubeconfig)
    pools = NodePools(
        http, PoolSettings(identity=identity, lease_namespace=world.namespace), wall=lambda: world.now
    )
    try:
        async with during(pools.run()):
            yield pools
    finally:
        await http.close()


@pytest.fixture
async def world(kube: Kube, namespace: str) -> AsyncIterator[World]:
    await serve(kube, "test.shoal.dev", "v1", "Fleet", scale=True)
    world = World(kube, namespace)
    yield world
    with contextlib.suppress(ApiError):
        await kube.patch(world.path, {"metadata": {"finalizers": None}})
        await kube.delete(world.path)


async def test_target_follows_the_recommendation_and_gets_its_size_back(
    control_plane: ControlPlane, world: World
) -> None:
    await world.create_fleet(2)
    await world.create_pool()
    async with running_pools(control_plane, world):
        await world.recommend(5)
        await world.has_replicas(5)
        await world.has_condition("Scaled", "True", "AsRecommended")
        pool = await world.pool()
        assert pool["metadata"]["finalizers"] == [FINALIZER]
        assert pool["status"]["scaling"]["originalNodes"] == 2

        world.passes(120)
        await world.recommend(20)
        await world.has_replicas(8)

        world.passes(120)
        await world.recommend(3)
        await world.has_condition("Scaled", "False", "ShrinksLater")
        assert await world.replicas() == 8
        world.passes(60)
        await world.nudge()
        await world.has_replicas(3)

        world.passes(120)
        await world.kube.delete(world.path)
        await world.is_gone()
    assert await world.replicas() == 2


async def test_of_two_releases_one_sizes_and_the_other_takes_over(
    control_plane: ControlPlane, world: World
) -> None:
    """Each led in its own namespace, and they wrote the pool in turns."""
    await world.create_fleet(2)
    await world.create_pool()
    async with contextlib.AsyncExitStack() as first, running_pools(control_plane, world, "b") as second:
        one = await first.enter_async_context(running_pools(control_plane, world, "a"))

        def leading() -> list[float | None]:
            return [each.metrics.registry.get_sample_value(LEADING) for each in (one, second)]

        await world.recommend(5)
        await world.has_replicas(5)
        assert sorted(leading(), key=str) == [0, 1]
        await first.aclose()
        world.passes(120)
        await world.recommend(6)
        await world.has_replicas(6)
        assert leading()[1] == 1


async def test_somebody_elses_size_stops_it_until_it_is_back(
    control_plane: ControlPlane, world: World
) -> None:
    await world.create_fleet(2)
    await world.create_pool()
    async with running_pools(control_plane, world):
        await world.recommend(4)
        await world.has_replicas(4)
        await world.has_condition("Scaled", "True", "AsRecommended")
        world.passes(120)
        await world.kube.patch(f"{world.fleet_path}/scale", {"spec": {"replicas": 7}})
        await world.recommend(6)
        conflict = await world.has_condition("FieldConflict", "True", "SizeChanged")
        assert "set 4 again" in conflict["message"]
        assert await world.replicas() == 7
        await world.kube.patch(f"{world.fleet_path}/scale", {"spec": {"replicas": 4}})
        await world.nudge()
        await world.has_replicas(6)
        await world.has_condition("FieldConflict", "False", "NoConflict")


async def test_a_field_that_another_manager_applies_is_left_alone(
    control_plane: ControlPlane, world: World
) -> None:
    body = {
        "apiVersion": "test.shoal.dev/v1",
        "kind": "Fleet",
        "metadata": {"name": "blue"},
        "spec": {"replicas": 2},
    }
    params = {"fieldManager": "argocd"}
    await world.kube.request("PATCH", world.fleet_path, body, params=params, content_type=APPLY)
    await world.create_pool()
    async with running_pools(control_plane, world):
        await world.recommend(5)
        conflict = await world.has_condition("FieldConflict", "True", "FieldManager")
        assert conflict["message"] == "argocd applies spec.replicas: leave the field out of what it applies"
        # Git no longer has the field: it goes to its default.
        await world.kube.request(
            "PATCH", world.fleet_path, {**body, "spec": {}}, params=params, content_type=APPLY
        )
        await world.nudge()
        await world.has_replicas(5)


async def test_an_active_autoscaler_is_not_fought(control_plane: ControlPlane, world: World) -> None:
    limit = "cluster.x-k8s.io/cluster-api-autoscaler-node-group-max-size"
    await world.create_fleet(2, annotations={limit: "9"})
    await world.create_pool()
    async with running_pools(control_plane, world):
        await world.recommend(5)
        conflict = await world.has_condition("FieldConflict", "True", "AutoscalerActive")
        assert limit in conflict["message"]
        assert await world.replicas() == 2


async def test_nothing_happens_while_the_operator_is_down(control_plane: ControlPlane, world: World) -> None:
    await world.create_fleet(2)
    await world.create_pool()
    async with running_pools(control_plane, world):
        await world.recommend(5, runs=False)
        await world.has_condition("Scaled", "False", "Stale")
        assert await world.replicas() == 2
        await world.recommend(5)
        await world.has_replicas(5)


@pytest.mark.nightly
async def test_another_mode_releases_the_target(control_plane: ControlPlane, world: World) -> None:
    await world.create_fleet(2)
    await world.create_pool()
    async with running_pools(control_plane, world):
        await world.recommend(5)
        await world.has_replicas(5)
        await world.has_condition("Scaled", "True", "AsRecommended")
        world.passes(120)
        await world.kube.patch(world.path, {"spec": {"scaling": {"mode": "Pods", "target": None}}})
        await world.has_replicas(2)

        async def left() -> bool:
            pool = await world.pool()
            kinds = {c["type"] for c in pool["status"]["conditions"]}
            return not (kinds & {"Scaled", "FieldConflict"}) and "finalizers" not in pool["metadata"]

        await eventually(left, what="nothing of shoal-pools is left in the pool")
        assert "scaling" not in (await world.pool())["status"]


@pytest.mark.nightly
async def test_giving_back_waits_for_its_turn(control_plane: ControlPlane, world: World) -> None:
    await world.create_fleet(2)
    await world.create_pool()
    async with running_pools(control_plane, world):
        await world.recommend(5)
        await world.has_replicas(5)
        await world.has_condition("Scaled", "True", "AsRecommended")
        world.passes(60)  # too soon for another resize
        await world.kube.delete(world.path)
        await world.has_condition("Scaled", "False", "Waits")
        assert (await world.pool())["metadata"]["finalizers"] == [FINALIZER]
        world.passes(60)
        await world.nudge()
        await world.is_gone()
    assert await world.replicas() == 2


async def test_a_restored_pool_can_be_deleted(control_plane: ControlPlane, world: World) -> None:
    """It has the finalizer of another manager, who saved it with all that there was: it stayed for ever."""
    await world.create_fleet(2)
    await world.create_pool(finalizers=(FINALIZER, "example.org/theirs"))
    async with running_pools(control_plane, world):
        await world.recommend(5)
        await world.has_replicas(5)
        world.passes(120)
        await world.kube.delete(world.path)
        await world.has_replicas(2)

        async def left() -> bool:
            return bool((await world.pool())["metadata"]["finalizers"] == ["example.org/theirs"])

        await eventually(left, what="only the other finalizer is left")
        await world.kube.patch(world.path, {"metadata": {"finalizers": None}})
        await world.is_gone()


async def test_a_pool_whose_memory_somebody_edited_is_released(
    control_plane: ControlPlane, world: World
) -> None:
    """What was applied no more stayed as the other manager's: it was read, and released, again and again."""
    await world.create_fleet(2)
    await world.create_pool()
    async with running_pools(control_plane, world):
        await world.recommend(5)
        await world.has_replicas(5)
        await world.has_condition("Scaled", "True", "AsRecommended")
        await world.kube.patch(f"{world.path}/status", {"status": {"scaling": {"originalNodes": 3}}})
        world.passes(120)
        await world.recommend(6)
        await world.has_replicas(6)
        await world.has_condition("Scaled", "True", "AsRecommended")
        world.passes(120)
        await world.kube.patch(world.path, {"spec": {"scaling": {"mode": "Pods", "target": None}}})
        await world.has_replicas(3)

        async def left() -> bool:
            pool = await world.pool()
            return "scaling" not in pool["status"] and "finalizers" not in pool["metadata"]

        await eventually(left, what="nothing of shoal-pools is left in the pool")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "Boat"}, "test.shoal.dev/v1 has no kind Boat with a scale subresource"),
        ({"apiVersion": "test.shoal.dev/v9"}, "the cluster has no API test.shoal.dev/v9"),
        ({"name": "red"}, '"red" not found; create it, or correct spec.scaling'),
        ({"namespace": None}, "Fleet is namespaced: set its namespace in spec.scaling.target"),
    ],
    ids=["kind", "version", "name", "namespace"],
)
async def test_a_target_that_is_not_there_is_named(
    control_plane: ControlPlane, world: World, change: dict[str, str | None], words: str
) -> None:
    target = {name: value for name, value in {**world.target, **change}.items() if value is not None}
    await world.create_fleet(2)
    await world.create_pool(mode="Scale", target=target)
    async with running_pools(control_plane, world):
        await world.recommend(5)
        condition = await world.has_condition("Scaled", "False", "TargetNotFound")
        assert words in condition["message"]


async def test_two_pools_with_one_target_do_not_fight(control_plane: ControlPlane, world: World) -> None:
    await world.create_fleet(2)
    await world.create_pool()
    second = World(world.kube, world.namespace)
    async with running_pools(control_plane, world):
        await world.recommend(5)
        await world.has_replicas(5)
        await world.has_condition("Scaled", "True", "AsRecommended")
        world.passes(120)
        await second.create_pool()
        await second.recommend(7)
        await second.has_condition("Scaled", "False", "SharedTarget")
        assert await world.replicas() == 5
        await world.kube.delete(second.path)
        await second.is_gone()
    assert await world.replicas() == 5


async def test_buffer_is_what_is_recommended_less_used_and_awaited(
    control_plane: ControlPlane, world: World
) -> None:
    await serve(world.kube, "autoscaling.x-k8s.io", "v1beta1", "CapacityBuffer", scale=False)
    await world.create_pool(mode="Buffer", buffer={"namespace": world.namespace, "requests": {"cpu": "7"}})
    within = f"namespaces/{world.namespace}"
    buffer_path = f"/apis/autoscaling.x-k8s.io/v1beta1/{within}/capacitybuffers/shoal-{world.name}"

    def units(count: int) -> Callable[[], Any]:
        async def found() -> bool:
            return bool((await world.kube.get(buffer_path))["spec"]["replicas"] == count)

        return found

    async with running_pools(control_plane, world):
        await world.recommend(5, used=1, waiting=1)
        await eventually(units(3), what="3 units")
        await world.recommend(5, used=5, waiting=0)
        await eventually(units(0), what="no unit")
        await world.has_condition("Scaled", "True", "AsRecommended")
        buffer = await world.kube.get(buffer_path)
        assert buffer["spec"]["podTemplateRef"] == {"name": f"shoal-{world.name}"}
        assert buffer["metadata"]["ownerReferences"][0]["name"] == world.name
        template = await world.kube.get(f"/api/v1/{within}/podtemplates/shoal-{world.name}")
        unit = template["template"]["spec"]
        assert unit["nodeSelector"] == {"pool": world.name}
        assert unit["containers"][0]["resources"] == {"requests": {"cpu": "7"}}
        assert "finalizers" not in (await world.pool())["metadata"]

        await world.kube.patch(world.path, {"spec": {"scaling": {"mode": "Pods", "buffer": None}}})

        async def deleted() -> bool:
            try:
                await world.kube.get(buffer_path)
            except ApiError as error:
                return error.status == 404
            return False

        await eventually(deleted, what="the buffer is deleted")


@pytest.mark.nightly
async def test_operator_and_node_pools_write_one_status(control_plane: ControlPlane, world: World) -> None:
    await world.create_fleet(3)
    await world.create_pool(mode="Scale", target=world.target, shrinkAfterSeconds=0, minNodes=0)
    async with (
        running_operator(control_plane.kubeconfig, world.namespace),
        running_pools(control_plane, world),
    ):
        await world.has_replicas(0)  # no job plans to use it
        await world.has_condition("Scaled", "True", "AsRecommended")
        await world.kube.patch(world.path, {"spec": {"price": None}})
        await world.has_condition("Ready", "False", "NoPrice")
        await world.has_condition("Scaled", "False", "PoolNotReady")
        status = (await world.pool())["status"]
        assert {c["type"] for c in status["conditions"]} == {"Ready", "Exhausted", "Scaled", "FieldConflict"}
        assert status["scaling"]["originalNodes"] == 3
        assert status["recommended"]["reason"] == "no job plans to use it"
        world.passes(120)
        await world.kube.delete(world.path)
        await world.is_gone()
    assert await world.replicas() == 3


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"mode": "Scale"}, "set target (the object to scale) if and only if mode is Scale"),
        ({"mode": "Buffer"}, "set buffer (the namespace and requests of the CapacityBuffer)"),
        ({"mode": "Cloud"}, "set cloud (the node group: eks or gke) if and only if mode is Cloud"),
        ({"mode": "Cloud", "cloud": {}}, "set exactly one of eks and gke"),
        (
            {"mode": "Pods", "buffer": {"namespace": "a", "requests": {"cpu": "1"}}},
            "if and only if mode is Buffer",
        ),
        ({"minNodes": 9}, "scaling.minNodes must not exceed limits.nodes"),
    ],
    ids=["target", "buffer", "cloud", "eks or gke", "a field of another mode", "more than the limit"],
)
async def test_fields_of_each_mode_are_required(world: World, scaling: Json, words: str) -> None:
    with pytest.raises(ApiError) as refused:
        await world.create_pool(**scaling)
    assert words in str(refused.value)
