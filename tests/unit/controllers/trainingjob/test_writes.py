"""How many writes a lost worker costs the API server: alone, and in a wave."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from shoal.cluster.transport import Answer
from shoal.controllers.trainingjob.report import SETTLE_SECONDS, WAVE_SECONDS
from shoal.controllers.trainingjob.requests import MAX_IN_FLIGHT, ORDINARY_IN_FLIGHT
from tests.unit.controllers.clusters import KEY, Rig
from tests.unit.policy import build

pytestmark = pytest.mark.looptime


async def replaced(workers: int, lost: int) -> Counter[str]:
    """The writes, by kind, from the loss of some workers until their replacements run and nothing is left to say."""
    rig = Rig()
    rig.state.nodes.put(build.node("spot-0"))
    rig.apply(workers={"replicas": workers, "maxReplicas": workers})
    await settle(rig)
    run(rig)
    await settle(rig)
    rig.cluster.requests.clear()
    for index in range(lost):
        pod = rig.cluster.objects.pop(f"/api/v1/namespaces/ns/pods/digits-worker-{index}-0")
        rig.state.pods.drop(pod["metadata"]["uid"])
    for _ in range(8):  # a part at a time: a bounded number of replacements wait for nodes
        await settle(rig, 2)
        run(rig)
    await settle(rig)
    assert {f"digits-worker-{index}-1" for index in range(lost)} <= rig.pods()
    assert rig.job.status.restarts.disruptions == lost
    return Counter(
        path.split("/namespaces/ns/")[1].split("/")[0] for verb, path in rig.cluster.requests if verb != "GET"
    )


def run(rig: Rig) -> None:
    """All pods are bound and run."""
    for pod in rig.pods():
        rig.cluster.change(f"/api/v1/namespaces/ns/pods/{pod}", spec={"nodeName": "spot-0"})
    rig.run_pods()


async def settle(rig: Rig, times: int = 6) -> None:
    for _ in range(times):
        rig.see()
        await rig.reconcile(KEY)
        rig.pass_time(5)


async def test_a_worker_lost_alone() -> None:
    """The pod; the status when it is lost and when its replacement runs; an event each."""
    assert await replaced(workers=4, lost=1) == {"pods": 1, "trainingjobs": 2, "events": 2}


async def test_a_wave_of_losses_shares_the_status_and_few_events() -> None:
    writes = await replaced(workers=100, lost=50)
    assert writes["pods"] == 50
    assert writes["trainingjobs"] <= 3
    assert writes.total() <= 1.5 * 50


async def test_growth_leaves_the_rest_of_a_jobs_requests_to_replacements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    rig.state.nodes.put(build.node("spot-0"))
    rig.apply(workers={"replicas": 100, "maxReplicas": 100})
    most: Counter[bool] = Counter()
    open_, request = 0, rig.cluster.request

    async def slow(method: str, path: str, **options: Any) -> Answer:
        nonlocal open_
        if (method, path.rpartition("/")[2]) == ("POST", "pods"):
            open_ += 1
            urgent = bool(options.get("urgent"))
            most[urgent] = max(most[urgent], open_)
            await asyncio.sleep(1)
            open_ -= 1
        return await request(method, path, **options)

    monkeypatch.setattr(rig.cluster, "request", slow)
    await settle(rig)
    run(rig)
    await settle(rig)
    for index in range(50):
        pod = rig.cluster.objects.pop(f"/api/v1/namespaces/ns/pods/digits-worker-{index}-0")
        rig.state.pods.drop(pod["metadata"]["uid"])
    await settle(rig)
    assert most == {False: ORDINARY_IN_FLIGHT, True: MAX_IN_FLIGHT}


async def test_status_of_a_job_that_ramps_up_is_written_once_a_second() -> None:
    """And at once when its server is ready, and when its phase changes."""
    rig = Rig(settle_seconds=SETTLE_SECONDS)
    rig.apply(workers={"replicas": 100, "maxReplicas": 100})
    await settle(rig)
    rig.cluster.requests.clear()
    began = asyncio.get_running_loop().time()
    for name in sorted(rig.pods()):
        ready = [{"type": "Ready", "status": "True"}]
        path = f"/api/v1/namespaces/ns/pods/{name}"
        rig.cluster.change(path, status={"phase": "Running", "conditions": ready})
        rig.see()
        await rig.reconcile(KEY)
        await asyncio.sleep(0.1)
    seconds = asyncio.get_running_loop().time() - began
    assert len(rig.cluster.writes("PUT", "trainingjobs")) <= 2 + seconds / SETTLE_SECONDS


async def test_losses_one_after_the_other_are_replaced_at_once_and_recorded_together() -> None:
    lost = 15  # fewer than may wait for nodes
    rig = Rig(settle_seconds=SETTLE_SECONDS)
    rig.apply(workers={"replicas": 20, "maxReplicas": 20})
    await settle(rig)
    run(rig)
    await asyncio.sleep(60)
    await settle(rig)
    rig.cluster.requests.clear()
    for index in range(lost):
        pod = rig.cluster.objects.pop(f"/api/v1/namespaces/ns/pods/digits-worker-{index}-0")
        rig.state.pods.drop(pod["metadata"]["uid"])
        await rig.reconcile(KEY)
        assert f"digits-worker-{index}-1" in rig.pods()
        await asyncio.sleep(0.05)
    writes = Counter(path.endswith("/status") for verb, path in rig.cluster.requests if verb == "PUT")
    assert writes[True] <= 1 + lost * 0.05 / WAVE_SECONDS
    await asyncio.sleep(WAVE_SECONDS)
    await rig.reconcile(KEY)
    assert rig.job.status.restarts.disruptions == lost
