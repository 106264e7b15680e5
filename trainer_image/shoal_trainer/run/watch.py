"""Shows a local run on the console: a live table, one line per epoch above it, and the result."""

from __future__ import annotations

import signal
import time

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape

from shoal_trainer.contract import EXIT_USER, Outcome, StatusReport, TerminationMessage
from shoal_trainer.data.source import UNPLACED
from shoal_trainer.errors import TrainerError
from shoal_trainer.run.epoch_lines import EpochLines
from shoal_trainer.run.processes import LocalJob, LocalRun
from shoal_trainer.run.table import line, metric, render

POLL_SECONDS = 0.25
LINE_SECONDS = 5.0
"""Between two lines of output that is not a terminal."""
UNREACHABLE_SECONDS = 3.0
"""A shorter silence of the coordinator is not shown: it ends before the last process does."""


def watch(job: LocalJob) -> int:
    """Run the job until it ends; returns the exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end as Ctrl-C does, with all processes
    console = Console()
    started = time.monotonic()
    with LocalRun(job) as processes:
        console.print(f"logs in {processes.logs}, kept if the job fails", style="dim", highlight=False)
        try:
            outcome = _follow(processes, job.entrypoint, console, started)
            warnings = processes.warnings()
        except KeyboardInterrupt:
            _suspend(processes, console)
            return 130
    if outcome.outcome is Outcome.FAILED:
        text = escape(f"{outcome.reason}: {outcome.message}")
        console.print(f"[red]Failed[/red] {text}", highlight=False, soft_wrap=True)
        return EXIT_USER
    _print_result(console, outcome, warnings, time.monotonic() - started)
    return 0


def _follow(processes: LocalRun, title: str, console: Console, started: float) -> TerminationMessage:
    report: StatusReport | None = None
    reported_at = started
    printed_at = 0.0
    epochs, told = EpochLines(), False
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while (outcome := processes.poll()) is None:
            now = time.monotonic()
            newest = processes.status()
            if newest is not None:
                report, reported_at = newest, now
                _print_lines(console, epochs.update(newest, now))
            if processes.too_often and not told:
                told = True
                console.print(
                    f"[yellow]warning[/yellow] {escape(processes.too_often)}", highlight=False, soft_wrap=True
                )
            note = f"{len(processes.processes)} processes, {processes.kills} killed, {now - started:.0f} s"
            if report is not None and now - reported_at > UNREACHABLE_SECONDS:
                note += f", coordinator unreachable for {now - reported_at:.0f} s"
            if console.is_terminal:
                table = render(report, title=title, note=note)
                live.update(Group(*epochs.pending, table), refresh=True)
            elif now - printed_at >= LINE_SECONDS:
                printed_at = now
                console.print(f"{line(report)}; {note}", highlight=False, soft_wrap=True)
            time.sleep(POLL_SECONDS)
        _print_lines(console, epochs.finish(outcome, time.monotonic()))
        if report is not None and console.is_terminal:
            live.update(render(report, title=title), refresh=True)
    return outcome


def _suspend(processes: LocalRun, console: Console) -> None:
    """Stop with a final snapshot; at once if interrupted again."""

    def say(text: str) -> None:
        console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)

    say("Stopping: saving a last snapshot. Press Ctrl-C again to stop without it.")
    found = True
    try:
        found = processes.suspend()
    except KeyboardInterrupt:
        pass
    except (TrainerError, OSError) as error:
        say(f"The storage cannot be read: {error}")
    if found:
        say(f"Stopped. To continue from the newest snapshot, add --initial-from {processes.run_uri}")
    else:
        say("Stopped. There is no snapshot to continue from.")


def _print_result(console: Console, outcome: TerminationMessage, warnings: list[str], seconds: float) -> None:
    metrics = "  ".join(f"{name} {metric(value)}" for name, value in sorted(outcome.metrics.items()))
    console.print(
        f"[green]Succeeded[/green] in {seconds:.0f} s, {outcome.step:,} steps  {metrics}", soft_wrap=True
    )
    placed = not any(UNPLACED in warning for warning in warnings)
    _print_lines(console, [f"data: {describe_data(outcome, placed=placed)}"])
    for warning in warnings:
        console.print(f"[yellow]warning[/yellow] {escape(warning)}", highlight=False, soft_wrap=True)
    _print_lines(console, [f"end: {outcome.message}", f"model: {outcome.model_uri}"])


def describe_data(outcome: TerminationMessage, *, placed: bool = True) -> str:
    """How often the samples of the complete epochs were trained, in words.

    `placed`: a range of samples has the same ones for every worker.
    """
    ranges, lost = outcome.ranges, outcome.data.lost
    others = [
        (ranges.repeated, "more than once"),
        (ranges.partial, "on some parameter servers only"),
        (ranges.never, "never"),
    ]
    exceptions = [f"{count:,} {text}" for count, text in others if count]
    if not exceptions and not lost:
        if not ranges.once:
            return "training stopped before the end of the first epoch"
        if not placed:
            return f"every completed epoch had its number of samples, {UNPLACED}"
        return "every sample was trained exactly once per completed epoch"
    text = ", ".join([f"ranges of samples trained once: {ranges.once:,}", *exceptions])
    return f"{text}; {lost:,} samples left out" if lost else text


def _print_lines(console: Console, lines: list[str]) -> None:
    for text in lines:
        console.print(text, markup=False, highlight=False, soft_wrap=True)
