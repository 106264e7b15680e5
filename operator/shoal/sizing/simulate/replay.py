"""Replay a scenario: nodes come and go as in the trace, and a policy reacts, in all runs at once.

The model: a requested worker takes the start-up time of its pool and is paid from the request; a lost worker loses no
progress (the parameter servers hold it); the number of lost workers is hypergeometric, since the job has a random
subset of the pool's nodes; running workers are lost before starting ones, which is the worse case. A policy gets at
most what the pools hold, and at least the permanent on-demand workers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shoal.sizing.availability import Floats
from shoal.sizing.simulate.policies import Policy, View
from shoal.sizing.simulate.scenario import Scenario
from shoal.sizing.simulate.traces import Trace

__all__ = ["Replayed", "Supply", "replay", "step_of", "supply"]

Ints = NDArray[np.int64]

HORIZON = 4.0  # a run is given up after this many deadlines
STEPS = 400  # steps to the deadline


@dataclass(frozen=True)
class Supply:
    """For each of r runs: its trace, and its offset in the trace. `there` and `lost` are (traces, longest)."""

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
    """The result of r runs. Infinite `finish`: given up."""

    finish: Floats
    cost: Floats
    paid: Floats
    """Worker-seconds paid."""
    useful: Floats
    """Worker-seconds at work."""
    on_demand: Floats
    """On-demand worker-seconds paid."""
    by_deadline: Floats
    """Steps possible until the deadline, with unlimited work; complete only with `on`."""
    workers: Floats
    """(steps,) mean workers at work over time."""


def step_of(scenario: Scenario) -> float:
    """Seconds between decisions: `STEPS` to the deadline, between 1 s and a minute."""
    return min(60.0, max(1.0, scenario.deadline / STEPS))


def supply(
    traces: Sequence[Trace], step: float, runs: int, rng: np.random.Generator, limit: int | None = None
) -> Supply:
    """Divide the runs among the traces, each at a random offset.

    `limit`: nodes of the pool; a trace of more (or fewer) nodes is scaled to it. None: as recorded.
    """
    bins = [_scaled(*trace.bins(step), limit) for trace in traces]
    lengths = np.array([len(there) for there, _ in bins])
    there = np.zeros((len(traces), int(lengths.max())), dtype=np.int64)
    lost = np.zeros_like(there)
    for i, (nodes, gone) in enumerate(bins):
        there[i, : len(nodes)], lost[i, : len(gone)] = nodes, gone
    which = np.arange(runs) % len(traces)
    return Supply(there, lost, lengths, which, (rng.random(runs) * lengths[which]).astype(np.int64))


def _scaled(nodes: Ints, lost: Ints, limit: int | None) -> tuple[Ints, Ints]:
    """A trace of a pool of another size: the same part of its nodes is there, and lost."""
    size = int(nodes.max(initial=0))
    if limit is None or size in (0, limit):
        return nodes, lost
    there = nodes * limit // size
    before = np.roll(there, 1)
    gone = np.maximum(np.rint(lost * limit / size).astype(np.int64), before - there)
    return there, np.clip(gone, 0, before)


class _Fleet:
    """Workers of one kind in r runs: the running ones, and a queue of starting ones by step."""

    def __init__(self, runs: int, startup: float, step: float) -> None:
        self.delay = max(math.ceil(startup / step - 1e-9), 0)
        self.working: Ints = np.zeros(runs, dtype=np.int64)
        self.starting: Ints = np.zeros(runs, dtype=np.int64)
        self._queue: Ints = np.zeros((self.delay + 1, runs), dtype=np.int64)
        self._now = 0

    @property
    def present(self) -> Ints:
        return self.working + self.starting

    def wait(self, step: float) -> Floats:
        """(r,) sum of the seconds until the starting ones run."""
        ahead = (np.arange(self.delay + 1) - self._now) % (self.delay + 1)
        return np.asarray(step * (ahead @ self._queue))

    def tick(self) -> None:
        """Advance one step."""
        if self.delay == 0:
            return
        self._now = (self._now + 1) % (self.delay + 1)
        ready = self._queue[self._now]
        self.working += ready
        self.starting -= ready
        self._queue[self._now] = 0

    def ask(self, wanted: Ints) -> None:
        """Start or stop workers to have `wanted`; the starting ones are stopped first."""
        more = np.maximum(wanted - self.present, 0)
        if self.delay == 0:
            self.working += more
        else:
            self._queue[(self._now + self.delay) % (self.delay + 1)] += more
            self.starting += more
        fewer = np.maximum(self.present - wanted, 0)
        if fewer.any():
            self.working -= self._drop_starting(fewer)

    def lose(self, number: Ints) -> None:
        """Lose workers, the running ones first."""
        working = np.minimum(number, self.working)
        self.working -= working
        left = number - working
        if left.any():
            self._drop_starting(left)

    def _drop_starting(self, number: Ints) -> Ints:
        """Stop starting workers, the latest first. Returns how many are still to be stopped."""
        left = np.maximum(number, 0)
        for ahead in range(self.delay, 0, -1):
            row = self._queue[(self._now + ahead) % (self.delay + 1)]
            taken = np.minimum(row, left)
            row -= taken
            left = left - taken
            self.starting -= taken
        return left


class _Runs:
    """The state of r runs of one policy. `tally` is the result so far."""

    def __init__(self, scenario: Scenario, source: Supply, seed: int) -> None:
        self._scenario, self._source = scenario, source
        self._rng = np.random.default_rng(seed)
        self.runs, self.step = len(source.trace), step_of(scenario)
        servers_ready = scenario.problem.servers.startup_seconds
        self._spot, self._on_demand = (
            _Fleet(self.runs, max(pool.startup_seconds, servers_ready), self.step)
            for pool in (scenario.spot, scenario.on_demand)
        )
        self._done = np.zeros(self.runs)
        self._on_demand_work = np.zeros(self.runs)
        self._before, _ = source.at(-1)
        self.active = np.ones(self.runs, dtype=bool)
        self.tally = Replayed(
            finish=np.full(self.runs, np.inf),
            cost=np.zeros(self.runs),
            paid=np.zeros(self.runs),
            useful=np.zeros(self.runs),
            on_demand=np.zeros(self.runs),
            by_deadline=np.zeros(self.runs),
            workers=np.zeros(0),
        )
        self._workers: list[float] = []

    def advance(self, number: int, policy: Policy, *, before_deadline: bool) -> None:
        """One step: lose and start nodes, let the policy decide, train, pay."""
        nodes, gone = self._source.at(number)
        if number:
            self._spot.lose(_lost(self._spot.present, self._before, gone, self._rng))
        self._before = nodes
        self._spot.tick()
        self._on_demand.tick()
        self._resize(policy, number * self.step, nodes)
        self._train(number * self.step, before_deadline=before_deadline)

    def result(self) -> Replayed:
        """The tally, with the mean workers over time."""
        return replace(self.tally, workers=np.array(self._workers))

    def _resize(self, policy: Policy, now: float, nodes: Ints) -> None:
        """Apply the policy's decision, within the limits of the pools."""
        scenario, spot, on_demand = self._scenario, self._spot, self._on_demand
        want_spot, want_on_demand = policy(
            View(
                scenario=scenario,
                now=now,
                step=self.step,
                remaining=scenario.work - self._done,
                spot=spot.working,
                on_demand=on_demand.working,
                starting=on_demand.starting,
                spot_there=spot.present,
                starting_wait=on_demand.wait(self.step),
                startup=on_demand.delay * self.step,
                on_demand_work=self._on_demand_work,
            )
        )
        spot.ask(np.minimum(np.minimum(want_spot, nodes), scenario.most_spot))
        on_demand.ask(np.clip(want_on_demand, scenario.base, scenario.most_on_demand))

    def _train(self, now: float, *, before_deadline: bool) -> None:
        """Train for one step, or until the work of a run is done."""
        scenario, tally = self._scenario, self.tally
        speed = scenario.speeds[self._spot.working, self._on_demand.working]
        gain = speed * self.step
        part = np.divide(scenario.work - self._done, gain, out=np.full(self.runs, np.inf), where=gain > 0)
        used = self.step * np.minimum(part, 1.0) * self.active
        ends = self.active & (part <= 1.0)
        tally.finish[ends] = now + used[ends]
        self._pay(used)
        working = self._spot.working + self._on_demand.working
        self._workers.append(float(np.mean(working * self.active)))
        self._done = np.minimum(self._done + speed * used, scenario.work)
        if before_deadline:
            tally.by_deadline[:] += gain
        self.active &= ~ends

    def _pay(self, used: Floats) -> None:
        """Add the costs and the worker-seconds of `used` (r,) seconds."""
        scenario, tally, spot, on_demand = self._scenario, self.tally, self._spot, self._on_demand
        price_spot, price_on_demand, price_servers = scenario.prices
        cross_spot, cross_on_demand = scenario.crossing
        per_second = (
            spot.present * price_spot
            + on_demand.present * price_on_demand
            + price_servers
            + spot.working * cross_spot
            + on_demand.working * cross_on_demand
        )
        tally.cost[:] += used * per_second
        tally.paid[:] += used * (spot.present + on_demand.present)
        tally.on_demand[:] += used * on_demand.present
        tally.useful[:] += used * (spot.working + on_demand.working)
        self._on_demand_work += used * on_demand.working * scenario.sure_rate


def replay(
    scenario: Scenario, policy: Policy, source: Supply, seed: int = 0, *, on: bool = False
) -> Replayed:
    """Run one policy in all runs of a supply. `on`: continue to the deadline even if all runs are ready."""
    state = _Runs(scenario, source, seed)
    last = math.ceil(scenario.deadline / state.step - 1e-9)
    for number in range(math.ceil(HORIZON * last)):
        state.advance(number, policy, before_deadline=number < last)
        if not state.active.any() and (not on or number + 1 >= last):
            break
    return state.result()


def _lost(held: Ints, before: Ints, gone: Ints, rng: np.random.Generator) -> Ints:
    """(r,) how many of the pool's lost nodes belong to the job."""
    lost = np.zeros_like(held)
    at = np.flatnonzero((gone > 0) & (held > 0))
    if len(at):
        others = np.maximum(before[at] - held[at], 0)
        drawn = np.minimum(gone[at], held[at] + others)
        lost[at] = rng.hypergeometric(held[at], others, drawn)
    return lost
