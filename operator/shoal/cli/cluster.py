"""What all commands that talk to a cluster share: how it is found, how answers are printed, exit codes."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from shoal.errors import ClusterError, NotFound, Refused, ShoalError

if TYPE_CHECKING:
    from rich.console import Console

FAULT = 70
"""As sysexits.h has it for an internal error (EX_SOFTWARE)."""
EXIT_CODES = {
    0: "done; of `wait` and `follow`: the job has succeeded",
    1: "the answer is no: the job failed, `doctor` found something broken",
    2: "the command line or the manifest is wrong, also where the API server refuses it; there is no such object",
    3: "of `plan`: no plan keeps the limits",
    4: "no answer: the API server, or the storage, is not reachable",
    FAULT: "a fault of Shoal itself; with `SHOAL_TRACEBACK=1` in the environment it shows where",
    130: "interrupted by Ctrl-C",
}
"""What the exit codes of `shoal` mean. docs/cli.md has the same table."""

Format = Literal["table", "json", "yaml"]
Command = Callable[..., Any]


def cluster_command(function: Command) -> Command:
    """A command that gets `client`, with the options that choose the cluster; cluster errors become exit codes."""

    @click.option(
        "-n", "--namespace", metavar="NAME", help="The namespace. Default: that of the kubeconfig's context."
    )
    @click.option("--context", metavar="NAME", help="A context of the kubeconfig. Default: the current one.")
    @click.option("--kubeconfig", metavar="FILE", help="Default: $KUBECONFIG or ~/.kube/config.")
    @functools.wraps(function)
    def call(*, namespace: str | None, context: str | None, kubeconfig: str | None, **arguments: Any) -> Any:
        from shoal.client import Client

        try:
            return function(client=Client(namespace, kubeconfig=kubeconfig, context=context), **arguments)
        except (NotFound, Refused) as error:
            raise Exit(str(error), 2) from error
        except ClusterError as error:
            raise Exit(str(error), 4) from error
        except TimeoutError as error:
            raise Exit(str(error), 1) from error
        except ShoalError as error:
            from shoal.client.job import JobFailed

            raise Exit(str(error), 1 if isinstance(error, JobFailed) else 2) from error
        except KeyboardInterrupt:
            raise click.exceptions.Exit(130) from None

    return call


class Exit(click.ClickException):
    """A message on stderr, and an exit code of `EXIT_CODES`."""

    def __init__(self, message: str, code: int) -> None:
        from shoal_trainer.contract import plain

        super().__init__(plain(message))
        self.exit_code = code  # type: ignore[misc]  # click reads it of the instance, and so documents it


def format_options(name: str) -> tuple[Callable[[Command], Command], ...]:
    """`-o`, as this argument; `--json` is short for `-o json`."""
    choice = click.Choice(get_args(Format))
    return (
        click.option("-o", "--output", name, default="table", show_default=True, type=choice, help="Format."),
        click.option("--json", name, flag_value="json", hidden=True),
    )


def output_option(function: Command) -> Command:
    """`-o`, as `output`."""
    for option in format_options("output"):
        function = option(function)
    return function


def complete_job(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """The names of jobs, for completion by the shell; none if the cluster does not answer."""
    from shoal.client import Client

    try:
        client = Client(
            ctx.params.get("namespace"),
            kubeconfig=ctx.params.get("kubeconfig"),
            context=ctx.params.get("context"),
        )
        return [name for name in client.names() if name.startswith(incomplete)]
    except ShoalError:
        return []


JOB = click.argument("name", metavar="JOB", shell_complete=complete_job)


WIDE = 200


def console() -> Console:
    """Where tables are printed: as wide as the terminal; in files and pipes wide enough for whole lines."""
    from shoal.client.view import plain_console

    # Where it is closed, Python has none.
    piped = sys.stdout is not None and not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return plain_console(WIDE if piped else None)


def emit(value: Any, output: Format) -> None:
    """Print an answer as JSON or YAML."""
    text = json.dumps(value, indent=2, default=str, allow_nan=False)
    if output == "json":
        click.echo(text)
        return
    import yaml

    click.echo(yaml.safe_dump(json.loads(text), sort_keys=False), nl=False)
