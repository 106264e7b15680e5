"""The result of a search: the best, the fastest and the cheapest combination, and the Pareto front."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.sizing.plan.evaluation import Evaluated
from shoal.sizing.plan.pareto import Front
from shoal.sizing.plan.problem import Floats, Objective

__all__ = ["Candidate", "Found", "feasible", "ranks"]


@dataclass(frozen=True)
class Candidate:
    """One combination, evaluated. `variant` is the number of its evaluator."""

    counts: tuple[int, ...]
    variant: int
    seconds: float
    sure_seconds: float
    cost: float
    iterations: float


def ranks(objective: Objective, out: Evaluated) -> tuple[Floats, Floats]:
    """The objective to minimize, and the tie-breaker, (m,) each."""
    if objective.prefer == "MinTime":
        return out.seconds, out.cost
    if objective.prefer == "BestValue":
        # Speed over cost is work / (time x cost): the smallest product is the most speed for the cost.
        return out.seconds * out.cost, out.cost
    return out.cost, out.seconds


def feasible(objective: Objective, out: Evaluated) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """(m,) in time, (m,) within the budget; both false where a combination is not allowed."""
    finite = np.isfinite(out.seconds)
    deadline = np.inf if objective.deadline is None else objective.deadline
    budget = np.inf if objective.budget is None else objective.budget
    return finite & (out.sure_seconds <= deadline), finite & (out.cost <= budget)


@dataclass
class Found:
    """The result of a search, or of a part of it."""

    objective: Objective
    pools: int
    searched: int = 0
    valid: int = 0
    in_time: int = 0
    in_budget: int = 0
    feasible: int = 0
    front: Front = field(init=False)
    _kept: dict[str, tuple[tuple[Any, ...], Candidate]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.front = Front(self.pools)

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
    def cheapest(self) -> Candidate | None:
        """The cheapest of all."""
        return self._get("cheapest")

    def reject_best(self) -> None:
        """Drop the best: simulation showed that it misses the deadline."""
        self._kept.pop("best", None)

    def accept(self, candidate: Candidate) -> None:
        """Set the best: simulation showed that it meets the deadline."""
        self._kept["best"] = ((), candidate)

    def _get(self, name: str) -> Candidate | None:
        return self._kept[name][1] if name in self._kept else None

    def add(self, counts: Floats, out: Evaluated, variant: int) -> None:
        """Add a block of counts (k, m) and their evaluation."""
        in_time, in_budget = feasible(self.objective, out)
        both = in_time & in_budget
        self.searched += counts.shape[1]
        self.valid += int(np.count_nonzero(np.isfinite(out.seconds)))
        self.in_time += int(np.count_nonzero(in_time))
        self.in_budget += int(np.count_nonzero(in_budget))
        here = int(np.count_nonzero(both))
        self.feasible += here
        if here:
            first, second = ranks(self.objective, out)
            self._keep("best", np.where(both, first, np.inf), second, counts, out, variant)
        self._keep("fastest", out.sure_seconds, out.cost, counts, out, variant)
        self._keep("cheapest", out.cost, out.seconds, counts, out, variant)
        if self.objective.budget is not None:
            sure = np.where(in_budget, out.sure_seconds, np.inf)
            self._keep("fastest in budget", sure, out.cost, counts, out, variant)
        self.front.add(out.seconds, out.cost, counts, variant)

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
        chosen = tuple(int(n) for n in counts[:, at])
        key = (float(least), float(second[at]), variant, chosen)
        if name not in self._kept or key < self._kept[name][0]:
            self._kept[name] = (
                key,
                Candidate(
                    chosen,
                    variant,
                    float(out.seconds[at]),
                    float(out.sure_seconds[at]),
                    float(out.cost[at]),
                    float(out.iterations[at]),
                ),
            )

    def merge(self, other: Found) -> None:
        """Add another part."""
        for name in ("searched", "valid", "in_time", "in_budget", "feasible"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name, kept in other._kept.items():
            if name not in self._kept or kept[0] < self._kept[name][0]:
                self._kept[name] = kept
        self.front.merge(other.front)
