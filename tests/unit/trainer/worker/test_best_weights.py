"""`EarlyStopping(restore_best_weights=True)`, and which parameters the callbacks of an epoch get."""

import keras
import numpy as np
import pytest

from shoal_trainer.errors import DiskFull
from shoal_trainer.worker import best_weights
from shoal_trainer.worker.flat_model import FlatModel
from shoal_trainer.worker.tasks import Tasks
from tests.unit.trainer.worker.models import DATA, functional, job

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
callbacks = keras.callbacks
VALUES = (3.0, 1.0, 2.0, 2.5)
"""Of val_loss in four epochs: the second one is the best."""
HISTORY = [{"loss": 1.0, "val_loss": value} for value in VALUES]
FILE = f"logs/{best_weights.NAME}"


def stopping(monitor="val_loss", **options):
    return callbacks.EarlyStopping(monitor, **{"patience": 2, "restore_best_weights": True, **options})


@pytest.fixture
def start():
    """Makes the tasks of a new worker."""
    made = []

    def tasks(*makers, optimizer="sgd"):
        training = job(callbacks=lambda: [make() for make in makers or (stopping,)])
        made.append(Tasks(training, FlatModel(functional(optimizer), DATA.example(16), "fp32"), 16))
        return made[-1]

    yield tasks
    for each in made:
        each.close()


class Stored:
    """The files in the storage, to which a worker uploads those of each task."""

    def __init__(self):
        self.files = {}

    def add(self, outcome):
        self.files |= {name: path.read_bytes() for name, path in outcome.files.items()}

    def fetch(self, name, path):
        if name in self.files:
            path.write_bytes(self.files[name])
        return name in self.files


def flat_of(tasks):
    return tasks._flat_model.initial()


def exported(outcome, tasks):
    """The exported model's flat parameters."""
    model = keras.models.load_model(outcome.files["model.keras"], compile=False)
    mine = tasks._flat_model.model
    assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), mine.get_weights(), strict=True))
    return np.concatenate([value.ravel() for value in model.get_weights()])


def weights_of(tasks, flat):
    tasks._flat_model.load(flat)
    return np.concatenate([value.ravel() for value in tasks._flat_model.model.get_weights()])


@pytest.mark.by_day(1)
@pytest.mark.parametrize("lost_after", [2, None, 1, 3])
def test_export_has_the_parameters_of_the_best_epoch(start, lost_after):
    stored, worker = Stored(), start()
    flat = flat_of(worker)
    for epoch in range(4):
        if epoch == lost_after:
            worker = start()  # another one runs the callbacks from now on, with the logs only
        outcome = worker.run_callbacks(flat + epoch, HISTORY[: epoch + 1])
        stored.add(outcome)
    assert outcome.stop
    other = start()
    outcome = other.export(flat + 9, stored.fetch)
    assert np.array_equal(exported(outcome, other), weights_of(other, flat + 1))
    assert "the parameters of epoch 2, which had the best val_loss: 1;" in outcome.message


def test_no_worse_epoch_replaces_the_file(start):
    worker = start()
    flat = flat_of(worker)
    written = []
    for epoch in range(3):
        outcome = worker.run_callbacks(flat + epoch, HISTORY[: epoch + 1])
        written.append(outcome.files[FILE].stat().st_mtime_ns)
    assert written[0] < written[1] == written[2]
    assert best_weights.load(outcome.files[FILE]).epoch == 1


def test_epoch_after_a_stop_is_not_the_best(start):
    class Stop(callbacks.Callback):
        def on_epoch_end(self, epoch, _logs=None):
            self.model.stop_training = epoch == 1

    worker = start(Stop, stopping)
    flat = flat_of(worker)
    for epoch in range(3):
        outcome = worker.run_callbacks(flat + epoch, HISTORY[: epoch + 1])
    assert np.array_equal(best_weights.load(outcome.files[FILE]).parameters, flat + 1)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("content", [None, b"", b"no zip file", b"PK\x03\x04 cut off"])
def test_export_without_a_best_epoch_has_the_last_parameters(start, content):
    stored, worker = Stored(), start(lambda: stopping(start_from_epoch=9))
    flat = flat_of(worker)
    stored.add(worker.run_callbacks(flat, HISTORY))
    assert FILE not in stored.files
    if content is not None:
        stored.files[FILE] = content
    outcome = worker.export(flat + 9, stored.fetch)
    assert np.array_equal(exported(outcome, worker), weights_of(worker, flat + 9))
    assert "the last parameters, because no epoch of this run had the best val_loss" in outcome.message


@pytest.mark.by_day(1)
@pytest.mark.parametrize("again", [1.5, None, 0.8], ids=["worse again", "not again", "better again"])
def test_best_epoch_that_was_undone_is_exported_unless_a_better_one_follows(start, again):
    """Epoch 3 replaced the parameters of epoch 2. What is left of the run had none that were as good."""
    stored, worker, history = Stored(), start(), [*HISTORY[:2], {"loss": 1.0, "val_loss": 0.5}]
    flat = flat_of(worker)
    for epoch in range(3):
        stored.add(worker.run_callbacks(flat + epoch, history[: epoch + 1]))
    history.pop()
    if again is not None:
        history.append({"loss": 1.0, "val_loss": again})
        stored.add(worker.run_callbacks(flat + 7, history))
    outcome = worker.export(flat + 9, stored.fetch, history)
    best, note = (
        (7, "of epoch 3, which had the best val_loss: 0.8;")
        if again == 0.8
        else (2, "of epoch 3, which had the best val_loss: 0.5, and was undone by a rollback;")
    )
    assert note in outcome.message
    assert np.array_equal(exported(outcome, worker), weights_of(worker, flat + best))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("history", [HISTORY, []], ids=["its own", "unknown"])
def test_best_epoch_is_exported_with_any_history(start, history):
    stored, worker = Stored(), start()
    flat = flat_of(worker)
    stored.add(worker.run_callbacks(flat + 1, HISTORY[:1]))
    outcome = worker.export(flat + 9, stored.fetch, history)
    assert np.array_equal(exported(outcome, worker), weights_of(worker, flat + 1))
    assert "undone" not in outcome.message


@pytest.mark.parametrize("monitor", ["val_f1", "val_loss"])
@pytest.mark.parametrize("undone", [False, True])
def test_a_value_that_a_callback_computes_may_be_monitored(start, monitor, undone):
    """It is in the logs that the later callbacks get, and not in the job's history."""

    class Score(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs[monitor] = 5.0

    stored, worker = Stored(), start(Score, lambda: stopping(monitor, mode="min"))
    flat = flat_of(worker)
    stored.add(worker.run_callbacks(flat + 1, HISTORY[:1]))
    again = [{"loss": 2.0, "val_loss": 7.0}] if undone else HISTORY[:1]
    outcome = worker.export(flat + 9, stored.fetch, again)
    assert np.array_equal(exported(outcome, worker), weights_of(worker, flat + 1))
    assert ("was undone by a rollback" in outcome.message) == undone


@pytest.mark.nightly
def test_best_weights_replace_the_average_of_the_last(start):
    stored, worker = Stored(), start(optimizer=keras.optimizers.SGD(0.1, use_ema=True))
    flat = flat_of(worker)
    stored.add(worker.run_callbacks(flat + 1, HISTORY[:1]))
    outcome = worker.export(flat + 9, stored.fetch)
    assert np.array_equal(exported(outcome, worker), weights_of(worker, flat + 1))
    assert "use_ema" not in outcome.message


def test_last_of_several_restores_as_in_keras(start):
    stored = Stored()
    worker = start(stopping, lambda: stopping("loss", patience=9), lambda: callbacks.EarlyStopping("loss"))
    flat = flat_of(worker)
    for epoch in range(2):
        stored.add(worker.run_callbacks(flat + epoch, HISTORY[: epoch + 1]))
    outcome = worker.export(flat + 9, stored.fetch)
    assert np.array_equal(exported(outcome, worker), weights_of(worker, flat))  # the loss never improves
    assert "the best loss: 1;" in outcome.message


def test_export_without_restoring_asks_for_no_file(start):
    worker = start(lambda: callbacks.EarlyStopping("val_loss"))
    worker.run_callbacks(flat_of(worker), HISTORY[:1])
    outcome = worker.export(flat_of(worker), lambda *_: pytest.fail("a file was asked for"))
    assert not outcome.message


def test_worker_that_has_not_made_the_callbacks_exports_what_others_kept(start):
    worker = start(lambda: pytest.fail("the callbacks were made for an export"))
    outcome = worker.export(flat_of(worker), lambda *_: False)
    assert not outcome.message


def test_full_disk_ends_the_worker_and_not_the_job(start, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    worker = start()
    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(DiskFull, match=r"best epoch cannot be saved: .*No space left"):
        worker.run_callbacks(flat_of(worker), HISTORY[:1])


def test_callbacks_get_the_parameters_that_were_evaluated(start):
    worker = start()
    flat = flat_of(worker)
    metrics = worker.evaluate(flat + 1).metrics
    outcome = worker.run_callbacks(flat + 2, [{"loss": 1.0, **metrics}])  # training went on meanwhile
    assert np.array_equal(best_weights.load(outcome.files[FILE]).parameters, flat + 1)


def test_callbacks_of_an_epoch_that_another_worker_evaluated_get_the_current_parameters(start):
    worker = start()
    flat = flat_of(worker)
    worker.evaluate(flat + 1)
    outcome = worker.run_callbacks(flat + 2, HISTORY[:1])
    assert np.array_equal(best_weights.load(outcome.files[FILE]).parameters, flat + 2)


def test_restored_model_is_that_of_keras(start):
    """The same parameters and logs in Keras' own callback."""
    worker, stored = start(), Stored()
    flat = flat_of(worker)
    plain, theirs = functional("sgd"), stopping()
    theirs.set_model(plain)
    theirs.on_train_begin()
    for epoch, logs in enumerate(HISTORY):
        worker._flat_model.load(flat + epoch)
        plain.set_weights(worker._flat_model.model.get_weights())
        theirs.on_epoch_end(epoch, logs)
        stored.add(worker.run_callbacks(flat + epoch, HISTORY[: epoch + 1]))
    theirs.on_train_end()
    outcome = worker.export(flat + 9, stored.fetch)
    mine = keras.models.load_model(outcome.files["model.keras"], compile=False).get_weights()
    assert all(np.array_equal(a, b) for a, b in zip(mine, plain.get_weights(), strict=True))
