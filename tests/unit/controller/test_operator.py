"""Leader and standby."""

from __future__ import annotations

from prometheus_client import generate_latest

from shoal.api.training_job import TrainingJob
from shoal.controller.operator import Operator
from shoal.controller.settings import Settings
from shoal.policy.model import Images
from tests.unit.controller.clusters import Cluster, UnreachableCoordinator
from tests.unit.policy import build


def add_job(operator: Operator, number: int) -> None:
    manifest = build.job_manifest()
    manifest["metadata"] |= {"name": f"job-{number}", "uid": f"uid-{number}", "resourceVersion": str(number)}
    operator.state.jobs.put(TrainingJob.model_validate(manifest))


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
