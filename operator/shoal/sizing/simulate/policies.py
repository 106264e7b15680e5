"""Who decides how many spot and on-demand workers to ask for, given what has happened so far.

Each policy is one small class, called at every step for all runs at once. Only `Hindsight` knows the future. None of
them is what the operator does: that changes no number of workers by itself, somebody or something must ask it to.
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

OPTIMISM = 0.01
"""Before anything was seen, spot is taken to be there: as if seen for this part of the time to the deadline."""
RESERVE = 0.15
"""At most this part of the time left is set aside for starting on-demand workers."""


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
    spot_there: Ints
    """Spot workers at work or starting."""
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


def _spot_beside(view: View, on_demand: Ints) -> Ints:
    """Spot workers beside these on-demand ones; who is starting does nothing yet, so spot stays until it works."""
    scenario = view.scenario
    at_work = np.minimum(view.on_demand, on_demand)
    return np.asarray(np.clip(scenario.workers - at_work, 0, scenario.most_spot))


class SpotOnly:
    """As many spot workers as there are, however long it takes."""

    def __call__(self, view: View) -> tuple[Ints, Ints]:
        """All spot."""
        return _all(view, view.scenario.most_spot), _all(view, 0)


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
        spot = np.where(self._switched, 0, scenario.most_spot)
        return spot, np.where(self._switched, scenario.most_on_demand, 0)


class UniformProgress:
    """Keep to the line from nothing done to all done at the deadline: on-demand tops up when the run is behind.

    Wu et al., "Can't Be Late: Optimizing Spot Instance Savings under Deadlines", NSDI 2024, carried over to a job whose
    workers may be of both kinds at once, with all their rules: who is idle is given on-demand when the run is behind;
    who has spot keeps it, also while it starts, and also behind; on-demand that was asked for stays until the run is so
    far ahead of the line as two changes take (c(t) >= e(t + 2 d)), for each change is paid and trains nothing; and if
    time gets short, who is idle has on-demand to the end.
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
        sure = scenario.sure_rate * scenario.most_on_demand * (left - 2 * view.startup - view.step)
        danger = view.remaining >= sure
        idle = np.where(danger, scenario.workers, must) - view.spot_there
        self._to_the_end = self._to_the_end | (danger & (idle > 0))
        topping_up = self._to_the_end | np.where(self._topping_up, ~ahead, behind)
        on_demand = np.where(topping_up, np.maximum(idle, there), 0)
        self._topping_up = on_demand > 0
        on_demand = np.clip(on_demand, scenario.base, scenario.most_on_demand)
        return _spot_beside(view, on_demand), on_demand


class Shoal:
    """All spot there is, and the fewest on-demand workers that keep the deadline safe.

    Two rules, the larger answer counts:

    - *safety*: what is left could still be done if all spot were lost now, by the on-demand workers there and those
      that would be started a step from now. It holds whatever spot does, so a deadline safe at first is kept.
    - *expectation*: spot so far says how often how many workers can be had. If that is not enough for what is left,
      on-demand fills the valleys up to the lowest level that is: buying early and little keeps spot in use, where
      waiting for the safety rule would in the end put on-demand workers into spot's place.

    On-demand that neither rule needs is given back after it was not needed for as long as getting it again takes.
    """

    def __init__(self) -> None:
        self._seen: Floats | None = (
            None  # (r, workers + 1) seconds in which so many spot workers could be had
        )
        self._idle: Floats | None = None  # (r,) seconds since on-demand was needed as it is
        self._asked: Ints | None = None

    def __call__(self, view: View) -> tuple[Ints, Ints]:
        """The larger answer of both rules."""
        scenario, runs = view.scenario, len(view.remaining)
        if self._seen is None or self._idle is None or self._asked is None:
            self._seen = np.zeros((runs, scenario.most_spot + 1))
            self._seen[:, -1] = OPTIMISM * scenario.deadline
            self._idle = np.zeros(runs)
            self._asked = _all(view, 0)  # nothing was asked for yet: spot may have everything
        # Who has all that was asked for might have had more.
        could = np.where(view.spot_there >= self._asked, scenario.most_spot, view.spot_there)
        self._seen[np.arange(runs), could] += view.step
        there = view.on_demand + view.starting
        wanted = np.maximum(self._safe(view), self._expected(view, self._seen, could))
        self._idle = np.where(wanted < there, self._idle + view.step, 0.0)
        keep = (wanted < there) & (self._idle < view.startup + view.step)
        on_demand = np.clip(np.where(keep, there, wanted), scenario.base, scenario.most_on_demand)
        self._asked = _spot_beside(view, on_demand)
        return self._asked, on_demand

    @staticmethod
    def _safe(view: View) -> Ints:
        """On-demand workers that the safety rule asks for."""
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
        return there + np.where(short > 0, more, -np.clip(fewer, 0, view.on_demand))

    @staticmethod
    def _expected(view: View, seen: Floats, could: Ints) -> Ints:
        """On-demand workers that fill spot's valleys to the lowest level that is enough on average."""
        scenario = view.scenario
        share = seen / seen.sum(axis=1, keepdims=True)
        # Levels above what spot can be are filled by on-demand alone.
        share = np.pad(share, ((0, 0), (0, scenario.workers + 1 - share.shape[1])))
        level = np.arange(scenario.workers + 1)
        below = np.cumsum(share, axis=1)
        above = (share * level).sum(axis=1, keepdims=True) - np.cumsum(share * level, axis=1)
        mean = level * below + above  # of max(spot, level)
        # Whoever is asked for must start first; near the end that would ask for ever more, so it fades.
        seconds = max(view.left - min(view.startup, RESERVE * view.left), view.step)
        enough = mean * seconds >= (view.remaining / scenario.sure_rate)[:, None]
        lowest = np.where(enough.any(axis=1), enough.argmax(axis=1), scenario.workers)
        return np.maximum(lowest - could, 0)


class Hindsight:
    """Knows what spot will give until the deadline, and buys just the rest on-demand, evenly and from the start."""

    def __init__(self, missing: Floats) -> None:
        self._missing = missing

    def __call__(self, view: View) -> tuple[Ints, Ints]:
        """Spot, and on-demand until what is missing is done."""
        scenario = view.scenario
        whole = max(scenario.deadline - view.startup - view.step, view.step)
        number = np.ceil(self._missing / (scenario.sure_rate * whole) - 1e-9).astype(np.int64)
        # What is missing is missing beside the on-demand workers that there always are.
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
