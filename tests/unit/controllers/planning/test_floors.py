"""Jobs that share pools, with the planner of all and the policy of each: what one plans, the other carries out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dev.night import examples
from shoal.api.capacity_pool import CapacityPool
from shoal.controllers.planning.trades import trades
from shoal.controllers.planning.translate import proposal
from shoal.controllers.trainingjob.claims import holdings
from shoal.policy.decide.homes import Homes, homes_of
from shoal.policy.decide.planning import planned
from shoal.policy.facts.read import read
from shoal.policy.facts.sightings import Home
from shoal.sizing.fleet import FleetJob, plan_fleet
from shoal.sizing.fleet.jobs import fleet_job
from shoal.sizing.fleet.resources import fleet_pool
from tests.unit.policy.pools import Pools, pool
from tests.unit.sizing.fleet.test_fleet import MODEL
from tests.unit.sizing.fleet.test_shares import IDLE

SHARED = {"a": ("OnDemand", 3.0), "b": ("Spot", 0.1), "c": ("OnDemand", 9.0)}
AT_ONCE = {"mode": "Auto", "objective": {"prefer": "MinTime"}, "stabilizationSeconds": {"up": 0, "down": 0}}


@dataclass(frozen=True)
class Spec:
    """A job. `known`: whether its model is, so that its plan is searched for. `mode`: only in Auto it follows it."""

    replicas: int = 1
    least: int = 1
    priority: int = 0
    pools: tuple[str, ...] = ("a",)
    known: bool = False
    mode: str = "Auto"


class Job:
    """A job whose workers are there, or gone, as soon as its plan says."""

    def __init__(self, spec: Spec, pools: Mapping[str, CapacityPool]) -> None:
        self.spec = spec
        self.world = Pools(
            *(pools[name] for name in spec.pools), nodes={}, replicas=spec.replicas, maxReplicas=max(spec.replicas, 1),
            minReplicas=spec.least, elasticity=AT_ONCE if spec.mode == "Auto" else {"mode": spec.mode},
        )  # fmt: skip
        self.has: dict[str, int] = {}

    def seen(self, name: str) -> FleetJob:
        found = replace(
            fleet_job(self.world.job, None, self.world.now), name=name, priority=self.spec.priority
        )
        if not self.spec.known:
            return found
        least = found.min_workers if self.spec.mode in {"Manual", "Off"} else self.spec.least
        return replace(found, model=MODEL, samples_left=2e7, min_workers=least)

    def decide(self, taken: Mapping[str, int]) -> None:
        self.world.elsewhere = dict(taken)
        facts = read(self.world.observation())
        homes = homes_of(facts)
        found = planned(facts, homes, self.spec.replicas)
        assert found.status is not None
        self.has = dict(found.status.pools) if self.spec.mode == "Auto" else self._by_preference(homes)
        slots = [
            {"role": "worker", "index": i, "incarnation": 0, "state": "Running", "pool": name, "node": name}
            for i, name in enumerate(Counter(self.has).elements())
        ]
        self.world.status = {"plan": found.status.model_dump(by_alias=True, mode="json"), "slots": slots}

    def _by_preference(self, homes: Homes) -> dict[str, int]:
        has = Counter({Home(name): n for name, n in self.has.items()})
        while has.total() < self.spec.replicas and (home := homes.next(has)) is not None:
            has[home] += 1
        return {home.pool: n for home, n in has.items()}


class Shared:
    """The jobs, which come one after another, each when those before it have what they plan."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        self.limits = limits
        gpu = {"name": "P100"}
        self.pools = {name: pool(name, *SHARED[name], n, accelerator=gpu) for name, n in limits.items()}
        self.jobs = dict[str, Job]()
        self.wanted = dict[str, dict[str, int]]()

    def add(self, spec: Spec) -> None:
        job = Job(spec, self.pools)
        if self.jobs:
            job.world.now = next(iter(self.jobs.values())).world.now
        self.jobs[str(len(self.jobs))] = job

    def grow(self, name: str, replicas: int) -> None:
        """Somebody lets a job have more workers."""
        job = self.jobs[name]
        job.world.manifest["spec"]["workers"]["maxReplicas"] = replicas
        job.spec = replace(job.spec, replicas=replicas)

    def minute(self) -> None:
        """All are planned, and each follows as far as the others let it."""
        fleet = [job.seen(name) for name, job in self.jobs.items()]
        now = next(iter(self.jobs.values())).world.now
        found = plan_fleet([fleet_pool(each, now) for each in self.pools.values()], [IDLE], fleet).jobs
        assert not any(each.fault for each in found.values())
        self.wanted = {name: dict(+Counter(each.counts)) for name, each in found.items()}
        held = {name: holdings(job.world.job) for name, job in self.jobs.items()}
        traded = trades(self.wanted, held, self.limits, {each.name: each.priority for each in fleet})
        for name, job in self.jobs.items():
            job.world.proposal = proposal(job.world.job, found[name], traded[name], now, job.world.proposal)
        for _ in self.jobs:  # who waits for the nodes of another one has its turn again
            for name, job in self.jobs.items():
                others = (holdings(other.world.job) for each, other in self.jobs.items() if each != name)
                before = sum(job.has.values())
                job.decide(sum(others, Counter[str]()))
                assert sum(job.has.values()) >= min(before, job.spec.least)
        for job in self.jobs.values():
            job.world.now += timedelta(minutes=1)

    def has(self, name: str) -> int:
        return sum(self.jobs[name].has.values())


def starved(shared: Shared, name: str) -> bool:
    """Whether a job waits for nodes that jobs of lower priority have beyond what they keep, or that nobody has."""
    job = shared.jobs[name]
    used = sum((Counter(other.has) for other in shared.jobs.values()), Counter[str]())
    room = sum(shared.limits[pool] - used[pool] for pool in job.spec.pools)
    for each, other in shared.jobs.items():
        if other.spec.priority < job.spec.priority and other.spec.mode == "Auto":
            # Of jobs that trade, each has the one without which it cannot run, if the others can be in time.
            spare = shared.has(each) - max(other.spec.least, int(other.spec.known))
            room += max(0, min(spare, sum(other.has.get(pool, 0) for pool in job.spec.pools)))
    return room > 0 and shared.has(name) < job.spec.replicas and shared.has(name) + room >= job.spec.least


def after(limits: dict[str, int], *specs: Spec, minutes: int = 3) -> Shared:
    shared = Shared(limits)
    for spec in specs:
        shared.add(spec)
        for _ in range(minutes):
            shared.minute()
    return shared


def test_job_of_higher_priority_has_all_nodes_of_a_full_pool_but_the_least_of_a_lower_one() -> None:
    """The lower one was planned no worker, which is fewer than minReplicas: so it kept all, and for ever."""
    for known in (False, True):
        shared = after({"a": 4}, Spec(4, known=known), Spec(4, priority=1, known=known))
        assert [shared.has(name) for name in shared.jobs] == [1, 3]


def test_job_whose_least_is_zero_is_stopped_for_one_of_higher_priority() -> None:
    shared = after({"a": 4}, Spec(4, least=0), Spec(4, priority=1))
    assert [shared.has(name) for name in shared.jobs] == [0, 4]


def test_job_that_cannot_have_its_least_beside_that_of_others_takes_nothing_from_them() -> None:
    shared = after({"a": 4}, Spec(4), Spec(4, least=4, priority=1))
    assert [shared.has(name) for name in shared.jobs] == [4, 0]


def test_nodes_that_a_lower_job_took_while_there_were_more_go_to_the_higher_one() -> None:
    """Both ran, and what the one would gain the other would lose: so the lower one kept three of four."""
    shared = after({"a": 4}, Spec(1, priority=1, known=True), Spec(3, known=True))
    shared.grow("0", 4)
    shared.minute()
    assert [shared.has(name) for name in shared.jobs] == [3, 1]


@pytest.mark.parametrize("mode", ["Advise", "Manual", "Off"])
def test_job_runs_where_nodes_are_free_beside_one_that_stays_where_it_is(mode: str) -> None:
    """It was planned the nodes of a job that nobody moves, which would be cheaper elsewhere: so it never grew."""
    stays = Spec(4, priority=1, pools=("a", "b"), known=True, mode=mode)
    shared = after({"a": 4, "b": 4, "c": 4}, stays, Spec(pools=("a", "c"), known=True))
    shared.grow("1", 4)
    shared.minute()
    assert [job.has for job in shared.jobs.values()] == [{"a": 4}, {"c": 4}]


@st.composite
def specs(draw: st.DrawFn, *, known: bool) -> Spec:
    replicas = draw(st.integers(1, 5))
    least = draw(st.integers(0, replicas))
    some: list[Any] = [("a",), ("b",), ("a", "b"), ("b", "a")]
    mode = draw(st.sampled_from(["Auto", "Auto", "Advise", "Manual"]))
    return Spec(replicas, least, draw(st.integers(0, 2)), draw(st.sampled_from(some)), known=known, mode=mode)


limits = st.fixed_dictionaries({"a": st.integers(0, 6), "b": st.integers(0, 6)})


def check(limits: dict[str, int], jobs: list[Spec]) -> None:
    shared = after(limits, *jobs)
    used = sum((Counter(job.has) for job in shared.jobs.values()), Counter[str]())
    assert all(used[pool] <= limit for pool, limit in limits.items())
    for name, job in shared.jobs.items():
        if job.spec.mode == "Auto":
            assert job.has == shared.wanted[name], "what the plan gives is what the policy keeps"
        assert not starved(shared, name)


@settings(max_examples=examples(40), deadline=None)
@given(limits, st.lists(specs(known=False), min_size=1, max_size=4))
def test_jobs_have_what_they_are_planned_and_wait_for_nothing_that_lower_ones_can_spare(
    limits: dict[str, int], jobs: list[Spec]
) -> None:
    check(limits, jobs)


@settings(max_examples=examples(8), deadline=None)
@given(limits, st.lists(specs(known=True), min_size=1, max_size=3))
def test_so_do_jobs_whose_plans_are_searched_for(limits: dict[str, int], jobs: list[Spec]) -> None:
    check(limits, jobs)
