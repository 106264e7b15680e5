"""`shoal install-key`: a rotation is begun once, and ended when nobody has the previous key."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from shoal.client.install_key import OPERATOR, REPLACED_WITHIN, retire, rotate
from shoal.errors import Refused
from tests.unit.policy.build import stamp

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
RESTARTED = NOW + timedelta(hours=1)


class Cluster:
    """The Secret and the jobs, as far as the commands read them."""

    namespace = "shoal-system"

    def __init__(self) -> None:
        self.secret: dict[str, Any] = {
            "metadata": {"resourceVersion": "7", "annotations": {"kept": "yes"}},
            "data": {"key": base64.b64encode(b"o" * 32).decode()},
        }
        self.jobs: list[dict[str, Any]] = []
        self.pods = {"shoal-a": RESTARTED, "shoal-b": RESTARTED + timedelta(minutes=1)}

    def get(self, path: str) -> dict[str, Any]:
        assert path == "/api/v1/namespaces/shoal-system/secrets/key"
        return self.secret

    def list(self, path: str, **query: str) -> list[dict[str, Any]]:
        if query == {"labelSelector": OPERATOR}:
            assert path == "/api/v1/namespaces/shoal-system/pods"
            return [
                {"metadata": {"name": name, "creationTimestamp": stamp(at)}} for name, at in self.pods.items()
            ]
        assert path == "/apis/shoal.dev/v1alpha1/trainingjobs"
        return self.jobs

    def patch(self, _path: str, body: dict[str, Any]) -> None:
        assert body["metadata"]["resourceVersion"] == self.secret["metadata"]["resourceVersion"]
        self.secret["metadata"]["annotations"] |= body["metadata"].get("annotations", {})
        merged = {**self.secret["data"], **body["data"]}
        self.secret["data"] = {name: value for name, value in merged.items() if value is not None}

    def job(self, name: str, began: datetime, **status: Any) -> None:
        meta = {
            "namespace": "team",
            "name": name,
            "creationTimestamp": stamp(began),
        }
        self.jobs.append({"metadata": meta, "status": status})

    def fields(self) -> dict[str, bytes]:
        return {name: base64.b64decode(value) for name, value in self.secret["data"].items()}


def test_rotation_keeps_the_old_key_beside_the_new_one_and_is_begun_once() -> None:
    cluster: Any = Cluster()
    assert rotate(cluster, "key", now=NOW, make=lambda size: b"n" * size) == "2"
    both = {"key": b"n" * 32, "key-id": b"2", "previous-key": b"o" * 32, "previous-key-id": b"1"}
    assert cluster.fields() == both
    with pytest.raises(Refused, match="`shoal install-key retire` ends it"):
        rotate(cluster, "key", now=NOW)
    assert cluster.fields() == both
    retire(cluster, "key")
    assert cluster.fields() == {"key": b"n" * 32, "key-id": b"2"}
    assert rotate(cluster, "key", now=NOW) == "3"


def test_previous_key_is_kept_while_a_job_may_have_it() -> None:
    cluster: Any = Cluster()
    with pytest.raises(Refused, match="no rotation is under way"):
        retire(cluster, "key")
    rotate(cluster, "key", now=NOW)
    cluster.job("done", NOW - timedelta(days=1), completionTime="2026-01-01T11:00:00Z")
    cluster.job("later", RESTARTED + timedelta(minutes=1, seconds=1) + REPLACED_WITHIN)
    cluster.job("runs", NOW - timedelta(days=1))
    cluster.job("meanwhile", RESTARTED)
    with pytest.raises(Refused, match=r"^team/meanwhile, team/runs began before"):
        retire(cluster, "key")
    assert "previous-key" in cluster.fields()
    retire(cluster, "key", force=True)
    assert "previous-key" not in cluster.fields()


def test_an_operator_that_was_not_restarted_gives_the_previous_key_still() -> None:
    cluster: Any = Cluster()
    rotate(cluster, "key", now=NOW)
    cluster.pods["shoal-b"] = NOW - timedelta(days=1)
    with pytest.raises(
        Refused,
        match=r"^shoal-b began before the rotation .* rollout restart deployment -l app",
    ):
        retire(cluster, "key")
    assert "previous-key" in cluster.fields()


def test_without_a_time_every_job_that_runs_counts() -> None:
    """A Secret that another system rotates has no annotation."""
    cluster: Any = Cluster()
    rotate(cluster, "key", now=NOW)
    del cluster.secret["metadata"]["annotations"]["shoal.dev/install-key-rotated"]
    cluster.job("later", NOW + timedelta(days=1))
    with pytest.raises(Refused, match="team/later"):
        retire(cluster, "key")
