"""`kubectl_complete-shoal`: kubectl calls it to complete `kubectl shoal …`, as it does for every plugin that has one.

Its arguments are the words so far, the last one unfinished. It prints the candidates, then a directive of cobra's.
"""

from __future__ import annotations

import sys

import click
from click.shell_completion import ShellComplete

from shoal.cli import main as shoal

FILES_TOO, NO_FILES = ":0", ":4"


def main() -> None:
    """Print what may follow."""
    *before, unfinished = sys.argv[1:] or [""]
    found = ShellComplete(shoal, {}, "shoal", "_SHOAL_COMPLETE").get_completions(before, unfinished)
    for item in found:
        if item.type == "plain":
            click.echo(item.value)
    click.echo(FILES_TOO if any(item.type != "plain" for item in found) else NO_FILES)
