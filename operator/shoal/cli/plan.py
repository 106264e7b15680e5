"""`shoal plan`: files in, an explanation, tables and plots out. It does not contact a cluster."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from shoal.cli.inputs import read_problem, with_traces
from shoal.cli.options import (
    Files,
    Limits,
    Output,
    files_options,
    limits_options,
    output_options,
    trace_option,
)

if TYPE_CHECKING:
    from shoal.sizing.plan.planner import Plan

__all__ = ["NO_PLAN", "plan", "show"]

NO_PLAN = 3
"""Exit code if no plan meets the limits: a pipeline must not continue with the plan that is shown."""


@click.command()
@files_options("CapacityPools (YAML).")
@limits_options(" Replaces that of the job.")
@click.option(
    "--max-servers",
    type=click.IntRange(1, 64),
    help="The most parameter servers.  [default: the limit of their pool, at most 8]",
)
@trace_option
@output_options("Write the Pareto front of time and cost to this PNG file.")
def plan(
    files: Files, limits: Limits, max_servers: int | None, traces: Sequence[str], output: Output
) -> None:
    """Find the cheapest nodes that meet a deadline, or the fastest for a budget.

    docs/planning.md explains the files and the formulas.

    Exit code: 0 with a plan; 3 if no plan meets deadline and budget (the fastest one is shown); 2 for invalid input.
    """
    from shoal.sizing.plan import planner

    problem = read_problem(files.jobs[0], files, limits, max_servers=max_servers)
    show(planner.plan(with_traces(problem, traces)), output)


def show(answer: Plan, output: Output) -> None:
    """Print and plot a plan; exit with `NO_PLAN` if it does not meet the limits."""
    from shoal.sizing.plan.explain import explain

    reason = explain(answer, output.currency)
    if output.plot is not None:
        from shoal.cli import plots

        plots.write_front(answer, output.plot, output.currency)
    if output.as_json:
        click.echo(json.dumps(answer.as_json(reason), indent=1, allow_nan=False))
    else:
        from shoal.cli import views

        views.show_plan(answer, reason, output.currency)
    if not answer.feasible:
        click.get_current_context().exit(NO_PLAN)
