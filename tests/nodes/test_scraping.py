"""A real Prometheus finds real pods by the monitors of the chart, and its dashboard has something to show of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dev.cluster.local import LocalCluster
from dev.commands import command
from dev.demo.local import Local
from dev.demo.losses import MANIFEST
from dev.demo.watch import Watcher
from dev.paths import ROOT
from tests.control_plane.operators import eventually
from tests.nodes.test_training import JOB, everyone_works, until
from tests.prometheus import QUERIES, prometheus, reads

OF_PLANS = ("shoal_predicted_", "shoal_cost_", "shoal_plan_", "shoal_pool_")
"""Nothing is there of these where no pool is."""


def monitors(env: dict[str, str]) -> list[dict[str, Any]]:
    """The ServiceMonitor and the PodMonitor that the chart makes, as a Prometheus without its operator has them."""
    words = ["--set", "metrics.serviceMonitor.enabled=true", "--set", "metrics.podMonitor.enabled=true"]
    needed = ["--set", "image.repository=a", "--set", "trainer.psImage=b", "--set", "trainer.workerImage=c"]
    chart = str(ROOT / "charts" / "shoal")
    rendered = command(
        "helm", "template", "shoal", chart, "--namespace", "shoal-system", *words, *needed, env=env
    )
    found = [each for each in yaml.safe_load_all(rendered) if each]
    return [each for each in found if each["kind"] in {"ServiceMonitor", "PodMonitor"}]


def scraped(monitor: dict[str, Any], kubectl: Callable[..., str]) -> dict[str, Any]:
    """What the Prometheus operator would scrape by a monitor. Debian's Prometheus cannot ask Kubernetes by itself."""
    of_pods, spec = monitor["kind"] == "PodMonitor", monitor["spec"]
    [endpoint] = spec["podMetricsEndpoints" if of_pods else "endpoints"]

    def found(kind: str, labels: dict[str, str]) -> list[dict[str, Any]]:
        selector = ",".join(f"{name}={value}" for name, value in labels.items())
        return list(json.loads(kubectl("get", kind, "-A", "-l", selector, "-o", "json"))["items"])

    selected, port = spec["selector"]["matchLabels"], endpoint["port"]
    if not of_pods:
        [service] = found("services", selected)
        [port] = [each["targetPort"] for each in service["spec"]["ports"] if each["name"] == port]
        selected = service["spec"]["selector"]
    targets = []
    for pod in found("pods", selected):
        metadata, ports = pod["metadata"], [p for c in pod["spec"]["containers"] for p in c.get("ports", ())]
        [number] = [each["containerPort"] for each in ports if each.get("name") == port]
        labels = {"namespace": metadata["namespace"], "pod": metadata["name"]} | {
            name.replace(".", "_").replace("/", "_"): metadata["labels"][name]
            for name in spec.get("podTargetLabels", ())
        }
        targets.append({"targets": [f"{pod['status']['podIP']}:{number}"], "labels": labels})
    assert targets, f"{monitor['metadata']['name']} selects nothing"
    return {"job_name": monitor["metadata"]["name"], "static_configs": targets}


@pytest.mark.nightly
@pytest.mark.timeout(2400)
async def test_the_dashboard_has_something_to_show_of_real_pods(
    cluster: LocalCluster, backend: Local, namespace: str, tmp_path: Path
) -> None:
    cluster.plane.kubectl("-n", namespace, "apply", "-f", str(MANIFEST))
    watcher = Watcher(backend, namespace, JOB)
    found = await asyncio.to_thread(monitors, backend.env)
    assert {each["kind"] for each in found} == {"ServiceMonitor", "PodMonitor"}
    picture = await asyncio.to_thread(until, watcher, everyone_works)
    targets = [scraped(each, cluster.plane.kubectl) for each in found]
    async with prometheus(tmp_path, targets) as server:
        [victim] = [
            each for each in picture.role("worker") if each["metadata"]["name"] == f"{JOB}-worker-0-0"
        ]
        await asyncio.to_thread(cluster.node(victim["spec"]["nodeName"]).power_button)
        pushed = 'shoal_reaction_seconds_count{stage="first_push"} > 0'
        await eventually(reads(server, pushed), 300, what="the first push of the replacement")
        await eventually(reads(server, f'shoal_metric{{name="accuracy",shoal_dev_job="{JOB}"}} > 0.1'), 60)

        async def all_up() -> bool:  # also where one of the two operators was on the node
            up = await server.query("max by (job) (up)")
            return {(each["metric"]["job"], each["value"][1]) for each in up} == {
                ("shoal", "1"), ("shoal-jobs", "1")
            }  # fmt: skip

        async def empty() -> list[tuple[str, str]]:
            asked = [each for each in QUERIES if not any(kind in each[1] for kind in OF_PLANS)]
            return [(title, query) for title, query in asked if not await server.query(query)]

        async def nothing_is_empty() -> bool:
            return not await empty()

        await eventually(all_up, 60, what="all pods scraped")
        with contextlib.suppress(AssertionError):
            await eventually(nothing_is_empty, 30)
        assert await empty() == []
        rules = [rule for group in (await server.get("rules"))["groups"] for rule in group["rules"]]
        states = {rule["name"]: rule["state"] for rule in rules}
        assert states["ShoalOperatorDown"] == "inactive"
        assert {rule["name"]: rule.get("lastError", "") for rule in rules if rule["health"] == "err"} == {}
    cluster.plane.kubectl("-n", namespace, "delete", "trainingjob", JOB)
