"""The probability of keeping the limits: simulated runs of plans, with losses, stock-outs and uncertain speeds.

The search uses mean and standard deviation. What it finds is checked here against the whole distribution, which is
skewed: a shock that takes half of a pool is rare and expensive. `Walk` goes through the candidates in the order of the
objective until one is sure enough, so that "the cheapest" is true of what it answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shoal.sizing.availability import Markov
from shoal.sizing.plan.elastic import ElasticModel
from shoal.sizing.plan.engine import BEYOND, RUNS, TABLE_RUNS, Engine, Runs
from shoal.sizing.plan.found import Shortlist
from shoal.sizing.plan.problem import Objective, Problem

__all__ = ["Checked", "Engines", "Walk", "is_risky", "kept"]

NEAR = 0.02
"""Candidates whose chance by the table is below the confidence by less than this are simulated in full."""
MOST_CHECKED = 150
"""After so many of one shortlist only those are simulated that the table holds to be sure, as many at most."""
MOST_SECONDS = 10 * 365 * 86400.0


def is_risky(problem: Problem, counts: Sequence[int], servers: int) -> bool:
    """Whether the time of this plan is random."""
    return (
        problem.work.is_random
        or problem.servers.capacity_sigma(servers) > 0
        or any(
            n and (pool.interruptions_per_hour > 0 or pool.step_sigma > 0 or pool.availability is not None)
            for pool, n in zip(problem.pools, counts, strict=True)
        )
    )


class Engines:
    """The simulated runs of one problem, which all that is asked about it shares."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._made: dict[tuple[float, int, int], Engine] = {}

    def until(self, seconds: float, *, runs: int = RUNS, seed: int = 0) -> Engine:
        """Up to a little after the deadline, or to twice the expected time without one, or of what is late."""
        deadline = self.problem.objective.deadline
        if deadline is None or seconds > deadline:
            horizon = max(2 * min(seconds, MOST_SECONDS), 1e-3)
        else:
            horizon = BEYOND * deadline
        key = horizon, runs, seed
        if key not in self._made:
            self._made[key] = Engine(self.problem, horizon, runs=runs, seed=seed)
        return self._made[key]


def kept(objective: Objective, runs: Runs) -> float:
    """The part of the runs in which all limits are kept together; 1 without any."""
    deadline = np.inf if objective.deadline is None else objective.deadline
    budget = np.inf if objective.budget is None else objective.budget
    return float(np.mean((runs.finish <= deadline) & (runs.cost <= budget)))


@dataclass(frozen=True)
class Checked:
    """A plan in simulated runs: how often it kept the deadline and the budget (None: no such limit)."""

    at: int
    runs: Runs
    in_time: float | None
    in_budget: float | None
    kept: float
    """How often it kept both in one run; 1 without a limit."""

    @property
    def between(self) -> tuple[float, float]:
        """The 5 and 95 % quantiles of the time."""
        low, high = (float(q) for q in np.quantile(self.runs.finish, (0.05, 0.95), method="nearest"))
        return low, high

    def sure(self, confidence: float) -> bool:
        """Whether both are kept together with this confidence."""
        return self.kept >= confidence


class Walk:
    """Simulated checks of one problem's candidates, with the same runs for all."""

    def __init__(self, model: ElasticModel, seconds: float, engines: Engines | None = None) -> None:
        self._model, self._problem = model, model.problem
        self._evaluators = model.evaluators()
        self.seconds = seconds
        self._engines = engines or Engines(model.problem)
        self._alike = _alike(model)
        self._failed = set[tuple[int, ...]]()
        self.cut_short = False
        """Whether candidates were left out that might have been sure enough."""

    @cached_property
    def _engine(self) -> Engine:
        return self._engines.until(self.seconds)

    @cached_property
    def _table(self) -> Engine:
        return self._engines.until(self.seconds, runs=TABLE_RUNS, seed=1)

    def check(self, counts: Sequence[int], variant: int, at: int = 0) -> Checked:
        """Simulate one plan."""
        evaluator, objective = self._evaluators[variant], self._problem.objective
        runs = self._engine.run(counts, evaluator.servers, evaluator.zone)
        return Checked(
            at,
            runs,
            None if objective.deadline is None else float(np.mean(runs.finish <= objective.deadline)),
            None if objective.budget is None else float(np.mean(runs.cost <= objective.budget)),
            kept(objective, runs),
        )

    def first_sure(self, shortlist: Shortlist) -> Checked | None:
        """The first candidate of the shortlist that keeps the limits with the confidence asked for."""
        start, size, tried = 0, 64, 0
        while start < len(shortlist.first) and tried < 2 * MOST_CHECKED:
            end, careful = start + size, tried >= MOST_CHECKED
            self.cut_short |= careful
            for at in start + np.flatnonzero(self.likely(shortlist, slice(start, end), careful=careful)):
                variant, counts = int(shortlist.variant[at]), [int(n) for n in shortlist.counts[:, at]]
                kind = variant, *(n for rows in self._alike for n in sorted(counts[row] for row in rows))
                if kind in self._failed:
                    continue
                found = self.check(counts, variant, int(at))
                if found.sure(self._problem.objective.confidence):
                    return found
                self._failed.add(kind)
                tried += 1
                if tried % MOST_CHECKED == 0:
                    end = int(at) + 1
                    break
            start, size = end, min(size * 4, 2048)
        return None

    def likely(self, shortlist: Shortlist, part: slice, *, careful: bool = False) -> NDArray[np.bool_]:
        """(m,) whether the table of each pool's work lets a candidate keep the limits often enough.

        `careful`: with a little to spare, for candidates that are not simulated one by one afterwards.
        """
        needed = self._problem.objective.confidence + (NEAR / 4 if careful else -NEAR)
        variants = shortlist.variant[part]
        likely = np.zeros(len(variants), dtype=bool)
        counts = shortlist.counts[:, part].astype(np.int64)
        hourly = shortlist.cost[part] / shortlist.seconds[part] * 3600
        for variant in np.unique(variants):
            at = np.flatnonzero(variants == variant)
            servers = self._evaluators[variant].servers
            chances = self._table.chances(counts[:, at], servers, hourly[at], self._problem.objective)
            likely[at] = chances >= min(needed, 1.0)
        return likely


def _alike(model: ElasticModel) -> list[list[int]]:
    """The rows of pools whose nodes are alike: who has how many of them makes no difference."""
    problem, groups = model.problem, dict[object, list[int]]()
    zoned = any(each.zone for each in model.evaluators())
    for row, pool in enumerate(problem.pools):
        nodes = pool.availability if isinstance(pool.availability, Markov | None) else row
        kind = replace(pool, name="", zone=pool.zone if zoned else ""), nodes, pool.name == problem.fallback
        groups.setdefault(kind, []).append(row)
    return list(groups.values())
