"""`shoal submit` creates a job; `shoal init` prints a first manifest of one. They have the same options.

The manifest is made by `shoal.client`; whether it is right says the API server, where one answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shoal.api.labels import JOB
from shoal.cli.cluster import cluster_command
from shoal.cli.options import Command
from shoal.cli.values import COUNT, SECONDS, Count
from shoal.errors import ClusterError, Forbidden, NotFound, Unavailable, UsageError
from shoal_trainer.contract import BATCH_SIZE, plain
from shoal_trainer.script import argument, target

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.client.api import Json
    from shoal.client.manifest import Manifests

MODES = {"min": "Min", "max": "Max"}

_OPTIONS = (
    click.option(
        "--image", metavar="IMAGE", help="Of the workers. Default: the operator's, Keras for CPUs, nothing of yours."
    ),
    click.option(
        "--template", metavar="FILE",
        help="A pod template (YAML) with what has no option: service account, env, resources. Of both roles.",
    ),
    click.option("--max-workers", type=Count(1, 1000), metavar="N", help="Upper limit of workers."),
    click.option(
        "--accelerator", metavar="NAME", help='Run on the CapacityPools with it, such as "L4": spot first, by price.'
    ),
    click.option(
        "--pool", "pools", multiple=True, metavar="NAME", help="A CapacityPool, in order of preference. Repeatable."
    ),
    click.option(
        "--capacity",
        type=click.Choice(["Spot", "OnDemand", "Any"], case_sensitive=False),
        help="Nodes for workers, or which pools of --accelerator.  [default: Spot; of --accelerator: Any]",
    ),
    click.option(
        "--arg", "args", multiple=True, metavar="NAME=VALUE",
        help="An argument of the entrypoint: rate=0.1, layers=[64,32] or other JSON; the rest is text. Repeatable.",
    ),
    click.option(
        "--file", "files", multiple=True, metavar="PATH", help="More code to send along: a file or a folder."
    ),
    click.option(
        "--batch-size", default=BATCH_SIZE, show_default=True, type=COUNT, metavar="N",
        help="Samples per step of a worker.",
    ),
    click.option("--steps", type=COUNT, metavar="N", help="Stop after N steps of the whole job."),
    click.option("--until", metavar="METRIC=VALUE", help="Stop when a validation metric reaches the value."),
    click.option(
        "--mode",
        type=click.Choice(tuple(MODES), case_sensitive=False),
        help="Whether the metric of --until must fall or rise to the value. Inferred for Keras' own metrics.",
    ),
    click.option("--parameter-servers", default=1, show_default=True, type=COUNT, metavar="N"),
    click.option(
        "--deadline", "deadline_seconds", type=SECONDS, metavar="TIME",
        help="Let Shoal choose workers by a deadline: seconds, or 30m, 2h.",
    ),
    click.option(
        "--max-cost", type=float, metavar="AMOUNT", help="Let Shoal choose workers by a budget."
    ),
    click.option("--run", metavar="NAME", help="A folder that a later job with this name and run continues."),
    click.option(
        "--initial-from", metavar="URI", help="Continue another run: its folder, STORAGE/NAMESPACE/JOB/UID-OR-RUN."
    ),
    click.option("--weights-only", is_flag=True, help="Of --initial-from: the optimizer and the data start anew."),
    click.option(
        "--snapshot-every", "snapshot_seconds", type=SECONDS, metavar="TIME", help="The interval of snapshots."
    ),
    click.option(
        "--max-staleness", type=Count(0), metavar="N", help="Updates that a gradient may be behind."
    ),
    click.option("--tls", is_flag=True, help="Encrypt parameters and gradients with TLS."),
)  # fmt: skip


def _submission(command: Command) -> Command:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command()
@click.argument("entrypoint", metavar="FILE.py[:OBJECT]|MODULE:OBJECT")
@click.option(
    "--storage", default="", metavar="URI", help="Required: s3://…, gs://…, claim:NAME, or ephemeral."
)
@click.option("--workers", default=1, show_default=True, type=Count(0, 1000), metavar="N")
@click.option("--epochs", type=COUNT, metavar="N", help="Default: 1, without --steps and --until.")
@_submission
@click.option(
    "--name", metavar="NAME", help="Of the job. Default: made from the module, another one each time."
)
@click.option("--follow", is_flag=True, help="Show the live table until it is finished.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the manifests and create nothing. Where an API server answers, it checks them.",
)
@cluster_command
def submit(client: Client, *, dry_run: bool, follow: bool, **given: Any) -> None:
    """Create a job; code in a file travels with it, so that an edit needs no image.

    Without OBJECT, the Training of FILE.py is looked for; the file is read, not run.
    """
    made = client.prepare(**arguments(given))
    if dry_run:
        _print(client, made)
        return
    job = client.create(made)
    click.echo(f"job {job.name} was created; shoal follow {job.name} shows it")
    if follow:
        from shoal.cli.jobs import end

        end(job.follow())


@click.command()
@click.argument("file", metavar="FILE.py[:OBJECT]")
@click.option(
    "--storage", metavar="URI", help="As for `shoal submit`.  [default: claim:JOB-runs, of this job alone]"
)
@click.option("--workers", default=2, show_default=True, type=Count(0, 1000), metavar="N")
@click.option("--epochs", default=10, show_default=True, type=COUNT, metavar="N")
@_submission
@click.option("--name", metavar="NAME", help="Of the job. Default: the file's.")
@cluster_command
def init(client: Client, *, file: str, name: str | None, storage: str | None, **given: Any) -> None:
    """Print a first manifest for a Keras script: the job, its code, and its volume claim where that is missing.

    It is `shoal submit --dry-run` with other defaults.
    """
    name = name or Path(file.partition(":")[0]).stem.replace("_", "-").lower()
    storage = storage or f"claim:{name}-runs"  # one that is ReadWriteOnce serves one job at a time
    made = client.prepare(file, **arguments(given | {"name": name, "storage": storage}))
    volume = None
    claim = (made.job["spec"]["storage"].get("volumeClaim") or {}).get("name")
    if claim and claim not in _claims(client):
        spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "5Gi"}}}
        volume = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim},
            "spec": spec,
        }
    _print(client, made, volume)


def _claims(client: Client) -> Sequence[str]:
    """The volume claims of the namespace; none where they cannot be read."""
    try:
        return client.claims()
    except ClusterError:
        return ()


def _print(client: Client, made: Manifests, volume: Json | None = None) -> None:
    """Print the manifests, once the API server would take them; where it cannot be asked, that is said."""
    from shoal.cli.documents import print_manifests

    try:
        client.check(made)
    except (Forbidden, NotFound, Unavailable) as error:
        click.echo(f"Not checked by an API server: {plain(str(error))}", err=True)
    if made.archive is not None:
        size = f"{len(made.archive) / 1024:.0f} KiB"
        click.echo(f"The code, {size}, is not printed: shoal submit puts it into the job's storage", err=True)
    if made.code is not None:  # of `submit`, the job is its owner
        click.echo(
            "# Deleting the job leaves this code, and that of before an edit: "
            f"kubectl delete configmap -l {JOB}={made.name}"
        )
    print_manifests(made.code, made.job, volume)


def arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The options as `Client.submit` takes them."""
    found = {key: value for key, value in given.items() if value is not None}
    try:
        found["args"] = dict(map(argument, found.get("args", ())))
    except ValueError as error:
        raise UsageError(f"--arg {error}") from None
    if (until := found.pop("until", None)) is not None:
        try:
            found["until"] = target(until)
        except ValueError as error:
            raise UsageError(f"--until {error}") from None
    if "mode" in found:
        found["mode"] = MODES[found["mode"]]
    return found
