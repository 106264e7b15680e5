"""What is said of a worker is left only on evidence: silence, exit 0, a notice that is withdrawn, a fence."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.policy.model import CreatePod, Plan
from shoal.policy.plan import plan
from tests.unit.policy import build
from tests.unit.policy.world import World


def running_world(**how: Any) -> World:
    world = World(**how)
    world.settle()
    return world


def made(plan_: Plan) -> list[str]:
    return [a.name for a in plan_.actions if isinstance(a, CreatePod)]


def slot(world: World, index: int, incarnation: int = 0) -> dict[str, Any]:
    key = ("worker", index, incarnation)
    return next(s for s in world.status["slots"] if (s["role"], s["index"], s["incarnation"]) == key)


def by_reason(world: World) -> dict[str, int]:
    return dict(world.status["restarts"]["byReason"])


# --- exit 0 ----------------------------------------------------------------------------------------------------------


def test_workers_that_were_done_are_not_blamed_while_server_0_cannot_report() -> None:
    world = running_world(workers=8, spot_nodes=8, spec={"runPolicy": {"backoffLimit": 3}})
    for i in range(3):
        world.kill_pod(f"digits-worker-{i}-0", 0)
    world.report_age = 16.0
    world.reconcile()
    for _ in range(10):
        world.tick(seconds=31)
        assert made(world.reconcile()) == []
    assert world.status["phase"] == "Running"
    assert world.status["restarts"]["failures"] == 0

    world.report_age, world.report = 0.0, build.report(phase="Training")  # it is back, and there is work left
    assert made(world.reconcile()) == [f"digits-worker-{i}-1" for i in range(3)]
    assert by_reason(world) == {"ExitedEarly": 3}


def test_an_exit_0_is_early_only_after_a_while() -> None:
    world = running_world()
    world.kill_pod("digits-worker-0-0", 0)
    world.reconcile()
    world.tick(seconds=29)
    world.reconcile()
    assert by_reason(world) == {}


@pytest.mark.parametrize("age", [0.0, 3600.0])
def test_server_0_itself_is_not_waited_for(age: float) -> None:
    world = running_world()
    world.end("digits-ps-0-0", 0, "Completed")
    world.report_age = age
    world.reconcile()
    world.tick(seconds=31)
    world.reconcile()
    assert world.status["lastFailure"]["reason"] == "ExitedEarly"


# --- silence ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("away", ["does not answer", "was restarted and has heard of nobody"])
def test_a_silent_worker_stays_silent_until_it_speaks(away: str) -> None:
    world = running_world(spot_nodes=3)  # no room for the replacement
    world.hush("digits-worker-0-0")
    assert made(world.reconcile()) == ["digits-worker-0-1"]
    if away == "does not answer":
        world.report_age = 16.0
    else:
        world.report = build.report(phase="Starting")
    for _ in range(3):
        world.tick()
        world.reconcile()
    assert world.deleted == []
    assert slot(world, 0)["state"] == "Silent"
    assert slot(world, 0, 1).get("cause", "") == ""

    world.report, world.report_age = build.report(active=[(0, 0), (1, 0), (2, 0)]), 0.0
    world.reconcile()
    assert world.deleted == ["digits-worker-0-1"]
    assert slot(world, 0)["state"] == "Running"


def test_the_word_of_another_incarnation_is_no_word_of_the_silent_one() -> None:
    world = running_world(spot_nodes=3)
    world.hush("digits-worker-0-0")
    world.reconcile()
    world.report = build.report(active=[(0, 1), (1, 0), (2, 0)])
    world.reconcile()
    assert slot(world, 0)["state"] == "Silent"


# --- a fence ---------------------------------------------------------------------------------------------------------


def test_a_worker_that_was_given_up_makes_room_for_its_replacement() -> None:
    world = running_world(spot_nodes=3)
    world.fenced.add("digits-worker-0-0")
    world.reconcile()
    assert "digits-worker-0-0" in world.deleted
    assert by_reason(world) == {"Silent": 1}
    world.settle()
    assert "digits-worker-0-0" not in world.pods
    assert world.pods["digits-worker-0-1"]["status"]["phase"] == "Running"
    assert by_reason(world) == {"Silent": 1}
    assert world.deleted == ["digits-worker-0-0"]


def test_one_that_is_only_silent_keeps_its_place_until_its_replacement_runs() -> None:
    world = running_world(spot_nodes=3)
    world.hush("digits-worker-0-0")
    for _ in range(5):
        world.reconcile()
        world.tick()
    assert world.deleted == []
    assert by_reason(world) == {}


def test_a_fenced_worker_whose_notice_was_counted_is_not_counted_again() -> None:
    world = running_world(spot_nodes=3)
    node = world.pods["digits-worker-0-0"]["spec"]["nodeName"]
    world.taint(node)
    world.reconcile()
    world.fenced.add("digits-worker-0-0")
    world.taint(node, on=False)
    world.reconcile()
    assert "digits-worker-0-0" in world.deleted
    assert by_reason(world) == {"NodeNotReady": 1}


# --- a notice that is withdrawn --------------------------------------------------------------------------------------


def test_a_worker_whose_notice_is_withdrawn_stays_and_its_replacement_goes() -> None:
    world = running_world(spot_nodes=3)  # no room for the replacement but the worker's own place
    node = world.pods["digits-worker-1-0"]["spec"]["nodeName"]
    world.taint(node)
    assert made(world.reconcile()) == ["digits-worker-1-1"]
    assert slot(world, 1)["cause"] == "NodeNotReady"
    world.tick()
    world.taint(node, on=False)
    world.reconcile()
    world.settle()
    assert "digits-worker-1-0" in world.pods
    assert "digits-worker-1-1" not in world.pods
    assert slot(world, 1)["state"] == "Running"
    assert "endedAt" not in slot(world, 1)
    assert by_reason(world) == {"NodeNotReady": 1}
    assert world.status["workers"]["ready"] == 3
    assert world.deleted == ["digits-worker-1-1"]


def test_it_goes_all_the_same_once_its_replacement_runs() -> None:
    world = running_world(spot_nodes=5)
    node = world.pods["digits-worker-1-0"]["spec"]["nodeName"]
    world.taint(node)
    world.reconcile()
    world.tick()
    world.tick()
    assert world.pods["digits-worker-1-1"]["status"]["phase"] == "Running"
    world.taint(node, on=False)
    world.reconcile()
    world.settle()
    assert "digits-worker-1-0" not in world.pods
    assert world.deleted == ["digits-worker-1-0"]
    assert by_reason(world) == {"NodeNotReady": 1}


def test_losing_the_right_to_read_nodes_withdraws_nothing() -> None:
    world = running_world(spot_nodes=3)
    world.taint(world.pods["digits-worker-1-0"]["spec"]["nodeName"])
    world.reconcile()
    seen = world.observation()
    more = {"services": seen.services, "existing": seen.existing, "now": world.now, "report": seen.report}
    blind = plan(build.observe(seen.job, *seen.pods, nodes={}, node_signals=False, **more))
    assert blind.actions == ()
    assert [s.cause for s in blind.status.slots if (s.role, s.index, s.incarnation) == ("worker", 1, 0)] == [
        "NodeNotReady"
    ]


flaps = st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 3)), max_size=12)


@settings(max_examples=100, deadline=None)
@given(flaps, st.integers(0, 2), st.integers(3, 5))
def test_a_taint_that_comes_and_goes_makes_and_deletes_at_most_one_pod_each_time(
    steps: list[tuple[int, bool, int]], surge: int, nodes: int
) -> None:
    world = running_world(surge=surge, spot_nodes=nodes)
    before, tainted, times = len(world.created), set[str](), 0
    for node, on, ticks in steps:
        name = f"spot-{node}"
        workers = sum(p["spec"]["nodeName"] == name for p in world.pods.values())
        times += workers if on and name not in tainted else 0
        (tainted.add if on else tainted.discard)(name)
        world.taint(name, on=on)
        world.reconcile()
        for _ in range(ticks):
            world.tick()
            world.reconcile()
    for name in tainted:
        world.taint(name, on=False)
    world.settle()
    assert len(world.created) - before <= times
    assert len(world.deleted) == len(set(world.deleted)) == len(world.created) - before
    workers = [n for n in world.pods if "-worker-" in n]
    assert sorted(n.rsplit("-", 1)[0] for n in workers) == [f"digits-worker-{i}" for i in range(3)]
    assert by_reason(world).get("NodeNotReady", 0) <= times
    assert world.status["workers"]["ready"] == 3
