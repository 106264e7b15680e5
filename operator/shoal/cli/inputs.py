"""From the options of a command to a problem for the planner."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.cli.options import Files, Limits
    from shoal.sizing.plan.problem import Problem

__all__ = ["read_problem", "with_traces"]


def read_problem(
    job: Path, files: Files, limits: Limits, *, job_deadline: bool = True, max_servers: int | None = None
) -> Problem:
    """The problem of the files. The limits of the command line replace those of the job.

    `job_deadline`: whether the deadline of the job counts.
    """
    from shoal.sizing.plan.assemble import problem_of
    from shoal.sizing.plan.manifests import profile_for, read_job, read_pools, read_profiles
    from shoal.sizing.plan.work_left import seconds_left

    read, now = read_job(job), datetime.now(UTC)
    deadline = limits.deadline
    if deadline is None and job_deadline:
        deadline = seconds_left(read, now)
    profiles = read_profiles(files.profiles)
    profile = profile_for(read, profiles, str(files.profiles))
    pools = read_pools(files.pools)
    problem = problem_of(read, pools, profile, profiles, deadline=deadline, now=now, max_servers=max_servers)
    return dataclasses.replace(
        problem, objective=dataclasses.replace(problem.objective, **limits.set_values())
    )


def with_traces(problem: Problem, traces: Sequence[str]) -> Problem:
    """The problem with the revocations of traces given as POOL=FILE."""
    from shoal.sizing.simulate.measured import with_trace
    from shoal.sizing.simulate.traces import read_trace

    for trace in traces:
        name, found, path = trace.partition("=")
        if not found or not Path(path).is_file():
            raise UsageError(f"--trace must be POOL=FILE with a file that exists, not {trace!r}")
        problem = with_trace(problem, name, read_trace(Path(path)))
    return problem
