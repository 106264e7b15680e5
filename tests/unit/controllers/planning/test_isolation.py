"""One job, one report, one edited status never stops the plans of others.

Reports come from pods of the users' own images, and a status may be edited by whoever may edit the object. So every
field of them is set to what no honest process would write. `make test` plays a slice; with SHOAL_NIGHTLY=1, all of it.
"""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import pytest
from pydantic import BaseModel, ValidationError

from shoal.api.base import Condition
from shoal.api.capacity_pool import CapacityPool
from shoal.api.capacity_pool_status import CapacityPoolStatus
from shoal.api.speed_profile import SpeedProfile, SpeedProfileStatus
from shoal.api.training_job import TrainingJob
from shoal.api.training_job_status import TrainingJobStatus
from shoal.controllers.speedprofile.identity import profile_name
from shoal.controllers.speedprofile.reconcile import DAY_SECONDS
from shoal.sizing.fleet import planner
from shoal.sizing.speed import model as speed
from shoal_trainer.contract import StatusReport
from tests.unit.controllers.planning.world import MODEL, NOW, World, job_manifest, pool, report

Json = Any
T = TypeVar("T")
OTHER = "cd" * 32
HOSTILE: dict[str, list[Json]] = {
    "integer": [0, -1, 2**31 - 1, 2**63 - 1, 10**400],
    "number": [0, -1.5, 1e-300, 1e300, 10**400],
    "string": [
        "",
        "nan",
        "inf",
        "-1",
        "1e300",
        "1e-300",
        "9999-12-31T23:59:59Z",
        "0001-01-01T00:00:00",
        "x" * 4096,
    ],
    "boolean": [True],
    "array": [[]],
    "object": [{}],
}
AT_ONCE = 40
NIGHTLY = bool(os.environ.get("SHOAL_NIGHTLY"))


def sample(schema: Json, root: Json) -> Json:
    """An object with every field of a JSON schema."""
    schema = resolved(schema, root)
    if "enum" in schema or "const" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    kind = schema.get("type")
    if kind == "object":
        if "properties" not in schema:
            return {"spot": sample(schema.get("additionalProperties", {}), root)}
        return {name: sample(inner, root) for name, inner in schema["properties"].items()}
    if kind == "array":
        return [sample(schema["items"], root)]
    if schema.get("format") == "date-time":
        return "2026-01-01T11:00:00Z"
    return {"integer": 1, "number": 1.0, "boolean": False, "string": "1"}.get(kind or "", "1")


def resolved(schema: Json, root: Json) -> Json:
    """The schema without references, and without None where it is one of several."""
    while True:
        if "$ref" in schema:
            schema = root["$defs"][schema["$ref"].rsplit("/", 1)[1]]
        elif "anyOf" in schema:
            schema = next(each for each in schema["anyOf"] if each.get("type") != "null")
        elif "allOf" in schema:
            schema = schema["allOf"][0]
        else:
            return schema


def edits(whole: Json) -> Iterator[tuple[str, Json]]:
    """The object with one field of it set to each value that its type allows."""
    for path, value in leaves(whole, ()):
        kind = {
            bool: "boolean",
            int: "integer",
            float: "number",
            str: "string",
            list: "array",
            dict: "object",
        }
        for hostile in HOSTILE[kind[type(value)]]:
            edited = copy.deepcopy(whole)
            inner = edited
            for step in path[:-1]:
                inner = inner[step]
            inner[path[-1]] = hostile
            yield f"{'.'.join(map(str, path))}={str(hostile)[:20]}", edited


def portions(items: Iterable[T]) -> Iterator[list[T]]:
    """As many as are planned at once."""
    everything = list(items)[:: 1 if NIGHTLY else 17]
    for first in range(0, len(everything), AT_ONCE):
        yield everything[first : first + AT_ONCE]


def leaves(value: Json, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Json]]:
    if path:
        yield path, value
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, each in inner:
        yield from leaves(each, (*path, step))


def of(model: type[BaseModel], **known: Json) -> Json:
    """A sample of a message or status, with what is `known` of it."""
    schema = model.model_json_schema(by_alias=True)
    return sample(schema, schema) | known


def named(name: str, **more: Json) -> TrainingJob:
    manifest = job_manifest(name)
    manifest["spec"]["workers"] |= {"maxReplicas": 2}
    return TrainingJob.model_validate(manifest | more)


class Crowd:
    """A good job with nodes of its own, and others."""

    def __init__(self) -> None:
        self.world = World()
        self.others: list[TrainingJob] = []
        manifest = job_manifest("good")
        manifest["spec"]["workers"] |= {"pools": ["own"]}
        self.good = TrainingJob.model_validate(manifest)
        pools = [pool(name, 0.3, name == "spot", limits={"nodes": 1000}) for name in ("spot", "on-demand")]
        self.world.add(self.good, pool("own", 0.5, False), *pools)
        self.world.hear(self.good, report(7e6, job_uid=self.good.metadata.uid))

    def add(self, job: TrainingJob, said: StatusReport | None = None) -> None:
        self.world.add(job)
        self.others.append(job)
        if said is not None:
            self.world.hear(job, said)

    async def check(self, what: object) -> None:
        await self.world.planner.plan_once()
        found = self.world.planner.proposal(self.good.metadata.uid)
        assert found is not None, what
        assert found.measured, (what, found.basis)
        assert found.feasible, (what, found.reason)
        assert 4 <= found.pools["own"] <= 7, (what, found.pools)
        for job in self.others:
            self.judge(job, what)

    def judge(self, job: TrainingJob, what: object) -> None:
        """Of whatever a job says, or its profile or pools, is made a plan that it may have, and that can be told."""
        found = self.world.planner.proposal(job.metadata.uid)
        assert found is not None, (job.metadata.name, what)
        workers = job.spec.workers
        assert found.pools.keys() <= {*workers.pools}, (job.metadata.name, found.pools, what)
        assert min(found.pools.values(), default=0) >= 0, (job.metadata.name, found.pools, what)
        assert sum(found.pools.values()) <= workers.max_replicas, (job.metadata.name, found.pools, what)
        assert found.reason, (job.metadata.name, what)
        assert found.finish_time is None or found.finish_time >= NOW, (
            job.metadata.name,
            found.finish_time,
            what,
        )
        numbers = (found.cost, found.confidence, found.samples_per_second, found.remaining_seconds)
        assert all(0 <= each < math.inf for each in numbers if each is not None), (
            job.metadata.name,
            numbers,
            what,
        )


def faults(crowd: Crowd, what: str) -> float:
    return crowd.world.metrics.registry.get_sample_value("shoal_plan_faults_total", {"what": what}) or 0.0


def began(ago: float) -> Json:
    return {"status": {"startTime": (NOW - timedelta(seconds=ago)).strftime("%Y-%m-%dT%H:%M:%SZ")}}


@pytest.mark.parametrize("left", [1, 40, 70])
async def test_a_job_that_cannot_start_a_worker_before_its_deadline(left: int) -> None:
    crowd = Crowd()
    job = named("bad", **began(3600 - 10 - left))
    crowd.add(job, report(7e6))
    await crowd.check(left)
    found = crowd.world.planner.proposal(job.metadata.uid)
    assert found is not None
    assert not found.feasible
    assert "No plan ends within" in found.reason


async def test_a_job_that_trains_for_ever() -> None:
    crowd = Crowd()
    manifest = job_manifest("a-bad", elasticity={"mode": "Auto"})  # planned first
    job = TrainingJob.model_validate(manifest)
    crowd.add(job, report(float(2**31 - 1) * 1_281_167))
    await crowd.check("for ever")
    found = crowd.world.planner.proposal(job.metadata.uid)
    assert found is not None
    assert found.finish_time is not None
    assert found.finish_time.year > 2100
    assert found.pools


async def test_a_fault_in_the_plan_of_one_job_is_told_to_it_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crowd = Crowd()
    job = named("bad")
    crowd.add(job, report(7e6))
    made = planner.job_problem

    def failing(job: Any, *args: Any, **how: Any) -> Any:
        if job.name == "team/bad":
            raise ZeroDivisionError("a fault")
        return made(job, *args, **how)

    monkeypatch.setattr(planner, "job_problem", failing)
    await crowd.check("a fault")
    found = crowd.world.planner.proposal(job.metadata.uid)
    assert found is not None
    assert "ZeroDivisionError: a fault" in found.reason
    assert faults(crowd, "job") == 1


async def test_a_report_that_cannot_be_merged_is_dropped_with_its_job() -> None:
    crowd = Crowd()
    job = named("bad")
    said = report(7e6).model_copy(update={"model": MODEL.model_copy(update={"fingerprint": OTHER})})
    broken = said.speed[0].model_copy(update={"compute": None})  # past all checks of the contract
    crowd.add(job, said.model_copy(update={"speed": (broken,)}))
    await crowd.check("a report")
    assert faults(crowd, "report")
    crowd.world.state.jobs.drop(job.metadata.uid)
    crowd.others.remove(job)
    assert await crowd.world.learner(("team", profile_name(OTHER))) == DAY_SECONDS
    before = faults(crowd, "report")
    await crowd.check("a report")
    assert faults(crowd, "report") == before, "it is forgotten"


def reports() -> list[tuple[str, StatusReport]]:
    """Every report with one hostile field that the contract lets pass."""
    honest = json.loads(report(7e6).to_json()) | {
        "model": json.loads(MODEL.to_json()) | {"fingerprint": OTHER}
    }
    whole = of(StatusReport, version=1) | honest
    whole["shards"] = [of(StatusReport)["shards"][0]]
    found = []
    for name, edited in edits(whole):
        try:
            found.append((name, StatusReport.model_validate_json(json.dumps(edited))))
        except ValidationError:
            continue
    return found


async def test_no_field_of_a_report_stops_the_plans_of_others() -> None:
    passing = reports()
    assert len(passing) > 100
    for part in portions(passing):
        crowd = Crowd()
        for i, (_, said) in enumerate(part):
            crowd.add(named(f"bad-{i}"), said)
        await crowd.check([name for name, _ in part])


async def test_no_field_of_a_jobs_status_stops_the_plans_of_others() -> None:
    whole = of(TrainingJobStatus, conditions=[], phase="Running")
    del whole["completionTime"]
    edited = list(edits(whole))
    assert len(edited) > 400
    for part in portions(edited):
        crowd = Crowd()
        for i, (_, status) in enumerate(part):
            try:
                job = named(f"bad-{i}", status=status)
            except ValidationError:
                continue
            crowd.add(job, report(7e6))
        await crowd.check([name for name, _ in part])


def test_time_without_a_zone_is_refused_where_the_status_is_read() -> None:
    """The API server lets it pass; later, no comparison with the clock is possible."""
    with pytest.raises(ValidationError, match="timezone"):
        named("bad", status={"startTime": "2026-01-01T11:00:00"})


async def test_no_field_of_a_profiles_status_stops_the_plans_of_others() -> None:
    whole = of(SpeedProfileStatus)
    whole["model"] |= {"fingerprint": OTHER, "flopsPerSample": "8e8", "parameters": 1_000_000, "tensors": 60}
    whole["rows"][0] |= {"device": "T4", "batchSize": 128, "cores": "8"}
    for part in whole["rows"][0].values():
        if isinstance(part, dict):
            part |= {"meanSeconds": "0.1", "meanLog": "-2.3", "varianceLog": "0.01", "count": "1000"}
    whole["serverLoad"][0] |= {"busySeconds": "10", "updates": "10000"}
    for part in portions(edits(whole)):
        crowd = Crowd()
        for i, (_, status) in enumerate(part):
            meta = {"namespace": "team", "name": f"p{i}", "uid": f"p{i}"}
            try:
                crowd.world.state.profiles.put(
                    SpeedProfile.model_validate({"metadata": meta, "status": status})
                )
            except ValidationError:
                continue
        await crowd.check([name for name, _ in part])


@pytest.mark.nightly
async def test_no_field_of_a_pools_status_stops_the_plans_of_others() -> None:
    for part in portions(edits(of(CapacityPoolStatus))):
        crowd, names = Crowd(), []
        for i, (_, status) in enumerate(part):
            spec = pool(f"p{i}", 0.3, True).model_dump(by_alias=True, mode="json")
            try:
                crowd.world.add(CapacityPool.model_validate(spec | {"status": status}))
            except ValidationError:
                continue
            names.append(f"p{i}")
        for first in range(0, len(names), 4):
            manifest = job_manifest(f"bad-{first}")
            manifest["spec"]["workers"] |= {"pools": names[first : first + 4], "maxReplicas": 2}
            crowd.add(TrainingJob.model_validate(manifest), report(7e6))
        await crowd.check([name for name, _ in part])


async def test_a_profile_with_which_the_predictor_fails_is_left_out_told_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crowd = Crowd()
    names = [f"p{n}" for n in range(6)]
    for name in names:
        crowd.world.add_profile(name, status=measured(name))
    observed = speed._observation

    def failing(model: Any, *args: Any) -> Any:
        if model.fingerprint == "p3":
            raise ZeroDivisionError("a fault")
        return observed(model, *args)

    monkeypatch.setattr(speed, "_observation", failing)
    await crowd.check("one profile fails")
    assert faults(crowd, "profile") == 1
    assert {name for _, name in crowd.world.woken_profiles} & {*names} == {"p3"}
    said = await told(crowd, names)
    assert said.keys() == {"p3"}
    assert (said["p3"].type, said["p3"].status, said["p3"].reason) == ("Ready", "False", "LeftOut")
    assert "ZeroDivisionError: a fault" in said["p3"].message

    monkeypatch.setattr(speed, "_observation", observed)
    await crowd.check("it is mended")
    assert faults(crowd, "profile") == 1
    said = await told(crowd, names)
    assert (said["p3"].status, said["p3"].reason) == ("True", "Valid")
    before = [each for each in crowd.world.cluster.requests if each[0] != "GET"]
    await crowd.check("nothing is new")
    await told(crowd, names)
    assert [each for each in crowd.world.cluster.requests if each[0] != "GET"] == before


async def told(crowd: Crowd, names: Iterable[str]) -> dict[str, Condition]:
    """The conditions of profiles, by name."""
    found = {}
    for name in names:
        assert await crowd.world.learner(("team", name)) is None
        profile = crowd.world.profile(name)
        for condition in profile.status.conditions:
            found[name] = condition
    return found


def measured(fingerprint: str) -> Json:
    part = {"meanSeconds": "0.1", "meanLog": "-2.3", "varianceLog": "0.01", "count": "1000"}
    row = {"device": "T4", "devices": 1, "cores": "8", "batchSize": 128, "workers": 1, "parameterServers": 1}
    row |= dict.fromkeys(("compute", "pull", "push", "step"), part)
    model = {"fingerprint": fingerprint, "flopsPerSample": "8e8", "parameters": 1_000_000, "tensors": 60}
    return {"model": model, "rows": [row]}


async def test_parts_of_a_step_that_are_no_time_together_are_no_measurement() -> None:
    """Each was within its limits, their sum was not: it made the predictor fail for every job."""
    crowd = Crowd()
    status = measured(OTHER)
    long = {"meanSeconds": "9e6", "meanLog": "16", "varianceLog": "0.01", "count": "1000"}
    status["rows"][0] |= {"device": "CPU", **dict.fromkeys(("compute", "pull", "push", "step"), long)}
    del status["rows"][0]["step"]
    crowd.world.add_profile("long", status=status)
    await crowd.check("no time")
    assert faults(crowd, "profile") == 0
