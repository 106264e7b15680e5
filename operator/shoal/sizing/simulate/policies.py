"""Who decides how many spot and on-demand workers to ask for, given what has happened so far.

Each policy is one small class, called at every step for all runs at once. Only `Hindsight` knows the future.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.sizing.plan.problem import Floats
from shoal.sizing.simulate.scenario import Scenario

__all__ = ["POLICIES", "Hindsight", "Policy", "SpotOnly", "View"]

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class View:
    """What a policy sees of all runs (r,) at one time."""

    scenario: Scenario
    now: float
    step: float
    remaining: Floats
    """Steps of work left."""
    spot: Ints
    """Spot workers at work."""
    on_demand: Ints
    """On-demand workers at work."""
    starting: Ints
    """On-demand workers that are starting."""
    starting_wait: Floats
    """Sum over those of the seconds until they work."""
    startup: float
    """Seconds until an on-demand worker that is asked for now works."""
    on_demand_work: Floats
    """Steps that on-demand workers have done."""

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.scenario.deadline - self.now


class Policy(Protocol):
    """Decides (spot, on-demand) workers for every run."""

    def __call__(self, view: View) -> tuple[Ints, Ints]:
        """Workers of both kinds that there should be from now on."""
        ...


def _all(view: View, number: int) -> Ints:
    return np.full(len(view.remaining), number, dtype=np.int64)


class SpotOnly:
    """As many spot workers as there are, however long it takes."""

    def __call__(self, view: View) -> tuple[Ints, Ints]:
        """All spot."""
        return _all(view, view.scenario.workers), _all(view, 0)


class OnDemandOnly:
    """All workers on-demand from the beginning."""

    def __call__(self, view: View) -> tuple[Ints, Ints]:
        return _all(view, 0), _all(view, view.scenario.most_on_demand)


class Greedy:
    """Spot only until there is just time enough to do the rest on-demand; then all on-demand, to the end."""

    def __init__(self) -> None:
        self._switched: NDArray[np.bool_] | None = None

    def __call__(self, view: View) -> tuple[Ints, Ints]:
        scenario = view.scenario
        sure = scenario.sure_rate * scenario.most_on_demand * (view.left - view.startup - 2 * view.step)
        if self._switched is None:
            self._switched = np.zeros(len(view.remaining), dtype=bool)
        self._switched |= view.remaining >= sure
        spot = np.where(self._switched, 0, scenario.workers)
        return spot, np.where(self._switched, scenario.most_on_demand, 0)


class UniformProgress:
    """Keep to the line from nothing done to all done at the deadline: on-demand tops up whenever the run is behind.

    Wu et al., "Can't Be Late: Optimizing Spot Instance Savings under Deadlines", NSDI 2024, carried over to a job whose
    workers may be of both kinds at once.
    """

    def __call__(self, view: View) -> tuple[Ints, Ints]:
        scenario = view.scenario
        left = max(view.left, view.step)
        done = scenario.work - view.remaining
        must = np.ceil(view.remaining / (scenario.sure_rate * left)).astype(np.int64)
        behind = done < view.now / scenario.deadline * scenario.work
        sure = scenario.sure_rate * scenario.most_on_demand * (left - 2 * view.startup - view.step)
        danger = view.remaining >= sure
        top_up = np.where(danger, scenario.workers, np.where(behind, must, 0)) - view.spot
        return _all(view, scenario.workers), np.clip(top_up, 0, scenario.most_on_demand)


class Shoal:
    """All spot there is, and the fewest on-demand workers that keep the deadline safe if all spot were lost now.

    Safe means: what is left could be done by on-demand workers alone, those there and those that would have to be
    started a step from now. On-demand that is not needed for that yet is bought later or never; a run whose spot holds never
    buys any. On-demand is given back when it is safe without it for twice the time that getting it again takes.
    """

    def __call__(self, view: View) -> tuple[Ints, Ints]:
        scenario = view.scenario
        rate, most = scenario.sure_rate, scenario.most_on_demand
        left = view.left - view.step  # work done within a step ends with it
        there = view.on_demand + view.starting
        again = max(
            left - view.step - view.startup, 0.0
        )  # what a worker can do that is asked for in the next step
        sure = rate * (
            view.on_demand * left + view.starting * left - view.starting_wait + (most - there) * again
        )
        short = view.remaining - sure
        more = np.ceil(short / (rate * view.step)).astype(np.int64)
        fewer = np.floor(-short / (2 * rate * (view.step + view.startup))).astype(np.int64)
        change = np.where(short > 0, more, -np.clip(fewer, 0, view.on_demand))
        on_demand = np.clip(there + change, 0, most)
        # A worker that is starting does nothing yet: spot stays until it works.
        return np.maximum(scenario.workers - np.minimum(view.on_demand, on_demand), 0), on_demand


class Hindsight:
    """Knows what spot will give until the deadline, and buys just the rest on-demand, evenly and from the start."""

    def __init__(self, missing: Floats) -> None:
        self._missing = missing

    def __call__(self, view: View) -> tuple[Ints, Ints]:
        """Spot, and on-demand until what is missing is done."""
        scenario = view.scenario
        whole = max(scenario.deadline - view.startup - view.step, view.step)
        number = np.ceil(self._missing / (scenario.sure_rate * whole) - 1e-9).astype(np.int64)
        on_demand = np.where(view.on_demand_work < self._missing, number, 0)
        return _all(view, scenario.workers), np.minimum(on_demand, scenario.most_on_demand)


POLICIES: dict[str, Callable[[], Policy]] = {
    "shoal": Shoal,
    "spot only": SpotOnly,
    "on-demand only": OnDemandOnly,
    "greedy with safety net": Greedy,
    "uniform progress": UniformProgress,
}
"""Policies by name. None of them knows the future."""
