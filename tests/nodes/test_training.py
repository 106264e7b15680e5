"""The whole of it on real nodes: Helm, a job with real TensorFlow, a node taken by notice, an operator taken away."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from dev.audit import writes
from dev.cluster.local import LocalCluster
from dev.demo.faults import Fault, quietest
from dev.demo.figures import Replacement, accuracy, replacements
from dev.demo.local import Local
from dev.demo.losses import MANIFEST
from dev.demo.watch import Picture, Watcher
from shoal_trainer.contract import WorkerState
from tests.browser.chromium import chromium, find

JOB = "digits"
EPOCHS = 20
"""At the pace of the story 5 minutes and more, so that it is told before they are over."""
PACED = """
import os, time
import tensorflow as tf
import digits
from shoal_trainer import Indexed, Training

def read(start, stop):
    if not os.path.exists("/tmp/hurry"):
        time.sleep(2.0)
    return tf.data.Dataset.from_tensor_slices((digits.x[start:stop], digits.y[start:stop]))

data = Indexed(len(digits.x), read, shuffle=64)
job = Training(model=digits.build, data=data, validation=digits.job.validation)
"""
"""The example, whose reads take most of the time: to train as fast as it can is not what the story is about."""


def until(watcher: Watcher, reached: Any, seconds: float = 600) -> Picture:
    """The first picture of which `reached` is true."""
    deadline = time.monotonic() + seconds
    while not reached(picture := watcher.look()):
        assert time.monotonic() < deadline, picture.job.status.model_dump_json(indent=1)
        assert picture.job.status.phase != "Failed", picture.job.status.last_failure
        time.sleep(0.3)
    return picture


def everyone_works(picture: Picture) -> bool:
    report = picture.report
    return (
        picture.fresh
        and report is not None
        and sum(w.first_push_at is not None and w.state == "Active" for w in report.workers) >= 3
    )


def ended(picture: Picture, places: Sequence[tuple[int, int]]) -> bool:
    """Whether the kubelet has told how these workers ended: a machine goes 30 s and more after its notice."""
    slots = {(s.index, s.incarnation): s.state for s in picture.job.status.slots if s.role == "worker"}
    return all(slots.get(place, "Ended") == "Ended" for place in places)


@contextmanager
def forwarded(backend: Local, pod: str) -> Iterator[str]:
    """The address of the page of one of the operator's pods."""
    words = ["kubectl", "--namespace", "shoal-system", "port-forward", pod, ":8082"]
    with subprocess.Popen(words, env=backend.env, stdout=subprocess.PIPE, text=True) as forward:
        try:
            said = forward.stdout.readline() if forward.stdout else ""
            found = re.search(r"127\.0\.0\.1:\d+", said)
            assert found, said
            yield f"http://{found[0]}"
        finally:
            forward.terminate()


async def look_at_the_page(address: str, job: str, lost: Sequence[str], picture: Path) -> None:
    """It has a cross at the end of each lost worker, why it ended, and the curves of what trains."""
    async with chromium() as tab:
        await tab.open(f"{address}/#/{job}", dark=True)
        bars = "[...document.querySelectorAll('#job svg rect title')].map((each) => each.textContent)"
        for name in lost:
            await tab.until(
                f"{bars}.some((each) => each.startsWith('{name} on ') && /ended: \\w/.test(each))"
            )
        assert await tab.evaluate("document.querySelectorAll('#job svg text.end').length") == len(lost)
        curves = "[...document.querySelectorAll('#job .curves > .panel')].filter((each) => each.querySelector('svg'))"
        drawn = f"{curves}.map((each) => each.querySelector('h3').textContent)"
        await tab.until(f"{drawn}.includes('accuracy') && {drawn}.includes('Samples per second')")
        await tab.picture(picture)
        assert tab.problems == []


def leader(cluster: LocalCluster) -> str:
    """The name of the operator's pod that decides."""
    return cluster.plane.kubectl(
        "-n", "shoal-system", "get", "lease", "shoal", "-o", "jsonpath={.spec.holderIdentity}"
    )


def operator_pods(cluster: LocalCluster) -> list[tuple[str, str]]:
    """Name and node of the operator's pods, the oldest first."""
    found = cluster.plane.kubectl(
        "-n", "shoal-system", "get", "pods", "-l", "app.kubernetes.io/name=shoal", "-o", "json",
        "--sort-by=.metadata.creationTimestamp",
    )  # fmt: skip
    return [(pod["metadata"]["name"], pod["spec"].get("nodeName", "")) for pod in json.loads(found)["items"]]


def the_page_shows(backend: Local, pod: str, job: str, lost: Sequence[tuple[int, int]], folder: Path) -> None:
    """What was lost, in a browser where there is one. `pod`: an operator that saw it, which its successor does not."""
    if not find():
        return
    names = [f"worker {slot}-{incarnation}" for slot, incarnation in lost]
    with forwarded(backend, f"pod/{pod}") as address:
        asyncio.run(look_at_the_page(address, job, names, folder / "page-nodes.png"))


def nothing_is_left(cluster: LocalCluster, namespace: str) -> None:
    """In the end, of the objects of a job that was deleted."""

    def left() -> list[str]:
        kinds = "pods,services,secrets,poddisruptionbudgets"
        found = json.loads(
            cluster.plane.kubectl("-n", namespace, "get", kinds, "-l", f"shoal.dev/job={JOB}", "-o", "json")
        )
        return [item["metadata"]["name"] for item in found["items"]]

    deadline = time.monotonic() + 300
    while remaining := left():
        assert time.monotonic() < deadline, remaining
        time.sleep(0.5)


@pytest.mark.timeout(2400)
def test_a_job_outlives_a_node_and_the_operator(
    cluster: LocalCluster, backend: Local, namespace: str, tmp_path: Path
) -> None:
    documents = list(yaml.safe_load_all(MANIFEST.read_text()))
    documents[0]["spec"]["training"] |= {
        "entrypoint": "paced:job", "code": {"configMap": "paced"}, "stopAfter": {"epochs": EPOCHS},
    }  # fmt: skip
    documents.append(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "paced"}, "data": {"paced.py": PACED}}
    )
    worker = documents[0]["spec"]["workers"]["template"]["spec"]["containers"][0]
    worker["env"] = [
        {"name": "PYTHONPATH", "value": "/code"}
    ]  # the user's own: the trainer is found all the same
    cluster.plane.kubectl("-n", namespace, "apply", "-f", "-", stdin=yaml.safe_dump_all(documents))
    watcher = Watcher(backend, namespace, JOB)
    picture = until(watcher, everyone_works)

    node, places = quietest(picture, set())
    operators = operator_pods(cluster)
    survivor = next(name for name, place in operators if place not in {"", node})
    led_there = (leader(cluster), node) in operators
    at = time.time()
    cluster.node(node).power_button()
    fault = Fault("node reclaimed with notice", node, datetime.fromtimestamp(at, UTC), places)

    def made(namespace: str | None = None) -> list[Replacement]:
        """Where the leading operator was on the node, the next one leaves out a number that it may have used."""
        return replacements([fault], list(writes(cluster.plane.audit_log, namespace=namespace)), JOB)

    def replaced(_picture: Picture) -> bool:
        return len(made(namespace)) == len(places)

    def drained(picture: Picture) -> bool:
        """Whether the workers on the reclaimed node have left the job, which they need not wait 30 s for."""
        workers = picture.report.workers if picture.report else ()
        gone = {
            (w.slot, w.incarnation) for w in workers if w.state in {WorkerState.DRAINED, WorkerState.LEFT}
        }
        return set(places) <= gone

    until(watcher, replaced, 60)
    until(watcher, drained)
    until(watcher, lambda picture: ended(picture, places), 30)
    cluster.kill(node)
    slowest = max(each.seconds for each in made())
    assert slowest <= 1.0, f"{slowest} s; the leading operator was on that node: {led_there}"

    pictures = Path(os.environ.get("SHOAL_PICTURES", tmp_path))
    the_page_shows(backend, survivor, f"{namespace}/{JOB}", places, pictures)

    cluster.plane.kubectl("-n", "shoal-system", "scale", "deployment", "shoal", "--replicas=0")
    step = watcher.look().report
    assert step is not None
    until(watcher, lambda p: p.fresh and p.report is not None and p.report.step > step.step + 20)
    cluster.plane.kubectl("-n", "shoal-system", "scale", "deployment", "shoal", "--replicas=2")

    for pod in watcher.look().role("worker"):
        name = pod["metadata"]["name"]
        cluster.plane.kubectl("-n", namespace, "exec", name, "--", "touch", "/tmp/hurry")
    last = until(watcher, lambda p: p.job.status.finished)
    assert last.job.status.phase == "Succeeded"
    assert last.job.status.restarts.disruptions == len(places)
    assert last.job.status.restarts.failures == 0
    evidence = last.evidence
    assert evidence is not None
    assert (accuracy(evidence.metrics) or 0) >= 0.95
    assert (evidence.ranges.never, evidence.ranges.repeated, evidence.ranges.partial) == (0, 0, 0)

    # A cloud removes the Node of a machine that is gone; without that its last pod would stay, whoever deletes it.
    cluster.plane.kubectl("delete", "node", node)
    cluster.plane.kubectl("-n", namespace, "delete", "trainingjob", JOB)
    nothing_is_left(cluster, namespace)
    assert cluster.plane.kubectl("-n", namespace, "get", "pvc", "digits-runs", "-o", "name").strip()
