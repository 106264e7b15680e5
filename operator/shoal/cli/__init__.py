"""The command line `shoal …`. It imports a subcommand only when that is called, so that `shoal --help` is instant."""

from __future__ import annotations

import importlib
import os
import sys
from io import TextIOWrapper
from typing import Any

import click

from shoal import __version__
from shoal.errors import UsageError

__all__ = ["main"]

# name -> (module, attribute, the line in the list of commands)
_COMMANDS = {
    "calibrate": ("shoal.cli.calibrate", "calibrate", "Test on traces whether plans keep their promises."),
    "delete": ("shoal.cli.jobs", "delete", "Delete a job and its pods."),
    "doctor": ("shoal.cli.doctor", "doctor", "Check the cluster: what is missing for jobs to run."),
    "explain": ("shoal.cli.explain", "explain", "Why a job is pending, slow or costly, and what would help."),
    "follow": ("shoal.cli.jobs", "follow", "A live table until the job is finished."),
    "history": ("shoal.cli.jobs", "history", "Loss and metrics of each epoch."),
    "init": ("shoal.cli.submit", "init", "Write a first manifest for a Keras script."),
    "install-key": ("shoal.cli.install_key", "install_key", "Rotate the key of the installation."),
    "list": ("shoal.cli.lists", "list_jobs", "The jobs, one in a line."),
    "logs": ("shoal.cli.jobs", "logs", "The log of one pod of a job."),
    "model": ("shoal.cli.jobs", "model", "Download the trained model."),
    "resume": ("shoal.cli.jobs", "resume", "Continue a suspended job."),
    "scale": ("shoal.cli.jobs", "scale", "Change the number of workers."),
    "status": ("shoal.cli.jobs", "status", "What happened to a job and why, in time order."),
    "submit": ("shoal.cli.submit", "submit", "Create a job; code in a file travels with it."),
    "suspend": ("shoal.cli.jobs", "suspend", "Stop a job after a final snapshot."),
    "top": ("shoal.cli.lists", "top", "All jobs, live."),
    "wait": ("shoal.cli.jobs", "wait", "Block until a job is finished."),
    "plan": ("shoal.cli.plan", "plan", "Find the cheapest nodes that meet a deadline."),
    "predict": ("shoal.cli.predict", "predict", "Test the speed predictor on measurements."),
    "simulate": ("shoal.cli.simulate", "simulate", "Replay revocation traces and compare policies."),
}


_SIZING = {"calibrate", "plan", "predict", "simulate"}
"""Commands that compute: they need the extra `sizing`, the others `client`."""


class _Lazy(click.Group):
    """A group that imports a command's module when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        import difflib

        if args[0] not in _COMMANDS and (like := difflib.get_close_matches(args[0], _COMMANDS, 1)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {like[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in sorted(_COMMANDS.items())])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UsageError as error:
            # Printed as click's own usage errors are, with exit code 2 and no traceback.
            raise click.UsageError(str(error)) from error
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in {"", "shoal", "shoal_trainer"}:
                raise
            extra = "sizing" if ctx.invoked_subcommand in _SIZING else "client"
            words = f"this command needs {error.name}, which is not installed: pip install '.[{extra}]' in a checkout"
            raise click.UsageError(words) from error
        except (click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError):
            raise
        except Exception as error:  # exit code 1 with a traceback would be an answer, to a script
            if os.environ.get("SHOAL_TRACEBACK"):
                raise
            raise _fault(error) from error


def _fault(error: Exception) -> click.ClickException:
    """What is told of an exception that nobody expected: of the system as a mistake, else as a fault of Shoal."""
    from shoal.cli.cluster import FAULT, Exit

    if isinstance(error, OSError) and error.strerror:
        where = (
            f"{error.filename}: " if error.filename is not None else ""
        )  # a full disk behind stdout has none
        return Exit(f"{where}{error.strerror}", 2)
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return Exit(f"a fault of shoal itself: {words}. SHOAL_TRACEBACK=1 shows where: please report that", FAULT)


@click.command(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Shoal: elastic TensorFlow training on spot nodes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(
                errors="replace"
            )  # a terminal that is not UTF-8 shows a ? rather than a traceback
