"""How long one change of a large job holds the event loop, and the size of its status. Needs no cluster."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

from pydantic_core import to_json

from benchmarks.harness import Measurement, summary
from shoal.api.kube import Pod
from shoal.api.training_job import TrainingJob
from shoal.policy.plan import plan
from tests.unit.policy import build

REPEATS = 15


def measure(quick: bool) -> Iterator[Measurement]:
    """The rows."""
    workers = 100 if quick else 1000
    manifest = build.job_manifest(workers={"replicas": workers, "maxReplicas": 1000})
    job = TrainingJob.model_validate(manifest)
    manifests = [build.pod_manifest("ps"), *(build.pod_manifest("worker", i) for i in range(workers))]
    lines = [json.dumps(each) for each in manifests]
    pods = [Pod.model_validate_json(line) for line in lines]
    first = plan(build.observe(job, *pods))
    settled = job.model_copy(update={"status": first.status})
    changed = build.pod_manifest("worker", workers // 2, state=build.ended(1))

    def one_change() -> None:
        """As the operator does it: the event is parsed, the plan made, the status compared and serialized."""
        pods[workers // 2 + 1] = Pod.model_validate_json(json.dumps(changed))
        status = plan(build.observe(settled, *pods)).status
        assert status != settled.status
        to_json(status.model_dump(mode="json", by_alias=True, exclude_none=True))

    def parse() -> None:
        for line in lines:
            json.loads(line)

    spent, limit = _shortest(one_change), _shortest(parse)
    name = f"loop held by one change of {workers} workers"
    yield summary(name, [spent], "ms", "", 10.0, at_most=True)
    yield summary(f"{name}, ratio", [spent / limit], "x", "json.loads of the job's pods")
    size = len(first.status.model_dump_json(by_alias=True, exclude_none=True, exclude_defaults=True)) / 1024
    yield summary(
        f"status of {workers} workers", [size], "KiB", "", 60.0 if workers == 1000 else None, at_most=True
    )


def _shortest(function: Callable[[], None]) -> float:
    """Milliseconds of processor time of the shortest repeat, which is least affected by other processes."""
    spent = []
    for _ in range(REPEATS):
        began = time.process_time()
        function()
        spent.append((time.process_time() - began) * 1000)
    return min(spent)
