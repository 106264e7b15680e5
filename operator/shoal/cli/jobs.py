"""`shoal status|follow|wait|logs|history|scale|suspend|resume|model|delete`: `shoal.client` as commands."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shoal.api.training_job_status import PHASES
from shoal.cli.cluster import JOB, Format, cluster_command, console, emit, output_option
from shoal.cli.values import SECONDS, Count
from shoal.errors import ClusterError
from shoal_trainer.contract import plain

if TYPE_CHECKING:
    from shoal.client import Client


@click.command()
@JOB
@output_option
@cluster_command
def status(client: Client, *, name: str, output: Format) -> None:
    """What happened to a job and why, in time order."""
    job = client.job(name)
    if output != "table":
        emit(job.seen.model_dump(mode="json", by_alias=True, exclude_none=True), output)
        return
    from rich.text import Text

    from shoal.client.story import moments
    from shoal.client.view import follow_view
    from shoal.words import age

    now = client.api.now()
    _print(follow_view(job.seen, now=now))
    events, pods = [], []
    with contextlib.suppress(ClusterError):  # a user may read jobs without these, or without one of them
        events = job.events()
    with contextlib.suppress(ClusterError):
        pods = job.pods()
    styles = {"warning": "yellow", "good": "green", "normal": ""}
    for moment in moments(job.seen, events, pods):
        text = Text.assemble((f"{age(moment.at, now):>9} ago  ", "dim"), (moment.what, styles[moment.kind]))
        _print(text)


@click.command()
@JOB
@cluster_command
def follow(client: Client, *, name: str) -> None:
    """A live table until the job is finished. Ctrl-C ends the table, not the job."""
    end(client.job(name).follow())


@click.command()
@JOB
@click.option(
    "--for",
    "phase",
    type=click.Choice(PHASES, case_sensitive=False),
    help="The phase to wait for.  [default: finished]",
)
@click.option(
    "--timeout", type=SECONDS, metavar="TIME", help="Give up with exit code 1: seconds, or 30m, 2h."
)
@cluster_command
def wait(client: Client, *, name: str, phase: str | None, timeout: float | None) -> None:
    """Block until the job has succeeded, or is in another phase, or beyond it."""
    click.echo(client.job(name).wait(phase, timeout=timeout).phase)


@click.command()
@JOB
@click.option(
    "--slot", type=int, metavar="N", help="A worker's slot. Default: parameter server 0, the coordinator."
)
@click.option("--ps", "role", flag_value="ps", help="--slot is a parameter server's shard.")
@click.option("--previous", is_flag=True, help="Of the pod or container before.")
@click.option("-f", "--follow", is_flag=True, help="Go on until the pod ends.")
@click.option("--tail", type=Count(0), metavar="N", help="Only the last N lines.")
@cluster_command
def logs(
    client: Client,
    *,
    name: str,
    slot: int | None,
    role: str | None,
    previous: bool,
    follow: bool,
    tail: int | None,
) -> None:
    """The log of one pod of the job."""
    job = client.job(name)
    for line in job.logs(slot, role=role or "worker", previous=previous, follow=follow, tail=tail):
        click.echo(line)


@click.command()
@JOB
@output_option
@cluster_command
def history(client: Client, *, name: str, output: Format) -> None:
    """Loss and metrics of each epoch."""
    found = client.job(name).history()
    if output != "table":
        emit(found.rows(), output)
        return
    from rich.table import Table

    from shoal.words import metric

    table = Table(
        "EPOCH", *(each.upper() for each in found.names), box=None, padding=(0, 2, 0, 0), header_style="bold"
    )
    for report in found:
        values = (report.metrics.get(each) for each in found.names)
        table.add_row(str(report.epoch + 1), *map(metric, values))
    _print(table) if len(found) else click.echo("no epoch is complete yet", err=True)


@click.command()
@JOB
@click.argument("workers", type=Count(0, 1000))
@cluster_command
def scale(client: Client, *, name: str, workers: int) -> None:
    """Change the number of workers while training continues."""
    client.job(name).scale(workers)
    click.echo(f"{name} wants {workers} workers")


@click.command()
@JOB
@cluster_command
def suspend(client: Client, *, name: str) -> None:
    """Stop all pods after a final snapshot."""
    client.job(name).suspend()
    click.echo(f"{name} stops after a final snapshot; shoal resume {name} continues it")


@click.command()
@JOB
@cluster_command
def resume(client: Client, *, name: str) -> None:
    """Continue a suspended job from its snapshot."""
    client.job(name).resume()
    click.echo(f"{name} continues")


@click.command()
@JOB
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@cluster_command
def model(client: Client, *, name: str, folder: Path) -> None:
    """Download the trained model into FOLDER."""
    click.echo(client.job(name).model(folder))


@click.command()
@JOB
@click.option("--yes", is_flag=True, help="Do not ask.")
@cluster_command
def delete(client: Client, *, name: str, yes: bool) -> None:
    """Delete a job and its pods. What is in the storage stays."""
    job = client.job(name)
    question = f"delete {name} in {job.namespace}, which is {plain(job.phase)}? (--yes does not ask)"
    if not yes:
        click.confirm(question, abort=True)
    job.delete()
    click.echo(f"{name} is deleted")


def end(ended: Any) -> None:
    """Print how a job ended; exit code 1 if it failed."""
    if ended.output:
        click.echo(f"the model is in {plain(ended.output.uri)}")
    if ended.phase == "Failed":
        from shoal.client.job import JobFailed, reason_of

        raise JobFailed(f"the job has failed: {reason_of(ended)}")


def _print(what: Any) -> None:
    console().print(what)
