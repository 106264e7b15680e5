"""Leader and standby."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from prometheus_client import generate_latest

from shoal.api.events import Event
from shoal.api.training_job import TrainingJob
from shoal.cluster.clock import loop_time
from shoal.cluster.transport import Answer
from shoal.controllers.sources import sources
from shoal.controllers.trainingjob.credentials import InstallKey
from shoal.errors import Unavailable
from shoal.policy.model import Images
from shoal.process.operator import LEASE_TIMES, Operator
from shoal.process.settings import Settings
from tests.meanwhile import during, losing_the_lease
from tests.unit.controllers.clusters import NOW, Cluster, UnreachableCoordinator
from tests.unit.policy import build


def add_job(operator: Operator, number: int) -> None:
    manifest = build.job_manifest()
    manifest["metadata"] |= {"name": f"job-{number}", "uid": f"uid-{number}", "resourceVersion": str(number)}
    operator.state.jobs.put(TrainingJob.model_validate(manifest))


SETTINGS = Settings(install_key=InstallKey(b"k" * 32), images=Images(ps="ps:1", worker="worker:1"))
NO_OBJECTS = Answer(200, b'{"metadata": {"resourceVersion": "1"}, "items": []}')


class EmptyCluster(Cluster):
    """Lists no objects, and reports no change."""

    def __init__(self, jobs: Answer) -> None:
        super().__init__()
        self.jobs = jobs

    def _get(self, path: str, body: Any) -> Answer:
        name = path.rpartition("/")[2]
        return (
            self.jobs
            if name == "trainingjobs"
            else NO_OBJECTS
            if name in sources("")
            else super()._get(path, body)
        )


@pytest.mark.looptime
@pytest.mark.parametrize("status", [403, 404])
async def test_operator_without_permission_or_crd_is_not_ready(status: int) -> None:
    cluster = EmptyCluster(jobs=Answer(status, b'{"message": "no"}'))
    operator = Operator(cluster, SETTINGS, UnreachableCoordinator(), lease_clock=loop_time)
    assert operator.manager.unread() == ["trainingjobs", "pods", "services", "poddisruptionbudgets"]
    async with during(operator.run()):
        await asyncio.sleep(60)
        assert operator.manager.unread() == ["trainingjobs"]
        assert "shoal_leading 0.0" in generate_latest(operator.metrics.registry).decode()
        cluster.jobs = NO_OBJECTS
        await asyncio.sleep(60)
        assert operator.manager.unread() == []
        assert "shoal_leading 1.0" in generate_latest(operator.metrics.registry).decode()


class Scoped(EmptyCluster):
    """May list what is in its namespace, and nothing else."""

    def _get(self, path: str, body: Any) -> Answer:
        name = path.rpartition("/")[2]
        return Answer(403, b"{}") if name in {"nodes", "capacitypools"} else super()._get(path, body)


@pytest.mark.looptime
async def test_what_is_not_to_be_read_is_not_asked_for() -> None:
    """Each refused list was counted, and the alert on them fired for as long as the operator was there."""
    cluster = Scoped(jobs=NO_OBJECTS)
    settings = replace(SETTINGS, node_signals=False, pools=False)
    operator = Operator(cluster, settings, UnreachableCoordinator(), lease_clock=loop_time)
    async with during(operator.run()):
        await asyncio.sleep(600)
        metrics = generate_latest(operator.metrics.registry).decode()
        assert "shoal_leading 1.0" in metrics
        assert 'reason="refused"' not in metrics
        assert 'shoal_queue_length{controller="trainingjob"}' in metrics
        assert 'controller="capacitypool"' not in metrics
        assert operator.watched.isdisjoint({"nodes", "capacitypools"})


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("reads", "words"),
    [(False, "set the chart's value scope.pools"), (True, "cannot be listed: not permitted")],
)
async def test_job_that_names_a_pool_is_told_that_the_operator_reads_none(reads: bool, words: str) -> None:
    """It was told that the pool "does not exist", though everybody saw it."""
    cluster = Scoped(jobs=NO_OBJECTS)
    operator = Operator(
        cluster, replace(SETTINGS, pools=reads), UnreachableCoordinator(), lease_clock=loop_time
    )
    async with during(operator.run()):
        await asyncio.sleep(60)
        manifest = build.job_manifest(workers={"replicas": 1, "pools": ["a"]})
        known = cluster.add("/apis/shoal.dev/v1alpha1/namespaces/team/trainingjobs/digits", manifest)
        operator.state.jobs.put(TrainingJob.model_validate(known))
        await asyncio.sleep(60)
        (job,) = operator.state.jobs.all()
        degraded = job.status.condition("Degraded")
        assert degraded is not None
        assert degraded.reason == "PoolNotFound"
        assert words in degraded.message


@pytest.mark.looptime
async def test_its_writes_end_with_the_lease() -> None:
    cluster = EmptyCluster(jobs=NO_OBJECTS)
    operator = Operator(cluster, SETTINGS, UnreachableCoordinator(), lease_clock=loop_time)
    with losing_the_lease():
        async with during(operator.run()):
            await asyncio.sleep(60)
            operator.recorder.record(build.job(), [Event("Normal", "One", "told")])
            await asyncio.sleep(5)
            assert cluster.writes("POST", "events") == ["events"]
            cluster.fault = lambda _method, path: Unavailable("partition") if "/leases" in path else None
            await asyncio.sleep(LEASE_TIMES.renew_deadline + 1)
            operator.recorder.record(build.job(), [Event("Normal", "Two", "never told")])
            await operator.recorder.drain()
            assert cluster.writes("POST", "events") == ["events"]


@pytest.mark.looptime
async def test_all_its_requests_but_the_lease_s_wait_after_one_was_told_to_come_later() -> None:
    """There is one limiter: what is read, decided and told asks no server that sheds load."""
    cluster = EmptyCluster(jobs=NO_OBJECTS)
    operator = Operator(cluster, SETTINGS, UnreachableCoordinator(), lease_clock=loop_time)
    async with during(operator.run()):
        await asyncio.sleep(60)
        asked: set[tuple[str, str]] = set()
        shed = asyncio.Event()

        def answer(method: str, path: str) -> Unavailable | None:
            if "/leases" in path:
                return None
            if not shed.is_set() and path.endswith("/events"):
                shed.set()
                return Unavailable("429 too many requests", retry_after=7.0)
            if shed.is_set():
                asked.add((method, path.rpartition("/")[2]))
            return None

        cluster.fault = answer
        operator.recorder.record(build.job(), [Event("Normal", "One", "never told")])
        await shed.wait()
        operator.recorder.record(build.job(), [Event("Normal", "Two", "told later")])
        add_job(operator, 1)
        operator._reflectors["pods"].request_refresh()
        await asyncio.sleep(6.9)
        assert asked == set()
        await asyncio.sleep(5)
        assert asked >= {("POST", "events"), ("POST", "secrets"), ("GET", "pods")}


@pytest.mark.looptime
@pytest.mark.parametrize(("seconds", "outage"), [(3600, True), (5, False)])
async def test_lease_that_nobody_renewed_for_long_was_an_outage_of_the_server(
    seconds: int, outage: bool
) -> None:
    """A new leader cannot tell who was away, and does not take silent nodes for lost ones."""
    cluster = EmptyCluster(jobs=NO_OBJECTS)
    operator = Operator(cluster, SETTINGS, UnreachableCoordinator(), lease_clock=loop_time, wall=lambda: NOW)
    spec = {
        "holderIdentity": "another",
        "leaseDurationSeconds": 15,
        "renewTime": (NOW - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
    }
    where = f"/apis/coordination.k8s.io/v1/namespaces/{SETTINGS.lease_namespace}/leases/{SETTINGS.lease_name}"
    cluster.add(where, {"metadata": {"name": SETTINGS.lease_name}, "spec": spec})
    async with during(operator.run()):
        await asyncio.sleep(60)
        assert operator.lease.held
        assert (operator._outage.returned_seconds is not None) == outage


async def test_standby_neither_queues_nor_counts_jobs_until_it_leads() -> None:
    operator = Operator(Cluster(), SETTINGS, UnreachableCoordinator())
    for number in range(1, 51):
        add_job(operator, number)
    operator.state.jobs.drop("uid-50")
    assert len(operator.jobs.queue) == 0
    assert "shoal_jobs" not in generate_latest(operator.metrics.registry).decode()

    operator.jobs.lead()
    assert len(operator.jobs.queue) == 49
    add_job(operator, 51)
    assert len(operator.jobs.queue) == 50


def job_at(operator: Operator, version: str) -> None:
    manifest = build.job_manifest()
    manifest["metadata"] |= {"name": "a", "uid": "u", "resourceVersion": version}
    operator.state.jobs.put(TrainingJob.model_validate(manifest))


@pytest.mark.looptime
async def test_kopf_wakes_only_for_a_version_that_the_cache_has_not_seen() -> None:
    operator = Operator(Cluster(), SETTINGS, UnreachableCoordinator())
    operator.jobs.lead()
    job_at(operator, "7")
    await drained(operator)
    assert not operator.changed("trainingjobs", "ns", "a", "u", "7")
    assert not operator.changed("pods", "ns", "a", "u", "9")  # not a resource that kopf watches
    assert len(operator.jobs.queue) == 0
    assert operator.changed("trainingjobs", "ns", "a", "u", "8")
    assert len(operator.jobs.queue) == 1


async def test_change_that_only_kopf_has_seen_is_read_again() -> None:
    operator = Operator(Cluster(), SETTINGS, UnreachableCoordinator())
    job_at(operator, "7")
    assert operator.missed("trainingjobs", "u", "8")
    job_at(operator, "9")
    assert not operator.missed("trainingjobs", "u", "8")


async def drained(operator: Operator) -> None:
    """Empty the queue."""

    async def nothing(_key: object) -> None:
        return None

    async with during(operator.jobs.queue.work(nothing)):
        await asyncio.sleep(0.01)
