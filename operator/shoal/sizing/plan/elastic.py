"""Shoal's model of time and cost: start-up, contention, snapshots, revocations and prices.

For n_i workers of pool i (step time T_i, start-up s_i, interruptions per hour l_i, replaced after R_i = s_i):

    speed of a worker   w_i = 1 / T_i / (1 + l_i R_i)          a revoked worker is missing for R_i
    alone               A = sum n_i w_i                         asynchronous workers add up (spotDNN, CM-DARE)
    speed               V = softmin(A, capacity of the parameter servers)
    time                T = sum n_i w_i s_i / A + j / V (1 + snapshots + recoveries of parameter servers)
    variance            of the work lost to revocations, including shocks of whole pools, and of the speed:
                        of the workers, and of the servers' capacity as far as it limits the speed
    sure time           T + z sd: met with the requested confidence (`risk` checks it by simulation)
    cost                T (sum n_i p_i + servers p_ps) + j x bytes of a step that cross zones x their price

j is fixed, or follows from the loss curve. All sums over pools are one matrix product, so that millions of
combinations per second can be evaluated. The start-up term is exact if every worker starts before the end, and too
long otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shoal.sizing.availability import Floats
from shoal.sizing.plan.cost import money_per_step
from shoal.sizing.plan.evaluation import Evaluated
from shoal.sizing.plan.problem import Pool, Problem
from shoal.sizing.speed.servers import busy

__all__ = ["ElasticModel"]


@dataclass(frozen=True)
class ElasticModel:
    """The model of a problem. `margin` is the number of standard deviations between mean and sure time."""

    problem: Problem
    margin: float = 0.0

    def seconds(self, counts: Sequence[int], servers: int) -> float:
        """Expected time of one plan in s; infinite if it is not allowed."""
        column = np.array([counts], dtype=np.float64).T
        return min(float(each(column).seconds[0]) for each in self._with(servers))

    def allows(self, counts: Sequence[int], servers: int) -> bool:
        """Whether a plan has workers as the job may have them: how many, how many on demand, in which zones."""
        return math.isfinite(self.seconds(counts, servers))

    def zone(self, counts: Sequence[int], servers: int) -> str:
        """Where the servers of one plan are, or cost least."""
        column = np.array([counts], dtype=np.float64).T
        return min(self._with(servers), key=lambda each: float(each(column).cost[0])).zone

    def _with(self, servers: int) -> Sequence[_Evaluator]:
        own = [each for each in self.evaluators() if each.servers == servers]
        return own or [_Evaluator(self.problem, servers, "", self.margin)]

    def evaluators(self) -> Sequence[_Evaluator]:
        """One for each number and zone of the parameter servers."""
        servers = self.problem.servers
        if servers.zone is not None:
            zones = [servers.zone]
        elif self.problem.zone_policy == "Any" and not any(
            pool.transfer_per_gib for pool in self.problem.pools
        ):
            zones = [""]
        else:
            zones = list(dict.fromkeys(pool.zone for pool in self.problem.pools))
        return [
            _Evaluator(self.problem, n, zone, self.margin) for n in sorted(servers.counts) for zone in zones
        ]


@dataclass(frozen=True)
class _Evaluator:
    problem: Problem
    servers: int
    zone: str
    margin: float

    @cached_property
    def _rates(self) -> Floats:
        """(k,) steps/s of one worker of each pool, reduced by the time without a node, and of what then replaces it."""
        rates = []
        for pool in self.problem.pools:
            alone = pool.process.mean / (1 + pool.interruptions_per_hour * pool.startup_seconds / 3600)
            for own, _, works in self._bought(pool):
                alone += works * own.samples_per_second / pool.samples_per_second
            rates.append(alone / pool.step_seconds)
        return np.array(rates)

    def _bought(self, pool: Pool) -> list[tuple[Pool, float, float]]:
        """What is bought for a missing spot worker: its pool, and the parts of the time that it is paid and trains."""
        own, deadline = self.problem.instead_of(pool), self.problem.objective.deadline
        if own is None or deadline is None:
            return []
        missing, after = 1 - pool.process.mean, pool.patience
        paid, works = (
            missing * max(1 - wait / deadline, 0.0) for wait in (after, after + own.startup_seconds)
        )
        return [(own, paid, works)]

    @cached_property
    def _weights(self) -> Floats:
        """(6, k) contribution of one worker of each pool to the sums over pools."""
        rows = []
        for pool, rate in zip(self.problem.pools, self._rates, strict=True):
            money = money_per_step(pool, self.zone, self.problem.servers.bytes_per_step)
            # A shock takes a binomial number K of n workers: E[K²] = (f n)² + f (1 - f) n.
            single = pool.interruptions_per_hour * (1 - pool.shock_share * pool.shock_size) * _lost(pool)
            paid = pool.price * pool.process.mean
            paid += sum(own.price * part for own, part, _ in self._bought(pool))
            rows.append([rate, rate * pool.batch, paid, rate * money, rate * pool.step_sigma, single])
        return np.array(rows).T

    @cached_property
    def _shocks(self) -> Floats:
        """(k,) factor of the squared number of workers in the variance of lost work, per hour."""
        return np.array(
            [
                pool.interruptions_per_hour * pool.shock_share * pool.shock_size * _lost(pool)
                for pool in self.problem.pools
            ]
        )

    @cached_property
    def _waits(self) -> tuple[Floats, Floats]:
        """(k,) seconds until a new and a running worker of each pool can work. With other servers all begin again."""
        ready = self.problem.servers.wait(self.servers)
        new = np.array([pool.out_seconds + max(pool.startup_seconds, ready) for pool in self.problem.pools])
        return new, new if ready > 0 else np.zeros_like(new)

    def __call__(self, counts: Floats) -> Evaluated:
        """Evaluate counts (k, m)."""
        problem, servers = self.problem, self.problem.servers
        workers = counts.sum(axis=0)
        alone, samples, hourly, crossing, unsure, single = self._weights @ counts
        some = alone > 0
        alone[~some] = np.nan
        speed, unsure, hangs = alone, unsure / alone, np.zeros(1)
        if servers.model.update_seconds > 0:
            speed = servers.model.limited(alone, self.servers)
            hangs = busy(speed, alone, servers.model.sharpness)
            unsure = np.hypot(unsure * (1 - hangs), hangs * servers.capacity_sigma(self.servers))
        iterations = problem.work.iterations(samples / alone, workers)
        training = iterations / speed
        lost_per_second = self.servers * servers.interruptions_per_hour / 3600
        again = servers.snapshot_every / 2 + servers.recovery_seconds
        overhead = 1 + servers.snapshot_seconds / servers.snapshot_every + lost_per_second * again
        seconds = self._startup(counts) / alone + training * overhead
        hours = seconds / 3600
        cost = hours * (hourly + self.servers * servers.price) + iterations * (crossing / alone)
        cost -= self._not_paid(counts, hours)
        # Behind full servers, a worker less makes the others faster.
        variance = hours * (single + self._shocks @ (counts * counts)) * ((1 - hangs) / alone) ** 2
        if servers.interruptions_per_hour > 0:
            variance += (
                # The square of U + R, U uniform in the time between two snapshots.
                seconds * lost_per_second * (servers.snapshot_every**2 / 12 + again**2)
            )
        variance += (training * unsure) ** 2
        if problem.work.is_random:
            variance += (training * problem.work.spread(workers)) ** 2
        sure = seconds + self.margin * np.sqrt(variance)
        nothing = ~np.isfinite(seconds) | (workers < problem.min_workers)
        if problem.max_workers is not None:
            nothing |= workers > problem.max_workers
        if problem.min_on_demand:
            steady = np.array([float(not pool.spot) for pool in problem.pools])
            nothing |= steady @ counts < problem.min_on_demand
        nothing |= self._zones_apart(counts)
        seconds[nothing] = sure[nothing] = cost[nothing] = np.inf
        return Evaluated(seconds, sure, cost, iterations)

    def wait(self, counts: Floats) -> Floats:
        """(m,) mean seconds until a worker can work, each weighted by its speed."""
        alone = self._rates @ counts
        return np.divide(self._startup(counts), alone, out=np.zeros_like(alone), where=alone > 0)

    def _startup(self, counts: Floats) -> Floats:
        """(m,) sum over workers of speed times the wait until they can work."""
        new, there = self._waits
        weights = self._rates * new
        total = weights @ counts
        for i, pool in enumerate(self.problem.pools):
            if pool.running:
                kept = np.minimum(counts[i], pool.running)
                total -= kept * self._rates[i] * (new[i] - there[i])
        return np.asarray(total)

    def _not_paid(self, counts: Floats, hours: Floats) -> Floats | float:
        """(m,) what nodes do not cost while they are not to be had."""
        saved: Floats | float = 0.0
        for i, pool in enumerate(self.problem.pools):
            if pool.out_seconds > 0:
                waiting = np.maximum(counts[i] - pool.running, 0.0)
                saved = saved + waiting * pool.price * np.minimum(pool.out_seconds / 3600, hours)
        return saved

    def _zones_apart(self, counts: Floats) -> Floats | bool:
        """(m,) whether workers violate zone policy Same."""
        if self.problem.zone_policy != "Same":
            return False
        other = np.array([float(bool(pool.zone) and pool.zone != self.zone) for pool in self.problem.pools])
        return np.asarray(other @ counts > 0)


def _lost(pool: Pool) -> float:
    """Square of the work (steps) that one revocation costs.

    Its life is a renewal process: a worker that starts cannot be lost, so losses vary less than those of Poisson's.
    """
    missing = 1 + pool.interruptions_per_hour * pool.startup_seconds / 3600
    return float((pool.startup_seconds / pool.step_seconds) ** 2 / missing**3)
