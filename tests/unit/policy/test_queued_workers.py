"""What a job does with its other workers while a queue holds some of its pods back."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import pytest

from shoal.api.training_job import TrainingJob
from shoal.api.training_job_status import TrainingJobStatus
from shoal.controllers.trainingjob.claims import holdings
from shoal.policy.actions import CreatePod
from shoal.policy.decide.workers import MIN_UNSCHEDULED
from shoal.policy.plan import plan
from tests.unit.policy.pools import Pools, pool

GATED = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
PREEMPTED = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}


class Queued(Pools):
    """A queue holds the pods of these `gated` workers back."""

    def __init__(self, *pools: Any, gated: Iterable[int], mode: str = "Auto", **more: Any) -> None:
        self.gated = set(gated)
        super().__init__(*pools, minReplicas=1, elasticity={"mode": mode}, **more)

    def _room_for(self, pod: dict[str, Any]) -> str | None:
        return None if self._is_gated(pod) else super()._room_for(pod)

    def _create(self, action: CreatePod) -> None:
        super()._create(action)
        if action.name in self.pods and self._is_gated(self.pods[action.name]):
            self.pods[action.name]["status"]["conditions"] = [GATED]

    def _is_gated(self, pod: dict[str, Any]) -> bool:
        labels = pod["metadata"]["labels"]
        return labels["shoal.dev/role"] == "worker" and int(labels["shoal.dev/index"]) in self.gated

    def lose(self, *, replaced: bool = True) -> None:
        """The cloud takes the node of a worker, for which the pool has another one."""
        running = (
            name
            for name, pod in self.pods.items()
            if "-worker-" in name and pod["status"]["phase"] == "Running"
        )
        name = next(running)
        node = self.pods[name]["spec"]["nodeName"]
        self.vanish(name)
        del self.nodes[node]
        if replaced:
            self.add(f"{node}x", "a")


def ten(mode: str, gated: int, taken: int) -> Queued:
    """A job of ten workers in a pool of ten nodes; others have `taken` of them."""
    many = {"nodes": {"a": 10 - gated}, "replicas": 10, "maxReplicas": 10, "maxSurge": 0}
    world = Queued(pool("a", limit=10), gated=range(10 - gated, 10), mode=mode, **many)
    world.propose({"a": 10})
    world.settle()
    world.elsewhere = {"a": taken}
    world.reconcile()
    return world


@pytest.mark.parametrize("mode", ["Auto", "Manual"])
@pytest.mark.parametrize(("gated", "taken", "lost"), [(0, 0, 2), (5, 0, 2), (1, 1, 1), (5, 5, 2), (5, 5, 5)])
def test_what_a_job_loses_is_replaced_though_others_have_the_nodes_of_its_queued_workers(
    mode: str, gated: int, taken: int, lost: int
) -> None:
    """Those took the room of others: each lost worker was lost for ever, down to none at all."""
    world = ten(mode, gated, taken)
    for _ in range(lost):
        world.lose()
        world.settle()
        world.tick(60)
    world.tick(3600)
    world.settle()
    assert world.by_pool() == {"a": 10 - gated}
    assert holdings(world.job, plan(world.observation())) == {"a": 10 - gated}


@pytest.mark.parametrize(("gated", "lost"), [(1, 1), (5, 5), (1, 4), (4, 1)])
def test_what_is_told_stays_while_lost_workers_have_no_room_beside_queued_ones(gated: int, lost: int) -> None:
    """With as many lost as queued, each look said one node more or less than the one before, and each was a write."""
    world = ten("Auto", gated, gated)
    world.elsewhere = {"a": gated + 5}
    for _ in range(lost):
        world.lose(replaced=False)
        world.reconcile()
    told = list[TrainingJobStatus]()
    for _ in range(6):
        made = plan(world.observation())
        assert holdings(world.job, made) == {"a": 10 - gated}
        world.status = made.status.model_dump(mode="json", by_alias=True, exclude_none=True)
        told.append(made.status)
        world.now += timedelta(seconds=30)
    plans = [(each.plan.kept_to, each.plan.in_vain) for each in told if each.plan is not None]
    assert plans == [(None, {"a": gated})] * 6


@pytest.mark.parametrize("mode", ["Auto", "Manual"])
def test_status_of_an_older_operator_that_counted_queued_workers_among_the_refused_is_read(mode: str) -> None:
    world = ten(mode, 5, 0)
    world.status["plan"] |= {"keptTo": {"a": 5}}
    del world.status["plan"]["inVain"]
    stored = TrainingJob.model_validate({**world.manifest, "status": world.status})
    assert holdings(stored) == {"a": 5}
    world.lose()
    world.settle()
    assert world.by_pool() == {"a": 5}
    assert world.status["plan"]["inVain"] == {"a": 5}
    assert "keptTo" not in world.status["plan"]


@pytest.mark.parametrize("gated", [(), (3,)])
def test_workers_move_one_after_the_other_though_one_waits_in_a_queue(gated: tuple[int, ...]) -> None:
    """With a `maxSurge` of 0 one that is to move ends while all others work; the queued one never did."""
    world = Queued(
        pool("a"), pool("b"), gated=gated, nodes={"a": 4, "b": 4}, replicas=4, maxReplicas=4, maxSurge=0
    )
    world.propose({"a": 4})
    world.settle()
    world.propose({"b": 4}, urgent=True)
    for _ in range(60):
        world.reconcile()
        world.tick()
    assert world.by_pool() == {"b": 4 - len(gated)}


def test_on_demand_base_is_not_sought_elsewhere_for_workers_that_a_queue_holds_back() -> None:
    world = Queued(pool("a"), pool("od", "OnDemand"), gated=[0, 1], mode="Manual", nodes={"a": 4, "od-a": 4},
                   replicas=4, maxReplicas=4, onDemandBase=2)  # fmt: skip
    world.settle()
    homes = [slot["pool"] for slot in world.slots if slot["role"] == "worker"]
    assert sorted(homes) == ["a", "a", "od", "od"]


def test_preempted_workers_that_a_queue_holds_back_take_no_turn_of_those_that_wait_for_a_node() -> None:
    """Only so many wait for nodes that a higher priority took; who waits in vain has no part in that."""
    many = 2 * MIN_UNSCHEDULED
    world = Queued(
        pool("a", limit=many), gated=(), nodes={"a": many}, replicas=many, maxReplicas=many, mode="Manual"
    )
    world.settle()
    assert world.by_pool() == {"a": many}
    world.gated = set(range(MIN_UNSCHEDULED))
    for name in [name for name in world.pods if "-worker-" in name]:
        world.taken.add(name)
        world.end(name, 143)
        world.pods[name]["status"]["conditions"].append(PREEMPTED)
    world.nodes = {name: node for name, node in world.nodes.items() if not name.startswith("a-")}
    for _ in range(10):
        world.reconcile()
        world.tick(30)
    waiting = [
        name for name, pod in world.pods.items() if "-worker-" in name and pod["status"]["phase"] == "Pending"
    ]
    assert len(waiting) == many
