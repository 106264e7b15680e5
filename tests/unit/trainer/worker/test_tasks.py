"""Evaluation, callbacks and exports on a worker."""

import errno
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf

from shoal_trainer import Files, Indexed, Stream, UserError
from shoal_trainer.data.source import Part
from shoal_trainer.errors import DiskFull, Unreachable
from shoal_trainer.worker.flat_model import FlatModel
from shoal_trainer.worker.tasks import Tasks
from tests.unit.trainer.worker.models import DATA, begin, body, compiled, functional, job

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
callbacks = keras.callbacks
METRICS = ("accuracy",)
"""What tracing the model finds (`test_names_of_training_metrics_are_found_when_the_step_is_traced`)."""


def best(path):
    return callbacks.ModelCheckpoint(path, save_weights_only=True, monitor="val_loss", save_best_only=True)


def prepared(*which, validation=DATA):
    flat_model = FlatModel(functional(norm=True), DATA.example(16), "fp32")
    flat_model.found.metrics = METRICS
    training = replace(job(callbacks=lambda: [make() for make in which]), validation=validation)
    tasks = Tasks(training, flat_model, 16)
    if which:
        made(tasks)
    return tasks, flat_model.initial()


def made(tasks):
    """Make and check the callbacks."""
    try:
        tasks.run_callbacks(tasks._flat_model.initial(), [])
    except UserError:
        tasks.close()
        raise
    return tasks


def test_evaluation_equals_keras():
    tasks, flat = prepared()
    found = tasks.evaluate(flat).metrics
    plain = functional(norm=True)
    expected = plain.evaluate(DATA.x, DATA.y, batch_size=16, verbose=0, return_dict=True)
    assert found == pytest.approx({f"val_{name}": value for name, value in expected.items()}, rel=1e-4)
    tasks.close()


def test_evaluations_share_one_traced_step():
    tasks, flat = prepared()
    traced = []
    test_step = tasks._flat_model.model.test_step
    tasks._flat_model.model.test_step = lambda data: traced.append(1) or test_step(data)
    first, second, third = (tasks.evaluate(values).metrics for values in (flat, flat * 0.5, flat))
    assert first == third != second
    assert len(traced) == 1
    tasks.close()


def test_callbacks_write_files_and_stop_the_job():
    tasks, flat = prepared(
        lambda: best("best/{epoch:02d}.weights.h5"),
        lambda: callbacks.EarlyStopping("val_loss", patience=2),
        lambda: callbacks.CSVLogger("log.csv"),
    )  # fmt: skip
    history = [{"loss": 1.0, "val_loss": value} for value in (3.0, 2.0, 2.5, 2.6)]
    outcomes = [tasks.run_callbacks(flat, history[: n + 1]) for n in range(4)]
    assert [outcome.stop for outcome in outcomes] == [False, False, False, True]
    # A stored checkpoint is deleted here before the next epoch.
    assert [sorted(outcome.files) for outcome in outcomes] == [
        ["logs/best/01.weights.h5", "logs/log.csv"],
        ["logs/best/02.weights.h5", "logs/log.csv"],
        ["logs/log.csv"],
        ["logs/log.csv"],
    ]
    assert "2.6" in outcomes[-1].files["logs/log.csv"].read_text()
    tasks.close()


class Free(keras.Model):
    """Its loss is weighted by a variable that Keras does not find in it; it counts its steps in another one."""

    def __init__(self, weight):
        super().__init__()
        self.parts = body(dropout=0.2)
        self.held = lambda: weight
        self.beta = weight if isinstance(weight, tf.Variable) else None
        self.passes = tf.Variable(0, trainable=False)

    def call(self, x):
        self.passes.assign_add(1)
        for part in self.parts:
            x = part(x)
        return x

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight) * (1 + self.held())


class OwnFree(Free):
    def train_step(self, data):
        return super().train_step(data)


class Anneals(callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.held().assign(float(epoch))


class Looks(callbacks.Callback):
    """Does what only a worker's own state can tell: evaluates, draws, sets the rate."""

    def on_epoch_end(self, epoch, logs=None):
        model = self.model
        model.evaluate(DATA.x[:16], DATA.y[:16], verbose=0)
        model(DATA.x[:16], training=True)
        model.reset_metrics()
        model.optimizer.learning_rate = 0.5


@pytest.mark.parametrize("build", [Free, OwnFree])
@pytest.mark.parametrize(("kind", "name"), [(tf.Variable, "beta"), (keras.Variable, "annealed")])
def test_no_callback_sets_a_variable_that_the_step_reads_and_keras_does_not_know(build, kind, name):
    """As annealing does: the other workers would train with the old value."""
    begin()
    weight = kind(0.0, trainable=False, name="annealed")
    flat_model = FlatModel(compiled(build(weight)), DATA.example(16), "fp32")
    flat_model.trace()
    logs, flat = [{"loss": 2.0}, {"loss": 1.0}], flat_model.initial()
    for made, refused in ((Looks, False), (Anneals, True)):
        tasks = Tasks(job(callbacks=made), flat_model, 16)
        if refused:
            with pytest.raises(UserError, match=rf"A callback sets {name}, .* self\.optimizer\.iterations"):
                tasks.run_callbacks(flat, logs[:1])
        else:
            assert tasks.run_callbacks(flat, logs).learning_rate == 0.5
        tasks.close()


def test_callbacks_on_another_worker_replay_the_history():
    def build():
        return prepared(
            lambda: best("{epoch}.weights.h5"),
            lambda: callbacks.EarlyStopping("val_loss", patience=2),
        )  # fmt: skip

    history = [{"val_loss": value} for value in (3.0, 1.0, 2.0, 2.5)]
    tasks, flat = build()
    outcome = tasks.run_callbacks(flat, history)
    assert outcome.stop
    assert outcome.files == {}  # another worker saved the best epoch, the second one
    tasks.close()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: 7, "returned a int"),
        (lambda: callbacks.ModelCheckpoint("b.keras", save_freq=100), r"\(save_freq=100\) would never save"),
        (callbacks.SwapEMAWeights, "^SwapEMAWeights has no effect.*exported model is the averaged one"),
        (lambda: object.__new__(callbacks.OrbaxCheckpoint), "Use ModelCheckpoint"),  # without its package
    ],
)
def test_unsupported_callbacks_are_refused(make, words):
    with pytest.raises(UserError, match=words):
        prepared(make)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: callbacks.EarlyStopping("auc"),
            r"EarlyStopping uses 'auc'.*contain loss, accuracy and.*\"val_auc\"",
        ),
        (
            lambda: callbacks.ModelCheckpoint("b.keras", "auc", save_best_only=True),
            "ModelCheckpoint uses 'auc', which is not in its logs",
        ),
        (
            lambda: callbacks.ModelCheckpoint("{epoch:02d}-{auc:.3f}.keras"),
            "uses 'auc', which is not in its logs",
        ),
        (lambda: callbacks.ModelCheckpoint("{epoch.keras"), "is not a valid file name"),
    ],
)
def test_callbacks_that_need_missing_logs_are_refused(make, words):
    with pytest.raises(UserError, match=words):
        prepared(make)


def test_names_of_training_metrics_are_found_when_the_step_is_traced():
    flat_model = FlatModel(functional(norm=True), DATA.example(16), "fp32")
    flat_model.trace()
    assert flat_model.found.metrics == METRICS


def test_callbacks_that_need_available_logs_are_accepted():
    tasks, _ = prepared(
        lambda: callbacks.ModelCheckpoint("{epoch:02d}-{loss:.1f}-{accuracy:.2f}-{val_accuracy:.3f}.keras"),
        lambda: callbacks.ModelCheckpoint("best.keras", monitor="accuracy", save_best_only=True),
        lambda: callbacks.ModelCheckpoint("last.keras", monitor="auc"),  # unused without save_best_only
        lambda: callbacks.EarlyStopping("loss"),
    )  # fmt: skip
    tasks.close()


@pytest.mark.parametrize(
    "make",
    [
        callbacks.EarlyStopping,  # monitors val_loss
        lambda: best("best.weights.h5"),
        lambda: callbacks.ModelCheckpoint("{epoch:02d}-{val_loss:.2f}.keras"),
    ],
)
def test_callbacks_on_val_metrics_need_validation(make):
    with pytest.raises(UserError, match=r"uses 'val_loss', but nothing is evaluated.*validation="):
        prepared(make, validation=None)


def test_callbacks_on_training_logs_need_no_validation():
    tasks, _ = prepared(
        lambda: callbacks.ModelCheckpoint(
            "{epoch:02d}.keras"
        ),  # its monitor, val_loss, is unused without save_best_only
        lambda: callbacks.EarlyStopping("loss"),
        validation=None,
    )
    tasks.close()


def test_tensorboard_needs_its_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(UserError, match="pip install tensorboard"):
        prepared(lambda: callbacks.TensorBoard("tb"))


def test_exported_model_predicts_with_the_parameters():
    tasks, flat = prepared()
    exported = tasks.export(flat * 0.5)
    files = exported.files
    assert not exported.message
    assert {"model.keras", "saved_model/saved_model.pb"} <= set(files)
    loaded = keras.models.load_model(files["model.keras"])
    mine = tasks._flat_model.model
    assert np.allclose(loaded.predict(DATA.x[:8], verbose=0), mine.predict(DATA.x[:8], verbose=0), atol=1e-6)
    tasks.close()


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule without `get_config`, as is common in user code."""

    def __call__(self, step):
        return 0.1 / (1.0 + keras.ops.cast(step, "float32"))


def logged(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "shoal_trainer.worker.saving"]


def test_unserializable_model_is_logged_at_start_and_partly_exported(caplog):
    flat_model = FlatModel(functional(keras.optimizers.SGD(Halving())), DATA.example(16), "fp32")
    tasks = Tasks(job(), flat_model, 16)
    (early,) = logged(caplog)
    assert "but not model.keras" in early
    assert "Halving" in early
    exported = tasks.export(flat_model.initial() * 0.5)
    files = exported.files
    assert {"model.weights.h5", "saved_model/saved_model.pb"} <= set(files)
    assert "model.keras" not in files
    assert "model/ contains model.weights.h5 and saved_model, but not" in exported.message
    assert logged(caplog) == [early]  # the end of the job says the rest
    other = functional(keras.optimizers.SGD(Halving()))
    other.load_weights(files["model.weights.h5"])
    assert np.array_equal(other.get_weights()[0], flat_model.model.get_weights()[0])
    tasks.close()


def test_full_checkpoint_of_an_unserializable_model_is_refused():
    def tasks(make):
        flat_model = FlatModel(functional(keras.optimizers.SGD(Halving())), DATA.example(16), "fp32")
        return made(Tasks(job(callbacks=lambda: [make()]), flat_model, 16))

    with pytest.raises(UserError, match=r"cannot save this model.*Halving.*save_weights_only=True"):
        tasks(lambda: callbacks.ModelCheckpoint("{epoch}.keras"))
    tasks(lambda: callbacks.ModelCheckpoint("{epoch}.weights.h5", save_weights_only=True)).close()


def test_model_that_cannot_be_saved_at_all_is_a_user_error(monkeypatch):
    def cannot(*_, **__):
        raise ValueError("two layers have one name")

    tasks, flat = prepared()
    monkeypatch.setattr(tasks._flat_model.model, "export", cannot)
    assert set(tasks.export(flat).files) == {"model.keras"}
    for way in ("save", "save_weights"):
        monkeypatch.setattr(tasks._flat_model.model, way, cannot)
    with pytest.raises(
        UserError, match=r"cannot be saved: model\.keras: ValueError: two layers have one name"
    ):
        tasks.export(flat)
    tasks.close()


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), DiskFull),
        (tf.errors.ResourceExhaustedError(None, None, "saved_model/x; No space left on device"), DiskFull),
        (OSError("Unable to write (errno = 28, error message = 'No space left on device')"), DiskFull),
        (OSError(errno.EIO, "Input/output error"), UserError),
    ],
)
def test_disk_error_during_export_is_told_from_an_error_of_the_model(monkeypatch, error, kind):
    def full(*_, **__):
        raise error

    tasks, flat = prepared()
    monkeypatch.setattr(tasks._flat_model.model, "export", full)
    with pytest.raises(kind, match="The model cannot be saved"):
        tasks.export(flat)
    tasks.close()


def test_serializable_model_logs_nothing(caplog):
    tasks, _ = prepared()
    assert logged(caplog) == []
    tasks.close()


def test_model_using_the_global_generator_is_exported():
    class Noisy(keras.layers.Layer):
        def call(self, x):
            return x + 0.1 * keras.random.normal((4,))

    def noisy():
        parts = [keras.Input((6, 6, 1)), keras.layers.Flatten(), keras.layers.Dense(4), Noisy()]
        return compiled(keras.Sequential(parts))

    flat_model = FlatModel(noisy(), DATA.example(16), "fp32")
    tasks = Tasks(job(), flat_model, 16)
    assert "saved_model/saved_model.pb" in tasks.export(flat_model.initial()).files
    tasks.close()


@pytest.mark.parametrize("weights", [None, np.ones(len(DATA.x), np.float32)])
def test_validation_data_may_differ_in_form_from_training_data(weights):
    class Size(keras.Model):
        def __init__(self):
            super().__init__()
            self.out = keras.layers.Dense(1)

        def call(self, x):
            output = self.out(keras.ops.reshape(x, (-1, 36)))
            self.add_loss(keras.ops.mean(keras.ops.square(output)))
            return output

    model = Size()
    model.compile("sgd")
    flat_model = FlatModel(model, DATA.example(16), "fp32")
    tasks = Tasks(replace(job(), validation=Indexed.from_arrays(DATA.x, None, weights)), flat_model, 16)
    assert tasks.evaluate(flat_model.initial()).metrics["val_loss"] > 0
    tasks.close()


def test_empty_validation_data_is_a_user_error():
    training = replace(job(), validation=Stream(lambda: iter(()), samples=8))
    tasks = Tasks(training, FlatModel(functional(), DATA.example(16), "fp32"), 16)
    with pytest.raises(UserError, match="has no sample"):
        tasks.evaluate(tasks._flat_model.initial())
    tasks.close()
    with pytest.raises(UserError, match="has no sample"):
        training.fit()


class Parts(Files):
    """Two files of 32 samples each; reading the second one raises `error` if set."""

    def list(self):
        return ("a", "b")

    def read(self, part, batch_size, local=None):
        name = part.file
        if name == "b" and self.__dict__.get("error") is not None:
            raise self.__dict__["error"]
        yield from Indexed.from_arrays(DATA.x[:32], DATA.y[:32]).read(Part(0, 32), batch_size)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (Unreachable("b: no answer"), Unreachable, "^b: no answer$"),
        (UserError("b cannot be read."), UserError, "^b cannot be read.$"),
        (KeyError("label"), UserError, r"evaluation on Training\(validation=…\) failed: KeyError: 'label'"),
        (SystemExit(3), UserError, r"evaluation on Training\(validation=…\) failed: SystemExit: 3"),
    ],
)
def test_error_in_a_later_validation_file_is_reported(error, raised, words):
    parts = Parts("*", lambda _path: None)
    tasks, flat = prepared(validation=parts)
    parts.__dict__["error"] = error
    with pytest.raises(raised, match=words):
        tasks.evaluate(flat)
    parts.__dict__["error"] = None
    assert tasks.evaluate(flat).metrics["val_loss"] > 0
    tasks.close()


def test_validation_label_out_of_range_is_reported_by_its_cause():
    tasks, flat = prepared(validation=Indexed.from_arrays(DATA.x, DATA.y + 7))
    with pytest.raises(
        UserError, match=r"^Training\(validation=…\): Labels are outside .*: 7, 8, 9, 10, but"
    ):
        tasks.evaluate(flat)
    tasks.close()


def test_network_error_in_a_validation_function_is_unreachable():
    def away():
        raise ConnectionResetError(104, "reset")

    tasks, flat = prepared(validation=Stream(away, samples=8))
    with pytest.raises(Unreachable, match="reset"):
        tasks.evaluate(flat)
    tasks.close()


def two_inputs():
    keras.utils.set_random_seed(1)
    keras.backend.clear_session(free_memory=False)
    inputs = [keras.Input((6, 6, 1)), keras.Input((6, 6, 1))]
    flat = keras.layers.Flatten()(keras.layers.Concatenate()(inputs))
    return compiled(keras.Model(inputs, keras.layers.Dense(4)(flat)))


@pytest.mark.nightly
def test_list_inputs_work_in_training_validation_and_fit():
    data = Indexed.from_arrays([DATA.x, -DATA.x], DATA.y)
    training = replace(job(two_inputs), data=data, validation=data)
    flat_model = FlatModel(two_inputs(), data.example(16), "fp32")
    tasks = Tasks(training, flat_model, 16)
    found = tasks.evaluate(flat_model.initial()).metrics
    expected = two_inputs().evaluate(list(data.x), DATA.y, batch_size=16, verbose=0, return_dict=True)
    assert found == pytest.approx({f"val_{name}": value for name, value in expected.items()}, rel=1e-4)
    tasks.close()
    assert training.fit(batch_size=64, verbose=0).history.history["val_loss"]


def test_list_of_inputs_without_target_is_not_a_pair():
    batch = Indexed.from_arrays([DATA.x, DATA.x]).example(16)
    (inputs,) = batch.as_given()
    assert len(inputs) == 2
