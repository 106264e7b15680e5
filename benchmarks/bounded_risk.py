"""What a bounded risk saves where the slack is shorter than a start-up: a policy that may be late in 5 % of the runs.

`python -m benchmarks.bounded_risk` prints what it and the safety rule pay for jobs of 18 minutes, over on-demand only.

The safety rule keeps every deadline that can be kept, whatever spot nodes do; where the slack is shorter than a
start-up it therefore buys everything on-demand. With a stated confidence less is enough: what spot did at least that
often in alike windows of the trace is counted on. How much less depends on the pool, so a few policies are replayed on
one half of the trace, and the cheapest that was in time often enough is used on the other. What is replayed stays a
deadline away from both ends of its half, so that no run meets a time of which its policy was chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from shoal.errors import UsageError
from shoal.sizing.availability import Floats
from shoal.sizing.plan.problem import Pool, Problem, Servers
from shoal.sizing.plan.work import StepWork
from shoal.sizing.simulate.policies import Policy, Shoal, View, spot_workers
from shoal.sizing.simulate.replay import Replayed, Supply, replay, step_of, supply
from shoal.sizing.simulate.scenario import Scenario, scenario_of
from shoal.sizing.simulate.summary import run
from shoal.sizing.simulate.traces import Trace, read_trace

__all__ = ["NAMES", "TRACES", "bounded", "least_on_demand", "rehearse", "short"]

Ints = NDArray[np.int64]

TRACES = Path(__file__).parents[1] / "tests" / "data" / "traces"
NAMES = ("aws-p2-xlarge-89-hours.csv", "aws-p3-2xlarge-32-nodes.csv", "gcp-v100-24-hours.csv")
WORKERS, STEP, HOURS, SLACK = 16, 0.1, 0.3, 1.1
MEASURED_RUNS, CONFIDENCE = 300, 0.95

BLOCKS = 8
LEVELS = 5  # kinds of beginnings: by the part of the wanted nodes that is there
LENGTHS = 24
ENOUGH = 40  # windows of a kind, else all of them
RUNS = 200
LEAST = 6  # deadlines in a trace: in each half, one free at both ends and one in which runs begin
WORTH = 0.95
FLOORS = (0.0, 0.25, 0.5, 0.7)  # parts of the workers that are on-demand from the beginning


def least_on_demand(
    remaining: Any,
    *,
    rate: float,
    there: Any,
    left: float,
    startup: float,
    most: int,
    workers: int,
    waiting: Any = 0.0,
    spot: Any = 0.0,
) -> NDArray[np.int64]:
    """The least number of on-demand workers, from now to the deadline, that does the remaining work; at most `most`.

    Scalars, or arrays over runs (r,).

    Args:
        remaining: steps.
        rate: steps/s of one worker.
        there: on-demand workers that work or start.
        left: seconds to the deadline.
        startup: seconds until a new on-demand worker works (take a high quantile of it).
        most: the most on-demand workers.
        workers: the most workers in all: spot makes room for on-demand.
        waiting: worker-seconds until those that start will work.
        spot: mean spot workers at work until the deadline that are counted on; 0: none.

    """
    number = np.arange(most + 1.0)
    have, low = np.asarray(there, dtype=np.float64)[..., None], np.asarray(spot, dtype=np.float64)[..., None]
    steady = (
        number * left - np.maximum(number - have, 0.0) * min(startup, left) - np.asarray(waiting)[..., None]
    )
    done = rate * (steady + np.minimum(low, workers - number) * left)
    enough = done >= np.asarray(remaining, dtype=np.float64)[..., None]
    return np.asarray(np.where(enough.any(axis=-1), enough.argmax(axis=-1), most), dtype=np.int64)


class Forecast:
    """Quantiles of the mean number of spot workers, at most `most`, over times up to `horizon` steps of the replay."""

    def __init__(self, source: Supply, most: int, horizon: int, quantile: float) -> None:
        self._lengths = np.unique(np.geomspace(1, max(horizon, 2), LENGTHS).astype(int))
        self._trace, self._most = source.trace, max(most, 1)
        self._block = source.offset * BLOCKS // source.lengths[source.trace]
        self._table = np.empty((len(source.there), BLOCKS, len(self._lengths), LEVELS))
        for number, size in enumerate(source.lengths):
            nodes = np.minimum(source.there[number, :size], most).astype(np.float64)
            for block in range(BLOCKS):
                outside = _outside(int(size), block, horizon)
                for row, length in enumerate(self._lengths):
                    self._table[number, block, row] = self._quantiles(nodes, outside, int(length), quantile)

    def low(self, steps: int, present: Floats) -> Floats:
        """(r,) mean spot workers over the next `steps` that are there at least with the confidence."""
        row = min(int(np.searchsorted(self._lengths, max(steps, 1))), len(self._lengths) - 1)
        return np.asarray(self._table[self._trace, self._block, row, self._level(present)])

    def _level(self, present: Floats) -> NDArray[Any]:
        return np.asarray(np.minimum((present / self._most * (LEVELS - 1)).astype(int), LEVELS - 1))

    def _quantiles(self, nodes: Floats, outside: NDArray[Any], length: int, quantile: float) -> Floats:
        twice = np.concatenate([[0.0], np.cumsum(np.concatenate([nodes, nodes]))])
        times = max(min(length, len(nodes)), 1)
        means = (twice[times : times + len(nodes)] - twice[: len(nodes)]) / times
        known, level = means[outside], self._level(nodes)[outside]
        found = np.empty(LEVELS)
        for kind in range(LEVELS):
            alike = known[level == kind]
            found[kind] = np.quantile(alike if len(alike) >= ENOUGH else known, quantile)
        return found


def _outside(size: int, block: int, horizon: int) -> NDArray[Any]:
    """(size,) whether a window of `horizon` that begins there stays clear of runs that begin in the block."""
    first, last = block * size // BLOCKS, (block + 1) * size // BLOCKS + horizon
    at = np.arange(size)
    inside = ((at - first + horizon) % size) < (last - first + horizon)
    return ~inside if (~inside).sum() >= size // 8 else ((at - first) % size) >= (last - first - horizon)


class Confident:
    """All available spot, and the fewest on-demand workers that keep the deadline with a stated confidence.

    Counts on what spot does at least with that confidence (`low`, given steps to the deadline and the spot workers of
    each run), where the safety rule counts on none. A part `floor` of the workers is on-demand from the beginning.
    """

    def __init__(self, low: Callable[[int, Floats], Floats], floor: float = 0.0) -> None:
        self._low, self._floor = low, floor
        self._idle: Floats | None = None
        self._careful = Shoal()

    def __call__(self, view: View) -> tuple[Ints, Ints]:
        """Spot, and the fewest on-demand workers."""
        scenario, there = view.scenario, view.on_demand + view.starting
        if self._idle is None:
            self._idle = np.zeros(len(there))
        left = max(view.left - view.step, 0.0)  # the work of a step counts at its end
        wanted = least_on_demand(
            view.remaining,
            rate=scenario.sure_rate,
            there=there,
            left=left,
            startup=view.startup + view.step,
            most=scenario.most_on_demand,
            workers=scenario.workers,
            waiting=view.starting_wait,
            spot=np.minimum(
                self._low(int(left / view.step), view.spot_there.astype(np.float64)), scenario.most_spot
            ),
        )
        wanted = np.maximum(wanted, round(self._floor * scenario.most_on_demand))
        # Where the safety rule asks for less, it is enough: it counts on no spot at all.
        wanted = np.minimum(wanted, self._careful(view)[1])
        self._idle = np.where(wanted < there, self._idle + view.step, 0.0)
        keep = (wanted < there) & (self._idle < view.startup + view.step)
        on_demand = np.clip(np.where(keep, there, wanted), scenario.base, scenario.most_on_demand)
        return spot_workers(view, on_demand), on_demand


class Rehearsed:
    """Runs that begin in one half of their trace use the policy that was chosen on the other half."""

    def __init__(self, second: NDArray[Any], policies: tuple[Policy, Policy]) -> None:
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


def short(hours: float = HOURS, slack: float = SLACK) -> Scenario:
    """A job of so many hours, with little slack."""
    spot = Pool("spot", WORKERS, 0.9, STEP, 128, startup_seconds=180)
    steady = Pool("steady", WORKERS, 3.0, STEP, 128, spot=False, startup_seconds=180)
    work = StepWork(steps=hours * 3600 * WORKERS / STEP)
    return scenario_of(Problem((spot, steady), work, Servers(price=0.2), max_workers=WORKERS), slack=slack)


def bounded(scenario: Scenario, trace: Trace, confidence: float, *, runs: int, seed: int = 0) -> Replayed:
    """What the policy of a stated confidence does."""
    source = supply([trace], step_of(scenario), runs, np.random.default_rng(seed), scenario.spot.limit)
    return replay(scenario, rehearse(scenario, source, confidence, seed)(), source, seed)


def main() -> None:
    """Print the table."""
    table = Table("trace", "safety rule", f"with {CONFIDENCE:.0%}", "in time", title=__doc__.splitlines()[0])
    scenario = short()
    for name in NAMES:
        trace = read_trace(TRACES / name)
        known = run(scenario, [trace], runs=MEASURED_RUNS)
        safe, dear = (known.outcome(policy).cost["mean"] or 0.0 for policy in ("shoal", "on-demand only"))
        ours = bounded(scenario, trace, CONFIDENCE, runs=MEASURED_RUNS)
        in_time = np.mean(ours.finish <= scenario.deadline)
        table.add_row(name, f"{safe / dear:.2f}", f"{np.mean(ours.cost) / dear:.2f}", f"{in_time:.0%}")
    Console().print(table)


if __name__ == "__main__":
    main()
