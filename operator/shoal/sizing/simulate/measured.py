"""The availability of a pool measured in a trace, for the planner: windows of it, and the rate of losses."""

from __future__ import annotations

import dataclasses

import numpy as np

from shoal.errors import UsageError
from shoal.sizing.availability import Markov, Windows
from shoal.sizing.plan.problem import Problem
from shoal.sizing.simulate.traces import Trace
from shoal.sizing.speed import priors

__all__ = ["windows_of", "with_trace"]

STEP = 60.0


def windows_of(traces: list[Trace], prior: Markov) -> Windows:
    """Windows of traces of one pool, and what was known of it without them."""
    binned = []
    for trace in traces:
        nodes, lost = trace.bins(min(STEP, max(trace.span, 1.0)))
        lost[0] = 0  # the wrap-around of a repeated trace is no loss
        binned.append((nodes.astype(np.float64), lost.astype(np.float64), min(STEP, max(trace.span, 1.0))))
    size = max(float(max(nodes.max() for nodes, _, _ in binned)), 1.0)
    return Windows(tuple(binned), size, prior)


def with_trace(problem: Problem, pool: str, trace: Trace) -> Problem:
    """The problem with the availability of one pool taken from the trace."""
    names = [p.name for p in problem.pools]
    if pool not in names:
        raise UsageError(
            f"--trace names the pool {pool}, which is not among {', '.join(names)}: correct the name"
        )
    if len(trace.begins) == 0:
        raise UsageError(f"the trace {trace.name} has no nodes: give another one for the pool {pool}")
    before = problem.pools[names.index(pool)]
    lost = int(np.isfinite(trace.ends).sum())
    hours = float((np.where(np.isfinite(trace.ends), trace.ends, trace.span) - trace.begins).sum()) / 3600
    # A short trace says little: the pool's own rate counts as 20 node-hours.
    rate = (before.interruptions_per_hour * priors.NODE_HOURS + lost) / (priors.NODE_HOURS + hours)
    rated = dataclasses.replace(before, interruptions_per_hour=rate)
    measured = windows_of([trace], rated.running_out())
    after = dataclasses.replace(rated, availability=measured)
    note = (
        f"In {hours:.0f} node-hours of {trace.name}, {lost} nodes of {pool} were revoked, and {measured.mean:.0%} of "
        f"{measured.size:.0f} nodes were there on average: the plan expects the same part of the pool's limit."
    )
    pools = tuple(after if p.name == pool else p for p in problem.pools)
    return dataclasses.replace(
        problem, pools=pools, notes=(*problem.notes, note, *filter(None, [trace.note]))
    )
