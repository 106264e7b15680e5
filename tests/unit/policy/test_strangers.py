"""Pods of somebody else with the labels, the owner and a name of the job's: who may create pods gets no more by it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.api.kube import Pod
from shoal.api.labels import RoleName
from shoal.policy.actions import CreatePod, DeletePod, UpdateService
from shoal.policy.model import Observation
from shoal.policy.plan import plan
from tests.unit.policy import build
from tests.unit.policy.world import World, running_world


def beside(world: World, role: RoleName, index: int, incarnation: int) -> Observation:
    """What is seen with such a pod, which runs."""
    seen = world.observation()
    node = "safe-1" if role == "ps" else "spot-4"
    return replace(seen, pods=(*seen.pods, build.pod(role, index, incarnation, node=node)))


@pytest.mark.parametrize(
    ("role", "index", "incarnation"),
    [("ps", 0, 1), ("ps", 0, 7), ("worker", 0, 2), ("worker", 0, 10**40), ("worker", 10**40, 0)],
)
def test_pod_with_a_number_that_nobody_gave_changes_nothing(
    role: RoleName, index: int, incarnation: int
) -> None:
    world = running_world()
    assert plan(beside(world, role, index, incarnation)) == plan(world.observation())


def test_next_pod_of_a_worker_that_is_heard_is_taken_back() -> None:
    """An earlier leader may have made it: of a worker, one pod may be recorded by nobody."""
    made = plan(beside(running_world(), "worker", 0, 1))
    assert [each.name for each in made.actions if isinstance(each, DeletePod)] == ["digits-worker-0-1"]
    assert made.status.restarts.disruptions == 0


def test_next_pod_of_a_worker_that_is_not_heard_replaces_it() -> None:
    world = running_world()
    world.hush("digits-worker-0-0")
    made = plan(beside(world, "worker", 0, 1))
    assert [each.name for each in made.actions if isinstance(each, DeletePod)] == ["digits-worker-0-0"]


def test_name_of_the_next_server_that_somebody_took_is_told_when_it_is_wanted() -> None:
    world = running_world()
    world.vanish("digits-ps-0-0")
    world.asked.add("digits-ps-0-0")
    seen = beside(world, "ps", 0, 1)
    for _ in range(2):
        made = plan(seen)
        seen = replace(seen, job=seen.job.model_copy(update={"status": made.status}))
    assert not [each for each in made.actions if isinstance(each, (CreatePod, UpdateService))]
    stalled = made.status.condition("Stalled")
    assert stalled is not None
    assert (stalled.status, stalled.reason) == ("True", "NameCollision")
    assert "digits-ps-0-1" in stalled.message


def test_pods_of_a_job_whose_status_was_lost_are_its_own() -> None:
    world = running_world()
    for _ in range(3):
        world.vanish(next(name for name in world.pods if "worker-0" in name))
        world.settle()
    assert "digits-worker-0-3" in world.pods
    world.status = {}
    made = plan(world.observation())
    assert not [each for each in made.actions if isinstance(each, (CreatePod, DeletePod))]


@pytest.mark.parametrize("number", ["01", "", "-1", "1e3", "٣", "1" * 11])
def test_label_that_is_no_number_of_a_place_names_none(number: str) -> None:
    manifest = build.pod_manifest()
    manifest["metadata"]["labels"]["shoal.dev/index"] = number
    assert Pod.model_validate(manifest).place is None
