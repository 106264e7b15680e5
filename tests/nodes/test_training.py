"""The whole of it on real nodes: Helm, a job with real TensorFlow, a node taken by notice, an operator taken away."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml

from dev.audit import creates, writes
from dev.cluster.local import LocalCluster
from dev.demo.faults import Fault, quietest
from dev.demo.figures import accuracy, replacements
from dev.demo.local import Local
from dev.demo.losses import MANIFEST
from dev.demo.watch import Picture, Watcher
from shoal_trainer.contract import WorkerState

JOB = "digits"


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


@pytest.mark.timeout(2400)
def test_a_job_outlives_a_node_and_the_operator(
    cluster: LocalCluster, backend: Local, namespace: str
) -> None:
    documents = list(yaml.safe_load_all(MANIFEST.read_text()))
    documents[0]["spec"]["training"]["stopAfter"] = {"epochs": 60}
    worker = documents[0]["spec"]["workers"]["template"]["spec"]["containers"][0]
    worker["env"] = [
        {"name": "PYTHONPATH", "value": "/code"}
    ]  # the user's own: the trainer is found all the same
    cluster.plane.kubectl("-n", namespace, "apply", "-f", "-", stdin=yaml.safe_dump_all(documents))
    watcher = Watcher(backend, namespace, JOB)
    picture = until(watcher, everyone_works)

    node, places = quietest(picture, set())
    at = time.time()
    cluster.node(node).power_button()
    names = {f"{JOB}-worker-{slot}-{incarnation + 1}" for slot, incarnation in places}

    def replaced(_picture: Picture) -> bool:
        return names <= {w.name for w in creates(cluster.plane.audit_log, "pods", namespace=namespace)}

    def drained(picture: Picture) -> bool:
        """Whether the workers on the reclaimed node have left the job, which they need not wait 30 s for."""
        workers = picture.report.workers if picture.report else ()
        gone = {
            (w.slot, w.incarnation) for w in workers if w.state in {WorkerState.DRAINED, WorkerState.LEFT}
        }
        return set(places) <= gone

    until(watcher, replaced, 60)
    until(watcher, drained)
    cluster.kill(node)
    fault = Fault("node reclaimed with notice", node, datetime.fromtimestamp(at, UTC), places)
    assert all(r.seconds <= 1.0 for r in replacements([fault], list(writes(cluster.plane.audit_log)), JOB))

    cluster.plane.kubectl("-n", "shoal-system", "scale", "deployment", "shoal", "--replicas=0")
    step = watcher.look().report
    assert step is not None
    until(watcher, lambda p: p.fresh and p.report is not None and p.report.step > step.step + 50)
    cluster.plane.kubectl("-n", "shoal-system", "scale", "deployment", "shoal", "--replicas=2")

    ended = until(watcher, lambda p: p.job.status.finished)
    assert ended.job.status.phase == "Succeeded"
    assert ended.job.status.restarts.disruptions == len(places)
    assert ended.job.status.restarts.failures == 0
    evidence = ended.evidence
    assert evidence is not None
    assert (accuracy(evidence.metrics) or 0) >= 0.95
    assert (evidence.ranges.never, evidence.ranges.repeated, evidence.ranges.partial) == (0, 0, 0)

    # A cloud removes the Node of a machine that is gone; without that its last pod would stay, whoever deletes it.
    cluster.plane.kubectl("delete", "node", node)
    cluster.plane.kubectl("-n", namespace, "delete", "trainingjob", JOB)

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
    assert cluster.plane.kubectl("-n", namespace, "get", "pvc", "digits-runs", "-o", "name").strip()
