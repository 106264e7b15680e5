"""Runs as by `shoal-trainer run`, with real processes: one that is stopped, and one that restores its best epoch."""

from __future__ import annotations

import hashlib
import io
import subprocess
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import keras
import numpy as np
import pytest

from shoal_trainer.contract import EXIT_DRAINED, Outcome, Role, StopAfter, code_name
from shoal_trainer.ps.shard_bounds import bounds
from shoal_trainer.run.processes import LocalJob, LocalRun
from shoal_trainer.snapshot.storage import open_storage
from shoal_trainer.snapshot.store import SnapshotStore
from shoal_trainer.worker import best_weights

JOB = """
import keras
import numpy as np
from shoal_trainer import Indexed, Training

def model():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8000)])
    model.compile("sgd", "mse")
    return model

data = Indexed.from_arrays(np.ones((512, 4), "float32"), np.ones((512, 8000), "float32"))
job = Training(model=model, data=data)
best = Training(
    model=model,
    data=data,
    validation=data,
    callbacks=lambda: [keras.callbacks.EarlyStopping("val_loss", mode="max", patience=2, restore_best_weights=True)],
)
"""
PATIENCE = 200.0
T = TypeVar("T")


def until(run: LocalRun, reached: Callable[[], T | None], patience: float = PATIENCE) -> T:
    """The first result of `reached` that is not None."""
    deadline, turn = time.monotonic() + patience, threading.Event()
    while (result := reached()) is None:
        assert time.monotonic() < deadline, [each.log.read_text()[-500:] for each in run.processes]
        turn.wait(0.02)
    return result


def trained(run: LocalRun, steps: int) -> int | None:
    """The job's steps, once there are this many."""
    assert run.poll() is None, run.outcome
    report = run.status()
    return report.step if report is not None and report.step >= steps else None


@pytest.mark.nightly
def test_stopped_run_has_a_snapshot_of_all_its_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local_job.py").write_text(JOB)
    job = LocalJob(
        "local_job:job",
        parameter_servers=2,
        stop_after=StopAfter(epochs=100_000),
        storage_uri=(tmp_path / "runs").as_uri(),
        snapshot_seconds=3600,
    )
    with LocalRun(job) as run:
        steps = until(run, lambda: trained(run, steps=20))
        store = SnapshotStore(open_storage(run.run_uri))
        assert store.next_number() == 1, "a snapshot was taken before the run was stopped"
        assert run.suspend()
        (worker,) = (each for each in run.processes if each.role is Role.WORKER)
        assert worker.popen.poll() == EXIT_DRAINED
    for index in range(2):
        found = store.load_newest(index, 2)
        assert found is not None
        _, copy = found
        assert copy.version >= steps
        assert (copy.low, copy.high) == bounds(40_000, 2)[index]


def test_run_that_is_stopped_before_its_first_step_has_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with LocalRun(LocalJob("absent:job", storage_uri=(tmp_path / "runs").as_uri())) as run:
        assert not run.suspend()
        assert all(each.popen.poll() is not None for each in run.processes)


def test_run_that_is_interrupted_while_it_starts_leaves_nothing(tmp_path, monkeypatch):
    started, popen = [], subprocess.Popen

    def interrupted(*arguments, **options):
        if len(started) == 2:
            raise KeyboardInterrupt
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    run = LocalRun(LocalJob("absent:job", workers=3, storage_uri=tmp_path.as_uri()))
    with pytest.raises(KeyboardInterrupt), run:
        raise AssertionError("it has started")
    assert [each.poll() is not None for each in started] == [True, True]
    assert not (run.logs / "secret").exists()


@pytest.mark.nightly
def test_code_in_the_storage_trains_and_the_model_that_was_evaluated_as_the_best_is_exported(
    tmp_path, monkeypatch
):
    """The module is nowhere else, and workers of a cluster, to whom the coordinator gives it, have no credentials."""
    monkeypatch.chdir(tmp_path)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("only_there.py", JOB)
    digest = hashlib.sha256(made.getvalue()).hexdigest()
    path = tmp_path / "runs" / code_name("local", digest)
    path.parent.mkdir(parents=True)
    path.write_bytes(made.getvalue())

    class Submitted(LocalRun):
        def _config(self, *place):
            return super()._config(*place).model_copy(update={"code_digest": digest})

    storage = (tmp_path / "runs").as_uri()
    job = LocalJob("only_there:best", workers=2, stop_after=StopAfter(epochs=50), storage_uri=storage)
    with Submitted(job) as run:
        outcome = until(run, run.poll)
    assert outcome.outcome is Outcome.SUCCEEDED, outcome
    assert "a callback stopped training" in outcome.message
    assert "model/ contains the parameters of epoch 1, which had the best val_loss" in outcome.message
    folder = Path(urlsplit(run.run_uri).path)
    best = best_weights.load(folder / "logs" / best_weights.NAME)
    assert best is not None
    assert best.value > 1.0001 * outcome.metrics["val_loss"]  # the highest loss is the "best" one here
    model = keras.models.load_model(folder / "model" / "model.keras")
    loss = model.evaluate(np.ones((32, 4), "float32"), np.ones((32, 8000), "float32"), verbose=0)
    assert loss == pytest.approx(best.value, rel=1e-5)
