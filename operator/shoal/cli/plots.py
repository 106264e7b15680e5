"""Plots as PNG files and as text: the Pareto front, and the policies of a simulation.

A file is written under a temporary name and renamed, so that it is always complete; a link or a device is written to
and stays what it is.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import UsageError
from shoal.sizing.plan.explain import fleet

if TYPE_CHECKING:
    from shoal.sizing.plan.answer import Plan
    from shoal.sizing.simulate.calibrate import Calibration
    from shoal.sizing.simulate.summary import Result

__all__ = ["front_as_text", "workers_as_text", "write_calibration", "write_front", "write_simulation"]


def write_front(plan: Plan, path: Path, currency: str) -> None:
    """Time and cost of the Pareto front, the plan, and the limits."""
    figure = _figure(7, 4.5)
    axes = figure.add_subplot()
    axes.step([p.seconds / 60 for p in plan.pareto], [p.cost for p in plan.pareto], where="post", color="0.7")
    axes.plot(
        [p.seconds / 60 for p in plan.pareto], [p.cost for p in plan.pareto], "o", ms=4, label="best plans"
    )
    label = fleet(plan.pools, plan.counts)
    axes.plot([plan.seconds / 60], [plan.cost], "*", ms=15, color="C3", label=f"the plan: {label}")
    if plan.objective.deadline is not None:
        axes.axvline(plan.objective.deadline / 60, color="C1", ls="--", label="deadline")
    if plan.objective.budget is not None:
        axes.axhline(plan.objective.budget, color="C2", ls="--", label="budget")
    axes.set(
        xlabel="time (min)",
        ylabel=f"cost ({currency})",
        title="Plans that no other plan beats in time and cost",
    )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.legend(fontsize="small")
    _write(figure, path)


def write_simulation(result: Result, path: Path, currency: str) -> None:
    """Workers over time, finish times and costs of every policy."""
    figure = _figure(10, 8)
    grid = figure.add_gridspec(2, 2)
    top = figure.add_subplot(grid[0, :])
    left, right = figure.add_subplot(grid[1, 0]), figure.add_subplot(grid[1, 1])
    minutes = [t / 60 for t in result.times]
    for outcome in result.outcomes:
        top.plot(minutes, outcome.workers_over_time, label=outcome.name)
    top.axvline(result.scenario.deadline / 60, color="0.4", ls="--")
    top.set(xlabel="time (min)", ylabel="running workers (mean)", title="Workers over time")
    top.legend(fontsize="small")
    names = [outcome.name for outcome in result.outcomes]
    for axes, values, label in (
        (left, [o.finish_minutes for o in result.outcomes], "finish time (min)"),
        (right, [o.costs for o in result.outcomes], f"cost ({currency})"),
    ):
        axes.boxplot(values, orientation="horizontal", tick_labels=names, whis=(0, 100))
        axes.set_xlabel(label)
    left.axvline(result.scenario.deadline / 60, color="0.4", ls="--")
    _write(figure, path)


def write_calibration(found: Calibration, path: Path) -> None:
    """What was kept of what was promised: every cell over its slack, and the mean with its interval."""
    figure = _figure(8, 4.5)
    axes = figure.add_subplot()
    for name in sorted({cell.trace for cell in found.cells}):
        cells = [cell for cell in found.cells if cell.trace == name]
        axes.plot(
            [cell.slack for cell in cells], [cell.kept for cell in cells], "o", ms=4, alpha=0.7, label=name
        )
    axes.axhline(found.promised, color="0.4", ls="--", label=f"promised: {100 * found.promised:.3g}%")
    axes.axhspan(found.low, found.high, color="C3", alpha=0.15)
    axes.axhline(
        found.kept,
        color="C3",
        label=f"kept: {found.kept:.1%} (95 % interval {found.low:.1%} to {found.high:.1%})",
    )
    axes.set(xlabel="slack", ylabel="part of the left-out windows kept", title="Are promises kept?")
    axes.legend(fontsize="small")
    _write(figure, path)


def front_as_text(plan: Plan, currency: str, width: int) -> str:
    """The Pareto front for a terminal."""
    best = [p for p in plan.pareto if (p.counts, p.servers) != (plan.counts, plan.servers)]
    return _text(
        [
            ("best plans", "o", [p.seconds / 60 for p in best], [p.cost for p in best]),
            ("the plan", "X", [plan.seconds / 60], [plan.cost]),
        ],
        "time (min)",
        f"cost ({currency})",
        width,
    )


def workers_as_text(result: Result, width: int) -> str:
    """Mean workers over time of the main policies, for a terminal."""
    minutes = [t / 60 for t in result.times]
    lines = [
        (o.name, marker, minutes, list(o.workers_over_time))
        for o, marker in zip(result.outcomes, "x.o+*~", strict=False)
        if o.name in ("shoal", "spot only", "uniform progress")
    ]
    return _text(lines, "time (min)", "workers", width)


def _text(
    series: list[tuple[str, str, list[float], list[float]]],
    across: str,
    up: str,
    width: int,
    height: int = 16,
) -> str:
    """Plot series of (label, marker, x, y) without colors, for logs."""
    import plotext

    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, height)
    for _, marker, x, y in series:
        if x:
            signal = figure.signal(x, y, marker=marker)
            figure.draw(signal)
    figure.label(across, "x")
    figure.label(up, "y")
    legend = "   ".join(f"{marker} {label}" for label, marker, x, _ in series if x)
    return f"{plotext.uncolorize(str(figure.build()))}\n{legend}"


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _write(figure: Any, path: Path) -> None:
    is_file = not os.path.lexists(path) or stat.S_ISREG(path.lstat().st_mode)
    # A rename would take the place of a link or, as root, of a device.
    written = path.with_name(f".{path.name}.{os.getpid()}") if is_file else path
    try:
        figure.savefig(written, format="png", dpi=120)
        if is_file:
            written.replace(path)
    except OSError as error:
        if is_file:
            written.unlink(missing_ok=True)
        raise UsageError(f"cannot write the plot to {path}: {error.strerror or error}") from error
