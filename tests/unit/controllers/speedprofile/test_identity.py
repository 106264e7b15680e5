"""A profile is that of one model at one size of its input: what other jobs measure is kept elsewhere."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from shoal.api.speed_profile import SpeedProfile
from shoal.api.training_job import TrainingJob
from shoal.controllers.speedprofile.identity import profile_name
from shoal.controllers.speedprofile.reconcile import SOON_SECONDS
from shoal.sizing.speed.measurements import Basis, Kind
from shoal_trainer.contract import StatusReport
from tests.unit.controllers.planning.world import DESCRIBED, KEY, MODEL, SPOT, World, report, training_job

OTHER = MODEL.model_copy(update={"fingerprint": "cd" * 32, "flops_per_sample": 8e8, "parameters": 5_000_000})


def annotated(name: str) -> TrainingJob:
    return training_job(name, profile="resnet")


def of_other(count: int) -> StatusReport:
    """Of a model that takes ten times as long."""
    return report(1e6, seconds=2.0, count=count, model=OTHER)


async def train_together(
    world: World, one: TrainingJob, two: TrainingJob
) -> tuple[SpeedProfile, SpeedProfile]:
    """Two jobs of different models, heard several times: the profile that was named, and that of the second model."""
    world.add(one, two)
    for n in range(1, 4):
        world.hear(one, report(1e6, seconds=0.2, count=500 * n))
        world.hear(two, of_other(500 * n))
        for key in world.learner.keys:
            await world.learner(key)
        await asyncio.sleep(SOON_SECONDS)
    return world.profile("resnet"), world.profile(profile_name(OTHER.fingerprint))


def means(profile: SpeedProfile) -> list[float]:
    return [float(row.compute.mean_seconds) for row in profile.status.rows]


@pytest.mark.looptime
@pytest.mark.parametrize("described", [True, False])
async def test_an_annotation_does_not_mix_two_models(described: bool) -> None:
    """Both were measured in one row, for good: of a profile that a user described, or that two jobs began together."""
    world = World()
    if described:
        world.add_profile("resnet", spec={"model": DESCRIBED})
    named, others = await train_together(world, annotated("one"), annotated("two"))
    assert named.status.model is not None
    assert named.status.model.fingerprint == MODEL.fingerprint
    assert named.status.jobs == "one"
    assert means(named) == [pytest.approx(0.2, rel=0.01)]
    assert means(others) == [pytest.approx(2.0, rel=0.01)]
    [(name, event)] = world.told
    assert (name, event.type, event.reason) == ("two", "Warning", "SpeedProfileRefused")
    assert (
        "the annotation shoal.dev/speed-profile names SpeedProfile resnet, which is of another model"
        in event.message
    )
    assert profile_name(OTHER.fingerprint) in event.message


@pytest.mark.looptime
async def test_a_described_profile_with_measurements_of_another_model_is_not_used() -> None:
    world = World()
    measured = {"fingerprint": OTHER.fingerprint, "parameters": 5_000_000, "tensors": 20}
    world.add_profile("resnet", spec={"model": DESCRIBED}, status={"model": measured})
    job = training_job()
    assert world.learner.name_of(job, MODEL.fingerprint) == KEY[1]
    assert world.learner.name_of(annotated("one"), OTHER.fingerprint) == profile_name(OTHER.fingerprint)
    assert world.learner.name_of(annotated("one"), "") == "resnet"


LARGE = MODEL.model_copy(update={"flops_per_sample": 49 * 8e7})
"""The same layers and variables; images of seven times the width."""


def of_size(model: Any, seconds: float, count: int, process: str = "a") -> StatusReport:
    told = {"model": model, "speed_epoch": process}
    return report(1e6, seconds=seconds, count=count).model_copy(update=told)


async def look(world: World) -> None:
    for key in world.learner.keys:
        await world.learner(key)
    await asyncio.sleep(SOON_SECONDS)


def profiles(world: World) -> dict[str, list[float]]:
    """The mean step times that were learned, by the FLOPs of the profile's model."""
    return {
        each.status.model.flops_per_sample or "": means(each)
        for each in world.state.profiles.all()
        if each.status.model is not None
    }


@pytest.mark.looptime
@pytest.mark.parametrize("other", ["flops", "precision"])
async def test_one_architecture_at_two_sizes_or_precisions_is_two_measurements(other: str) -> None:
    """Images of 32 and 224 pixels had one row, the mean of both: jobs of either were planned 20 times too slow."""
    world, small, large = World(), *(training_job(name) for name in ("a", "b"))
    world.add(small, large, SPOT)
    model = LARGE if other == "flops" else MODEL.model_copy(update={"precision": "float16"})
    at_first = MODEL.model_copy(update={"precision": "float32"})
    for n in range(1, 5):
        world.hear(small, of_size(at_first, 0.02, 5000 * n))
        world.hear(large, of_size(model, 1.0, 100 * n))
        await look(world)
    found = {each.metadata.name: means(each) for each in world.state.profiles.all()}
    assert sorted(found.values()) == [[pytest.approx(0.02, rel=1e-3)], [pytest.approx(1.0, rel=1e-3)]]
    assert KEY[1] in found, "the first one has the name that an earlier version gives"
    await world.planner.plan_once()
    for job, seconds in ((small, 0.02), (large, 1.0)):
        plan = world.proposal(job)
        assert plan.speeds["spot"] == pytest.approx(128 / seconds, rel=0.1)
        assert Basis.MEASURED in plan.basis
    assert world.told == []


@pytest.mark.looptime
async def test_nothing_is_learned_before_the_flops_are_counted_and_nothing_is_lost() -> None:
    world, job = World(), training_job()
    world.add(job, said=of_size(MODEL.model_copy(update={"flops_per_sample": None}), 0.2, 500))
    await look(world)
    assert profiles(world) == {}
    world.hear(job, of_size(MODEL, 0.2, 600))
    await look(world)
    (profile,) = world.state.profiles.all()
    assert profile.status.rows[0].compute.count == "600"


@pytest.mark.looptime
async def test_of_a_model_whose_flops_cannot_be_counted_speeds_are_learned() -> None:
    world, job = World(), training_job()
    world.add(job)
    for n in range(1, 4):
        world.hear(job, of_size(MODEL.model_copy(update={"flops_per_sample": 0.0}), 0.2, 500 * n))
        await look(world)
    assert profiles(world) == {"": [pytest.approx(0.2, rel=1e-3)]}


@pytest.mark.looptime
@pytest.mark.parametrize("flops", [None, "8.1e+07", "3.92e+09"])
async def test_rows_of_an_earlier_version_are_continued_by_jobs_of_their_size(flops: str | None) -> None:
    """It stored the FLOPs that were reported last, or none, and no precision."""
    world, job = World(), training_job()
    world.add(job)
    row = {"device": "T4", "cores": "4", "batchSize": 128, "workers": 2, "parameterServers": 1}
    known = {"meanSeconds": "0.2", "meanLog": "-1.6094379", "count": "1000"}
    at = (world.wall - timedelta(days=1)).isoformat()
    model = DESCRIBED | {"flopsPerSample": flops}
    world.add_profile(KEY[1], status={"model": model, "rows": [{**row, "compute": known, "lastSeen": at}]})
    for n in range(1, 4):
        world.hear(job, of_size(MODEL.model_copy(update={"precision": "float32"}), 0.2, 500 * n))
        await look(world)
    old = world.profile(KEY[1])
    assert old.status.model is not None
    if flops == "3.92e+09":
        assert old.status.rows[0].compute.count == "1000", "another size keeps its own"
        assert profiles(world).keys() == {"3.92e+09", "8e+07"}
    else:
        assert float(old.status.rows[0].compute.count) > 900
        assert (old.status.model.flops_per_sample, old.status.model.precision) == (
            flops or "8e+07",
            "float32",
        )


@pytest.mark.looptime
async def test_a_downgrade_finds_the_rows_of_both_sizes() -> None:
    """An earlier version drops the fields that it does not know from each profile that it writes."""
    world, small, large = World(), *(training_job(name) for name in ("a", "b"))
    world.add(small, large)
    for n in range(1, 4):
        world.hear(small, of_size(MODEL, 0.02, 5000 * n))
        world.hear(large, of_size(LARGE, 1.0, 100 * n))
        await look(world)
    before = profiles(world)
    assert len(before) == 2
    for profile in list(world.state.profiles.all()):
        status = profile.status.model_dump(mode="json", by_alias=True, exclude_none=True)
        status["model"].pop("precision", None)
        stored = profile.model_dump(mode="json", by_alias=True, exclude_none=True) | {"status": status}
        world.state.profiles.put(SpeedProfile.model_validate(stored))
    assert profiles(world) == before


@pytest.mark.looptime
async def test_a_process_that_says_other_flops_each_time_makes_no_profile_each_time() -> None:
    world, job = World(), training_job()
    world.add(job)
    for n in range(1, 9):
        world.hear(job, of_size(MODEL.model_copy(update={"flops_per_sample": 8e7 * n}), 0.2, 500))
        await look(world)
    assert profiles(world).keys() == {"8e+07"}
    faults = world.metrics.registry.get_sample_value("shoal_plan_faults_total", {"what": "report"})
    assert faults == 7


@pytest.mark.looptime
async def test_an_impossible_report_is_a_fault_and_the_others_count() -> None:
    world = World()
    status = {"startTime": (world.wall - timedelta(hours=1)).isoformat()}
    honest, absurd = (training_job(name, status=status) for name in ("a", "b"))
    world.add(honest, absurd)
    for n in range(1, 4):
        world.hear(honest, of_size(MODEL, 0.2, 5000 * n))
        world.hear(absurd, of_size(MODEL, 60.0, 10**12 * n))
        await look(world)
    assert profiles(world) == {"8e+07": [pytest.approx(0.2, rel=1e-3)]}
    (profile,) = world.state.profiles.all()
    assert profile.status.jobs == "a"
    assert world.metrics.registry.get_sample_value("shoal_plan_faults_total", {"what": "report"}) == 3


def test_kinds_differ_by_more_than_some_percent_and_what_is_not_known_differs_from_nothing() -> None:
    one = Kind("f", 8e7)
    for factor, alike in ((1.0, True), (1.049, True), (0.96, True), (1.06, False), (0.94, False)):
        assert one.alike(Kind("f", 8e7 * factor)) is Kind("f", 8e7 * factor).alike(one) is alike
    assert one.alike(Kind("f"))
    assert one.alike(Kind("f", 0.0, "float16"))
    assert Kind().alike(one)
    assert not Kind("f", 8e7, "float32").alike(Kind("f", 8e7, "float16"))
    assert not one.alike(Kind("g", 8e7))


@pytest.mark.looptime
async def test_a_process_has_one_model_whatever_it_reports_later() -> None:
    """A job that reported another fingerprint each time had a profile made each time: 43,000 a day."""
    world, job = World(), training_job()
    world.add(job)
    for n in range(20):
        model = MODEL.model_copy(update={"fingerprint": f"{n:064x}"})
        world.hear(job, report(1e6, count=500 + n, model=model))
    assert world.learner.keys == [("team", profile_name("0" * 64))]
    assert world.metrics.registry.get_sample_value("shoal_plan_faults_total", {"what": "report"}) == 19
    again = report(1e6, speed_epoch="b")
    world.hear(job, again)
    assert [key for key in world.learner.keys if world.learner.known(key).heard] == [KEY]


@pytest.mark.looptime
async def test_profile_of_a_user_is_found_by_annotation_or_fingerprint() -> None:
    world, job = World(), training_job()
    assert world.learner.name_of(job, MODEL.fingerprint) == KEY[1]
    world.add_profile("resnet", spec={"model": DESCRIBED})
    assert world.learner.name_of(job, MODEL.fingerprint) == "resnet"
    assert world.learner.name_of(training_job(profile="mine"), MODEL.fingerprint) == "mine"
