"""`shoal install-key rotate|retire`: a new install key, for administrators."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from shoal.cli.cluster import cluster_command

if TYPE_CHECKING:
    from shoal.client import Client

secret_option = click.option(
    "--secret",
    default="shoal-install-key",
    show_default=True,
    metavar="NAME",
    help="The Secret with the key.",
)


@click.group("install-key")
def install_key() -> None:
    """Rotate the key from which the keys of all jobs are derived. -n names the operator's namespace."""


@install_key.command()
@secret_option
@cluster_command
def rotate(client: Client, *, secret: str) -> None:
    """Make a new key for jobs that begin from now on; those that run keep theirs."""
    from shoal.client.install_key import RESTART
    from shoal.client.install_key import rotate as begin

    name = begin(client.api, secret)
    click.echo(
        f"The key {name} is in the Secret {secret}. Restart the operator now:\n"
        f"  kubectl -n {client.api.namespace} {RESTART}\n"
        f"When the jobs that run have ended:\n  shoal install-key retire -n {client.api.namespace} --secret {secret}"
    )


@install_key.command()
@click.option("--force", is_flag=True, help="Although jobs that have the previous key are not finished.")
@secret_option
@cluster_command
def retire(client: Client, *, secret: str, force: bool) -> None:
    """Forget the previous key, when no job has it any more."""
    from shoal.client.install_key import RESTART
    from shoal.client.install_key import retire as end

    end(client.api, secret, force=force)
    click.echo(
        f"The previous key is gone from the Secret {secret}. Restart the operator:\n"
        f"  kubectl -n {client.api.namespace} {RESTART}"
    )
