"""A pod whose volume names what does not exist, on a real kubelet, which says so in events of the pod only."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from dev.cluster.local import LocalCluster
from dev.demo.local import Local
from dev.demo.losses import MANIFEST
from shoal.policy.tell.not_starting import VOLUMES_ARE_LATE

JOB, MISSING = "digits", "digits-code"


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_a_missing_config_map_is_told_and_made(cluster: LocalCluster, backend: Local, namespace: str) -> None:
    documents = list(yaml.safe_load_all(MANIFEST.read_text()))
    spec = documents[0]["spec"]
    spec["training"] |= {"code": {"configMap": MISSING}, "stopAfter": {"epochs": 500}}
    spec["workers"] |= {"replicas": 1}
    kubectl = cluster.plane.kubectl
    began = time.monotonic()
    kubectl("-n", namespace, "apply", "-f", "-", stdin=yaml.safe_dump_all(documents))

    def job() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(kubectl("-n", namespace, "get", "etj", JOB, "-o", "json"))
        return found

    def until(reached: Callable[[dict[str, Any]], bool], seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while not reached(status := job().get("status") or {}):
            assert time.monotonic() < deadline, json.dumps(status, indent=1)
            time.sleep(0.5)
        return status

    def degraded(status: dict[str, Any]) -> dict[str, str]:
        found = (each for each in status.get("conditions") or () if each["type"] == "Degraded")
        return next(found, {"status": "", "reason": ""})

    told = degraded(until(lambda status: degraded(status)["status"] == "True", 600))
    whole_second = 1  # of the API server: a pod's creation is told as up to so much earlier than it was
    assert time.monotonic() - began >= VOLUMES_ARE_LATE.total_seconds() - whole_second
    assert told["reason"] == "NotStarting"
    assert f"ConfigMap {MISSING}" in told["message"]
    assert "image" not in told["message"]  # this kubelet tells the two apart

    kubectl("-n", namespace, "create", "configmap", MISSING, "--from-literal=other.py=")
    status = until(lambda status: status.get("phase") == "Running", 600)
    assert degraded(status)["status"] == "False"
    kubectl("-n", namespace, "delete", "etj", JOB)
