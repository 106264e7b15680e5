"""Compare policies: finish times, costs, deadlines met, goodput, and a summary in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.errors import UsageError
from shoal.sizing.availability import Floats
from shoal.sizing.plan.explain import duration, money
from shoal.sizing.simulate.policies import POLICIES, Hindsight
from shoal.sizing.simulate.replay import Replayed, replay, step_of, supply
from shoal.sizing.simulate.scenario import Scenario
from shoal.sizing.simulate.traces import Trace

__all__ = ["Outcome", "Result", "explain", "run"]

Stats = dict[str, float | None]
POINTS = 120  # points of workers over time
ORACLE = "oracle"
SAME = 0.005  # costs that differ by less than this part count as equal


@dataclass(frozen=True)
class Outcome:
    """The outcome of one policy. A statistic is None if it includes a run that was given up."""

    name: str
    kept: float
    finish: Stats
    cost: Stats
    goodput: float
    on_demand_share: float
    unfinished: float
    workers_over_time: tuple[float, ...]
    finish_minutes: tuple[float, ...]
    costs: tuple[float, ...]


@dataclass(frozen=True)
class Result:
    """All policies over the same runs. `times` (s) belong to `workers_over_time`."""

    scenario: Scenario
    traces: tuple[str, ...]
    runs: int
    seed: int
    slack: float
    outcomes: tuple[Outcome, ...]
    times: tuple[float, ...]

    def outcome(self, name: str) -> Outcome:
        """The outcome of a policy."""
        return next(o for o in self.outcomes if o.name == name)

    def as_json(self, reason: str) -> dict[str, Any]:
        """The answer of `shoal simulate --json`."""
        scenario = self.scenario
        return {
            "runs": self.runs,
            "seed": self.seed,
            "traces": list(self.traces),
            "deadlineSeconds": scenario.deadline,
            "slack": self.slack,
            "workers": scenario.workers,
            "parameterServers": scenario.servers,
            "pools": {"spot": scenario.spot.name, "onDemand": scenario.on_demand.name},
            "policies": {
                o.name: {
                    "deadlinesKept": o.kept,
                    "finishSeconds": o.finish,
                    "cost": o.cost,
                    "goodput": o.goodput,
                    "onDemandShare": o.on_demand_share,
                    "unfinished": o.unfinished,
                    "workersOverTime": list(o.workers_over_time),
                }
                for o in self.outcomes
            },
            "timesSeconds": list(self.times),
            "reason": reason,
        }


def run(scenario: Scenario, traces: Sequence[Trace], *, runs: int = 1000, seed: int = 0) -> Result:
    """Replay every policy over the same runs."""
    if not traces:
        raise UsageError("the simulation needs at least one trace")
    step = step_of(scenario)
    source = supply(traces, step, runs, np.random.default_rng(seed), scenario.spot.nodes)
    replayed = {
        name: replay(scenario, make(), source, seed, on=name == "spot only")
        for name, make in POLICIES.items()
    }
    missing = np.maximum(scenario.work - replayed["spot only"].by_deadline, 0.0)
    knowing = replay(scenario, Hindsight(missing), source, seed)
    replayed[ORACLE] = best_of([knowing, *replayed.values()], scenario.deadline)
    busy = max(int(np.flatnonzero(r.workers).max(initial=0)) for r in replayed.values())
    shown = min(busy + 2, int(2 * scenario.deadline / step) + 1)
    every = max(1, -(-shown // POINTS))
    startup = max(scenario.on_demand.startup_seconds, scenario.problem.servers.startup_seconds)
    least = startup + scenario.work / float(scenario.speeds[0, -1])
    return Result(
        scenario=scenario,
        traces=tuple(trace.name for trace in traces),
        runs=runs,
        seed=seed,
        slack=scenario.deadline / least,
        outcomes=tuple(_outcome(name, r, scenario.deadline, shown, every) for name, r in replayed.items()),
        times=tuple(step * i for i in range(0, shown, every)),
    )


def best_of(tried: Sequence[Replayed], deadline: float) -> Replayed:
    """The cheapest attempt that is in time, chosen for each run with knowledge of the future."""
    late = 1e12 * np.array([np.minimum(r.finish, 1e9) * (r.finish > deadline) for r in tried])
    best = np.argmin(late + np.array([r.cost for r in tried]), axis=0)
    across = np.arange(len(best))
    chosen = {
        name: np.array([getattr(r, name) for r in tried])[best, across]
        for name in ("finish", "cost", "paid", "useful", "on_demand", "by_deadline")
    }
    longest = max(len(r.workers) for r in tried)
    workers = np.zeros(longest)
    for i, r in enumerate(tried):
        workers[: len(r.workers)] += r.workers * np.mean(best == i)
    return Replayed(**chosen, workers=workers)


def explain(result: Result, currency: str = "$") -> str:
    """A summary in a few sentences."""
    scenario, ours = result.scenario, result.outcome("shoal")
    on_demand, uniform, spot = (
        result.outcome(name) for name in ("on-demand only", "uniform progress", "spot only")
    )
    where = " and ".join(result.traces) if len(result.traces) < 3 else f"{len(result.traces)} traces"
    sentences = [
        f"{result.runs:,} runs of up to {scenario.workers} workers from {scenario.spot.name} and "
        f"{scenario.on_demand.name} through {where}, to a deadline of {duration(scenario.deadline)} "
        f"({result.slack:.2f} times what on-demand nodes alone take).",
        "The policy shoal (two rules at each step; the operator plans instead) kept "
        f"{_share(ours.kept)} of the deadlines for {_price(ours, currency)} on average: "
        f"{_compare(ours, on_demand)} on-demand nodes only, {_compare(ours, uniform)} uniform progress, which kept "
        f"{_share(uniform.kept)}.",
    ]
    cheaper = [
        o
        for o in result.outcomes
        if o.name not in ("shoal", ORACLE) and o.kept >= ours.kept and o.unfinished < 1 and _less(o, ours)
    ]
    if cheaper:
        best = min(cheaper, key=_mean)
        sentences.append(f"Cheaper and as often in time was here {best.name}, for {_price(best, currency)}.")
    if spot.kept < 1:
        sentences.append(
            f"With spot nodes only, {_share(1 - spot.kept)} of the runs would have been late"
            + (f" and {_share(spot.unfinished)} were given up." if spot.unfinished else ".")
        )
    else:
        sentences.append("Spot nodes alone were always in time here, so on-demand is only a safety net.")
    if ours.kept < 1 and result.slack < 1.2:
        sentences.append("The slack is too small to start on-demand nodes: allow a later deadline.")
    elif ours.kept < 1:
        sentences.append("Some deadlines were missed: raise the deadline or the limit of the on-demand pool.")
    return " ".join(sentences)


def _outcome(name: str, r: Replayed, deadline: float, shown: int, every: int) -> Outcome:
    finished = np.isfinite(r.finish)
    over_time = np.zeros(shown)
    over_time[: min(shown, len(r.workers))] = r.workers[:shown]
    return Outcome(
        name=name,
        kept=float(np.mean(r.finish <= deadline)),
        finish=_stats(r.finish),
        cost=_stats(r.cost),
        goodput=float(r.useful.sum() / max(r.paid.sum(), 1e-9)),
        on_demand_share=float(r.on_demand.sum() / max(r.paid.sum(), 1e-9)),
        unfinished=float(1 - np.mean(finished)),
        workers_over_time=tuple(float(w) for w in over_time[::every]),
        finish_minutes=tuple(float(f) / 60 for f in r.finish[finished]),
        costs=tuple(float(c) for c in r.cost),
    )


def _stats(values: Floats) -> Stats:
    """Mean and quantiles; None where they are infinite."""
    ordered = np.sort(values)
    at = {"p5": 0.05, "p50": 0.5, "p95": 0.95}
    found = {name: float(ordered[min(int(p * len(ordered)), len(ordered) - 1)]) for name, p in at.items()}
    found = {"mean": float(values.mean()), "min": float(ordered[0]), **found, "max": float(ordered[-1])}
    return {name: value if np.isfinite(value) else None for name, value in found.items()}


def _share(part: float) -> str:
    return "all" if part == 1 else f"{part:.1%}"


def _mean(outcome: Outcome) -> float:
    return outcome.cost["mean"] or 0.0


def _price(outcome: Outcome, currency: str) -> str:
    return money(_mean(outcome), currency)


def _less(one: Outcome, other: Outcome) -> bool:
    """Cheaper by more than `SAME`."""
    return _mean(one) < _mean(other) * (1 - SAME)


def _compare(ours: Outcome, other: Outcome) -> str:
    mine, theirs = _mean(ours), _mean(other)
    if theirs <= 0:
        return "next to"
    change = mine / theirs - 1
    if abs(change) < SAME:
        return "the same as"
    return f"{abs(change):.0%} {'less' if change < 0 else 'more'} than"
