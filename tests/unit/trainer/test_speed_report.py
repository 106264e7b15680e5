"""A job of real processes reports sane speeds with one worker and with two, its model and its servers' work."""

from __future__ import annotations

import math
import time

import pytest

from shoal_trainer.contract import Role, SpeedSums, StatusReport, StopAfter
from shoal_trainer.run.processes import LocalJob, LocalRun
from shoal_trainer.worker.hardware import cores
from tests.unit.trainer.test_local_run import until

JOB = """
import keras
import numpy as np
from shoal_trainer import Indexed, Training

def model():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(512, "relu"), keras.layers.Dense(512)])
    model.compile("sgd", "mse")
    return model

job = Training(model=model, data=Indexed.from_arrays(np.ones((51200, 64), "float32"), np.ones((51200, 512), "float32")))
"""
PATIENCE = 600.0
"""Finds a job that hangs. Else the members settle for 10 s, and sums are kept back for 5 to 10 s."""


def measured(run: LocalRun, workers: int) -> StatusReport | None:
    report = run.status()
    known = report is not None and any(
        row.workers == workers and row.compute.count > 5 for row in report.speed
    )
    return report if known else None


def check(row: SpeedSums, report: StatusReport) -> None:
    assert (row.device, row.devices, row.cores, row.batch_size, row.servers) == ("CPU", 1, cores(), 32, 2)
    assert 5 < row.compute.count == row.pull.count == row.push.count <= report.step
    for part in (row.compute, row.pull, row.push):
        assert 1e-6 < math.exp(part.mean) < 1.0
        assert part.variance < 9  # a factor of 20 either way


@pytest.mark.nightly
def test_report_of_a_running_job(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "speed_job.py").write_text(JOB)
    job = LocalJob(
        "speed_job:job",
        parameter_servers=2,
        stop_after=StopAfter(epochs=100_000),
        storage_uri=(tmp_path / "runs").as_uri(),
        snapshot_seconds=3600,
    )
    began = time.monotonic()
    with LocalRun(job) as run:
        one = until(run, lambda: measured(run, 1), PATIENCE)
        run._start(Role.WORKER, 1, 0)
        two = until(run, lambda: measured(run, 2), PATIENCE)
    lasted = time.monotonic() - began
    for report in (one, two):
        for row in report.speed:
            check(row, report)
        assert {row.workers for row in report.speed} <= {1, 2}
    # A step of the loop takes at least its parts that do not overlap.
    assert one.samples_per_second is not None
    (alone,) = (row for row in one.speed if row.workers == 1)
    assert one.samples_per_second <= 1.5 * 32 / math.exp(alone.compute.mean)
    early, late = {row.key: row for row in one.speed}, {row.key: row for row in two.speed}
    assert all(late[key].compute.since(row.compute).count >= 0 for key, row in early.items())
    assert one.speed_epoch == two.speed_epoch != ""

    model = two.model
    assert model is not None
    assert (model.parameters, model.tensors, len(model.fingerprint)) == (
        64 * 512 + 512 + 512 * 512 + 512,
        4,
        64,
    )
    assert model.flops_per_sample == 2 * (64 * 512 + 512 * 512)
    assert two.samples_left == 51200 * 100_000 - two.samples
    assert [shard.index for shard in two.shards] == [0, 1]
    for before, shard in zip(one.shards, two.shards, strict=True):
        assert before.updates < shard.updates <= two.step + 2
        assert shard.batches == shard.updates
        assert shard.bytes_received % shard.updates == 0 < shard.bytes_received
        assert 0 < shard.busy_seconds < lasted
    assert {worker.device for worker in two.workers} == {"CPU"}
