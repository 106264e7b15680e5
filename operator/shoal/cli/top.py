"""`shoal top`: all jobs, live."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import click

from shoal.cli.cluster import Format, cluster_command, console, emit, output_option
from shoal.errors import Unavailable

if TYPE_CHECKING:
    from shoal.client import Client


@click.command()
@click.option("-A", "--all-namespaces", is_flag=True, help="Of all namespaces.")
@click.option("--every", default=2.0, show_default=True, type=click.FloatRange(0.5), metavar="SECONDS")
@click.option("--once", is_flag=True, help="Print it once; so it is where the output is no terminal.")
@output_option
@cluster_command
def top(client: Client, *, all_namespaces: bool, every: float, once: bool, output: Format) -> None:
    """All jobs, live: those that train first, the fastest at the top."""
    from rich.live import Live

    from shoal.api.training_job import TrainingJob
    from shoal.client.view import job_table

    def read() -> list[TrainingJob]:
        return sorted(
            (job.seen for job in client.list(all_namespaces=all_namespaces, cached=True)), key=_order
        )

    if output != "table":
        emit([job.model_dump(mode="json", by_alias=True, exclude_none=True) for job in read()], output)
        return
    screen = console()
    if once or not screen.is_terminal:
        screen.print(job_table(read(), namespaces=all_namespaces))
        return
    with Live(
        job_table(read(), namespaces=all_namespaces), console=screen, screen=True, auto_refresh=False
    ) as live:
        while True:
            time.sleep(every)
            with contextlib.suppress(Unavailable):  # while the API server is away, what it said last is shown
                live.update(job_table(read(), namespaces=all_namespaces), refresh=True)


def _order(job: object) -> tuple[bool, float, str]:
    from shoal.api.training_job import TrainingJob

    assert isinstance(job, TrainingJob)
    speed = float(job.status.training.samples_per_second or 0)
    return job.status.finished, -speed, job.metadata.name
