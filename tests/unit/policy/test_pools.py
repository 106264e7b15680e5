"""Workers in CapacityPools: assignment, fallback and return, excluded nodes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from shoal.controllers.trainingjob.claims import holdings
from shoal.manifests.platforms import AUTOPILOT, GKE, KARPENTER, Platform
from shoal.manifests.pods import Images
from shoal.policy.actions import CreatePod
from shoal.policy.decide.exclusion import exclude
from shoal.policy.facts.read import read
from shoal.policy.model import Refusal, RefusalKind
from shoal.policy.plan import plan
from tests.unit.policy import build
from tests.unit.policy.pools import EXHAUSTED, FALLBACK, Avoiding, Near, Pools, created, pool
from tests.unit.policy.world import World


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
    world = Pools(pool("a", limit=2), pool("b", limit=5), nodes={"a": 5, "b": 5}, replicas=4).settled()
    assert world.by_pool() == {"a": 2, "b": 2}
    assert world.status["plan"]["summary"] == "2 a, 2 b"
    assert {s["pool"] for s in world.slots if s["role"] == "worker"} == {"a", "b"}


def test_more_workers_than_the_pools_have_room_for_are_told() -> None:
    world = Pools(pool("a", limit=2), nodes={"a": 5}, replicas=4).settled()
    assert world.by_pool() == {"a": 2}
    assert world.status["workers"]["desired"] == 2
    degraded = world.condition("Degraded")
    assert degraded["reason"] == "PoolsFull"
    assert "2 workers have no room: raise limits.nodes" in degraded["message"]


def test_workers_have_the_nodes_of_a_limit_that_parameter_servers_do_not_fill() -> None:
    shares = [{"operator": name, "at": build.stamp(build.NOW), "full": 1} for name in ("one", "two")]
    world = Pools(pool("a", limit=4, status={"shares": shares}), nodes={"a": 5}, replicas=4).settled()
    assert world.by_pool() == {"a": 2}
    told = world.condition("Degraded")["message"]
    assert told.startswith("2 workers have no room")
    assert "parameter servers fill 2 of their nodes" in told


def test_workers_stay_where_they_are_while_the_pools_that_replace_theirs_are_full() -> None:
    """An edit of workers.pools: whoever has a place there moves, and no worker ends for nothing."""
    world = Pools(pool("a"), pool("b", limit=1), nodes={"a": 5, "b": 5}, replicas=3).settled()
    assert world.by_pool() == {"a": 3}
    world.manifest["spec"]["workers"]["pools"] = ["b"]
    world.settle()
    assert world.by_pool() == {"a": 2, "b": 1}
    assert world.status["workers"]["ready"] == 3
    assert world.condition("Degraded")["reason"] == "PoolsFull"
    world.pools["b"] = pool("b", limit=2)
    world.settle()
    assert world.by_pool() == {"a": 1, "b": 2}
    world.pools["b"] = pool("b", limit=5)
    world.settle()
    assert world.by_pool() == {"b": 3}
    assert world.status["restarts"] == {"failures": 0, "disruptions": 0, "byReason": {}}


def test_exhausted_pool_is_skipped_by_new_workers() -> None:
    world = Pools(pool("a", status=EXHAUSTED), pool("b"), nodes={"a": 5, "b": 5}, replicas=2).settled()
    assert world.by_pool() == {"b": 2}


def test_worker_that_waits_for_an_exhausted_pool_goes_to_the_next() -> None:
    world = Pools(pool("a"), pool("b"), nodes={"a": 1, "b": 5}, replicas=2).settled()
    assert world.by_pool() == {"a": 1}
    world.pools["a"] = pool("a", status=EXHAUSTED)
    world.settle()
    assert world.by_pool() == {"a": 1, "b": 1}
    assert world.status["restarts"] == {"failures": 0, "disruptions": 0, "byReason": {}}


def test_shrinking_ends_the_worker_that_waits_and_none_that_runs() -> None:
    """Whatever their numbers are."""
    world = Pools(pool("a"), nodes={"a": 3}, replicas=3).settled()
    node = world.pods["digits-worker-0-0"]["spec"]["nodeName"]
    world.notice(node)
    world.tick()
    del world.nodes[node]
    world.settle()
    assert world.pods["digits-worker-0-1"]["status"]["phase"] == "Pending"
    world.manifest["spec"]["workers"]["replicas"] = 2
    world.settle()
    assert {n for n in world.pods if "-worker-" in n} == {"digits-worker-1-0", "digits-worker-2-0"}


def test_in_a_pool_that_is_being_deleted_nothing_more_begins_and_what_runs_stays() -> None:
    """Its nodes were asked for anew, while shoal-pools gave them back."""
    world = Pools(pool("a"), pool("b"), nodes={"a": 1, "b": 5}, replicas=2).settled()
    assert world.by_pool() == {"a": 1}
    about = world.pools["a"].metadata.model_copy(update={"deletion_timestamp": build.stamp(build.NOW)})
    world.pools["a"] = world.pools["a"].model_copy(update={"metadata": about})
    world.settle()
    assert world.by_pool() == {"a": 1, "b": 1}
    assert world.status["restarts"] == {"failures": 0, "disruptions": 0, "byReason": {}}
    degraded = world.condition("Degraded")
    assert degraded["reason"] == "PoolNotReady"
    assert "a is being deleted: no worker begins there" in degraded["message"]
    assert "change workers.pools" in degraded["message"]
    (lost,) = (name for name, pod in world.pods.items() if pod["spec"].get("nodeName", "").startswith("a"))
    world.pods.pop(lost)
    world.settle()
    assert world.by_pool() == {"b": 2}


def test_worker_that_a_queue_holds_back_does_not_fall_back() -> None:
    """What a queue holds back waits for no node of its pool, and begins to when the queue lets it go."""
    world = Pools(pool("a"), pool("od", "OnDemand"), nodes={"od": 5}, replicas=1, fallback=FALLBACK)
    world.manifest["spec"]["runPolicy"]["schedulingPolicy"] = {"queue": "team"}
    world.reconcile()
    waits = {"type": "PodScheduled", "status": "False"}
    status = world.pods["digits-worker-0-0"]["status"]
    status["conditions"] = [{**waits, "reason": "SchedulingGated"}]

    def later(seconds: float) -> tuple[list[str], int]:
        world.now += timedelta(seconds=seconds)
        for _ in range(3):
            world.reconcile()
        workers = [name for name in world.pods if "-worker-" in name]
        return workers, world.status["poolUsage"].get("a", {}).get("unfulfilled", 0)

    assert later(900) == (["digits-worker-0-0"], 0)
    status["conditions"] = [{**waits, "reason": "Unschedulable"}]
    assert later(0) == (["digits-worker-0-0"], 0)
    assert later(299) == (["digits-worker-0-0"], 0)
    assert later(2) == (["digits-worker-0-1"], 1)


def test_time_in_a_queue_is_no_start_up_of_the_pool() -> None:
    for queue, starts in (("", 1), ("team", 0)):
        world = Pools(pool("a"), nodes={"a": 1}, replicas=1)
        world.manifest["spec"]["runPolicy"]["schedulingPolicy"] = {"queue": queue}
        world.settle()
        pushed = {"slot": 0, "incarnation": 0, "state": "Active", "first_push_at": world.now.timestamp()}
        world.report = build.report(workers=(pushed,))
        world.settle()
        assert world.status["poolUsage"]["a"]["warmStarts"] == starts


def test_pod_waits_for_the_node_of_a_worker_of_the_same_job_that_has_not_left_yet() -> None:
    """A plan took a worker out of a full pool, and the next one wants one there while the first still drains."""
    world = Pools(
        pool("a", limit=2),
        pool("b", limit=4),
        nodes={"a": 2, "b": 4},
        replicas=2,
        elasticity={"mode": "Auto"},
    ).settled()
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
    world = Pools(pool("a"), nodes={"a": 3}, replicas=3, elasticity={"mode": "Auto"}).settled()
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


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("least", "number"), [(1, 3), (2, 3), (1, 1), (2, 2)])
def test_two_jobs_swap_all_their_workers_between_full_pools(least: int, number: int) -> None:
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
        job.propose({home: number}, traded=frozenset(homes))
    for _ in range(8):
        for job, other in zip(jobs, reversed(jobs), strict=True):
            job.elsewhere = dict(holdings(other.observation().job))
            job.reconcile()
            job.settle()
            assert sum(job.by_pool().values()) >= least
            together = Counter(job.by_pool()) + Counter(other.by_pool())
            assert max(together.values()) <= 3
    assert [job.by_pool() for job in jobs] == [{"b": number}, {"a": number}]


def test_plan_keeps_to_max_replicas_before_anything_is_proposed() -> None:
    world = Pools(
        pool("a"), pool("b"), nodes={"a": 4, "b": 4}, replicas=2, maxReplicas=8, elasticity={"mode": "Auto"}
    )
    world.propose({"a": 3, "b": 2})
    world.settle()
    assert world.by_pool() == {"a": 3, "b": 2}
    world.manifest["spec"]["workers"]["maxReplicas"] = 4
    world.proposal = None
    world.settle()
    assert world.by_pool() == {"a": 3, "b": 1}
    assert world.status["plan"]["reason"] == "workers.maxReplicas is 4 now"


def test_unknown_pool_is_told_and_workers_run_in_the_others() -> None:
    world = Pools(pool("a"), nodes={"a": 3}, replicas=2)
    world.manifest["spec"]["workers"]["pools"] = ["gone", "a"]
    world.settle()
    degraded = world.condition("Degraded")
    assert degraded["reason"] == "PoolNotFound"
    assert "CapacityPool gone does not exist: create it, or change workers.pools" in degraded["message"]
    assert world.by_pool() == {"a": 2}


def test_a_pool_that_cannot_be_read_is_told_with_the_reason() -> None:
    """It "did not exist", though everybody saw it."""
    world = Pools(pool("a"), nodes={"a": 3}, replicas=2)
    world.manifest["spec"]["workers"]["pools"] = ["broken", "a", "gone"]
    world.unreadable = {"broken": "spec.limits.nodes: Input should be a valid integer"}
    world.settle()
    degraded = world.condition("Degraded")
    assert degraded["reason"] == "PoolNotFound"
    assert "CapacityPool gone does not exist" in degraded["message"]
    words = "this version of Shoal cannot read CapacityPool broken (spec.limits.nodes: Input should be a valid integer)"
    assert words in degraded["message"]
    assert world.by_pool() == {"a": 2}


def test_of_a_pool_that_nobody_reads_it_is_not_said_that_it_does_not_exist() -> None:
    world = Pools(nodes={}, replicas=1, pools=["a"])
    world.no_pools = "it reads none"
    world.settle()
    degraded = world.condition("Degraded")
    assert degraded["reason"] == "PoolNotFound"
    assert (
        degraded["message"]
        == "the operator does not know CapacityPool a, which workers.pools names: it reads none"
    )


@pytest.mark.parametrize("kind", [RefusalKind.INVALID, RefusalKind.FORBIDDEN])
def test_a_pool_whose_pods_are_refused_keeps_no_worker_of_another_from_its_replacement(
    kind: RefusalKind,
) -> None:
    """A typing error in its labels, or a policy about its nodes."""
    world = Pools(pool("good", limit=2), pool("odd"), nodes={"good": 3, "odd": 3}, replicas=2).settled()
    world.manifest["spec"]["workers"]["replicas"] = 4
    name = "digits-worker-2-0"
    world.refusals[name] = Refusal(
        kind, name, "nodeSelector: Invalid value", world.specs("odd"), build.at(world.now), pool="odd"
    )
    world.reconcile()
    world.notice("good-0")
    made = world.reconcile()
    assert [(a.name, a.pool) for a in made.actions if isinstance(a, CreatePod)] == [
        ("digits-worker-0-1", "good")
    ]
    stalled = world.condition("Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", kind.value)


def test_an_unknown_pool_is_told_before_what_its_pods_suffer() -> None:
    message = [{"type": "PodScheduled", "status": "False", "message": "0/4 nodes are available"}]
    pod = build.pod("ps", phase="Pending", node=None, state={}, conditions=message)
    of = build.job(workers={"replicas": 2, "pools": ["gone"]})
    degraded = plan(build.observe(of, pod, now=build.NOW + timedelta(seconds=60))).status.condition(
        "Degraded"
    )
    assert degraded is not None
    assert degraded.reason == "PoolNotFound"


@pytest.mark.parametrize(
    ("shoals", "of_the_job", "image"),
    [("", "", None), ("gpu:1", "", "gpu:1"), ("", "mine:1", "mine:1"), ("gpu:1", "mine:1", "mine:1")],
)
def test_workers_go_to_gpus_with_an_image_that_can_use_them(
    shoals: str, of_the_job: str, image: str | None
) -> None:
    """The one for CPUs would end with NoAccelerator, on a node that is paid for."""
    container = {"name": "worker"} | ({"image": of_the_job} if of_the_job else {})
    template = {"spec": {"containers": [container]}}
    world = Pools(pool("gpus"), pool("cpus", accelerator=None), nodes={}, replicas=2, template=template)
    images = Images(ps="ps:1", worker="worker:1", worker_gpu=shoals)
    made = plan(replace(world.observation(), images=images))
    pods = [each["spec"] for each in created(made)]
    assert {(each["nodeSelector"]["pool"], each["containers"][0]["image"]) for each in pods} == {
        ("gpus", image) if image else ("cpus", "worker:1")
    }
    degraded = made.status.condition("Degraded")
    assert (degraded is not None) == (image is None)
    if degraded is not None:
        assert degraded.reason == "NoGpuImage"
        assert "CapacityPool gpus have GPUs" in degraded.message
        assert "trainer.workerGpuImage" in degraded.message


def test_workers_stay_when_the_pools_cannot_be_seen() -> None:
    world = Pools(pool("a"), nodes={"a": 3}, replicas=2).settled()
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


@pytest.mark.parametrize("servers", [{}, {"pools": ["od"]}])
def test_zone_policy_same_holds_while_nodes_cannot_be_read(servers: dict[str, Any]) -> None:
    """For half a minute each pool was as good as another: workers began where the server's zone keeps them from."""
    near, far = pool("near", zone="z2", price=2), pool("far", zone="z1", price=1)
    on_demand = pool("od", "OnDemand", zone="z2")
    world = Pools(
        near,
        far,
        on_demand,
        nodes={"near": 3, "far": 3, "od": 1},
        replicas=1,
        zonePolicy="Same",
        servers=servers,
    )
    world.manifest["spec"]["workers"]["pools"] = ["far", "near"]
    for node in ("safe-0", "safe-1", "od-0"):
        world.nodes[node]["metadata"]["labels"]["topology.kubernetes.io/zone"] = "z2"
    world.manifest["spec"]["workers"]["replicas"] = 0
    world.settle()
    world.manifest["spec"]["workers"]["replicas"] = 1
    world.settle()
    assert world.by_pool() == {"near": 1}
    world.manifest["spec"]["workers"]["replicas"] = 3
    blind = plan(replace(world.observation(), nodes={}, node_signals=False))
    assert [each.pool for each in blind.actions if isinstance(each, CreatePod)] == ["near", "near"]


# --- without surge ----------------------------------------------------------------------------------------------------


def without_surge(surge: int | str = 0, **more: Any) -> Pools:
    world = Pools(pool("a"), pool("b"), nodes={"a": 3, "b": 3}, replicas=3, maxSurge=surge, **more)
    world.manifest["spec"]["workers"]["pools"] = ["a"]
    world.settle()
    assert world.by_pool() == {"a": 3}
    return world


@pytest.mark.parametrize("surge", [0, "0%"])
def test_without_surge_workers_move_one_after_another(surge: int | str) -> None:
    """None ever did: each waited for its successor, which had to wait for it."""
    world = without_surge(surge)
    world.quota = len(world.pods)  # as where it has no room for one more
    world.manifest["spec"]["workers"]["pools"] = ["b"]
    for _ in range(40):
        world.reconcile()
        assert world.at_work() >= 2
        assert world.status["workers"]["ready"] >= 2
        assert (world.condition("Reconciling")["status"] == "True") is (world.by_pool() != {"b": 3})
        world.tick()
    assert world.by_pool() == {"b": 3}
    assert world.status["restarts"]["disruptions"] == 0


def test_without_surge_one_worker_at_most_waits_for_nodes_that_do_not_come() -> None:
    world = without_surge()
    for node in ("b-0", "b-1", "b-2"):
        del world.nodes[node]
    world.manifest["spec"]["workers"]["pools"] = ["b"]
    for _ in range(20):
        world.reconcile()
        world.tick()
    assert world.by_pool() == {"a": 2}
    assert (world.status["workers"]["ready"], world.status["workers"]["pending"]) == (2, 1)


def test_without_surge_no_worker_leaves_for_a_pool_that_is_out_of_nodes() -> None:
    world = without_surge()
    world.pools["b"] = pool("b", status=EXHAUSTED)
    world.manifest["spec"]["workers"]["pools"] = ["b"]
    for _ in range(5):
        world.reconcile()
        world.tick()
    assert world.by_pool() == {"a": 3}


def test_without_surge_a_worker_returns_from_on_demand() -> None:
    world = Pools(
        pool("a"), pool("od", "OnDemand"), nodes={"a": 1, "od": 5}, replicas=2, maxSurge=0, fallback=FALLBACK
    ).settled()
    world.now += timedelta(seconds=301)
    world.settle()
    assert world.by_pool() == {"a": 1, "od": 1}
    world.add("a-9", "a")
    world.now += timedelta(seconds=1800)
    world.settle()
    assert world.by_pool() == {"a": 2}


def test_workers_that_move_are_told_as_ready_until_their_successors_run() -> None:
    """They train: the job had no ready worker, was below its minimum and disrupted, as long as nodes took to come."""
    world = without_surge("100%", minReplicas=3)
    for node in ("b-0", "b-1", "b-2"):
        del world.nodes[node]
    world.manifest["spec"]["workers"]["pools"] = ["b"]
    for _ in range(3):
        world.reconcile()
        world.tick()
    found = world.status["workers"]
    assert {name: found[name] for name in ("active", "ready", "pending")} == {
        "active": 3,
        "ready": 3,
        "pending": 3,
    }
    assert world.condition("WorkersReady")["status"] == "True"
    assert world.condition("Disrupted").get("status") != "True"
    reconciling = world.condition("Reconciling")
    assert (reconciling["status"], reconciling["message"]) == ("True", "workers move to other nodes")


# --- on demand --------------------------------------------------------------------------------------------------------


def test_on_demand_base_lives_on_demand_and_others_on_spot() -> None:
    world = Pools(
        pool("a"), pool("od", "OnDemand"), nodes={"a": 5, "od": 5}, replicas=3, onDemandBase=1
    ).settled()
    assert world.by_pool() == {"a": 2, "od": 1}
    world.manifest["spec"]["workers"]["onDemandBase"] = 2
    world.settle()
    assert world.by_pool() == {"a": 1, "od": 2}
    assert world.status["restarts"]["disruptions"] == 0


def test_workers_fall_back_to_on_demand_and_return() -> None:
    world = Pools(
        pool("a"), pool("od", "OnDemand"), nodes={"a": 1, "od": 5}, replicas=2, fallback=FALLBACK
    ).settled()
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


def test_worker_whose_server_is_late_does_not_wait_for_a_spot_node() -> None:
    """No scheduler binds it before, and no autoscaler makes it a node: it was on demand before there was a server."""
    world = Near(pool("a"), pool("od", "OnDemand"), replicas=1, fallback=FALLBACK)

    def told() -> tuple[list[str], int]:
        homes = [p["metadata"]["labels"]["shoal.dev/pool"] for n, p in world.pods.items() if "-worker-" in n]
        return homes, world.status.get("poolUsage", {}).get("a", {}).get("unfulfilled", 0)

    world.wait(400)
    assert told() == (["a"], 0)
    world.has_server = True
    world.wait(290)
    assert told() == (["a"], 0)
    world.wait(60)
    assert told() == (["od"], 1)


def test_worker_that_tried_to_return_in_vain_waits_before_it_tries_again() -> None:
    world = Pools(
        pool("a"), pool("od", "OnDemand"), nodes={"a": 1, "od": 5}, replicas=2, fallback=FALLBACK
    ).settled()
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
    world = World(workers=1, spot_nodes=0, spec={"workers": {"replicas": 1, "fallback": FALLBACK}}).settled()
    world.now += timedelta(seconds=301)
    made = world.reconcile()
    (manifest,) = created(made)
    required = manifest["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = required["nodeSelectorTerms"]
    assert {e["operator"] for e in term["matchExpressions"]} == {"NotIn"}
    assert "FellBackToOnDemand" in {e.reason for e in made.events}
    assert [n for n in world.pods if "-worker-" in n] == ["digits-worker-0-1"]


def test_workers_are_made_where_the_newest_server_is_while_the_one_before_it_is_still_there() -> None:
    """It was on a machine of a zone that is lost, and its pod was Terminating: for a minute, workers waited there."""
    zone = "topology.kubernetes.io/zone"
    pools = pool("a", zone="a"), pool("b", zone="b")
    world = Pools(*pools, nodes={"a": 3, "b": 3}, zonePolicy="Same", replicas=3)
    for name, node in world.nodes.items():
        node["metadata"]["labels"][zone] = "b" if name.startswith("b") or name == "safe-1" else "a"
    world.settle()
    assert world.by_pool() == {"a": 3}
    world.report_age = 100.0
    for name in ("safe-0", "a-0", "a-1", "a-2"):
        world.kill_node(name)
    for _ in range(4):
        world.reconcile()
        world.tick()
    assert world.pods["digits-ps-0-0"]["metadata"]["deletionTimestamp"], "it is still there"
    homes = {s["index"]: s["pool"] for s in world.slots if s["role"] == "worker"}
    assert set(homes.values()) == {"b"}


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


def test_as_many_nodes_as_a_status_holds_are_avoided_the_newest_first() -> None:
    rule = {"failuresBeforeExclude": 2, "cooldownSeconds": 600}
    world = Pools(pool("a"), nodes={"a": 1}, replicas=1, nodeExclusion=rule)
    world.status["slots"] = [{"index": number, "node": f"node-{number}"} for number in range(140)]
    facts = read(world.observation())
    failed = [(f"node-{number}", f"Reason{number}") for number in range(70)]
    once = exclude(facts, failed)
    assert list(once.failures) == [f"node-{number}" for number in range(6, 70)]
    twice = exclude(facts, [*failed, *failed])
    assert [each.node for each in twice.nodes] == [f"node-{number}" for number in range(6, 70)]


def fail_on(world: Pools, *nodes: str, seconds: float = 5.0) -> list[str]:
    """The workers on these nodes fail, and are replaced there. The nodes that are avoided then."""
    on = {
        p["spec"].get("nodeName"): name for name, p in world.pods.items() if p["status"]["phase"] == "Running"
    }
    for node in nodes:
        world.kill_pod(on[node], 1)
    for _ in range(4):
        world.reconcile()
        world.tick(seconds / 4)
    return [each["node"] for each in world.status.get("excludedNodes", [])]


def test_what_most_nodes_see_at_once_is_held_against_none() -> None:
    """A storage was away for 8 s: all nodes of the pool were avoided for an hour, and no worker was left."""
    world = Pools(pool("a"), nodes={"a": 3}, replicas=3, nodeExclusion={}).settled()
    for _ in range(3):
        assert fail_on(world, "a-0", "a-1", "a-2", seconds=20.0) == []
    assert world.status.get("nodeFailures", {}) == {}


@pytest.mark.parametrize("replicas", [2, 3])
def test_two_nodes_that_fail_at_once_are_avoided_by_a_job_of_few_workers(replicas: int) -> None:
    """They were bad, and most of its nodes: none was avoided, and the job failed for good with eight good ones."""
    world = Pools(pool("a"), nodes={"a": 10}, replicas=replicas, nodeExclusion={}).settled()
    assert fail_on(world, "a-0", "a-1") == []
    assert fail_on(world, "a-0", "a-1") == ["a-0", "a-1"]


@pytest.mark.parametrize("minutes", [0, 2])
@pytest.mark.parametrize("pools", [True, False], ids=["in a pool", "without pools"])
def test_a_worker_that_goes_from_one_bad_node_to_another_avoids_both(pools: bool, minutes: int) -> None:
    """Its own end on the first was taken for that of another; later, half of its nodes were said to be avoided."""
    where: dict[str, Any] = {} if pools else {"pools": [], "capacity": "Spot"}
    world = Avoiding(
        pool("spot"), nodes={"spot": 10, "od": 2}, replicas=1, nodeExclusion={}, **where
    ).settled()
    for node in ("spot-0", "spot-0", "spot-1", "spot-1"):
        excluded = fail_on(world, node)
        world.now += timedelta(minutes=minutes)
        world.settle()
    assert excluded == ["spot-0", "spot-1"]


def test_a_node_stays_avoided_when_another_one_fails_once() -> None:
    """It was avoided no longer, and took one worker after another again."""
    world = Pools(pool("a"), nodes={"a": 3}, replicas=3, nodeExclusion={}).settled()
    assert fail_on(world, "a-0") == []
    assert fail_on(world, "a-0") == ["a-0"]
    assert fail_on(world, "a-1") == ["a-0"]


def test_what_was_held_against_the_first_nodes_of_an_outage_is_forgotten() -> None:
    world = Pools(pool("a"), nodes={"a": 3}, replicas=3, nodeExclusion={}).settled()
    fail_on(world, "a-0")
    assert fail_on(world, "a-0", "a-1") == ["a-0"], "as of a node that is broken"
    assert fail_on(world, "a-2") == []
    assert world.status.get("nodeFailures", {}) == {}


def test_nodes_that_fail_at_once_while_more_do_not_are_avoided() -> None:
    world = Pools(pool("a"), nodes={"a": 5}, replicas=5, nodeExclusion={}).settled()
    assert fail_on(world, "a-0", "a-3") == []
    assert fail_on(world, "a-0", "a-3") == ["a-0", "a-3"]


def test_half_of_the_nodes_are_left_however_they_fail() -> None:
    world = Pools(pool("a"), nodes={"a": 4}, replicas=4, nodeExclusion={"failuresBeforeExclude": 1}).settled()
    for number in range(4):
        excluded = fail_on(world, f"a-{number}")
        world.now += timedelta(minutes=2)
    assert excluded == ["a-0", "a-1"]


def test_half_of_the_nodes_of_a_pool_are_left_whatever_others_it_could_be_on() -> None:
    """What is avoided of another pool, or is gone, takes none of them."""
    rule = {"failuresBeforeExclude": 1}
    pools = pool("a", limit=2), pool("b", limit=4)
    world = Pools(*pools, nodes={"a": 2, "b": 10}, replicas=6, nodeExclusion=rule).settled()
    for node in ("b-0", "b-1", "a-0", "a-1", "b-2"):
        excluded = fail_on(world, node)
        world.now += timedelta(minutes=2)
    assert excluded == ["b-0", "b-1", "a-0", "b-2"]


@pytest.mark.parametrize(("avoided", "then"), [([0], [0, 3]), ([0, 1], [0, 1])])
def test_half_of_the_nodes_that_a_job_had_are_left_where_none_can_be_read(
    avoided: list[int], then: list[int]
) -> None:
    world = Pools(pool("a"), nodes={"a": 1}, replicas=1, nodeExclusion={"failuresBeforeExclude": 1})
    until = {"reason": "Error", "until": build.stamp(world.now + timedelta(minutes=30))}
    world.status["excludedNodes"] = [{"node": f"node-{each}", **until} for each in avoided]
    world.status["slots"] = [{"index": n, "node": f"node-{n}"} for n in range(4) if n not in avoided]
    facts = read(replace(world.observation(), nodes={}, node_signals=False))
    assert [each.node for each in exclude(facts, [("node-3", "Error")]).nodes] == [f"node-{n}" for n in then]


@pytest.mark.parametrize(("platform", "told"), [(GKE, True), (KARPENTER, False), (AUTOPILOT, False)])
def test_no_node_is_said_to_be_avoided_where_pods_may_not_name_it(platform: Platform, told: bool) -> None:
    world = Pools(pool("a"), nodes={"a": 1}, replicas=1, nodeExclusion={"failuresBeforeExclude": 1}).settled()
    world.kill_pod("digits-worker-0-0", 1)
    made = plan(replace(world.observation(), platform=platform))
    assert ("NodeExcluded" in {each.reason for each in made.events}) is told
    assert bool(made.status.excluded_nodes) is told


def test_a_pool_that_is_corrected_is_asked_for_pods_at_once() -> None:
    world = Pools(pool("odd"), nodes={"odd": 1}, replicas=1)
    name, words = "digits-worker-0-0", "nodeSelector: Invalid value"
    world.refusals[name] = Refusal(
        RefusalKind.INVALID, name, words, world.specs("odd"), build.at(world.now), times=9, pool="odd"
    )

    def made() -> list[str]:
        return [a.name for a in plan(world.observation()).actions if isinstance(a, CreatePod) and a.pool]

    assert made() == []
    world.pools["odd"] = world.pools["odd"].model_copy(
        update={"metadata": world.pools["odd"].metadata.model_copy(update={"generation": 2})}
    )
    assert made() == [name]


@pytest.mark.parametrize("kind", [RefusalKind.INVALID, RefusalKind.FORBIDDEN])
def test_without_surge_no_worker_ends_for_a_pool_whose_pods_are_refused(kind: RefusalKind) -> None:
    world = without_surge()
    world.manifest["spec"]["workers"]["pools"] = ["b"]
    name = "digits-worker-0-1"
    for _ in range(6):
        world.refusals[name] = Refusal(
            kind, name, "a wrong label", world.specs("b"), build.at(world.now), pool="b"
        )
        world.reconcile()
        assert world.at_work() == 3
        world.tick()
    assert world.condition("Stalled")["status"] == "True"


@pytest.mark.parametrize("pools", ["full", "missing"])
def test_job_whose_workers_have_no_place_says_that_and_not_that_none_are_wanted(pools: str) -> None:
    world = Pools(pool("a", limit=2), nodes={"a": 2}, replicas=3)
    world.elsewhere = {"a": 2}
    if pools == "missing":
        world.pools = {}
    world.settle()
    reason = "PoolsFull" if pools == "full" else "PoolNotFound"
    assert (world.status["workers"]["desired"], world.status["reason"]) == (0, reason)
    assert world.condition("Running")["reason"] == "Waiting"
    assert "see the condition Degraded" in world.condition("Running")["message"]
    assert world.condition("Reconciling")["status"] == "True"


def test_worker_that_moves_to_an_on_demand_pool_is_not_said_to_be_back_on_spot() -> None:
    world = Pools(
        pool("a"), pool("od", "OnDemand"), nodes={"a": 4, "od": 4}, replicas=2, fallback=FALLBACK
    ).settled()
    world.manifest["spec"]["workers"]["onDemandBase"] = 1
    told = []
    for _ in range(8):
        told += [event.reason for event in world.reconcile().events]
        world.tick()
    assert world.by_pool() == {"a": 1, "od": 1}
    assert "ReturnedToSpot" not in told
