"""Jobs of days on a hidden truth: the planner alone, since a cluster of two weeks takes hours even in virtual time.

On-demand is short, so that a promise hangs on spot nodes; in two of three scenarios the workers become 2 to 10 times
slower in the middle. Losses, stock-outs and speeds happen event by event; the planner sees what an operator measures.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shoal.sizing.fleet import FleetJob, FleetPool, JobPlan, Model, Pace, Watched, plan_fleet
from shoal.sizing.speed.measurements import LogMean, Profile, Row, ServerLoad

PLANS = 12
"""Times that the job is planned, besides that after its speed has changed."""
WATCHED, NOISE = 90.0, 0.07 / 3
"""Seconds that workers were watched, and what that leaves open of their speed."""
BATCH, STEP = 128, 0.1
MODEL = Model("long", 8e8, 10**6, 60)
SPOT, STEADY = "spot", "steady"


@dataclass(frozen=True)
class Long:
    """What the planner does not know. Rates are per hour."""

    seed: int
    deadline: float
    samples: float
    limits: Mapping[str, int]
    losses: float
    """Of a node."""
    startup: float
    out_share: float
    pace: float
    """What a step takes, over what the profile says."""
    half: float
    """When this part of the work is done, the speed drops."""
    tight: float | None
    """By so much that what is left takes this part of the time left with all nodes; None: it does not drop."""


def draw(seed: int) -> Long:
    """The scenario of a seed."""
    chance = random.Random(f"long {seed}")
    deadline = 3600 * math.exp(chance.uniform(math.log(24), math.log(336)))
    limits = {SPOT: chance.randint(8, 16), STEADY: chance.randint(0, 2)}
    losses, startup = math.exp(chance.uniform(math.log(0.05), 0.0)), chance.uniform(180, 900)
    pace, tight = math.exp(chance.gauss(0, 0.1)), chance.uniform(0.85, 1.1)
    drops = seed % 3 > 0
    samples = (
        deadline * (chance.uniform(0.1, 0.5) if drops else tight) * sum(limits.values()) * BATCH / STEP / pace
    )
    return Long(
        seed, deadline, samples, limits, losses, startup, chance.choice([0.0, 0.01, 0.03]), pace,
        chance.uniform(0.3, 0.6), tight if drops else None,
    )  # fmt: skip


class Nodes:
    """The nodes of a pool: lost singly and by halves, and out of stock for half an hour; Gillespie's direct method."""

    def __init__(self, truth: Long, name: str, chance: random.Random) -> None:
        self._truth, self._chance, self._spot = truth, chance, name == SPOT
        self.ready: list[float] = []
        """When the worker of each node begins to work; it has a node for the last third of its start."""
        self.wanted, self.out, self.now = 0, False, 0.0
        self.worked = 0.0
        """Worker seconds."""
        self.lost = self.started = self.outs = self.in_shocks = self.at_shocks = 0
        self.hours = self.watched = self.out_seconds = 0.0

    def want(self, number: int) -> None:
        """Ask for so many."""
        self.wanted = number
        self.ready = sorted(self.ready)[:number]
        self._fill()

    def _fill(self) -> None:
        missing = self.wanted - len(self.ready)
        if not self.out:
            self.ready += [self.now + self._truth.startup] * missing
            self.started += missing

    def until(self, end: float) -> None:
        """Whatever happens until then."""
        truth, chance = self._truth, self._chance
        rate = truth.losses / 2 / 3600 if self._spot else 0.0
        restock = 1 / 1800
        runs_out = restock * truth.out_share / (1 - truth.out_share) if self._spot else 0.0
        while self.now < end:
            rates = (rate * len(self.ready), 2 * rate, restock if self.out else runs_out)
            total = sum(rates)
            at = min(self.now + chance.expovariate(total), end) if total else end
            self.worked += sum(max(at - max(ready, self.now), 0.0) for ready in self.ready)
            self.hours += len(self.ready) * (at - self.now) / 3600
            if self.wanted:
                self.watched += at - self.now
                self.out_seconds += (at - self.now) * self.out
            self.now = at
            if at == end:
                return
            (which,) = chance.choices((0, 1, 2), rates)
            if which == 2:
                self.out = not self.out
                self.outs += self.out
            if which == 0:
                self._lose([chance.randrange(len(self.ready))])
            elif which == 1 or self.out:
                self._lose([n for n in range(len(self.ready)) if chance.random() < 0.5])
            self._fill()

    def _lose(self, which: list[int]) -> None:
        exposed = [n for n in which if self.ready[n] - self.now <= self._truth.startup / 3]
        self.lost += len(exposed)
        if len(exposed) > 1:
            self.in_shocks += len(exposed)
            self.at_shocks += len(self.ready)
        self.ready = [ready for n, ready in enumerate(self.ready) if n not in exposed]


@dataclass(frozen=True)
class Told:
    """What was promised in the middle of a job of days, and whether the plan, held to the end, would have kept it."""

    drop: float
    promised: float
    held: bool
    in_time: bool


class LongStory:
    """One scenario."""

    def __init__(self, truth: Long) -> None:
        self.truth, self._chance = truth, random.Random(f"events {truth.seed}")
        self._nodes = {name: Nodes(truth, name, self._chance) for name in (SPOT, STEADY)}
        self._done, self._plan, self._drop = 0.0, dict[str, int](), 1.0
        self._pace: Pace | None = None
        self._believed = truth.losses * math.exp(self._chance.gauss(0, 0.7))
        row = Row("T4", cores=8, batch_size=BATCH, workers=4, compute=LogMean.of(STEP, 0.05 * STEP, 1000))
        self._profile = Profile(MODEL, (row,), {1: ServerLoad(0.6, 6000)})

    def play(self) -> Told:
        """Plan, carry it out until the next plan, and again until the end or the deadline."""
        truth, now, told = self.truth, 0.0, None
        while now < truth.deadline and self._done < truth.samples:
            self._planned(now, watched=now > 0)
            now = self._advance(min(now + truth.deadline / PLANS, truth.deadline))
            if told is None and self._done >= truth.half * truth.samples:
                if truth.tight is not None:
                    every = sum(truth.limits.values()) * self._rate * (truth.deadline - now)
                    self._drop = min(max(truth.tight * every / (truth.samples - self._done), 2.0), 10.0)
                now = self._advance(now + WATCHED)
                told = self._planned(now).confidence or 0.0, self._held()
        assert told is not None
        return Told(self._drop, *told, self._done >= truth.samples)

    def _planned(self, at: float, *, watched: bool = True) -> JobPlan:
        plan = plan_fleet(self._pools(), [self._profile], [self._job(at, watched=watched)]).jobs["long"]
        self._plan, self._pace = dict(plan.counts), plan.pace
        for name, nodes in self._nodes.items():
            nodes.want(self._plan.get(name, 0))
        return plan

    @property
    def _rate(self) -> float:
        """Samples/s of one worker."""
        return BATCH / STEP / self.truth.pace / self._drop

    def _advance(self, then: float) -> float:
        for nodes in self._nodes.values():
            before = nodes.worked
            nodes.until(then)
            self._done += (nodes.worked - before) * self._rate
        return then

    def _held(self) -> bool:
        """Whether the plan is in time if it is held to the end, with other luck than the story's."""
        chance, done = random.Random(f"held {self.truth.seed}"), self._done
        for name, nodes in self._nodes.items():
            alone = Nodes(self.truth, name, chance)
            alone.ready, alone.wanted, alone.out, alone.now = (
                [*nodes.ready],
                nodes.wanted,
                nodes.out,
                nodes.now,
            )
            alone.until(self.truth.deadline)
            done += alone.worked * self._rate
        return done >= self.truth.samples

    def _pools(self) -> list[FleetPool]:
        truth, spot = self.truth, self._nodes[SPOT]
        pool = FleetPool(
            SPOT, "T4", cores=8, spot=True, limit=truth.limits[SPOT], price_per_hour=0.3,
            startup_seconds=truth.startup, startup_seen=spot.started,
            interruptions_per_hour=self._believed, interruptions_seen=spot.lost, node_hours=spot.hours,
            watched_seconds=spot.watched, out_seconds=spot.out_seconds, outs=spot.outs, exhausted=spot.out,
            lost_in_shocks=spot.in_shocks, there_in_shocks=spot.at_shocks,
        )  # fmt: skip
        steady = replace(
            pool, name=STEADY, spot=False, limit=truth.limits[STEADY], price_per_hour=1.0, exhausted=False
        )
        return [pool, steady]

    def _job(self, at: float, *, watched: bool) -> FleetJob:
        truth, running = self.truth, {name: len(nodes.ready) for name, nodes in self._nodes.items()}
        seen = self._rate * math.exp(self._chance.gauss(0, NOISE))
        speeds = {
            name: [seen for ready in nodes.ready if ready <= at - WATCHED]
            for name, nodes in self._nodes.items()
        }
        return FleetJob(
            "long", (SPOT, STEADY), model=MODEL, samples_left=truth.samples - self._done, batch_size=BATCH,
            max_workers=sum(truth.limits.values()), deadline_seconds=truth.deadline - at, running=running,
            planned=self._plan, now=Watched(speeds, WATCHED) if watched and any(speeds.values()) else Watched(),
            pace_before=self._pace,
        )  # fmt: skip
