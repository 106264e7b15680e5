"""From the options of a command to a problem for the planner."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shoal.errors import ClusterError, UsageError

if TYPE_CHECKING:
    from shoal.api.capacity_pool import CapacityPool
    from shoal.api.speed_profile import SpeedProfile
    from shoal.cli.options import Files, Limits
    from shoal.client import Client
    from shoal.sizing.fleet.problems import JobProblem
    from shoal.sizing.fleet.values import FleetJob
    from shoal.sizing.plan.problem import Problem
    from shoal.sizing.simulate.traces import Trace

__all__ = ["read_offers", "read_planned", "read_traces", "with_traces"]

T = TypeVar("T")


def read_planned(
    client: Client,
    job: Path,
    files: Files,
    limits: Limits,
    *,
    job_deadline: bool = True,
    max_servers: int | None = None,
) -> tuple[FleetJob, JobProblem]:
    """The job as the operator plans it, and its problem, by the files, and by the cluster where they lack.

    The limits of the command line replace the job's. `job_deadline`: whether the deadline of the job counts.
    """
    from shoal.sizing.plan.assemble import assembled
    from shoal.sizing.plan.manifests import profile_for, read_job, read_profiles

    read = read_job(job)
    namespace = read.metadata.namespace or None
    profiles = read_profiles(files.profiles) if files.profiles else cluster_profiles(client, namespace)
    profile = profile_for(read, profiles, str(files.profiles or "the cluster"))
    pools = read_offers(client, files)
    planned, one = assembled(
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
    wishes: dict[str, Any] = {"prefer": limits.prefer, "confidence": limits.confidence}
    said = {name: value for name, value in wishes.items() if value is not None}
    objective = dataclasses.replace(one.problem.objective, **said)
    return planned, dataclasses.replace(one, problem=dataclasses.replace(one.problem, objective=objective))


def read_offers(client: Client, files: Files) -> Sequence[CapacityPool]:
    """The CapacityPools of the files, or else of the cluster."""
    from shoal.sizing.plan.manifests import read_pools

    return read_pools(files.pools) if files.pools else cluster_pools(client)


def cluster_pools(client: Client) -> Sequence[CapacityPool]:
    """The CapacityPools of the cluster."""
    found = _or_files(client.pools)
    if not found:
        raise UsageError("the cluster has no CapacityPool: make one, or give a file with --pools")
    return found


def cluster_profiles(client: Client, namespace: str | None) -> Sequence[SpeedProfile]:
    """The SpeedProfiles of a namespace (None: the client's)."""
    found = _or_files(lambda: client.profiles(namespace))
    if not found:
        raise UsageError(
            "the namespace has no SpeedProfile: run a job of the model once, make one with spec.model, or give a file "
            "with --profiles"
        )
    return found


def _or_files(read: Callable[[], Sequence[T]]) -> Sequence[T]:
    try:
        return read()
    except ClusterError as error:
        words = str(error).rstrip(".")
        raise type(error)(f"{words}; or give files with --pools and --profiles") from error


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
