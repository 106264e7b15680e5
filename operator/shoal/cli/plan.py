"""`shoal plan`: files, or what the cluster has, in; an explanation, tables and plots out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from shoal.cli.cluster import cluster_command, emit
from shoal.cli.inputs import read_offers, read_planned, with_traces
from shoal.cli.options import (
    Files,
    Limits,
    Output,
    files_options,
    limits_options,
    output_options,
    trace_option,
)
from shoal.cli.values import Count
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.sizing.fleet.problems import JobProblem
    from shoal.sizing.fleet.values import FleetJob
    from shoal.sizing.plan.answer import Plan

__all__ = ["NO_PLAN", "plan", "show"]

NO_PLAN = 3
"""Exit code if no plan meets the limits: a pipeline must not continue with the plan that is shown."""


@click.command()
@files_options("CapacityPools (YAML).")
@limits_options(" Replaces that of the job.")
@click.option(
    "--max-servers",
    type=Count(1, 64),
    help="The most parameter servers.  [default: the limit of their pool, at most 8]",
)
@trace_option
@output_options("Write the Pareto front of time and cost to this PNG file.")
@cluster_command
def plan(
    client: Client,
    files: Files,
    limits: Limits,
    max_servers: int | None,
    traces: Sequence[str],
    output: Output,
) -> None:
    """Find the cheapest nodes that meet a deadline, or the fastest for a budget.

    docs/planning.md explains the files, docs/planning-model.md the formulas.

    Exit code: 0 with a plan; 3 if no plan meets deadline and budget (the fastest one is shown); 2 for invalid input.
    """
    from shoal.sizing.plan import planner

    read = [read_planned(client, job, files, limits, max_servers=max_servers) for job in files.jobs]
    jobs = [(job, replace(one, problem=with_traces(one.problem, traces))) for job, one in read]
    if len(jobs) > 1:
        _show_together(client, files, jobs, output)
        return
    show(planner.plan(jobs[0][1].problem), output)


def _show_together(
    client: Client, files: Files, asked: Sequence[tuple[FleetJob, JobProblem]], output: Output
) -> None:
    """Plan jobs that share the pools as the operator does, and print all plans."""
    from shoal.sizing.fleet.planner import plan_problems
    from shoal.sizing.fleet.resources import fleet_pool
    from shoal.sizing.plan.explain import explain, money
    from shoal.sizing.plan.manifests import read_job

    if output.plot is not None:
        raise UsageError("--plot is for one job: give -f once, or leave --plot out")
    names = [read_job(path).metadata.name for path in files.jobs]
    plans = plan_problems([fleet_pool(pool) for pool in read_offers(client, files)], asked)
    cost = sum(plan.cost for plan in plans if any(plan.counts))
    reasons = [
        explain(plan, output.currency) if any(plan.counts) else "The other jobs leave no node for it."
        for plan in plans
    ]
    if output.format != "table":
        jobs = [
            {"name": name, **plan.as_json(words)}
            for name, plan, words in zip(names, plans, reasons, strict=True)
        ]
        for job, plan in zip(jobs, plans, strict=True):
            job["counts"] = {pool.name: n for pool, n in zip(plan.pools, plan.counts, strict=True)}
        emit({"jobs": jobs, "cost": cost}, output.format)
    else:
        for name, words in zip(names, reasons, strict=True):
            click.echo(f"{name}: {words}")
        click.echo(f"Together they cost {money(cost, output.currency)}.")
    if not all(plan.feasible for plan in plans):
        click.get_current_context().exit(NO_PLAN)


def show(answer: Plan, output: Output) -> None:
    """Print and plot a plan; exit with `NO_PLAN` if it does not meet the limits."""
    from shoal.sizing.plan.explain import explain

    reason = explain(answer, output.currency)
    if output.plot is not None:
        from shoal.cli import plots

        plots.write_front(answer, output.plot, output.currency)
    if output.format != "table":
        emit(answer.as_json(reason), output.format)
    else:
        from shoal.cli import views

        views.show_plan(answer, reason, output.currency)
    if not answer.feasible:
        click.get_current_context().exit(NO_PLAN)
