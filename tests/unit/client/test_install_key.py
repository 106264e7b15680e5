"""`shoal install-key`: a rotation is begun once, and ended when nobody has the previous key."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from shoal.client.install_key import OPERATOR, retire, rotate
from shoal.errors import NotFound, Refused
from shoal_trainer.contract import job_key
from tests.unit.policy.build import stamp

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
RESTARTED = NOW + timedelta(hours=1)
OLD, NEW = b"o" * 32, b"n" * 32


def encoded(value: bytes) -> str:
    return base64.b64encode(value).decode()


class Cluster:
    """The Secrets, the jobs and the operator, as far as the commands read them."""

    namespace = "shoal-system"

    def __init__(self, scope: str = "") -> None:
        self.secret: dict[str, Any] = {
            "metadata": {"resourceVersion": "7", "managedFields": [wrote("operator", NOW, "key")]},
            "data": {"key": encoded(OLD)},
        }
        self.jobs: list[dict[str, Any]] = []
        self.secrets_of_jobs: dict[str, dict[str, Any]] = {}
        self.within = f"/namespaces/{scope}" if scope else ""
        environment = [{"name": "SHOAL_NAMESPACE", "value": scope}] if scope else []
        container = {"name": "operator", "env": environment}
        self.deployments = [{"spec": {"template": {"spec": {"containers": [container]}}}}]
        self.pods = {"shoal-a": (RESTARTED, "Running"), "shoal-b": (RESTARTED + timedelta(days=7), "Running")}

    def get(self, path: str) -> dict[str, Any]:
        if path == "/api/v1/namespaces/shoal-system/secrets/key":
            return self.secret
        if path not in self.secrets_of_jobs:
            raise NotFound(path)
        return self.secrets_of_jobs[path]

    def list(self, path: str, **query: str) -> list[dict[str, Any]]:
        if query == {"labelSelector": OPERATOR}:
            if path == "/apis/apps/v1/namespaces/shoal-system/deployments":
                return self.deployments
            assert path == "/api/v1/namespaces/shoal-system/pods"
            return [
                {"metadata": {"name": name, "creationTimestamp": stamp(at)}, "status": {"phase": phase}}
                for name, (at, phase) in self.pods.items()
            ]
        assert (path, query) == (f"/apis/shoal.dev/v1alpha1{self.within}/trainingjobs", {})
        return self.jobs

    def patch(self, _path: str, body: dict[str, Any]) -> None:
        assert body["metadata"] == {"resourceVersion": self.secret["metadata"]["resourceVersion"]}
        self.secret["metadata"]["managedFields"].append(wrote("shoal", NOW, *body["data"]))
        merged = {**self.secret["data"], **body["data"]}
        self.secret["data"] = {name: value for name, value in merged.items() if value is not None}

    def job(self, name: str, key: bytes = b"", namespace: str = "team", **status: Any) -> None:
        """A job, and its Secret if it has a key."""
        meta = {"namespace": namespace, "name": name, "uid": f"uid-of-{name}"}
        self.jobs.append({"metadata": meta, "status": status})
        if key:
            path = f"/api/v1/namespaces/{namespace}/secrets/{name}-shoal-{meta['uid'][:8]}"
            self.secrets_of_jobs[path] = {"data": {"key": encoded(key)}}

    def fields(self) -> dict[str, bytes]:
        return {name: base64.b64decode(value) for name, value in self.secret["data"].items()}


def wrote(manager: str, at: datetime, *names: str) -> dict[str, Any]:
    """Who wrote which fields of the Secret, as the API server says."""
    fields = {"f:data": {".": {}, **{f"f:{name}": {} for name in names}}}
    return {"manager": manager, "operation": "Update", "time": stamp(at), "fieldsV1": fields}


def rotated(scope: str = "") -> Any:
    """A cluster after a rotation."""
    cluster: Any = Cluster(scope)
    rotate(cluster, "key", make=lambda size: b"n" * size)
    return cluster


def of(name: str, install_key: bytes = OLD, key_id: str = "1") -> bytes:
    """The key of a job."""
    return job_key(install_key, f"uid-of-{name}", key_id)


def test_rotation_keeps_the_old_key_beside_the_new_one_and_is_begun_once() -> None:
    cluster: Any = Cluster()
    assert rotate(cluster, "key", make=lambda size: b"n" * size) == "2"
    both = {"key": NEW, "key-id": b"2", "previous-key": OLD, "previous-key-id": b"1"}
    assert cluster.fields() == both
    with pytest.raises(Refused, match="`shoal install-key retire` ends it"):
        rotate(cluster, "key")
    assert cluster.fields() == both
    retire(cluster, "key")
    assert cluster.fields() == {"key": NEW, "key-id": b"2"}
    assert rotate(cluster, "key") == "3"


def test_previous_key_is_kept_while_a_job_has_it_whenever_that_began() -> None:
    """Each node that was drained made all jobs since the rotation count, as long as one pod of the operator was new."""
    with pytest.raises(Refused, match="no rotation is under way"):
        retire(Cluster(), "key")  # type: ignore[arg-type]
    cluster = rotated()
    cluster.job("done", of("done"), completionTime="2026-01-01T11:00:00Z")
    cluster.job("later", of("later", NEW, "2"))
    cluster.job("begins")
    cluster.job("runs", of("runs"))
    cluster.job("meanwhile", of("meanwhile"))
    with pytest.raises(Refused, match=r"^team/meanwhile, team/runs have the previous key"):
        retire(cluster, "key")
    assert "previous-key" in cluster.fields()
    retire(cluster, "key", force=True)
    assert "previous-key" not in cluster.fields()


def test_jobs_of_another_operator_have_another_key() -> None:
    cluster = rotated()
    cluster.job("theirs", of("theirs", b"t" * 32), namespace="team-b")
    retire(cluster, "key")


def test_no_other_secret_says_which_key_a_job_has() -> None:
    """Whoever may make one in any namespace may give it the label of any job."""
    cluster = rotated()
    cluster.job("runs", of("runs"))
    theirs = {"namespace": "zz", "labels": {"shoal.dev/job-uid": "uid-of-runs"}}
    cluster.secrets_of_jobs["/api/v1/namespaces/zz/secrets/theirs"] = {
        "metadata": theirs,
        "data": {"key": "eA=="},
    }
    with pytest.raises(Refused, match=r"^team/runs have"):
        retire(cluster, "key")


def test_of_an_operator_for_one_namespace_only_that_is_read() -> None:
    cluster = rotated("team")
    cluster.job("runs", of("runs"))
    with pytest.raises(Refused, match=r"^team/runs have"):
        retire(cluster, "key")


@pytest.mark.parametrize("since", [timedelta(days=1), timedelta(0)])
def test_an_operator_that_was_not_restarted_gives_the_previous_key_still(since: timedelta) -> None:
    cluster = rotated()
    cluster.pods["shoal-b"] = NOW - since, "Running"
    with pytest.raises(
        Refused,
        match=r"^shoal-b began before the rotation .* rollout restart deployment -l app",
    ):
        retire(cluster, "key")
    assert "previous-key" in cluster.fields()


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_a_pod_of_the_operator_that_has_ended_gives_no_key(phase: str) -> None:
    """No restart removes an evicted one: Kubernetes keeps thousands."""
    cluster = rotated()
    cluster.pods["evicted"] = NOW - timedelta(days=3), phase
    retire(cluster, "key")


def test_where_nothing_says_when_the_key_came_whoever_restarted_the_operator_does() -> None:
    """All of its pods were said to be of before, however new they were."""
    cluster = rotated()
    cluster.secret["metadata"]["managedFields"] = [{}]  # as a proxy or a backup may leave it
    cluster.job("runs", of("runs"))
    with pytest.raises(Refused, match=r"^team/runs have the previous key"):
        retire(cluster, "key")
    cluster.jobs.clear()
    with pytest.raises(Refused, match=r"managedFields.* rollout restart .*; else use --force"):
        retire(cluster, "key")
    retire(cluster, "key", force=True)


def test_an_operator_of_between_two_steps_of_a_rotation_gives_the_previous_key() -> None:
    """Where another system owns the Secret, `previous-key` may be there before the new key is."""
    cluster = rotated()
    cluster.secret["metadata"]["managedFields"] = [
        wrote("first", NOW, "previous-key", "previous-key-id"),
        wrote("second", RESTARTED + timedelta(hours=1), "key", "key-id"),
    ]
    with pytest.raises(Refused, match=r"^shoal-a began before"):
        retire(cluster, "key")
