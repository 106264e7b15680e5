"""The live table of the demo: the trainer's own, between the job as Kubernetes sees it and the last events."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from dev.demo.watch import Picture
from shoal_trainer.contract import Phase, StatusReport
from shoal_trainer.run import table

LAST_LINES = 8


def render(picture: Picture | None, lines: Sequence[str], seconds: float) -> RenderableType:
    """Everything, for rich's Live."""
    parts: list[RenderableType] = [Text(f"{seconds:5.0f} s", style="bold")]
    if picture is not None:
        parts += [Text(_job(picture)), table.render(_told(picture), title=picture.job.metadata.name)]
        parts += [Text(pod, style="yellow") for pod in _pods_without_report(picture)]
    parts += [Text(line, style="cyan") for line in lines[-LAST_LINES:]]
    return Group(*parts)


def line(picture: Picture) -> str:
    """The same in one line, for a log."""
    return f"{_job(picture)}; {table.line(picture.report)}"


def _job(picture: Picture) -> str:
    status = picture.job.status
    ready = ", ".join(
        f"{part.ready}/{part.desired} {name}"
        for name, part in (("parameter servers", status.parameter_servers), ("workers", status.workers))
    )
    return f"job {status.phase or 'new'}: {ready} ready, {status.restarts.disruptions} disruptions"


def _told(picture: Picture) -> StatusReport | None:
    """What the coordinator says; of a job that has ended, what the job says: the last report was before, of work."""
    status, report = picture.job.status, picture.report
    if report is None or not status.finished:
        return report
    of_work = {
        "samples_per_second": None,
        "remaining_seconds": None,
        "workers": (),
        "shards": (),
        "messages": (),
    }
    now = {"phase": Phase(status.phase), "step": status.training.step, "epoch": status.training.epoch}
    return report.model_copy(update=now | of_work)


def _pods_without_report(picture: Picture) -> list[str]:
    """The workers' pods that the coordinator does not know (yet), with their nodes."""
    known = {(w.slot, w.incarnation) for w in picture.report.workers} if picture.report else set()
    lines = []
    for slot in sorted(picture.job.status.slots, key=lambda s: (s.index, s.incarnation)):
        if slot.role == "worker" and (slot.index, slot.incarnation) not in known:
            cause = f" ({slot.cause})" if slot.cause else ""
            lines.append(f"worker {slot.index}-{slot.incarnation}  {slot.state}{cause}  {slot.node or ''}")
    return lines
