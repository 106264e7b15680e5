"""Renders a `StatusReport` as a table or as one line, for `shoal-trainer run`."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal_trainer.contract import StatusReport, WorkerState

STYLES = {
    WorkerState.ACTIVE: "green",
    WorkerState.SILENT: "yellow",
}
"""Of the workers that the table shows."""
STARVING = 0.05
"""The table shows the share of time that workers wait for input if it is above this."""


def render(status: StatusReport | None, *, title: str, note: str = "") -> RenderableType:
    """Render the job in about 12 lines; `note` becomes the last line."""
    if status is None:
        return Group(
            Text(title, style="bold"), Text("waiting for the coordinator …", style="dim"), Text(note)
        )
    facts = (
        f"[b]{status.phase.value}[/b]",
        f"epoch {current_epoch(status)}{f'/{status.epochs_total}' if status.epochs_total else ''}",
        f"step {status.step:,}",
        f"loss {metric(status.loss)}",
        f"{number(status.samples_per_second, 0)} samples/s",
        f"left {duration(status.remaining_seconds)}",
    )
    head = Text(title, style="bold") + Text.from_markup("  ".join(("", *facts)))
    data = status.data
    counts = f"data done {data.done:,}  leased {data.leased:,}  of {'?' if data.total is None else f'{data.total:,}'}"
    if data.repeated or data.partial or data.lost:
        counts += (
            f"  [yellow]repeated {data.repeated:,}  partial {data.partial:,}  lost {data.lost:,}[/yellow]"
        )
    if (status.input_wait or 0.0) > STARVING:
        counts += f"  [yellow]workers wait for input {status.input_wait:.0%} of the time[/yellow]"
    bar = Padding(
        ProgressBar(total=100, completed=status.progress_percent or 0, width=60), 0
    )  # with a line's end
    workers = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")  # in a terminal of 80 columns
    for column in ("worker", "state", "node", "steps", "samples", "ms/step", "compute", "input", "stale"):
        left = column in {"worker", "state", "node"}
        workers.add_column(
            column, justify="left" if left else "right", no_wrap=column != "node", overflow="fold"
        )
    for worker in status.workers:
        if worker.state not in STYLES:
            continue
        workers.add_row(
            f"{worker.slot}-{worker.incarnation}", f"[{STYLES[worker.state]}]{worker.state.value}[/]", worker.node,
            f"{worker.steps:,}", f"{worker.samples:,}", milliseconds(worker.step_seconds),
            milliseconds(worker.compute_seconds), milliseconds(worker.input_seconds), number(worker.staleness, 1),
        )  # fmt: skip
    shards = "  ".join(
        f"ps-{s.index}-{s.epoch} {'ready' if s.ready else '[yellow]unreachable[/yellow]'} version {s.version:,}"
        for s in status.shards
    )
    metrics = "  ".join(f"{name} {metric(value)}" for name, value in sorted(status.metrics.items()))
    lines: list[RenderableType] = [head, bar, Text.from_markup(counts), Text.from_markup(shards)]
    lines += [workers] if workers.row_count else []
    lines += [Text(line) for line in (metrics, *notes(status), note) if line]
    return Group(*lines)


def notes(status: StatusReport) -> list[str]:
    """What the job and its workers wait for, and why nothing can be saved."""
    failing = status.snapshots_fail_because if status.snapshots_fail_seconds else ""
    return [*status.messages, *([f"no snapshot can be saved: {failing}"] if failing else [])]


def line(status: StatusReport | None) -> str:
    """Render the job in one line, for output that is not a terminal."""
    if status is None:
        return "waiting for the coordinator"
    first, *others = notes(status) or [""]
    return (
        _progress(status) + (f": {first}" if first else "") + (f" (and {len(others)} more)" if others else "")
    )


def _progress(status: StatusReport) -> str:
    active = sum(1 for worker in status.workers if worker.state is WorkerState.ACTIVE)
    workers = f"{active} worker{'' if active == 1 else 's'}"
    if not status.step:
        return (
            f"{status.phase.value}: {workers} joined; they import TensorFlow, then build and trace the model"
        )
    return (
        f"{status.phase.value} epoch {current_epoch(status)} step {status.step} loss {metric(status.loss)} "
        f"{number(status.samples_per_second, 0)} samples/s, {workers}, "
        f"{number(status.progress_percent, 0)} %, left {duration(status.remaining_seconds)}"
    )


def current_epoch(status: StatusReport) -> int:
    """The number of the current epoch, from 1; the last one if all are done."""
    return min(status.epoch + 1, status.epochs_total or status.epoch + 1)


def number(value: float | None, digits: int) -> str:
    """Format a number, or None as a dash."""
    return "-" if value is None else f"{value:,.{digits}f}"


def metric(value: float | None) -> str:
    """Format a loss or a metric as Keras does, or None as a dash."""
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) > 1e-3 or not value else f"{value:.4e}"


def milliseconds(seconds: float | None) -> str:
    """Format seconds as milliseconds, or None as a dash."""
    return "-" if seconds is None else f"{seconds * 1000:.1f}"


def duration(seconds: float | None) -> str:
    """Format seconds as 1h02m, 3m05s or 12s, or None as a dash."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
