"""Print plans and simulations: sentences, then tables and small plots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from shoal.cli import plots
from shoal.cli.cluster import console as wide_console
from shoal.sizing.plan.explain import duration, fleet, money

if TYPE_CHECKING:
    from shoal.sizing.plan.answer import Plan
    from shoal.sizing.simulate.summary import Result

__all__ = ["show_plan", "show_simulation"]

MOST_ROWS = 12


def show_plan(plan: Plan, reason: str, currency: str) -> None:
    """Print the reason, the pools, the Pareto front as a table and as a plot."""
    console = wide_console()
    for sentence in reason.split(". "):
        console.print(sentence.rstrip(".") + ".", highlight=False, markup=False, soft_wrap=True)
    table = Table(title="Workers per pool", title_justify="left")
    for column in ("pool", "kind", "step", "price/h"):
        table.add_column(column)
    for column in ("limit", "workers"):
        table.add_column(column, justify="right")
    for pool, n in zip(plan.pools, plan.counts, strict=True):
        kind = "spot" if pool.spot else "on-demand"
        row = [
            pool.name,
            kind,
            f"{pool.step_seconds * 1000:.0f} ms",
            money(pool.price, currency),
            str(pool.limit),
        ]
        table.add_row(*row, str(n), style="bold" if n else "dim")
    console.print(table)
    front = Table(title="Plans that no other plan beats in both time and cost", title_justify="left")
    for column in ("time", "cost", "servers", "workers"):
        front.add_column(column, justify="left" if column == "workers" else "right")
    step = max(1, -(-len(plan.pareto) // MOST_ROWS))
    shown = set(range(0, len(plan.pareto), step))
    shown |= {i for i, point in enumerate(plan.pareto) if point.counts == plan.counts}
    for i in sorted(shown):
        point = plan.pareto[i]
        front.add_row(
            duration(point.seconds),
            money(point.cost, currency),
            str(point.servers),
            fleet(plan.pools, point.counts),
            style="bold" if (point.counts, point.servers) == (plan.counts, plan.servers) else "",
        )
    console.print(front)
    if len(plan.pareto) > 1:
        print(plots.front_as_text(plan, currency, min(console.width, 100)))


def show_simulation(result: Result, reason: str, currency: str) -> None:
    """Print the reason, the policies in a table, and the workers over time."""
    console = wide_console()
    console.print(reason, highlight=False, markup=False, soft_wrap=True)
    table = Table(
        title=f"{result.runs:,} runs, deadline {duration(result.scenario.deadline)}",
        title_justify="left",
        box=box.SIMPLE,
    )
    table.add_column("policy", no_wrap=True)
    for column in ("in time", "min", "min 95%", "cost", "cost 95%", "good", "o-d"):
        table.add_column(column, justify="right")
    for outcome in result.outcomes:
        finish, cost = outcome.finish, outcome.cost
        ever = outcome.unfinished < 1  # else what was paid bought nothing
        table.add_row(
            outcome.name,
            "100%" if outcome.kept == 1 else f"{outcome.kept:.1%}",
            _minutes(finish["mean"]),
            _minutes(finish["p95"]),
            money(cost["mean"] or 0.0, currency) if ever else "-",
            money(cost["p95"] or 0.0, currency) if ever else "-",
            f"{outcome.goodput:.0%}",
            f"{outcome.on_demand_share:.0%}",
        )
    console.print(table)
    console.print(
        "good: part of the paid worker time that was useful; o-d: part that was on-demand; min: minutes to the end"
    )
    print(plots.workers_as_text(result, min(console.width, 100)))


def _minutes(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds / 60:,.1f}"
