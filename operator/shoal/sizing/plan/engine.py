"""What a fixed plan gets done: finish time and cost in simulated runs of all pools.

The nodes of a run are drawn once and are the same for every plan (common random numbers), so plans differ by what they
are and not by luck. Everything is arrays over (runs, intervals): a plan of three pools takes about ten milliseconds,
and the chance of many plans at once comes from one table for each pool (`Engine.chances`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.sizing.availability import Floats, Losses
from shoal.sizing.plan.cost import money_per_step
from shoal.sizing.plan.problem import Objective, Pool, Problem
from shoal.sizing.plan.work import StepWork

__all__ = ["Engine", "Runs"]

RUNS, TABLE_RUNS = 1000, 400
STEPS = 120
BEYOND = 1.25  # the horizon, in deadlines
POINTS = 33  # numbers of workers of a pool whose work is simulated; in between it is interpolated


@dataclass(frozen=True)
class Runs:
    """(runs,) seconds until the work is done (infinite: never), and the cost until then."""

    finish: Floats
    cost: Floats


@dataclass(frozen=True)
class _Course:
    """(runs, steps) steps/s, samples/s, and what is paid in an hour."""

    steps: Floats
    samples: Floats
    hourly: Floats


class Engine:
    """Simulated runs of one problem up to a horizon in s."""

    def __init__(self, problem: Problem, horizon: float, *, runs: int = RUNS, seed: int = 0) -> None:
        self.problem, self.step, self.runs = problem, horizon / STEPS, runs
        self._rng = np.random.default_rng(seed)
        rounding = self._rng.random((runs, STEPS))
        self._supplies = {
            pool.name: pool.process.supply(self._rng, runs, STEPS, self.step, pool.nodes)
            for pool in problem.pools
        }
        self._losses = {
            pool.name: Losses(self._supplies[pool.name], pool.nodes, rounding, seed + number)
            for number, pool in enumerate(problem.pools)
        }
        self._struck = self._rng.random((runs, STEPS))
        self._speed = self._rng.standard_normal(runs)
        self._capacity = self._rng.standard_normal(runs)
        self._failures = self._rng.random(runs), self._rng.random(runs)
        self._work, self._efficiency, self._beside = self._rng.standard_normal((3, runs))
        self._parting = 1e-9 + self._rng.random((runs, 1)) * (1 - 2e-9)
        self._cache: dict[tuple[str, int, float], list[tuple[Pool, Floats, Floats]]] = {}
        self._alone: dict[tuple[str, int, float], Floats] = {}

    # -- one plan -----------------------------------------------------------------------------------------------

    def run(self, counts: Sequence[int], servers: int, zone: str) -> Runs:
        """Finish and cost of a plan in every run. `zone`: where the servers are, empty: in none that is named."""
        course = self._course(counts, servers, zone)
        if course is None:
            return Runs(np.full(self.runs, np.inf), np.full(self.runs, np.inf))
        works, kinds = self._works(np.array([counts], dtype=np.int64).T)
        progress = course.samples if kinds[0] else course.steps
        return self._settled(progress, course.hourly, works[0], servers)

    def done(self, counts: Sequence[int], servers: int) -> Floats:
        """(runs,) steps that a plan makes until the horizon."""
        course = self._course(counts, servers, "")
        return np.zeros(self.runs) if course is None else course.steps.sum(axis=1) * self.step

    def _course(self, counts: Sequence[int], servers: int, zone: str) -> _Course | None:
        """What a plan does over time, None if none of its workers ever works."""
        problem, ready = self.problem, self.problem.servers.wait(servers)
        used = [(pool, n) for pool, n in zip(problem.pools, counts, strict=True) if n]
        alone = samples = sigma = np.zeros(1)
        hourly: Floats = np.zeros((self.runs, STEPS))
        crossing: Floats = np.zeros(1)
        for asked, n in used:
            for pool, held, working in self._workers(asked, n, ready):
                rate = working / pool.step_seconds
                alone, samples = alone + rate, samples + rate * pool.batch
                sigma = sigma + rate.mean() * pool.step_sigma
                hourly = hourly + held * pool.price
                if money := money_per_step(pool, zone, problem.servers.bytes_per_step):
                    crossing = crossing + rate * money
        total = float(alone.mean())
        if total <= 0:
            return None
        noise = np.exp(-float(sigma[0]) / total * self._speed)[:, None]
        speed = self._limited(alone * noise, servers)
        share = np.divide(speed, alone, out=np.zeros_like(speed), where=alone > 0)
        paid = hourly + servers * problem.servers.price
        if crossing.any():
            paid = paid + crossing * share * 3600
        return _Course(speed, samples * share, paid)

    def _settled(self, progress: Floats, hourly: Floats, work: Floats, servers: int) -> Runs:
        """When the work (runs,) is done, and what was paid by then."""
        done = np.concatenate([np.zeros((self.runs, 1)), np.cumsum(progress * self.step, axis=1)], axis=1)
        paid = np.concatenate(
            [np.zeros((self.runs, 1)), np.cumsum(hourly * self.step / 3600, axis=1)], axis=1
        )
        finish = _when(done, work) * self.step
        horizon = self.step * STEPS
        # Beyond the horizon it goes on as in its second half.
        half = horizon / 2
        mean = (done[:, -1] - done[:, STEPS // 2]) / half
        late = ~np.isfinite(finish)
        with np.errstate(divide="ignore"):
            finish = np.where(late, horizon + (work - done[:, -1]) / mean, finish)
        ps = self.problem.servers
        expected = servers * ps.interruptions_per_hour * np.minimum(finish, 1e12) / 3600
        failures = _poisson(expected, self._failures[0])
        delay = failures * (self._failures[1] * ps.snapshot_every + ps.recovery_seconds)
        cost = _at(paid, np.minimum(finish, horizon) / self.step)
        beyond = np.maximum(finish - horizon, 0.0) + delay
        with np.errstate(invalid="ignore"):
            cost = cost + np.where(beyond > 0, beyond * (paid[:, -1] - paid[:, STEPS // 2]) / half, 0.0)
        return Runs(finish + delay, np.where(np.isfinite(finish), cost, np.inf))

    def _limited(self, alone: Floats, servers: int) -> Floats:
        """Steps/s of all workers behind the servers' capacity."""
        ps = self.problem.servers
        overhead = 1 + ps.snapshot_seconds / ps.snapshot_every
        drawn = np.exp(-ps.capacity_sigma(servers) * self._capacity).reshape(-1, *([1] * (alone.ndim - 1)))
        return np.asarray(ps.model.limited(alone, servers, drawn) / overhead)

    def _works(self, counts: NDArray[np.int64]) -> tuple[Floats, NDArray[np.bool_]]:
        """(m, runs) the work of plans (k, m), and (m,) whether it is in samples; else it is in steps."""
        work = self.problem.work
        rates = counts / np.array([pool.step_seconds for pool in self.problem.pools])[:, None]
        batch = np.array([float(pool.batch) for pool in self.problem.pools]) @ rates / rates.sum(axis=0)
        workers = counts.sum(axis=0).astype(np.float64)
        steps = work.iterations(batch, workers)
        if not isinstance(work, StepWork):
            return self._in_runs(steps), np.zeros(len(batch), dtype=bool)
        beside = np.exp(np.multiply.outer(work.beside_spread(workers), self._beside))
        if work.samples is None:
            return self._in_runs(steps) * beside, np.zeros(len(batch), dtype=bool)
        samples = work.samples_of(workers) * np.ones(len(batch))
        by_samples = samples / batch <= steps * (1 + 1e-9)
        amount = self._in_runs(np.where(by_samples, samples, steps)) * beside
        if work.is_random:
            own = np.exp(work.sigma * self._work)
            if work.efficiency is not None:
                drawn = work.samples_of(workers[:, None], self._efficiency)
                own = own * drawn / samples[:, None]
            amount = np.where(by_samples[:, None], amount * own, amount)
        return amount, by_samples

    def _in_runs(self, work: Floats) -> Floats:
        return np.broadcast_to(work[:, None], (len(work), self.runs))

    def _workers(self, pool: Pool, n: int, ready: float) -> list[tuple[Pool, Floats, Floats]]:
        """(runs, steps) workers that a job with n of this pool's nodes pays for, and those that train.

        With those of the pool in which it buys what is missing. Where all runs are the same, (1, steps).
        """
        key = pool.name, n, ready
        if key not in self._cache:
            held, working = self._followed(pool, [n], ready)
            self._cache[key] = [(pool, held[0], working[0])]
            for own, bought, works in self._bought(pool, n - held, ready):
                self._cache[key].append((own, bought[0], works[0]))
        return self._cache[key]

    def _bought(self, pool: Pool, missing: Floats, ready: float) -> list[tuple[Pool, Floats, Floats]]:
        """(m, runs, steps) what the operator buys for missing spot workers, and what of it trains; empty: nothing.

        A node is missed when patience with the pool ends, as in its status; what replaces it needs a start-up.
        """
        own = self.problem.instead_of(pool)
        if own is None:
            return []
        after, starts = pool.patience, max(own.startup_seconds, ready)
        held, working = (_lasting(missing, math.ceil(each / self.step)) for each in (after, after + starts))
        return [(own, held, working)]

    def _followed(self, pool: Pool, numbers: Sequence[int], ready: float) -> tuple[Floats, Floats]:
        """(m, runs, steps) workers that are paid for, and those that train, of jobs with so many nodes (m,)."""
        supply = self._supplies[pool.name]
        asked = np.array(numbers, dtype=np.float64)[:, None, None]
        if supply.shared:  # a stock-out takes its part of every job's nodes, however many there may be
            there = supply.there * asked
            if supply.stays is not None and pool.running:
                there += (supply.stays - supply.there) * np.minimum(asked, pool.running)
            held = np.floor(there + self._parting[: len(supply.there)])
        else:
            held = np.minimum(np.floor(supply.there * pool.nodes + 1e-9), asked)
        out = min(round(pool.out_seconds / self.step), STEPS)
        held[..., :out] = np.minimum(held[..., :out], pool.running)
        before = np.empty_like(held)
        before[..., :1], before[..., 1:] = np.minimum(asked, pool.running), held[..., :-1]
        # What goes for good is not replaced.
        gone = 0.0 if supply.shared else np.maximum(before - held, 0.0)
        lost = np.maximum(np.stack([self._losses[pool.name].strike(n) for n in numbers]) - gone, 0.0)
        wait = max(pool.startup_seconds, ready) / self.step
        starting = _mean_in_queue(np.maximum(held - before, 0.0), wait)
        if ready > 0 and pool.running:
            kept = np.minimum(before[..., :1], held[..., :1])
            starting = starting + kept * np.clip(wait - np.arange(STEPS), 0.0, 1.0)
        together = 1 + pool.shock_share * np.maximum(pool.shock_size * asked[..., 0] - 1, 0.0)
        among = np.maximum(asked[..., 0], 1.0) if supply.shared else None
        found = _restarting(lost, held, among, starting, wait, together, self._struck)
        return held, np.maximum(held - found, 0.0)

    # -- many plans ---------------------------------------------------------------------------------------------

    def chances(
        self, counts: NDArray[np.int64], servers: int, hourly: Floats, objective: Objective | None = None
    ) -> Floats:
        """(m,) how likely plans (k, m) keep deadline and budget of the `objective` (that of the problem), in one run.

        The work of each pool until then is simulated for every number of workers that occurs; of plans only the sums.
        `hourly` (m,) is what a plan pays in an hour with all its workers.
        """
        objective, horizon = objective or self.problem.objective, self.step * STEPS
        kept = np.ones(counts.shape[1])
        until = objective.deadline or horizon
        pools, tables = self.problem.pools, list[tuple[Floats, NDArray[np.intp]]]()
        for pool, row in zip(pools, counts, strict=True):
            numbers, rows = np.unique(row, return_inverse=True)
            tables.append((self._table(pool, numbers, until, servers), rows))
        for at in range(0, counts.shape[1], 2048):
            part = counts[:, at : at + 2048]
            made = [table[rows[at : at + 2048]] for table, rows in tables]
            alone = sum(made)
            samples = sum(steps * pool.batch for steps, pool in zip(made, pools, strict=True))
            sigma = np.array([pool.step_sigma / pool.step_seconds for pool in self.problem.pools]) @ part
            rate = np.array([1 / pool.step_seconds for pool in self.problem.pools]) @ part
            noise = np.exp(-(sigma / np.maximum(rate, 1e-300))[:, None] * self._speed)
            steps = self._limited((alone * noise / until).T, servers).T * until
            share = np.divide(steps, alone, out=np.zeros_like(steps), where=alone > 0)
            work, by_samples = self._works(part)
            progress = np.where(by_samples[:, None], samples * share, steps)
            good = np.ones(progress.shape, dtype=bool)
            if objective.deadline is not None:
                good &= progress >= work
            if objective.budget is not None:
                with np.errstate(divide="ignore"):
                    seconds = until * work / progress
                good &= seconds / 3600 * hourly[at : at + 2048, None] <= objective.budget
            kept[at : at + 2048] = good.mean(axis=1)
        return kept

    def _table(self, pool: Pool, numbers: NDArray[np.int64], until: float, servers: int) -> Floats:
        """(m, runs) steps that so many workers (m,) make alone until then; of many numbers, most are interpolated."""
        if len(numbers) <= POINTS:
            return self._made(pool, [int(n) for n in numbers], until, servers)
        points = np.unique(np.linspace(numbers[0], numbers[-1], POINTS).round().astype(np.int64))
        made = self._table(pool, points, until, servers)
        above = np.searchsorted(points, numbers)
        below = np.maximum(above - 1, 0)
        width = np.maximum(points[above] - points[below], 1)
        part = ((numbers - points[below]) / width)[:, None]
        return np.asarray(made[below] * (1 - part) + made[above] * part)

    def _made(self, pool: Pool, numbers: Sequence[int], until: float, servers: int) -> Floats:
        """(m, runs) steps that so many workers (m,) make alone until then."""
        ready = self.problem.servers.wait(servers)
        if new := [n for n in numbers if (pool.name, n, ready) not in self._alone]:
            held, working = self._followed(pool, new, ready)
            for own, _, works in self._bought(pool, np.array(new)[:, None, None] - held, ready):
                working = working + works * (own.samples_per_second / pool.samples_per_second)
            whole = np.zeros((*working.shape[:-1], STEPS + 1))
            np.cumsum(working * self.step, axis=-1, out=whole[..., 1:])
            made = _at(
                whole.reshape(-1, STEPS + 1), np.full(whole[..., 0].size, min(until / self.step, STEPS))
            )
            self._alone.update(
                ((pool.name, n, ready), each)
                for n, each in zip(new, made.reshape(whole.shape[:-1]), strict=True)
            )
        return np.stack([self._alone[pool.name, n, ready] for n in numbers]) / pool.step_seconds


def _mean_in_queue(fresh: Floats, wait: float) -> Floats:
    """(..., steps) the mean number in each interval that arrived (at its beginning) less than `wait` intervals ago."""
    if wait <= 0:
        return np.zeros_like(fresh)
    steps = fresh.shape[-1]
    area = np.zeros((*fresh.shape[:-1], steps + 1))
    np.cumsum(np.cumsum(fresh, axis=-1), axis=-1, out=area[..., 1:])
    whole, part = divmod(wait, 1.0)
    back = np.zeros_like(area)
    for shift, weight in ((int(whole), 1 - part), (int(whole) + 1, part)):
        if weight > 0 and shift <= steps:
            back[..., shift:] += weight * area[..., : steps + 1 - shift]
    return np.asarray(np.diff(area - back, axis=-1))


def _lasting(number: Floats, back: int) -> Floats:
    """(..., steps) the least of each interval and of the `back` before it; nothing was there before the first."""
    least, seen = number, 0
    while seen < back:  # twice as far with each turn
        more = min(seen + 1, back - seen)
        earlier = np.zeros_like(least)
        earlier[..., more:] = least[..., :-more] if more < least.shape[-1] else 0.0
        least, seen = np.minimum(least, earlier), seen + more
    return least


def _restarting(
    lost: Floats,
    held: Floats,
    among: Floats | None,
    starting: Floats,
    wait: float,
    together: Floats,
    chance: Floats,
) -> Floats:
    """(m, runs, steps) the mean number of workers that start: those `starting`, and those that replace `lost` ones.

    Losses come at any time of an interval, each to one `among` so many, and cost something only where that works: a
    worker's life is a renewal process of start-ups of `wait` intervals and the times between a start and the next loss,
    whether many losses fall into an interval or a start-up lasts many. A loss comes with `together` (m, 1) workers in
    the mean, itself among them. `chance` (runs, steps) rounds.
    """
    some = np.flatnonzero(lost.any(axis=(0, 2))) if wait > 0 else np.empty(0, dtype=np.int64)
    if not len(some):
        return starting
    # The part of interval i + k for which one lost at a uniform time of interval i still starts.
    ahead = wait - np.arange(int(wait) + 2.0)
    part = np.where(ahead < 0, (1 + np.maximum(ahead, -1)) ** 2, 2 - (1 - np.minimum(ahead, 1)) ** 2) / 2
    part[0] -= 0.5  # not before it is lost
    over_time = [np.ascontiguousarray(each[:, some].transpose(2, 0, 1)) for each in (lost, held, starting)]
    rounding = np.ascontiguousarray(chance[some].T)
    gone, all_starting = np.zeros(over_time[0].shape), np.empty(over_time[0].shape)
    for i, (n, there, new) in enumerate(zip(*over_time, strict=True)):
        back = min(i, len(part) - 1)
        old = new + np.tensordot(part[back:0:-1], gone[i - back : i], 1)
        if not n.any():
            all_starting[i] = old
            continue
        of = np.maximum(there, 1.0) if among is None else among
        # Of two losses, the second finds the worker of the first starting in 1 of so many cases.
        same = part[0] / (of - part[0])
        struck = n * np.maximum(there - old, 0.0) / of / (1 + np.maximum(n - together, 0.0) * same)
        gone[i] = np.floor(struck + rounding[i])
        all_starting[i] = old + part[0] * gone[i]
    found = starting.copy()
    found[:, some] = all_starting.transpose(1, 2, 0)
    return found


def _when(done: Floats, work: Floats) -> Floats:
    """(runs,) the interval (with its fraction) at which the cumulated `done` (runs, steps + 1) reaches `work`."""
    reached = done >= work[:, None]
    last = reached.argmax(axis=1)
    rows = np.arange(len(done))
    low, high = done[rows, np.maximum(last - 1, 0)], done[rows, last]
    part = np.divide(work - low, high - low, out=np.zeros(len(done)), where=high > low)
    return np.where(reached.any(axis=1), np.where(last > 0, last - 1 + part, 0.0), np.inf)


def _at(cumulated: Floats, when: Floats) -> Floats:
    """(runs,) the value of (runs, steps + 1) at a fractional interval."""
    low = np.minimum(when.astype(np.int64), cumulated.shape[1] - 2)
    rows = np.arange(len(when))
    part = when - low
    return np.asarray(cumulated[rows, low] * (1 - part) + cumulated[rows, low + 1] * part)


def _poisson(mean: Floats, uniform: Floats) -> Floats:
    """Poisson numbers for small means, by inversion, so that equal draws give comparable runs."""
    count, term = np.zeros_like(mean), np.exp(-np.minimum(mean, 700.0))
    reached = term.copy()
    for number in range(1, 60):
        more = uniform > reached
        if not more.any():
            break
        count += more
        term = term * mean / number
        reached += term
    return count
