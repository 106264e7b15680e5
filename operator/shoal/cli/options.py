"""Groups of options that several commands share, each passed to the command as one value."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from shoal.cli.cluster import Format, format_options
from shoal.cli.values import SECONDS

__all__ = [
    "FILE",
    "Files",
    "Limits",
    "Output",
    "files_options",
    "limits_options",
    "output_options",
    "trace_option",
]

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

Command = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Files:
    """The inputs: TrainingJobs, CapacityPools and SpeedProfiles. None: those of the cluster that kubectl uses."""

    jobs: tuple[Path, ...]
    pools: Path | None
    profiles: Path | None


@dataclasses.dataclass(frozen=True)
class Limits:
    """The objective on the command line. None: the one of the job, or the default."""

    deadline: float | None
    budget: float | None
    prefer: str | None
    confidence: float | None


@dataclasses.dataclass(frozen=True)
class Output:
    """How the answer is printed, and where it is plotted."""

    plot: Path | None
    currency: str
    format: Format


def _group(
    name: str, values: Callable[..., Any], fields: list[str], *options: Any
) -> Callable[[Command], Command]:
    """A decorator that adds options to a command and passes their values as one argument."""

    def decorate(function: Command) -> Command:
        @functools.wraps(function)
        def call(**arguments: Any) -> Any:
            packed = values(**{field: arguments.pop(field) for field in fields})
            return function(**{name: packed}, **arguments)

        for option in reversed(options):
            call = option(call)
        return call

    return decorate


def files_options(pools_help: str) -> Callable[[Command], Command]:
    """`-f`, `--pools` and `--profiles` as `files`."""
    return _group(
        "files",
        Files,
        ["jobs", "pools", "profiles"],
        click.option(
            "-f",
            "jobs",
            required=True,
            multiple=True,
            type=FILE,
            help="A TrainingJob (YAML). Repeat it for several.",
        ),
        click.option("--pools", type=FILE, help=f"{pools_help}  [default: those of kubectl's cluster]"),
        click.option(
            "--profiles",
            type=FILE,
            help="SpeedProfiles (YAML): measured step times.  [default: those of the job's namespace there]",
        ),
    )


def limits_options(default: str) -> Callable[[Command], Command]:
    """`--deadline`, `--max-cost`, `--prefer` and `--confidence` as `limits`."""
    return _group(
        "limits",
        Limits,
        ["deadline", "budget", "prefer", "confidence"],
        click.option(
            "--deadline",
            type=SECONDS,
            metavar="TIME",
            help=f"Deadline from now: seconds, or 30m, 2h.{default}",
        ),
        click.option(
            "--max-cost",
            "--budget",
            "budget",
            type=click.FloatRange(0, min_open=True),
            help=f"The most that the work left may cost.{default}",
        ),
        click.option(
            "--prefer",
            type=click.Choice(["MinCost", "MinTime", "BestValue"]),
            help=f"Lowest cost, shortest time, or most speed for the cost.{default}",
        ),
        click.option(
            "--confidence", type=float, help="Probability of meeting the deadline.  [default: the job's]"
        ),
    )


def output_options(plot_help: str) -> Callable[[Command], Command]:
    """`--plot`, `--currency` and `-o` as `output`."""
    return _group(
        "output",
        Output,
        ["plot", "currency", "format"],
        click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help=plot_help),
        click.option("--currency", default="$", show_default=True, help="Currency of the prices."),
        *format_options("format"),
    )


def trace_option(function: Command) -> Command:
    """`--trace POOL=FILE` as `traces`."""
    decorated: Command = click.option(
        "--trace",
        "traces",
        multiple=True,
        metavar="POOL=FILE",
        help="Revocations measured in a pool; replaces its prior rate. Repeat it for several pools.",
    )(function)
    return decorated
