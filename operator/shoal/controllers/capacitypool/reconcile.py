"""Observes one CapacityPool, computes its status (`measure`) and writes it if it changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from datetime import datetime
from functools import partial
from itertools import filterfalse

from shoal.api.amounts import Amounts
from shoal.api.capacity_pool import CapacityPool
from shoal.api.capacity_pool_status import CapacityPoolStatus
from shoal.api.events import Event
from shoal.api.kube import Pod
from shoal.controllers.capacitypool.asked import Asked
from shoal.controllers.capacitypool.measure import measure
from shoal.controllers.capacitypool.members import Members
from shoal.controllers.capacitypool.needed import asked_by, may_help, nodes_of, planned_nodes, room_of
from shoal.controllers.capacitypool.overlaps import older_overlap
from shoal.controllers.capacitypool.problems import problem_of, wants_gpus_since
from shoal.controllers.capacitypool.seen import Seen
from shoal.controllers.capacitypool.waiting import last_came, waiting, without_node
from shoal.controllers.state import ClusterState
from shoal.policy.facts.waits import NO_NODES, Rooms, Wait, is_full
from shoal.runtime.controller import Key, key_of
from shoal.runtime.recorder import Recorder
from shoal.runtime.status_writer import StatusWriter

EVERY_SECONDS = 15.0
REST_SECONDS = 3.0
"""What changes so soon after a look is answered together: a hundred jobs that begin are few statuses of their pool."""

RECOMMENDED = "Recommended"


class PoolReconciler:
    """Called with the key of a pool; returns the seconds until the next time. `operator`: who this is, to others.

    It is made before the caches are filled, and has a pool looked at when its nodes change, or those of a job. `rest`
    has later changes of a pool wait for so long.
    """

    def __init__(
        self,
        state: ClusterState,
        writer: StatusWriter[CapacityPool],
        recorder: Recorder,
        *,
        wall: Callable[[], datetime],
        operator: str = "",
        nodes_readable: Callable[[], bool] = lambda: True,
        on_change: Callable[[], None] = lambda: None,
        rest: Callable[[Key, float], None] = lambda _key, _seconds: None,
    ) -> None:
        self._state = state
        self._writer = writer
        self._recorder = recorder
        self._wall = wall
        self._operator = operator
        self._nodes_readable = nodes_readable
        self._on_change = on_change
        self._rest = rest
        self._asked = Asked()
        self._members = Members(lambda name: state.wake(CapacityPool.PLURAL, ("", name)))
        state.on_job.append(self._members.see_job)
        state.on_gone.append(self._asked.forget)
        state.on_node.append(self._members.see_node)
        state.on_pool.append(self._members.see_pool)

    async def __call__(self, key: Key) -> float | None:
        """Reconcile one pool."""
        pool = self._state.pools.get(key[1])
        if pool is None or pool.metadata.deletion_timestamp:
            return None
        self._rest(key, REST_SECONDS)
        pool = self._writer.as_known(pool)
        status = measure(self._observe(pool))
        if status != pool.status:
            events = _events(pool, status)
            stored = await self._writer.write(pool, status)
            if stored is None:
                return 1.0 if self._writer.can_write(pool) else EVERY_SECONDS
            self._recorder.record(stored, events)
            if any(each.reason != RECOMMENDED for each in events):  # that follows from plans
                self._on_change()
        return EVERY_SECONDS

    def _observe(self, pool: CapacityPool) -> Seen:
        name, members, pods = pool.metadata.name, self._members, self._state.pods
        nodes, now = members.nodes(name), self._wall()
        working, serving = nodes & pods.keys("worker's host"), nodes & pods.keys("server's host")
        needy = without_node(self._state, name)
        found = [node for each in nodes if (node := self._state.nodes_by_name.get(each)) is not None]
        on = partial(pods.indexed, "node")
        rooms = Rooms.of(found, on) if needy else NO_NODES
        needs = waiting(self._state, needy, rooms, now)
        waits = [(pod, since) for pod, since, wait in needs if wait is Wait.NODE]
        in_vain = [pod for pod, _ in waits]
        lacking = [pod for pod, _, wait in needs if wait in {Wait.NODE, Wait.APART} and may_help(pool, pod)]
        has = room_of(pool, found)
        more = nodes_of(filter(_is_worker, lacking), has)
        servers = nodes_of(filterfalse(_is_worker, lacking), has, tries_one=True)
        return Seen(
            pool=pool,
            now=now,
            nodes=nodes,
            used=len(working | serving),
            serving=len(serving),
            apart=len(serving - working),
            jobs=members.jobs(name),
            unread=self._state.jobs.is_unread,
            full=self._full(pool, serving - working, working, in_vain) if serving - working else 0,
            held=members.held(name),
            worker_nodes=planned_nodes(self._asked_by_workers(pool, nodes), has, len(working) + more),
            more_nodes=more,
            waiting=[since for _, since in waits],
            newest=last_came(found, on, some_wait=bool(waits)),
            servers_waiting=sum(not _is_worker(each) for each in in_vain),
            server_nodes=servers,
            problem=problem_of(
                pool, found, now, trains=bool(working), waits_since=wants_gpus_since(pool, needs)
            ),
            overlaps=older_overlap(pool, self._rivals(pool), members.sharing(name), nodes),
            nodes_readable=self._nodes_readable(),
            operator=self._operator,
        )

    def _asked_by_workers(self, pool: CapacityPool, nodes: Set[str]) -> Iterator[tuple[Amounts | None, int]]:
        """What the workers ask for that jobs have in the pool, or are to have, and how many do.

        There may be thousands: where nobody has edited the job, all ask for what its template says. That depends on the
        pool, too: if somebody has edited that, they do where the first and the last that are known do.
        """
        for job, count in self._members.counts(pool.metadata.name):
            if count <= 0:
                continue
            if job.metadata.generation <= 1 >= pool.metadata.generation:
                yield self._asked.of(job, pool), count
                continue
            template = partial(self._asked.of, job, pool)
            its = self._state.pods.indexed("run", (key_of(job), job.metadata.uid))
            if job.metadata.generation <= 1:
                ends = (next(_workers_on(nodes, pods), None) for pods in (its, reversed(its)))
                asked = template()
                if all(pod is None or pod.spec.requests == asked for pod in ends):
                    yield asked, count
                    continue
            yield from asked_by(_workers_on(nodes, its), count, template)

    def _rivals(self, pool: CapacityPool) -> list[CapacityPool]:
        """Other pools that select nodes of it, or would, and the one of which that was told."""
        told = {pool.status.overlaps.name} if pool.status.overlaps else set()
        found = map(self._state.pools_by_name.get, self._members.rivals(pool.metadata.name) | told)
        return [each for each in found if each is not None]

    def _full(self, pool: CapacityPool, apart: Set[str], working: Set[str], waiting: Iterable[Pod]) -> int:
        """How many of the nodes with servers alone have no room for a worker like those that run or wait.

        Without any, like those that jobs would make here: else workers would go elsewhere and come back in turns.
        """
        pods = self._state.pods
        there = (each for node in working for each in pods.indexed("node", node))
        workers = {each.spec.requests for each in (*there, *waiting) if _is_worker(each)}
        if not workers:
            name = pool.metadata.name
            named = (job for job in self._state.jobs.all() if name in job.spec.workers.pools)
            jobs = (job for job in named if job.spec.ours and not job.status.finished)
            workers = {asked for job in jobs if (asked := self._asked.of(job, pool)) is not None}
        nodes = ((self._state.nodes_by_name.get(node), pods.indexed("node", node)) for node in apart)
        return sum(node is not None and is_full(node, its, workers) for node, its in nodes)


def _workers_on(nodes: Set[str], pods: Iterable[Pod]) -> Iterator[Pod]:
    return (pod for pod in pods if pod.spec.node_name in nodes and _is_worker(pod) and not pod.ended)


def _is_worker(pod: Pod) -> bool:
    return pod.place is not None and pod.place.role == "worker"


def _events(pool: CapacityPool, status: CapacityPoolStatus) -> list[Event]:
    """Conditions that changed, and a new recommendation."""
    events = []
    before = {condition.type: condition for condition in pool.status.conditions}
    for condition in status.conditions:
        was = before.get(condition.type)
        bad = condition.status != "True" if condition.type == "Ready" else condition.status == "True"
        if was is not None and (was.status, was.reason) == (condition.status, condition.reason):
            continue
        if bad:
            events.append(Event("Warning", condition.reason, condition.message))
        elif was is not None:
            events.append(Event("Normal", condition.reason, f"{condition.type} is {condition.status} again"))
    old, new = pool.status.recommended, status.recommended
    if new.nodes != old.nodes:
        events.append(Event("Normal", RECOMMENDED, f"{old.nodes} -> {new.nodes} nodes: {new.reason}"))
    return events
