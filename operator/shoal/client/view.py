"""A job and a list of jobs as rich tables. Pure: what is shown is what was read."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from datetime import datetime
from typing import IO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from shoal.api.training_job import TrainingJob
from shoal.api.training_job_status import TrainingJobStatus, TrainingProgress
from shoal.client.job import UNSEEN, reason_of
from shoal.words import age, decimal, duration, metric, percent
from shoal_trainer.contract import plain

PHASES = {
    "Running": "green",
    "Succeeded": "bold green",
    "Failed": "bold red",
    "Suspended": "blue",
    "Starting": "yellow",
    "Pending": "yellow",
}
STATES = {"Running": "green", "Starting": "yellow", "Silent": "yellow", "Draining": "blue", "Ended": "dim"}


WIDEST = 10_000
"""Characters: no table is wider."""


class _PlainConsole(Console):
    """A console that sends no control characters of what it shows, but its own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)


def plain_console(width: int | None = None, file: IO[str] | None = None) -> Console:
    """A console for words of others: TensorFlow's `[/job:localhost/…]` is no markup, and `:0:` is no emoji."""
    return _PlainConsole(width=width, file=file, markup=False, emoji=False)


class _Fitting(Table):
    """A table without the columns for which the terminal is too narrow. Names are folded where nothing else helps."""

    DISPENSABLE = ("SPENT", "LEFT", "LOSS", "DISRUPTIONS", "DONE", "SAMPLES/S", "AGE", "WORKERS")
    """The least needed first."""
    WHOLE = ("NAMESPACE", "NAME", "REASON")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = copy(self)
        for head in self.DISPENSABLE:
            if shown.__rich_measure__(console, options.update(max_width=WIDEST)).minimum <= options.max_width:
                break
            shown.columns = [each for each in shown.columns if each.header != head]
        else:
            shown.columns = [
                replace(each, no_wrap=False, overflow="fold") if each.header in self.WHOLE else each
                for each in shown.columns
            ]
        yield from Table.__rich_console__(shown, console, options)


def job_table(jobs: Iterable[TrainingJob], *, namespaces: bool = False, now: datetime) -> Table:
    """One line for each job; units are in the header."""
    table = _Fitting(box=None, padding=(0, 2, 0, 0), header_style="bold")
    heads = [*(["NAMESPACE"] if namespaces else []), "NAME", "PHASE", "WORKERS", "SAMPLES/S", "LOSS", "DONE", "LEFT",
             "DISRUPTIONS", "SPENT", "AGE", "REASON"]  # fmt: skip
    numbers = {"SAMPLES/S", "LOSS", "DONE", "LEFT", "DISRUPTIONS", "SPENT"}
    for head in heads:
        table.add_column(head, justify="right" if head in numbers else "left", no_wrap=head != "REASON")
    for job in jobs:
        status = job.status
        over = status.finished
        table.add_row(
            *([job.metadata.namespace] if namespaces else []),
            job.metadata.name,
            phase(job),
            f"{status.workers.ready}/{job.wanted}",
            "-" if over else decimal(status.training.samples_per_second),
            metric(status.training.loss),
            percent(status.training.progress_percent),
            "-" if over else duration(status.training.remaining_seconds),
            str(status.restarts.disruptions),
            decimal(status.cost.accumulated, 2) if status.cost else "-",
            age(job.metadata.creation_timestamp, now),
            why(status, now, short=True),
        )
    return table


def follow_view(job: TrainingJob, *, now: datetime, most: int | None = None) -> RenderableType:
    """A job's progress and data, what it waits for, and its pods, first those that do not simply run.

    `most`: only so many of them, as the terminal has lines for no more.
    """
    status, training, data = job.status, job.status.training, job.status.data
    head = Table.grid(padding=(0, 2))
    head.add_row(Text(job.metadata.name, style="bold"), phase(job), *_progress(training))
    counts = f"data done {data.done:,}  leased {data.leased:,}  of {'?' if data.total is None else f'{data.total:,}'}"
    counts += f"  repeated {data.repeated:,}  partial {data.partial:,}  lost {data.lost:,}"
    pods = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for each in ("POD", "STATE", "POOL", "NODE", "SINCE", "WHY"):
        pods.add_column(each)
    runs = {slot.place: slot.state == "Running" and not slot.cause for slot in status.slots}
    for slot in sorted(status.slots, key=lambda s: (runs[s.place], s.place))[:most]:
        state = Text(slot.state, style=STATES.get(slot.state, ""))
        since = age(slot.ended_at or slot.created_at, now)
        pods.add_row(
            f"{slot.role} {slot.index}-{slot.incarnation}",
            state,
            slot.pool or "-",
            slot.node or "-",
            since,
            slot.cause,
        )
    metrics = "  ".join(f"{name} {metric(value)}" for name, value in sorted(training.metrics.items()))
    plan = status.plan
    lines: list[RenderableType] = [head]
    if training.step:
        # The padding ends the bar's line.
        bar = ProgressBar(total=100, completed=training.progress_percent or 0, width=60)
        lines += [Padding(bar, 0), Text(counts)]
    lines += [Text(metrics)] if metrics else []
    lines += [Text(f"plan: {plan.summary}. {plan.reason}")] if plan and plan.summary else []
    lines += [Text(each, style="yellow") for each in (why(status, now), training.message) if each]
    return Group(*lines, pods)


def _progress(training: TrainingProgress) -> list[str]:
    """What is known of the training; nothing before its first step."""
    if not training.step:
        return []
    known = {
        "loss {}": (training.loss, metric(training.loss)),
        "{} samples/s": (training.samples_per_second, decimal(training.samples_per_second)),
        "{} done": (training.progress_percent, percent(training.progress_percent)),
        "left {}": (training.remaining_seconds, duration(training.remaining_seconds)),
    }
    numbers = [words.format(text) for words, (value, text) in known.items() if value is not None]
    return [f"epoch {training.epoch}", f"step {training.step:,}", *numbers]


def one_line(job: TrainingJob, *, now: datetime) -> str:
    """A job in one line, for output that is not a terminal."""
    status, training = job.status, job.status.training
    parts = [
        f"{job.metadata.name} {status.phase or 'new'}",
        f"workers {status.workers.ready}/{job.wanted}",
        *_progress(training),
    ]
    reasons = [each for each in (why(status, now), training.message) if each]
    return ", ".join(parts) + (f": {'; '.join(reasons)}" if reasons else "")


def why(status: TrainingJobStatus, now: datetime, *, short: bool = False) -> str:
    """What the job waits for or why it ended; empty if it simply trains. `short`: the reason without its message."""
    if not status.phase:
        return UNSEEN
    standing = status.standing(now)
    said = status.reason if short else reason_of(status)
    if standing and status.is_old(now):
        standing += ": shoal doctor says whether an operator runs"
    return said or standing


def phase(job: TrainingJob) -> Text:
    """The phase in its colour."""
    name = job.status.phase
    return Text(name or "-", style=PHASES.get(name, ""))
