"""Of how many nodes of its plan a job has the nodes whose pods cannot be made: those of the pods that there are."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dev.night import examples
from shoal.controllers.trainingjob.claims import holdings
from shoal.manifests.names import secret_name
from shoal.policy.actions import CreatePod
from shoal.policy.model import NameConflict, Plan, Refusal, RefusalKind
from shoal.policy.plan import plan
from tests.unit.policy import build
from tests.unit.policy.pools import AUTO, Pools, pool

FORBIDDEN = 'pods "x" is forbidden: violates PodSecurity "restricted:latest"'


def greedy(**workers: Any) -> Pools:
    """A job that begins with all ten nodes of a pool, and may not have fewer."""
    most = {"replicas": 10, "minReplicas": 10, "maxReplicas": 10, "elasticity": AUTO}
    return Pools(pool("a"), nodes={"a": 10}, **(most | workers))


def refuse(world: Pools, kind: RefusalKind, name: str, message: str = FORBIDDEN) -> None:
    world.refusals[name] = Refusal(kind, name, message, world.specs("a"), build.at(world.now), pool="a")


def held(world: Pools) -> Counter[str]:
    made = plan(world.observation())
    assert made.status.plan is not None
    return holdings(world.observation().job, made)


def stored(made: Plan) -> dict[str, Any]:
    return made.status.model_dump(mode="json", by_alias=True, exclude_none=True)


def kept_to(world: Pools) -> object:
    return world.status["plan"].get("keptTo")


@pytest.mark.parametrize("kind", RefusalKind)
@pytest.mark.parametrize("what", ["worker", "secret"])
def test_job_whose_pods_are_refused_holds_no_node_for_them(kind: RefusalKind, what: str) -> None:
    """It held `minReplicas` of a shared pool for as long as nobody looked, which were bought for it."""
    world = greedy()
    name = "digits-worker-0-0" if what == "worker" else secret_name(world.job)
    for seconds in (1, 31, 3600):
        refuse(world, kind, name)
        if what == "secret":
            world.existing.clear()
        assert held(world) == {}
        world.status = stored(plan(world.observation()))
        world.tick(seconds)
        world.refusals[name] = replace(
            world.refusals[name], at=build.at(world.now) - 1e6
        )  # it is time to try
        tried = [
            a for a in plan(world.observation()).actions if isinstance(a, CreatePod) and a.role == "worker"
        ]
        assert len(tried) == (what == "worker")
        assert sum(held(world).values()) == len(tried)
    assert kept_to(world) == {"a": 0}


def test_what_a_job_is_kept_to_outlasts_the_refusals_until_a_pod_is_made() -> None:
    """The next leader knows of no refusal; and where others have the pool, none is tried that could refresh it."""
    world = greedy()
    refuse(world, RefusalKind.FORBIDDEN, "digits-worker-0-0")
    world.status = stored(plan(world.observation()))
    world.refusals.clear()
    world.elsewhere = {"a": 10}
    for _ in range(3):
        world.settle()
        world.tick(600)
        assert held(world) == {}
        assert kept_to(world) == {"a": 0}
    world.elsewhere = {"a": 9}
    world.settle()
    assert world.by_pool() == {"a": 1}
    assert kept_to(world) is None
    assert held(world) == {"a": 10}


def test_job_that_has_pods_keeps_their_nodes_while_more_are_refused() -> None:
    world = greedy(minReplicas=1)
    world.quota = 5  # a server, and four workers
    world.settle()
    assert world.by_pool() == {"a": 4}
    assert held(world) == {"a": 4}
    assert world.status["plan"]["pools"] == {"a": 5}


def test_job_without_a_place_for_its_servers_holds_no_node_for_its_workers() -> None:
    world = greedy(servers={"pools": ["gone"]}).settled()
    assert held(world) == {}


def test_job_whose_newest_state_cannot_be_read_holds_no_node_that_it_did_not_have() -> None:
    world = greedy()
    made = plan(replace(world.observation(), unread=True))
    assert holdings(world.observation().job, made) == {}


def test_workers_whose_names_are_of_others_hold_no_nodes() -> None:
    taken = {f"digits-worker-{n}-0": NameConflict() for n in range(4)}
    fresh = greedy()
    made = plan(replace(fresh.observation(), name_conflicts=taken))
    assert holdings(fresh.observation().job, made) == {"a": 6}
    gone = {
        name: NameConflict(terminating=True) for name in taken
    }  # of the run before: in a moment they are free
    made = plan(replace(fresh.observation(), name_conflicts=gone))
    assert holdings(fresh.observation().job, made) == {"a": 10}


def test_pool_whose_pods_are_refused_takes_nothing_from_the_plan_in_another() -> None:
    world = Pools(pool("a", limit=2), pool("odd"), nodes={"a": 2}, replicas=6, elasticity=AUTO)
    name = "digits-worker-2-0"
    world.refusals[name] = Refusal(
        RefusalKind.INVALID, name, "a wrong label", world.specs("odd"), build.at(world.now), pool="odd"
    )
    assert held(world) == {"a": 2}


STEPS = st.sampled_from(["reconcile", "try", "crash", "wait", "propose", "full", "room", "edit"])


@settings(max_examples=examples(60))
@given(st.sampled_from(RefusalKind), st.lists(STEPS, max_size=12))
def test_whatever_happens_a_job_without_a_pod_holds_one_node_at_most(
    kind: RefusalKind, steps: list[str]
) -> None:
    """The one is that of a pod that is being tried."""
    world = greedy()
    refuse(world, kind, "digits-worker-0-0")
    world.status = stored(plan(world.observation()))
    for step in steps:
        match step:
            case "try":
                for name, each in world.refusals.items():
                    world.refusals[name] = replace(each, at=each.at - 3600)
            case "crash":
                world.refusals.clear()
            case "wait":
                world.tick(90)
            case "propose":
                world.propose({"a": 10}, urgent=True)
            case "full" | "room":
                world.elsewhere = {"a": 10 if step == "full" else 0}
            case "edit":
                world.manifest["spec"]["workers"]["maxSurge"] = f"{len(world.created) % 100}%"
        made = plan(world.observation())
        tried = [a for a in made.actions if isinstance(a, CreatePod) and a.role == "worker"]
        assert holdings(world.observation().job, made).total() <= len(tried) <= 1
        world.status = stored(made)
        for each in tried[:1]:
            refuse(world, kind, each.name)
