"""Simulated runs of one plan, for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.sizing.availability import Floats
from shoal.sizing.plan import Problem
from shoal.sizing.plan.elastic import ElasticModel
from shoal.sizing.plan.engine import RUNS
from shoal.sizing.plan.risk import Engines


def finish_times(
    problem: Problem, counts: Sequence[int], servers: int, runs: int = RUNS, seed: int = 0
) -> Floats:
    """(runs,) seconds until the work is done with a fixed plan that replaces lost workers."""
    model = ElasticModel(problem)
    engine = Engines(problem).until(model.seconds(counts, servers), runs=runs, seed=seed)
    return engine.run(counts, servers, model.zone(counts, servers)).finish


def chance(problem: Problem, counts: Sequence[int], servers: int) -> float:
    """The part of the runs in time."""
    assert problem.objective.deadline is not None
    return float(np.mean(finish_times(problem, counts, servers) <= problem.objective.deadline))
