"""How long one change of a large job holds the event loop, and the size of its status. Needs no cluster."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

from benchmarks.harness import Measurement, summary
from shoal.api.kube import Pod
from shoal.api.training_job import TrainingJob
from shoal.policy.plan import plan
from tests.unit.policy import build

REPEATS = 9


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
        json.dumps(status.model_dump(mode="json", by_alias=True, exclude_none=True))

    def parse() -> None:
        for line in lines:
            json.loads(line)

    spent, limit = _times(one_change), min(_times(parse))
    yield summary(f"loop held by one change of {workers} workers", spent, "ms", "", 10.0, at_most=True)
    yield summary(
        f"loop held by one change of {workers} workers, ratio",
        [each / limit for each in spent],
        "x",
        "json.loads of the job's pods",
    )
    size = len(first.status.model_dump_json(by_alias=True, exclude_none=True, exclude_defaults=True)) / 1024
    yield summary(f"status of {workers} workers", [size], "KiB", "", 60.0 * workers / 1000 + 1, at_most=True)


def _times(function: Callable[[], None]) -> list[float]:
    """Milliseconds of each repeat."""
    spent = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        function()
        spent.append((time.perf_counter() - began) * 1000)
    return spent
