"""The loop on a real control plane: reports become a profile, plans move pods, pools and costs are counted."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from dev.cluster import ControlPlane
from dev.kube import Kube
from tests.control_plane.operators import FakeCoordinator, Job, eventually, running_operator
from tests.control_plane.pools import POOLS, report
from tests.control_plane.terminal import Terminal
from tests.unit.docs.pages import Block, alike, block

RUNS = (
    block("docs/loop.md", "kubectl get speedprofiles"),
    block("docs/loop.md", "kubectl describe etj digits"),
    block("docs/planning.md", "kubectl get etj NAME"),
)
COUNTED = (block("docs/pools.md", "kubectl get cpool"),)


async def pages_show_it(terminal: Terminal, job: Job, blocks: Iterable[Block]) -> None:
    """The profile and the plan, or the pools, as `kubectl` and `shoal explain` print them."""
    for each in blocks:
        for line, shown in each.commands:
            printed = await terminal.run(line.replace("NAME", job.name))
            named = printed.replace("od-default", "on-demand").replace("spot-default", "spot")
            assert re.fullmatch(alike(shown or "…\n"), named), f"{line}\n{named}"


async def what_the_operator_wrote_is_removed(terminal: Terminal, kube: Kube, name: str) -> None:
    """By the commands of docs/pools.md, for when it is gone."""
    assert len((await kube.get(f"{POOLS}/{name}"))["status"]["shares"]) == 1
    [remove] = block("docs/pools.md", "kubectl patch cpool NAME --subresource=status").commands
    await terminal.run(remove.line.replace("NAME", name))
    assert (await kube.get(f"{POOLS}/{name}"))["status"]["shares"] == []
    await kube.patch(f"{POOLS}/{name}", {"metadata": {"finalizers": ["shoal.dev/node-pool"]}})
    [release] = block("docs/pools.md", "kubectl patch cpool NAME --type=merge").commands
    await terminal.run(release.line.replace("NAME", name))
    assert "finalizers" not in (await kube.get(f"{POOLS}/{name}"))["metadata"]


async def test_running_job_teaches_the_predictor_and_is_moved_to_the_pools_it_needs(
    control_plane: ControlPlane, pools: None, kube: Kube, namespace: str, terminal: Terminal
) -> None:
    job, coordinator = Job(kube, namespace), FakeCoordinator()
    names = [f"spot-{namespace}", f"od-{namespace}"]
    async with running_operator(control_plane.kubeconfig, namespace, coordinator, plan_seconds=1.0):
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
        # A worker makes 640 samples a second: 12 million in an hour need more workers than there are spot nodes.
        coordinator.reports[uid] = report(uid, 2, 12e6)

        async def moved() -> bool:
            nodes = Counter(
                pod["spec"].get("nodeName", "").split("-")[0]
                for name, pod in (await job.pods()).items()
                if "worker" in name and pod["status"].get("phase") == "Running"
            )
            status = await job.status()
            plan = status["plan"]["pools"]  # written after the pods that follow from it are created
            if not nodes["spot"] == plan[names[0]] == 4 or not nodes["od"] == plan.get(names[1], 0) >= 2:
                return False
            # A pod is recorded with the first status after it was seen, which may be later than its kubelet's.
            slots = Counter(
                slot["pool"] for slot in status["slots"] if slot.get("role", "worker") == "worker"
            )
            return {pool: slots[pool] for pool in names} == {pool: plan[pool] for pool in names}

        await eventually(moved)
        status = await job.status()
        assert status["plan"]["finishTime"]
        assert float(status["plan"]["confidence"]) >= 0.95
        assert "PlanChanged" in await job.events()
        assert float(status["prediction"]["samplesPerSecond"]) > 3000

        profiles = await kube.get(f"/apis/shoal.dev/v1alpha1/namespaces/{namespace}/speedprofiles")
        [profile] = profiles["items"]
        assert profile["status"]["model"]["parameters"] == 500_000
        [row] = profile["status"]["rows"]
        assert (row["device"], row["batchSize"], row["workers"]) == ("T4", 128, 2)
        assert float(row["compute"]["meanLog"]) == pytest.approx(math.log(0.2), abs=0.01)

        told: dict[str, Any] = {}

        async def pool_told() -> bool:
            told.update((await kube.get(f"{POOLS}/{names[0]}")).get("status", {}))
            # Workers may share a node, if the scheduler says so.
            hosts = {pod["spec"].get("nodeName", "") for pod in (await job.pods()).values()}
            used = sum(host.startswith("spot") for host in hosts)
            seen = told.get("nodes"), told.get("used"), told.get("recommended", {}).get("nodes")
            return seen == (4, used, 4)

        try:
            await eventually(pool_told)
        except AssertionError:
            raise AssertionError(f"{told}: {await job.status()}") from None
        await pages_show_it(terminal, job, RUNS)

        # The spot nodes alone are early enough now, and what is left takes longer than a drained node is paid for.
        coordinator.reports[uid] = report(uid, 6, 6e6)

        async def given_back() -> bool:
            plan = (await job.status()).get("plan", {})
            return bool(plan.get("pools")) and names[1] not in plan["pools"]

        await eventually(given_back)

        async def charged() -> bool:
            return float((await job.status()).get("cost", {}).get("accumulated", 0)) > 0

        await eventually(charged)

        async def measured() -> bool:
            found = [(await kube.get(f"{POOLS}/{name}"))["status"] for name in names]
            return all("perHour" in status["interruptions"] for status in found)

        await eventually(measured, what="the job's time in both pools is counted")
        await pages_show_it(terminal, job, COUNTED)

    await what_the_operator_wrote_is_removed(terminal, kube, names[0])


@pytest.mark.nightly
async def test_advise_changes_nothing(
    control_plane: ControlPlane, pools: None, kube: Kube, namespace: str
) -> None:
    job, coordinator = Job(kube, namespace), FakeCoordinator()
    names = [f"spot-{namespace}", f"od-{namespace}"]
    async with running_operator(control_plane.kubeconfig, namespace, coordinator, plan_seconds=1.0):
        applied = await job.apply(
            workers={"replicas": 2, "maxReplicas": 7, "pools": names},
            elasticity={"mode": "Advise", "objective": {"deadlineSeconds": 3600}},
        )
        uid = applied["metadata"]["uid"]
        await job.runs(2)
        coordinator.reports[uid] = report(uid, 2, 12e6)

        async def advised() -> bool:
            plan = (await job.status()).get("plan", {})
            return sum(plan.get("pools", {}).values()) >= 6

        await eventually(advised)
        workers = [name for name in await job.pods() if "worker" in name]
        assert len(workers) == 2
        assert (await kube.get(job.path))["spec"]["workers"]["replicas"] == 2
