"""The revocations of a pool measured in a trace, for the planner: rate, lifetimes and shocks."""

from __future__ import annotations

import dataclasses

import numpy as np

from shoal.errors import UsageError
from shoal.sizing.plan.problem import Problem
from shoal.sizing.predict.lifetimes import Lifetimes
from shoal.sizing.simulate.traces import Trace

__all__ = ["with_trace"]

TOGETHER = 300.0
"""Losses within this many seconds of each other are one shock."""


def with_trace(problem: Problem, pool: str, trace: Trace) -> Problem:
    """The problem with the revocations of one pool taken from the trace."""
    names = [p.name for p in problem.pools]
    if pool not in names:
        raise UsageError(
            f"--trace names the pool {pool}, which is not among {', '.join(names)}: correct the name"
        )
    end = max(trace.span, 1.0)
    lost = np.isfinite(trace.ends)
    ended = np.where(lost, trace.ends, end)
    lived = np.maximum(ended - trace.begins, 1.0)
    if len(lived) == 0:
        raise UsageError(f"the trace {trace.name} has no nodes: give another one for the pool {pool}")
    before = problem.pools[names.index(pool)]
    lifetimes = Lifetimes(prior_per_hour=before.interruptions_per_hour).fit(lived, lost, ended, TOGETHER)
    hours = float(lived.sum()) / 3600
    rate = float(lost.sum()) / hours
    share = 0.0
    if rate > 0 and lifetimes.shock_per_hour > 0:
        share = min(1.0, lifetimes.shock_per_hour * lifetimes.shock_share / rate)
    after = dataclasses.replace(
        before,
        interruptions_per_hour=rate,
        shock_share=share,
        shock_size=lifetimes.shock_share if share else before.shock_size,
        lifetimes=lifetimes,
    )
    note = (
        f"In {hours:.0f} node-hours of {trace.name}, {int(lost.sum())} nodes of {pool} were revoked: "
        f"{rate:.2g} per node and hour."
    )
    pools = tuple(after if p.name == pool else p for p in problem.pools)
    return dataclasses.replace(problem, pools=pools, notes=(*problem.notes, note))
