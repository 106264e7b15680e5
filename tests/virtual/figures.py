"""The figures of hidden truths: of each scenario what became of it, as values that a file holds, and of many the sums.

`test_hidden_truth.py` judges them, `python -m benchmarks.hidden_truth` prints them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

from tests.virtual.hidden import draw
from tests.virtual.hidden_story import PROMISED, PlanChange, Story, Told
from tests.virtual.hindsight import best_in_hindsight, uniform_progress

NEAR = 0.15
"""An end that is predicted at half is near if it is off by no more than this part of the true time."""
SOON = 60.0
"""A plan that is back within so many seconds went back."""


@dataclass(frozen=True)
class Figures:
    """One scenario. Costs are of all its jobs; `errors` of the ends that were predicted at half, as parts."""

    seed: int
    jobs: int
    cost: float
    hindsight: float
    """What the best fixed choice in hindsight would have cost."""
    uniform: float
    """Likewise uniform progress, which knows the speeds from the first second."""
    promised: int
    """Jobs that were promised to be in time."""
    late: int
    """Those of them that were not."""
    errors: tuple[float, ...]
    changes: int
    """Of plans, the first ones included."""
    back: int
    """Those that went back within a minute."""
    broken: tuple[str, ...]
    """What an invariant has against it."""

    @property
    def over_hindsight(self) -> float:
        """The cost over that of the best in hindsight."""
        return self.cost / self.hindsight

    @property
    def over_uniform(self) -> float:
        """The cost over that of uniform progress."""
        return self.cost / self.uniform


@dataclass(frozen=True)
class Summary:
    """Many scenarios."""

    every: Sequence[Figures]

    @property
    def over_hindsight(self) -> float:
        """The median."""
        return median(each.over_hindsight for each in self.every)

    @property
    def over_uniform(self) -> float:
        """Of the costs in all."""
        return sum(each.cost for each in self.every) / sum(each.uniform for each in self.every)

    @property
    def promised(self) -> int:
        """Jobs that were promised to be in time."""
        return sum(each.promised for each in self.every)

    @property
    def late(self) -> int:
        """Those of them that were not."""
        return sum(each.late for each in self.every)

    @property
    def errors(self) -> list[float]:
        """How far the ends were off that were predicted at half."""
        return [abs(error) for each in self.every for error in each.errors]

    @property
    def near(self) -> float:
        """The part of these that were near."""
        return sum(error <= NEAR for error in self.errors) / len(self.errors)

    def chance_of_so_many_late(self) -> float:
        """The binomial test: the chance of so many late jobs, or more, if the promises were true."""
        n = self.promised
        return sum(
            comb(n, late) * (1 - PROMISED) ** late * PROMISED ** (n - late)
            for late in range(self.late, n + 1)
        )


def play(seed: int) -> Told:
    """The scenario of a seed, with the operator killed three times."""
    return Story(draw(seed)).play()


def figures(seed: int, told: Told | None = None) -> Figures:
    """Count in the scenario of a seed, which is played unless it is `told`, and find what would have been best."""
    scenario, told = draw(seed), told or play(seed)
    deadlines = {job.name: job.deadline for job in scenario.jobs}
    return Figures(
        seed=seed,
        jobs=len(scenario.jobs),
        cost=told.cost,
        hindsight=best_in_hindsight(scenario),
        uniform=uniform_progress(scenario)[0],
        promised=len(told.promised),
        late=sum(told.seconds[name] > deadlines[name] for name in told.promised),
        errors=tuple(end / told.seconds[name] - 1 for name, (_, end) in told.at_half.items()),
        changes=len(told.changes),
        back=_went_back(told.changes),
        broken=tuple(told.broken),
    )


def _went_back(changes: Sequence[PlanChange]) -> int:
    last: dict[str, PlanChange] = {}
    back = 0
    for change in changes:
        before = last.get(change.job)
        back += before is not None and change.after == before.before and change.at - before.at <= SOON
        last[change.job] = change
    return back
