"""Leader and standby."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import generate_latest

from shoal.api.training_job import TrainingJob
from shoal.cluster.transport import Answer, Query
from shoal.controller.operator import Operator
from shoal.controller.settings import Settings
from shoal.policy.model import Images
from tests.unit.controller.clusters import Cluster, UnreachableCoordinator
from tests.unit.policy import build


def add_job(operator: Operator, number: int) -> None:
    manifest = build.job_manifest()
    manifest["metadata"] |= {"name": f"job-{number}", "uid": f"uid-{number}", "resourceVersion": str(number)}
    operator.state.jobs.put(TrainingJob.model_validate(manifest))


NO_OBJECTS = Answer(200, b'{"metadata": {"resourceVersion": "1"}, "items": []}')


class EmptyCluster(Cluster):
    """Lists no objects, and reports no change."""

    def __init__(self, jobs: Answer) -> None:
        super().__init__()
        self.jobs = jobs

    def _get(self, path: str, body: Any) -> Answer:
        lists = {"trainingjobs": self.jobs, "pods": NO_OBJECTS, "services": NO_OBJECTS, "nodes": NO_OBJECTS}
        return lists.get(path.rpartition("/")[2]) or super()._get(path, body)

    @asynccontextmanager
    async def stream(self, path: str, query: Query) -> AsyncIterator[AsyncIterator[bytes]]:
        async def lines() -> AsyncIterator[bytes]:
            await asyncio.Event().wait()
            yield b""

        yield lines()


@pytest.mark.looptime
@pytest.mark.parametrize("status", [403, 404])
async def test_operator_without_permission_or_crd_is_not_ready(status: int) -> None:
    cluster = EmptyCluster(jobs=Answer(status, b'{"message": "no"}'))
    settings = Settings(install_key=b"k" * 32, images=Images(ps="ps:1", worker="worker:1"))
    operator = Operator(cluster, settings, UnreachableCoordinator())
    assert operator.unread() == ["trainingjobs", "pods", "services"]
    task = asyncio.create_task(operator.run())
    await asyncio.sleep(60)
    assert operator.unread() == ["trainingjobs"]
    assert "shoal_leading 0.0" in generate_latest(operator.metrics.registry).decode()
    cluster.jobs = NO_OBJECTS
    await asyncio.sleep(60)
    assert operator.unread() == []
    assert "shoal_leading 1.0" in generate_latest(operator.metrics.registry).decode()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_standby_neither_queues_nor_counts_jobs_until_it_leads() -> None:
    settings = Settings(install_key=b"k" * 32, images=Images(ps="ps:1", worker="worker:1"))
    operator = Operator(Cluster(), settings, UnreachableCoordinator())
    for number in range(1, 51):
        add_job(operator, number)
    operator.state.jobs.drop("uid-50")
    assert len(operator.queue) == 0
    assert "shoal_jobs" not in generate_latest(operator.metrics.registry).decode()

    operator.lead()
    assert len(operator.queue) == 49
    assert 'shoal_jobs{phase="Pending"} 49.0' in generate_latest(operator.metrics.registry).decode()
    add_job(operator, 51)
    assert len(operator.queue) == 50
