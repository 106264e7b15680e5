"""How many nodes pods need: what a node has."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.api.capacity_pool import CapacityPool
from shoal.api.kube import Node
from shoal.controllers.capacitypool.needed import room_of

SPEC = {"nodeSelector": {"pool": "a"}, "limits": {"nodes": 4}, "accelerator": {"name": "T4", "count": 2}}
INF = float("inf")
SAID = {"cpu": 8.0, "nvidia.com/gpu": 2.0, "ephemeral-storage": INF, "memory": INF}


@pytest.mark.parametrize(
    ("cores", "nodes", "has"),
    [
        (8, [{"cpu": "4"}, {"cpu": "4", "nvidia.com/gpu": "1"}, {}], {"cpu": 4.0, "nvidia.com/gpu": 1.0}),
        (
            8,
            [{"cpu": "4", "memory": str(10**9 + each)} for each in range(9)],
            {"cpu": 4.0, "memory": 1e9 + 8},
        ),
        (8, [{}], SAID),
        (8, [], SAID),
        (None, [{}], {}),
    ],
    ids=["one is new", "none like another", "none says it", "no node", "nobody knows"],
)
def test_node_has_as_much_as_any_says_else_as_its_pool_does(
    cores: int | None, nodes: list[Any], has: dict[str, float]
) -> None:
    pool = CapacityPool.model_validate({"metadata": {"name": "a"}, "spec": {**SPEC, "cores": cores}})
    there = [
        Node.model_validate({"metadata": {"name": "n"}, "status": {"allocatable": each}}) for each in nodes
    ]
    assert dict(room_of(pool, there)) == has
