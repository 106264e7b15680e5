"""Workers in CapacityPools: assignment, plans, fallback and return, usage and cost, excluded nodes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.api.capacity_pool import CapacityPool
from shoal.controllers.trainingjob.claims import holdings
from shoal.manifests.platforms import AUTOPILOT, GKE, KARPENTER, Platform
from shoal.policy.model import CreatePod, Observation, Plan, Proposal
from shoal.policy.plan import plan
from tests.unit.policy import build
from tests.unit.policy.world import World


def pool(
    name: str, kind: str = "Spot", price: float | None = 1, limit: int = 10, **spec: Any
) -> CapacityPool:
    status = spec.pop("status", {})
    return CapacityPool.model_validate(
        {
            "metadata": {"name": name},
            "spec": {
                "capacityType": kind,
                "accelerator": {"name": "T4"},
                "nodeSelector": {"pool": name},
                "tolerations": [{"key": "gpu", "operator": "Exists"}],
                "limits": {"nodes": limit},
                **({"price": {"perHour": price}} if price else {}),
                **spec,
            },
            "status": status,
        }
    )


EXHAUSTED = {
    "conditions": [
        {
            "type": "Exhausted",
            "status": "True",
            "reason": "NoNodes",
            "lastTransitionTime": build.stamp(build.NOW),
        }
    ]
}


class Pools(World):
    """A world with pools: a pod is bound to a node that has the labels of its selector."""

    def __init__(self, *pools: CapacityPool, nodes: dict[str, int], **workers: Any) -> None:
        self.pools = {each.metadata.name: each for each in pools}
        self.proposal: Proposal | None = None
        self.elsewhere: dict[str, int] = {}
        elasticity = workers.pop("elasticity", {})
        super().__init__(
            spot_nodes=0,
            spec={
                "workers": {
                    "maxReplicas": 20,
                    "minReplicas": 0,
                    "maxSurge": "100%",
                    "pools": list(self.pools),
                    **workers,
                },
                "elasticity": elasticity,
            },
        )
        for name, number in nodes.items():
            for i in range(number):
                self.add(f"{name}-{i}", name)

    def add(self, node: str, label: str) -> None:
        """A node of a pool."""
        self.nodes[node] = build.node_manifest(node, spot=not label.startswith("od"))
        self.nodes[node]["metadata"]["labels"]["pool"] = label

    def observation(self) -> Observation:
        return replace(super().observation(), pools=self.pools, proposal=self.proposal, taken=self.elsewhere)

    def _create(self, action: CreatePod) -> None:
        super()._create(action)
        self.pods[action.name]["spec"]["nodeSelector"] = action.manifest["spec"].get("nodeSelector", {})

    def _room_for(self, pod: dict[str, Any]) -> str | None:
        selector = pod["spec"].get("nodeSelector") or {}
        if not selector:
            return super()._room_for(pod)
        alive = {"Pending", "Running"}
        used = {p["spec"].get("nodeName") for p in self.pods.values() if p["status"]["phase"] in alive}
        for name, node in sorted(self.nodes.items()):
            fits = selector.items() <= node["metadata"]["labels"].items()
            if fits and name not in used and not self.leaving(name) and name not in self.dead_nodes:
                return name
        return None

    def by_pool(self) -> dict[str, int]:
        """Running workers by pool."""
        found: dict[str, int] = {}
        for name, pod in self.pods.items():
            if "-worker-" in name and pod["status"]["phase"] == "Running":
                label = pod["metadata"]["labels"].get("shoal.dev/pool", "")
                found[label] = found.get(label, 0) + 1
        return found

    def at_work(self) -> int:
        """Slots with a worker that runs and is not asked to end."""
        pods = map(self.pod, self.pods)
        stays = [pod.place for pod in pods if pod.running and not pod.metadata.deletion_timestamp]
        return len({place.index for place in stays if place is not None and place.role == "worker"})

    def propose(self, counts: dict[str, int], *, age: int = 3600, **more: Any) -> None:
        since = self.now - timedelta(seconds=age)
        self.proposal = Proposal(counts, 1, more.pop("reason", "cheaper"), since=since, **more)


def created(made: Plan) -> list[dict[str, Any]]:
    return [a.manifest for a in made.actions if isinstance(a, CreatePod) and a.role == "worker"]


def test_pods_of_a_pool_carry_its_selector_and_tolerations_and_no_spot_affinity() -> None:
    world = Pools(pool("spot", zone="z1"), nodes={}, replicas=1)
    (manifest,) = created(plan(world.observation()))
    assert manifest["spec"]["nodeSelector"] == {"pool": "spot"}
    assert {"key": "gpu", "operator": "Exists"} in manifest["spec"]["tolerations"]
    assert manifest["metadata"]["labels"]["shoal.dev/pool"] == "spot"
    required = manifest["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert required["nodeSelectorTerms"] == [
        {"matchExpressions": [{"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["z1"]}]}
    ]


def test_workers_fill_pools_in_order_up_to_their_limits() -> None:
    world = Pools(pool("a", limit=2), pool("b", limit=5), nodes={"a": 5, "b": 5}, replicas=4)
    world.settle()
    assert world.by_pool() == {"a": 2, "b": 2}
    assert world.status["plan"]["summary"] == "2 a, 2 b"
    assert {s["pool"] for s in world.slots if s["role"] == "worker"} == {"a", "b"}


def test_more_workers_than_the_pools_have_room_for_are_told() -> None:
    world = Pools(pool("a", limit=2), nodes={"a": 5}, replicas=4)
    world.settle()
    assert world.by_pool() == {"a": 2}
    assert world.status["workers"]["desired"] == 2
    degraded = world.condition("Degraded")
    assert degraded["reason"] == "PoolsFull"
    assert "2 workers have no room: raise limits.nodes" in degraded["message"]


def test_exhausted_pool_is_skipped_by_new_workers() -> None:
    world = Pools(pool("a", status=EXHAUSTED), pool("b"), nodes={"a": 5, "b": 5}, replicas=2)
    world.settle()
    assert world.by_pool() == {"b": 2}


def test_worker_that_waits_for_an_exhausted_pool_goes_to_the_next() -> None:
    world = Pools(pool("a"), pool("b"), nodes={"a": 1, "b": 5}, replicas=2)
    world.settle()
    assert world.by_pool() == {"a": 1}
    world.pools["a"] = pool("a", status=EXHAUSTED)
    world.settle()
    assert world.by_pool() == {"a": 1, "b": 1}
    assert world.status["restarts"] == {"failures": 0, "disruptions": 0, "byReason": {}}


def test_worker_that_a_queue_holds_back_does_not_fall_back() -> None:
    world = Pools(pool("a"), pool("od", "OnDemand"), nodes={"od": 5}, replicas=1, fallback=FALLBACK)
    world.reconcile()
    gate = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
    world.pods["digits-worker-0-0"]["status"]["conditions"] = [gate]
    world.now += timedelta(seconds=900)
    for _ in range(3):
        world.reconcile()
    assert [n for n in world.pods if "-worker-" in n] == ["digits-worker-0-0"]


def test_pod_waits_for_the_node_of_a_worker_of_the_same_job_that_has_not_left_yet() -> None:
    """A plan took a worker out of a full pool, and the next one wants one there while the first still drains."""
    world = Pools(
        pool("a", limit=2),
        pool("b", limit=4),
        nodes={"a": 2, "b": 4},
        replicas=2,
        elasticity={"mode": "Auto"},
    )
    world.settle()
    assert world.by_pool() == {"a": 2}
    world.propose({"a": 1})
    world.reconcile()
    draining = next(n for n, p in world.pods.items() if p["metadata"].get("deletionTimestamp"))
    world.stuck.add(draining)
    world.propose({"a": 2}, urgent=True)
    for _ in range(3):
        world.reconcile()
    assert sum("-worker-" in name for name in world.pods) == 2
    world.stuck.clear()
    world.settle()
    assert world.by_pool() == {"a": 2}


@pytest.mark.parametrize(("age", "adopted"), [(29, False), (31, True)])
def test_nodes_that_another_job_waits_for_are_left_as_soon_as_workers_are_added(
    age: int, adopted: bool
) -> None:
    world = Pools(pool("a"), nodes={"a": 3}, replicas=3, elasticity={"mode": "Auto"})
    world.settle()
    world.propose({"a": 1}, age=age, traded=frozenset({"a"}))
    world.reconcile()
    assert (world.status["plan"]["pools"] == {"a": 1}) == adopted


def test_workers_stay_until_others_have_left_the_nodes_that_they_move_to() -> None:
    """A job that gets two of three nodes now moves two workers now; what is to go to others is left all the same."""
    world = Pools(pool("a", limit=9), pool("b", limit=3), nodes={"a": 4, "b": 3}, replicas=4,
                  elasticity={"mode": "Auto"})  # fmt: skip
    world.settle()
    world.elsewhere = {"b": 3}
    world.propose({"b": 3}, urgent=True, traded=frozenset({"b"}))
    for others, expected in ((3, {"a": 4}), (1, {"a": 2, "b": 2}), (0, {"b": 3})):
        world.elsewhere = {"b": others}
        world.settle()
        assert world.status["plan"]["pools"] == expected
        assert world.by_pool() == expected
    world.elsewhere = {"a": 7}
    world.propose({"a": 2, "b": 1}, urgent=True, traded=frozenset({"a", "b"}))
    world.settle()
    assert world.by_pool() == {"a": 2, "b": 1}


@pytest.mark.parametrize("least", [1, 2])
def test_two_jobs_swap_all_their_workers_between_full_pools(least: int) -> None:
    """Each waits for nodes of the other: both give up what they can spare, and never more."""
    jobs = [
        Pools(pool("a", limit=3), pool("b", limit=3), nodes={"a": 3, "b": 3}, replicas=3, minReplicas=least,
              elasticity={"mode": "Auto"})
        for _ in range(2)
    ]  # fmt: skip
    homes = ["a", "b"]
    for job, home in zip(jobs, homes, strict=True):
        job.propose({home: 3}, urgent=True)
        job.settle()
        assert job.by_pool() == {home: 3}
    for job, home in zip(jobs, reversed(homes), strict=True):
        job.propose({home: 3}, traded=frozenset(homes))
    for _ in range(8):
        for job, other in zip(jobs, reversed(jobs), strict=True):
            job.elsewhere = dict(holdings(other.observation().job))
            job.reconcile()
            job.settle()
            assert sum(job.by_pool().values()) >= least
            together = Counter(job.by_pool()) + Counter(other.by_pool())
            assert max(together.values()) <= 3
    assert [job.by_pool() for job in jobs] == [{"b": 3}, {"a": 3}]


def test_unknown_pool_is_told_and_workers_run_in_the_others() -> None:
    world = Pools(pool("a"), nodes={"a": 3}, replicas=2)
    world.manifest["spec"]["workers"]["pools"] = ["gone", "a"]
    world.settle()
    degraded = world.condition("Degraded")
    assert degraded["reason"] == "PoolNotFound"
    assert "CapacityPool gone does not exist: create it, or change workers.pools" in degraded["message"]
    assert world.by_pool() == {"a": 2}


def test_an_unknown_pool_is_told_before_what_its_pods_suffer() -> None:
    message = [{"type": "PodScheduled", "status": "False", "message": "0/4 nodes are available"}]
    pod = build.pod("ps", phase="Pending", node=None, state={}, conditions=message)
    of = build.job(workers={"replicas": 2, "pools": ["gone"]})
    degraded = plan(build.observe(of, pod, now=build.NOW + timedelta(seconds=60))).status.condition(
        "Degraded"
    )
    assert degraded is not None
    assert degraded.reason == "PoolNotFound"


def test_workers_stay_when_the_pools_cannot_be_seen() -> None:
    world = Pools(pool("a"), nodes={"a": 3}, replicas=2)
    world.settle()
    before = set(world.pods)
    world.pools = {}
    for _ in range(3):
        world.tick()
        world.reconcile()
    assert set(world.pods) == before
    world.kill_pod("digits-worker-0-0", 1)
    for _ in range(3):
        world.tick()
        world.reconcile()
    assert world.by_pool() == {"a": 1}  # a new one has no pool to go to
    world.pools = {"a": pool("a")}
    world.settle()
    assert world.by_pool() == {"a": 2}


def test_zone_policy_same_uses_pools_in_the_zone_of_the_server() -> None:
    world = Pools(
        pool("a", zone="z1"), pool("b", zone="z2"), nodes={"a": 3, "b": 3}, replicas=2, zonePolicy="Same"
    )
    for node in ("safe-0", "safe-1"):
        world.nodes[node]["metadata"]["labels"]["topology.kubernetes.io/zone"] = "z2"
    world.manifest["spec"]["workers"]["replicas"] = 0
    world.settle()
    world.manifest["spec"]["workers"]["replicas"] = 2
    world.settle()
    assert world.by_pool() == {"b": 2}


# --- on demand --------------------------------------------------------------------------------------------------------


def test_on_demand_base_lives_on_demand_and_others_on_spot() -> None:
    world = Pools(pool("a"), pool("od", "OnDemand"), nodes={"a": 5, "od": 5}, replicas=3, onDemandBase=1)
    world.settle()
    assert world.by_pool() == {"a": 2, "od": 1}
    world.manifest["spec"]["workers"]["onDemandBase"] = 2
    world.settle()
    assert world.by_pool() == {"a": 1, "od": 2}
    assert world.status["restarts"]["disruptions"] == 0


FALLBACK = {"afterSeconds": 300, "returnAfterSeconds": 1800}


def test_workers_fall_back_to_on_demand_and_return() -> None:
    world = Pools(pool("a"), pool("od", "OnDemand"), nodes={"a": 1, "od": 5}, replicas=2, fallback=FALLBACK)
    world.settle()
    assert world.by_pool() == {"a": 1}
    events = []
    world.now += timedelta(seconds=301)
    for _ in range(4):
        events += world.reconcile().events
        world.tick()
    assert world.by_pool() == {"a": 1, "od": 1}
    fell = [e.message for e in events if e.reason == "FellBackToOnDemand"]
    assert fell == ["worker 1 waited for a spot node in vain: it runs on a node of pool od"]
    assert world.status["poolUsage"]["a"]["unfulfilled"] == 1
    assert world.status["restarts"]["disruptions"] == 0

    world.now += timedelta(seconds=1800)  # no spot node yet: it tries, and stays
    for _ in range(3):
        world.reconcile()
        world.tick()
    assert world.by_pool() == {"a": 1, "od": 1}
    world.now += timedelta(seconds=301)
    world.reconcile()
    world.tick()
    world.reconcile()
    assert world.by_pool() == {"a": 1, "od": 1}

    world.add("a-9", "a")
    world.now += timedelta(seconds=1800)
    events = []
    for _ in range(6):
        events += world.reconcile().events
        world.tick()
    world.settle()
    assert world.by_pool() == {"a": 2}
    assert "ReturnedToSpot" in {e.reason for e in events}
    assert world.status["restarts"]["disruptions"] == 0


def test_worker_that_tried_to_return_in_vain_waits_before_it_tries_again() -> None:
    world = Pools(pool("a"), pool("od", "OnDemand"), nodes={"a": 1, "od": 5}, replicas=2, fallback=FALLBACK)
    world.settle()
    for seconds in (301, 1800, 301):  # it falls back, tries, and gives that up
        world.now += timedelta(seconds=seconds)
        for _ in range(4):
            world.reconcile()
            world.tick()
    assert world.by_pool() == {"a": 1, "od": 1}
    made = world.settle()
    waits = [n for n, p in world.pods.items() if "-worker-" in n and p["status"]["phase"] == "Pending"]
    assert not waits, "it tries again at once"
    assert world.status["plan"]["pools"] == {"a": 1, "od": 1}
    assert world.status["workers"]["pending"] == 0
    assert made.wake_after is not None


def test_worker_that_speaks_again_stays_where_it_is() -> None:
    """Its replacement was to live in a better home, and is taken back: that moves nobody."""
    world = Pools(pool("a"), pool("b"), nodes={"b": 2}, replicas=1)
    world.pools["a"] = pool("a", status=EXHAUSTED)
    world.settle()
    assert world.by_pool() == {"b": 1}
    world.pools["a"] = pool("a")
    world.hush("digits-worker-0-0")
    world.reconcile()
    world.hush("digits-worker-0-0")
    for _ in range(4):
        world.reconcile()
        world.tick()
    assert "digits-worker-0-0" in world.pods
    world.settle()
    assert world.by_pool() == {"b": 1}
    assert [s["incarnation"] for s in world.slots if s["role"] == "worker" and not s.get("cause")] == [0]


def test_fallback_without_pools_goes_to_nodes_without_a_spot_label() -> None:
    world = World(workers=1, spot_nodes=0, spec={"workers": {"replicas": 1, "fallback": FALLBACK}})
    world.settle()
    world.now += timedelta(seconds=301)
    made = world.reconcile()
    (manifest,) = created(made)
    required = manifest["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = required["nodeSelectorTerms"]
    assert {e["operator"] for e in term["matchExpressions"]} == {"NotIn"}
    assert "FellBackToOnDemand" in {e.reason for e in made.events}
    assert [n for n in world.pods if "-worker-" in n] == ["digits-worker-0-1"]


# --- plans ------------------------------------------------------------------------------------------------------------

AUTO = {"mode": "Auto"}


def auto(**workers: Any) -> Pools:
    world = Pools(
        pool("a", price=1), pool("b", price=2), pool("od", "OnDemand", price=3),
        **{"nodes": {"a": 8, "b": 8, "od": 8}, "replicas": 2, "elasticity": AUTO, **workers},
    )  # fmt: skip
    world.settle()
    return world


def test_auto_begins_with_replicas_and_carries_a_proposal_out() -> None:
    world = auto()
    assert world.by_pool() == {"a": 2}
    assert world.condition("PlanReady")["reason"] == "Waiting"
    world.propose(
        {"a": 3, "b": 2}, reason="two b nodes keep the deadline", finish_time=world.now, cost=12.345
    )
    made = world.reconcile()
    assert "a -> " in next(e.message for e in made.events if e.reason == "PlanChanged")
    world.settle()
    assert world.by_pool() == {"a": 3, "b": 2}
    told = world.status["plan"]
    assert (told["revision"], told["summary"], told["cost"]) == (2, "3 a, 2 b", "12.35")
    assert told["reason"] == "two b nodes keep the deadline"
    assert world.condition("PlanReady")["status"] == "True"
    assert world.status["workers"]["desired"] == 5
    assert world.status["restarts"]["disruptions"] == 0


@pytest.mark.parametrize(
    ("counts", "age", "urgent", "adopted"),
    [
        ({"a": 3}, 29, False, False),
        ({"a": 3}, 31, False, True),
        ({"a": 1}, 299, False, False),
        ({"a": 1}, 301, False, True),
        ({"a": 3}, 0, True, True),
    ],
)
def test_plans_grow_soon_and_shrink_late(
    counts: dict[str, int], age: int, urgent: bool, adopted: bool
) -> None:
    world = auto()
    world.propose(counts, age=age, urgent=urgent)
    world.reconcile()
    assert (world.status["plan"]["pools"] == counts) is adopted
    if not adopted:
        assert world.last_plan is not None
        assert world.last_plan.wake_after is not None
        assert world.last_plan.wake_after <= 300


def test_plan_that_fails_for_ignorance_waits_for_a_measurement() -> None:
    world = auto()
    world.propose({"a": 2, "od": 4}, feasible=False, measured=False)
    world.settle()
    assert world.by_pool() == {"a": 2}
    world.propose(
        {"a": 3}, feasible=True, measured=False
    )  # but a guess that keeps the limits is as good as any
    world.settle()
    assert world.by_pool() == {"a": 3}
    world.propose({"a": 3, "od": 4}, feasible=False, measured=False)
    world.tick(seconds=601)
    world.settle()
    assert world.by_pool() == {"a": 3, "od": 4}  # none came


def test_plan_leaves_an_exhausted_pool_in_which_workers_wait_without_delay() -> None:
    """Nobody is disturbed by it; while a stabilization time passed, a job without a node would stand still."""
    world = auto(nodes={"a": 1, "b": 3})
    assert world.by_pool() == {"a": 1}  # the second worker waits
    world.pools["a"] = pool("a", status=EXHAUSTED)
    world.propose({"a": 1, "b": 2}, age=0)
    world.settle()
    assert world.by_pool() == {"a": 1, "b": 2}
    world.propose({"b": 2}, age=0)  # a worker that has its node is not left at once
    world.settle()
    assert world.by_pool() == {"a": 1, "b": 2}


def test_plan_that_waits_for_an_exhausted_pool_with_fewer_workers_shrinks_late() -> None:
    """It leaves the pool for no other: a request less helps nobody, and the next plan may want it again."""
    world = auto(nodes={"a": 1, "b": 3})
    world.pools["a"] = pool("a", status=EXHAUSTED)
    world.propose({"a": 1}, age=0)
    world.settle()
    assert world.status["plan"]["pools"] == {"a": 2}
    world.propose({"a": 1}, age=301)
    world.settle()
    assert world.status["plan"]["pools"] == {"a": 1}


def test_workers_that_are_too_many_work_until_the_others_have_their_nodes() -> None:
    """A plan of fewer workers, all of them in a pool that was just taken, would leave the job without any."""
    world = auto(nodes={"a": 2, "od": 2})
    world.propose({"a": 2, "od": 2})
    world.settle()
    assert world.by_pool() == {"a": 2, "od": 2}
    for node in ("a-0", "a-1"):
        world.notice(node)
    world.propose({"a": 2})
    world.settle()
    world.tick(seconds=61)
    world.settle()
    assert world.by_pool() == {"od": 2}
    assert world.status["plan"]["pools"] == {"a": 2}
    assert world.status["workers"]["desired"] == 2
    world.add("a-2", "a")
    world.settle()
    assert world.by_pool() == {"a": 1, "od": 1}
    world.add("a-3", "a")
    world.settle()
    assert world.by_pool() == {"a": 2}
    assert world.status["restarts"]["disruptions"] == 2


def test_shrinking_drains_the_worker_of_least_speed_for_its_price() -> None:
    world = auto()
    world.propose({"a": 2, "b": 2})
    world.settle()
    world.propose({"a": 2, "b": 1}, speeds={"a": 10.0, "b": 10.0})
    world.settle()
    assert world.by_pool() == {"a": 2, "b": 1}
    assert world.status["restarts"]["disruptions"] == 0


def test_move_to_another_pool_is_make_before_break() -> None:
    world = auto(replicas=1)
    world.propose({"b": 1})
    world.reconcile()
    world.tick()
    world.reconcile()
    assert world.by_pool() == {"a": 1}  # it works until its successor runs
    world.tick()
    world.reconcile()
    world.settle()
    assert world.by_pool() == {"b": 1}
    assert world.status["restarts"] == {"failures": 0, "disruptions": 0, "byReason": {}}


def test_move_that_is_revoked_keeps_the_worker() -> None:
    world = auto(replicas=1)
    for node in [n for n in world.nodes if n.startswith("b-")]:
        del world.nodes[node]
    world.propose({"b": 1})
    world.reconcile()
    world.tick()
    world.reconcile()
    world.propose({"a": 1})
    world.settle()
    assert "digits-worker-0-0" in world.pods
    assert world.by_pool() == {"a": 1}
    assert world.status["restarts"] == {"failures": 0, "disruptions": 0, "byReason": {}}


def test_plan_never_exceeds_limits_and_max_replicas() -> None:
    world = auto(maxReplicas=12)
    world.propose({"a": 50, "b": 50})
    world.reconcile()
    assert world.status["plan"]["pools"] == {"a": 10, "b": 2}


def test_plan_takes_no_nodes_that_other_jobs_have_and_gives_none_up_for_them() -> None:
    world = auto()
    world.elsewhere = {"a": 7}
    world.propose({"a": 5})
    world.settle()
    assert world.by_pool() == {"a": 3}
    world.elsewhere = {
        "a": 8
    }  # by a race, or by a limit that was lowered: what leaves is the planner's choice
    world.now += timedelta(seconds=600)
    world.settle()
    assert world.by_pool() == {"a": 3}
    world.elsewhere = {}
    world.settle()
    assert world.by_pool() == {"a": 5}


def test_job_begins_where_other_jobs_leave_room() -> None:
    world = Pools(pool("a", limit=2), pool("b"), nodes={"a": 2, "b": 5}, replicas=2)
    world.elsewhere = {"a": 1}
    world.settle()
    assert world.by_pool() == {"a": 1, "b": 1}
    full = Pools(pool("a", limit=2), nodes={"a": 2}, replicas=2)
    full.elsewhere = {"a": 1}
    full.settle()
    assert "other jobs have 1 of their nodes" in full.condition("Degraded")["message"]


def test_advice_changes_nothing_but_is_told() -> None:
    world = Pools(pool("a"), pool("b"), nodes={"a": 5, "b": 5}, replicas=2, elasticity={"mode": "Advise"})
    world.settle()
    world.propose(
        {"b": 4}, reason="twice as fast", samples_per_second=123.4, relative_error=0.05, basis="measured"
    )
    made = world.reconcile()
    assert "PlanChanged" in {e.reason for e in made.events}
    world.settle()
    assert world.by_pool() == {"a": 2}
    assert world.status["plan"]["pools"] == {"b": 4}
    assert world.status["prediction"] == {
        "samplesPerSecond": "123.4",
        "relativeError": "0.05",
        "basis": "measured",
    }
    assert world.reconcile().events == ()


def test_plan_with_fewer_workers_than_the_least_is_not_carried_out() -> None:
    world = auto(minReplicas=1)
    world.propose({}, reason="no pool has a price")
    world.settle()
    assert world.by_pool() == {"a": 2}
    assert "no pool has a price" in world.condition("PlanReady")["message"]


@pytest.mark.parametrize("proposed", [False, True])
def test_workers_of_a_planned_pool_that_is_not_seen_stay(proposed: bool) -> None:
    """It may be deleted only to be made again."""
    world = auto()
    world.propose({"a": 2, "b": 2})
    world.settle()
    if not proposed:
        world.proposal = None
    b = world.pools.pop("b")
    for _ in range(3):
        world.reconcile()
        world.tick()
    assert world.by_pool() == {"a": 2, "b": 2}
    world.pools["b"] = b
    world.settle()
    assert world.status["plan"]["revision"] == 2


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize("proposed", [None, {"a": 4}, {"a": 2, "b": 2}, {"b": 3}])
def test_workers_move_out_of_a_pool_that_leaves_the_job_when_their_successors_run(
    proposed: dict[str, int] | None, least: int
) -> None:
    """The planner has not heard of the change yet, or has: no worker ends before its successor runs."""
    world = auto(replicas=4, minReplicas=least, pools=["a"])
    assert world.by_pool() == {"a": 4}
    if proposed is not None:
        world.propose(proposed, age=0)
    world.manifest["spec"]["workers"]["pools"] = ["b"]
    for _ in range(12):
        world.reconcile()
        assert sum(world.status["plan"]["pools"].values()) == 4
        assert world.at_work() == 4
        world.tick(0.5)
    world.settle()
    assert world.by_pool() == {"b": 4}
    assert "workers.pools" in world.status["plan"]["reason"]
    assert world.status["restarts"] == {"failures": 0, "disruptions": 0, "byReason": {}}


def test_workers_follow_the_first_server_to_another_zone() -> None:
    zones = {"a": "z1", "b": "z2"}
    world = Pools(
        *(pool(name, zone=zone) for name, zone in zones.items()),
        nodes={"a": 4, "b": 4}, replicas=2, zonePolicy="Same", elasticity=AUTO,
    )  # fmt: skip
    for node, zone in (("safe-0", "z1"), ("safe-1", "z2")):
        world.nodes[node]["metadata"]["labels"]["topology.kubernetes.io/zone"] = zone
    world.settle()
    assert world.by_pool() == {"a": 2}
    world.propose({"a": 2})
    world.notice("safe-0")
    world.settle()
    assert world.by_pool() == {"b": 2}


def test_proposal_with_the_new_pools_decides_where_workers_of_a_pool_that_leaves_go() -> None:
    world = auto(replicas=4, pools=["a"])
    world.manifest["spec"]["workers"]["pools"] = ["b", "od"]
    world.propose({"od": 5}, age=0)
    world.settle()
    assert world.by_pool() == {"od": 5}
    assert not any(
        pod["spec"]["nodeSelector"] == {"pool": "b"}
        for pod in world.pods.values()
        if "nodeSelector" in pod["spec"]
    )


def test_infeasible_plan_is_told() -> None:
    world = auto()
    world.propose({"a": 10}, feasible=False, reason="the deadline cannot be kept: limits.nodes of a binds")
    world.reconcile()
    ready = world.condition("PlanReady")
    assert (ready["status"], ready["reason"]) == ("False", "NotFeasible")
    assert "limits.nodes of a binds" in ready["message"]


# --- usage and cost ---------------------------------------------------------------------------------------------------


def test_usage_and_cost_are_counted() -> None:
    world = Pools(pool("a", price=0.36), pool("od", "OnDemand", price=3.6), nodes={"a": 5}, replicas=2)
    world.settle()
    pushed = world.now.timestamp()
    world.report = build.report(
        workers=[{"slot": i, "incarnation": 0, "state": "Active", "first_push_at": pushed} for i in range(2)]
    )
    world.reconcile()
    usage = world.status["poolUsage"]["a"]
    waited = int((world.now - build.NOW).total_seconds())
    assert (usage["starts"], usage["startSeconds"], usage["startSecondsSquared"]) == (
        2,
        2 * waited,
        2 * waited**2,
    )
    began = usage["nodeSeconds"]
    world.now += timedelta(seconds=1000)
    world.reconcile()
    since = datetime.fromisoformat(world.status["countedUntil"])
    assert since == world.now
    usage, cost = world.status["poolUsage"]["a"], world.status["cost"]
    assert usage["nodeSeconds"] - began in range(2000, 2100)  # since it was last counted
    seconds = usage["nodeSeconds"]
    assert float(cost["accumulated"]) == pytest.approx(seconds * 0.36 / 3600, abs=1e-5)
    assert float(cost["savedVersusOnDemand"]) == pytest.approx(seconds * 3.24 / 3600, abs=1e-5)
    assert cost["perHour"] == "0.72"
    world.reconcile()
    assert world.status["poolUsage"]["a"] == usage


@pytest.mark.parametrize(
    ("cores", "others", "saved"), [(8, (2, 8), 7.0), (8, (2, 4), 0.0), (None, (2, None), 0.0)]
)
def test_savings_without_accelerators_are_against_nodes_with_as_many_cores(
    cores: int | None, others: tuple[int | None, ...], saved: float
) -> None:
    """Of 64 cores they were against the price of 2."""

    def of(name: str, kind: str, price: float, cores: int | None) -> CapacityPool:
        return pool(name, kind, price, accelerator=None, **({"cores": cores} if cores else {}))

    offers = [of(f"od-{i}", "OnDemand", 2 + 6 * i, each) for i, each in enumerate(others)]
    world = Pools(of("a", "Spot", 1, cores), *offers, nodes={"a": 1}, replicas=1)
    world.settle()
    world.now += timedelta(hours=1)
    world.reconcile()
    hours = world.status["poolUsage"]["a"]["nodeSeconds"] / 3600
    assert float(world.status["cost"]["savedVersusOnDemand"]) == pytest.approx(saved * hours, abs=1e-5)


def test_node_counts_from_the_start_of_its_pod_and_not_from_when_that_was_recorded() -> None:
    """No write tells at once that a worker has a node, and an operator that starts again may see it a minute later."""
    world = Pools(pool("a", price=3.6), nodes={"a": 5}, replicas=2)
    world.reconcile()
    world.tick()  # bound
    began = world.now
    world.tick(30.0)
    world.reconcile()
    seconds = 2 * int((world.now - began).total_seconds())
    assert world.status["poolUsage"]["a"]["nodeSeconds"] == seconds == 60
    assert world.status["cost"]["accumulated"] == "0.06"
    world.tick(70.0)
    world.reconcile()
    assert world.status["poolUsage"]["a"]["nodeSeconds"] == seconds + 140


@pytest.mark.parametrize(("sign", "hours"), [("none", 0), ("container", 3), ("coordinator", 5)])
def test_nodes_that_went_while_no_operator_ran_count_up_to_the_last_sign_of_their_workers(
    sign: str, hours: int
) -> None:
    """Each was charged for the whole time: cost over `maxCost`, and an interruption rate that was too low."""
    world = Pools(pool("a", price=3.6), nodes={"a": 3}, replicas=3)
    world.settle()
    before = world.status["poolUsage"]["a"]["nodeSeconds"]
    since = datetime.fromisoformat(world.status["countedUntil"])
    world.now = since + timedelta(hours=8)
    for name in ("digits-worker-0-0", "digits-worker-1-0"):
        pod = world.pods.pop(name)
        del world.nodes[pod["spec"]["nodeName"]]
        if sign == "container":
            pod["status"]["phase"] = "Failed"
            end = build.ended(143)
            end["terminated"]["finishedAt"] = build.stamp(since + timedelta(hours=hours))
            pod["status"]["containerStatuses"][0]["state"] = end
            world.pods[name] = pod
    if sign == "coordinator":
        silent = {"state": "Fenced", "incarnation": 0, "last_seen_seconds": 3600.0 * (8 - hours) - 20}
        active = {"slot": 2, "incarnation": 0, "state": "Active"}
        world.report = build.report(workers=[*({"slot": slot, **silent} for slot in range(2)), active])
        world.report_age = 20.0
    world.reconcile()
    counted = world.status["poolUsage"]["a"]["nodeSeconds"] - before
    assert counted - 8 * 3600 == pytest.approx(2 * max(hours * 3600, 60), abs=4)  # and the one that stayed
    spent = float(world.status["cost"]["accumulated"])
    assert spent == pytest.approx((before + counted) * 3.6 / 3600, abs=1e-3)


@pytest.mark.parametrize(("heard", "counted"), [(True, 5), (False, 25)])
def test_a_node_whose_worker_went_while_nobody_led_counts_until_its_last_word(
    *, heard: bool, counted: int
) -> None:
    """A leader was killed as the worker went, and the next one looked 20 s later: seed 16 of the hidden truths."""
    world = Pools(pool("a"), nodes={"a": 3}, replicas=2)
    world.settle()
    before = world.status["poolUsage"]["a"]["nodeSeconds"]
    since = datetime.fromisoformat(world.status["countedUntil"])
    world.now = since + timedelta(seconds=25)
    world.pods.pop("digits-worker-1-0")
    gone = {"slot": 1, "incarnation": 0, "state": "Fenced", "last_seen_seconds": 18.0}
    active = {"slot": 0, "incarnation": 0, "state": "Active"}
    world.report = build.report(workers=[active, gone] if heard else [active])
    world.report_age = 2.0
    world.reconcile()
    assert world.status["poolUsage"]["a"]["nodeSeconds"] - before == 25 + counted


def test_nodes_are_counted_to_the_end_of_the_job_and_cost_nothing_then() -> None:
    world = Pools(pool("a", price=3.6), nodes={"a": 5}, replicas=2)
    world.settle()
    counted = world.status["poolUsage"]["a"]["nodeSeconds"]
    since = datetime.fromisoformat(world.status["countedUntil"])
    world.now = since + timedelta(seconds=50)  # less than the minute after which they are counted anyway
    world.end("digits-ps-0-0", 0, "Completed", build.termination_message())
    world.reconcile()
    assert world.status["phase"] == "Succeeded"
    assert world.status["poolUsage"]["a"]["nodeSeconds"] == counted + 100
    assert world.status["cost"]["perHour"] == "0"
    told = world.status["cost"]
    world.settle()
    assert world.status["cost"] == told


def test_interruptions_and_shocks_are_counted_by_pool() -> None:
    world = Pools(pool("a"), nodes={"a": 9}, replicas=3)
    world.settle()
    for name in ("digits-worker-0-0", "digits-worker-1-0"):
        world.notice(world.pods[name]["spec"]["nodeName"])
    world.settle()
    world.kill_pod("digits-worker-2-0", 1)  # its own fault
    world.settle()
    usage = world.status["poolUsage"]["a"]
    assert (usage["interruptions"], usage["shocks"]) == (2, 1)
    assert (usage["inShocks"], usage["atShocks"]) == (2, 3)
    world.now += timedelta(seconds=100)
    world.notice(world.pods["digits-worker-0-1"]["spec"]["nodeName"])
    world.settle()
    usage = world.status["poolUsage"]["a"]
    assert (usage["interruptions"], usage["shocks"]) == (3, 1)
    assert (usage["inShocks"], usage["atShocks"]) == (2, 3)


steps = st.lists(
    st.tuples(
        st.sampled_from(["notice", "exit", "vanish", "crash", "wait", "tick", "scale"]), st.integers(0, 99)
    ),
    max_size=20,
)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_usage_only_grows_and_is_counted_once_across_crashes(faults: list[tuple[str, int]]) -> None:
    """Crashes before each status write: node time is never more than there was, and nothing is counted twice."""
    world = Pools(pool("a", price=1), nodes={"a": 12}, replicas=2)
    world.settle()
    most, taken, last = 0.0, 0, dict(world.status["poolUsage"].get("a", {}))
    for fault, number in faults:
        names = [n for n in sorted(world.pods) if "-worker-" in n]
        name = names[number % len(names)] if names else None
        began = world.now
        nodes = {p["spec"].get("nodeName") for n, p in world.pods.items() if "-worker-" in n}
        match fault:
            case "notice" if name and (node := world.pods[name]["spec"].get("nodeName")):
                taken += sum(p["spec"].get("nodeName") == node for p in world.pods.values())
                world.notice(node)
            case "exit" if name:
                world.kill_pod(name, 1)
            case "vanish" if name:
                world.vanish(name)
            case "scale":
                world.manifest["spec"]["workers"]["replicas"] = number % 4
            case "wait":
                world.now += timedelta(seconds=90)
            case "tick":
                world.tick()
        if fault == "crash":
            for after in range(3):
                world.reconcile(crash_after=after)
        else:
            world.reconcile()
        most += (world.now - began).total_seconds() * max(len(nodes), len(world.nodes) and 8)
        usage = world.status["poolUsage"].get("a", {})
        for key, value in last.items():
            if isinstance(value, int) and key != "inLastShock":
                assert usage[key] >= value, key
        last = dict(usage)
    assert last.get("interruptions", 0) <= taken
    assert last.get("nodeSeconds", 0) <= most + 600
    spent = float(world.status.get("cost", {}).get("accumulated", 0))
    assert spent == pytest.approx(last.get("nodeSeconds", 0) / 3600, abs=1e-4)


# --- nodes ------------------------------------------------------------------------------------------------------------


def test_node_on_which_workers_fail_is_avoided_for_a_while() -> None:
    world = Pools(
        pool("a"), nodes={"a": 1}, replicas=1,
        nodeExclusion={"failuresBeforeExclude": 2, "cooldownSeconds": 600},
    )  # fmt: skip
    world.settle()
    events = []
    for incarnation in range(2):
        world.kill_pod(f"digits-worker-0-{incarnation}", 1)
        events += world.reconcile().events
        world.now += timedelta(seconds=10)
        made = world.reconcile()
        world.settle()
    assert [e.message for e in events if e.reason == "NodeExcluded"] == [
        "workers failed on node a-0 2 times (Error); new ones avoid it for 600 s"
    ]
    assert [x["node"] for x in world.status["excludedNodes"]] == ["a-0"]
    (manifest,) = created(made)
    required = manifest["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert required["nodeSelectorTerms"] == [
        {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["a-0"]}]}
    ]
    world.now += timedelta(seconds=601)
    world.reconcile()
    assert world.status["excludedNodes"] == []


@pytest.mark.parametrize(("platform", "told"), [(GKE, True), (KARPENTER, False), (AUTOPILOT, False)])
def test_no_node_is_said_to_be_avoided_where_pods_may_not_name_it(platform: Platform, told: bool) -> None:
    world = Pools(pool("a"), nodes={"a": 1}, replicas=1, nodeExclusion={"failuresBeforeExclude": 1})
    world.settle()
    world.kill_pod("digits-worker-0-0", 1)
    made = plan(replace(world.observation(), platform=platform))
    assert ("NodeExcluded" in {each.reason for each in made.events}) is told
    assert bool(made.status.excluded_nodes) is told


# --- whatever happens -------------------------------------------------------------------------------------------------

counts = st.fixed_dictionaries({}, optional={name: st.integers(0, 6) for name in ("a", "b", "od")})
turns = st.lists(
    st.tuples(
        st.sampled_from(["propose", "pools", "notice", "exit", "vanish", "tick", "wait", "crash"]),
        counts,
        st.integers(0, 99),
    ),
    max_size=20,
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(turns)
def test_workers_end_where_the_plan_says_whatever_happens(
    steps: list[tuple[str, dict[str, int], int]],
) -> None:
    world = auto(maxReplicas=8, minReplicas=0)
    taken = 0
    for step, proposed, number in steps:
        names = [n for n in sorted(world.pods) if "-worker-" in n]
        name = names[number % len(names)] if names else None
        match step:
            case "propose":
                world.propose(proposed)
            case "pools":
                world.manifest["spec"]["workers"]["pools"] = list(proposed) or ["a", "b", "od"]
            case "notice" if name and (node := world.pods[name]["spec"].get("nodeName")):
                world.notice(node)
            case "exit" if name:
                world.kill_pod(name, 1)
            case "vanish" if name:
                world.vanish(name)
            case "tick":
                world.tick()
            case "wait":
                world.tick(seconds=61)
        if step == "crash":
            world.reconcile(crash_after=number % 4)
            continue
        world.reconcile()
        planned = world.status["plan"]["pools"]
        assert planned.keys() <= set(world.manifest["spec"]["workers"]["pools"])
        assert sum(planned.values()) <= 8
        assert world.status["workers"]["desired"] == sum(planned.values())
        taken = len([n for n in world.taken if "-worker-" in n])
        assert sum(world.status["restarts"]["byReason"].values()) <= taken, "a move was counted"
    world.heal()
    for _ in range(8):
        world.tick(seconds=61)
        world.reconcile()
    world.settle()
    assert world.by_pool() == world.status["plan"]["pools"]


moderate = st.fixed_dictionaries({name: st.integers(0, 3) for name in ("a", "b", "od")}).filter(
    lambda counts: sum(counts.values()) > 0
)


@settings(max_examples=100, deadline=None)
@given(moderate, st.lists(moderate, min_size=1, max_size=3), st.sampled_from([1, "100%"]), st.integers(0, 3))
def test_plan_that_goes_back_before_others_run_takes_its_workers_back(
    first: dict[str, int], others: list[dict[str, int]], surge: int | str, ticks: int
) -> None:
    """Wherever plans went meanwhile, whoever still works where the plan wants somebody again stays."""
    world = auto(maxReplicas=9, minReplicas=0, maxSurge=surge)
    world.propose(first)
    world.settle()
    before = {n for n, p in world.pods.items() if "-worker-" in n and p["status"]["phase"] == "Running"}
    for node in set(world.nodes):
        if world.nodes[node]["metadata"]["labels"].get("pool") and not world._on(node):
            del world.nodes[node]  # nothing else starts
    for other in others:
        world.propose(other)
        for _ in range(ticks + 1):
            world.reconcile()
            world.tick(1.0)
    still = {n for n in before if n in world.pods and not world.pods[n]["metadata"].get("deletionTimestamp")}
    world.propose(first)
    for _ in range(3):
        world.reconcile()
        world.tick(1.0)
    kept = {n for n in still if n in world.pods and not world.pods[n]["metadata"].get("deletionTimestamp")}
    assert still == kept


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["Manual", "Auto"]),
    st.lists(
        st.sampled_from(
            [
                ("onDemandBase", 1), ("onDemandBase", 0), ("pools", ["b", "a", "od"]), ("pools", ["a", "od"]),
                ("pools", ["b", "od"]),
                ("pools", ["a", "b", "od"]), ("replicas", 4), ("replicas", 2), ("fallback", FALLBACK),
                ("nodeExclusion", {"failuresBeforeExclude": 2, "cooldownSeconds": 60}), ("zonePolicy", "Preferred"),
                ("zonePolicy", "Any"), ("maxSurge", 1), ("maxSurge", "100%"),
            ]
        ),
        max_size=10,
    ),
)  # fmt: skip
def test_changed_fields_of_a_running_job_take_effect_and_count_nothing(
    mode: str, changes: list[tuple[str, Any]]
) -> None:
    """And where they end as they began, so do the number of workers and the place of those on demand."""
    world = auto(elasticity={"mode": mode})
    first = dict(world.manifest["spec"]["workers"])
    for field, value in [*changes, *first.items()]:
        world.manifest["spec"]["workers"][field] = value
        world.manifest["metadata"]["generation"] += 1
        world.reconcile()
        world.tick()
        world.reconcile()
    world.settle()
    found = world.by_pool()
    assert sum(found.values()) == 2
    assert found.keys() <= {"a", "b", "od"}
    assert world.status["restarts"] == {"failures": 0, "disruptions": 0, "byReason": {}}
    assert world.condition("Degraded").get("status") != "True"
