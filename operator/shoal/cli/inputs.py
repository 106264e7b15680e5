"""From the options of a command to a problem for the planner."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.api.capacity_pool import CapacityPool
    from shoal.api.speed_profile import SpeedProfile
    from shoal.cli.options import Files, Limits
    from shoal.sizing.plan.problem import Problem
    from shoal.sizing.simulate.traces import Trace

__all__ = ["read_problem", "read_traces", "with_traces"]


def read_problem(
    job: Path, files: Files, limits: Limits, *, job_deadline: bool = True, max_servers: int | None = None
) -> Problem:
    """The problem of the files. The limits of the command line replace those of the job.

    `job_deadline`: whether the deadline of the job counts.
    """
    from shoal.sizing.plan.assemble import problem_of
    from shoal.sizing.plan.manifests import profile_for, read_job, read_pools, read_profiles

    read = read_job(job)
    profiles = read_profiles(files.profiles) if files.profiles else cluster_profiles(read.metadata.namespace)
    profile = profile_for(read, profiles, str(files.profiles or "the cluster"))
    pools = read_pools(files.pools) if files.pools else cluster_pools()
    problem = problem_of(
        read,
        pools,
        profile,
        profiles,
        now=datetime.now(UTC),
        deadline=limits.deadline,
        budget=limits.budget,
        job_deadline=job_deadline,
        max_servers=max_servers,
    )
    return dataclasses.replace(
        problem, objective=dataclasses.replace(problem.objective, **limits.set_values())
    )


def cluster_pools() -> list[CapacityPool]:
    """The CapacityPools of the cluster that kubectl uses."""
    from shoal.api.capacity_pool import CapacityPool

    found = [CapacityPool.model_validate(_known(item)) for item in _listed("capacitypools")]
    if not found:
        raise UsageError("the cluster has no CapacityPool: make one, or give a file with --pools")
    return found


def cluster_profiles(namespace: str | None) -> list[SpeedProfile]:
    """The SpeedProfiles of a namespace (None: kubectl's) in the cluster that kubectl uses."""
    from shoal.api.speed_profile import SpeedProfile

    found = [
        SpeedProfile.model_validate(_known(item))
        for item in _listed("speedprofiles", namespaced=True, namespace=namespace)
    ]
    if not found:
        raise UsageError(
            "the namespace has no SpeedProfile: run a job of the model once, make one with spec.model, or give a file "
            "with --profiles"
        )
    return found


def _listed(plural: str, *, namespaced: bool = False, namespace: str | None = None) -> list[dict[str, Any]]:
    """The objects of a kind, of one namespace (None or empty: kubectl's) if it is `namespaced`."""
    from shoal.api.base import API_VERSION
    from shoal.client.api import Api
    from shoal.errors import ClusterError

    try:
        api = Api.connect()
        inside = f"namespaces/{namespace or api.namespace}/" if namespaced else ""
        return api.list(f"/apis/{API_VERSION}/{inside}{plural}")
    except ClusterError as error:
        raise UsageError(f"cannot read {plural} from the cluster: {error}; or give files") from error


def _known(item: dict[str, Any]) -> dict[str, Any]:
    """The parts of an object that its model has."""
    return {key: item[key] for key in ("apiVersion", "kind", "metadata", "spec", "status") if key in item}


def read_traces(paths: Sequence[Path]) -> list[Trace]:
    """The traces of these files; what is odd about them is told on stderr."""
    from shoal.sizing.simulate.traces import read_trace

    traces = [read_trace(path) for path in paths]
    for trace in traces:
        if trace.note:
            click.echo(f"note: {trace.note}", err=True)
    return traces


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
