"""The witness of the chaos on a real control plane sees each rule that is broken, and nothing else."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest

from dev.kube import Kube
from tests.control_plane.witness import Witness, utc_now

Json = dict[str, Any]
JOB_UID = "job-uid"


class Scene:
    """What the API server showed, fed to a witness."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "audit.log"
        self.log.write_text("")
        self.witness = Witness(Kube.__new__(Kube), self.log, {"team"}, "team", {"a", "b"}, {"digits": 2})
        self.node("True")
        self.job()
        self.lease("a")

    def node(self, ready: str) -> None:
        status = {"conditions": [{"type": "Ready", "status": ready}]}
        self.witness.see_node("MODIFIED", {"metadata": {"name": "safe-1"}, "spec": {}, "status": status})

    def job(self, disruptions: int = 0, **spec: Any) -> None:
        meta = {"uid": JOB_UID, "namespace": "team", "name": "digits"}
        status = {"restarts": {"disruptions": disruptions}}
        self.witness.see_job("MODIFIED", {"metadata": meta, "spec": spec, "status": status})

    def lease(self, holder: str, ago: float = 60.0) -> None:
        since = utc_now() - dt.timedelta(seconds=ago)
        spec = {"holderIdentity": holder, "acquireTime": since.isoformat()}
        self.witness.see_lease("MODIFIED", {"metadata": {"name": "shoal"}, "spec": spec})

    def pod(
        self, incarnation: int = 0, uid: str = "", role: str = "ps", phase: str = "Running", **more: Any
    ) -> None:
        name = f"digits-{role}-0-{incarnation}"
        labels = {"shoal.dev/job": "digits", "shoal.dev/role": role, "shoal.dev/index": "0"}
        meta = {
            "uid": uid or name,
            "namespace": "team",
            "name": name,
            "labels": labels,
            "ownerReferences": [{"uid": JOB_UID}],
            "creationTimestamp": "2026-01-01T00:00:00Z",
            **more,
        }
        pod = {"metadata": meta, "spec": {"nodeName": "safe-1"}, "status": {"phase": phase}}
        self.witness.see_pod("ADDED", pod)

    def wrote(self, agent: str, verb: str = "delete", name: str = "digits-ps-0-0") -> None:
        now = utc_now().isoformat()
        line = {
            "verb": verb,
            "objectRef": {"resource": "pods", "namespace": "team", "name": name},
            "user": {"username": "shoal"},
            "userAgent": agent,
            "responseStatus": {"code": 200},
            "requestReceivedTimestamp": now,
            "stageTimestamp": now,
        }
        with self.log.open("a") as log:
            log.write(json.dumps(line) + "\n")


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_nothing_is_broken_in_peace(scene: Scene) -> None:
    scene.pod()
    scene.job(disruptions=1)
    scene.wrote("a", verb="create", name="digits-worker-0-1")
    scene.wrote("somebody-else")
    assert scene.witness.judge() == []


def test_a_write_of_a_replica_that_does_not_lead(scene: Scene) -> None:
    scene.wrote("b", verb="create", name="digits-worker-0-1")
    (broken,) = scene.witness.judge()
    assert broken.startswith("b sent create pods digits-worker-0-1")
    assert broken.endswith("when the Lease was held by a")


def test_a_write_after_another_replica_took_the_lease(scene: Scene) -> None:
    scene.lease("b", ago=1.0)
    scene.wrote("a", verb="create", name="digits-worker-0-1")
    assert "when the Lease was held by b" in scene.witness.judge()[0]


@pytest.mark.parametrize("ready", ["True", "Unknown"])
def test_a_server_that_works_is_deleted(scene: Scene, ready: str) -> None:
    """Also where its node is not heard: it works on."""
    scene.pod()
    scene.node(ready)
    scene.wrote("a")
    scene.pod(deletionTimestamp="now")
    assert "deleted digits-ps-0-0, which worked" in scene.witness.judge()[0]


def test_a_server_that_nobody_wants_has_ended_or_never_ran_may_be_deleted(scene: Scene) -> None:
    scene.pod(0)
    scene.pod(0, phase="Failed")
    scene.wrote("a")
    scene.pod(1, phase="Pending")
    scene.wrote("a", name="digits-ps-0-1")
    scene.pod(1, phase="Failed")
    scene.pod(2)
    scene.job(suspend=True)
    scene.wrote("a", name="digits-ps-0-2")
    assert scene.witness.judge() == []


def test_the_pod_of_a_later_job_of_the_same_name_is_another_one(scene: Scene) -> None:
    scene.pod()
    scene.job(suspend=True)
    scene.wrote("a")
    later = (utc_now() + dt.timedelta(seconds=5)).isoformat()
    scene.pod(uid="later", ownerReferences=[{"uid": "later-job"}], creationTimestamp=later)
    assert scene.witness.judge() == []


def test_a_counter_that_falls(scene: Scene) -> None:
    scene.job(disruptions=2)
    scene.job(disruptions=1)
    assert scene.witness.judge() == ["team/digits: disruptions fell from 2 to 1"]


def test_two_servers_of_a_shard(scene: Scene) -> None:
    scene.pod(0)
    scene.pod(1)
    assert "servers of one shard beside each other" in scene.witness.judge()[0]


def test_more_workers_than_wanted_and_their_surge(scene: Scene) -> None:
    for incarnation in range(2):
        scene.pod(incarnation, role="worker")
    assert scene.witness.judge() == []
    scene.pod(2, role="worker")
    assert scene.witness.judge()[0].startswith("more than 2 workers")


def test_an_incarnation_that_is_used_twice(scene: Scene) -> None:
    scene.pod(0, uid="first")
    scene.witness.pods.clear()
    scene.pod(0, uid="second")
    assert scene.witness.judge() == ["pod digits-ps-0-0 of one job was created twice"]


def test_a_lease_that_is_taken_is_told_from_one_that_was_given_back(scene: Scene) -> None:
    for holder in ("", "b", "b", ""):
        scene.lease(holder)
    assert (scene.witness.takeovers, scene.witness.holders) == (0, {"a", "b"})
    scene.lease("a")
    scene.lease("b")
    assert scene.witness.takeovers == 1


def test_a_node_that_was_not_heard_explains_nothing_once_the_world_was_as_specified(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.node("Unknown")
    scene.witness.settle()
    assert scene.witness.troubled("safe-1")
    scene.node("True")
    assert scene.witness.troubled("safe-1")
    scene.witness.settle()
    later = utc_now() + dt.timedelta(seconds=11)
    monkeypatch.setattr("tests.control_plane.witness.utc_now", lambda: later)
    assert not scene.witness.troubled("safe-1")
