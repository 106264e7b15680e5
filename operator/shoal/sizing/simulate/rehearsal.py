"""The policy that keeps a deadline with a stated confidence at the least cost: chosen by rehearsal.

The safety rule keeps every deadline that can be kept, whatever spot nodes do; where the slack is shorter than a
start-up it therefore buys everything on-demand. With a stated confidence less is enough. How much less depends on the
pool, so a few policies are replayed on one half of the trace, and the cheapest that was in time often enough is used
on the other. What is replayed stays a deadline away from both ends of its half, so that no run meets a time of which
its policy was chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from shoal.errors import UsageError
from shoal.sizing.simulate.forecast import Forecast
from shoal.sizing.simulate.policies import Confident, Ints, Policy, Shoal, View
from shoal.sizing.simulate.replay import Supply, replay, step_of
from shoal.sizing.simulate.scenario import Scenario

__all__ = ["Rehearsed", "rehearse"]

RUNS = 200
LEAST = 6  # deadlines in a trace: in each half, one free at both ends and one in which runs begin
WORTH = 0.95
FLOORS = (0.0, 0.25, 0.5, 0.7)  # parts of the workers that are on-demand from the beginning


class Rehearsed:
    """Runs that begin in one half of their trace use the policy that was chosen on the other half."""

    def __init__(self, second: np.ndarray, policies: tuple[Policy, Policy]) -> None:
        self._second, self._policies = second, policies

    def __call__(self, view: View) -> tuple[Ints, Ints]:
        """What the policy of each run asks for."""
        (spot, steady), (other_spot, other_steady) = (policy(view) for policy in self._policies)
        return np.where(self._second, spot, other_spot), np.where(self._second, steady, other_steady)


def rehearse(scenario: Scenario, source: Supply, confidence: float, seed: int = 0) -> Callable[[], Policy]:
    """A maker of the policy for the runs of `source`."""
    horizon = max(int(scenario.deadline / step_of(scenario)), 1)
    shortest = int(source.lengths.min())
    if shortest < LEAST * horizon:
        raise UsageError(
            f"a trace is {shortest / horizon:.1f} times as long as the deadline, and a policy of a stated confidence "
            f"is chosen on traces of at least {LEAST} deadlines: give longer ones, or leave the confidence out"
        )
    rng = np.random.default_rng(seed)
    chosen = []
    for half in (0, 1):
        which = np.arange(RUNS) % len(source.lengths)
        middle = source.lengths[which] / 2
        offset = (half * middle + horizon + rng.random(RUNS) * (middle - 2 * horizon)).astype(np.int64)
        chosen.append(_best(scenario, replace(source, trace=which, offset=offset), confidence, horizon, seed))
    second = source.offset * 2 >= source.lengths[source.trace]
    # Chosen on the first half: for runs of the second.
    return lambda: Rehearsed(second, (chosen[0](source), chosen[1](source)))


def _best(
    scenario: Scenario, source: Supply, confidence: float, horizon: int, seed: int
) -> Callable[[Supply], Policy]:
    """The cheapest policy that was in time often enough, else the safety rule."""

    def confident(floor: float, quantile: float) -> Callable[[Supply], Policy]:
        return lambda runs: Confident(Forecast(runs, scenario.most_spot, horizon, quantile).low, floor)

    best: Callable[[Supply], Policy] = lambda _: Shoal()  # noqa: E731
    # Risk is taken for a saving that is worth it, not for a percent.
    least = WORTH * float(np.mean(replay(scenario, Shoal(), source, seed).cost))
    options = [confident(floor, 0.0) for floor in FLOORS] + [confident(0.0, 1 - confidence)]
    # The other half of a trace differs: in rehearsal, a fifth of what may be late must be enough.
    needed = 1 - (1 - confidence) / 5
    for make in options:
        tried = replay(scenario, make(source), source, seed)
        cost = float(np.mean(tried.cost))
        if cost < least and np.mean(tried.finish <= scenario.deadline) >= needed:
            best, least = make, cost
    return best
