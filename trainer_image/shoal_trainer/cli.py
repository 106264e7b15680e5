"""`shoal-trainer`: `serve` and `work` are what the pods run; `run` trains with processes on this machine.

Each command imports what it needs, so that a worker handles SIGTERM before it imports TensorFlow.
"""

from __future__ import annotations

import re
import sys
import uuid
from pathlib import Path
from typing import Any, Literal

import click
from pydantic import JsonValue

from shoal_trainer.contract import BATCH_SIZE, InitialFrom, Staleness, StopAfter
from shoal_trainer.environment import use_tensorflow
from shoal_trainer.errors import TrainerError, UserError
from shoal_trainer.script import (
    argument,
    module_of,
    must_take_arguments,
    no_entrypoint,
    target,
    training_in,
)
from shoal_trainer.termination.deadline import end_soon
from shoal_trainer.termination.orphans import follow_parent


class Count(click.IntRange):
    """A whole number in a range."""

    name = "whole number"


ENTRYPOINT = "FILE.py[:OBJECT]|MODULE:OBJECT"
COUNT = Count(1)
MODES: dict[str, Literal["Min", "Max"]] = {"min": "Min", "max": "Max"}


class _Commands(click.Group):
    """Says what to install where a command's packages are missing."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if error.name not in {"keras", "numpy", "tensorflow"}:
                raise
            words = f"this command needs {error.name}, which is not installed: pip install '.[trainer]' in a checkout"
            raise click.UsageError(words) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shoal")
def main() -> None:
    """Elastic distributed training of Keras models with asynchronous parameter servers."""


@main.command(short_help="What a parameter server's pod runs.")
def serve() -> None:
    """Run a parameter server (shard 0 is also the coordinator) as configured by $SHOAL_CONFIG."""
    from shoal_trainer import serve as server

    follow_parent()
    code = server.main()
    end_soon(code)
    sys.exit(code)


@main.command(short_help="What a worker's pod runs.")
def work() -> None:
    """Run a worker as configured by $SHOAL_CONFIG."""
    from shoal_trainer.worker import main as worker

    follow_parent()
    code = worker.main()
    end_soon(code)
    sys.exit(code)


@main.command(short_help="Train with parameter servers and workers as local processes.")
@click.argument("entrypoint", metavar=ENTRYPOINT, callback=lambda _ctx, _param, text: _entrypoint(text))
@click.option(
    "--workers", default=1, show_default=True, type=Count(1, 64), metavar="N", help="Worker processes."
)
@click.option(
    "--parameter-servers",
    default=1,
    show_default=True,
    type=Count(1, 16),
    metavar="N",
    help="Parameter server processes.",
)
@click.option(
    "--batch-size",
    default=BATCH_SIZE,
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
    type=click.Choice(["min", "max"], case_sensitive=False),
    help="Whether the metric of --until must fall (min) or rise (max) to the value. "
    "Inferred for Keras' built-in metrics.",
)
@click.option(
    "--arg",
    "args",
    multiple=True,
    metavar="NAME=VALUE",
    help="An argument of the entrypoint, as in spec.training.args: rate=0.1, layers=[64,32] or other JSON; "
    "the rest is text. Repeatable.",
)
@click.option(
    "--storage",
    default="shoal-runs",
    show_default=True,
    metavar="FOLDER|URI",
    help="Where snapshots and the model are saved.",
)
@click.option(
    "--initial-from",
    metavar="FOLDER|URI",
    help="Continue an earlier run: the folder of its snapshots, STORAGE/local/MODULE/ID.",
)
@click.option(
    "--weights-only",
    is_flag=True,
    help="Take only the weights of --initial-from: the optimizer and the data start anew.",
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
    type=Count(0),
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
    until: str | None, mode: Literal["min", "max"] | None, args: tuple[str, ...], storage: str,
    initial_from: str | None, weights_only: bool, snapshot_every: int, max_staleness: int | None, tls: bool,
    kill_every: float | None, kill: str,
) -> None:  # fmt: skip
    """Train with parameter servers and workers as local processes.

    Shows a live table, and a line for each epoch. Without OBJECT, the Training of FILE.py is looked for.
    """
    from shoal_trainer.run.processes import LocalJob
    from shoal_trainer.run.watch import watch
    from shoal_trainer.worker.entrypoint import check

    _choose_tensorflow()
    job = LocalJob(
        entrypoint=entrypoint,
        workers=workers,
        parameter_servers=parameter_servers,
        batch_size=batch_size,
        stop_after=_stop_after(epochs if epochs or steps or until else 1, steps, until, mode),
        args=_given_to(entrypoint, args),
        storage_uri=_uri(storage),
        initial_from=_initial(initial_from, weights_only),
        snapshot_seconds=snapshot_every,
        staleness=Staleness(max=max_staleness),
        data_tls=tls,
        kill_every=kill_every,
        kill=kill,
    )
    try:
        check(entrypoint, Path.cwd())
    except UserError as error:
        raise click.BadParameter(str(error), param_hint=ENTRYPOINT) from error
    _try_to_write(job.storage_uri)
    sys.exit(watch(job))


@main.command(short_help="Say in seconds what a cluster would refuse.")
@click.argument("entrypoint", metavar=ENTRYPOINT, callback=lambda _ctx, _param, text: _entrypoint(text))
@click.option(
    "--batch-size", default=BATCH_SIZE, show_default=True, type=COUNT, metavar="N", help="Samples per step."
)
@click.option("--workers", default=1, show_default=True, type=COUNT, metavar="N", help="As many are planned.")
@click.option("--until", metavar="METRIC=VALUE", help="The target, as for `run`.")
@click.option("--mode", type=click.Choice(["min", "max"], case_sensitive=False), help="As for `run`.")
@click.option(
    "--arg",
    "args",
    multiple=True,
    metavar="NAME=VALUE",
    help="An argument of the entrypoint, as for `run`. Repeatable.",
)
@click.option(
    "--output", "-o", default="text", show_default=True, type=click.Choice(["text", "json"]), help="Format."
)
def check(
    entrypoint: str, batch_size: int, workers: int, until: str | None, mode: Literal["min", "max"] | None,
    args: tuple[str, ...], output: str,
) -> None:  # fmt: skip
    """Try a job in seconds, on this machine: what would fail later, or only on a cluster or a GPU.

    Imports it, builds the model on one batch of the data, trains a step with and without XLA, evaluates, runs the
    callbacks for two epochs and exports the model. Without OBJECT, the Training of FILE.py is looked for. Exit code: 0
    if a cluster would take it (with or without warnings), 1 if not, 2 if the command line is wrong.
    """
    _choose_tensorflow()
    given = _given_to(entrypoint, args)
    stop_after = _stop_after(1 if until is None else None, None, until, mode)
    from shoal_trainer.checking import rehearse

    sys.exit(rehearse(entrypoint, given, batch_size, workers, stop_after, output))


def _choose_tensorflow() -> None:
    try:
        use_tensorflow()
    except UserError as error:
        raise click.UsageError(str(error)) from error


def _entrypoint(text: str) -> str:
    """MODULE:OBJECT, also from FILE.py[:OBJECT] of a file in or below this folder, which is read and not run."""
    file, colon, name = text.rpartition(":") if ":" in text else (text, "", "")
    if not colon and not file.endswith(".py") and Path(beside := f"{file.replace('.', '/')}.py").is_file():
        file = beside
    if not file.endswith(".py"):
        if colon:
            return text
        raise click.BadParameter(no_entrypoint(text))
    path, here = Path(file).resolve(), Path.cwd().resolve()
    if not path.is_file():
        raise click.BadParameter(f"there is no file {file}")
    if not path.is_relative_to(here):
        raise click.BadParameter(
            f"{file} is not in this folder or below it: go to its folder first: cd {path.parent}"
        )
    try:
        module_of(file)
        name = name or training_in(file, path.read_bytes())
    except (ValueError, OSError) as error:
        raise click.BadParameter(str(error)) from error
    return f"{'.'.join(path.relative_to(here).with_suffix('').parts)}:{name}"


def _uri(folder: str) -> str:
    if folder.startswith("claim:"):
        raise click.BadParameter(f"{folder} is a volume of a cluster: name a folder, or s3:// or gs://")
    if (scheme := re.match("(s3|gs|file):", folder)) and not re.match("(s3|gs)://[^/]|file:///.", folder):
        form = "file:///FOLDER" if scheme[1] == "file" else f"{scheme[1]}://BUCKET/FOLDER"
        raise click.BadParameter(f"{folder} is no folder and no URI: {form}")
    return folder if "://" in folder else Path(folder).resolve().as_uri()


def _try_to_write(uri: str) -> None:
    """BadParameter if nothing can be written there: the parameter servers of a cluster would wait for it."""
    from shoal_trainer.snapshot.storage import open_storage

    name = f"shoal-{uuid.uuid4().hex[:12]}"
    try:
        storage = open_storage(uri)
        storage.write(name, [b""])
        storage.remove(name)
    except (TrainerError, OSError) as error:
        raise click.BadParameter(str(error), param_hint="--storage") from error


def _initial(folder: str | None, weights_only: bool) -> InitialFrom | None:
    if folder is None:
        if weights_only:
            raise click.UsageError("--weights-only requires --initial-from")
        return None
    return InitialFrom(uri=_uri(folder), weights_only=weights_only)


def arguments(texts: tuple[str, ...]) -> dict[str, JsonValue]:
    """The options `--arg` as the entrypoint's arguments. Raises BadParameter."""
    try:
        return dict(map(argument, texts))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--arg") from None


def _given_to(entrypoint: str, texts: tuple[str, ...]) -> dict[str, JsonValue]:
    """The arguments of an entrypoint. BadParameter where its file says that it does not take them."""
    given, (module, _, name) = arguments(texts), entrypoint.partition(":")
    file = Path(f"{module.replace('.', '/')}.py")
    if given and file.is_file():
        try:
            must_take_arguments(file.name, file.read_bytes(), name, given)
        except (ValueError, OSError) as error:
            raise click.BadParameter(str(error), param_hint="--arg") from error
    return given


def _stop_after(
    epochs: int | None, steps: int | None, until: str | None, mode: Literal["min", "max"] | None
) -> StopAfter:
    """The options as a `StopAfter`. A worker checks the metric, whose name and mode depend on the model."""
    if until is None:
        if mode is not None:
            raise click.UsageError("--mode requires --until")
        return StopAfter(epochs=epochs, steps=steps)
    try:
        metric, value = target(until)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--until") from None
    return StopAfter(
        epochs=epochs, steps=steps, metric=metric, value=value, mode=MODES[mode] if mode else None
    )


if __name__ == "__main__":
    main()
