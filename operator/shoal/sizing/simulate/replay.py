"""All runs of a scenario at once, step by step: nodes come and go as the trace says, a policy answers.

What is modelled: a worker asked for takes its pool's start-up time and is paid from the start; a lost worker loses no
progress (the parameter servers hold it); which nodes of the pool the job has is chance, so how many of them are lost is
hypergeometric; workers at work are lost before those that are starting, the worse of both. Whatever a policy wants, it
gets no more than the pools hold, and no less on-demand than the job always has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.sizing.plan.problem import Floats
from shoal.sizing.simulate.policies import Policy, View
from shoal.sizing.simulate.scenario import Scenario
from shoal.sizing.simulate.traces import Trace

__all__ = ["Replayed", "Supply", "replay", "step_of", "supply"]

Ints = NDArray[np.int64]

HORIZON = 4.0  # deadlines after which a run is given up
STEPS = 400  # to the deadline


@dataclass(frozen=True)
class Supply:
    """For each of r runs: its trace, and where in it the run begins. `there` and `lost` are (traces, longest)."""

    there: Ints
    lost: Ints
    lengths: Ints
    trace: Ints
    offset: Ints

    def at(self, number: int) -> tuple[Ints, Ints]:
        """(r,) nodes, and nodes just lost, at a step."""
        where = (self.offset + number) % self.lengths[self.trace]
        return self.there[self.trace, where], self.lost[self.trace, where]


@dataclass(frozen=True)
class Replayed:
    """What became of r runs. Infinite `finish`: not ready after `HORIZON` deadlines."""

    finish: Floats
    cost: Floats
    paid: Floats
    """Worker-seconds paid."""
    useful: Floats
    """Worker-seconds at work."""
    on_demand: Floats
    """Worker-seconds of on-demand paid."""
    by_deadline: Floats
    """Steps done at the deadline if there had been more work than that; complete with `on` only."""
    workers: Floats
    """(steps,) mean workers at work over time."""


def step_of(scenario: Scenario) -> float:
    """Seconds between decisions: fine enough for the deadline, no finer than 1 s and no coarser than a minute."""
    return min(60.0, max(1.0, scenario.deadline / STEPS))


def supply(traces: Sequence[Trace], step: float, runs: int, rng: np.random.Generator) -> Supply:
    """Share the runs among the traces, each from a random offset."""
    bins = [trace.bins(step) for trace in traces]
    lengths = np.array([len(there) for there, _ in bins])
    there = np.zeros((len(traces), int(lengths.max())), dtype=np.int64)
    lost = np.zeros_like(there)
    for i, (nodes, gone) in enumerate(bins):
        there[i, : len(nodes)], lost[i, : len(gone)] = nodes, gone
    which = np.arange(runs) % len(traces)
    return Supply(there, lost, lengths, which, (rng.random(runs) * lengths[which]).astype(np.int64))


class _Fleet:
    """Workers of one kind in r runs: those at work, and those that start, by the step at which they will."""

    def __init__(self, runs: int, startup: float, step: float) -> None:
        self.delay = max(math.ceil(startup / step - 1e-9), 0)
        self.working: Ints = np.zeros(runs, dtype=np.int64)
        self.starting: Ints = np.zeros(runs, dtype=np.int64)
        self._queue: Ints = np.zeros((self.delay + 1, runs), dtype=np.int64)
        self._now = 0

    @property
    def there(self) -> Ints:
        return self.working + self.starting

    def wait(self, step: float) -> Floats:
        """(r,) sum of the seconds until those that are starting work."""
        ahead = (np.arange(self.delay + 1) - self._now) % (self.delay + 1)
        return np.asarray(step * (ahead @ self._queue))

    def tick(self) -> None:
        """A step later: who has started works."""
        if self.delay == 0:
            return
        self._now = (self._now + 1) % (self.delay + 1)
        ready = self._queue[self._now]
        self.working += ready
        self.starting -= ready
        self._queue[self._now] = 0

    def ask(self, wanted: Ints) -> None:
        """Have `wanted` workers: start more, or stop some, those that are starting first."""
        more = np.maximum(wanted - self.there, 0)
        if self.delay == 0:
            self.working += more
        else:
            self._queue[(self._now + self.delay) % (self.delay + 1)] += more
            self.starting += more
        fewer = np.maximum(self.there - wanted, 0)
        if fewer.any():
            self.working -= self._drop_starting(fewer)

    def lose(self, number: Ints) -> None:
        """Lose workers, those at work first."""
        working = np.minimum(number, self.working)
        self.working -= working
        left = number - working
        if left.any():
            self._drop_starting(left)

    def _drop_starting(self, number: Ints) -> Ints:
        """Stop the latest of those that are starting; give back how many are still to be stopped."""
        left = np.maximum(number, 0)
        for ahead in range(self.delay, 0, -1):
            row = self._queue[(self._now + ahead) % (self.delay + 1)]
            taken = np.minimum(row, left)
            row -= taken
            left = left - taken
            self.starting -= taken
        return left


def replay(
    scenario: Scenario, policy: Policy, source: Supply, seed: int = 0, *, on: bool = False
) -> Replayed:
    """Run one policy in all runs of a supply; `on`: to the deadline, even if all runs are ready before."""
    rng = np.random.default_rng(seed)
    runs, step = len(source.trace), step_of(scenario)
    spot = _Fleet(runs, max(scenario.spot.startup_seconds, scenario.problem.servers.startup_seconds), step)
    own = _Fleet(
        runs, max(scenario.on_demand.startup_seconds, scenario.problem.servers.startup_seconds), step
    )
    price_spot, price_own, price_servers = scenario.prices
    cross_spot, cross_own = scenario.crossing
    done, own_done = np.zeros(runs), np.zeros(runs)
    cost, paid, useful, paid_own = np.zeros(runs), np.zeros(runs), np.zeros(runs), np.zeros(runs)
    finish = np.full(runs, np.inf)
    by_deadline = np.zeros(runs)
    active = np.ones(runs, dtype=bool)
    workers = []
    before, _ = source.at(-1)
    last = math.ceil(scenario.deadline / step - 1e-9)
    for number in range(math.ceil(HORIZON * last)):
        nodes, gone = source.at(number)
        if number:
            spot.lose(_lost(spot.there, before, gone, rng))
        spot.tick()
        own.tick()
        view = View(
            scenario=scenario,
            now=number * step,
            step=step,
            remaining=scenario.work - done,
            spot=spot.working,
            on_demand=own.working,
            starting=own.starting,
            spot_there=spot.there,
            starting_wait=own.wait(step),
            startup=own.delay * step,
            on_demand_work=own_done,
        )
        want_spot, want_own = policy(view)
        spot.ask(np.minimum(np.minimum(want_spot, nodes), scenario.most_spot))
        own.ask(np.clip(want_own, scenario.base, scenario.most_on_demand))
        speed = scenario.speeds[spot.working, own.working]
        gain = speed * step
        part = np.divide(scenario.work - done, gain, out=np.full(runs, np.inf), where=gain > 0)
        used = step * np.minimum(part, 1.0) * active
        ends = active & (part <= 1.0)
        finish[ends] = number * step + used[ends]
        cost += used * (
            spot.there * price_spot
            + own.there * price_own
            + price_servers
            + spot.working * cross_spot
            + own.working * cross_own
        )
        paid += used * (spot.there + own.there)
        paid_own += used * own.there
        useful += used * (spot.working + own.working)
        own_done += used * own.working * scenario.sure_rate
        workers.append(float(np.mean((spot.working + own.working) * active)))
        done = np.minimum(done + speed * used, scenario.work)
        if number < last:
            by_deadline += gain
        active &= ~ends
        before = nodes
        if not active.any() and (not on or number + 1 >= last):
            break
    return Replayed(finish, cost, paid, useful, paid_own, by_deadline, np.array(workers))


def _lost(held: Ints, before: Ints, gone: Ints, rng: np.random.Generator) -> Ints:
    """(r,) how many of the job's nodes are among those that the pool loses."""
    lost = np.zeros_like(held)
    at = np.flatnonzero((gone > 0) & (held > 0))
    if len(at):
        others = np.maximum(before[at] - held[at], 0)
        drawn = np.minimum(gone[at], held[at] + others)
        lost[at] = rng.hypergeometric(held[at], others, drawn)
    return lost
