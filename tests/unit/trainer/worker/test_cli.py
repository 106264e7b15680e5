"""The command line: the status table, usage errors, and the final lines of a run."""

import contextlib
import io
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from rich.console import Console

from shoal_trainer import cli
from shoal_trainer.cli import main
from shoal_trainer.contract import (
    DataReport,
    Outcome,
    Phase,
    Role,
    ShardReport,
    StatusReport,
    TerminationMessage,
    WorkerReport,
    WorkerState,
)
from shoal_trainer.local import LocalRun
from shoal_trainer.table import duration, line, render

STATUS = StatusReport(
    job_uid="u",
    phase=Phase.TRAINING,
    epoch=2,
    epochs_total=10,
    step=1234,
    loss=0.5,
    samples_per_second=321.0,
    progress_percent=25.0,
    remaining_seconds=65.0,
    metrics={"val_accuracy": 0.9},
    data=DataReport(done=100, leased=32, total=1437, repeated=16),
    workers=(
        WorkerReport(
            slot=0, incarnation=1, state=WorkerState.ACTIVE, steps=7, samples=112, step_seconds=0.0123
        ),
        WorkerReport(slot=0, incarnation=0, state=WorkerState.FENCED),
    ),
    shards=(ShardReport(index=0, epoch=3, version=99),),
)


def shown(status, **options):
    console = Console(file=io.StringIO(), width=140)
    console.print(render(status, title="digits:job", **options))
    return console.file.getvalue()


def test_table_shows_the_status():
    text = shown(STATUS, note="4 processes")
    for words in ("Training", "epoch 3/10", "step 1,234", "loss 0.5000", "321 samples/s", "left 1m05s", "repeated 16",
                  "0-1", "12.3", "ps-0-3 ready version 99", "val_accuracy 0.9000", "4 processes"):  # fmt: skip
        assert words in text
    assert "Fenced" not in text
    assert "Fenced" in shown(STATUS, all_workers=True)
    assert "waiting for the coordinator" in shown(None)


def test_line_summarizes_the_status():
    assert line(STATUS) == "Training epoch 3 step 1234 loss 0.5000 321 samples/s, 1 workers, 25 %, left 1m05s"
    assert line(None) == "waiting for the coordinator"


def test_duration_is_human_readable():
    assert [duration(s) for s in (None, 4.4, 61, 3720)] == ["-", "4s", "1m01s", "1h02m"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], "Missing argument 'MODULE:OBJECT'"),
        (["run", "a:b", "--workers", "0"], "0 is not in the range"),
        (["run", "a:b", "--arg", "width"], "'width' must be NAME=VALUE"),
        (["run", "a:b", "--until", "val_accuracy"], "must be METRIC=VALUE with a number"),
        (["run", "a:b", "--until", "val_accuracy=1e999"], "must be METRIC=VALUE with a number"),
        (["run", "a:b", "--until", "=0.9"], "must be METRIC=VALUE with a number"),
        (["run", "a:b", "--until", "dice=0.9"], "add --mode Min or --mode Max"),
        (["run", "a:b", "--mode", "Max"], "--mode requires --until"),
        (["run", "a:b", "--kill-every", "0"], "is not in the range"),
    ],
)
def test_usage_error_says_what_to_change(arguments, words):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_work_without_configuration_suggests_run(tmp_path):
    import subprocess
    import sys

    message = tmp_path / "termination"
    done = subprocess.run(
        [sys.executable, "-m", "shoal_trainer.cli", "work"],
        env={"PATH": "/usr/bin", "SHOAL_TERMINATION_LOG": str(message)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "Use `shoal-trainer run`" in done.stderr
    assert "shoal-trainer run" in message.read_text()


def test_final_lines_are_not_truncated_without_a_terminal(monkeypatch, capsys):
    end = TerminationMessage(
        outcome=Outcome.SUCCEEDED, reason="", message="", step=1234,
        metrics={f"val_metric_of_a_long_name_{n}": 0.5 for n in range(9)},
    )  # fmt: skip
    run = SimpleNamespace(
        logs="/logs", poll=lambda: end, warnings=lambda: ["the optimizer runs on the workers"]
    )
    monkeypatch.setattr("shoal_trainer.local.LocalRun", lambda _job: contextlib.nullcontext(run))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setenv("COLUMNS", "40")
    assert cli._watch(SimpleNamespace(entrypoint="a:b")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line] == [
        "logs",
        "Succeeded",
        "ranges:",
        "warning",
        "end:",
        "model:",
    ]


def test_warnings_of_the_workers_are_listed_once(tmp_path):
    log = tmp_path / "worker-0-0.log"
    line = "2026-01-01 00:00:00,000 WARNING shoal_trainer.worker.compose: the optimizer runs on the workers: amsgrad"
    log.write_text(f"2026 INFO x: y\n{line}\n{line}\n")
    run = object.__new__(LocalRun)
    run.processes = [SimpleNamespace(role=role, log=log) for role in (Role.WORKER, Role.WORKER, Role.PS)]
    assert run.warnings() == ["the optimizer runs on the workers: amsgrad"]
