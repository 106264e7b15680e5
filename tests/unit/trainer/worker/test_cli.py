"""The command line: the status table, usage errors, and the final lines of a run."""

import contextlib
import io
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from shoal_trainer.cli import main
from shoal_trainer.contract import (
    DataReport,
    EpochReport,
    Outcome,
    Phase,
    Ranges,
    Role,
    ShardReport,
    StatusReport,
    TerminationMessage,
    WorkerReport,
    WorkerState,
)
from shoal_trainer.data.stream import Stream
from shoal_trainer.environment import use_tensorflow
from shoal_trainer.errors import Unreachable
from shoal_trainer.run import watch
from shoal_trainer.run.processes import LocalRun
from shoal_trainer.run.table import duration, line, render

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
            slot=0,
            incarnation=1,
            state=WorkerState.ACTIVE,
            steps=7,
            samples=112,
            step_seconds=0.0123,
            message="has waited 31 s for data.csv",
        ),
        WorkerReport(slot=0, incarnation=0, state=WorkerState.FENCED, message="was replaced"),
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
                  "0-1", "12.3", "ps-0-3 ready version 99", "val_accuracy 0.9000", "4 processes",
                  "worker 0-1: has waited 31 s for data.csv"):  # fmt: skip
        assert words in text
    assert "Fenced" not in text
    assert "was replaced" not in text
    assert "waiting for the coordinator" in shown(None)


def test_line_summarizes_the_status():
    worker = replace(STATUS.workers[0], message="")
    quiet = STATUS.model_copy(update={"workers": (worker,)})
    assert line(quiet) == "Training epoch 3 step 1234 loss 0.5000 321 samples/s, 1 worker, 25 %, left 1m05s"
    starting = StatusReport(job_uid="u", phase=Phase.STARTING)
    assert (
        line(starting) == "Starting: 0 workers joined; they import TensorFlow, then build and trace the model"
    )
    assert line(None) == "waiting for the coordinator"


def test_output_that_is_no_terminal_says_what_the_job_waits_for():
    """In a log file, a job whose disk is full stood at 100 % without a word."""
    assert line(STATUS).endswith("left 1m05s: worker 0-1: has waited 31 s for data.csv")
    full = {"snapshots_fail_seconds": 9.0, "snapshots_fail_because": "No space left on device"}
    assert line(STATUS.model_copy(update=full)).endswith("for data.csv (and 1 more)")
    starting = StatusReport(job_uid="u", phase=Phase.STARTING, **full)
    assert line(starting).endswith("the model: no snapshot can be saved: No space left on device")
    assert "no snapshot can be saved: No space left on device" in shown(STATUS.model_copy(update=full))


def test_duration_is_human_readable():
    assert [duration(s) for s in (None, 4.4, 61, 3720)] == ["-", "4s", "1m01s", "1h02m"]


def test_storage_that_cannot_be_written_is_said_before_anything_starts(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    result = CliRunner().invoke(main, ["run", "json:dumps", "--storage", "s3://nowhere/runs"])
    assert result.exit_code == 2
    assert "cannot write s3://nowhere/runs/shoal-" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], "Missing argument 'FILE.py[:OBJECT]|MODULE:OBJECT'"),
        (
            ["check", "quickstart"],
            "'quickstart' must be FILE.py, FILE.py:OBJECT or MODULE:OBJECT, for example digits.py:job",
        ),
        (["check", "nofile.py"], "there is no file nofile.py"),
        (["check", "nofile.py:job"], "there is no file nofile.py"),
        (["run", "a:b", "--workers", "0"], "0 is not in the range"),
        (["run", "a:b", "--arg", "width"], "'width' must be NAME=VALUE"),
        (["run", "a:b", "--until", "val_accuracy"], "must be METRIC=VALUE with a number"),
        (["run", "a:b", "--until", "val_accuracy=1e999"], "must be METRIC=VALUE with a number"),
        (["run", "a:b", "--until", "=0.9"], "must be METRIC=VALUE with a number"),
        (["run", "a:b", "--until", "val_accuracy>=0.9"], "must be METRIC=VALUE with a number"),
        (["run", "a:b", "--mode", "max"], "--mode requires --until"),
        (["run", "a:b", "--storage", "claim:runs"], "claim:runs is a volume of a cluster"),
        (["run", "json:dumps", "--storage", "s4://bucket/runs"], "Use a folder, s3://… or gs://…"),
        (
            ["run", "a:b", "--storage", "s3:/bucket/x"],
            "s3:/bucket/x is no folder and no URI: s3://BUCKET/FOLDER",
        ),
        (["run", "a:b", "--storage", "gs:bucket"], "gs:bucket is no folder and no URI: gs://BUCKET/FOLDER"),
        (
            ["run", "a:b", "--storage", "s3:///bucket"],
            "s3:///bucket is no folder and no URI: s3://BUCKET/FOLDER",
        ),
        (["run", "a:b", "--storage", "file:/tmp/x"], "file:/tmp/x is no folder and no URI: file:///FOLDER"),
        (["run", "a:b", "--initial-from", "s3:/bucket/x"], "s3:/bucket/x is no folder and no URI"),
        (["run", "a:b", "--until", "dice=0.9", "--mode", "up"], "is not one of 'min', 'max'"),
        (["run", "a:b", "--kill-every", "0"], "is not in the range"),
    ],
)
def test_usage_error_says_what_to_change(arguments, words):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_a_script_is_read_in_the_encoding_of_its_coding_line(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    jobs = []
    monkeypatch.setattr(watch, "watch", lambda job, *_, **__: jobs.append(job) or 0)
    made = "# -*- coding: latin-1 -*-\ndef job(größe):\n    return Training(model=None, data=größe)\n"
    Path("old.py").write_bytes(made.encode("latin-1"))
    result = CliRunner().invoke(main, ["run", "old.py", "--arg", "größe=1"])
    assert result.exit_code == 0, result.output
    assert (jobs[0].entrypoint, jobs[0].args) == ("old:job", {"größe": 1})
    Path("old.py").write_bytes("\ufeffjob = Training(model=None, data=1)\n".encode())
    assert CliRunner().invoke(main, ["run", "old.py"]).exit_code == 0
    Path("old.py").write_bytes(made.partition("\n")[2].encode("latin-1"))
    result = CliRunner().invoke(main, ["run", "old.py"])
    assert result.exit_code == 2
    assert "old.py, line 1: (unicode error) 'utf-8' codec can't decode" in result.output


def test_arguments_are_those_of_a_training_job(monkeypatch):
    jobs = []
    monkeypatch.setattr("shoal_trainer.worker.entrypoint.check", lambda *_: None)
    monkeypatch.setattr(watch, "watch", lambda job, *_, **__: jobs.append(job) or 0)
    given = ("width=64", 'name="64"', "rate=0.1", "version=1.10", "fast=true", "path=a=b", "layers=[64,32]")
    result = CliRunner().invoke(main, ["run", "a:b", *(word for each in given for word in ("--arg", each))])
    assert result.exit_code == 0, result.output
    assert jobs[0].args == {
        "width": 64, "name": "64", "rate": 0.1, "version": "1.10", "fast": True, "path": "a=b", "layers": [64, 32],
    }  # fmt: skip


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


END = TerminationMessage(
    outcome=Outcome.SUCCEEDED, step=1234, epoch=2, loss=0.5, metrics={"val_accuracy": 0.9},
    ranges=Ranges(once=64),
)  # fmt: skip


def watched(monkeypatch, reports, end=END, **given):
    """Watch a run whose coordinator gives these reports, then ends; returns the exit code."""
    reports = iter(reports)
    last = []

    def poll():
        last[:] = [next(reports, END)]
        return end if last[0] is END else None

    run = SimpleNamespace(
        logs="/logs", poll=poll, status=lambda: last[0], processes=[], kills=0, too_often="",
        warnings=lambda: ["the optimizer runs on the workers"],
    )  # fmt: skip
    vars(run).update(given)
    monkeypatch.setattr(watch, "LocalRun", lambda _job: contextlib.nullcontext(run))
    monkeypatch.setattr(watch, "POLL_SECONDS", 0)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return watch.watch(SimpleNamespace(entrypoint="a:b"))


def test_final_lines_are_not_truncated_without_a_terminal(monkeypatch, capsys):
    end = END.model_copy(update={"metrics": {f"val_metric_of_a_long_name_{n}": 0.5 for n in range(9)}})
    monkeypatch.setenv("COLUMNS", "40")
    assert watched(monkeypatch, [], end) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line] == [
        "logs", "Epoch", "Succeeded", "data:", "warning", "end:", "model:",
    ]  # fmt: skip


def test_failure_message_is_not_read_as_markup(monkeypatch, capsys):
    message = "ValueError: unexpected [/bold] in [red] (job.py:3 in build)"
    end = TerminationMessage(outcome=Outcome.FAILED, reason="UserError", message=message)
    assert watched(monkeypatch, [], end) == 2
    assert f"Failed UserError: {message}" in capsys.readouterr().out


def test_each_epoch_is_printed_once_above_the_table(monkeypatch, capsys):
    first = STATUS.model_copy(update={"metrics": {}})
    second = first.model_copy(update={"epochs": (EpochReport(epoch=0, metrics={"loss": 0.5}),)})
    evaluated = EpochReport(epoch=0, metrics={"loss": 0.5, "val_loss": 0.25}, complete=True)
    third = second.model_copy(update={"epochs": (evaluated,)})
    assert watched(monkeypatch, [None, first, second, second, third, third, None]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Epoch")]
    assert [line.rpartition("  ")[0] for line in lines] == [
        "Epoch 1/10  loss 0.5000  val_loss 0.2500",
        "Epoch 2/10  loss 0.5000  val_accuracy 0.9000",
    ]


def test_last_table_stays_when_the_coordinator_has_ended(monkeypatch, capsys):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert watched(monkeypatch, [STATUS, None, None]) == 0
    output = capsys.readouterr().out
    assert "step 1,234" in output
    assert "waiting for the coordinator" not in output


@pytest.mark.parametrize(
    ("counts", "lost", "text"),
    [
        ({"once": 64}, 0, "every sample was trained exactly once per completed epoch"),
        ({}, 0, "training stopped before the end of the first epoch"),
        ({"once": 60, "repeated": 3, "partial": 1}, 0,
         "ranges of samples trained once: 60, 3 more than once, 1 on some parameter servers only"),
        ({"once": 60, "never": 4}, 0, "ranges of samples trained once: 60, 4 never"),
        ({"once": 64}, 32, "ranges of samples trained once: 64; 32 samples left out"),
    ],
)  # fmt: skip
def test_data_line_says_how_often_samples_were_trained(counts, lost, text):
    end = END.model_copy(update={"ranges": Ranges(**counts), "data": DataReport(lost=lost)})
    assert watch.describe_data(end) == text


def test_data_line_of_a_stream_claims_nothing_of_single_samples():
    """The warning about streams is printed below it."""
    end = END.model_copy(update={"ranges": Ranges(once=64)})
    text = "every completed epoch had its number of samples, and not each of them exactly once"
    assert watch.describe_data(end, placed=False) == text


def test_what_the_data_line_says_agrees_with_the_warnings(monkeypatch, capsys):
    remark = Stream(lambda: iter(np.ones((4, 1))), 4).remark
    end = END.model_copy(update={"ranges": Ranges(once=4)})
    assert watched(monkeypatch, [], end, warnings=lambda: [f"Training(data=…): {remark}."]) == 0
    output = capsys.readouterr().out
    assert "not each of them exactly once" in output
    assert "every sample was trained exactly once" not in output


def test_kills_that_are_too_frequent_are_told_once(monkeypatch, capsys):
    assert (
        watched(monkeypatch, [STATUS, STATUS, None], too_often="worker-0-0 was killed 5 s after its start")
        == 0
    )
    assert capsys.readouterr().out.count("worker-0-0 was killed") == 1


def interrupted(monkeypatch, suspend):
    """Watch a run that is interrupted; returns the exit code."""
    run = SimpleNamespace(
        logs="/logs", poll=raising(KeyboardInterrupt()), suspend=suspend, run_uri="file:///runs/1"
    )
    monkeypatch.setattr(watch, "LocalRun", lambda _job: contextlib.nullcontext(run))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return watch.watch(SimpleNamespace(entrypoint="a:b"))


def raising(error):
    def call():
        raise error

    return call


@pytest.mark.parametrize(
    ("suspend", "words"),
    [
        (lambda: True, "Stopped. To continue from the newest snapshot, add --initial-from file:///runs/1"),
        (lambda: False, "Stopped. There is no snapshot to continue from."),
        (raising(KeyboardInterrupt()), "add --initial-from file:///runs/1"),
        (raising(Unreachable("no route")), "The storage cannot be read: no route"),
    ],
)
def test_interrupted_run_says_how_to_continue(monkeypatch, capsys, suspend, words):
    assert interrupted(monkeypatch, suspend) == 130
    output = capsys.readouterr().out
    assert "Press Ctrl-C again to stop without it" in output
    assert words in output


def test_warnings_of_the_workers_are_listed_once(tmp_path):
    log = tmp_path / "worker-0-0.log"
    line = "2026-01-01 00:00:00,000 WARNING shoal_trainer.worker.compose: the optimizer runs on the workers: amsgrad"
    log.write_text(f"2026 INFO x: y\n{line}\n{line}\n")
    run = object.__new__(LocalRun)
    run.processes = [SimpleNamespace(role=role, log=log) for role in (Role.WORKER, Role.WORKER, Role.PS)]
    assert run.warnings() == ["the optimizer runs on the workers: amsgrad"]


@pytest.mark.parametrize("command", ["run", "check"])
def test_arguments_for_a_training_are_refused_before_anything_starts(tmp_path, monkeypatch, command):
    """It took the start of all processes to say so, in the words of a manifest."""
    (tmp_path / "mine.py").write_text(
        "from shoal_trainer import Training\njob = Training(model=None, data=None)\n"
    )
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, [command, "mine.py", "--arg", "rate=0.1"])
    assert result.exit_code == 2
    assert "mine.py:job is a Training, which takes no arguments: make it a function" in result.output


@pytest.mark.parametrize("command", ["run", "check"])
def test_another_backend_of_keras_is_refused(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keras would ask for its packages, or train what a cluster cannot."""
    (tmp_path / "job.py").write_text("import keras\n\njob = None\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    done = CliRunner().invoke(main, [command, "job:job"])
    assert done.exit_code == 2
    assert "$KERAS_BACKEND is 'jax', and Shoal trains with TensorFlow only" in done.output


def test_keras_of_a_user_with_another_backend_uses_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment goes before ~/.keras/keras.json."""
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    use_tensorflow()
    assert os.environ["KERAS_BACKEND"] == "tensorflow"
