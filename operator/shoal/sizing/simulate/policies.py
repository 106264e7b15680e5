"""Policies: how many spot and on-demand workers to request, given what has happened so far.

Each policy is one class, called at every step for all runs at once. Only `Hindsight` knows the future.
The one named "shoal" is not the operator's planning: see `Shoal`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.sizing.availability import Floats
from shoal.sizing.plan.deadline import spare_seconds
from shoal.sizing.simulate.scenario import Scenario

__all__ = ["POLICIES", "Hindsight", "Policy", "SpotOnly", "View", "spot_workers"]

Ints = NDArray[np.int64]

OPTIMISM = 0.01
"""The prior: spot as available as requested, with this part of the time to the deadline as its weight."""
RESERVE = 0.15
"""At most this part of the remaining time is reserved for starting on-demand workers."""


@dataclass(frozen=True)
class View:
    """The input of a policy: the state of all runs (r,) at one time."""

    scenario: Scenario
    now: float
    step: float
    remaining: Floats
    """Remaining steps."""
    spot: Ints
    """Spot workers at work."""
    on_demand: Ints
    """On-demand workers at work."""
    starting: Ints
    """On-demand workers that are starting."""
    starting_wait: Floats
    """Sum of the seconds until they work."""
    spot_there: Ints
    """Spot workers at work or starting."""
    startup: float
    """Seconds until an on-demand worker requested now works."""
    on_demand_work: Floats
    """Steps that on-demand workers have done."""

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.scenario.deadline - self.now

    def spare(self, wait: Any, later: float = 0.0) -> Floats:
        """(r,) seconds to spare by the safety rule, if that is asked `later`. `wait`: of the on-demand workers."""
        scenario = self.scenario
        training = self.remaining / (scenario.sure_rate * scenario.most_on_demand)
        return np.asarray(spare_seconds(training, wait=wait, left=self.left - later))


class Policy(Protocol):
    """Decides (spot, on-demand) workers for every run."""

    def __call__(self, view: View) -> tuple[Ints, Ints]:
        """The workers of both kinds to have from now on."""
        ...


def _all(view: View, number: int) -> Ints:
    return np.full(len(view.remaining), number, dtype=np.int64)


def spot_workers(view: View, on_demand: Ints) -> Ints:
    """Spot workers in addition to these on-demand ones. Spot stays until its on-demand replacement works."""
    scenario = view.scenario
    at_work = np.minimum(view.on_demand, on_demand)
    return np.asarray(np.clip(scenario.workers - at_work, 0, scenario.most_spot))


class SpotOnly:
    """All available spot workers, without regard to the deadline."""

    def __call__(self, view: View) -> tuple[Ints, Ints]:
        """All spot."""
        return _all(view, view.scenario.most_spot), _all(view, 0)


class OnDemandOnly:
    """All workers on-demand from the beginning."""

    def __call__(self, view: View) -> tuple[Ints, Ints]:
        return _all(view, 0), _all(view, view.scenario.most_on_demand)


class Greedy:
    """Spot only until the remaining work just fits on-demand; then on-demand only."""

    def __init__(self) -> None:
        self._switched: NDArray[np.bool_] | None = None

    def __call__(self, view: View) -> tuple[Ints, Ints]:
        scenario = view.scenario
        if self._switched is None:
            self._switched = np.zeros(len(view.remaining), dtype=bool)
        self._switched |= view.spare(view.startup, 2 * view.step) <= 0
        spot = np.where(self._switched, 0, scenario.most_spot)
        return spot, np.where(self._switched, scenario.most_on_demand, 0)


class UniformProgress:
    """Uniform progress to the deadline: on-demand workers are added when the run is behind.

    Wu et al., "Can't Be Late: Optimizing Spot Instance Savings under Deadlines", NSDI 2024, applied to a job with
    workers of both kinds. Idle workers get on-demand when the run is behind; spot workers keep their spot node, also
    while it starts and when the run is behind; on-demand workers stay until the run is ahead by the time of two
    changes (c(t) >= e(t + 2 d)), since a change costs money and time; when time gets short, idle workers have
    on-demand to the end.
    """

    def __init__(self) -> None:
        self._topping_up: NDArray[np.bool_] | None = None

    def __call__(self, view: View) -> tuple[Ints, Ints]:
        scenario = view.scenario
        if self._topping_up is None:
            self._topping_up = np.zeros(len(view.remaining), dtype=bool)
            self._to_the_end = self._topping_up
        left = max(view.left, view.step)
        done = scenario.work - view.remaining

        def line(seconds: float) -> float:
            return min(seconds / scenario.deadline, 1.0) * scenario.work

        behind, ahead = done < line(view.now), done >= line(view.now + 2 * view.startup)
        must = np.ceil(view.remaining / (scenario.sure_rate * left)).astype(np.int64)
        there = view.on_demand + view.starting
        danger = view.spare(2 * view.startup, view.step) <= 0
        idle = np.where(danger, scenario.workers, must) - view.spot_there
        self._to_the_end = self._to_the_end | (danger & (idle > 0))
        topping_up = self._to_the_end | np.where(self._topping_up, ~ahead, behind)
        on_demand = np.where(topping_up, np.maximum(idle, there), 0)
        self._topping_up = on_demand > 0
        on_demand = np.clip(on_demand, scenario.base, scenario.most_on_demand)
        return spot_workers(view, on_demand), on_demand


class Shoal:
    """All available spot, and the fewest on-demand workers that keep the deadline safe.

    Two rules, the larger answer counts:

    - *safety*: the remaining work could still be done if all spot were lost now, by the present on-demand workers and
    those that could be started one step from now. This is independent of spot, so a deadline that is safe at first is
    met.
    - *expectation*: the observed distribution of available spot workers. If that is not enough for the remaining
    work, on-demand fills the valleys up to the lowest level that is: with few on-demand workers early, spot stays in
    use, while the safety rule alone would replace spot in the end.

    On-demand workers that neither rule needs are released after one start-up time.

    The operator plans instead: for all jobs and pools together, from simulated runs, with the confidence that each job
    asks for. These rules know one spot and one on-demand pool, whose speeds are certain, and ask for no confidence;
    what they share with it is `spare_seconds`.
    """

    def __init__(self) -> None:
        self._seen: Floats | None = (
            None  # (r, workers + 1) seconds in which this many spot workers were available
        )
        self._idle: Floats | None = None  # (r,) seconds since all on-demand workers were needed
        self._asked: Ints | None = None

    def __call__(self, view: View) -> tuple[Ints, Ints]:
        """The larger answer of both rules."""
        scenario, runs = view.scenario, len(view.remaining)
        if self._seen is None or self._idle is None or self._asked is None:
            self._seen = np.zeros((runs, scenario.most_spot + 1))
            self._seen[:, -1] = OPTIMISM * scenario.deadline
            self._idle = np.zeros(runs)
            self._asked = _all(view, 0)  # nothing was requested yet: all may be spot
        # A run that has all requested spot workers might have had more.
        could = np.where(view.spot_there >= self._asked, scenario.most_spot, view.spot_there)
        self._seen[np.arange(runs), could] += view.step
        there = view.on_demand + view.starting
        wanted = np.maximum(self._safe(view), self._expected(view, self._seen, could))
        self._idle = np.where(wanted < there, self._idle + view.step, 0.0)
        keep = (wanted < there) & (self._idle < view.startup + view.step)
        on_demand = np.clip(np.where(keep, there, wanted), scenario.base, scenario.most_on_demand)
        self._asked = spot_workers(view, on_demand)
        return self._asked, on_demand

    @staticmethod
    def _safe(view: View) -> Ints:
        """On-demand workers by the safety rule."""
        most, there = view.scenario.most_on_demand, view.on_demand + view.starting
        new = min(
            view.step + view.startup, max(view.left - view.step, 0.0)
        )  # of a worker asked in the next step
        wait = (view.starting_wait + (most - there) * new) / most
        spare = most * view.spare(wait, view.step)  # worker-seconds; the work of a step counts at its end
        more = np.ceil(-spare / view.step).astype(np.int64)
        fewer = np.floor(spare / (2 * (view.step + view.startup))).astype(np.int64)
        return there + np.where(spare < 0, more, -np.clip(fewer, 0, view.on_demand))

    @staticmethod
    def _expected(view: View, seen: Floats, could: Ints) -> Ints:
        """On-demand workers by the expectation rule."""
        scenario = view.scenario
        share = seen / seen.sum(axis=1, keepdims=True)
        # Only on-demand can fill levels above the most spot.
        share = np.pad(share, ((0, 0), (0, scenario.workers + 1 - share.shape[1])))
        level = np.arange(scenario.workers + 1)
        below = np.cumsum(share, axis=1)
        above = (share * level).sum(axis=1, keepdims=True) - np.cumsum(share * level, axis=1)
        mean = level * below + above  # of max(spot, level)
        # A requested worker must start first. Near the end this would request ever more workers, so it fades out.
        seconds = max(view.left - min(view.startup, RESERVE * view.left), view.step)
        enough = mean * seconds >= (view.remaining / scenario.sure_rate)[:, None]
        lowest = np.where(enough.any(axis=1), enough.argmax(axis=1), scenario.workers)
        return np.maximum(lowest - could, 0)


class Hindsight:
    """Knows the spot capacity until the deadline, and adds the missing work on-demand, evenly from the start."""

    def __init__(self, missing: Floats) -> None:
        self._missing = missing

    def __call__(self, view: View) -> tuple[Ints, Ints]:
        """Spot, and on-demand until the missing work is done."""
        scenario = view.scenario
        whole = max(scenario.deadline - view.startup - view.step, view.step)
        number = np.ceil(self._missing / (scenario.sure_rate * whole) - 1e-9).astype(np.int64)
        # The missing work is in addition to that of the permanent on-demand workers.
        bought = view.on_demand_work - scenario.base * scenario.sure_rate * view.now
        on_demand = scenario.base + np.where(bought < self._missing, number, 0)
        return _all(view, scenario.most_spot), np.minimum(on_demand, scenario.most_on_demand)


POLICIES: dict[str, Callable[[], Policy]] = {
    "shoal": Shoal,
    "spot only": SpotOnly,
    "on-demand only": OnDemandOnly,
    "greedy with safety net": Greedy,
    "uniform progress": UniformProgress,
}
"""Policies by name. None of them knows the future."""
