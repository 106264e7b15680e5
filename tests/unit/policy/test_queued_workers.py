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
from shoal.sizing.fleet.jobs import fleet_job
from tests.unit.policy.pools import Pools, pool

GATED = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
NO_VOLUME = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": 'persistentvolumeclaim "data" not found.',
}
PREEMPTED = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}

QUEUE = {"schedulingPolicy": {"queue": "team"}}
ALIVE = {"Pending", "Running"}


class Queued(Pools):
    """A queue holds the pods of these `gated` workers back, or whatever else it is `why`."""

    def __init__(
        self,
        *pools: Any,
        gated: Iterable[int],
        mode: str = "Auto",
        why: dict[str, str] = GATED,
        **more: Any,
    ) -> None:
        self.gated, self.why = set(gated), why
        super().__init__(*pools, minReplicas=1, elasticity={"mode": mode}, **more)

    def _room_for(self, pod: dict[str, Any]) -> str | None:
        return None if self._is_gated(pod) else super()._room_for(pod)

    def _create(self, action: CreatePod) -> None:
        super()._create(action)
        if action.name in self.pods and self._is_gated(self.pods[action.name]):
            self.pods[action.name]["status"]["conditions"] = [self.why]

    def _is_gated(self, pod: dict[str, Any]) -> bool:
        labels = pod["metadata"]["labels"]
        return labels["shoal.dev/role"] == "worker" and int(labels["shoal.dev/index"]) in self.gated

    def let_go(self) -> None:
        """Nothing holds pods back any more."""
        self.gated = set()
        for pod in self.pods.values():
            if pod["status"].get("conditions") == [self.why]:
                pod["status"]["conditions"] = []

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


def has(world: Queued) -> dict[str, int]:
    """The nodes that a job has by what is stored of it, and is decided, and that others leave to it in a plan."""
    stored = TrainingJob.model_validate({**world.manifest, "status": world.status})
    found = holdings(stored) | holdings(world.job, plan(world.observation()))
    planned = fleet_job(stored, None, world.now)
    left = planned.holds(planned.under_way)
    assert {name: n for name, n in left.items() if n} == {name: found[name] for name in left if found[name]}
    return dict(found)


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


@pytest.mark.parametrize("why", [GATED, NO_VOLUME], ids=["queue", "volume"])
def test_no_worker_ends_to_move_after_one_that_did_and_gets_no_node(why: dict[str, str]) -> None:
    """With a `maxSurge` of 0 each one that was held back made way for the next, until none was left."""
    many = {"nodes": {"a": 8, "b": 8}, "replicas": 8, "maxReplicas": 8, "maxSurge": 0}
    world = Queued(pool("a"), pool("b"), gated=(), why=why, **many)
    world.propose({"a": 8})
    world.settle()
    world.gated = set(range(8))
    world.propose({"b": 8}, urgent=True)
    for _ in range(60):
        world.reconcile()
        world.tick(60)
    assert world.by_pool() == {"a": 7}


@pytest.mark.parametrize("mode", ["Auto", "Manual"])
def test_job_makes_no_pods_for_the_nodes_of_others_while_a_queue_holds_its_own_back(mode: str) -> None:
    """Let go, they claimed the nodes of another job, which then never got back what it lost."""
    many = {"nodes": {"a": 5}, "replicas": 10, "maxReplicas": 10}
    world = Queued(pool("a", limit=10), gated=range(10), mode=mode, **many)
    world.elsewhere = {"a": 5}
    world.propose({"a": 10}, urgent=True)
    for _ in range(30):
        world.reconcile()
        world.tick(10)
    assert sum("-worker-" in name for name in world.pods) == 5


def test_workers_that_a_job_gave_up_are_not_made_for_the_nodes_of_others_while_a_queue_holds_it_back() -> (
    None
):
    """Their records stay, with the pool where they were."""
    world = Queued(
        pool("a", limit=10), gated=(), mode="Manual", nodes={"a": 10}, replicas=10, maxReplicas=10
    ).settled()
    world.manifest["spec"]["workers"]["replicas"] = 1
    world.settle()
    world.gated, world.elsewhere = set(range(1, 10)), {"a": 5}
    world.manifest["spec"]["workers"]["replicas"] = 10
    for _ in range(30):
        world.reconcile()
        world.tick(10)
    living = [
        name for name, pod in world.pods.items() if "-worker-" in name and pod["status"]["phase"] in ALIVE
    ]
    assert len(living) == 5


def test_job_of_a_queue_has_the_nodes_that_its_workers_move_to() -> None:
    """Others were given those of which no pod was made yet, and it stayed with two of eight."""
    dear = pool("od", "OnDemand", price=3)
    many = {"nodes": {"b": 8, "od": 8}, "replicas": 8, "maxReplicas": 8, "maxSurge": "25%"}
    world = Queued(pool("b", limit=8), dear, gated=(), **many)
    world.manifest["spec"]["runPolicy"] = QUEUE
    world.propose({"od": 8})
    world.settle()
    world.propose({"b": 8}, urgent=True)
    world.reconcile()
    assert sum(slot["pool"] == "b" for slot in world.slots) == 2
    assert has(world) == {"od": 8, "b": 8}


@pytest.mark.parametrize("why", [GATED, NO_VOLUME], ids=["queue", "volume"])
@pytest.mark.parametrize(("surge", "tries"), [("25%", 2), (1, 1), (0, 1)])
def test_job_gives_back_the_nodes_that_its_workers_move_to_while_none_of_them_may_begin_there(
    surge: int | str, tries: int, why: dict[str, str]
) -> None:
    """Those of which no pod was made, as others were in vain, were bought and kept for as long as that lasted."""
    dear = pool("od", "OnDemand", price=3)
    many = {"nodes": {"b": 8, "od": 8}, "replicas": 8, "maxReplicas": 8, "maxSurge": surge}
    world = Queued(pool("b", limit=8), dear, gated=(), why=why, **many)
    world.manifest["spec"]["runPolicy"] = QUEUE
    world.propose({"od": 8})
    world.settle()
    world.gated = set(range(8))
    world.propose({"b": 8}, urgent=True)
    for _ in range(10):
        world.reconcile()
        world.tick(10)
    assert has(world)["b"] >= 8 - tries, "the queue may take its time"
    for _ in range(10):
        world.tick(60)
        world.reconcile()
    works = {"od": 8 if surge else 7}
    assert (world.by_pool(), has(world)) == (works, works)
    world.let_go()
    world.reconcile()
    for _ in range(60):
        world.tick()
        world.reconcile()
    assert (world.by_pool(), has(world)) == ({"b": 8}, {"b": 8})


def test_job_keeps_the_nodes_that_its_workers_move_to_while_one_of_them_only_waits_for_its_node() -> None:
    dear = pool("od", "OnDemand", price=3)
    many = {"nodes": {"od": 8}, "replicas": 8, "maxReplicas": 8, "maxSurge": 2}
    world = Queued(pool("b", limit=8), dear, gated=(), **many)
    world.manifest["spec"]["runPolicy"] = QUEUE
    world.propose({"od": 8})
    world.settle()
    world.gated = {0}
    world.propose({"b": 8}, urgent=True)
    for _ in range(10):
        world.reconcile()
        world.tick(60)
    assert has(world) == {"od": 8, "b": 7}


def test_job_of_a_queue_has_the_node_of_a_worker_that_backs_off() -> None:
    """It was given to others at once, and not given back."""
    many = {"nodes": {"b": 8}, "replicas": 8, "maxReplicas": 8}
    world = Queued(pool("b", limit=8), gated=(), **many)
    world.manifest["spec"]["runPolicy"] = {**QUEUE, "backoffLimit": 100}
    world.propose({"b": 8})
    world.settle()
    for _ in range(3):
        world.end(next(name for name in world.pods if "-worker-0" in name), 1)
        for _ in range(30):
            world.reconcile()
            assert has(world) == {"b": 8}
            world.tick(5)


def test_job_of_a_queue_that_resumes_has_no_nodes_before_its_pods_are_made() -> None:
    """The queue may hold all of them back once more."""
    world = Queued(pool("b", limit=8), gated=(), nodes={"b": 8}, replicas=8, maxReplicas=8)
    world.manifest["spec"]["runPolicy"] = QUEUE
    world.propose({"b": 8})
    world.settle()
    world.manifest["spec"]["suspend"] = True
    world.settle()
    world.gated = set(range(8))
    world.manifest["spec"]["suspend"] = False
    stored = TrainingJob.model_validate({**world.manifest, "status": world.status})
    assert holdings(stored) == {}
    world.reconcile()
    assert has(world) == {}


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
    ).settled()
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
