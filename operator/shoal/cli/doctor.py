"""`shoal doctor`. Exit code 1 if something is broken."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from shoal.cli.cluster import Format, cluster_command, console, emit, output_option

if TYPE_CHECKING:
    from shoal.client import Client

STYLES = {"ok": "green", "warning": "yellow", "broken": "bold red", "unknown": "dim"}


@click.command()
@output_option
@cluster_command
def doctor(client: Client, *, output: Format) -> None:
    """Check the cluster: what is missing for jobs to run, and what to do."""
    from rich.text import Text

    from shoal.client.doctor import diagnose, read

    checks = diagnose(read(client.api))
    if output != "table":
        emit([dataclasses.asdict(each) for each in checks], output)
    else:
        screen = console()
        for each in checks:
            screen.print(
                Text.assemble((f"{each.state:<8} ", STYLES[each.state]), f"{each.name:<13} {each.message}")
            )
            if each.help:
                screen.print(Text.assemble(" " * 23, ("try: ", "green"), each.help))
    raise click.exceptions.Exit(any(each.state == "broken" for each in checks))
