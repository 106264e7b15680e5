"""A worker that runs out of memory, or whose step hangs, does not hold up a job that another worker can run."""

import threading

import pytest
import tensorflow as tf

from shoal_trainer.contract import Outcome
from shoal_trainer.coordinator import report
from shoal_trainer.errors import HungStep, OutOfMemory
from shoal_trainer.worker import watchdog
from tests.unit.trainer.test_job_in_threads import digits
from tests.unit.trainer.threads import Job

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


@pytest.mark.nightly
def test_the_others_take_over_the_leases(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_TERMINATION_LOG", str(tmp_path / "message"))
    monkeypatch.setattr(watchdog, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "FIRST_SECONDS", 1.0)
    errors, ended, hanging = [], threading.Event(), threading.Event()

    def hangs(*_):
        hanging.set()
        ended.wait()
        raise RuntimeError("the process of this step was ended")

    def is_full(*_):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")

    class Troubled(Job):
        def run_worker(self, slot, worker, plane):
            step = {0: is_full, 1: hangs}.get(slot)
            if step is not None:
                worker.flat_model.step = step

            def on_hang(error):
                errors.append(error)
                worker.leave()

            try:
                worker.run(on_hang)
            except OutOfMemory as error:
                errors.append(error)
            except RuntimeError:
                pass  # of a step that hung
            finally:
                worker.close()
                plane.close()

    job = digits(tmp_path, 0, kind=Troubled)
    for slot in (0, 1):
        job.start_worker(slot)
    assert hanging.wait(120)
    job.wait(lambda: len(errors) == 2)
    monkeypatch.setattr(watchdog, "FIRST_SECONDS", 600.0)
    coordinator = job.coordinator
    job.wait(lambda: report.status(coordinator).data.leased == 0)
    job.start_worker(2)
    job.finish()
    ended.set()
    for each in job.workers.values():
        each.thread.join(60)
    assert coordinator.finished.outcome is Outcome.SUCCEEDED
    assert {type(error) for error in errors} == {OutOfMemory, HungStep}
    status = report.status(coordinator)
    assert (status.data.repeated, status.data.lost) == (0, 0)
