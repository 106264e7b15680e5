"""examples/gitops on real nodes: its job is deleted and created again while it trains, and after its end."""

from __future__ import annotations

import json
import time

import pytest
import yaml

from dev.cluster.local import LocalCluster
from dev.demo.local import Local
from dev.demo.watch import Picture, Watcher
from dev.kube import Json
from dev.paths import ROOT
from tests.nodes.test_training import until

EPOCHS = 60
STEPS = 300
"""Enough to be missed."""


def example(namespace: str) -> list[Json]:
    """What a controller applies, with a snapshot every 2 s and so many epochs that it is seen while it trains."""
    text = LocalCluster("test").plane.kubectl("kustomize", str(ROOT / "examples" / "gitops"))
    objects = list(yaml.safe_load_all(text))
    for each in objects:
        each["metadata"]["namespace"] = namespace
        if each["kind"] == "TrainingJob":
            each["spec"]["training"]["stopAfter"] = {"epochs": EPOCHS}
            each["spec"]["workers"] |= {"replicas": 2}
            each["spec"]["parameterServers"] = {"snapshot": {"everySeconds": 2}}
    return objects


def saved_since(picture: Picture, moment: float) -> bool:
    """Whether all shards have a snapshot that is younger."""
    shards = picture.report.shards if picture.fresh and picture.report else ()
    return bool(shards) and all((shard.last_snapshot_at or 0.0) > moment for shard in shards)


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_a_job_that_a_controller_replaces_trains_on_and_once_it_has_ended_trains_no_more(
    cluster: LocalCluster, backend: Local, namespace: str
) -> None:
    objects = example(namespace)
    [job] = [each for each in objects if each["kind"] == "TrainingJob"]
    watcher = Watcher(backend, namespace, job["metadata"]["name"])
    for each in objects:
        cluster.plane.kubectl("apply", "-f", "-", stdin=json.dumps(each))

    def replace() -> None:
        cluster.plane.kubectl("replace", "--force", "-f", "-", stdin=json.dumps(job), timeout=300)

    def ended() -> Picture:
        found = until(watcher, lambda p: p.job.status.finished)
        status, evidence = found.job.status, found.evidence
        assert (status.phase, status.restarts.failures, status.data.lost) == ("Succeeded", 0, 0)
        assert evidence is not None
        assert (evidence.ranges.never, evidence.ranges.once % EPOCHS) == (0, 0)
        return found

    first = until(watcher, lambda p: p.fresh and p.report is not None and p.report.step >= STEPS)
    moment = time.time()
    until(watcher, lambda p: saved_since(p, moment))
    replace()
    second = until(
        watcher, lambda p: p.fresh and p.report is not None and p.report.job_uid != first.job.metadata.uid
    )
    assert second.report is not None
    assert second.report.step >= STEPS, "what was trained before it was replaced"
    output = ended().job.status.output

    replace()
    third = ended()
    assert third.job.metadata.uid not in {first.job.metadata.uid, second.job.metadata.uid}
    assert third.job.status.output == output
    assert third.report is not None
    assert third.report.job_uid != third.job.metadata.uid, "nobody has trained"
