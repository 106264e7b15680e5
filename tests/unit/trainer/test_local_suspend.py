"""`shoal-trainer run` that is stopped saves a last snapshot, as a job that the operator suspends."""

from __future__ import annotations

import time

from shoal_trainer.contract import EXIT_DRAINED, Phase, Role, StopAfter
from shoal_trainer.local import LocalJob, LocalRun
from shoal_trainer.ps.layout import bounds
from shoal_trainer.snapshot.storage import open_storage
from shoal_trainer.snapshot.store import SnapshotStore

JOB = """
import keras
import numpy as np
from shoal_trainer import Indexed, Training

def model():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8000)])
    model.compile("sgd", "mse")
    return model

job = Training(model=model, data=Indexed.from_arrays(np.ones((512, 4), "float32"), np.ones((512, 8000), "float32")))
"""
PATIENCE = 50.0


def trained(run: LocalRun, steps: int) -> int:
    """The job's steps, once there are this many."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        assert run.poll() is None, run.outcome
        report = run.status()
        if report is not None and report.phase is Phase.TRAINING and report.step >= steps:
            return report.step
    raise AssertionError(
        f"not trained in {PATIENCE} s: {[each.log.read_text()[-500:] for each in run.processes]}"
    )


def test_stopped_run_has_a_snapshot_of_all_its_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "suspended_job.py").write_text(JOB)
    job = LocalJob(
        "suspended_job:job",
        parameter_servers=2,
        stop_after=StopAfter(epochs=100_000),
        storage_uri=(tmp_path / "runs").as_uri(),
        snapshot_seconds=3600,
    )
    with LocalRun(job) as run:
        steps = trained(run, steps=20)
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
