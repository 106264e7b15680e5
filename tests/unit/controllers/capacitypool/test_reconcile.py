"""What a pool's controller sees of pods."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from typing import Any

import pytest

from shoal.api.capacity_pool import CapacityPool
from shoal.api.capacity_pool_status import CapacityPoolStatus
from shoal.api.kube import Node, Pod
from shoal.api.labels import RoleName
from shoal.api.training_job import TrainingJob
from shoal.cluster.transport import Answer
from shoal.controllers.capacitypool.reconcile import EVERY_SECONDS, REST_SECONDS, PoolReconciler
from shoal.controllers.state import ClusterState, Wakes
from shoal.runtime.controller import Controller, Key, key_of
from shoal.runtime.metrics import Metrics
from shoal.runtime.recorder import Recorder
from shoal.runtime.status_writer import StatusWriter, collection_path
from shoal.runtime.work_queue import Priority
from tests.meanwhile import during
from tests.unit.controllers.clusters import Cluster
from tests.unit.policy import build
from tests.virtual.loop import now

GATED, LET_GO = "SchedulingGated", "Unschedulable"
POOL_PATH = f"{collection_path(CapacityPool, '')}/spot"
QUEUED = {"schedulingPolicy": {"queue": "team"}}


@pytest.mark.parametrize(
    ("message", "nodes", "exhausted"),
    [
        ("0/3 nodes are available: 1 Insufficient nvidia.com/gpu, 2 node(s) didn't match node selector.", 1, "True"),
        ("0/3 nodes are available: 1 node(s) had untolerated taint {shoal: going}, 2 didn't match.", 1, "True"),
        ("0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector.", 0, "True"),
        ("0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector.", 1, "False"),
        ("0/3 nodes are available: 3 node(s) had volume node affinity conflict.", 1, "False"),
        ('0/3 nodes are available: persistentvolumeclaim "data" not found.', 0, "False"),
        ("0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims.", 0, "False"),
    ],
)  # fmt: skip
async def test_pod_that_can_never_run_does_not_switch_its_pool_off_for_everybody(
    message: str, nodes: int, exhausted: str
) -> None:
    scheduled = {"type": "PodScheduled", "status": "False", "reason": LET_GO, "message": message}
    assert _told(await _look({}, scheduled, {}, nodes)) == (int(exhausted == "True"), exhausted)


@pytest.mark.parametrize(
    ("asked", "nodes", "has", "exhausted"),
    [
        ("8", 2, {"nvidia.com/gpu": "1", "cpu": "8"}, "False"),
        ("1", 2, {"nvidia.com/gpu": "1", "cpu": "8"}, "True"),
        ("1", 2, {"cpu": "8"}, "False"),
        ("8", 2, {}, "True"),
        ("8", 0, {}, "True"),
    ],
    ids=["more than a node has", "as much", "nodes without any", "nodes that do not say", "no node"],
)
async def test_pod_that_asks_for_more_than_any_node_has_waits_for_none(
    asked: str, nodes: int, has: Any, exhausted: str
) -> None:
    """A worker with 8 GPUs on nodes with one had the pool Exhausted, while it gave others each node they wanted."""
    message = f"0/{nodes} nodes are available: {nodes} Insufficient nvidia.com/gpu."
    scheduled = {"type": "PodScheduled", "status": "False", "reason": LET_GO, "message": message}
    containers = [{"name": "worker", "resources": {"limits": {"nvidia.com/gpu": asked}}}]
    told = _told(await _look({}, scheduled, {}, nodes, containers=containers, has=has))
    assert told == (int(exhausted == "True"), exhausted)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"initContainers": [{"name": "i", "resources": {"requests": {"cpu": "64"}}}]},
            "2 Insufficient cpu.",
        ),
        ({}, "2 node(s) didn't match pod anti-affinity rules."),
        ({"schedulerName": "none"}, ""),
    ],
    ids=["an init container", "not beside others", "of no scheduler"],
)
async def test_pod_that_free_nodes_do_not_take_for_what_its_template_says_leaves_the_pool_to_others(
    more: Any, message: str
) -> None:
    """It had the pool Exhausted for all jobs, which went to one at ten times the price."""
    scheduled = {"type": "PodScheduled", "status": "False", "reason": LET_GO, "message": message}
    containers = [{"name": "worker", "resources": {"requests": {"cpu": "1"}}}]
    told = _told(await _look({}, scheduled, {}, 2, containers=containers, has={"cpu": "8"}, template=more))
    assert told == (0, "False")


@pytest.mark.parametrize(
    ("policy", "reason", "released", "waiting", "exhausted"),
    [
        ({}, LET_GO, None, 1, "True"),
        (QUEUED, GATED, None, 0, "False"),
        (QUEUED, LET_GO, timedelta(seconds=20), 1, "False"),
        (QUEUED, LET_GO, timedelta(minutes=20), 1, "True"),
    ],
    ids=["no queue", "held back", "just let go", "let go long ago"],
)
async def test_pod_waits_for_a_node_once_its_queue_has_let_it_go(
    policy: Any, reason: str, released: timedelta | None, waiting: int, exhausted: str
) -> None:
    """A job without quota made its pool Exhausted, for all jobs of all queues."""
    slot: dict[str, Any] = {"role": "worker", "index": 0, "state": "Starting", "queued": reason == GATED}
    slot["createdAt"] = build.stamp(build.NOW - (released or timedelta(minutes=20)))
    scheduled = {"type": "PodScheduled", "status": "False", "reason": reason}
    assert _told(await _look(policy, scheduled, {"slots": [slot]})) == (waiting, exhausted)


@pytest.mark.parametrize(
    ("zone", "served", "told"),
    [
        ("Same", None, (0, "False")),
        ("Same", timedelta(seconds=20), (1, "False")),
        ("Same", timedelta(minutes=20), (1, "True")),
        ("Preferred", None, (1, "True")),
    ],
    ids=["no server", "a server lately", "a server long ago", "not near it"],
)
async def test_worker_waits_for_a_node_once_the_server_that_it_has_to_be_near_has_one(
    zone: str, served: timedelta | None, told: tuple[int, str]
) -> None:
    """A server that was late made the pool of its workers Exhausted, for all jobs."""
    words = "0/3 nodes are available: 3 node(s) didn't match pod affinity rules."
    scheduled = {"type": "PodScheduled", "status": "False", "reason": LET_GO, "message": words}
    workers = {"replicas": 1, "pools": ["spot"], "zonePolicy": zone}
    server = build.NOW - served if served is not None else None
    assert _told(await _look({}, scheduled, {}, workers=workers, server=server)) == told


@pytest.mark.parametrize(("role", "recommended"), [("ps", 1), ("worker", 0)])
async def test_parameter_server_that_waits_asks_for_a_node_of_its_pool(
    role: RoleName, recommended: int
) -> None:
    """Workers' nodes are those of their plan; no plan is made of servers'."""
    scheduled = {"type": "PodScheduled", "status": "False", "reason": LET_GO}
    assert (await _look({}, scheduled, {}, role=role)).recommended.nodes == recommended


@pytest.mark.parametrize(("nodes", "recommended"), [(0, 1), (1, 2)])
async def test_parameter_servers_that_wait_together_ask_for_as_few_nodes_as_have_room_for_them(
    nodes: int, recommended: int
) -> None:
    """Twenty small ones had twenty nodes made, and each kept its node: a pool with a server never shrinks.

    Of a pool without a node nobody knows how many it has room for: the first one shows it.
    """
    message = f"0/{nodes} nodes are available: {nodes} Insufficient cpu." if nodes else ""
    scheduled = {"type": "PodScheduled", "status": "False", "reason": LET_GO, "message": message}
    how = {"containers": [{"name": "ps", "resources": {"requests": {"cpu": "250m", "memory": "256Mi"}}}]}
    has = {"cpu": "3920m", "memory": "14Gi"}
    status = await _look({}, scheduled, {}, nodes, role="ps", has=has, pods=20, **how)
    assert (status.recommended.nodes, status.waiting) == (recommended, recommended)
    assert status.recommended.reason == f"{recommended} for parameter servers"


@pytest.mark.parametrize(
    ("words", "pods", "recommended"),
    [
        ("didn't match pod anti-affinity rules", 1, 2),
        ("didn't match pod topology spread constraints", 3, 4),
        ("had untolerated taint {a: b}", 3, 1),
    ],
)
async def test_parameter_servers_that_are_not_to_be_beside_each_other_ask_for_a_node_each(
    words: str, pods: int, recommended: int
) -> None:
    """The second waited for ever, and so did its job: no plan counts the nodes of servers."""
    status = await _look(
        {},
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": LET_GO,
            "message": f"0/1 nodes are available: 1 node(s) {words}.",
        },
        {},
        1,
        role="ps",
        running=[("ps", 0, "spot-0")],
        containers=[{"name": "ps", "resources": {"requests": {"cpu": "1"}}}],
        has=NODE_OF_16,
        pods=pods,
    )
    assert status.recommended.nodes == recommended
    assert status.waiting == recommended - 1
    assert _told(status)[1] == "False"


HOST, ZONE = "kubernetes.io/hostname", "topology.kubernetes.io/zone"


@pytest.mark.parametrize(
    ("of_pool", "keys", "words", "recommended"),
    [
        ({"zone": "z"}, [ZONE], "match pod anti-affinity rules", 1),
        ({"zone": "z"}, [ZONE], "match pod topology spread constraints", 1),
        ({"nodeSelector": {"cloud.google.com/gke-nodepool": "spot-pool", ZONE: "z"}}, [ZONE],
         "match pod anti-affinity rules", 1),
        ({}, [ZONE], "match pod anti-affinity rules", 2),
        ({"zone": "z"}, [HOST], "match pod anti-affinity rules", 2),
        ({"zone": "z"}, [ZONE, HOST], "match pod anti-affinity rules", 1),
        ({"zone": "z"}, [ZONE, HOST], "match pod topology spread constraints", 2),
        ({"zone": "z"}, [ZONE, f"{HOST} of others"], "match pod anti-affinity rules", 2),
        ({"nodeSelector": {"cloud.google.com/gke-nodepool": "spot-pool", "rack": "r1"}}, ["rack", HOST],
         "match pod anti-affinity rules", 1),
        ({}, ["rack"], "match pod anti-affinity rules", 2),
        ({"zone": "z"}, [ZONE], "satisfy existing pods anti-affinity rules", 2),
        ({"zone": "z"}, [ZONE], "have free ports for the requested pod ports", 2),
        ({"zone": "z"}, [], "match pod anti-affinity rules", 2),
    ],
    ids=["zone", "spread", "selected", "in any", "host", "both", "both spread", "not beside others", "rack",
         "any rack", "of others", "ports", "unknown"],
)  # fmt: skip
@pytest.mark.parametrize("nodes", [1, 2])
async def test_server_that_is_kept_from_the_zone_of_its_pool_asks_for_no_node_of_it(
    nodes: int, of_pool: Any, keys: list[str], words: str, recommended: int
) -> None:
    """Each had one bought, which was in that zone, too, and empty for the life of the job."""
    rules = [
        {"topologyKey": key, "labelSelector": {"matchLabels": {"of": whose} if whose else {}}}
        for key, _, whose in (each.partition(" of ") for each in keys)
    ]
    status = await _look(
        {},
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": LET_GO,
            "message": f"0/{nodes} nodes are available: {nodes} node(s) didn't {words}.",
        },
        {},
        nodes,
        role="ps",
        running=[("ps", 0, "spot-0")],
        containers=[{"name": "ps", "resources": {"requests": {"cpu": "1"}}}],
        has=NODE_OF_16,
        pods=1,
        template=(
            {"topologySpreadConstraints": [{**rule, "whenUnsatisfiable": "DoNotSchedule"} for rule in rules]}
            if "spread" in words
            else {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": rules}}}
        ),
        pool=of_pool,
    )
    assert status.recommended.nodes == recommended


async def test_nodes_with_a_parameter_server_are_told_whoever_else_they_have() -> None:
    """A pool does not shrink while it has one: it would not say which node goes."""
    runs = {"type": "PodScheduled", "status": "True"}
    pods = [("ps", 0, "spot-0"), ("worker", 0, "spot-0"), ("ps", 1, "spot-1"), ("worker", 1, "spot-2")]
    [share] = (await _look({}, runs, {}, nodes=4, running=pods)).shares
    assert (share.used, share.serving) == (3, 2)


OWNER = {"kind": "TrainingJob", "name": "digits", "controller": True}


@pytest.mark.parametrize(
    "changed",
    [
        {"labels": {"shoal.dev/job": "digits", "shoal.dev/pool": "spot"}},
        {"ownerReferences": []},
        {"name": "mine"},
        {"namespace": "other"},
        {"ownerReferences": [{**OWNER, "uid": "of a job that is gone"}]},
    ],
    ids=["no place", "no owner", "another name", "another namespace", "no such job"],
)
async def test_a_pod_of_no_job_asks_for_no_node_and_switches_no_pool_off(changed: Any) -> None:
    """Whoever may create pods, and no job, bought nodes up to the limit, and had the pool Exhausted for all."""
    scheduled = {"type": "PodScheduled", "status": "False", "reason": LET_GO}
    roles: tuple[RoleName, ...] = ("ps", "worker")
    for role in roles:
        status = await _look({}, scheduled, {}, role=role, changed=changed)
        assert (*_told(status), status.recommended.nodes) == (0, "False", 0)


@pytest.mark.parametrize(
    ("changed", "uses"),
    [
        ({"labels": {"shoal.dev/job": "digits"}}, 0),
        ({"ownerReferences": []}, 0),
        ({"ownerReferences": [{**OWNER, "uid": "of a job that is gone"}]}, 1),
    ],
    ids=["no place", "no owner", "its job is gone"],
)
async def test_only_pods_that_jobs_made_keep_a_pool_from_shrinking(changed: Any, uses: int) -> None:
    """Those of a deleted job do until they end. One with a label and no role was a parameter server."""
    running: list[tuple[RoleName, int, str]] = [("ps", 0, "spot-0")]
    [share] = (
        await _look({}, {"type": "PodScheduled"}, {}, nodes=2, running=running, changed=changed)
    ).shares
    assert (share.used, share.serving, share.nodes) == (uses, uses, uses)


@pytest.mark.parametrize(
    ("asks", "pods", "full"),
    [
        ("3", [("ps", 0, "spot-0"), ("worker", 0, "spot-1")], 1),
        ("2", [("ps", 0, "spot-0"), ("worker", 0, "spot-1")], 0),
        ("3", [("ps", 0, "spot-0"), ("worker", 0, "spot-0")], 0),
        ("3", [("ps", 0, "spot-0")], 0),
    ],
    ids=["no room", "room for a worker", "a worker beside it", "no worker"],
)
async def test_node_that_a_parameter_server_fills_is_told_from_one_with_room_for_a_worker(
    asks: str, pods: list[tuple[RoleName, int, str]], full: int
) -> None:
    asked = [{"name": "c", "resources": {"requests": {"cpu": asks}}}]
    runs, has = {"type": "PodScheduled", "status": "True"}, {"cpu": "5"}
    [share] = (await _look({}, runs, {}, nodes=2, running=pods, containers=asked, has=has)).shares
    assert share.full == full


@pytest.mark.parametrize(
    ("asks", "servers", "full"),
    [("3", 2, 2), ("3", 1, 1), ("3", 0, 0), ("1", 2, 0), (None, 2, 0)],
    ids=["no room", "one", "no servers", "room", "nothing said"],
)
async def test_nodes_that_servers_fill_are_told_before_a_worker_is_there(
    asks: str | None, servers: int, full: int
) -> None:
    """Else a plan gave the room to workers, which found none, and went, and again."""
    running: list[tuple[RoleName, int, str]] = [("ps", i, f"spot-{i}") for i in range(servers)]
    scheduled = {"type": "PodScheduled", "status": "True"}
    held = [{"name": "c", "resources": {"requests": {"cpu": "3"}}}]
    worker = {"name": "worker", "resources": {"requests": {"cpu": asks}}}
    workers = {
        "replicas": 1,
        "pools": ["spot"],
        "template": {"spec": {"containers": [worker] if asks else []}},
    }
    has = {"cpu": "5", "memory": "8Gi"}
    status = await _look(
        {}, scheduled, {}, nodes=2, running=running, pods=0, containers=held, has=has, workers=workers
    )
    assert sum(each.full for each in status.shares) == full


HUGE = "1" + "0" * 308
UNREAD: dict[str, tuple[Any, int]] = {
    "overhead is text": ({"overhead": "x"}, 3),
    "resources are text": ({"resources": "x"}, 3),
    "requests are a list": ({"resources": {"requests": ["cpu"]}}, 3),
    "too deep": ({"volumes": json.loads("[" * 250 + "]" * 250)}, 3),
    "too much to add up": (
        {"containers": [{"name": f"c{i}", "resources": {"requests": {"memory": HUGE}}} for i in range(16)]},
        3,
    ),
    "next to nothing": (
        {
            "containers": [
                {"name": "worker", "resources": {"requests": {"cpu": "1e-320", "memory": "1e-320"}}}
            ]
        },
        1,
    ),
}
"""Templates, and the nodes of two workers of each beside two others, which share one."""


@pytest.mark.parametrize(("template", "nodes"), UNREAD.values(), ids=UNREAD)
@pytest.mark.parametrize("role", ["worker", "ps"])
async def test_template_that_nobody_can_read_is_of_no_concern_to_other_jobs_of_its_pool(
    template: Any, nodes: int, role: RoleName
) -> None:
    """Whoever may edit a job had the status of a shared pool stand still for all."""
    fleet, serves = Fleet(), role == "ps"
    node = build.node_manifest("spot-0")
    node["status"]["allocatable"] = NODE_OF_16
    fleet.state.nodes.put(Node.model_validate(node))
    fleet.state.pods.put(Pod.model_validate(build.pod_manifest(role, 0, node="spot-0")))
    theirs = build.job_manifest(workers={"replicas": 2, "pools": ["spot"], "template": {"spec": template}})
    theirs["metadata"] |= {"name": "theirs", "uid": "theirs"}
    slots = [{"role": "worker", "index": i, "state": "Running", "pool": "spot"} for i in range(2)]
    theirs["status"] = {"slots": [] if serves else slots}
    fleet.state.jobs.put(TrainingJob.model_validate(theirs))
    fleet.plan(0 if serves else 2)
    await fleet.look(("", "spot"))
    assert (fleet.recommended, fleet.status.used) == (1 if serves else nodes, 1)


async def test_what_a_job_asks_for_is_forgotten_when_it_is_gone() -> None:
    fleet = Fleet()
    fleet.plan(2)
    await fleet.look(("", "spot"))
    [job] = fleet.state.jobs.all()
    assert list(fleet.look._asked._known) == [job.metadata.uid]
    fleet.state.jobs.drop(job.metadata.uid)
    assert fleet.look._asked._known == {}


class Fleet:
    """A pool's controller that works, and a job whose plan is carried out."""

    def __init__(self) -> None:
        self.cluster = Cluster()
        state = self.state = ClusterState(Wakes(pools=self._wake))
        self.looks: list[float] = []
        self.changes: list[float] = []
        """When plans were to be made anew."""
        self.look = PoolReconciler(
            state,
            StatusWriter(self.cluster, state.pools, CapacityPool),
            Recorder(self.cluster, reporter="test", wall=lambda: build.NOW),
            wall=lambda: build.NOW + timedelta(seconds=now()),
            on_change=lambda: self.changes.append(now()),
            rest=self._rest,
        )
        self.pools = Controller(
            "capacitypool",
            self._looked,
            keys=lambda: [key_of(pool) for pool in state.pools.all()],
            metrics=Metrics(),
        )
        selector = {"cloud.google.com/gke-nodepool": "spot-pool"}
        spec = {"nodeSelector": selector, "limits": {"nodes": 100}, "price": {"perHour": 1}}
        body = {"metadata": {"name": "spot", "uid": "spot", "resourceVersion": "1"}, "spec": spec}
        made = self.cluster.add(POOL_PATH, body)
        state.pools.put(CapacityPool.model_validate(made))
        self.plan(0)
        self.pools.lead()

    def _wake(self, key: Key, priority: Priority) -> None:
        self.pools.wake(key, priority)

    def _rest(self, key: Key, seconds: float) -> None:
        self.pools.queue.rest(key, seconds)

    async def _looked(self, key: Key) -> float | None:
        self.looks.append(now())
        return await self.look(key)

    def plan(self, nodes: int, **status: Any) -> None:
        """The job is to have so many."""
        manifest = build.job_manifest(elasticity={"mode": "Auto"})
        self.cluster.version += 1
        manifest["metadata"]["resourceVersion"] = str(self.cluster.version)
        manifest["status"] = {"plan": {"pools": {"spot": nodes}}, **status}
        self.state.jobs.put(TrainingJob.model_validate(manifest))

    @property
    def status(self) -> CapacityPoolStatus:
        """Of the pool."""
        pool = self.state.pools.get("spot")
        assert pool is not None
        return pool.status

    @property
    def recommended(self) -> int:
        """What its status says."""
        return self.status.recommended.nodes

    def working(self) -> AbstractAsyncContextManager[None]:
        """For as long as it has work."""
        return during(self.pools.work())


@pytest.mark.looptime
async def test_pool_follows_its_jobs_and_nodes_within_seconds() -> None:
    """Up to 15 s later a pool was told that a job was to have nodes of it."""
    fleet = Fleet()
    async with fleet.working():
        await asyncio.sleep(7.0)
        fleet.plan(3)
        await asyncio.sleep(0.1)
        assert fleet.recommended == 3
        fleet.plan(5)
        await asyncio.sleep(REST_SECONDS)
        assert fleet.recommended == 5
        fleet.state.nodes.put(build.node("spot-0"))
        await asyncio.sleep(REST_SECONDS)
        assert fleet.status.nodes == 1


@pytest.mark.looptime
async def test_plans_are_made_anew_when_a_pool_is_exhausted_and_not_for_what_follows_from_them() -> None:
    """A recommendation is made of plans: a new plan for each would be one for each change of a plan."""
    fleet, key = Fleet(), ("", "spot")
    for nodes in (0, 3):
        fleet.plan(nodes)
        await fleet.look(key)
    assert (fleet.recommended, fleet.changes) == (3, [])
    waits = {"type": "PodScheduled", "status": "False", "reason": LET_GO}
    created = build.NOW - timedelta(minutes=20)
    pod = build.pod_manifest(node=None, phase="Pending", created=created, conditions=[waits])
    pod["metadata"]["labels"]["shoal.dev/pool"] = "spot"
    fleet.state.pods.put(Pod.model_validate(pod))
    await fleet.look(key)
    assert (_told(fleet.status), len(fleet.changes)) == ((1, "True"), 1)


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("uid", "boot", "ready", "exhausted"),
    [
        ("uid-spot-0", "boot-2", "True", "False"),
        ("another", "boot-2", "True", "False"),
        ("another", "boot-2", "False", "True"),
    ],
    ids=["the same object", "another one", "that never gets Ready"],
)
async def test_a_pool_has_nodes_again_with_a_machine_that_is_ready_and_not_with_the_name_of_its_node(
    uid: str, boot: str, ready: str, exhausted: str
) -> None:
    """On GKE the Node of a preempted machine stays for the next: it was noticed half an hour later."""
    fleet, key = Fleet(), ("", "spot")

    def stored(ready: str, at: int, **which: str) -> None:
        body = build.node_manifest("spot-0", ready=ready, **which)
        body["metadata"]["resourceVersion"] = str(1000 + at)
        body["status"]["conditions"][0]["lastTransitionTime"] = build.stamp(build.NOW + timedelta(seconds=at))
        fleet.state.nodes.put(Node.model_validate(body))

    stored("Unknown", -600)
    waits = {"type": "PodScheduled", "status": "False", "reason": LET_GO}
    created = build.NOW - timedelta(minutes=10)
    pod = build.pod_manifest(node=None, phase="Pending", created=created, conditions=[waits])
    pod["metadata"]["labels"]["shoal.dev/pool"] = "spot"
    fleet.state.pods.put(Pod.model_validate(pod))
    await fleet.look(key)
    assert _told(fleet.status) == (1, "True")
    fleet.state.pods.drop(pod["metadata"]["uid"])
    await asyncio.sleep(20)
    if uid != "uid-spot-0":
        fleet.state.nodes.drop("uid-spot-0")
    stored(ready, 20, uid=uid, boot=boot)
    await fleet.look(key)
    assert _told(fleet.status) == (0, exhausted)


@pytest.mark.looptime
async def test_pool_is_looked_at_seldom_though_much_changes() -> None:
    fleet = Fleet()
    async with fleet.working():
        for number in range(300):
            fleet.plan(number % 90)
            await asyncio.sleep(0.1)
        assert len(fleet.looks) <= 30 / REST_SECONDS + 1
        await asyncio.sleep(REST_SECONDS)
        fleet.looks.clear()
        for number in range(300):
            fleet.plan(89, training={"step": number})
            await asyncio.sleep(0.1)
        assert len(fleet.looks) <= 30 / EVERY_SECONDS + 1, "nothing of it is the pool's"


@pytest.mark.looptime
async def test_pool_that_cannot_be_parsed_is_looked_at_no_more_often_than_others() -> None:
    """Nothing can be written to it: that was tried every second, for ever."""
    fleet = Fleet()
    fleet.state.pools.leave_unread("spot", 10**6)
    async with fleet.working():
        fleet.plan(3)
        await asyncio.sleep(600)
        assert len(fleet.looks) <= 600 / EVERY_SECONDS + 3


@pytest.mark.looptime
@pytest.mark.parametrize("older", [False, True])
async def test_a_pool_that_shares_nodes_stays_told_beside_a_crd_that_does_not_keep_whose(
    older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was ready again once its nodes had gone, got nodes, and was told again: used and given up in turns."""
    fleet = Fleet()
    put = fleet.cluster._put

    def prune(path: str, body: dict[str, Any]) -> Answer:
        kept = {name: value for name, value in body["status"].items() if name != "overlaps" or not older}
        return put(path, {**body, "status": kept})

    monkeypatch.setattr(fleet.cluster, "_put", prune)
    meta = {
        "name": "first",
        "uid": "first",
        "resourceVersion": "1",
        "creationTimestamp": "2020-01-01T00:00:00Z",
    }
    selector = {"kubernetes.io/arch": "amd64"}
    spec = {"nodeSelector": selector, "limits": {"nodes": 9}, "price": {"perHour": 1}}
    fleet.state.pools.put(CapacityPool.model_validate({"metadata": meta, "spec": spec}))
    ready = list[tuple[str, str]]()
    async with fleet.working():
        for uid in ("1", "2"):
            node = build.node_manifest("spot-0", uid=uid)
            node["metadata"]["labels"] |= selector
            fleet.state.nodes.put(Node.model_validate(node))
            await asyncio.sleep(EVERY_SECONDS)
            ready.append(_ready(fleet.status))
            scaling = {"subject": {}, "originalNodes": 1, "nodes": int(uid)}
            seen = fleet.cluster.change(
                POOL_PATH, status={**fleet.cluster.objects[POOL_PATH]["status"], "scaling": scaling}
            )
            fleet.state.pools.put(CapacityPool.model_validate(seen))  # as shoal-pools writes it
            fleet.state.nodes.drop(uid)
            await asyncio.sleep(EVERY_SECONDS)
            ready.append(_ready(fleet.status))
    assert set(ready) == {("False", "Overlaps")}
    assert (fleet.status.overlaps is None) == older


def _ready(status: CapacityPoolStatus) -> tuple[str, str]:
    """Whether it can be used, and why not."""
    return next((each.status, each.reason) for each in status.conditions if each.type == "Ready")


def _told(status: CapacityPoolStatus) -> tuple[int, str]:
    """How many wait, and whether it is Exhausted."""
    return status.waiting, next(each.status for each in status.conditions if each.type == "Exhausted")


async def _look(
    policy: Any,
    scheduled: Any,
    status: Any,
    nodes: int = 0,
    role: RoleName = "worker",
    running: Sequence[tuple[RoleName, int, str]] = (),
    changed: Any = None,
    containers: Any = (),
    has: Any = None,
    pods: int | None = None,
    workers: Any = None,
    template: Any = None,
    server: datetime | None = None,
    elasticity: Any = None,
    pool: Any = None,
    ready: timedelta | None = None,
    generation: int = 1,
    edited: bool = False,
) -> CapacityPoolStatus:
    """The status of a pool with pods that are twenty minutes old, or with these on nodes, of `changed` metadata.

    `has`: what each node has, or each of them. `server`: when a parameter server elsewhere got its node. `ready`: for
    how long its own nodes have been. `edited`: somebody has edited the pool.
    """
    state, cluster, long = ClusterState(Wakes()), Cluster(), timedelta(minutes=20)
    look = PoolReconciler(
        state,
        StatusWriter(cluster, state.pools, CapacityPool),
        Recorder(cluster, reporter="test", wall=lambda: build.NOW),
        wall=lambda: build.NOW,
    )
    spec = {
        "nodeSelector": {"cloud.google.com/gke-nodepool": "spot-pool"},
        "limits": {"nodes": 4},
        "price": {"perHour": 1},
        **(pool or {}),
    }
    meta = {"name": "spot", "uid": "spot", "resourceVersion": "1", "generation": 1 + edited}
    body = {"metadata": meta, "spec": spec}
    state.pools.put(
        CapacityPool.model_validate(cluster.add(f"{collection_path(CapacityPool, '')}/spot", body))
    )
    for number in range(nodes):
        node = build.node_manifest(f"spot-{number}")
        node["metadata"]["labels"] |= spec["nodeSelector"]
        node["status"]["allocatable"] = has[number] if isinstance(has, list) else has or {}
        if ready is not None:
            node["metadata"]["creationTimestamp"] = build.stamp(build.NOW - ready)
        state.nodes.put(Node.model_validate(node))
    job = {"workers": workers, "elasticity": elasticity}
    manifest = build.job_manifest(runPolicy=policy, **{each: said for each, said in job.items() if said})
    manifest["metadata"]["generation"] = generation
    state.jobs.put(TrainingJob.model_validate({**manifest, "status": status}))
    created, conditions = build.NOW - long, [scheduled]
    if server is not None:
        bound = {"type": "PodScheduled", "status": "True", "lastTransitionTime": build.stamp(server)}
        state.pods.put(Pod.model_validate(build.pod_manifest("ps", node="safe", conditions=[bound])))
    for of, index, node in running:
        pod = build.pod_manifest(of, index, node=node, conditions=conditions)
        pod["metadata"] |= changed or {}
        pod["spec"]["containers"] = list(containers)
        state.pods.put(Pod.model_validate(pod))
    waiting = int(not running) if pods is None else pods
    for index in range(len(running), len(running) + waiting):
        pod = build.pod_manifest(
            role, index, node=None, phase="Pending", created=created, conditions=conditions
        )
        pod["metadata"]["labels"]["shoal.dev/pool"] = "spot"
        pod["spec"] |= {"containers": list(containers), **(template or {})}
        pod["metadata"] |= changed or {}
        state.pods.put(Pod.model_validate(pod))
    await look(("", "spot"))
    seen = state.pools.get("spot")
    assert seen is not None
    return seen.status


NODE_OF_16 = {"cpu": "16", "memory": "64Gi"}


@pytest.mark.parametrize(
    ("has", "asked", "there", "vain", "recommended"),
    [
        (NODE_OF_16, {}, ["spot-0"] * 4, 0, 1),
        (NODE_OF_16, {}, ["spot-0", "spot-1", "spot-2"], 0, 3),
        (NODE_OF_16, {"cpu": "5"}, ["spot-0"] * 3, 1, 2),
        (NODE_OF_16, {"cpu": "9"}, ["spot-0"], 0, 4),
        (NODE_OF_16, {"nvidia.com/gpu": "1"}, ["spot-0"], 0, 4),
        ({}, {}, ["spot-0"] * 4, 0, 4),
    ],
    ids=[
        "four on a node",
        "spread",
        "of no room seen",
        "half a node",
        "GPUs not told yet",
        "no node says it",
    ],
)
async def test_workers_of_a_plan_ask_for_as_few_nodes_as_have_room_for_them(
    has: Any, asked: Any, there: list[str], vain: int, recommended: int
) -> None:
    """One node was bought for each of four that ran on one: three that nobody ever used."""
    containers = [{"name": "worker", "resources": {"requests": asked or {"cpu": "500m"}}}]
    status = {"plan": {"pools": {"spot": 4}}}
    spec = {
        "replicas": 4,
        "maxReplicas": 4,
        "pools": ["spot"],
        "template": {"spec": {"containers": containers}},
    }
    found = await _look(
        {},
        {"type": "PodScheduled", "status": "False", "reason": LET_GO, "message": "0/1: 1 Insufficient cpu."},
        status,
        max(len(set(there)), 1),
        running=[("worker", index, node) for index, node in enumerate(there)],
        containers=containers,
        has=has,
        pods=vain,
        workers=spec,
        elasticity={"mode": "Auto"},
    )
    assert found.recommended.nodes == recommended
    assert ("several of them on a node" in found.recommended.reason) == (recommended < 4)


@pytest.mark.parametrize(
    ("edited", "workers", "recommended"),
    [
        ({"containers": [{"name": "worker", "resources": {"requests": {"cpu": "16"}}}]}, 4, 1),
        ({"overhead": "x"}, 4, 1),
        ({"containers": [{"name": "worker", "resources": {"requests": {"cpu": "16"}}}]}, 6, 3),
    ],
    ids=["asks for a node each", "cannot be read", "and two more are to come"],
)
async def test_an_edited_template_buys_no_node_for_workers_that_have_theirs(
    edited: Any, workers: int, recommended: int
) -> None:
    """Whoever may edit a job had a node bought for each of its workers, and it stayed empty as long as they ran."""
    found = await _look(
        {},
        {"type": "PodScheduled", "status": "True"},
        {"plan": {"pools": {"spot": workers}}},
        1,
        running=[("worker", index, "spot-0") for index in range(4)],
        containers=[{"name": "worker", "resources": {"requests": {"cpu": "1"}}}],
        has=NODE_OF_16,
        pods=0,
        workers={"replicas": 4, "maxReplicas": 6, "pools": ["spot"], "template": {"spec": edited}},
        elasticity={"mode": "Auto"},
        generation=2,
    )
    assert found.recommended.nodes == recommended


NODE_OF_4_GPUS = {"cpu": "64", "memory": "256Gi", "nvidia.com/gpu": "4"}


@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize(("workers", "recommended"), [(4, 1), (6, 3)])
async def test_a_pool_that_is_edited_buys_no_node_for_workers_that_have_theirs(
    workers: int, recommended: int, generation: int
) -> None:
    """Its nodes were said to have one GPU, and have four: what a new worker asks for, none of the others does."""
    found = await _look(
        {},
        {"type": "PodScheduled", "status": "True"},
        {"plan": {"pools": {"spot": workers}}},
        1,
        running=[("worker", index, "spot-0") for index in range(4)],
        containers=[{"name": "worker", "resources": {"limits": {"nvidia.com/gpu": "1"}}}],
        has=NODE_OF_4_GPUS,
        pods=0,
        workers={"replicas": 4, "maxReplicas": 6, "pools": ["spot"]},
        elasticity={"mode": "Auto"},
        pool={"accelerator": {"name": "T4", "count": 4}, "limits": {"nodes": 40}},
        generation=generation,
        edited=True,
    )
    assert found.recommended.nodes == recommended


@pytest.mark.parametrize(
    "has",
    [
        [NODE_OF_4_GPUS] * 4,
        [NODE_OF_4_GPUS] * 3 + [NODE_OF_16],
        [NODE_OF_16] + [NODE_OF_4_GPUS] * 3,
        [{}] + [NODE_OF_4_GPUS] * 3,
    ],
    ids=["all alike", "the last", "the first", "the first says nothing"],
)
async def test_node_whose_driver_is_not_up_yet_does_not_have_a_node_bought_for_each_worker(has: Any) -> None:
    """It was asked alone if its name came first: a spot node was replaced, and twelve others were bought."""
    containers = [{"name": "worker", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]
    template = {"spec": {"containers": containers}}
    found = await _look(
        {},
        {"type": "PodScheduled", "status": "True"},
        {"plan": {"pools": {"spot": 16}}},
        4,
        running=[("worker", index, f"spot-{1 + index // 4}") for index in range(12)],
        containers=containers,
        has=has,
        pods=0,
        workers={"replicas": 16, "maxReplicas": 16, "pools": ["spot"], "template": template},
        elasticity={"mode": "Auto"},
        pool={"limits": {"nodes": 40}},
    )
    assert found.recommended.nodes == 4


@pytest.mark.parametrize(("cores", "recommended"), [(None, 4), (2, 1), (1, 2)])
async def test_a_pool_without_a_node_has_room_as_its_cores_say(cores: int | None, recommended: int) -> None:
    plan = {"plan": {"pools": {"spot": 4}}}
    spec = {"replicas": 4, "maxReplicas": 4, "pools": ["spot"]}
    more = {"cores": cores} if cores else {}
    found = await _look({}, {}, plan, 0, pods=0, workers=spec, elasticity={"mode": "Auto"}, pool=more)
    assert found.recommended.nodes == recommended


@pytest.mark.parametrize(
    ("words", "nodes", "there", "recommended"),
    [
        ("1 node(s) didn't match pod anti-affinity rules.", 1, 1, 4),
        ("1 node(s) didn't match pod topology spread constraints.", 1, 1, 4),
        ("1 node(s) didn't have free ports for the requested pod ports.", 1, 1, 4),
        ("1 Insufficient cpu, 1 node(s) didn't match pod anti-affinity rules.", 2, 2, 4),
    ],
)
async def test_workers_that_are_not_to_be_beside_each_other_ask_for_a_node_each(
    words: str, nodes: int, there: int, recommended: int
) -> None:
    """The pool was to have one node for ever, on which one of them ran. It is not out of nodes for all that."""
    containers = [{"name": "worker", "resources": {"requests": {"cpu": "1"}}}]
    template = {"spec": {"containers": containers}}
    found = await _look(
        {},
        {"type": "PodScheduled", "status": "False", "reason": LET_GO, "message": f"0/{nodes}: {words}"},
        {"plan": {"pools": {"spot": 4}}},
        nodes,
        running=[("worker", index, f"spot-{index}") for index in range(there)],
        containers=containers,
        has=NODE_OF_16,
        pods=4 - there,
        workers={"replicas": 4, "maxReplicas": 4, "pools": ["spot"], "template": template},
        elasticity={"mode": "Auto"},
    )
    assert found.recommended.nodes == recommended
    assert _told(found) == (0, "False")


async def test_workers_that_fit_on_no_node_ask_for_none_though_they_are_kept_apart() -> None:
    containers = [{"name": "worker", "resources": {"requests": {"cpu": "99"}}}]
    words = "0/1 nodes are available: 1 node(s) didn't have free ports for the requested pod ports."
    found = await _look(
        {},
        {"type": "PodScheduled", "status": "False", "reason": LET_GO, "message": words},
        {"plan": {"pools": {"spot": 4}}},
        1,
        containers=containers,
        has=NODE_OF_16,
        pods=3,
        workers={"replicas": 4, "maxReplicas": 4, "pools": ["spot"]},
        elasticity={"mode": "Auto"},
    )
    assert found.recommended.nodes == 1


LACKS_GPU = "1 Insufficient nvidia.com/gpu."


@pytest.mark.parametrize(
    ("pods", "words", "asks", "zone", "reason"),
    [
        (0, LACKS_GPU, "1", "Any", "Valid"),
        (1, LACKS_GPU, "1", "Any", "NodesLackAccelerator"),
        (1, LACKS_GPU, "1", "Same", "Valid"),
        (1, "1 node(s) didn't match pod affinity rules.", "1", "Same", "Valid"),
        (1, "1 node(s) didn't match Pod's node affinity/selector.", "1", "Any", "Valid"),
        (1, "1 Insufficient cpu, 1 Insufficient nvidia.com/gpu.", "1", "Any", "Valid"),
        (1, LACKS_GPU, "64", "Any", "Valid"),
        (1, "1 Insufficient a.b/c.", "1", "Any", "Valid"),
        (1, "", "1", "Any", "Valid"),
        (1, f"{LACKS_GPU} preemption: 0/1 nodes are available.", "1", "Any", "NodesLackAccelerator"),
        (1, "1 Insufficient nvidia.com/gpu.shared, 9 node(s) didn't match.", "1", "Any", "Valid"),
        (1, "1 Insufficient nvidia.com/gpu, 1 Insufficient nvidia.com/gpu-x.", "1", "Any", "Valid"),
    ],
    ids=[
        *("nobody waits", "a worker", "for its server", "in its server's words", "for other labels"),
        *("for more CPU, too", "for more than the pool says", "for another device", "for a scheduler"),
        *("and preempts none", "for shared ones", "for another, too"),
    ],
)
async def test_one_node_without_its_gpu_is_told_once_a_worker_has_waited_beside_it_for_that_alone(
    pods: int, words: str, asks: str, zone: str, reason: str
) -> None:
    """Who may create a job had a pool of 16 switched off for all with its one failed node."""
    scheduled = {"type": "PodScheduled", "status": "False", "reason": LET_GO}
    status = await _look(
        {},
        {**scheduled, "message": f"0/1 nodes are available: {words}" if words else ""},
        {},
        1,
        containers=[{"name": "worker", "resources": {"limits": {"nvidia.com/gpu": asks}}}],
        pods=pods,
        ready=timedelta(days=1),
        has={"cpu": "8"},
        pool={"accelerator": {"name": "T4"}, "startupSeconds": 60, "limits": {"nodes": 16}},
        workers={"replicas": 1, "pools": ["spot"], "zonePolicy": zone},
    )
    assert _ready(status)[1] == reason


REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def _of_nodes(kind: str, key: str, operator: str) -> Any:
    terms = [{kind: [{"key": key, "operator": operator, "values": ["spot-0"]}]}]
    return {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}}}


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ({"nodeSelector": {"cloud.google.com/gke-nodepool": "spot-pool"}}, "NodesLackAccelerator"),
        ({"nodeSelector": {"kubernetes.io/arch": "amd64"}}, "NodesLackAccelerator"),
        (_of_nodes("matchExpressions", ZONE, "In"), "NodesLackAccelerator"),
        (_of_nodes("matchFields", "metadata.name", "NotIn"), "NodesLackAccelerator"),
        ({"nodeSelector": {HOST: "spot-0"}}, "Valid"),
        ({"nodeSelector": {"serial": "1"}}, "Valid"),
        (_of_nodes("matchExpressions", HOST, "In"), "Valid"),
        (_of_nodes("matchFields", "metadata.name", "In"), "Valid"),
    ],
    ids=["its pool", "its image", "its zone", "not some", "a host", "a label", "a host's label", "a name"],
)
async def test_a_pod_that_takes_one_node_alone_does_not_switch_a_pool_off_for_all(
    template: Any, reason: str
) -> None:
    """It waits beside the one that failed, and no other would have come for it."""
    status = await _look(
        {},
        {"type": "PodScheduled", "status": "False", "reason": LET_GO, "message": f"0/1: {LACKS_GPU}"},
        {},
        1,
        containers=[{"name": "worker", "resources": {"limits": {"nvidia.com/gpu": "1"}}}],
        pods=1,
        ready=timedelta(days=1),
        has={"cpu": "8"},
        template=template,
        pool={"accelerator": {"name": "T4"}, "startupSeconds": 60, "limits": {"nodes": 16}, "zone": "z"},
        workers={"replicas": 1, "pools": ["spot"], "zonePolicy": "Any"},
    )
    assert _ready(status)[1] == reason


@pytest.mark.parametrize(("servers", "recommended"), [(0, 0), (1, 1)])
async def test_nodes_that_lack_their_accelerator_go_though_a_job_has_no_other_pool(
    servers: int, recommended: int
) -> None:
    """Its plan goes on: four broken nodes were paid until a person came, and no next one was tried."""
    running: list[tuple[RoleName, int, str]] = [("ps", index, f"spot-{index}") for index in range(servers)]
    status = await _look(
        {},
        {"type": "PodScheduled", "status": "False", "reason": LET_GO, "message": f"0/4: {LACKS_GPU}"},
        {"plan": {"pools": {"spot": 4}}},
        4,
        running=running,
        containers=[{"name": "worker", "resources": {"limits": {"nvidia.com/gpu": "1"}}}],
        pods=4,
        ready=timedelta(days=1),
        has={"cpu": "8"},
        pool={"accelerator": {"name": "T4"}},
        workers={"replicas": 4, "maxReplicas": 4, "pools": ["spot"]},
        elasticity={"mode": "Auto"},
    )
    assert (_ready(status)[1], status.recommended.nodes) == ("NodesLackAccelerator", recommended)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("1 Insufficient cpu.", (4, 5, 1)),
        ("1 node(s) didn't match pod anti-affinity rules.", (6, 5, None)),
        ("1 Insufficient nvidia.com/gpu.", (4, 5, 1)),
    ],
    ids=["share one", "apart", "another resource"],
)
async def test_nodes_that_workers_wait_for_are_told_beside_the_workers(
    words: str, told: tuple[int, int, int | None]
) -> None:
    containers = [{"name": "worker", "resources": {"requests": {"cpu": "3"}}}]
    template = {"spec": {"containers": containers}}
    found = await _look(
        {},
        {"type": "PodScheduled", "status": "False", "reason": LET_GO, "message": f"0/1: {words}"},
        {"plan": {"pools": {"spot": 20}}},
        1,
        running=[("worker", index, "spot-0") for index in range(5)],
        containers=containers,
        has=NODE_OF_16,
        pods=5,
        workers={"replicas": 20, "maxReplicas": 20, "pools": ["spot"], "template": template},
        elasticity={"mode": "Auto"},
        pool={"limits": {"nodes": 40}},
    )
    assert (found.recommended.nodes, found.waiting, found.waiting_nodes) == told
    assert found.shares[0].waiting_nodes == told[2]
