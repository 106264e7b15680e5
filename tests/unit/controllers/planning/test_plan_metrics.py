"""What Prometheus is told of plans and pools."""

from __future__ import annotations

from shoal.api.capacity_pool import CapacityPool
from shoal.api.training_job import TrainingJob
from shoal.controllers.planning.metrics import PlanMetrics
from shoal.runtime.metrics import Metrics
from tests.unit.policy import build


def test_advice_is_told_by_pool_and_only_while_it_is_advice() -> None:
    def job(mode: str, **status: object) -> TrainingJob:
        manifest = build.job_manifest(elasticity={"mode": mode})
        return TrainingJob.model_validate({**manifest, "status": {"plan": {"pools": {"spot": 3}}, **status}})

    pools = [
        CapacityPool.model_validate({"metadata": {"name": name}, "spec": {"limits": {"nodes": 9}}})
        for name in ("spot", "steady")
    ]
    ended = {
        "type": "Complete",
        "status": "True",
        "reason": "Done",
        "lastTransitionTime": build.stamp(build.NOW),
    }
    jobs = [job("Advise"), job("Advise"), job("Auto"), job("Advise", conditions=[ended])]
    metrics = Metrics()
    PlanMetrics(metrics).count_pools(lambda: pools, lambda: jobs)
    told = {
        name: metrics.registry.get_sample_value("shoal_pool_advised_nodes", {"pool": name})
        for name in ("spot", "steady")
    }
    assert told == {"spot": 6, "steady": 0}
