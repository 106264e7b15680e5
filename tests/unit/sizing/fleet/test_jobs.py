"""What the planner takes from a TrainingJob, a pool and a profile: the work left, the limits, and what is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.api.capacity_pool import CapacityPool
from shoal.api.speed_profile import SpeedProfile
from shoal.sizing.fleet.jobs import END_SECONDS, fleet_job, unreadable
from shoal.sizing.fleet.problems import job_problem
from shoal.sizing.fleet.resources import fleet_pool, profile_of
from shoal.sizing.fleet.values import Pace
from shoal.sizing.speed.model import SpeedModel
from shoal_trainer.contract import DataReport, ShardReport
from tests.unit.controllers.planning.world import MODEL, NOW, SPOT, report, training_job

MODEL_OF_USER = {"flopsPerSample": 1e9, "parameters": 1_000_000, "tensors": 50}


@pytest.mark.parametrize(
    ("exhausted", "nodes", "doubted"), [("True", 0, False), ("False", 0, True), ("False", 1, False)]
)
def test_pool_that_is_tried_again_is_doubted_until_it_has_a_node(
    exhausted: str, nodes: int, doubted: bool
) -> None:
    out = {
        "type": "Exhausted",
        "status": exhausted,
        "reason": "NoNodes",
        "lastTransitionTime": "2026-01-01T11:50:00Z",
    }
    status = {"conditions": [out], "outSince": "2026-01-01T11:00:00Z", "nodes": nodes}
    whole = SPOT.model_dump(by_alias=True) | {"status": status}
    found = fleet_pool(CapacityPool.model_validate(whole), NOW)
    assert (found.exhausted, found.doubted) == (exhausted == "True", doubted)
    assert not fleet_pool(SPOT, NOW).doubted


def test_deadline_and_budget_are_what_is_left() -> None:
    objective = {"deadlineSeconds": 3600, "maxCost": 40}
    status = {"startTime": "2026-01-01T11:30:00Z", "cost": {"accumulated": "12.5"}}
    job = training_job(elasticity={"mode": "Auto", "objective": objective}, status=status)
    found = fleet_job(job, None, NOW)
    assert (found.deadline_seconds, found.budget_left) == (1800 - END_SECONDS, 27.5)


def test_a_job_is_planned_with_the_snapshots_that_it_makes() -> None:
    """Every plan of the operator had one a minute, and after a loss of a server as little to repeat."""
    profile = SpeedProfile.model_validate({"metadata": {"name": "m"}, "spec": {"model": MODEL_OF_USER}})
    for seconds in (60, 3600):
        job = fleet_job(training_job(parameterServers={"snapshot": {"everySeconds": seconds}}), profile, NOW)
        pools = [fleet_pool(SPOT, NOW)]
        found = job_problem(replace(job, samples_left=1e6), pools, {SPOT.metadata.name: 4}, SpeedModel())
        assert found.problem.servers.snapshot_every == seconds


def test_a_pace_that_four_digits_make_impossible_is_the_fastest() -> None:
    """-0.99996 is -1 in the status: the logarithm of nothing was a fault of the planner."""
    status = {"prediction": {"relativeError": "-1", "watchedSeconds": 90}}
    found = fleet_job(training_job(status=status), None, NOW)
    assert found.pace_before == Pace(-0.99, 90.0)


def test_a_job_says_since_when_it_waits_also_where_it_cannot_be_read() -> None:
    made = "2026-01-01T11:00:00Z"
    job = training_job(metadata={"creationTimestamp": made})
    assert fleet_job(job, None, NOW).created == unreadable(job, "a fault").created == made


@pytest.mark.parametrize("mode", ["Off", "Manual"])
def test_job_that_nobody_plans_is_planned_with_the_workers_it_has(mode: str) -> None:
    found = fleet_job(training_job(elasticity={"mode": mode}), None, NOW)
    assert (found.min_workers, found.max_workers) == (2, 2)


def test_a_worker_has_the_cores_that_its_template_allows() -> None:
    def limit(*containers: dict[str, Any]) -> float:
        workers = {"replicas": 2, "template": {"spec": {"containers": list(containers)}}}
        return fleet_job(training_job(workers=workers), None, NOW).cpu_limit

    sidecar = {"name": "logs", "image": "l", "resources": {"limits": {"cpu": "100m"}}}
    assert limit(sidecar) == limit(sidecar, {"name": "worker"}) == 0.0
    for cpu, cores in (("1500m", 1.5), (2, 2.0)):
        assert limit(sidecar, {"name": "worker", "resources": {"limits": {"cpu": cpu}}}) == cores


@pytest.mark.parametrize(
    ("resources", "gpus"),
    [
        ({}, None),
        ({"limits": {"cpu": 4}}, None),
        ({"limits": {"nvidia.com/gpu": 0}}, 0),
        ({"limits": {"nvidia.com/gpu": 1}}, 1),
        ({"limits": {"nvidia.com/gpu": "2", "cpu": 4}, "requests": {"nvidia.com/gpu": "2"}}, 2),
        ({"requests": {"nvidia.com/mig-1g.5gb": 1}}, 1),
        ({"limits": {"nvidia.com/gpu": "many"}}, 0),
    ],
)
def test_a_worker_has_the_gpus_that_its_template_asks_for(
    resources: dict[str, Any], gpus: int | None
) -> None:
    """One that asked for 0 of them was planned with all of its node."""

    def limit(logs: dict[str, Any]) -> int | None:
        containers = [{"name": "logs", "resources": logs}, {"name": "worker", "resources": resources}]
        workers = {"replicas": 2, "template": {"spec": {"containers": containers}}}
        return fleet_job(training_job(workers=workers), None, NOW).gpu_limit

    assert limit({}) == gpus
    assert limit({"requests": {"nvidia.com/gpu": 1}}) == (gpus or 0), "another's are not its own"


def test_batches_of_an_update_are_those_that_the_jobs_own_servers_count() -> None:
    def batches(*work: tuple[int, int]) -> float:
        shards = tuple(
            ShardReport(index=n, epoch=0, updates=updates, batches=each)
            for n, (updates, each) in enumerate(work)
        )
        return fleet_job(training_job(), None, NOW, report(None, shards=shards)).batches_per_update

    assert fleet_job(training_job(), None, NOW).batches_per_update == batches() == batches((0, 0)) == 0
    assert batches((10, 0)) == 0, "an earlier version does not tell"
    assert batches((10, 100), (0, 0), (20, 200)) == 10


OF_50_000 = SpeedProfile.model_validate(
    {
        "metadata": {"name": "p"},
        "spec": {"model": {"flopsPerSample": 1e6, "parameters": 10, "tensors": 1, "samplesPerEpoch": 50_000}},
    }
)


def test_work_left_before_the_first_report_follows_from_the_profile() -> None:
    job = training_job()
    assert job.spec.training.stop_after.epochs == 3
    assert fleet_job(job, OF_50_000, NOW).samples_left == 150_000
    unknown = fleet_job(job, None, NOW)
    assert not unknown.has_work
    assert "set spec.model.samplesPerEpoch" in unknown.work_note


def test_an_epoch_is_as_long_as_the_job_says_or_else_as_in_other_jobs_of_its_model() -> None:
    """What the profile says is the model's; how long the data are is the job's."""
    measured = {"fingerprint": MODEL.fingerprint, "parameters": 10, "samplesPerEpoch": 2_000}
    beside = {"samplesPerEpoch": 2_000, "epochs": "3", "taskSamples": "30"}
    status = {"model": measured, "besideSteps": [beside]}
    profile = SpeedProfile.model_validate({"metadata": {"name": "p"}, "status": status})
    job = training_job()
    guessed = fleet_job(job, profile, NOW)
    assert guessed.samples_left == 6_000
    assert guessed.work_note == "an epoch is taken to be of 2,000 samples, as in other jobs of the model"
    known = training_job(status={"data": {"total": 50_000}})
    heard = report(None, data=DataReport(total=50_000))
    for found in (fleet_job(known, profile, NOW), fleet_job(job, profile, NOW, heard)):
        assert (found.samples_left, found.work_note) == (150_000, "")
        assert found.beside is not None
        assert (found.beside.per_epoch, found.beside.tasks) == (50_000, 10)


def test_work_left_before_a_new_operator_hears_of_the_job_follows_from_its_status() -> None:
    status = {"training": {"step": 700, "epoch": 1}, "data": {"done": 40_000, "total": 50_000}}
    assert fleet_job(training_job(status=status), OF_50_000, NOW).samples_left == pytest.approx(60_000)


def test_status_that_someone_edited_is_left_out_and_not_an_error() -> None:
    row = {"device": "T4", "batchSize": 8, "workers": 1, "parameterServers": 1}
    status = {
        "model": {"fingerprint": "f", "flopsPerSample": "1e6", "parameters": 10, "tensors": 1},
        "rows": [{**row, "compute": {"meanLog": mean, "count": "5"}} for mean in ("nan", "?")],
    }
    profile = SpeedProfile.model_validate({"metadata": {"name": "p"}, "status": status})
    values = profile_of(profile, NOW, strict=False)
    assert values is not None
    assert values.rows == ()


def test_loss_curve_of_the_user_is_the_work_until_the_course_is_known() -> None:
    curve = {"r1": "100", "r2": "0", "r3": "1000", "r4": "0.2"}
    job = training_job(training={"entrypoint": "a:b", "stopAfter": {"metric": "loss", "value": "0.4"}})
    profile = SpeedProfile.model_validate({"metadata": {"name": "p"}, "spec": {"convergence": curve}})
    said = report(None, step=10)
    for found in (fleet_job(job, profile, NOW), fleet_job(job, profile, NOW, said)):
        assert found.loss is not None
        assert found.loss.target == 0.4
    assert "spec.convergence" in fleet_job(job, None, NOW).work_note
