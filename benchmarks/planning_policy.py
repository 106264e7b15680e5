"""The operator's planning as a policy of the replay, one run by one: `plan_fleet`, asked when the operator asks it.

Each minute, and when a worker is lost, a pool runs out or has nodes again. Plans are carried out by the rules of
`policy/decide/planning.py`, and a pool runs out by those of `controllers/capacitypool/stock.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray

from shoal.api.elasticity import Stabilization
from shoal.controllers.capacitypool.counted import Sums
from shoal.controllers.capacitypool.stock import LATE, LONGEST, held_for, patience_after, start
from shoal.controllers.planning.paces import LEAST_SECONDS, MOST_SECONDS, START_SECONDS
from shoal.policy.decide.lasting import lasting
from shoal.sizing.fleet import FleetJob, FleetPool, Model, Pace, Profile, Row, ServerLoad, Watched, plan_fleet
from shoal.sizing.fleet.kept import Kept
from shoal.sizing.plan.problem import Pool
from shoal.sizing.simulate.policies import View
from shoal.sizing.simulate.replay import Supply, step_of
from shoal.sizing.simulate.scenario import Scenario
from shoal.sizing.speed.measurements import Basis, LogMean

__all__ = ["Planning", "Stock", "learned", "planning"]

Ints = NDArray[np.int64]

BATCH = 128
EVERY, SETTLE = 60.0, 1.0
"""Seconds between plans, and after what matters, as in the operator."""
LOSSES = 0.1
"""What the pool's spec says of its interruptions per node and hour."""
BOOTS = 2 / 3
"""The part of a start after which a worker has its node."""
MODEL = Model("replayed", 8e8, 10**6, 60)
SURE = Pace(0.0, 1e5)
"""What was watched for so long is certain."""
CONFIDENCE = FleetJob("", ()).confidence
SPOT, OWN = "spot", "own"
WAITS = Stabilization()


class _Kind:
    """The nodes of one pool in one run, as the job's slots and the pool's status tell of them."""

    def __init__(self, pool: Pool) -> None:
        self.name, self.startup = pool.name, pool.startup_seconds
        self.there = self.working = 0
        self._before = deque[tuple[float, int]]()
        self.working_since: float | None = None

    def see(self, now: float, there: int, working: int) -> int:
        """What there is now; how many were lost."""
        lost, self.there, self.working = max(self.there - there, 0), there, working
        if not working:
            self.working_since = None
        elif self.working_since is None:
            self.working_since = now
        self._before.append((now, there))
        while self._before[0][0] < now - BOOTS * self.startup:
            self._before.popleft()
        return lost

    @property
    def with_node(self) -> int:
        """Workers that have a node: those that are there since nodes boot."""
        return max(self.working, min(there for _, there in self._before))


class Stock:
    """What a pool's status tells of its nodes: whether there are more, by the pods that wait, and what was counted."""

    def __init__(self, pool: Pool) -> None:
        self._said = pool.startup_seconds
        self._waiting = deque[float]()
        """Since when each pod waits."""
        self.out_since: float | None = None
        self.exhausted_at: float | None = None
        self.watched = self.out = self.outs = self.lost = self.node_seconds = self.in_shocks = (
            self.at_shocks
        ) = 0.0
        self.starts = Sums()
        self._until, self._there = 0.0, 0

    @property
    def waits(self) -> bool:
        """Whether any pod waits for a node."""
        return bool(self._waiting)

    def longest(self, now: float) -> float:
        """For how many seconds the first of the pods that wait does so."""
        return max((now - since for since in self._waiting), default=0.0)

    def see(self, now: float, there: int, asked: int, lost: int) -> bool:
        """What the job has and asks for. Whether the pool has run out, or may have nodes again."""
        before, grew, used = self.exhausted_at is not None, there > self._there, there > 0
        self.lost += lost
        if lost > 1:  # together
            self.in_shocks, self.at_shocks = self.in_shocks + lost, self.at_shocks + self._there
        passed = now - self._until
        self.node_seconds += self._there * passed
        missing, new = max(asked - there, 0), max(there - self._there + lost, 0)
        self._until, self._there = now, there
        for _ in range(len(self._waiting) - missing):
            waited = now - self._waiting.popleft()
            if new > 0:
                self._started(waited)
                new -= 1
        for _ in range(new):
            self._started(0.0)
        self._waiting.extend([now] * (missing - len(self._waiting)))
        if grew:
            self.out_since = None
        if self.out_since is not None or (used and not self._waiting):
            self.watched += passed
            self.out += passed if self.out_since is not None else 0.0
        self._judge(now, grew=grew)
        return before != (self.exhausted_at is not None)

    def _judge(self, now: float, *, grew: bool) -> None:
        patience, most = patience_after(self._said, self.starts), LONGEST.total_seconds()
        least = patience * (LATE if self.out_since is not None and self.exhausted_at is None else 1)
        longest = self.longest(now)
        if least < longest <= least + most:
            if self.out_since is None:
                self.out_since = now
                self.outs, self.out, self.watched = self.outs + 1, self.out + longest, self.watched + longest
            self.exhausted_at = now
        elif self.exhausted_at is not None:
            since = self.exhausted_at if self.out_since is None else self.out_since
            held = held_for(timedelta(seconds=patience), timedelta(seconds=self.exhausted_at - since))
            if grew or now - self.exhausted_at >= held.total_seconds():
                self.exhausted_at = None

    def _started(self, waited: float) -> None:
        seconds = waited + self._said
        self.starts = self.starts.plus(
            Sums(starts=1, start_seconds=seconds, start_seconds_squared=seconds**2)
        )

    def again(self) -> Stock:
        """The same pool later, when no job uses it: what was counted stays."""
        later = copy(self)
        later._waiting = deque()
        later.out_since = later.exhausted_at = None
        later._until, later._there = 0.0, 0
        return later

    def told(self, pool: FleetPool, now: float) -> FleetPool:
        """The pool as the planner sees it."""
        out, since = self.exhausted_at is not None, self.exhausted_at
        since = since if self.out_since is None else self.out_since
        mean, _ = start(self.starts)
        return replace(
            pool,
            startup_seen=self.starts.starts,
            measured_startup_seconds=mean or None,
            interruptions_seen=self.lost,
            node_hours=self.node_seconds / 3600,
            watched_seconds=self.watched,
            out_seconds=self.out,
            outs=self.outs,
            lost_in_shocks=self.in_shocks,
            there_in_shocks=self.at_shocks,
            exhausted=out,
            exhausted_seconds=now - since if out and since is not None else 0.0,
            doubted=not out and self.out_since is not None and not self._there,
        )


def learned(scenario: Scenario, nodes: Ints, lost: Ints) -> Stock:
    """What a pool's status has of jobs like this one, which ran one after another and asked for all workers there."""
    stock, step, pool = Stock(scenario.spot), step_of(scenario), scenario.spot
    length = max(round(scenario.deadline / step), 1)
    for begin in range(0, len(nodes), length):
        stock = stock.again()
        for number, (there, gone) in enumerate(
            zip(nodes[begin : begin + length].tolist(), lost[begin : begin + length].tolist(), strict=True)
        ):
            stock.see(number * step, min(there, pool.limit), pool.limit, gone if number else 0)
    return stock


class _Run:
    """The operator in one run. `stock`: of the spot pool, as jobs before this one left it."""

    def __init__(
        self,
        scenario: Scenario,
        pools: Sequence[FleetPool],
        profile: Profile,
        stock: Stock,
        pace: Pace | None,
    ) -> None:
        self._scenario, self._pools, self._profile = scenario, pools, profile
        self._kinds = _Kind(scenario.spot), _Kind(scenario.on_demand)
        self._stock, self._pace = stock.again(), pace
        self._at = -np.inf
        self._wanted: float | None = None
        self._proposed, self._urgent = (0, 0), False
        self._wishes = list[tuple[float, tuple[int, int]]]()
        """What was proposed, and since when."""
        self.plan: tuple[int, int] | None = None
        self._kept: Kept = {}

    def step(
        self, now: float, left: float, remaining: float, there: tuple[int, int], working: tuple[int, int]
    ) -> None:
        """What there is; a new plan, if one is due, and what of it is carried out."""
        asked, had = self.plan[0] if self.plan else 0, self._kinds[0].there
        seen = zip(self._kinds, there, working, strict=True)
        lost, _ = (kind.see(now, *each) for kind, *each in seen)
        lost = lost if asked >= had else 0  # else the plan gave them up
        turned = self._stock.see(now, there[0], asked, lost)
        if lost or turned:
            self._wanted = now if self._wanted is None else self._wanted
        if now - self._at >= EVERY or (self._wanted is not None and now - self._wanted >= SETTLE):
            self._ask(now, left, remaining)
        self._carry_out(now)

    def _ask(self, now: float, left: float, remaining: float) -> None:
        found = plan_fleet(
            self._offers(now), [self._profile], [self._job(now, left, remaining)], kept=self._kept
        )
        (answer,) = found.jobs.values()
        counts = tuple(answer.counts.get(kind.name, 0) for kind in self._kinds)
        self._proposed = counts[0], counts[1]
        if not self._wishes or self._wishes[-1][1] != self._proposed:
            self._wishes.append((now, self._proposed))
        unsure = answer.confidence is not None and answer.confidence < CONFIDENCE
        self._urgent = (not answer.feasible or unsure) and Basis.MEASURED in answer.basis.values()
        self._at, self._wanted = now, None

    def _offers(self, now: float) -> list[FleetPool]:
        spot, own = self._pools
        return [self._stock.told(spot, now), own]

    def _job(self, now: float, left: float, remaining: float) -> FleetJob:
        scenario = self._scenario
        watched = [
            now - kind.working_since - START_SECONDS for kind in self._kinds if kind.working_since is not None
        ]
        seconds = min(max(watched, default=0.0), MOST_SECONDS)
        speeds = {
            kind.name: [BATCH / scenario.spot.step_seconds] * kind.working
            for kind in self._kinds
            if kind.working
        }
        return FleetJob(
            "replayed/job",
            tuple(kind.name for kind in self._kinds),
            model=MODEL,
            samples_left=remaining * BATCH,
            batch_size=BATCH,
            max_workers=scenario.workers,
            zone_policy="Any",
            server_price=scenario.problem.servers.price,
            running={kind.name: kind.with_node for kind in self._kinds if kind.with_node},
            planned={}
            if self.plan is None
            else {k.name: n for k, n in zip(self._kinds, self.plan, strict=True)},
            asked={self._kinds[0].name: self._stock.longest(now)} if self._stock.waits else {},
            deadline_seconds=left,
            now=Watched(speeds, seconds) if seconds >= LEAST_SECONDS and speeds else Watched(),
            pace_before=self._pace,
        )

    def _carry_out(self, now: float) -> None:
        """As `policy/decide/planning.py`: at once where it must be, soon for more workers, late for fewer."""
        if self.plan is None:
            self.plan = self._proposed
        if self._proposed == self.plan:
            return
        grows = sum(self._proposed) > sum(self.plan)
        moves = any(n > had for n, had in zip(self._proposed, self.plan, strict=True))
        in_vain = (
            self._stock.waits and self._stock.exhausted_at is not None and self._proposed[0] < self.plan[0]
        )
        wait = WAITS.up if grows else WAITS.down
        if (moves and in_vain) or self._urgent:
            self.plan = self._proposed
        else:
            wishes = [(since, _named(counts)) for since, counts in self._wishes]
            changed = lasting(_named(self.plan), wishes, lambda since: now - since < wait)
            self.plan = changed.get(SPOT, 0), changed.get(OWN, 0)


def _named(counts: tuple[int, int]) -> dict[str, int]:
    return {SPOT: counts[0], OWN: counts[1]}


class Planning:
    """The operator's planning in all runs: each is planned by itself."""

    def __init__(self, scenario: Scenario, stocks: Sequence[Stock], *, sure: bool) -> None:
        spot, own = (
            FleetPool(
                pool.name,
                "T4",
                cores=8,
                spot=pool.spot,
                limit=pool.limit,
                price_per_hour=pool.price,
                startup_seconds=pool.startup_seconds,
                interruptions_per_hour=LOSSES if pool.spot else 0.0,
                idle_seconds=0.0,  # the replay pays no node after its worker
            )
            for pool in (scenario.spot, scenario.on_demand)
        )
        step = scenario.spot.step_seconds
        row = Row("T4", cores=8, batch_size=BATCH, workers=4, compute=LogMean.of(step, 0.05 * step, 1000))
        profile = Profile(MODEL, (row,), {1: ServerLoad(0.6, 600_000)})
        self._runs = [_Run(scenario, (spot, own), profile, stock, SURE if sure else None) for stock in stocks]

    def __call__(self, view: View) -> tuple[Ints, Ints]:
        """What is wanted of each pool."""
        own = view.on_demand + view.starting
        wanted = np.zeros((2, len(self._runs)), dtype=np.int64)
        for i, each in enumerate(self._runs):
            if view.remaining[i] > 0:
                each.step(
                    view.now,
                    max(view.left, 1.0),
                    float(view.remaining[i]),
                    (int(view.spot_there[i]), int(own[i])),
                    (int(view.spot[i]), int(view.on_demand[i])),
                )
            wanted[:, i] = each.plan or (0, 0)
        return wanted[0], wanted[1]


def planning(scenario: Scenario, source: Supply, *, known: bool, sure: bool) -> Planning:
    """The policy for the runs of a supply.

    `known`: whether the pool was used before, in the other half of the trace. `sure`: whether the speed is certain.
    """
    new, halves = Stock(scenario.spot), dict[tuple[int, int], Stock]()
    if known:
        for number, length in enumerate(source.lengths.tolist()):
            for half, part in enumerate((slice(length // 2, length), slice(length // 2))):
                nodes, lost = source.there[number, part], source.lost[number, part]
                halves[number, half] = learned(scenario, nodes, lost)
    begins = source.offset * 2 >= source.lengths[source.trace]
    places = zip(source.trace.tolist(), begins.tolist(), strict=True)
    return Planning(scenario, [halves.get((number, int(half)), new) for number, half in places], sure=sure)
