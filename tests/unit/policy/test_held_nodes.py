"""Which nodes a job has whose pods are there, and have none: those that its pods may get."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from shoal.api.training_job import TrainingJob
from shoal.controllers.trainingjob.claims import holdings
from shoal.policy.actions import CreatePod
from shoal.policy.plan import plan
from shoal.sizing.fleet.jobs import fleet_job
from tests.unit.policy import build
from tests.unit.policy.pools import Pools, pool

GATED = {"reason": "SchedulingGated"}
LABELS = {"message": "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector."}
SERVER = {
    "message": "0/3: 1 node(s) didn't match Pod's node affinity/selector, 2 didn't match pod affinity rules."
}
VOLUME = {"message": 'persistentvolumeclaim "data" not found. preemption: not eligible.'}
FULL = {"message": "0/3 nodes are available: 1 Insufficient cpu, 2 node(s) didn't match Pod's node affinity."}


class Waiting(Pools):
    """Four workers have pods, and two of them the nodes of the pool."""

    def __init__(
        self,
        mode: str,
        *,
        ready_seconds: int = 3600,
        asks: Any = None,
        zonePolicy: str = "Same",
        **of_pool: Any,
    ) -> None:
        self.container = {"name": "worker", "resources": {"limits": asks or {}}}
        spec = {
            "replicas": 4,
            "minReplicas": 4,
            "maxReplicas": 4,
            "maxSurge": 0,
            "zonePolicy": zonePolicy,
            "elasticity": {"mode": mode},
        }
        super().__init__(pool("a", **{"status": {"nodes": 2}, **of_pool}), nodes={"a": 2}, **spec)
        self.propose({"a": 4})
        self.settle()
        ready = build.NOW.timestamp() - ready_seconds
        for node in self.nodes.values():
            node["metadata"]["creationTimestamp"] = build.stamp(
                build.NOW.fromtimestamp(ready, build.NOW.tzinfo)
            )

    def said(self, how: dict[str, str]) -> None:
        """The scheduler says why the two others have none."""
        told = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", **how}
        for name, pod in self.pods.items():
            if "-worker-" in name and not pod["spec"].get("nodeName"):
                pod["status"]["conditions"] = [told]
                pod["spec"]["containers"] = [self.container]

    def holds(self) -> dict[str, int]:
        """The nodes that it has, by its plan, by what is stored of that, and as the planner has it."""
        job, made = self.job, plan(self.observation())
        stored = job.model_copy(update={"status": made.status})
        stored = TrainingJob.model_validate(stored.model_dump(mode="json", by_alias=True, exclude_none=True))
        planned = fleet_job(stored, None, self.now)
        found = dict(holdings(job, made))
        assert holdings(stored) == found
        assert {name: n for name, n in planned.holds(planned.under_way).items() if n} == found
        return found


@pytest.mark.parametrize("mode", ["Auto", "Advise", "Manual", "Off"])
@pytest.mark.parametrize(
    ("how", "seconds", "has"),
    [
        (GATED, 0, 2),
        (LABELS, 10, 4),
        (LABELS, 301, 2),
        (VOLUME, 10, 4),
        (VOLUME, 301, 2),
        (FULL, 7200, 4),
        (SERVER, 7200, 4),
        ({}, 7200, 4),
    ],
    ids=[
        "queue",
        "labels",
        "labels for long",
        "volume",
        "volume for long",
        "full",
        "near a server",
        "nothing",
    ],
)
def test_job_has_no_node_for_a_worker_that_none_would_take(
    how: dict[str, str], seconds: int, has: int, mode: str
) -> None:
    """A mistake in a template bought a shared pool up to its limit, and kept it from all other jobs for ever."""
    world = Waiting(mode)
    world.tick(seconds)
    world.said(how)
    assert world.holds() == {"a": has}
    world.said(FULL)  # the queue, or who made the mistake, lets them go
    assert world.holds() == {"a": 4}


@pytest.mark.parametrize("mode", ["Auto", "Manual"])
@pytest.mark.parametrize(
    ("ready_seconds", "nodes"), [(-200, 2), (3600, 0)], ids=["the first is new", "there is none"]
)
def test_job_has_the_nodes_of_workers_that_wait_while_the_pool_has_none_that_shows_more(
    ready_seconds: int, nodes: int, mode: str
) -> None:
    """What the scheduler said before there was one, it says of the others of the cluster."""
    world = Waiting(mode, ready_seconds=ready_seconds, status={"nodes": nodes})
    world.tick(301)
    world.said(LABELS)
    assert world.holds() == {"a": 4}


@pytest.mark.parametrize("mode", ["Auto", "Manual"])
def test_other_workers_are_made_beside_those_that_a_queue_holds_back(mode: str) -> None:
    """All at once: a queue may let none go before it has seen them all."""
    world = Waiting(mode)
    world.said(GATED)
    world.reconcile()
    world.manifest["spec"]["workers"] |= {"replicas": 8, "maxReplicas": 8}
    if mode == "Auto":
        world.propose({"a": 8}, urgent=True)
    made = plan(world.observation())
    assert sum(isinstance(each, CreatePod) for each in made.actions) == 4


OF_8, OF_64 = {"cpu": "8", "memory": "32Gi"}, {"cpu": "64", "memory": "256Gi"}


@pytest.mark.parametrize("mode", ["Auto", "Manual"])
@pytest.mark.parametrize(
    ("asks", "nodes", "seconds", "ready_seconds", "has"),
    [
        ({"cpu": "500"}, [OF_8, OF_64], 301, 3600, 2),
        ({"cpu": "500"}, [OF_8, OF_64], 10, 3600, 4),
        ({"cpu": "500"}, [OF_8, OF_64], 301, -200, 4),
        ({"cpu": "32"}, [OF_8, OF_64], 7200, 3600, 4),
        ({"cpu": "500"}, [{}, {}], 7200, 3600, 4),
        ({"nvidia.com/gpu": "1"}, [OF_8, OF_64], 7200, 3600, 4),
        ({"nvidia.com/gpu": "8"}, [{**OF_8, "nvidia.com/gpu": "1"}] * 2, 301, 3600, 2),
        ({"nvidia.com/gpu": "8"}, [{**OF_8, "nvidia.com/gpu": "1"}, OF_8], 7200, 3600, 4),
        ({"hugepages-2Mi": "1Gi"}, [{**OF_8, "hugepages-2Mi": "0"}] * 2, 301, 3600, 2),
    ],
    ids=[
        *("more than any has", "not for long", "all are new", "one has room", "nobody knows"),
        *("no driver yet", "more GPUs", "no driver on one", "huge pages"),
    ],
)
def test_job_has_no_node_for_a_worker_that_is_too_large_for_any(
    asks: Any, nodes: list[Any], seconds: int, ready_seconds: int, has: int, mode: str
) -> None:
    world = Waiting(mode, asks=asks, ready_seconds=ready_seconds)
    for node, there in zip(("a-0", "a-1"), nodes, strict=True):
        world.nodes[node]["status"]["allocatable"] = there
    world.tick(seconds)
    world.said(
        {"message": "0/3 nodes are available: 2 Insufficient cpu, 1 node(s) didn't match node selector."}
    )
    assert world.holds() == {"a": has}


def test_job_is_told_why_others_have_its_nodes() -> None:
    world = Waiting("Manual")
    world.tick(301)
    world.said(LABELS)
    told = plan(world.observation()).status.words
    assert (
        "no node of CapacityPool a is as the pod asks (nodeSelector and affinity of workers.template" in told
    )
    assert "after 5 minutes its node is left to other jobs" in told
    world.said(FULL)
    assert "needs a node of CapacityPool a with room" in plan(world.observation()).status.words


SOME_MATCH = "0/4 nodes are available: {}, 3 node(s) didn't match Pod's node affinity/selector."


@pytest.mark.parametrize("mode", ["Auto", "Manual"])
@pytest.mark.parametrize(
    "why",
    [
        "1 cannot allocate all claims",
        "1 node(s) exceed max volume count",
        "1 node(s) did not have enough free storage",
        "1 Too many pods",
    ],
)
def test_job_has_the_node_of_a_worker_that_the_next_one_would_take(why: str, mode: str) -> None:
    """The nodes that do not match are of others; that of the pool is full, for whatever reason."""
    world = Waiting(mode)
    world.tick(301)
    world.said({"message": SOME_MATCH.format(why)})
    assert world.holds() == {"a": 4}


def test_nodes_that_a_job_avoids_say_nothing_of_the_next_one() -> None:
    world = Waiting("Manual")
    until = build.stamp(build.NOW + timedelta(hours=1))
    world.status["excludedNodes"] = [{"node": f"a-{n}", "reason": "Failures", "until": until} for n in (0, 1)]
    world.tick(301)
    world.said(LABELS)
    assert world.holds() == {"a": 4}


@pytest.mark.parametrize(
    ("asks", "there", "cores", "has"),
    [
        ({"cpu": "16"}, OF_8, 32, 4),
        ({"cpu": "8"}, {**OF_8, "cpu": "7910m"}, 8, 2),
        ({"nvidia.com/gpu": "1"}, {**OF_8, "nvidia.com/gpu": "0"}, 8, 4),
    ],
    ids=["larger ones are to come", "its system has a part", "its device plugin begins again"],
)
def test_job_has_the_node_of_a_worker_that_one_to_come_would_take(
    asks: Any, there: Any, cores: int, has: int
) -> None:
    world = Waiting("Manual", asks=asks, cores=cores)
    for node in world.nodes.values():
        node["status"]["allocatable"] = there
    world.tick(301)
    world.said(
        {"message": "0/3 nodes are available: 2 Insufficient cpu, 1 node(s) didn't match node selector."}
    )
    assert world.holds() == {"a": has}


@pytest.mark.parametrize("elsewhere", [0, 4], ids=["they back off", "the pool is full"])
def test_what_a_job_is_kept_to_is_without_its_queued_worker_once(elsewhere: int) -> None:
    """Taken off at each look, it went from 9 to 5 and back, with a write each time, and the job's nodes to others."""
    spec = {"replicas": 10, "minReplicas": 1, "maxReplicas": 10, "elasticity": {"mode": "Auto"}}
    world = Pools(pool("a", limit=10), nodes={"a": 9}, **spec)
    world.propose({"a": 10})
    world.settle()
    workers = {name: each for name, each in world.pods.items() if "-worker-" in name}
    (queued,) = (each for each in workers.values() if not each["spec"].get("nodeName"))
    queued["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", **GATED}]
    world.reconcile()
    running = [name for name, each in workers.items() if each is not queued]
    for name in running[:4]:
        if elsewhere:
            del world.nodes[world.pods[name]["spec"]["nodeName"]]
            world.vanish(name)
        else:
            world.kill_pod(name, 1)
    world.elsewhere = {"a": elsewhere}
    for _ in range(6):
        made = plan(world.observation())
        assert holdings(world.job, made) == {"a": 9}
        world.status = made.status.model_dump(mode="json", by_alias=True, exclude_none=True)
        assert world.status["plan"]["inVain"] == {"a": 1}


@pytest.mark.parametrize("zone", ["Any", "Same"])
@pytest.mark.parametrize("how", [LABELS, VOLUME], ids=["labels", "volume"])
def test_server_that_moves_makes_no_worker_in_vain_one_that_waits_for_a_node(zone: str, how: Any) -> None:
    """Near it, they were taken to wait anew: their nodes were bought at each loss of the server."""
    world = Waiting("Manual", zonePolicy=zone)
    world.tick(301)
    world.said(how)
    assert world.holds() == {"a": 2}
    (server,) = (name for name in world.pods if "-ps-" in name)
    node = world.pods[server]["spec"]["nodeName"]
    world.kill_node(node)
    world.vanish(server)
    del world.nodes[node]
    world.nodes["safe-9"] = build.node_manifest("safe-9", spot=False)
    for _ in range(5):
        world.reconcile()
        assert world.holds() == {"a": 2}
        world.tick(10)
    assert any("-ps-" in name for name in world.pods.keys() - {server})


@pytest.mark.parametrize("mode", ["Auto", "Manual"])
@pytest.mark.parametrize(("seconds", "has"), [(10, 4), (301, 2)])
def test_job_has_no_node_for_a_worker_that_no_scheduler_looks_at(seconds: int, has: int, mode: str) -> None:
    world = Waiting(mode)
    for name, pod in world.pods.items():
        if "-worker-" in name and not pod["spec"].get("nodeName"):
            pod["spec"]["schedulerName"] = "volcano"
            pod["status"]["conditions"] = []
    world.tick(seconds)
    assert world.holds() == {"a": has}


@pytest.mark.parametrize("name", ["default-scheduler", "volcano"])
def test_job_has_the_nodes_of_its_workers_while_their_scheduler_is_behind(name: str) -> None:
    """It has looked at others of them: down for five minutes, it took the nodes from all jobs at once."""
    world = Waiting("Manual")
    for each, pod in world.pods.items():
        if "-worker-" in each:
            pod["spec"]["schedulerName"] = name
            if not pod["spec"].get("nodeName"):
                pod["status"]["conditions"] = []
    world.tick(301)
    assert world.holds() == {"a": 4}


def test_job_that_begins_has_its_nodes_while_the_scheduler_is_behind() -> None:
    world = Pools(pool("a"), nodes={}, replicas=4, maxReplicas=4, elasticity={"mode": "Manual"})
    world.reconcile()
    for pod in world.pods.values():
        pod["status"]["conditions"] = []
    world.now += timedelta(seconds=301)
    assert holdings(world.job, plan(world.observation())) == {"a": 4}


def test_job_that_nothing_is_advised_yet_has_no_node_for_a_worker_that_a_queue_holds_back() -> None:
    """Where there was no plan, nothing said so; nor is that alone a plan."""
    world = Waiting("Advise")
    world.proposal = None
    world.status.pop("plan", None)
    world.said(GATED)
    world.reconcile()
    assert world.holds() == {"a": 2}
    assert world.status["plan"]["inVain"] == {"a": 2}
    world.said(FULL)
    world.reconcile()
    assert "plan" not in world.status
    world.said(GATED)
    world.reconcile()
    world.manifest["spec"]["elasticity"] = {"mode": "Auto"}
    world.manifest["spec"]["workers"]["minReplicas"] = 1
    world.propose({"a": 3}, age=0)
    world.reconcile()
    assert world.status["plan"]["pools"] == {"a": 3}, "the first plan is carried out at once"
