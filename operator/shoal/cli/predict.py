"""`shoal predict`: evaluate the predictor on measurements."""

from __future__ import annotations

from pathlib import Path

import click

from shoal.cli.cluster import Format, emit, output_option
from shoal.cli.options import FILE
from shoal.errors import UsageError

__all__ = ["predict"]


@click.group()
def predict() -> None:
    """Test the speed predictor on measurements (columns: docs/sizing.md)."""


@predict.command()
@click.option(
    "--target",
    required=True,
    type=click.Choice(["worker-speed", "cluster-speed", "checkpoint"]),
    help="What to predict.",
)
@click.option("--train", required=True, type=FILE, help="CSV of measurements to fit.")
@click.option(
    "--models",
    multiple=True,
    type=FILE,
    help="CSV with features by model that --train lacks. Repeat it for several.",
)
@click.option("--test", type=FILE, help="CSV of measurements to predict.")
@click.option("--leave-one-model-out", is_flag=True, help="Predict every model by a fit without it.")
@click.option(
    "--new-accelerator", metavar="NAME", help="Predict its rows by a fit to the other accelerators."
)
@click.option("--accelerators", type=FILE, help="CSV of data sheets in addition to the built-in ones.")
@output_option
def evaluate(
    target: str,
    train: Path,
    models: tuple[Path, ...],
    test: Path | None,
    leave_one_model_out: bool,
    new_accelerator: str | None,
    accelerators: Path | None,
    output: Format,
) -> None:
    """Print MAPE, MAE and the coverage of the 90 % interval, by accelerator."""
    from shoal.sizing.accelerators import catalogue  # pandas and scikit-learn take a second
    from shoal.sizing.predict.evaluation import evaluate as run

    if sum([test is not None, leave_one_model_out, new_accelerator is not None]) != 1:
        raise UsageError("give exactly one of --test, --leave-one-model-out and --new-accelerator")
    sheets = catalogue() if accelerators is None else catalogue().extended(accelerators)
    result = run(target, train, models, sheets, test=test, new_accelerator=new_accelerator)
    if output != "table":
        emit(result.as_json(), output)
        return
    unit = "s" if target == "checkpoint" else "steps/s"
    click.echo(
        f"{'accelerator':<28}{'n':>6}{'MAPE %':>9}{f'MAE {unit}':>13}{'in 90 % interval':>18}{'width':>8}"
    )
    for name, s in [*result.by_accelerator().items(), ("all", result.summary())]:
        click.echo(
            f"{name:<28}{s['n']:>6}{s['mape']:>9.2f}{s['mae']:>13.4g}{100 * s['coverage90']:>16.1f} %"
            f"{s['width90']:>8.2f}"
        )
    for note in result.notes:
        click.echo(f"note: {note}")
