"""Keras' TensorBoard callback: its event files are in the run's storage, complete after each epoch."""

from dataclasses import replace

import keras
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from shoal_trainer.contract import Outcome
from shoal_trainer.termination.termination_log import TERMINATION_LOG_ENV
from tests.unit.trainer.test_job_in_threads import digits
from tests.unit.trainer.worker.test_tasks import prepared

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def scalars(folder, tag):
    """The values by epoch in the event files of a folder, as TensorBoard reads them."""
    events = EventAccumulator(str(folder)).Reload()
    return {event.step: float(make_ndarray(event.tensor_proto)) for event in events.Tensors(tag)}


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setenv(TERMINATION_LOG_ENV, str(tmp_path / "termination"))
    job = digits(tmp_path, 0, epochs=1)
    yield job
    job.stop()


def test_event_files_of_a_job_are_stored_in_its_logs(job):
    job.training = replace(job.training, callbacks=lambda: [keras.callbacks.TensorBoard("tb")])
    job.start_worker(0)
    assert job.finish().outcome is Outcome.SUCCEEDED
    (epoch,) = job.coordinator.record.tasks.history
    (folder,) = (job.folder / "storage").glob("**/logs/tb")
    assert scalars(folder / "train", "epoch_loss") == pytest.approx({0: epoch["loss"]})
    assert scalars(folder / "validation", "epoch_loss") == pytest.approx({0: epoch["val_loss"]})


def test_event_files_are_complete_after_each_epoch():
    history = [{"loss": 3.0, "val_loss": 4.0}, {"loss": 1.0, "val_loss": 2.0}]
    tasks, flat = prepared(lambda: keras.callbacks.TensorBoard("tb"))
    for epochs in (1, 2):
        files = tasks.run_callbacks(flat, history[:epochs]).files
        folders = {name.rpartition("/")[0]: path.parent for name, path in files.items()}
        assert set(folders) == {"logs/tb/train", "logs/tb/validation"}
        for folder, name in (("train", "loss"), ("validation", "val_loss")):
            expected = {epoch: logs[name] for epoch, logs in enumerate(history[:epochs])}
            assert scalars(folders[f"logs/tb/{folder}"], "epoch_loss") == expected
    tasks.close()
