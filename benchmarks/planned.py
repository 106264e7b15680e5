"""What the operator's own planning pays on recorded revocations, beside the policies of `shoal simulate`.

`python -m benchmarks.planned` replays the three traces in `tests/data/traces` with jobs of 18 minutes and a slack that
is shorter than a start-up, and prints what each policy pays over on-demand nodes alone, and how many deadlines it
keeps. The operator (`planning_policy.py`) knows the speeds, as the other policies do, and of the pool what jobs like
this one have counted in the other half of the trace. Other rows know less: a speed as that of another day, a new pool.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from benchmarks.bounded_risk import NAMES, TRACES, short
from benchmarks.planning_policy import planning
from shoal.sizing.simulate.replay import replay, step_of, supply
from shoal.sizing.simulate.summary import run
from shoal.sizing.simulate.traces import read_trace

__all__ = ["KINDS", "OURS", "Asked", "Figures", "figures"]

RUNS = 10
OURS = "the operator"
SHOWN = (OURS, "shoal", "uniform progress", "spot only", "oracle")


@dataclass(frozen=True)
class Asked:
    """A kind of job, and what the operator knows: the speed for certain, and the pool from jobs before."""

    hours: float
    slack: float
    sure: bool = True
    known: bool = True


KINDS = (
    Asked(0.3, 1.1),
    Asked(0.3, 1.1, sure=False),
    Asked(0.3, 1.1, known=False),
)


@dataclass(frozen=True)
class Figures:
    """By policy: what is paid over on-demand alone, and the part of the deadlines that is kept."""

    cost: dict[str, float]
    in_time: dict[str, float]
    seconds: float
    """Of processor time for one run of the operator."""


def figures(asked: Asked, name: str, runs: int, seed: int = 0) -> Figures:
    """All policies in the same runs of a trace."""
    scenario, trace = short(asked.hours, asked.slack), read_trace(TRACES / name)
    others = run(scenario, [trace], runs=runs, seed=seed)
    source = supply([trace], step_of(scenario), runs, np.random.default_rng(seed), scenario.spot.limit)
    began = time.process_time()
    ours = replay(scenario, planning(scenario, source, known=asked.known, sure=asked.sure), source, seed)
    took = time.process_time() - began
    cost = {each.name: each.cost["mean"] or 0.0 for each in others.outcomes} | {
        OURS: float(np.mean(ours.cost))
    }
    in_time = {each.name: each.kept for each in others.outcomes}
    in_time[OURS] = float(np.mean(ours.finish <= scenario.deadline))
    dear = cost["on-demand only"]
    return Figures({policy: paid / dear for policy, paid in cost.items()}, in_time, took / runs)


def main() -> None:
    """Print a line for each kind of job and trace."""
    print(f"| hours, slack, known | trace | {' | '.join(SHOWN)} | s a run |")
    for asked in KINDS:
        known = ("speed, pool" if asked.sure else "pool") if asked.known else "speed"
        for name in NAMES:
            found = figures(asked, name, RUNS)
            cells = (f"{found.cost[policy]:.2f}, {found.in_time[policy]:.0%}" for policy in SHOWN)
            line = f"| {asked.hours:g}, {asked.slack:g}, {known} | {name.removesuffix('.csv')} | {' | '.join(cells)} "
            print(f"{line}| {found.seconds:.2f} |", flush=True)


if __name__ == "__main__":
    main()
