"""`shoal list`, and `shoal top`: the same table, live, the fastest first."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import click

from shoal.cli.cluster import Command, Format, cluster_command, console, emit, output_option
from shoal.errors import Unavailable
from shoal.words import number

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shoal.api.training_job import TrainingJob
    from shoal.client import Client

EVERY = 2.0
"""Seconds between two readings of a live table."""


def _table_options(command: Command) -> Command:
    everywhere = click.option("-A", "--all-namespaces", is_flag=True, help="Of all namespaces.")
    return output_option(everywhere(command))


@click.command("list")
@click.option("-w", "--watch", is_flag=True, help="Live, in a terminal.")
@_table_options
@cluster_command
def list_jobs(client: Client, *, all_namespaces: bool, watch: bool, output: Format) -> None:
    """The jobs, one in a line."""
    _show(client, all_namespaces, output, every=EVERY if watch else None)


@click.command()
@click.option("--every", default=EVERY, show_default=True, type=click.FloatRange(0.5), metavar="SECONDS")
@click.option("--once", is_flag=True, help="Print it once; so it is where the output is no terminal.")
@_table_options
@cluster_command
def top(client: Client, *, all_namespaces: bool, every: float, once: bool, output: Format) -> None:
    """All jobs, live: those that train first, the fastest at the top."""
    _show(client, all_namespaces, output, every=None if once else every, fastest_first=True)


def _show(
    client: Client, everywhere: bool, output: Format, *, every: float | None, fastest_first: bool = False
) -> None:
    """Print the jobs, and go on every so many seconds where that is given and the output is a terminal."""
    from rich.live import Live

    from shoal.client.view import job_table

    def read() -> list[TrainingJob]:
        jobs = [job.seen for job in client.list(all_namespaces=everywhere, cached=every is not None)]
        return sorted(jobs, key=_fastest) if fastest_first else jobs

    found, screen = read(), console()
    if output != "table":
        emit([job.model_dump(mode="json", by_alias=True, exclude_none=True) for job in found], output)
    elif every is not None and screen.is_terminal:

        def table(jobs: list[TrainingJob]) -> RenderableType:  # what no line is there for costs nothing
            return job_table(jobs[: screen.height], namespaces=everywhere, now=client.api.now())

        with Live(table(found), console=screen, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every)
                with contextlib.suppress(
                    Unavailable
                ):  # while the API server is away, what it said last is shown
                    live.update(table(read()), refresh=True)
    elif found:
        screen.print(job_table(found, namespaces=everywhere, now=client.api.now()))
    else:
        where = "any namespace" if everywhere else f"the namespace {client.namespace}"
        click.echo(f"no jobs in {where}", err=True)


def _fastest(job: TrainingJob) -> tuple[bool, float, str]:
    return job.status.finished, -(number(job.status.training.samples_per_second) or 0.0), job.metadata.name
