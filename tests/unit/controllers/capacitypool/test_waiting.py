"""When the last machine of a pool came, for those who wait for one."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from shoal.api.kube import Node, Pod
from shoal.controllers.capacitypool.waiting import last_came
from tests.unit.policy import build

MINUTE = timedelta(minutes=1)


def machine(name: str, ready: int | None) -> Node:
    """That has been Ready since so many minutes ago; None: it is not."""
    manifest = build.node_manifest(name, ready="False" if ready is None else "True")
    since = build.stamp(build.NOW - (ready or 0) * MINUTE)
    manifest["status"]["conditions"][0]["lastTransitionTime"] = since
    return Node.model_validate(manifest)


def bound(node: str, ago: int) -> Pod:
    at = build.stamp(build.NOW - ago * MINUTE)
    condition = {"type": "PodScheduled", "status": "True", "lastTransitionTime": at}
    return Pod.model_validate(build.pod_manifest(node=node, conditions=[condition]))


@pytest.mark.parametrize(
    ("ready", "pods", "some_wait", "came"),
    [
        ([9, 2], [("a", 8), ("b", 1)], True, 2),
        ([9, 2], [("a", 8)], True, 9),
        ([9, 2], [("a", 8)], False, 2),
        ([9, 2], [("a", 8), ("b", 30)], False, 9),
        ([9, None], [("a", 8)], True, 9),
        ([None, None], [], False, None),
    ],
    ids=["took one", "took none", "nobody waits", "heard again, with its pod", "not Ready", "none is"],
)
def test_a_machine_has_come_that_is_ready_and_took_a_pod(
    ready: list[int | None], pods: list[tuple[str, int]], some_wait: bool, came: int | None
) -> None:
    """Any Node object ended that its pool was Exhausted, and began all waits anew."""
    nodes = [machine(name, at) for name, at in zip("ab", ready, strict=True)]
    there = [bound(*each) for each in pods]
    found = last_came(
        nodes, lambda name: [pod for pod in there if pod.spec.node_name == name], some_wait=some_wait
    )
    expected: datetime | None = None if came is None else build.NOW - came * MINUTE
    assert found == expected
