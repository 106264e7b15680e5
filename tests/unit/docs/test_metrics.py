"""docs/metrics.md lists every series of the operator and of the coordinator, with its type and its labels."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from shoal.api.capacity_pool import CapacityPool
from shoal.controllers.planning.metrics import PlanMetrics
from shoal.controllers.trainingjob.metrics import JobMetrics
from shoal.pools.metrics import LEADING, PoolMetrics
from shoal.runtime.controller import Controller, Key, count_waiting
from shoal.runtime.metrics import Metrics
from shoal_trainer.contract import (
    LogSums,
    Phase,
    ShardReport,
    SpeedSums,
    StatusReport,
    WorkerReport,
    WorkerState,
)
from shoal_trainer.coordinator.metrics import StatusCollector
from tests.unit.docs.pages import code, read, rows, section
from tests.unit.policy import build

POOL = CapacityPool.model_validate({"metadata": {"name": "spot"}, "spec": {"limits": {"nodes": 1}}})
Series = dict[str, tuple[str, frozenset[str]]]
"""Name -> (type, names of the labels)."""


async def no_reconcile(_key: Key) -> None:
    """Nothing is reconciled here."""


def documented(heading: str) -> Series:
    return {
        code(name)[0]: (kind, frozenset(code(labels)))
        for name, kind, labels, *_ in rows(section(read("docs/metrics.md"), heading))
    }


def exported(families: Iterable[Metric]) -> Series:
    """Families that have at least one sample for each label."""
    return {
        family.name + "_total" * (family.type == "counter"): (
            family.type,
            frozenset(label for sample in family.samples for label in sample.labels) - {"le"},
        )
        for family in families
    }


def test_operator_metrics_match_the_registry() -> None:
    metrics = Metrics()
    jobs = JobMetrics(metrics)
    troubled = {
        "type": "Degraded",
        "status": "True",
        "reason": "X",
        "lastTransitionTime": build.stamp(build.NOW),
    }
    jobs.count_jobs(lambda: [build.job({"conditions": [troubled]})])
    plans = PlanMetrics(metrics)
    plans.count_pools(lambda: [POOL], lambda: [build.job()])
    plans.count_proposals(lambda: 0.0, lambda: 0)
    count_waiting([Controller("trainingjob", no_reconcile, keys=list, metrics=metrics)], metrics)
    for metric in (*vars(metrics).values(), *vars(jobs).values(), *vars(plans).values()):
        if isinstance(metric, MetricWrapperBase) and metric._labelnames:
            metric.labels(*("x" for _ in metric._labelnames))
    assert documented("Operator") == exported(metrics.registry.collect())


def test_metrics_of_node_pools_match_the_registry() -> None:
    metrics = Metrics(LEADING)
    runtime = {family.name for family in Metrics().registry.collect()}
    PoolMetrics(metrics).resizes.labels("Scale", "done")
    own = [family for family in metrics.registry.collect() if family.name not in runtime]
    assert documented("Node pools") == exported(own)


def test_coordinator_metrics_match_the_collector() -> None:
    worker = WorkerReport(slot=0, incarnation=0, state=WorkerState.ACTIVE, step_seconds=1.0)
    status = StatusReport(
        job_uid="u",
        phase=Phase.TRAINING,
        loss=1.0,
        metrics={"accuracy": 1.0},
        samples_per_second=1.0,
        progress_percent=1.0,
        goodput=1.0,
        input_wait=0.0,
        samples_left=1.0,
        workers=(worker,),
        shards=(ShardReport(index=0, epoch=0),),
        speed=(
            SpeedSums(
                device="T4",
                devices=1,
                cores=4,
                batch_size=8,
                workers=1,
                servers=1,
                compute=LogSums(count=1),
            ),
        ),
    )
    collector: Collector = StatusCollector(lambda: status)
    assert documented("Coordinator") == exported(collector.collect())


def test_worker_states_are_documented() -> None:
    table = rows(section(read("docs/metrics.md"), "Coordinator"))
    descriptions = {code(name)[0]: text for name, _, _, text in table}
    assert set(code(descriptions["shoal_workers"])) == {state.value for state in WorkerState}
