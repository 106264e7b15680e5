"""What the operator keeps of a job of ten pods beside these (`process/test_memory.py`): hundreds of them are kept.

Sizes are those of Python's allocator, of objects parsed from JSON as the API server and coordinators send it.
"""

from __future__ import annotations

import copy
import gc
import json
import pickle
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from shoal.api.training_job import TrainingJob
from shoal.cluster.transport import Fenced
from shoal.controllers.trainingjob.requests import _Run
from shoal.policy.plan import plan
from shoal.runtime.limiter import Limited
from shoal_trainer.contract import Phase, ShardReport, StatusReport, WorkerReport, WorkerState
from tests.unit.controllers.clusters import Rig
from tests.unit.policy import build

JOB_KIB = 20
"""15 with Python 3.11. It were 26 if pydantic kept the fields that were given (`contract.lean`)."""
REPORT_KIB = 8
"""6 there; it were 9 if each worker was a model, and 31 if pydantic kept what was given as well."""
COPIES = 40
PODS = 10


def taken(parse: Callable[[int], object]) -> float:
    """Bytes that one of them takes beside others like it."""
    first = parse(0)
    gc.collect()
    tracemalloc.start()
    try:
        kept = [parse(number) for number in range(1, COPIES + 1)]
        gc.collect()
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len({id(each) for each in [first, *kept]}) == COPIES + 1
    return size / COPIES


def text(manifest: Any, number: int) -> str:
    """A manifest as another object of its kind."""
    named = {"uid": f"{number:08d}-0000-4000-8000-000000000000", "name": f"object-{number}"}
    return json.dumps({**manifest, "metadata": {**manifest["metadata"], **named}})


def a_job() -> dict[str, Any]:
    """A job that trains, with a record of each pod."""
    names = [("ps", 0), *(("worker", index) for index in range(PODS - 1))]
    pods = [
        build.pod(role, index, node=f"{'safe' if role == 'ps' else 'spot'}-{index}") for role, index in names
    ]
    nodes = {pod.spec.node_name: build.node(str(pod.spec.node_name)) for pod in pods}
    wanted = {"replicas": PODS - 1, "maxReplicas": PODS - 1}
    before = build.job(workers=wanted)
    status = plan(build.observe(before, *pods, nodes=nodes, report=build.report())).status
    return {
        **build.job_manifest(workers=wanted),
        "status": status.model_dump(mode="json", by_alias=True, exclude_none=True),
    }


def a_report(number: int) -> str:
    """What the coordinator of such a job says when all has been measured."""
    workers = [
        WorkerReport(
            slot=slot,
            incarnation=0,
            state=WorkerState.ACTIVE,
            steps=1000 * number + slot,
            samples=128_000 * number + slot,
            first_push_at=1.7e9 + slot,
            **{
                f"{part}_seconds": 0.1 + slot for part in ("step", "compute", "pull", "push", "input", "wait")
            },
            staleness=1.5 + slot,
            batch_size=128,
            device="T4",
            device_name="Tesla T4",
            cores=4.0,
            node=f"spot-{slot}",
        )
        for slot in range(PODS - 1)
    ]
    report = StatusReport(job_uid=f"uid-{number}", phase=Phase.TRAINING, step=number, workers=tuple(workers))
    return report.to_json()


def test_a_job_of_ten_pods_is_small() -> None:
    manifest = a_job()
    assert len(manifest["status"]["slots"]) == PODS
    size = taken(lambda number: TrainingJob.model_validate_json(text(manifest, number)))
    assert size < JOB_KIB * 1024


def test_its_report_is_small() -> None:
    size = taken(lambda number: StatusReport.model_validate_json(a_report(number)))
    assert size < REPORT_KIB * 1024


def test_a_job_that_has_nothing_to_send_takes_next_to_nothing_for_that() -> None:
    """It were 3.0 KiB with deques, which begin with a block of 64 places."""
    job = build.job()
    assert taken(lambda _: _Run(job)) < 1024


def test_fields_that_were_given_are_not_kept_and_copies_are_the_same_all_the_same() -> None:
    first = ShardReport(index=1, epoch=0)
    assert first.model_fields_set == first.model_copy().model_fields_set == set(ShardReport.model_fields)
    assert first.model_copy(update={"index": 2}) == ShardReport(index=2, epoch=0)
    assert copy.deepcopy(first) == pickle.loads(pickle.dumps(first)) == first


def test_a_plan_that_makes_pods_leaves_no_garbage() -> None:
    """A cycle would wait for a full collection, and hold the job, its pods and its report until then."""
    seen = build.observe(build.job(workers={"replicas": 9, "maxReplicas": 9}))
    plan(seen)
    gc.collect()
    gc.disable()
    try:
        plan(seen)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = {type(each).__qualname__ for each in gc.garbage if type(each).__module__.startswith("shoal")}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert found == set()


@pytest.mark.looptime
async def test_a_job_that_begins_leaves_no_garbage() -> None:
    """When hundreds begin, cycles of each request hold its task, and leave holes when they are collected."""
    rig = Rig()

    class Plain:
        request = staticmethod(rig.cluster.request)
        stream = staticmethod(rig.cluster.stream)

    limited = Limited(Fenced(Plain(), lambda: 10.0))
    rig.cluster.request = limited.request  # type: ignore[method-assign]
    rig.apply(workers={"replicas": 9, "maxReplicas": 9})
    gc.collect()
    gc.disable()
    try:
        await rig.reconcile()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = [type(each).__qualname__ for each in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert len(rig.pods()) >= 5
    assert "Task" not in found
    assert len(found) < 50
