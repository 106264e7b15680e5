"""`shoal plan-workload`: the same as `shoal plan`, from a workload and instance types in spotDNN's form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shoal.cli.inputs import with_traces
from shoal.cli.options import FILE, Limits, Output, limits_options, output_options, trace_option
from shoal.cli.plan import show
from shoal.cli.values import Count
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.sizing.plan.problem import Pool

__all__ = ["plan_workload"]


class _Numbers(click.ParamType[list[float]]):
    """Numbers separated by commas."""

    name = "N,N,…"

    def __init__(self, whole: bool) -> None:
        self.whole = whole

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[float]:
        """Parse the numbers."""
        try:
            return [(int if self.whole else float)(part) for part in str(value).split(",")]
        except ValueError:
            kind = "whole numbers" if self.whole else "numbers"
            self.fail(f"give {kind} separated by commas, one for each pool, not {value!r}", param, ctx)


@click.command("plan-workload")
@click.option("--workload", required=True, type=FILE, help="The workload (JSON).")
@click.option("--pools", required=True, type=FILE, help="The instance types (CSV).")
@click.option("--loss", required=True, type=float, help="The loss to train to.")
@click.option(
    "--model",
    type=click.Choice(["shoal", "spotdnn"]),
    default="shoal",
    show_default=True,
    help="Model of time and cost: Shoal's own, or that of spotDNN's published code.",
)
@limits_options("")
@click.option("--limits", "quotas", type=_Numbers(whole=True), help="The most workers of each instance type.")
@click.option("--prices", type=_Numbers(whole=False), help="The price per hour of each instance type.")
@click.option(
    "--max-servers",
    type=Count(1, 64),
    default=1,
    show_default=True,
    help="The most parameter servers.",
)
@trace_option
@output_options("Write the Pareto front of time and cost to this PNG file.")
def plan_workload(
    workload: Path,
    pools: Path,
    loss: float,
    model: str,
    limits: Limits,
    quotas: list[int] | None,
    prices: list[float] | None,
    max_servers: int,
    traces: Sequence[str],
    output: Output,
) -> None:
    """Plan a workload in spotDNN's form.

    docs/simulate.md explains the files. The exit codes are those of `shoal plan`.
    """
    from shoal.sizing.plan import planner, spotdnn_files
    from shoal.sizing.plan.problem import Objective

    described = spotdnn_files.read_workload(workload)
    options = spotdnn_files.read_pools(pools, quotas, prices)
    _check_limits(options)
    objective = Objective(**limits.set_values())
    if model == "spotdnn":
        if traces or max_servers > 1 or limits.confidence is not None:
            raise UsageError(
                "spotDNN's formulas have one parameter server and no revocations: remove --trace, --max-servers and "
                "--confidence, or use --model shoal"
            )
        published = described.spotdnn(options, loss, objective)
        show(planner.plan_with(published, published.work), output)
        return
    problem = described.problem(options, loss, objective, servers=range(1, max_servers + 1))
    show(planner.plan(with_traces(problem, traces)), output)


def _check_limits(pools: Sequence[Pool]) -> None:
    if sum(pool.limit for pool in pools) == 0:
        raise UsageError("the limits of all pools are 0: raise the limit of at least one")
