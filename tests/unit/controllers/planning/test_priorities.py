"""Which of two jobs goes first in a full pool, as PriorityClasses, templates and pods say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.api.kube import Pod
from shoal.api.training_job import TrainingJob
from shoal.cluster.transport import Answer
from shoal.controllers.planning.priorities import PATH
from shoal.errors import Unavailable
from tests.unit.controllers.planning.world import World, job_manifest, pool
from tests.unit.policy import build

CLASSES = [("low", -5), ("prod", 100_000)]


def with_classes(*, default: str = "") -> World:
    world = World()
    items = [{"metadata": {"name": n}, "value": v, "globalDefault": n == default} for n, v in CLASSES]
    world.cluster.objects[PATH] = {"items": items}
    world.add(pool("a", 1.0, False, limits={"nodes": 4}))
    return world


def add(world: World, name: str, workers: str = "", servers: str = "", *, running: int | None = None) -> None:
    """A job for four workers with PriorityClasses in its templates. `running`: the priority of workers that run."""
    templates = [
        {"template": {"spec": {"priorityClassName": named}}} if named else {} for named in (workers, servers)
    ]
    spec: dict[str, Any] = {
        "workers": {"replicas": 4, "minReplicas": 1, "maxReplicas": 4, "pools": ["a"], **templates[0]},
        "parameterServers": {"replicas": 1, **templates[1]},
        "elasticity": {"mode": "Auto"},
    }
    manifest = job_manifest(name, **spec)
    pods = [build.pod_manifest("ps")] + [
        build.pod_manifest("worker", i) for i in range(4) if running is not None
    ]
    for pod in pods:
        meta, role = pod["metadata"], pod["metadata"]["labels"]["shoal.dev/role"]
        meta |= {"name": meta["name"].replace("digits", name), "uid": meta["uid"].replace("digits", name)}
        meta["labels"]["shoal.dev/job"] = name
        meta["ownerReferences"][0] |= {"name": name, "uid": f"uid-{name}"}
        pod["spec"]["priority"] = dict(CLASSES).get(servers, 0) if role == "ps" else running
        world.state.pods.put(Pod.model_validate(pod))
    if running is not None:
        slots = [
            {
                "role": "worker",
                "index": i,
                "incarnation": 0,
                "state": "Running",
                "pool": "a",
                "node": f"a-{i}",
            }
            for i in range(4)
        ]
        manifest["status"] = {"slots": slots, "plan": {"pools": {"a": 4}}}
    world.add(TrainingJob.model_validate(manifest))


async def planned(world: World) -> dict[str, int]:
    await world.planner.plan_once()
    found = {job.metadata.name: world.planner.proposal(job.metadata.uid) for job in world.state.jobs.all()}
    return {name: each.pools.get("a", 0) if each else -1 for name, each in found.items()}


async def test_class_that_stands_on_the_workers_only_counts_before_there_is_a_worker() -> None:
    """No worker was made, as the pool was full, and so nobody knew that the job goes first."""
    world = with_classes()
    add(world, "other", running=0)
    add(world, "prod", workers="prod")
    assert await planned(world) == {"other": 1, "prod": 3}


async def test_class_of_parameter_servers_says_nothing_of_the_workers() -> None:
    world = with_classes()
    add(world, "other", running=0)
    add(world, "servers", servers="prod", workers="low")
    assert await planned(world) == {"other": 4, "servers": 0}


async def test_pods_without_a_class_have_the_default_one() -> None:
    world = with_classes(default="prod")
    add(world, "low", workers="low", running=-5)
    add(world, "none")
    assert await planned(world) == {"low": 1, "none": 3}


async def test_class_that_no_worker_was_admitted_with_is_worth_no_more_than_the_workers_that_run() -> None:
    """A quota refuses pods with it: an edit of the template kept all nodes from jobs whose class is admitted."""
    world = with_classes()
    world.cluster.objects[PATH]["items"].append({"metadata": {"name": "some"}, "value": 50})
    add(world, "edited", workers="prod", running=0)
    add(world, "some", workers="some")
    assert await planned(world) == {"edited": 1, "some": 3}
    pod = next(each for each in world.state.pods.all() if each.metadata.name == "edited-worker-3-0")
    newer = {
        "metadata": replace(pod.metadata, resource_version="99"),
        "spec": replace(pod.spec, priority=100_000),
    }
    world.state.pods.put(pod.model_copy(update=newer))
    assert await planned(world) == {"edited": 4, "some": 0}


NO_LISTS = [b"<html>", b"[]", b'{"items": [{"metadata": {"name": "prod"}}]}']


@pytest.mark.parametrize(
    "fault", [Answer(403, b"{}"), Unavailable("down"), *(Answer(200, body) for body in NO_LISTS)]
)
async def test_pods_say_it_where_classes_cannot_be_read(fault: Answer | Exception) -> None:
    world = with_classes()
    world.cluster.fault = lambda _method, path: fault if path == PATH else None
    add(world, "prod", workers="prod", running=100_000)
    add(world, "other")
    assert await planned(world) == {"prod": 4, "other": 0}


async def test_servers_of_the_same_class_say_what_it_is_worth_before_there_is_a_worker() -> None:
    world = with_classes()
    world.cluster.fault = lambda _method, path: Answer(403, b"{}") if path == PATH else None
    add(world, "other", running=0)
    add(world, "prod", workers="prod", servers="prod")
    assert await planned(world) == {"other": 1, "prod": 3}


async def test_classes_are_remembered_while_they_cannot_be_read() -> None:
    world = with_classes()
    add(world, "other", running=0)
    await planned(world)
    world.cluster.fault = lambda _method, path: Unavailable("down") if path == PATH else None
    add(world, "prod", workers="prod")
    assert await planned(world) == {"other": 1, "prod": 3}


async def test_nobody_who_sees_no_pool_asks_for_classes() -> None:
    """The right to read them comes with that to read pools: what is refused each minute is an alert."""
    world = World()
    add(world, "other", running=0)
    assert await planned(world) == {"other": 0}
    assert ("GET", PATH) not in world.cluster.requests
