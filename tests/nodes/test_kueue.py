"""Training through a preemption by the real Kueue, with real TensorFlow on real nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from dev.cluster.local import LocalCluster
from dev.commands import command
from dev.demo.local import Local
from dev.demo.losses import MANIFEST
from dev.demo.tell import VALUES, install
from dev.demo.watch import Picture, Watcher
from tests.control_plane import kueue
from tests.nodes.test_training import JOB, everyone_works, until

EPOCHS = 40
WORKERS = 3
NEVER_SECONDS = 3600
"""Between snapshots: the only one that there can be is that of the preemption."""
STEPS = 200
"""Enough to be missed."""
QUEUES = f"""
apiVersion: kueue.x-k8s.io/v1beta2
kind: ResourceFlavor
metadata: {{name: any}}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: ClusterQueue
metadata: {{name: team}}
spec:
  namespaceSelector: {{}}
  preemption: {{withinClusterQueue: LowerPriority}}
  resourceGroups:
    - coveredResources: [cpu, memory, pods]
      flavors:
        - name: any
          resources:
            - {{name: cpu, nominalQuota: 1k}}
            - {{name: memory, nominalQuota: 1Ti}}
            - {{name: pods, nominalQuota: {1 + WORKERS}}}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: LocalQueue
metadata: {{name: team}}
spec: {{clusterQueue: team}}
---
apiVersion: scheduling.k8s.io/v1
kind: PriorityClass
metadata: {{name: high}}
value: 100
preemptionPolicy: Never
"""
RIVAL: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "rival", "labels": {"kueue.x-k8s.io/queue-name": "team"}},
    "spec": {
        "priorityClassName": "high",
        "nodeSelector": {"there-is": "no-such-node"},  # it takes quota, and no more
        "containers": [{"name": "c", "image": "x"}],
    },
}


@pytest.fixture
def queue(cluster: LocalCluster, namespace: str) -> Iterator[None]:
    """Kueue, with room for the job and nothing else."""
    with kueue.running(cluster.plane, [namespace]):
        cluster.plane.kubectl("-n", namespace, "apply", "-f", "-", stdin=QUEUES)
        yield


@pytest.fixture
def queueing(cluster: LocalCluster, queue: None) -> Iterator[Local]:
    """The operator, installed with Helm, beside Kueue."""
    backend = Local(cluster.name)
    install(backend, VALUES | {"kueue.enabled": "true"})
    yield backend
    command("helm", "uninstall", "shoal", "--namespace", "shoal-system", env=backend.env)


def manifest() -> str:
    """The job of the demo in the queue as a whole, and its volume."""
    documents = list(yaml.safe_load_all(MANIFEST.read_text()))
    spec = documents[0]["spec"]
    spec["runPolicy"]["schedulingPolicy"] = {"queue": "team", "queueAs": "Workload"}
    spec["training"]["stopAfter"] = {"epochs": EPOCHS}
    spec["parameterServers"]["snapshot"]["everySeconds"] = NEVER_SECONDS
    spec["workers"] |= {"replicas": WORKERS, "minReplicas": WORKERS}
    return yaml.safe_dump_all(documents)


def waits(picture: Picture) -> bool:
    """Whether it has no pods, for want of quota."""
    return not picture.pods and picture.job.status.reason == "Queued"


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_a_preempted_job_goes_on_where_it_was_and_trains_each_range_once(
    cluster: LocalCluster, queueing: Local, namespace: str
) -> None:
    def kubectl(*words: str, stdin: str | None = None) -> str:
        return cluster.plane.kubectl("-n", namespace, *words, stdin=stdin)

    kubectl("apply", "-f", "-", stdin=manifest())
    watcher = Watcher(queueing, namespace, JOB)
    until(watcher, lambda p: everyone_works(p) and p.report is not None and p.report.step >= STEPS)

    kubectl("create", "-f", "-", stdin=json.dumps(RIVAL))
    suspended = until(watcher, waits)
    before = suspended.report
    assert before is not None
    assert before.step >= STEPS
    kubectl("delete", "pod", "rival", "--grace-period=0", "--force")

    resumed = until(watcher, lambda p: p.fresh and bool(p.role("ps"))).report
    assert resumed is not None
    assert resumed.step >= before.step, "what was trained before it was preempted"
    ended = until(watcher, lambda p: p.job.status.finished)
    status, evidence = ended.job.status, ended.evidence
    assert (status.phase, status.restarts.failures, status.restarts.disruptions) == ("Succeeded", 0, 0)
    assert (status.training.restarts_from_nothing, status.data.repeated, status.data.lost) == (0, 0, 0)
    assert evidence is not None
    assert (evidence.ranges.never, evidence.ranges.repeated, evidence.ranges.partial) == (0, 0, 0)
    assert (status.data.done, evidence.ranges.once % EPOCHS) == (status.data.total, 0)
    events = kubectl("get", "events", "-o", "jsonpath={.items[*].reason}").split()
    assert {"Evicted", "Resumed"} <= set(events)
