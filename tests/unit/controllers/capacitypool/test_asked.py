"""What workers ask for: each template is read once, and those that cannot be read are told."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from shoal.api.amounts import Amounts
from shoal.api.capacity_pool import CapacityPool
from shoal.api.kube import MOST_RESOURCES
from shoal.api.training_job import TrainingJob
from shoal.controllers.capacitypool import asked
from shoal.controllers.capacitypool.asked import Asked
from tests.unit.policy import build


def job(generation: int = 1, **spec: Any) -> TrainingJob:
    """With a template of this spec."""
    manifest = build.job_manifest(workers={"replicas": 1, "pools": ["a"], "template": {"spec": spec}})
    manifest["metadata"]["generation"] = generation
    return TrainingJob.model_validate(manifest)


def pool(gpus: int = 0, **more: Any) -> CapacityPool:
    spec = {"nodeSelector": {"pool": "a"}, "limits": {"nodes": 4}, **more}
    if gpus:
        spec["accelerator"] = {"name": "T4", "count": gpus}
    return CapacityPool.model_validate({"metadata": {"name": "a"}, "spec": spec})


def test_template_is_read_once_for_each_spec_and_each_number_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand of them, of up to 128 KiB, were read every few seconds, and nothing else was done meanwhile."""
    reads, read = list[int](), asked.worker_requests

    def counted(of: TrainingJob, there: CapacityPool) -> Amounts:
        reads.append(of.metadata.generation)
        return read(of, there)

    monkeypatch.setattr(asked, "worker_requests", counted)
    known = Asked()
    for _ in range(3):
        assert dict(known.of(job(), pool()) or ()).get("nvidia.com/gpu") is None
        assert dict(known.of(job(), pool(2, limits={"nodes": 9})) or ())["nvidia.com/gpu"] == 2
    assert reads == [1, 1]
    known.of(job(2), pool())
    assert reads == [1, 1, 2]
    known.forget(job().metadata.uid)
    known.of(job(2), pool())
    assert reads == [1, 1, 2, 2]


def test_template_that_cannot_be_read_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    known = Asked()
    with caplog.at_level(logging.ERROR):
        assert [known.of(job(overhead="x"), pool()) for _ in range(3)] == [None] * 3
    assert [each.message for each in caplog.records] == [
        "what workers of job team/digits ask for cannot be read"
    ]


def test_of_what_a_worker_asks_for_no_more_is_kept_than_of_its_pod() -> None:
    many = {f"example.com/{number}": "1" for number in range(1000)}
    found = Asked().of(job(containers=[{"name": "worker", "resources": {"requests": many}}]), pool())
    assert found is not None
    assert len(found) == MOST_RESOURCES
