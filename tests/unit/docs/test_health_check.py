"""The health checks for Argo CD (docs/gitops.md) and Flux (examples/gitops), run on the statuses of a job's life."""

from __future__ import annotations

import re
from typing import Any

import cel
import pytest
import yaml
from lupa import lua51  # Argo CD's interpreter is one of Lua 5.1

from shoal.api.training_job_status import PASSES
from shoal_trainer.contract import Outcome
from tests.unit.docs.pages import read, section
from tests.unit.policy import build
from tests.unit.policy.world import World, running_world


def health(manifest: dict[str, Any], status: dict[str, Any]) -> tuple[str, str]:
    """(status, message) that Argo CD shows for a TrainingJob."""
    block = re.search(r"```yaml\n(data:.*?)```", section(read("docs/gitops.md"), "Argo CD"), re.DOTALL)
    assert block, "docs/gitops.md has no health check"
    script = yaml.safe_load(block[1])["data"]["resource.customizations.health.shoal.dev_TrainingJob"]
    lua = lua51.LuaRuntime()
    lua.globals().obj = lua.table_from({**manifest, **({"status": status} if status else {})}, recursive=True)
    result = lua.execute(script)
    return result.status, result.message


def of(world: World) -> tuple[str, str]:
    return health(world.manifest, world.status)


def end_server_0(world: World, outcome: Outcome, message: str = "") -> None:
    text = build.termination_message(outcome, message=message, model_uri="file:///m", model_digest="d")
    world.end("digits-ps-0-0", 0, "Completed", text)
    world.reconcile()


@pytest.mark.parametrize(
    ("waiting", "words"),
    [
        ("ImagePullBackOff", "check the image in the job's template"),
        ("CreateContainerConfigError", "the container cannot be started"),
        ("CrashLoopBackOff", "the container crashes repeatedly"),
    ],
)
def test_what_only_a_person_can_mend_is_degraded(waiting: str, words: str) -> None:
    world = World()
    world.reconcile()
    for pod in world.pods.values():
        state = {"waiting": {"reason": waiting, "message": "not found"}}
        pod["status"] |= {"phase": "Pending", "containerStatuses": [{"name": "worker", "state": state}]}
    world.reconcile()
    status, message = of(world)
    assert status == "Degraded"
    assert words in message


def reasons_of_degraded() -> set[str]:
    """Those of docs/reasons.md, which another test holds to what the code names."""
    [line] = re.findall(r"- `Degraded` — `True`: (.*?)\. `False`", read("docs/reasons.md"), re.DOTALL)
    return set(re.findall(r"`([A-Za-z]+)`", line))


def test_each_reason_of_degraded_waits_for_a_person_unless_it_may_pass() -> None:
    reasons = reasons_of_degraded()
    assert len(reasons) > len(PASSES)
    assert reasons >= PASSES
    told = {}
    for reason in sorted(reasons):
        condition = {"type": "Degraded", "status": "True", "reason": reason, "message": "credentials"}
        status = {"observedGeneration": 1, "phase": "Running", "conditions": [condition]}
        told[reason] = (*health({"metadata": {"generation": 1}}, status), flux({}, status))
    assert {reason for reason, (word, *_) in told.items() if word == "Healthy"} == PASSES
    assert {answer for reason, answer in told.items() if reason not in PASSES} == {
        ("Degraded", "credentials", "Failed")
    }
    assert {answer for reason, (*_, answer) in told.items() if reason in PASSES} == {"Current"}


def test_job_progresses_until_it_runs() -> None:
    world = World()
    assert of(world)[0] == "Progressing"
    world.reconcile()
    assert of(world)[0] == "Progressing"
    world.settle()
    assert of(world)[0] == "Healthy"


def test_lost_worker_leaves_a_running_job_healthy() -> None:
    world = running_world()
    world.kill_node("spot-0")
    world.reconcile()
    assert world.status["workers"]["ready"] == 2
    assert of(world)[0] == "Healthy"


def test_status_of_an_older_generation_is_not_used() -> None:
    world = running_world()
    world.manifest["metadata"]["generation"] += 1
    assert of(world)[0] == "Progressing"
    world.settle()
    assert of(world)[0] == "Healthy"


def test_suspended_job() -> None:
    world = running_world()
    world.manifest["spec"]["suspend"] = True
    world.reconcile()
    assert of(world)[0] == "Healthy"  # its servers still save
    world.settle()
    assert of(world)[0] == "Suspended"
    world.manifest["spec"]["suspend"] = False
    world.reconcile()
    assert of(world)[0] == "Progressing"


@pytest.mark.parametrize(
    ("outcome", "expected"), [(Outcome.SUCCEEDED, "Healthy"), (Outcome.FAILED, "Degraded")]
)
def test_finished_job(outcome: Outcome, expected: str) -> None:
    world = running_world()
    end_server_0(world, outcome, "the loss is NaN")
    assert of(world)[0] == expected
    world.settle()
    assert of(world)[0] == expected


def test_message_of_a_failed_job_is_the_cause() -> None:
    world = running_world()
    end_server_0(world, Outcome.FAILED, "the loss is NaN")
    assert "the loss is NaN" in of(world)[1]


def flux(manifest: dict[str, Any], status: dict[str, Any]) -> str:
    """What Flux makes of a job: the first expression that is true, in its order, else InProgress."""
    *_, kustomization = yaml.safe_load_all(read("examples/gitops/flux.yaml"))
    [checks] = kustomization["spec"]["healthCheckExprs"]
    told = {"metadata": {"generation": 1} | manifest.get("metadata", {}), "status": status}
    for name, result in (("inProgress", "InProgress"), ("failed", "Failed"), ("current", "Current")):
        if cel.evaluate(checks[name], told):
            return result
    return "InProgress"


def test_flux_asks_for_the_kind_that_there_is() -> None:
    *_, kustomization = yaml.safe_load_all(read("examples/gitops/flux.yaml"))
    [checks] = kustomization["spec"]["healthCheckExprs"]
    manifest = World().manifest
    assert (checks["apiVersion"], checks["kind"]) == (manifest["apiVersion"], manifest["kind"])


@pytest.mark.parametrize(
    ("outcome", "expected"), [(Outcome.SUCCEEDED, "Current"), (Outcome.FAILED, "Failed")]
)
def test_flux_does_not_wait_for_the_end_of_a_job(outcome: Outcome, expected: str) -> None:
    """While it waits it applies no commit: neither another number of workers, nor the image that mends the job."""
    world = World()
    assert flux(world.manifest, world.status) == "InProgress"
    world = running_world()
    assert flux(world.manifest, world.status) == "Current"
    end_server_0(world, outcome, "the loss is NaN")
    world.settle()
    assert flux(world.manifest, world.status) == expected
    world.manifest["metadata"]["generation"] += 1
    assert flux(world.manifest, world.status) == "InProgress"


def test_a_suspended_job_is_as_flux_was_told() -> None:
    world = running_world()
    world.manifest["spec"]["suspend"] = True
    world.reconcile()
    world.settle()
    assert flux(world.manifest, world.status) == "Current"


def test_a_job_that_a_queue_holds_does_not_train_yet() -> None:
    held = {"observedGeneration": 1, "phase": "Suspended", "reason": "Queued"}
    assert flux({}, held) == "InProgress"
