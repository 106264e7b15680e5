"""The API server is away for two minutes, while two jobs train on real nodes: nobody loses a pod, or a step.

Seen once, after 75 s: all nodes turned Unknown at its return, and within 4 s the operator had deleted both parameter
servers and three of four workers, a second before their nodes were Ready again.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import yaml

from dev.audit import writes
from dev.cluster.local import LocalCluster
from dev.demo.local import Local
from dev.demo.losses import MANIFEST
from dev.demo.watch import Picture, Watcher
from shoal_trainer.contract import StatusReport

JOBS = ("one", "two")
SERVERS, WORKERS = 2, 2
AWAY_SECONDS = 120.0
WATCHED_SECONDS = 90.0
"""After its return: longer than the operator waits before it believes that nodes are gone."""


def manifests(name: str) -> list[dict[str, Any]]:
    """The demo's job with two servers and two workers, which does not end by itself."""
    job, claim = yaml.safe_load_all(MANIFEST.read_text())
    job["metadata"]["name"], claim["metadata"]["name"] = name, f"{name}-runs"
    spec = job["spec"]
    spec["storage"]["volumeClaim"]["name"] = f"{name}-runs"
    spec["training"]["stopAfter"] = {"epochs": 1_000_000}
    spec["parameterServers"]["replicas"] = SERVERS
    spec["workers"]["replicas"] = WORKERS
    return [job, claim]


def until(watcher: Watcher, reached: Any, seconds: float = 600) -> Picture:
    """The first picture of which `reached` is true."""
    deadline = time.monotonic() + seconds
    while not reached(picture := watcher.look()):
        assert time.monotonic() < deadline, picture.job.status.model_dump_json(indent=1)
        time.sleep(0.5)
    return picture


def all_work(picture: Picture) -> bool:
    report = picture.report if picture.fresh else None
    return report is not None and sum(w.first_push_at is not None for w in report.workers) >= WORKERS


def uids(picture: Picture) -> dict[str, str]:
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in picture.pods}


def asked(watcher: Watcher, picture: Picture) -> StatusReport:
    """What the coordinator says while there is no API server."""
    deadline = time.monotonic() + 60
    while (report := watcher.ask(picture)) is None:
        assert time.monotonic() < deadline, "the coordinator does not answer"
        time.sleep(0.5)
    return report


def until_all_are(status: str, cluster: LocalCluster, seconds: float = 300) -> None:
    """Wait until the condition Ready of each node has this status."""
    deadline = time.monotonic() + seconds
    while True:
        nodes = json.loads(cluster.plane.kubectl("get", "nodes", "-o", "json"))["items"]
        states = [c["status"] for node in nodes for c in node["status"]["conditions"] if c["type"] == "Ready"]
        if set(states) == {status}:
            return
        assert time.monotonic() < deadline, f"the nodes were to be {status}, and are {states}"
        time.sleep(0.5)


@contextlib.contextmanager
def silent_kubelets(cluster: LocalCluster) -> Iterator[None]:
    """Else some come back before the controller manager looks, and no node turns Unknown."""
    first = [node.processes.find("init") for node in cluster.nodes()]
    found = [
        child
        for each in first
        if each is not None
        for child in psutil.Process(each.pid).children(recursive=True)
        if child.name() == "kubelet"
    ]
    assert len(found) == len(first)
    for each in found:
        each.suspend()
    try:
        yield
    finally:
        for each in found:
            each.resume()


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_an_outage_of_the_api_server_costs_no_pod_and_no_step(
    cluster: LocalCluster, backend: Local, namespace: str
) -> None:
    watchers = [Watcher(backend, namespace, name) for name in JOBS]
    for name in JOBS:
        text = yaml.safe_dump_all(manifests(name))
        cluster.plane.kubectl("-n", namespace, "apply", "-f", "-", stdin=text)
    before = [until(each, all_work) for each in watchers]
    assert [len(uids(picture)) for picture in before] == [SERVERS + WORKERS] * len(JOBS)

    server = cluster.plane.processes.find("kube-apiserver")
    assert server is not None
    server.signal(signal.SIGSTOP)
    with silent_kubelets(cluster):
        try:
            time.sleep(AWAY_SECONDS)  # what is tested is what this much time does
            away = [asked(*each) for each in zip(watchers, before, strict=True)]
        finally:
            server.signal(signal.SIGCONT)
        until_all_are("Unknown", cluster)
    for picture, report in zip(before, away, strict=True):
        assert picture.report is not None
        assert report.step > picture.report.step, "training stood still while the API server was away"

    until_all_are("True", cluster)
    until_seconds = time.monotonic() + WATCHED_SECONDS
    while time.monotonic() < until_seconds:
        for watcher, picture in zip(watchers, before, strict=True):
            assert uids(watcher.look()) == uids(picture)
        time.sleep(1.0)
    done = writes(cluster.plane.audit_log, namespace=namespace)
    assert [w.name for w in done if (w.resource, w.verb, w.subresource) == ("pods", "delete", "")] == []
    for watcher, earlier in zip(watchers, away, strict=True):

        def told(picture: Picture, earlier: StatusReport = earlier) -> bool:
            """The status is of after the outage."""
            return picture.job.status.training.step > earlier.step

        status = until(watcher, told, 120).job.status
        assert (status.restarts.disruptions, status.restarts.failures) == (0, 0)
        assert status.parameter_servers.restarts == 0
        assert status.training.wasted_steps == 0
        assert (status.data.repeated, status.data.partial, status.data.lost) == (0, 0, 0)
    cluster.plane.kubectl("-n", namespace, "delete", "trainingjobs", "--all")
