"""The live table of the job: one row for the job, a row for each worker, the last events."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dev.demo.watch import Picture
from shoal_trainer.contract import WorkerReport

LAST_LINES = 8


def render(picture: Picture | None, lines: Sequence[str], seconds: float) -> RenderableType:
    """Everything, for rich's Live."""
    parts: list[RenderableType] = []
    if picture is not None:
        parts += [_job(picture), _workers(picture)]
    parts += [Text(line, style="cyan") for line in lines[-LAST_LINES:]]
    return Group(Text(f"{seconds:5.0f} s", style="bold"), *parts)


def line(picture: Picture) -> str:
    """The same in one line, for a log."""
    job, report = picture.job, picture.report
    step = report.step if report else job.status.training.step
    loss = f"{report.loss:.4f}" if report and report.loss is not None else "-"
    speed = f"{report.samples_per_second:.0f}" if report and report.samples_per_second else "-"
    percent = f"{report.progress_percent:.0f} %" if report and report.progress_percent is not None else "-"
    workers = ", ".join(
        f"{s.index}.{s.incarnation} {s.node or '-'} {s.state}" for s in job.status.slots if s.role == "worker"
    )
    return (
        f"{job.status.phase or 'new'}: {percent}, step {step}, loss {loss}, {speed} samples/s, disruptions "
        f"{job.status.restarts.disruptions}, PS {job.status.parameter_servers.ready}, workers {workers or '-'}"
    )


def _job(picture: Picture) -> Table:
    status, report = picture.job.status, picture.report
    table = Table(show_edge=False, pad_edge=False)
    for name in (
        "Phase",
        "PS",
        "Workers",
        "Step",
        "Epoch",
        "Loss",
        "Samples/s",
        "Data",
        "Progress",
        "Disruptions",
        "ETA",
    ):
        table.add_column(name, justify="left" if name == "Phase" else "right")
    data = report.data if report else None
    table.add_row(
        status.phase or "-",
        f"{status.parameter_servers.ready}/{status.parameter_servers.desired}",
        f"{status.workers.ready}/{status.workers.desired}",
        str(report.step if report else status.training.step),
        f"{report.epoch}/{report.epochs_total or '-'}" if report else "-",
        _number(report.loss if report else None, ".4f"),
        _number(report.samples_per_second if report else None, ".0f"),
        f"{data.done}/{data.leased}/{data.total or '-'}" if data else "-",
        _number(report.progress_percent if report else None, ".0f", " %"),
        str(status.restarts.disruptions),
        _number(report.remaining_seconds if report else None, ".0f", " s"),
    )
    return table


def _workers(picture: Picture) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for name in ("Worker", "Node", "State", "Steps", "Step time", "Staleness", "Says"):
        table.add_column(name, justify="right" if name in {"Steps", "Step time", "Staleness"} else "left")
    heard: dict[tuple[int, int], WorkerReport] = {}
    if picture.report:
        heard = {(w.slot, w.incarnation): w for w in picture.report.workers}
    for slot in sorted(picture.job.status.slots, key=lambda s: (s.role, s.index, s.incarnation)):
        word = heard.get((slot.index, slot.incarnation)) if slot.role == "worker" else None
        table.add_row(
            f"{slot.role} {slot.index}.{slot.incarnation}",
            slot.node or "-",
            slot.state + (f" ({slot.cause})" if slot.cause else ""),
            str(word.steps) if word else "-",
            _number(word.step_seconds * 1000 if word and word.step_seconds else None, ".0f", " ms"),
            _number(word.staleness if word else None, ".1f"),
            word.state if word else "-",
        )
    return table


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else format(value, form) + unit
