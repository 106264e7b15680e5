"""What a pool says of itself that is wrong, compared with its nodes."""

from __future__ import annotations

from datetime import timedelta

import pytest

from shoal.api.capacity_pool import CapacityPool
from shoal.api.kube import Node
from shoal.controllers.capacitypool.problems import problem_of
from tests.unit.policy import build

LACKS = {"type": "Ready", "status": "False", "reason": "NodesLackAccelerator", "message": ""}


def pool(told: int | None = None, *, generation: int = 1, count: int = 2, limit: int = 4) -> CapacityPool:
    """Of two GPUs a node; `told` so many seconds ago that they lack them."""
    spec = {
        "accelerator": {"name": "T4", "count": count},
        "nodeSelector": {"pool": "a"},
        "limits": {"nodes": limit},
        "price": {"perHour": 1},
        "startupSeconds": 60,
    }
    at = build.stamp(build.NOW - timedelta(seconds=told or 0))
    conditions = [{**LACKS, "lastTransitionTime": at}] if told is not None else []
    status = {"observedGeneration": 1, "conditions": conditions}
    return CapacityPool.model_validate(
        {"metadata": {"name": "a", "generation": generation}, "spec": spec, "status": status}
    )


def node(ready: int | None, has: dict[str, str]) -> Node:
    """Ready since so many seconds ago."""
    manifest = build.node_manifest(ready="False" if ready is None else "True")
    at = build.stamp(build.NOW - timedelta(seconds=ready or 0))
    manifest["status"]["conditions"][0]["lastTransitionTime"] = at
    manifest["status"]["allocatable"] = has
    return Node.model_validate(manifest)


CPU, GPU = {"cpu": "8"}, "nvidia.com/gpu"


@pytest.mark.parametrize(
    ("of", "nodes", "lack"),
    [
        (pool(), [(121, CPU), (125, CPU)], True),
        (pool(), [(119, CPU), (125, CPU)], False),
        (pool(), [(121, {**CPU, GPU: "1"}), (125, CPU)], True),
        (pool(), [(121, CPU), (5, {**CPU, GPU: "2"})], False),
        (pool(), [(121, {**CPU, "nvidia.com/mig-1g.5gb": "7"})], False),
        (pool(), [(None, CPU)], False),
        (pool(), [(121, {})], False),
        (pool(), [], False),
        (pool(told=60), [(5, CPU)], True),
        (pool(told=60), [], True),
        (pool(told=3600), [], False),
        (pool(told=60, generation=2, count=1), [], False),
    ],
    ids=[
        *(
            "none",
            "none yet",
            "fewer",
            "one has them",
            "parts of GPUs",
            "not Ready",
            "nothing said",
            "no node",
        ),
        *("told, and new nodes", "told, and no node", "told long ago", "told of another spec"),
    ],
)
def test_nodes_that_lack_what_their_pool_says_are_told(
    of: CapacityPool, nodes: list[tuple[int | None, dict[str, str]]], lack: bool
) -> None:
    there = [node(*each) for each in nodes]
    found = problem_of(of, there, build.NOW, trains=False)
    assert (found is not None and found.reason == "NodesLackAccelerator") == lack
    assert problem_of(of, there, build.NOW, trains=True) is None, "a worker runs there all the same"


@pytest.mark.parametrize(
    ("limit", "nodes", "waits", "lack"),
    [
        (4, [86400], None, False),
        (4, [86400], 119, False),
        (4, [86400], 121, True),
        (4, [86400, 5], 121, False),
        (4, [86400, None], None, False),
        (1, [121], None, True),
        (1, [119], None, False),
    ],
    ids=[
        *("one failed", "a worker asked for another", "none came", "another has come just now"),
        *("another is to come", "all that it may have", "not yet"),
    ],
)
def test_one_node_that_failed_does_not_switch_a_pool_off_that_may_have_others(
    limit: int, nodes: list[int | None], waits: int | None, lack: bool
) -> None:
    """Its one GPU failed after a day: the pool got no other node, and jobs went elsewhere, until a person came."""
    there = [node(ready, {**CPU, GPU: "1"}) for ready in nodes]
    since = build.NOW - timedelta(seconds=waits) if waits is not None else None
    found = problem_of(pool(limit=limit), there, build.NOW, trains=False, waits_since=since)
    assert (found is not None and found.reason == "NodesLackAccelerator") == lack
