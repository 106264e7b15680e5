"""The result of a search: the best, the fastest and the cheapest combination, and the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.sizing.availability import Floats
from shoal.sizing.plan.evaluation import Evaluated, Evaluator
from shoal.sizing.plan.pareto import Front
from shoal.sizing.plan.problem import Objective

__all__ = ["Candidate", "Found", "Shortlist", "feasible", "ranks"]

SHORTLIST = 4096
LIKELY = 1.05
"""A plan whose mean is above a limit by more than this part does not keep it with any confidence worth asking for."""


@dataclass(frozen=True)
class Candidate:
    """One combination, evaluated. `variant` is the number of its evaluator."""

    counts: tuple[int, ...]
    variant: int
    seconds: float
    sure_seconds: float
    cost: float
    iterations: float

    @classmethod
    def of(cls, counts: Floats, variant: int, out: Evaluated, at: int) -> Candidate:
        """Number `at` of the counts (k, m) and their evaluation."""
        figures = (float(each[at]) for each in (out.seconds, out.sure_seconds, out.cost, out.iterations))
        return cls(tuple(int(n) for n in counts[:, at]), variant, *figures)

    @classmethod
    def at(cls, evaluators: Sequence[Evaluator], counts: Floats, variant: int) -> Candidate:
        """These counts (k, 1), evaluated."""
        return cls.of(counts, variant, evaluators[variant](counts), 0)


def ranks(objective: Objective, out: Evaluated) -> tuple[Floats, Floats]:
    """The objective to minimize, and the tie-breaker, (m,) each."""
    if objective.prefer == "MinTime":
        return out.seconds, out.cost
    if objective.prefer == "BestValue":
        # Speed over cost is work / (time x cost): the smallest product is the most speed for the cost.
        return out.seconds * out.cost, out.seconds
    return objective.with_spare_time(out.cost, out.seconds), out.seconds


def feasible(objective: Objective, out: Evaluated) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """(m,) in time, (m,) within the budget; both false where a combination is not allowed."""
    finite = np.isfinite(out.seconds)
    deadline = np.inf if objective.deadline is None else objective.deadline
    budget = np.inf if objective.budget is None else objective.budget
    return finite & (out.sure_seconds <= deadline), finite & (out.cost <= budget)


class Shortlist:
    """The combinations with the least objective, in its order, up to `SHORTLIST` of them."""

    def __init__(self, pools: int) -> None:
        self.first: Floats = np.empty(0)
        self.counts: Floats = np.empty((pools, 0))
        self.variant: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self.seconds: Floats = np.empty(0)
        self.cost: Floats = np.empty(0)
        self.complete = True
        """Whether nothing was dropped for want of room."""

    def add(self, first: Floats, counts: Floats, variant: int, seconds: Floats, cost: Floats) -> None:
        """Add combinations (k, m)."""
        if len(self.first) >= SHORTLIST:
            better = first < self.first[-1]
            self.complete &= bool(better.all())
            first, counts, seconds, cost = first[better], counts[:, better], seconds[better], cost[better]
            if not len(first):
                return
        self._join(first, counts, np.full(len(first), variant), seconds, cost)

    def begins_with(self, one: Candidate) -> bool:
        """Whether nothing in it is better."""
        return (
            len(self.first) > 0
            and tuple(self.counts[:, 0]) == one.counts
            and int(self.variant[0]) == one.variant
        )

    def merge(self, other: Shortlist) -> None:
        """Add another shortlist."""
        self.complete &= other.complete
        self._join(other.first, other.counts, other.variant, other.seconds, other.cost)

    def _join(
        self, first: Floats, counts: Floats, variant: NDArray[np.int64], seconds: Floats, cost: Floats
    ) -> None:
        first = np.concatenate([self.first, first])
        order = np.lexsort((np.concatenate([self.seconds, seconds]), first))
        self.complete &= len(order) <= SHORTLIST
        order = order[:SHORTLIST]
        self.first = first[order]
        self.counts = np.concatenate([self.counts, counts], axis=1)[:, order]
        self.variant = np.concatenate([self.variant, variant])[order]
        self.seconds = np.concatenate([self.seconds, seconds])[order]
        self.cost = np.concatenate([self.cost, cost])[order]


@dataclass
class Found:
    """The result of a search, or of a part of it."""

    objective: Objective
    pools: int
    searched: int = 0
    feasible: int = 0
    possible: int = 0
    """Combinations whose means are within all limits."""
    after: float = -np.inf
    """The shortlist begins above this value of the objective."""
    front: Front = field(init=False)
    shortlist: Shortlist = field(init=False)
    _kept: dict[str, tuple[tuple[Any, ...], Candidate]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.front = Front(self.pools)
        self.shortlist = Shortlist(self.pools)

    @property
    def best(self) -> Candidate | None:
        """The best combination within deadline and budget."""
        return self._get("best")

    @property
    def fastest(self) -> Candidate | None:
        """The fastest of all."""
        return self._get("fastest")

    @property
    def fastest_in_budget(self) -> Candidate | None:
        """The fastest within the budget."""
        return self._get("fastest in budget")

    @property
    def cheapest_in_time(self) -> Candidate | None:
        """The cheapest within the deadline."""
        return self._get("cheapest in time")

    @property
    def cheapest(self) -> Candidate | None:
        """The cheapest of all."""
        return self._get("cheapest")

    def _get(self, name: str) -> Candidate | None:
        return self._kept[name][1] if name in self._kept else None

    def add(self, counts: Floats, out: Evaluated, variant: int) -> None:
        """Add a block of counts (k, m) and their evaluation."""
        in_time, in_budget = feasible(self.objective, out)
        both = in_time & in_budget
        self.searched += counts.shape[1]
        here = int(np.count_nonzero(both))
        self.feasible += here
        if here:
            first, second = ranks(self.objective, out)
            self._keep("best", np.where(both, first, np.inf), second, counts, out, variant)
        self._shorten(counts, out, variant)
        self._keep("fastest", out.seconds, out.cost, counts, out, variant)
        self._keep("cheapest", out.cost, out.seconds, counts, out, variant)
        if self.objective.budget is not None:
            within = np.where(in_budget, out.seconds, np.inf)
            self._keep("fastest in budget", within, out.cost, counts, out, variant)
        if self.objective.deadline is not None:
            within = np.where(in_time, out.cost, np.inf)
            self._keep("cheapest in time", within, out.seconds, counts, out, variant)
        self.front.add(out.seconds, out.cost, counts, variant)

    def _shorten(self, counts: Floats, out: Evaluated, variant: int) -> None:
        """Add what meets the limits on average to the shortlist."""
        likely, means = (np.isfinite(out.seconds) for _ in range(2))
        for value, most in ((out.seconds, self.objective.deadline), (out.cost, self.objective.budget)):
            if most is not None:
                likely &= value <= LIKELY * most
                means &= value <= most
        self.possible += int(np.count_nonzero(means))
        first, _ = ranks(self.objective, out)
        at = np.flatnonzero(likely & (first > self.after))
        if len(at):
            self.shortlist.add(first[at], counts[:, at], variant, out.seconds[at], out.cost[at])

    def _keep(
        self, name: str, first: Floats, second: Floats, counts: Floats, out: Evaluated, variant: int
    ) -> None:
        least = first.min(initial=np.inf)
        if not np.isfinite(least):
            return
        if name in self._kept and least > self._kept[name][0][0]:
            return
        equal = np.flatnonzero(first == least)
        at = int(equal[np.argmin(second[equal])])
        chosen = Candidate.of(counts, variant, out, at)
        key = (float(least), float(second[at]), variant, chosen.counts)
        if name not in self._kept or key < self._kept[name][0]:
            self._kept[name] = key, chosen

    def merge(self, other: Found) -> None:
        """Add another part."""
        for name in ("searched", "feasible", "possible"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name, kept in other._kept.items():
            if name not in self._kept or kept[0] < self._kept[name][0]:
                self._kept[name] = kept
        self.front.merge(other.front)
        self.shortlist.merge(other.shortlist)
