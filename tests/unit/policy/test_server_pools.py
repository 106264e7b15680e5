"""Parameter servers in CapacityPools: they live in those, or wait and say why."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from shoal.policy.actions import CreatePod
from shoal.policy.model import Refusal, RefusalKind
from shoal.policy.plan import plan
from tests.unit.policy import build
from tests.unit.policy.pools import EXHAUSTED, Pools, pool


def server_world(*pools: str, known: tuple[Any, ...] = (), replicas: int = 2) -> Pools:
    """A job whose servers name these pools, of which some are known."""
    world = Pools(
        pool("gpu"),
        *known,
        nodes={"gpu": 4, "od-a": 2, "od-b": 2},
        replicas=replicas,
        servers={"pools": list(pools)},
    )
    world.manifest["spec"]["workers"]["pools"] = ["gpu"]
    return world


def on_demand(name: str, **more: Any) -> Any:
    return pool(name, "OnDemand", accelerator=None, **more)


def of_server(world: Pools) -> dict[str, str]:
    """The pool's label of each server that runs."""
    return {
        name: each["spec"].get("nodeSelector", {}).get("pool", "")
        for name, each in world.pods.items()
        if "-ps-" in name and each["status"]["phase"] == "Running"
    }


def problem(world: Pools) -> tuple[str, str]:
    degraded = world.condition("Degraded")
    return (degraded["reason"], degraded["message"]) if degraded.get("status") == "True" else ("", "")


def test_nothing_is_made_until_the_pool_of_the_servers_is_read() -> None:
    """Of a job that was read 50 ms before its pool, the server went to any node, and stayed there."""
    world = server_world("od-a").settled()
    assert not world.pods, "workers without servers would hold their nodes for nothing"
    reason, words = problem(world)
    assert reason == "PoolNotFound"
    assert "CapacityPool od-a does not exist: create it, or change parameterServers.pools" in words
    world.pools["od-a"] = on_demand("od-a")
    world.settle()
    assert of_server(world) == {"digits-ps-0-0": "od-a"}
    assert world.pods["digits-ps-0-0"]["metadata"]["labels"]["shoal.dev/pool"] == "od-a"
    assert world.by_pool() == {"gpu": 2}
    assert problem(world)[0] == ""


def test_a_lost_server_waits_for_its_pool_and_one_that_runs_stays() -> None:
    world = server_world("od-a", known=(on_demand("od-a"),)).settled()
    del world.pools["od-a"]
    world.settle()
    assert of_server(world) == {"digits-ps-0-0": "od-a"}
    assert problem(world)[0] == "PoolNotFound"
    world.kill_pod("digits-ps-0-0", 1)
    world.settle()
    assert of_server(world) == {}
    assert world.by_pool() == {"gpu": 2}, "those that run wait for it"
    world.pools["od-a"] = on_demand("od-a")
    world.now += timedelta(seconds=60)
    world.settle()
    assert of_server(world) == {"digits-ps-0-1": "od-a"}


def test_a_worker_is_replaced_while_servers_run_whose_pool_is_gone() -> None:
    world = server_world("od-a", known=(on_demand("od-a"),)).settled()
    del world.pools["od-a"]
    world.first_look = True  # a new leader
    world.kill_pod("digits-worker-0-0", 1)
    for _ in range(6):
        world.reconcile()
        world.tick()
    assert world.by_pool() == {"gpu": 2}


def test_servers_live_in_the_pools_that_are_there_and_the_others_are_told() -> None:
    world = server_world(
        "gone", "od-a", "od-b", known=(on_demand("od-a", status=EXHAUSTED), on_demand("od-b"))
    ).settled()
    assert of_server(world) == {"digits-ps-0-0": "od-b"}
    assert problem(world)[0] == "PoolNotFound"


def test_no_server_begins_in_a_pool_that_is_being_deleted_while_there_is_another() -> None:
    ending = on_demand("od-a")
    about = ending.metadata.model_copy(update={"deletion_timestamp": "2026-01-01T12:00:00Z"})
    ending = ending.model_copy(update={"metadata": about})
    world = server_world("od-a", "od-b", known=(ending, on_demand("od-b"))).settled()
    assert of_server(world) == {"digits-ps-0-0": "od-b"}
    assert "od-a is being deleted" in problem(world)[1]
    world = server_world("od-a", known=(ending,)).settled()
    assert of_server(world) == {"digits-ps-0-0": "od-a"}, "training goes on as long as it can"
    assert "no parameter server that has another pool" in problem(world)[1]


def test_no_server_lives_in_a_pool_that_selects_no_nodes() -> None:
    world = server_world(
        "od-a", "od-b", known=(on_demand("od-a", nodeSelector={}), on_demand("od-b"))
    ).settled()
    assert of_server(world) == {"digits-ps-0-0": "od-b"}
    reason, words = problem(world)
    assert reason == "PoolNotReady"
    assert "od-a selects no nodes: set spec.nodeSelector" in words


def test_what_both_roles_lack_is_told_of_both() -> None:
    world = server_world("gone")
    world.manifest["spec"]["workers"]["pools"] = ["gone"]
    world.settle()
    _, words = problem(world)
    assert words.index("change parameterServers.pools") < words.index("change workers.pools")


def test_the_epoch_of_a_server_that_an_earlier_leader_may_have_made_is_not_used_again() -> None:
    """It was made, and vanished with its leader before it was recorded; then its pool was gone for a while."""
    world = server_world("od-a", known=(on_demand("od-a"),))
    world.reconcile(crash_after=3)
    assert set(world.pods) == {"digits-ps-0-0"}
    world.pods.clear()
    del world.pools["od-a"]
    world.first_look = True
    for seconds in (1, 60, 60):
        world.now += timedelta(seconds=seconds)
        made = world.reconcile()
        assert not [each for each in made.actions if isinstance(each, CreatePod) and each.role == "ps"]
    world.pools["od-a"] = on_demand("od-a")
    world.settle()
    (server,) = of_server(world)
    assert server != "digits-ps-0-0"


def test_server_that_is_refused_for_one_pool_is_made_for_the_next() -> None:
    world = server_world("od-a", "od-b", known=(on_demand("od-a"), on_demand("od-b")))

    def made() -> list[tuple[str, str]]:
        actions = plan(world.observation()).actions
        return [
            (each.name, each.pool) for each in actions if isinstance(each, CreatePod) and each.role == "ps"
        ]

    [(name, where)] = made()
    assert where == "od-a"
    world.refusals[name] = Refusal(
        RefusalKind.INVALID, name, "a wrong label", world.specs(where), build.at(world.now), pool=where
    )
    assert made() == []
    world.pools["od-a"] = on_demand("od-a", status=EXHAUSTED)
    assert made() == [(name, "od-b")]
