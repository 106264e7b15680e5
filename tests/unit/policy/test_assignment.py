"""Workers of a job without a plan find their homes, and stay there: nobody goes to and fro."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dev.night import examples
from shoal.policy.actions import Action, CreatePod
from shoal.policy.plan import plan
from tests.unit.policy.pools import EXHAUSTED, FALLBACK, Pools, pool


def spot_and_on_demand(nodes: dict[str, int], status: Any = None, **workers: Any) -> Pools:
    """`status`: of the on-demand pool."""
    return Pools(pool("a"), pool("od", "OnDemand", status=status or {}), nodes=nodes, **workers)


def lose_node(world: Pools, node: str) -> None:
    """The node is gone, and its pods with it, as the API server says."""
    for name in [name for name, each in world.pods.items() if each["spec"].get("nodeName") == node]:
        world.vanish(name)
        world.asked.add(name)
    del world.nodes[node]
    world.asked_nodes.add(node)


def wait(world: Pools, seconds: float, step: float = 30.0) -> Counter[str]:
    """Time passes, and the operator looks. Returns what was told, by reason."""
    told = Counter[str]()
    for _ in range(int(seconds / step)):
        told.update(each.reason for each in world.reconcile().events)
        world.tick(step)
    return told


@pytest.mark.parametrize("hours", [0, 1])
def test_a_worker_of_an_old_job_falls_back_and_stays_until_it_is_time_to_return(hours: int) -> None:
    """After `returnAfterSeconds` it was sent back to spot before its on-demand node had come, for ever."""
    world = spot_and_on_demand({"a": 2, "od": 4}, replicas=2, fallback=FALLBACK).settled()
    world.now += timedelta(hours=hours)
    lose_node(world, "a-1")
    told = wait(world, 400)
    assert told["FellBackToOnDemand"] == 1
    assert world.by_pool() == {"a": 1, "od": 1}
    number = len(world.created)
    wait(world, 1500)
    assert len(world.created) == number, "it tries to return before returnAfterSeconds have passed"
    world.add("a-1", "a")
    assert wait(world, 600)["ReturnedToSpot"] == 1
    assert world.by_pool() == {"a": 2}


def recorded_alone(world: Pools, cause: str) -> list[Action]:
    """What was to be done as a worker was recorded with this cause, and nothing of it was."""
    for _ in range(30):
        made = plan(world.observation())
        if any(slot.cause == cause for slot in made.status.slots):
            world.status = made.status.model_dump(mode="json", by_alias=True, exclude_none=True)
            return list(made.actions)
        world.reconcile()
        world.tick(30)
    pytest.fail(f"none is {cause}")


def taken_up(world: Pools, rest: str) -> None:
    """The nodes of pool a that are left are others', or there seem to be none: new workers have no home there."""
    world.pools |= {"a": pool("a", status=EXHAUSTED)} if rest == "is exhausted" else {}
    world.elsewhere = {"a": 10} if rest == "is others'" else {}


RESTS = ["is left", "is exhausted", "is others'"]


@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("phase", ["Pending", "Running"])
@pytest.mark.parametrize("successor", ["is to be made", "waits", "runs"])
def test_a_worker_that_got_its_spot_node_as_it_fell_back_stays_unless_its_successor_runs(
    successor: str, phase: str, rest: str
) -> None:
    """While it pulled its image it was deleted, and its node stood idle beside one on demand. Also in a pool that is
    exhausted, as it is after so long a wait: there it had no home any more."""
    world = spot_and_on_demand({"a": 0, "od": 0}, replicas=1, fallback=FALLBACK).settled()
    [first] = (name for name in world.pods if "-worker-" in name)
    actions = recorded_alone(world, "FellBack")
    if successor != "is to be made":
        for action in actions:
            if isinstance(action, CreatePod):
                world._apply(action)
    taken_up(world, rest)
    world.add("a-0", "a")
    world.pods[first]["spec"]["nodeName"] = "a-0"
    world.pods[first]["status"]["phase"] = phase
    if successor == "runs":
        world.add("od-0", "od")
        [second] = (name for name in world.pods if "-worker-" in name and name != first)
        world.pods[second]["spec"]["nodeName"] = "od-0"
        world.pods[second]["status"]["phase"] = "Running"
    world.settle()
    world.add("od-0", "od")
    world.settle()
    assert world.by_pool() == {"od" if successor == "runs" else "a": 1}
    assert (first in world.deleted) is (successor == "runs")


@pytest.mark.parametrize("rest", RESTS)
def test_a_worker_at_work_stays_in_its_pool_though_it_was_recorded_as_outdated_while_it_was_seen_to_wait(
    rest: str,
) -> None:
    """It moved to an on-demand node."""
    world = spot_and_on_demand({"a": 0, "od": 1}, replicas=1).settled()
    [first] = (name for name in world.pods if "-worker-" in name)
    world.manifest["spec"]["workers"]["template"] = {"metadata": {"labels": {"x": "y"}}}
    world.manifest["metadata"]["generation"] = 2
    recorded_alone(world, "Outdated")
    taken_up(world, rest)
    world.add("a-0", "a")
    world.pods[first]["spec"]["nodeName"] = "a-0"
    world.pods[first]["status"]["phase"] = "Running"
    world.settle()
    assert (world.by_pool(), world.deleted) == ({"a": 1}, [])


def test_no_worker_returns_that_does_not_run_yet() -> None:
    world = spot_and_on_demand({"a": 2, "od": 0}, replicas=2, fallback=FALLBACK).settled()
    world.now += timedelta(hours=1)
    lose_node(world, "a-1")
    wait(world, 3600)
    assert len([name for name in world.created if "-worker-1-" in name]) == 3
    world.add("od-0", "od")
    wait(world, 60)
    assert world.by_pool() == {"a": 1, "od": 1}


def test_no_worker_returns_while_another_one_waits_for_a_spot_node() -> None:
    world = spot_and_on_demand({"a": 2, "od": 1}, replicas=2, fallback=FALLBACK).settled()
    lose_node(world, "a-1")
    wait(world, 1980)  # one is on demand, and in two minutes it is time
    assert world.by_pool() == {"a": 1, "od": 1}
    lose_node(world, "a-0")
    number = len(world.created)
    wait(world, 240)
    assert [name for name in world.created[number:] if "-worker-0-" not in name] == []


def test_the_base_waits_in_an_exhausted_pool_and_does_not_leave_it_again_and_again() -> None:
    world = spot_and_on_demand({"a": 4}, EXHAUSTED, replicas=2, onDemandBase=1)
    made = world.settle()
    assert made.wake_after
    assert sorted(world.pods) == ["digits-ps-0-0", "digits-worker-0-0", "digits-worker-1-0"]
    assert world.by_pool() == {"a": 1}


def test_a_lost_worker_of_the_base_is_made_anew_once_while_its_pool_is_exhausted() -> None:
    world = spot_and_on_demand({"a": 4, "od": 1}, replicas=3, onDemandBase=1).settled()
    assert world.by_pool() == {"a": 2, "od": 1}
    lose_node(world, "od-0")
    world.pools["od"] = pool("od", "OnDemand", status=EXHAUSTED)
    number = len(world.created)
    wait(world, 600)
    assert world.by_pool() == {"a": 2}
    assert len(world.created) == number + 1


def test_a_worker_that_waits_beyond_the_base_leaves_an_exhausted_on_demand_pool() -> None:
    world = Pools(pool("od", "OnDemand"), pool("a"), nodes={"a": 4}, replicas=3, onDemandBase=1)
    world.reconcile()
    world.pools["od"] = pool("od", "OnDemand", status=EXHAUSTED)
    world.settle()
    assert world.by_pool() == {"a": 2}


def test_no_worker_falls_back_to_an_on_demand_pool_that_is_exhausted() -> None:
    world = spot_and_on_demand({"a": 1}, EXHAUSTED, replicas=2, fallback=FALLBACK)
    number = len(world.created)
    wait(world, 3600)
    assert len(world.created) == number + 3, "two workers and a server"
    world.pools["od"] = pool("od", "OnDemand")
    world.add("od-0", "od")
    wait(world, 60)
    assert world.by_pool() == {"a": 1, "od": 1}


def test_no_worker_returns_to_a_spot_pool_that_is_exhausted() -> None:
    """It was taken back at once, and nothing said that it had tried: the next plan tried again."""
    world = Pools(pool("a"), pool("od", "OnDemand", limit=1), nodes={"od": 1}, replicas=1, fallback=FALLBACK)
    wait(world, 400)
    assert world.by_pool() == {"od": 1}
    world.pools["a"] = pool("a", status=EXHAUSTED)
    number = len(world.created)
    wait(world, 7200, 300)
    assert len(world.created) == number
    world.pools["a"] = pool("a")
    world.add("a-0", "a")
    wait(world, 120)
    assert world.by_pool() == {"a": 1}


KINDS = {"a": "Spot", "b": "Spot", "od": "OnDemand", "od2": "OnDemand"}
of_each = {"exhausted": st.booleans(), "limit": st.integers(1, 4), "nodes": st.integers(0, 3)}
conditions = st.fixed_dictionaries({name: st.fixed_dictionaries(of_each) for name in KINDS})


def become(world: Pools, found: dict[str, dict[str, Any]]) -> None:
    """The pools and their nodes are as found; who has a node that goes, loses it."""
    for name, each in found.items():
        status = EXHAUSTED if each["exhausted"] else {}
        world.pools[name] = pool(name, KINDS[name], limit=each["limit"], status=status)
        for number in range(3):
            node = f"{name}-{number}"
            if number < each["nodes"]:
                world.asked_nodes.discard(node)
                world.add(node, name)
            elif node in world.nodes:
                lose_node(world, node)


@settings(max_examples=examples(25), deadline=None)
@given(
    conditions,
    conditions,
    st.permutations(list(KINDS)),
    st.integers(1, 5),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from([0, 1, "100%"]),
    st.sampled_from([0, 301, 4000]),
)
def test_while_nothing_changes_workers_stay_where_they_are_after_a_few_plans(
    first: dict[str, Any],
    then: dict[str, Any],
    order: list[str],
    replicas: int,
    base: int,
    falls_back: bool,
    surge: int | str,
    seconds: int,
) -> None:
    """Whatever is exhausted, full, without nodes, or to be on demand."""
    rules = {"onDemandBase": base, **({"fallback": FALLBACK} if falls_back else {})}
    world = Pools(
        *(pool(name, KINDS[name]) for name in order), nodes={}, replicas=replicas, maxSurge=surge, **rules
    )
    become(world, first)
    wait(world, 120)
    become(world, then)
    world.now += timedelta(seconds=seconds)
    for _ in range(6):
        world.reconcile()
    made = world.reconcile()
    assert made.wake_after != 0.0
    assert not [each for each in made.actions if isinstance(each, CreatePod)], world.status["slots"]
    wait(world, 2400, 200)
    number = len(world.created)
    wait(world, 3600, 300)
    tries = 2  # to return to a spot node, each half hour: a pod there, and one for the way back
    assert len(world.created) - number <= 2 * tries
