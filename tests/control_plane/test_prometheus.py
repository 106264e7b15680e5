"""A real Prometheus scrapes an operator at work and a coordinator: every query of the dashboard and every alert is
evaluated on what they export, so that a series that is never there is found."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry

from dev.cluster import ControlPlane
from dev.kube import Kube
from shoal.process.endpoints import exposition
from shoal_trainer.contract import Outcome, StatusReport, TerminationMessage, WorkerReport, WorkerState
from shoal_trainer.coordinator.metrics import StatusCollector
from tests.control_plane.operators import FakeCoordinator, Job, eventually, running_operator
from tests.control_plane.pools import report
from tests.doubles.fake_kubelet import FakeKubelet
from tests.prometheus import QUERIES, prometheus, reads


@contextlib.asynccontextmanager
async def served(registry: CollectorRegistry) -> AsyncIterator[str]:
    """`/metrics` on loopback; the address."""
    app = web.Application()
    app.router.add_get("/metrics", exposition(registry))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"{host}:{port}"
    finally:
        await runner.cleanup()


def fixed(name: str, target: str, labels: dict[str, str]) -> dict[str, Any]:
    """A target that does not move."""
    return {"job_name": name, "static_configs": [{"targets": [target], "labels": labels}]}


def full(uid: str, workers: int, pushed: tuple[tuple[int, int], ...] = ()) -> StatusReport:
    """A report that has a value for everything. `pushed`: (slot, incarnation) of replacements that train."""
    more = tuple(
        WorkerReport(slot=slot, incarnation=number, state=WorkerState.ACTIVE, first_push_at=time.time())
        for slot, number in pushed
    )
    plain = report(uid, workers, 12e6)
    active = tuple(replace(each, step_seconds=0.2) for each in plain.workers)
    return plain.model_copy(
        update={
            "loss": 0.5,
            "metrics": {"accuracy": 0.9},
            "progress_percent": 10.0,
            "goodput": 0.99,
            "input_wait": 0.01,
            "workers": (*active, *more),
        }
    )


async def test_every_query_and_every_alert_has_something_to_read(
    control_plane: ControlPlane,
    pools: None,
    kube: Kube,
    namespace: str,
    fake_kubelet: FakeKubelet,
    tmp_path: Path,
) -> None:
    job, coordinator = Job(kube, namespace), FakeCoordinator()
    names = [f"spot-{namespace}", f"od-{namespace}"]
    shown = CollectorRegistry()
    said: list[StatusReport] = [full("unknown", 2)]
    shown.register(StatusCollector(lambda: said[0]))

    def tell(found: StatusReport) -> None:
        said[0] = coordinator.reports[found.job_uid] = found

    async with contextlib.AsyncExitStack() as stack:
        operator = await stack.enter_async_context(
            running_operator(control_plane.kubeconfig, namespace, coordinator, plan_seconds=1.0)
        )
        own = await stack.enter_async_context(served(operator.metrics.registry))
        jobs = await stack.enter_async_context(served(shown))
        labels = {"namespace": namespace, "pod": "digits-ps-0-0", "shoal_dev_job": "digits"}
        server = await stack.enter_async_context(
            prometheus(
                tmp_path,
                [
                    fixed("shoal", own, {"namespace": "shoal-system"}),
                    fixed("coordinators", jobs, labels),
                ],
            )
        )
        applied = await job.apply(
            workers={"replicas": 2, "minReplicas": 1, "maxReplicas": 7, "pools": names},
            elasticity={
                "mode": "Auto",
                "objective": {"deadlineSeconds": 3600},
                "stabilizationSeconds": {"up": 0, "down": 0},
            },
        )
        uid = applied["metadata"]["uid"]
        await job.runs(2)
        tell(full(uid, 2))
        await eventually(reads(server, "shoal_plan_changes_total > 0"), what="a plan")

        taken = await job.pod_runs("digits-worker-0-0")
        await fake_kubelet.notice(taken["spec"]["nodeName"], drain_seconds=0.5)
        await job.pod_runs("digits-worker-0-1")
        tell(full(uid, 2, pushed=((0, 1),)))
        pushed = 'shoal_reaction_seconds_count{role="worker",stage="first_push"} > 0'
        await eventually(reads(server, pushed), what="the first push of the replacement")
        [created] = await server.query(
            'sum(shoal_reaction_seconds_bucket{role="worker",stage="created",le="40.0"})'
        )
        assert float(created["value"][1]) >= 1

        message = TerminationMessage(outcome=Outcome.SUCCEEDED, model_uri="file:///m", step=7).to_json()
        await fake_kubelet.succeed_pod(namespace, "digits-ps-0-0", message=message)
        await eventually(reads(server, "shoal_predicted_finish_ratio_count > 0"), what="the end")
        await eventually(reads(server, "rate(shoal_predicted_finish_ratio_count[1m])"))

        empty = [(title, query) for title, query in QUERIES if not await server.query(query)]
        assert empty == []
        assert await server.get("label/shoal_dev_job/values") == ["digits"]

        async def evaluated() -> list[Any]:
            groups = (await server.get("rules"))["groups"]
            rules = [rule for group in groups for rule in group["rules"]]
            return rules if all(not each["lastEvaluation"].startswith("0001") for each in rules) else []

        rules = await eventually(evaluated, what="alerts")
        assert {rule["name"]: rule.get("lastError", "") for rule in rules if rule["health"] != "ok"} == {}
        states = {rule["name"]: rule["state"] for rule in rules}
        assert states["ShoalOperatorDown"] == "inactive"
