"""`shoal-trainer`: `serve` and `work` are what the pods run; `run` trains with processes on this machine.

Each command imports what it needs, so that a worker handles SIGTERM before it imports TensorFlow.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any, Literal

import click

from shoal_trainer.contract import EXIT_USER, Outcome, Staleness, StopAfter
from shoal_trainer.errors import UserError
from shoal_trainer.orphans import follow_parent

COUNT = click.IntRange(1)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shoal")
def main() -> None:
    """Elastic distributed training of Keras models with asynchronous parameter servers."""


@main.command()
def serve() -> None:
    """Run a parameter server (shard 0 is also the coordinator) as configured by $SHOAL_CONFIG."""
    from shoal_trainer import serve as server

    follow_parent()
    sys.exit(server.main())


@main.command()
def work() -> None:
    """Run a worker as configured by $SHOAL_CONFIG."""
    from shoal_trainer.worker import process

    follow_parent()
    sys.exit(process.main())


@main.command()
@click.argument("entrypoint", metavar="MODULE:OBJECT")
@click.option("--workers", default=1, show_default=True, type=COUNT, metavar="N", help="Worker processes.")
@click.option(
    "--parameter-servers",
    default=1,
    show_default=True,
    type=COUNT,
    metavar="N",
    help="Parameter server processes.",
)
@click.option(
    "--batch-size",
    default=32,
    show_default=True,
    type=COUNT,
    metavar="N",
    help="Samples per step of a worker.",
)
@click.option(
    "--epochs",
    type=COUNT,
    metavar="N",
    help="Stop after N epochs. The default is 1 if neither --steps nor --until is set.",
)
@click.option("--steps", type=COUNT, metavar="N", help="Stop after N steps of the whole job.")
@click.option("--until", metavar="METRIC=VALUE", help="Stop when a validation metric reaches the value.")
@click.option(
    "--mode",
    type=click.Choice(["Min", "Max"], case_sensitive=False),
    help="Whether the metric of --until must fall (Min) or rise (Max) to the value. "
    "Inferred for Keras' built-in metrics.",
)
@click.option(
    "--arg",
    "args",
    multiple=True,
    metavar="NAME=VALUE",
    help="An argument of the entrypoint; VALUE is JSON or a string. Repeatable.",
)
@click.option(
    "--storage",
    default="shoal-runs",
    show_default=True,
    metavar="FOLDER|URI",
    help="Where snapshots and the model are saved.",
)
@click.option(
    "--snapshot-every",
    default=10,
    show_default=True,
    type=COUNT,
    metavar="SECONDS",
    help="The interval between snapshots.",
)
@click.option(
    "--max-staleness",
    type=click.IntRange(0),
    metavar="N",
    help="How many updates a worker may be behind before it waits. 0 makes it wait for each push.",
)
@click.option(
    "--tls", is_flag=True, help="Encrypt parameters and gradients with TLS, not only control messages."
)
@click.option(
    "--kill-every",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Kill a random process at this interval, to test fault tolerance.",
)
@click.option(
    "--kill",
    default="any",
    show_default=True,
    type=click.Choice(["any", "worker", "ps"]),
    help="Which processes --kill-every kills.",
)
def run(
    entrypoint: str, workers: int, parameter_servers: int, batch_size: int, epochs: int | None, steps: int | None,
    until: str | None, mode: Literal["Min", "Max"] | None, args: tuple[str, ...], storage: str,
    snapshot_every: int, max_staleness: int | None, tls: bool, kill_every: float | None, kill: str,
) -> None:  # fmt: skip
    """Train MODULE:OBJECT with parameter servers and workers as local processes, and show a live table."""
    from shoal_trainer.local import LocalJob
    from shoal_trainer.worker.entrypoint import check

    job = LocalJob(
        entrypoint=entrypoint,
        workers=workers,
        parameter_servers=parameter_servers,
        batch_size=batch_size,
        stop_after=_stop_after(epochs if epochs or steps or until else 1, steps, until, mode),
        args=dict(_argument(text) for text in args),
        storage_uri=storage if "://" in storage else Path(storage).resolve().as_uri(),
        snapshot_seconds=snapshot_every,
        staleness=Staleness(max=max_staleness),
        data_tls=tls,
        kill_every=kill_every,
        kill=kill,
    )
    try:
        check(entrypoint, Path.cwd())
    except UserError as error:
        raise click.BadParameter(str(error), param_hint="MODULE:OBJECT") from error
    sys.exit(_watch(job))


def _watch(job: Any) -> int:
    from rich.console import Console
    from rich.live import Live
    from rich.markup import escape

    from shoal_trainer.local import LocalRun
    from shoal_trainer.table import line, render

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end as Ctrl-C does, with all processes
    console = Console()
    started = time.monotonic()
    with LocalRun(job) as processes:
        console.print(f"logs in {processes.logs}, kept if the job fails", style="dim", highlight=False)
        try:
            with Live(console=console, auto_refresh=False, transient=False) as live:
                printed = 0.0
                while (outcome := processes.poll()) is None:
                    status = processes.status()
                    seconds = time.monotonic() - started
                    note = f"{len(processes.processes)} processes, {processes.kills} killed, {seconds:.0f} s"
                    if console.is_terminal:
                        live.update(render(status, title=job.entrypoint, note=note), refresh=True)
                    elif time.monotonic() - printed >= 5:
                        printed = time.monotonic()
                        console.print(f"{line(status)}; {note}", highlight=False, soft_wrap=True)
                    time.sleep(0.25)
            warnings = processes.warnings()
        except KeyboardInterrupt:
            console.print(
                f"Stopped. The next run starts from the beginning; snapshots are in {job.storage_uri}.",
                style="yellow", soft_wrap=True,
            )  # fmt: skip
            return 130
    if outcome.outcome is Outcome.FAILED:
        console.print(
            f"[red]Failed[/red] {outcome.reason}: {outcome.message}", highlight=False, soft_wrap=True
        )
        return EXIT_USER
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in sorted(outcome.metrics.items()))
    console.print(
        f"[green]Succeeded[/green] in {time.monotonic() - started:.0f} s, {outcome.step:,} steps  {metrics}",
        soft_wrap=True,
    )
    counts = outcome.ranges
    console.print(
        f"ranges: {counts.once} once, {counts.repeated} repeated, {counts.partial} partial, {counts.never} never",
        soft_wrap=True,
    )
    for warning in warnings:
        console.print(f"[yellow]warning[/yellow] {escape(warning)}", highlight=False, soft_wrap=True)
    console.print(f"end: {escape(outcome.message)}", highlight=False, soft_wrap=True)
    console.print(f"model: {outcome.model_uri}", highlight=False, soft_wrap=True)
    return 0


def _argument(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise click.BadParameter(f"{text!r} must be NAME=VALUE", param_hint="--arg")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _stop_after(
    epochs: int | None, steps: int | None, until: str | None, mode: Literal["Min", "Max"] | None
) -> StopAfter:
    if until is None:
        if mode is not None:
            raise click.UsageError("--mode requires --until")
        return StopAfter(epochs=epochs, steps=steps)
    metric, _, text = until.partition("=")
    try:
        if not metric:
            raise ValueError("no metric")
        stop = StopAfter(epochs=epochs, steps=steps, metric=metric, value=float(text), mode=mode)
    except ValueError:
        raise click.BadParameter(
            "must be METRIC=VALUE with a number, for example val_accuracy=0.97", param_hint="--until"
        ) from None
    if stop.direction is None:
        raise click.BadParameter(
            f"cannot infer whether {metric} must fall or rise: add --mode Min or --mode Max",
            param_hint="--until",
        )
    return stop


if __name__ == "__main__":
    main()
