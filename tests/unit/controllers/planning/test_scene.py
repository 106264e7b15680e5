"""What a plan reads of the cluster: zones, servers, pools, images, profiles, and what was heard lately."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from shoal.api.base import Condition
from shoal.api.kube import Node, Pod
from shoal.api.speed_profile import SpeedProfile
from shoal.api.training_job import TrainingJob
from shoal.controllers.planning import scene
from shoal.controllers.planning.cores import Cores
from shoal.controllers.speedprofile.reconcile import Known
from shoal.manifests.pods import Images
from shoal.runtime.controller import Key
from shoal.sizing.fleet import Watched
from shoal.sizing.fleet.jobs import asked, running
from shoal.telemetry.poller import Seen
from tests.unit.controllers.planning.world import (
    DESCRIBED,
    NOW,
    ON_DEMAND,
    SPOT,
    World,
    job_manifest,
    pool,
    report,
    speed,
    training_job,
)
from tests.unit.policy import build


@pytest.mark.parametrize(
    ("policy", "transfer", "chosen"),
    [
        ("Same", 0, "on-demand"),
        ("Preferred", 0, "spot"),
        ("Any", 0, "spot"),
        ("Preferred", 0.1, "on-demand"),
        ("Any", 0.1, "on-demand"),
    ],
)
@pytest.mark.parametrize("begun", [True, False])
async def test_pools_out_of_the_zone_of_the_server_are_planned_where_workers_may_leave_it_and_that_pays(
    policy: str, transfer: float, chosen: str, begun: bool
) -> None:
    """Also before the server has a node, where all of its pools are in one zone."""
    world = World()
    workers = job_manifest()["spec"]["workers"] | {"zonePolicy": policy}
    job = training_job(workers=workers, parameterServers={"pools": ["safe"]})
    spot = pool("spot", 0.3, True, zone="z1", transferPerGiB=transfer)
    world.add(job, spot, pool("on-demand", 1.0, False, zone="z2", transferPerGiB=transfer))
    world.add(pool("safe", 0.1, False, zone="z2"))
    add_node(world, "safe", "z2")
    if begun:
        world.state.pods.put(server_of(job, 0, "safe"))
    world.hear(job, report(1e6))
    found = await world.planned(job)
    assert set(found.pools) == {chosen}


def add_node(world: World, name: str, zone: str) -> None:
    meta = {"name": name, "uid": name, "labels": {"topology.kubernetes.io/zone": zone}}
    world.state.nodes.put(Node.model_validate({"metadata": meta}))


def server_of(job: TrainingJob, incarnation: int, node: str, **more: Any) -> Pod:
    """A pod of parameter server 0 of the job."""
    server = build.pod_manifest("ps", incarnation=incarnation, node=node, **more)
    server["metadata"]["ownerReferences"][0]["uid"] = job.metadata.uid
    server["metadata"]["uid"] += job.metadata.uid
    return Pod.model_validate(server)


async def test_the_server_is_where_the_newest_pod_of_this_run_is() -> None:
    """A pod of an earlier job of this name, one that has ended, and one that only bears the label say nothing."""
    world = World()
    workers = job_manifest()["spec"]["workers"] | {"zonePolicy": "Same"}
    job = training_job(workers=workers)
    world.add(job, *(pool(name, 0.3, True, zone=name) for name in ("spot", "on-demand")))
    for zone in ("spot", "on-demand"):
        add_node(world, zone, zone)
    earlier = job.model_copy(update={"metadata": job.metadata.model_copy(update={"uid": "earlier"})})
    labelled = server_of(job, 8, "spot")
    for server in (
        server_of(earlier, 7, "spot", deleting=NOW),
        server_of(job, 1, "spot", deleting=NOW),
        server_of(job, 3, "spot", phase="Failed"),
        labelled.model_copy(
            update={"metadata": replace(labelled.metadata, name="mine", owner_references=())}
        ),
        server_of(job, 2, "on-demand"),
    ):
        world.state.pods.put(server)
    world.hear(job, report(1e6))
    found = await world.planned(job)
    assert set(found.pools) == {"on-demand"}


@pytest.mark.parametrize("silent", [False, True])
async def test_what_was_last_heard_minutes_ago_says_nothing_of_the_speed_of_now(silent: bool) -> None:
    world, job = World(), training_job()
    world.add(job, SPOT, ON_DEMAND, said=report(7e6))
    world.planner._paces.observe = lambda _job, said, _at: Watched({"spot": [100.0]} if said else {}, 60.0)  # type: ignore[method-assign]
    now = asyncio.get_running_loop().time()
    world.poller._seen[job.metadata.uid] = Seen(report(7e6), now - (scene.SILENT_SECONDS + 1) * silent)
    found = await world.planned(job)
    assert (found.relative_error is None) == silent
    assert ("was not heard for minutes" in found.reason) == silent


async def test_nothing_more_is_bought_of_a_pool_that_is_being_deleted() -> None:
    """It was the cheapest, and the plan bought four nodes that shoal-pools gave back."""
    for there in (0, 2):
        world = World()
        nodes = ({"index": i, "pool": "spot", "state": "Running", "node": f"n{i}"} for i in range(there))
        job = training_job(status={"slots": list(nodes)})
        world.add(job, SPOT, ON_DEMAND, said=report(7e6))
        world.planner._wanted.clear()
        about = SPOT.metadata.model_copy(
            update={"deletion_timestamp": "2026-01-01T11:59:00Z", "resource_version": "2"}
        )
        world.add(SPOT.model_copy(update={"metadata": about}))
        assert world.planner._wanted.is_set(), "that is a reason to plan"
        found = await world.planned(job)
        assert found.feasible
        assert found.pools.get("spot", 0) == there
        assert found.pools["on-demand"] >= 4 - there
        assert "spot is being deleted: no worker begins there" in found.reason


def test_of_a_namespace_so_many_rows_are_read_and_the_profiles_of_planned_jobs_before_newer_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scene, "MOST_ROWS_READ", 10)
    row = {"accelerator": "T4", "batchSize": 1, "stepSeconds": 1}

    def known(name: str, namespace: str, day: int) -> tuple[Key, Known]:
        meta = {"name": name, "namespace": namespace, "creationTimestamp": f"2026-11-{day:02}T00:00:00Z"}
        made = {"metadata": meta, "spec": {"rows": [row] * 4}}
        return (namespace, name), Known(
            SpeedProfile.model_validate(made), {}, datetime(2026, 11, 21, tzinfo=UTC), lambda: None
        )

    every = dict([*(known(f"p{day}", "evil", day) for day in range(1, 6)), known("one", "team", 1)])
    read, unread = scene.read_profiles(every, {("evil", "p2")})
    assert read.keys() == {("evil", "p2"), ("evil", "p5"), ("team", "one")}
    assert unread.keys() == {("evil", f"p{day}") for day in (1, 3, 4)}
    assert "12 rows of speeds, of which 10 are read" in unread["evil", "p4"]


async def test_workers_that_wait_in_an_exhausted_pool_do_not_run_there() -> None:
    world = World()
    slots = [{"index": n, "pool": "spot", "state": "Starting"} for n in range(2)]
    objective = {"deadlineSeconds": 1500}  # no time to wait for spot nodes
    job = training_job(elasticity={"mode": "Auto", "objective": objective}, status={"slots": slots})
    exhausted = {"type": "Exhausted", "status": "True", "reason": "NoNodes"}
    condition = Condition.model_validate({**exhausted, "lastTransitionTime": "2026-01-01T00:00:00Z"})
    status = SPOT.status.model_copy(update={"conditions": (condition,)})
    world.add(job, SPOT.model_copy(update={"status": status}), ON_DEMAND, said=report(4e6))
    found = await world.planned(job)
    assert set(found.pools) == {"on-demand"}
    bound = [{**slot, "node": f"n{slot['index']}"} for slot in slots]
    assert running(training_job(status={"slots": bound})) == {"spot": 2}
    assert running(job) == {}
    assert asked(job) == {"spot": 0.0}
    made = (NOW - timedelta(seconds=each) for each in (40, 90))
    dated = [{**slot, "createdAt": at.isoformat()} for slot, at in zip(slots, made, strict=True)]
    assert asked(training_job(status={"slots": dated}), NOW) == {"spot": 90.0}
    behind = NOW - timedelta(seconds=43)  # up to `arrival.TOLERATED` seconds a clock may be ahead of another
    assert asked(training_job(status={"slots": dated[:1]}), behind) == {"spot": 0.0}


async def test_what_the_user_says_of_the_model_counts_for_a_running_job() -> None:
    """A pool into which the model does not fit was planned, and every worker there ended for want of memory."""
    world, job = World(), training_job()
    world.add(job, SPOT, pool("on-demand", 1.0, False, accelerator={"name": "A100"}))
    model = DESCRIBED | {"bytesPerSample": 200_000_000}  # 26 GB of 128 samples: a T4 has 16
    world.add_profile("p", spec={"model": model})
    world.hear(job, report(1e6))
    found = await world.planned(job)
    assert set(found.pools) == {"on-demand"}
    assert "spot is left out: 128 samples need 25.6 GB and T4 has 16 GB" in found.reason


@pytest.mark.parametrize("image", ["", "mine:1"])
async def test_pools_with_gpus_are_not_planned_without_an_image_for_them(image: str) -> None:
    """Their workers are never made there: a plan that counts on them keeps no deadline."""
    world = World(images=Images(ps="ps:1", worker="worker:1"))
    template = {"spec": {"containers": [{"name": "worker", "image": image}]}} if image else {}
    workers = {"replicas": 2, "maxReplicas": 8, "pools": ["spot", "cpus"], "template": template}
    job = training_job(workers=workers)
    world.add(job, SPOT, pool("cpus", 1.0, False, accelerator=None, cores=8), said=report(1e6))
    found = await world.planned(job)
    assert ("spot" in found.pools) == bool(image)
    assert ("spot is left out: its nodes have GPUs" in found.reason) == (not image)


async def test_a_pool_that_was_scaled_to_zero_is_not_bought_again_for_the_cores_that_others_have() -> None:
    """Its slow nodes were forgotten with the last of them: the plan bought them, saw them, and left them, for ever."""
    world = World()
    workers = job_manifest()["spec"]["workers"] | {"pools": ["big", "small"]}
    job = training_job(workers=workers, elasticity={"mode": "Auto"})
    measured = [
        speed(seconds, 5000).model_copy(update={"cores": cores}) for cores, seconds in ((16, 0.1), (2, 0.3))
    ]
    world.add(job, pool("big", 1.0, False, cores=16), pool("small", 0.6, False))
    world.hear(job, report(1e7, speed=tuple(measured)))
    meta = {"name": "n", "uid": "n", "labels": {"pool": "small"}}
    node = Node.model_validate({"metadata": meta, "status": {"allocatable": {"cpu": "2"}}})
    world.state.nodes.put(node)
    assert set((await world.planned(job)).pools) == {"big"}
    world.state.nodes.drop("n")
    assert set((await world.planned(job)).pools) == {"big"}


def test_cores_are_remembered_of_the_nodes_that_a_pool_describes() -> None:
    def node(cores: str) -> Node:
        meta = {"name": "n", "uid": "n", "labels": {"pool": "small"}}
        return Node.model_validate({"metadata": meta, "status": {"allocatable": {"cpu": cores}}})

    cores, small = Cores(), pool("small", 0.6, False)
    assert cores.see({"small": small}, {}) == {}
    assert cores.see({"small": small}, {"n": node("4")}) == {"small": 4.0}
    assert cores.see({"small": small}, {"n": node("2")}) == {"small": 2.0}
    assert cores.see({"small": small}, {}) == {"small": 2.0}
    edited = pool("small", 0.6, False, nodeSelector={"pool": "other"})
    assert cores.see({"small": edited}, {"n": node("2")}) == {}
