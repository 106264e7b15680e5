"""`shoal explain JOB`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from shoal.cli.cluster import JOB, Format, cluster_command, console, emit, output_option
from shoal.errors import ClusterError

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.client.api import Json


@click.command()
@JOB
@output_option
@cluster_command
def explain(client: Client, *, name: str, output: Format) -> None:
    """Why a job is pending, slow or costly, and what would help."""
    from shoal.client.explain import Seen
    from shoal.client.explain import explain as found_in

    job = client.job(name)
    pods: list[Json] = []
    unread = ""
    try:
        pods = job.pods()
    except ClusterError as error:
        unread = str(error)
    findings = found_in(Seen(job.seen, pods, client.api.now(), unread))
    if output != "table":
        emit([dataclasses.asdict(each) for each in findings], output)
        return
    from rich.text import Text

    screen = console()
    if not findings:
        screen.print(
            f"{name} is {job.seen.status.phase or 'new'}, and nothing about it needs an explanation."
        )
    for each in findings:
        screen.print(Text.assemble((f"{each.topic:<8} ", "bold"), each.why))
        if each.help:
            screen.print(Text.assemble(" " * 9, ("try: ", "green"), each.help))
