"""`shoal-trainer`: `serve` and `work` are what the pods run; `run` is a whole job as processes of this machine.

Nothing heavy is imported before a command needs it, and a worker's SIGTERM handler is there before TensorFlow.
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
from shoal_trainer.orphans import follow_parent


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shoal")
def main() -> None:
    """Asynchronous parameter servers and the workers that come and go around them."""


@main.command()
def serve() -> None:
    """Be a parameter server (shard 0 is the coordinator too), as $SHOAL_CONFIG says."""
    from shoal_trainer import serve as server

    follow_parent()
    sys.exit(server.main())


@main.command()
def work() -> None:
    """Be a worker, as $SHOAL_CONFIG says."""
    from shoal_trainer.worker import process

    follow_parent()
    sys.exit(process.main())


@main.command()
@click.argument("entrypoint", metavar="MODULE:OBJECT")
@click.option("--workers", default=1, show_default=True, type=click.IntRange(1))
@click.option("--parameter-servers", default=1, show_default=True, type=click.IntRange(1))
@click.option("--batch-size", default=32, show_default=True, type=click.IntRange(1), help="Per worker.")
@click.option("--epochs", type=click.IntRange(1), help="Stop after so many passes over the data (default 1).")
@click.option("--steps", type=click.IntRange(1), help="Stop after so many steps of the whole job.")
@click.option("--until", metavar="METRIC=VALUE", help="Stop when a validation metric reaches a value.")
@click.option(
    "--mode",
    type=click.Choice(["Min", "Max"], case_sensitive=False),
    help="Whether the metric is to fall (Min) or to rise (Max); of Keras' own names it is known.",
)
@click.option(
    "--arg", "args", multiple=True, metavar="NAME=VALUE", help="An argument of the entrypoint; repeatable."
)
@click.option(
    "--storage", default="shoal-runs", show_default=True, help="A folder or URI for snapshots and the model."
)
@click.option("--snapshot-every", default=10, show_default=True, type=click.IntRange(1), help="Seconds.")
@click.option("--max-staleness", type=click.IntRange(0), help="0: wait for each push before the next step.")
@click.option("--tls", is_flag=True, help="TLS for the parameters too, not only for control.")
@click.option(
    "--kill-every",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Kill a process every so often, as a spot market does.",
)
@click.option(
    "--kill",
    default="any",
    show_default=True,
    type=click.Choice(["any", "worker", "ps"]),
    help="Whom --kill-every kills.",
)
def run(
    entrypoint: str, workers: int, parameter_servers: int, batch_size: int, epochs: int | None, steps: int | None,
    until: str | None, mode: Literal["Min", "Max"] | None, args: tuple[str, ...], storage: str,
    snapshot_every: int, max_staleness: int | None, tls: bool, kill_every: float | None, kill: str,
) -> None:  # fmt: skip
    """Run MODULE:OBJECT as local processes: parameter servers and workers, with a live table."""
    from shoal_trainer.local import LocalJob

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
    sys.exit(_watch(job))


def _watch(job: Any) -> int:
    from rich.console import Console
    from rich.live import Live

    from shoal_trainer.local import LocalRun
    from shoal_trainer.table import line, render

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C: no process is left behind
    console = Console()
    started = time.monotonic()
    with LocalRun(job) as processes:
        console.print(f"logs in {processes.logs}, kept if it fails", style="dim", highlight=False)
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
        except KeyboardInterrupt:
            console.print("stopped; what was trained lies in the last snapshot", style="yellow")
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
            raise click.UsageError("--mode says how --until is meant: give both, or none")
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
            f"{metric} may be better when small or when great: add --mode Min or --mode Max",
            param_hint="--until",
        )
    return stop


if __name__ == "__main__":
    main()
