"""Creates the next pod of a place: the part shared by workers and parameter servers."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, partial

from shoal.api.labels import Place, RoleName
from shoal.api.training_job_status import Slot
from shoal.manifests import PodFactory
from shoal.manifests.names import pod_name
from shoal.manifests.objects import Manifest
from shoal.manifests.workload import stands_for
from shoal.policy.actions import Action, CreatePod
from shoal.policy.common.timers import Timers
from shoal.policy.decide.admission import Gate, gate, name_conflict_gate
from shoal.policy.decide.backoff import not_before
from shoal.policy.decide.kept_to import pods_by_pool, still_kept_to
from shoal.policy.decide.members import Member, follows_a_loss
from shoal.policy.decide.wanted import Wanted
from shoal.policy.facts.read import Facts
from shoal.policy.facts.verdict import HEALTHY
from shoal.policy.model import Reason


@dataclass
class Actions:
    """The actions of all policies of one plan, and why some are not taken."""

    timers: Timers
    actions: list[Action] = field(default_factory=list)
    stalled: Reason | None = None
    quota: str | None = None
    conflict: Reason | None = None
    """Another manager changes an object of the job."""
    postponed: set[int] = field(default_factory=set)
    """Workers that wait, though an earlier leader, who knew less of them, may have made a pod: see `Plan.looked_at`."""
    denied: set[tuple[str, int]] = field(default_factory=set)
    """Workers, with the pools that they are for, whose pods cannot be made, or are likely to be refused."""

    def closed(self, gate: Gate) -> None:
        """Remember why a gate is closed, and plan again when it may open. The first reason wins."""
        self.stalled = self.stalled or gate.stalled
        self.quota = self.quota or gate.quota
        if gate.wait_seconds is not None:
            self.timers.after(gate.wait_seconds)


class Creator:
    """Creates pods of one role, as far as the gate, back-off and name conflicts allow.

    None of a job that cannot be read: what it wants is not known, and nothing about it can be recorded.
    """

    def __init__(self, facts: Facts, role: RoleName, wanted: Wanted, actions: Actions) -> None:
        self._facts, self._role, self._wanted, self.actions = facts, role, wanted, actions
        self._gates = dict[str, Gate]()
        """By pool."""
        self._tried = False

    def next_place(self, index: int, members: list[Member]) -> Place | None:
        """The next incarnation of a place; None if it has to wait."""
        last = members[-1] if members else None
        if last and (due := not_before(last)) is not None and self.actions.timers.pending(due):
            return None
        number = last.place.incarnation if last else self._facts.first_incarnation - 1
        if last is None or not last.planned:
            number += 1
        place = Place(self._role, index, number)
        gone = self._facts.seen.gone_pods
        while gone and self._name(place) in gone:  # made, and gone before it was recorded
            place = place._replace(incarnation=place.incarnation + 1)
        return place if self.may_create(place) else None

    def may_create(self, place: Place) -> bool:
        """Whether the gate is open and the name is free."""
        gate = self.gate(pool := self._wanted.pool_of(place))
        conflict = name_conflict_gate(self._facts.seen, self._name(place))
        self.doubt(place, taken=conflict is not None and conflict.stalled is not None)
        if self._facts.seen.unread or not gate.open or (self._is_doubtful(pool) and self._tried):
            return False
        if stands_for(self._facts.job, place) and place.role not in self._facts.quota.assigned:
            return False  # a change of its Workload, or of a flavor, wakes the job
        if conflict is not None:
            self.actions.closed(conflict)
            return conflict.open
        return True

    def doubt(self, place: Place, *, taken: bool = False) -> None:
        """Note it if no pod of this place is likely to be made, whether one is tried or not. `taken`: its name is."""
        pool = self._wanted.pool_of(place)
        if place.role == "worker" and (taken or self._facts.seen.unread or self._is_doubtful(pool)):
            self.actions.denied.add((pool, place.index))

    def _is_doubtful(self, pool: str) -> bool:
        """Whether a pod for a pool is likely to be refused, as those before it were, perhaps of an earlier leader."""
        return self.gate(pool).doubtful or (self._role == "worker" and pool in self._kept_to)

    @cached_property
    def _kept_to(self) -> Set[str]:
        """Pools in which the job has as many pods as it is kept to: what it lost of these is replaced at once."""
        have = pods_by_pool(self._facts)
        return {
            pool for pool, number in still_kept_to(self._facts, self._wanted).items() if have[pool] >= number
        }

    def gate(self, pool: str) -> Gate:
        """The gate for pods of a pool. Why it is closed is told."""
        if pool not in self._gates:
            self._gates[pool] = gate(self._facts.seen, self._role, pool)
            self.actions.closed(self._gates[pool])
        return self._gates[pool]

    def create(self, place: Place, *, replaces: bool) -> None:
        """Create the pod of a place. `replaces`: it follows one that was lost."""
        action = pod_of(self._facts, self._wanted, place, replaces=replaces)
        if not self._tried:
            action.make()  # what is wrong with the manifests is told on the job, as any error of a plan
        self.actions.actions.append(action)
        self._tried = True

    def plan_ahead(self, place: Place, members: list[Member], at: datetime | None = None) -> None:
        """Record a pod before it is made, which is when this is stored. `at`: what the record says of the time."""
        home = self._wanted.home(place)
        slot = Slot(
            role=place.role,
            index=place.index,
            incarnation=place.incarnation,
            state="Planned",
            attempts=members[-1].slot.attempts if members else 0,
            replaces=follows_a_loss(members),
            pool=home.pool,
            on_demand=home.on_demand,
            created_at=at,
        )
        members.append(Member(place, slot, None, HEALTHY, recorded=False))
        self.actions.timers.after(0.0)

    def _name(self, place: Place) -> str:
        return pod_name(self._facts.job.metadata.name, place)


def pod_of(facts: Facts, wanted: Wanted, place: Place, *, replaces: bool = False) -> CreatePod:
    """The creation of the pod of a place, as it is wanted now."""
    name, pool = pod_name(facts.job.metadata.name, place), wanted.pool_of(place)
    make = partial(_manifest, facts.pods, wanted, place)  # not of `facts`: a request would keep all of them
    return CreatePod(name, make, *place, pool, replaces)


def _manifest(pods: PodFactory, wanted: Wanted, place: Place) -> Manifest:
    return pods.pod(place, wanted.where_of(place), on_demand=wanted.home(place).on_demand)
