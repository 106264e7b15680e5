"""Counts what the job uses and meets in its pools, and what of it the job pays: each thing once.

Workers and parameter servers alike: the pool of a pod is the one whose label it was made with, as its slot records it.
A count and the evidence that it was counted go into one status write: node time is counted from the slots of the last
status up to now, and `countedUntil` is written with it; a start, an unfulfilled wait and an interruption are counted in
the write that marks them in their slot. So whatever crashes when, nothing is counted twice. A node that no status knew
counts from the start of its first pod, if that is later than `countedUntil`: that a pod has a node is written late.
One that went counts up to the last sign of its pods, which may be long before anybody looks. Between two counts of one
process no more time has passed than on a clock that nobody sets: one that is hours ahead for a minute books no hours.

Jobs that have pods on one node, as parameter servers do, pay it in equal parts, as many as they are when it is counted:
that needs no record, and who comes or goes between is wrong by a minute of it. Its time counts whole for each of them,
since each counts its loss: so the pool's rate of losses stays true.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import cached_property
from typing import Any, NamedTuple

from shoal.api.kube import Pod
from shoal.api.labels import Place
from shoal.api.planning_status import CostStatus, PoolUsage
from shoal.api.training_job_status import MOST_USED, Slot
from shoal.policy.common.times import parse_time, seconds_between
from shoal.policy.decide.cost import amount_text, cost_so_far, price_of
from shoal.policy.decide.drains import was_reclaimed
from shoal.policy.decide.members import MOVED, SILENT, ByIndex, Member, every
from shoal.policy.facts.read import Facts
from shoal.policy.facts.sightings import AtRest, PoolNode
from shoal.policy.facts.verdict import terminated
from shoal.policy.facts.waits import Wait

EVERY = timedelta(seconds=60)
"""Node time is counted this often, and whenever the nodes change."""
TOGETHER = timedelta(seconds=60)
"""Interruptions this close to each other are one shock."""
WAITED = timedelta(seconds=5)
"""A pod that is bound later than this has waited for its node; schedulers need a second, and so are times rounded."""
OUT = timedelta(minutes=30)
"""A node that comes later than this was not to be had: no start-up takes so long."""
OWN = timedelta(minutes=10)
"""Most of what a worker does on its node before its first push that counts as a start-up: what a job's own code does
there, and the wait for its servers, would be all other jobs' plans."""
SET_SECONDS = 5.0
"""The wall clock was set where it differs by more from the other one. Times are rounded, and clocks adjusted little by
little."""
GIVEN_BACK = timedelta(minutes=15)
"""Nodes go for so long after a pool was made smaller: clouds drain them first."""
PATIENCE = timedelta(seconds=300)
"""A worker that waited this long for a node was not served."""
INTERRUPTIONS = frozenset(
    {
        "DeletionByPodGC",
        "ImpendingNodeTermination",
        "NodeDeleted",
        "NodeLost",
        "NodeRemediated",
        "NodeReplaced",
        "NodeShutdown",
        "NodeTerminating",
        "SpotInterruption",
        "TerminationByKubelet",
        "VMEventScheduled",
    }
)
"""Reasons of disruptions that say that the pool lost a node; not preemptions and deletions, nor evictions by themselves
(`drains`), nor what Karpenter does by its own will: its taint alone (`NodeDisrupted`)."""


@dataclass(frozen=True)
class Usage:
    """What is counted now."""

    pools: Mapping[str, PoolUsage]
    cost: CostStatus | None
    counted_until: datetime | None


class _Amounts(NamedTuple):
    """What nodes have: each of those of workers at rest the same, and each of some others."""

    at_rest: AtRest
    each: int
    others: Mapping[PoolNode, int]

    def by_pool(self) -> Mapping[str, int]:
        """What they amount to, by pool."""
        found = Counter({pool: number * self.each for pool, number in self.at_rest.nodes_of.items()})
        for (pool, _), amount in self.others.items():
            found[pool] += amount
        return found

    def of(self, nodes: Container[PoolNode]) -> Iterator[tuple[PoolNode, int]]:
        """What these nodes have."""
        yield from ((node, self.each) for node in self.at_rest.nodes if node in nodes)
        yield from ((node, amount) for node, amount in self.others.items() if node in nodes)


def due(facts: Facts) -> set[int]:
    """Workers at rest of which something is to be counted: a first push, or that they wait for a node in vain."""
    if not _is_counted(facts):
        return set()
    pushed = facts.coordinator.pushed
    running = facts.at_rest.running.items() if pushed else ()
    begun = {index for index, each in running if not each.slot.trained and each.place in pushed}
    return begun | {
        index
        for index, each in facts.at_rest.starting.items()
        if each.place in pushed
        or (not each.slot.node and not each.slot.unfulfilled and _waits_too_long(facts, each.slot, each.pod))
    }


def count(facts: Facts, servers: ByIndex, workers: ByIndex, *, ends: bool) -> Usage:
    """Count; slots in which something was counted are marked. `ends`: the job does, and gives its nodes back."""
    before = facts.job.status
    if not _is_counted(facts):
        return Usage(before.pool_usage, before.cost, None)
    counter, members = _Counter(facts), list(every(servers, workers))
    for each in members:
        if each.slot.pool:
            counter.look_at(each)
    return counter.result(members, ends=ends)


def _is_counted(facts: Facts) -> bool:
    spec = facts.job.spec
    return bool(
        spec.workers.pools or spec.parameter_servers.pools or facts.job.status.counted_until is not None
    )


class _Counter:
    def __init__(self, facts: Facts) -> None:
        self._facts, self._before = facts, facts.job.status
        self._pools: dict[str, dict[str, Any]] = {
            name: usage.model_dump() for name, usage in self._before.pool_usage.items()
        }

    def look_at(self, each: Member) -> None:
        """Count what happened to one pod."""
        slot, usage = each.slot, self._usage(each.slot.pool)
        pushed = self._facts.coordinator.pushed.get(each.place)
        if pushed is not None and not slot.trained and each.pod is not None:
            self._start(usage, each.pod, slot, datetime.fromtimestamp(pushed, UTC))
            each.slot = slot = slot.model_copy(update={"trained": True})
        if not slot.unfulfilled and self._waited(each):
            usage["unfulfilled"] += 1
            each.slot = slot.model_copy(update={"unfulfilled": True})
        silent = slot.cause == SILENT and not slot.interrupted and each.verdict.reason in INTERRUPTIONS
        later = silent or was_reclaimed(self._facts, slot)
        interrupted = slot.cause in INTERRUPTIONS and self._is_new(each)
        if (later or interrupted) and (slot.pool, slot.node) not in self._lost:
            self._lost |= {(slot.pool, slot.node)} if slot.node else set()
            if not self._is_given_back(slot.pool):
                usage["interruptions"] += 1
                self._shock(usage, slot.pool)
        if later:  # whoever of the node's pods it was counted for: that record may go before this one
            each.slot = each.slot.model_copy(update={"interrupted": True})

    def _start(self, usage: dict[str, Any], pod: Pod, slot: Slot, pushed: datetime) -> None:
        """Count the wait for a node, if it was not there, and by itself what came after, which says nothing of nodes.

        It was there if it is older than that wait, which then was for whoever had it. What a queue or a server took is
        none; and of a coordinator whose clock is so far behind that the worker pushed before it had a node, nobody
        knows how long it took.
        """
        created, bound, now = pod.created, pod.bound_at, self._facts.now
        if created is None or bound is None or pushed < bound:
            return
        if self._facts.job.spec.run_policy.scheduling_policy.queue:
            return
        usage["warm_starts"] += 1
        usage["warm_start_seconds"] += seconds_between(bound, min(pushed, now, bound + OWN))
        node = self._facts.seen.nodes.get(slot.node)
        asked = self._facts.asked_since(slot, created)
        was_there = node is not None and node.created is not None and node.created < asked
        if WAITED <= bound - asked <= OUT and not was_there:
            waited = seconds_between(asked, bound)
            usage["starts"] += 1
            usage["start_seconds"] += waited
            usage["start_seconds_squared"] += waited**2

    def _is_given_back(self, pool: str) -> bool:
        """Whether Shoal itself has made the pool smaller lately: which nodes go is then no word about the pool."""
        known = self._facts.seen.pools.get(pool)
        scaling = known.status.scaling if known is not None else None
        shrunk_at = scaling.shrunk_at if scaling is not None else None
        return shrunk_at is not None and timedelta() <= self._facts.now - shrunk_at < GIVEN_BACK

    def _waited(self, each: Member) -> bool:
        """Whether its pod waits for a node for too long."""
        if each.slot.cause and not self._is_new(each):
            return False
        return _waits_too_long(self._facts, each.slot, each.pod)

    def _is_new(self, each: Member) -> bool:
        """Whether its cause is recorded in this plan."""
        return each.place not in self._recorded

    @cached_property
    def _lost(self) -> set[PoolNode]:
        """Nodes whose loss is counted: one node with several pods is lost once."""
        records = self._facts.records
        return {
            (slot.pool, slot.node)
            for slot in records
            if slot.node and (slot.interrupted or slot.cause in INTERRUPTIONS)
        }

    @cached_property
    def _recorded(self) -> set[Place]:
        """Those whose causes are recorded."""
        return {slot.place for slot in self._facts.records if slot.cause not in {"", MOVED}}

    def _shock(self, usage: dict[str, Any], pool: str) -> None:
        last = usage["last_interruption"]
        again = last is not None and self._facts.now - last <= TOGETHER
        if not again:
            usage["at_last_shock"] = len([at for at, _ in _nodes(self._before.slots) if at == pool])
        usage["in_last_shock"] = usage["in_last_shock"] + 1 if again else 1
        usage["last_interruption"] = self._facts.now
        if usage["in_last_shock"] == 2:
            usage["shocks"] += 1
            usage["in_shocks"] += 2
            usage["at_shocks"] += max(usage["at_last_shock"], 2)
        elif usage["in_last_shock"] > 2:
            usage["in_shocks"] += 1

    def _usage(self, pool: str) -> dict[str, Any]:
        known = self._pools.get(pool)
        if known is None:
            known = PoolUsage().model_dump()
            if len(self._pools) < MOST_USED:  # what it costs is counted all the same
                self._pools[pool] = known
        return known

    def result(self, members: Sequence[Member], *, ends: bool) -> Usage:
        """Count the node time, if it is time."""
        facts, before, at_rest = self._facts, self._before, self._facts.at_rest
        stay = at_rest.nodes.keys()  # as they are recorded
        was = _nodes(facts.records) - stay
        now = _nodes(each.slot for each in members) - stay
        since = before.counted_until or facts.now
        passed, until = self._passed(since)
        cost, left = before.cost, EVERY.total_seconds() - passed
        if ends or was != now or left <= 0:
            odd = self._ends(members, was - now, since)
            odd |= self._begins(members, now - was, before.counted_until)
            if before.counted_until is not None:
                odd = {node: min(seconds, passed) for node, seconds in odd.items()}
            used = _Amounts(at_rest, passed, dict.fromkeys(was, passed) | odd)
            has = _Amounts(at_rest, 1, dict.fromkeys(now, 1))
            left = EVERY.total_seconds()
            for pool, some in used.by_pool().items():
                self._usage(pool)["node_seconds"] += some
            prices = {name: self._node_price(name) for name in used.by_pool().keys() | has.by_pool().keys()}
            others = facts.seen.others_on({*stay, *was, *now})
            pays = {} if ends else _paid(has, others)
            cost = cost_so_far(facts.seen.pools, prices, cost, _paid(used, others), pays)
        else:
            until = before.counted_until
        if stay or now:
            facts.timers.after(left)
        pools = {name: PoolUsage.model_validate(usage) for name, usage in self._pools.items()}
        return Usage(before.pool_usage if pools == before.pool_usage else pools, cost, until)

    def _passed(self, since: datetime) -> tuple[int, datetime | None]:
        """The seconds since it was counted, and up to when it is counted with them."""
        seen, now = self._facts.seen, self._facts.now
        if seen.counted_at is not None:
            passed = seen.at - seen.counted_at
            if abs((now - since).total_seconds() - passed) > SET_SECONDS:
                # That it was counted is told by another moment than before.
                until = now if now != since else now + timedelta(seconds=1)
                return int(passed), until
        return seconds_between(since, now), max(since, now)  # a clock that goes back counts nothing twice

    def _node_price(self, name: str) -> Decimal | None:
        """Of an hour, as the pool says; while it is not there, as it said last: its nodes are paid all the same."""
        usage, pool = self._usage(name), self._facts.seen.pools.get(name)
        if pool is not None:
            price = price_of(pool)
            usage["price_per_hour"] = None if price is None else amount_text(price)
        last = usage["price_per_hour"]
        return None if last is None else Decimal(last)

    def _begins(
        self, members: Iterable[Member], come: Set[PoolNode], counted_until: datetime | None
    ) -> dict[PoolNode, int]:
        """Seconds of each of the nodes that came: since the first of the job's pods there began."""
        found = dict[PoolNode, datetime]()
        for each in members if come else ():
            began = parse_time(each.pod.status.start_time) if each.pod is not None else None
            if began is not None and (node := (each.slot.pool, each.slot.node)) in come:
                found[node] = min(found.get(node, began), began)
        return {
            node: seconds_between(max(began, counted_until or began), self._facts.now)
            for node, began in found.items()
        }

    def _ends(self, members: Iterable[Member], gone: Set[PoolNode], since: datetime) -> dict[PoolNode, int]:
        """Seconds of each of the nodes that went, which may be long before anybody looks again.

        Until the last sign of a pod there: its container's end, or its last word to the coordinator. Without one,
        it went as soon as it could have been counted again: what was not seen is not charged.
        """
        if not gone:
            return {}
        now, report = self._facts.now, self._facts.seen.report
        unseen = min(since + EVERY, now)
        signs = {
            Place("worker", each.slot, each.incarnation): now
            - timedelta(seconds=self._facts.seen.report_age + each.last_seen_seconds)
            for each in (report.workers if report is not None else ())
        }
        for each in members:
            ended = terminated(each.pod, each.slot.role) if each.pod is not None else None
            if ended is not None and (at := parse_time(ended.finished_at)) is not None:
                signs[each.place] = at
        ends = dict[PoolNode, datetime]()
        for slot in self._facts.records:
            if (node := (slot.pool, slot.node)) in gone and slot.state != "Ended":
                at = min(max(signs.get(slot.place, unseen), since), now)
                ends[node] = max(ends.get(node, since), at)
        return {node: seconds_between(since, at) for node, at in ends.items()}


def _waits_too_long(facts: Facts, slot: Slot, pod: Pod | None) -> bool:
    """Whether a pod waits for a node for longer than it is to."""
    if slot.created_at is None or facts.wait_of(slot, pod) is not Wait.NODE:
        return False
    rule = facts.job.spec.workers.fallback
    patience = timedelta(seconds=rule.after_seconds) if rule else PATIENCE
    return not facts.timers.pending(facts.asked_since(slot, slot.created_at) + patience)


def _nodes(slots: Iterable[Slot]) -> frozenset[PoolNode]:
    """The pools and nodes that have a pod; a node with several counts once."""
    return frozenset(
        [(slot.pool, slot.node) for slot in slots if slot.pool and slot.node and slot.state != "Ended"]
    )


def _paid(amounts: _Amounts, others: Mapping[PoolNode, int]) -> Mapping[str, Decimal]:
    """What the job pays of nodes, by pool: of one on which other jobs have pods, an equal part with each.

    `others`: how many other jobs there are on a node, where there are any.
    """
    paid = {pool: Decimal(amount) for pool, amount in amounts.by_pool().items()}
    for node, amount in amounts.of(others) if others else ():
        paid[node[0]] -= Decimal(amount) * others[node] / (1 + others[node])
    return paid
