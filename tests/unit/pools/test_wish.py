"""Which size a pool is to have, and whether the recommendation can be relied on."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from shoal.api.base import Condition
from shoal.api.capacity_pool import CapacityPool
from shoal.api.capacity_pool_status import Recommendation, Sized, UsageSums
from shoal.pools.rules import Pace, Target, decide
from shoal.pools.subject import subject_of
from shoal.pools.wish import wish_of

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
TARGET = {"mode": "Scale", "target": {"apiVersion": "a/v1", "kind": "Fleet", "name": "blue"}}
READY = {"type": "Ready", "status": "True", "lastTransitionTime": NOW, "reason": "Valid"}
BUFFER = {"mode": "Buffer", "buffer": {"namespace": "buffers", "requests": {"cpu": "7"}}}


def pool(*said: float, **scaling: Any) -> CapacityPool:
    """`said`: how many minutes ago each operator said something."""
    shares = [
        {"operator": f"{n}/shoal", "at": NOW - timedelta(minutes=ago), "serving": 1}
        for n, ago in enumerate(said)
    ]
    return CapacityPool.model_validate(
        {
            "metadata": {"name": "spot", "uid": "p", "generation": 1},
            "spec": {"limits": {"nodes": 8}, "scaling": scaling or TARGET},
            "status": {
                "observedGeneration": 1,
                "used": 3,
                "waiting": 1,
                "recommended": {"nodes": 5},
                "shares": shares,
                "conditions": [READY],
            },
        }
    )


@pytest.mark.parametrize(
    ("said", "stale"),
    [
        ((0,), False),
        ((14.9,), False),
        ((15,), True),
        ((400, 2), False),
        ((400, 15), True),
        ((-14.9,), False),
        ((-15,), True),  # its clock was ahead, and nobody knows for how long it has not run
    ],
)
def test_a_recommendation_is_followed_while_one_operator_runs(said: tuple[float, ...], stale: bool) -> None:
    """Whichever it is: with one for each namespace, the death of a certain one froze all pools."""
    of = pool(*said)
    subject = subject_of(of.spec.scaling)
    assert subject is not None
    problem = wish_of(of, subject, NOW).problem
    assert (problem is not None and problem.reason == "Stale") == stale


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ({"observed_generation": 0}, "Stale"),
        ({"conditions": (Condition.model_validate({**READY, "status": "False"}),)}, "PoolNotReady"),
        ({"conditions": (Condition.model_validate({**READY, "status": "Unknown"}),)}, "PoolNotReady"),
        ({"conditions": ()}, "PoolNotReady"),
    ],
    ids=["of an earlier spec", "not ready", "unknown", "never looked at"],
)
def test_a_recommendation_is_not_followed_before_the_pool_is_read_and_while_it_is_not_ready(
    status: dict[str, Any], reason: str
) -> None:
    of = pool(0)
    of = of.model_copy(update={"status": of.status.model_copy(update=status)})
    subject = subject_of(of.spec.scaling)
    assert subject is not None
    problem = wish_of(of, subject, NOW).problem
    assert problem is not None
    assert problem.reason == reason


@pytest.mark.parametrize(
    ("scaling", "nodes", "in_use"), [(TARGET, 5, 2), ({**TARGET, "shrink": "WhenIdle"}, 5, 3), (BUFFER, 1, 0)]
)
def test_nodes_of_servers_are_kept_and_those_of_workers_if_the_pool_says_so(
    scaling: dict[str, Any], nodes: int, in_use: int
) -> None:
    of = pool(0, 1, **scaling)
    subject = subject_of(of.spec.scaling)
    assert subject is not None
    wish = wish_of(of, subject, NOW)
    assert (wish.nodes, wish.in_use, wish.problem) == (nodes, in_use, None)


@pytest.mark.parametrize(
    ("scaling", "used", "node_seconds", "least"),
    [
        (TARGET, 0, "0", None),
        (TARGET, 1, "0", 0),
        (TARGET, 0, "7.5", 0),
        ({**TARGET, "minNodes": 0}, 0, "0", 0),
        ({**TARGET, "minNodes": 3}, 1, "9", 3),
        (BUFFER, 0, "0", 0),
        (TARGET, 0, "often", None),  # anyone may have edited it
    ],
)
def test_the_least_is_what_the_pool_says_or_what_was_found_until_a_job_has_used_it(
    scaling: dict[str, Any], used: int, node_seconds: str, least: int | None
) -> None:
    of = pool(0, **scaling)
    sums = UsageSums(node_seconds=node_seconds)
    of = of.model_copy(update={"status": of.status.model_copy(update={"used": used, "sums": sums})})
    subject = subject_of(of.spec.scaling)
    assert subject is not None
    assert wish_of(of, subject, NOW).least == least


@pytest.mark.parametrize(
    ("there", "sizes", "reason"),
    [(8, [8, 5], "Resizing"), (5, [5, 5], "AsRecommended"), (1, [1, 1], "PoolNotReady")],
    ids=["idle ones go", "as many", "no more come"],
)
def test_a_pool_whose_nodes_lack_their_accelerator_shrinks_and_does_not_grow(
    there: int, sizes: list[int], reason: str
) -> None:
    """Its broken nodes stayed, and were paid for, until a person came, though jobs had gone elsewhere."""
    of = pool(0, **TARGET, minNodes=0)
    lacks = Condition.model_validate({**READY, "status": "False", "reason": "NodesLackAccelerator"})
    of = of.model_copy(update={"status": of.status.model_copy(update={"conditions": (lacks,)})})
    subject = subject_of(of.spec.scaling)
    assert subject is not None
    wish, memory = wish_of(of, subject, NOW), Sized(original_nodes=there, nodes=there)
    target, pace, seen = Target(there, empty_first=True), Pace(), list[int]()
    for at in (NOW, NOW + pace.shrink_after):
        found = decide(wish, memory, target, at, pace)
        assert found.memory is not None
        memory = found.memory
        seen.append(there if found.resize is None else found.resize)
    assert (seen, found.why.reason) == (sizes, reason)


@pytest.mark.parametrize(("coming", "units"), [(None, 0), (1, 2), (0, 3)])
def test_a_buffer_is_beside_the_nodes_that_pods_wait_for_and_not_beside_the_pods(
    coming: int | None, units: int
) -> None:
    """Five workers that were to share one node took five nodes from the buffer."""
    of = pool(0, **BUFFER)
    status = of.status.model_copy(
        update={"recommended": Recommendation(nodes=4), "used": 1, "waiting": 5, "waiting_nodes": coming}
    )
    subject = subject_of(of.spec.scaling)
    assert subject is not None
    assert wish_of(of.model_copy(update={"status": status}), subject, NOW).nodes == units
