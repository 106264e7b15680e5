"""`shoal simulate`: replay revocation traces and compare policies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from shoal.cli.cluster import cluster_command, emit
from shoal.cli.inputs import read_planned, read_traces
from shoal.cli.options import FILE, Files, Limits, Output, files_options, output_options
from shoal.cli.values import SECONDS, Count
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.sizing.simulate.summary import Result

__all__ = ["simulate"]

MOST_SECONDS = 100 * 86400


@click.command()
@files_options("CapacityPools (YAML), at least one spot and one on-demand pool.")
@click.option(
    "--trace",
    "traces",
    required=True,
    multiple=True,
    type=FILE,
    help="A revocation trace (CSV or JSON, docs/simulate.md). The runs are divided among several traces.",
)
@click.argument("more_traces", nargs=-1, type=FILE, metavar="[TRACE]...")
@click.option("--runs", type=Count(1, 100_000), default=1000, show_default=True, help="Simulated runs.")
@click.option("--slack", type=float, help="Deadline as a multiple of the time on on-demand nodes only.")
@click.option(
    "--deadline", type=SECONDS, metavar="TIME", help="Seconds, or 30m, 2h. Replaces the deadline of the job."
)
@click.option("--workers", type=Count(1, 10_000), help="Workers at a time. Replaces the job's maxReplicas.")
@click.option(
    "--seed", type=Count(0), default=0, show_default=True, help="Seed of the random offsets into the traces."
)
@output_options("Write workers over time, finish times and costs to this PNG file.")
@cluster_command
def simulate(
    client: Client,
    files: Files,
    traces: tuple[Path, ...],
    more_traces: tuple[Path, ...],
    runs: int,
    slack: float | None,
    deadline: int | None,
    workers: int | None,
    seed: int,
    output: Output,
) -> None:
    """Replay revocation traces and compare policies by finish time and cost.

    The policy "shoal" is two rules for one spot and one on-demand pool, not the operator's planning: that plans all
    jobs on all pools, from learned speeds and with a confidence. What its engine promises for one spot pool,
    `shoal calibrate` tests.
    """
    from shoal.sizing.simulate import summary
    from shoal.sizing.simulate.scenario import scenario_of

    if slack is not None and deadline is not None:
        raise UsageError("give --slack or --deadline, not both")
    if len(files.jobs) > 1:
        raise UsageError("the simulation is of one job: give -f once")
    limits = Limits(deadline, None, None, None)
    _, one = read_planned(client, files.jobs[0], files, limits, job_deadline=slack is None)
    scenario = scenario_of(one.problem, workers=workers, slack=slack)
    if scenario.deadline > MOST_SECONDS:
        raise UsageError(
            f"the deadline is {scenario.deadline:.0f} s: more than 100 days are not simulated. Change --deadline, "
            "--slack or elasticity.objective.deadlineSeconds"
        )
    sources = read_traces([*traces, *more_traces])
    _show(summary.run(scenario, sources, runs=runs, seed=seed), output)


def _show(result: Result, output: Output) -> None:
    from shoal.sizing.simulate import summary

    reason = summary.explain(result, output.currency)
    if output.plot is not None:
        from shoal.cli import plots

        plots.write_simulation(result, output.plot, output.currency)
    if output.format != "table":
        emit(result.as_json(reason), output.format)
        return
    from shoal.cli import views

    views.show_simulation(result, reason, output.currency)
