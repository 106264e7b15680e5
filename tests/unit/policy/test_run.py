"""`storage.run`: another TrainingJob continues the run, with incarnations that were never used in it."""

from __future__ import annotations

import json
from datetime import timedelta

from shoal.manifests.names import first_incarnation
from shoal.policy.actions import CreatePod
from shoal.policy.plan import plan
from shoal_trainer.contract import RuntimeConfig
from tests.unit.policy import build
from tests.unit.policy.world import World

RUN = {"storage": {"uri": "s3://bucket/runs", "run": "nightly"}}


def named(minutes: int = 0) -> World:
    world = World(spec=RUN)
    created = build.NOW + timedelta(minutes=minutes)
    world.manifest["metadata"]["creationTimestamp"] = build.stamp(created)
    return world


def test_incarnations_begin_above_those_of_an_earlier_job() -> None:
    earlier, later = named(), named(minutes=5)
    assert first_incarnation(later.job) == first_incarnation(earlier.job) + 300
    assert first_incarnation(World().job) == 0


def test_first_pods_of_a_named_run_are_no_replacements() -> None:
    world = named()
    first = first_incarnation(world.job)
    made = world.reconcile()
    names = [a.name for a in made.actions if isinstance(a, CreatePod)]
    assert names == [f"digits-ps-0-{first}", *(f"digits-worker-{i}-{first}" for i in range(3))]
    assert world.condition("Disrupted") == {}
    world.settle()
    assert world.status["phase"] == "Running"
    assert world.services["digits-ps-0"]["spec"]["selector"]["shoal.dev/incarnation"] == str(first)
    world.kill_pod(f"digits-worker-1-{first}", 1)
    world.reconcile()
    world.tick()
    assert "digits-worker-1-" + str(first + 1) in {a.name for a in world.reconcile().actions}
    assert max(map(len, names)) <= 63


def test_pods_are_told_the_run_and_its_first_incarnation() -> None:
    made = plan(named().observation())
    pod = next(a for a in made.actions if isinstance(a, CreatePod))
    env = {e["name"]: e.get("value") for e in pod.manifest["spec"]["containers"][0]["env"]}
    config = RuntimeConfig.model_validate(json.loads(env["SHOAL_CONFIG"].replace("$$", "$")))
    assert config.job.prefix == "team/digits/nightly"
    assert config.first_incarnation == config.incarnation == pod.incarnation > 0
