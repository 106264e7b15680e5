"""`shoal calibrate`: whether the promises of plans are kept on your own traces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from shoal.cli.cluster import cluster_command, emit
from shoal.cli.inputs import read_planned, read_traces
from shoal.cli.options import FILE, Files, Limits, Output, files_options, output_options
from shoal.cli.values import Count
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.client import Client

__all__ = ["calibrate"]


@click.command()
@files_options("CapacityPools (YAML): the cheapest spot and on-demand pool for their speed are used.")
@click.option(
    "--trace",
    "traces",
    required=True,
    multiple=True,
    type=FILE,
    help="A trace of the spot pool (CSV or JSON, docs/simulate.md). Repeat it for several.",
)
@click.argument("more_traces", nargs=-1, type=FILE, metavar="[TRACE]...")
@click.option("--confidence", type=float, default=0.95, show_default=True, help="What is promised.")
@click.option("--seed", type=Count(0), default=0, show_default=True, help="Seed of the simulated runs.")
@output_options("Write what was kept, by trace and time to the deadline, to this PNG file.")
@cluster_command
def calibrate(
    client: Client,
    files: Files,
    traces: tuple[Path, ...],
    more_traces: tuple[Path, ...],
    confidence: float,
    seed: int,
    output: Output,
) -> None:
    """Test on recorded traces whether plans keep their deadlines as often as they promise.

    Plans are made from a part of each trace and replayed on the part that was left out (docs/simulate.md).
    """
    from shoal.sizing.plan.problem import MOST_CONFIDENCE
    from shoal.sizing.simulate.calibrate import calibrate as run
    from shoal.sizing.simulate.scenario import pair_of

    if len(files.jobs) > 1:
        raise UsageError("the calibration is of one job: give -f once")
    if not 0.5 <= confidence <= MOST_CONFIDENCE:
        raise UsageError(
            f"--confidence must be at least 0.5 and at most {MOST_CONFIDENCE:g}, which is the most that the simulated "
            f"runs can promise, not {confidence:.9g}"
        )
    _, one = read_planned(client, files.jobs[0], files, Limits(None, None, None, None), job_deadline=False)
    spot, on_demand = pair_of(one.problem)
    found = run(
        spot,
        on_demand,
        read_traces([*traces, *more_traces]),
        confidence=confidence,
        seed=seed,
    )
    if output.plot is not None:
        from shoal.cli import plots

        plots.write_calibration(found, output.plot)
    if output.format != "table":
        emit(found.as_json(), output.format)
        return
    windows = sum(cell.n for cell in found.cells)
    click.echo(
        f"Of {len(found.cells)} kinds of plans, each promised {100 * found.promised:.3g}%, {found.kept:.1%} were kept "
        f"in the mean of the kinds (95 % interval {found.low:.1%} to {found.high:.1%}), in {windows:,} left-out "
        "windows."
    )
    click.echo(
        f"{'trace':<36}{'hours':>6}{'workers':>9}{'on-demand':>11}{'slack':>7}{'kept':>8}{'windows':>9}"
    )
    for cell in found.cells:
        hours = cell.seconds / 3600
        click.echo(
            f"{cell.trace[:35]:<36}{hours:>6.2g}{cell.workers:>9}{cell.on_demand:>11}{cell.slack:>7.2f}"
            f"{cell.kept:>8.1%}{cell.n:>9}"
        )
