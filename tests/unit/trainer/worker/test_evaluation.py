"""Evaluations that raise user errors, and metrics with several values."""

import itertools
import math
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from shoal_trainer import Files, Indexed, Stream, Training, UserError
from shoal_trainer.errors import Interrupted, OutOfMemory, Unreachable
from shoal_trainer.worker.alone import quiet_end
from shoal_trainer.worker.flat_model import FlatModel
from shoal_trainer.worker.tasks import Tasks, evaluated
from shoal_trainer.worker.validation import look
from tests.unit.trainer.worker.models import Tracking, tracking

X, LABELS = np.random.default_rng(0).normal(size=(8, 4)).astype("float32"), np.arange(8) % 3
DATA = Indexed.from_arrays(X, np.eye(3)[LABELS])


def model(*metrics):
    network = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="softmax")])
    network.compile("sgd", "categorical_crossentropy", metrics=list(metrics))
    return network


def tasks(network, **options):
    flat_model = FlatModel(network, DATA.example(4), "fp32")
    return Tasks(Training(model=lambda: network, data=DATA, **options), flat_model, 4), flat_model.initial()


def look_at(validation):
    """As the first worker of a job, before its first step."""
    network = model()
    look(
        Training(model=lambda: network, data=DATA, validation=validation),
        FlatModel(network, DATA.example(4), "fp32"),
        4,
    )


def test_metric_with_a_value_per_class_is_split():
    runner, flat = tasks(model(keras.metrics.F1Score()), validation=DATA)
    metrics = runner.evaluate(flat).metrics
    assert set(metrics) == {"val_loss", "val_f1_score_0", "val_f1_score_1", "val_f1_score_2"}
    runner.close()


class OfTheGuide(keras.Model):
    """As Keras' guide to a `train_step` of one's own writes its `test_step`: its logs have a dict within."""

    def test_step(self, data):
        x, y = data
        predicted = self(x, training=False)
        loss = self.compute_loss(y=y, y_pred=predicted)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predicted)
        return {metric.name: metric.result() for metric in self.metrics}


def of_the_guide(kind=OfTheGuide):
    inputs = keras.Input((4,))
    network = kind(inputs, keras.layers.Dense(3, activation="softmax")(inputs))
    network.compile("sgd", "categorical_crossentropy", metrics=["accuracy"])
    return network


def test_logs_within_those_of_an_own_test_step_are_among_them_as_in_keras():
    network = of_the_guide()
    runner, flat = tasks(network, validation=DATA)
    found = runner.evaluate(flat).metrics
    expected = network.evaluate(X, np.eye(3)[LABELS], batch_size=4, verbose=0, return_dict=True)
    assert found == pytest.approx({f"val_{name}": value for name, value in expected.items()}, rel=1e-5)
    assert set(found) == {"val_loss", "val_accuracy"}
    runner.close()


def test_what_is_no_number_in_the_logs_of_an_own_test_step_is_left_out_and_logged(caplog):
    class Telling(OfTheGuide):
        def test_step(self, data):
            return {**super().test_step(data), "kind": tf.constant("mild"), "nothing": None}

    runner, flat = tasks(of_the_guide(Telling), validation=DATA)
    assert set(runner.evaluate(flat).metrics) == {"val_loss", "val_accuracy"}
    assert "the metric kind is left out: it is no number" in caplog.text
    assert "the metric nothing is left out: it is no number" in caplog.text
    runner.close()


class Confusion(keras.metrics.Metric):
    """A matrix that is too large for a status report."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        pass

    def result(self):
        return tf.zeros((20, 20))


def test_metric_with_many_values_is_dropped_and_logged(caplog):
    runner, flat = tasks(model(Confusion(name="confusion")), validation=DATA)
    assert set(runner.evaluate(flat).metrics) == {"val_loss"}
    assert "confusion is left out: it has 400 values" in caplog.text
    runner.close()


@pytest.mark.parametrize(
    ("size", "source"),
    [
        (4, lambda batched, folder: Files(f"{folder}/*", lambda _path: batched, shuffle=0)),
        (5, lambda batched, _: Indexed(8, lambda _low, _high: batched, shuffle=0)),  # the last one is short
    ],
)
def test_batched_validation_data_is_a_user_error(tmp_path, size, source):
    (tmp_path / "all").touch()
    batched = tf.data.Dataset.from_tensor_slices((X, np.eye(3)[LABELS])).batch(size)
    judged = source(batched, tmp_path)
    runner, flat = tasks(model(), validation=judged)
    for attempt in (lambda: look_at(judged), lambda: runner.evaluate(flat)):
        with pytest.raises(UserError, match="Yield single samples: do not batch"):
            attempt()
    runner.close()


def test_a_look_reads_one_batch_and_an_outage_is_left_to_the_evaluation():
    read = []

    def one(low, high):
        read.append((low, high))
        return tf.data.Dataset.from_tensor_slices((X[low:high], np.eye(3)[LABELS][low:high]))

    look_at(Indexed(8, one, shuffle=0))
    assert sum(high - low for low, high in read) <= 8

    def away(*_):
        read.append("away")
        raise ConnectionResetError(104, "reset")

    look_at(Indexed(8, away, shuffle=0))
    assert read[-1] == "away"
    runner, flat = tasks(model(), validation=Indexed(8, away, shuffle=0))
    with pytest.raises(Unreachable):
        runner.evaluate(flat)
    runner.close()


def test_drain_ends_an_evaluation_after_a_few_batches():
    drain, batches = threading.Event(), []

    def endless():
        for number in itertools.count():
            batches.append(number)
            if number == 40:
                drain.set()
            yield X[0], np.eye(3)[0]

    signature = (tf.TensorSpec((4,)), tf.TensorSpec((3,), tf.float64))
    flat_model = FlatModel(model(), DATA.example(4), "fp32")
    training = Training(
        model=model,
        data=DATA,
        validation=Stream(
            lambda: tf.data.Dataset.from_generator(endless, output_signature=signature), samples=10**6
        ),
    )
    runner = Tasks(training, flat_model, 4, None, drain)
    with pytest.raises(Interrupted):
        runner.evaluate(flat_model.initial())
    assert len(batches) < 40 + 100  # and those that were read ahead
    runner.close()


@pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)  # from Keras' saving code with NumPy 2
def test_metric_that_is_not_finite_is_nan_for_callbacks():
    seen = []

    def callbacks():
        checkpoint = keras.callbacks.ModelCheckpoint(
            "best.weights.h5", "val_loss", save_best_only=True, save_weights_only=True
        )
        records = keras.callbacks.LambdaCallback(on_epoch_end=lambda _epoch, logs: seen.append(dict(logs)))
        return [records, checkpoint, keras.callbacks.EarlyStopping("val_loss", patience=2, mode="min")]

    runner, flat = tasks(model("accuracy"), validation=DATA, callbacks=callbacks)
    history = [{"loss": 1.0, "val_loss": 0.5, "val_accuracy": 0.9}, {"loss": 1.0, "val_accuracy": 0.1}]
    first = runner.run_callbacks(flat, history[:1])
    assert list(first.files) == ["logs/best.weights.h5"]
    second = runner.run_callbacks(flat, history)
    assert second.files == {}  # the worse model is not saved, and the stored one is deleted here
    assert math.isnan(seen[1].pop("val_loss"))
    assert seen[1] == {"loss": 1.0, "val_accuracy": 0.1}
    assert runner.run_callbacks(flat, [*history, {"loss": 1.0}]).stop
    runner.close()


class Uncalled(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])

    def train_step(self, data):
        return {"loss": tf.reduce_sum(self.inner(data[0]))}


class Evaluated(Uncalled):
    def test_step(self, data):
        return {"loss": tf.reduce_sum(self.inner(data[0]))}


def test_validation_without_call_needs_a_test_step():
    network = Uncalled()
    network.compile("sgd")
    with pytest.raises(UserError, match=r"neither call\(\) nor test_step\(\)"):
        tasks(network, validation=DATA)
    tested = Evaluated()
    tested.compile("sgd")
    tasks(tested, validation=DATA)[0].close()
    tasks(network)[0].close()


def stops(monitor):
    return {"callbacks": lambda: [keras.callbacks.EarlyStopping(monitor, mode="min")], "validation": DATA}


def test_monitor_that_no_evaluation_gives_is_refused_with_the_names_it_gives():
    made, flat = tasks(model(keras.metrics.F1Score()), **stops("val_acuracy"))
    with pytest.raises(
        UserError, match=r"'val_acuracy', which the evaluation does not give.*val_loss, val_f1_score_0"
    ):
        made.run_callbacks(flat, [])
    made.close()
    made, flat = tasks(model(keras.metrics.F1Score()), **stops("val_f1_score_2"))
    made.run_callbacks(flat, [])
    made.close()


class Extra(keras.Sequential):
    """Adds a metric in `compute_metrics`, as Keras' guide shows."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return super().compute_metrics(x, y, y_pred, sample_weight) | {"extra": keras.ops.mean(y_pred)}


def test_monitor_of_a_metric_that_compute_metrics_adds_is_accepted():
    made = Extra([keras.Input((4,)), keras.layers.Dense(3)])
    made.compile("sgd", "mse")
    accepted, flat = tasks(made, **stops("val_extra"))
    assert set(accepted.evaluate(flat).metrics) == {"val_loss", "val_extra"}
    accepted.close()


def test_names_known_at_the_start_are_those_of_the_evaluation():
    inputs = keras.Input((4,))
    outputs = {name: keras.layers.Dense(3, name=name)(inputs) for name in ("a", "b")}
    made = keras.Model(inputs, outputs)
    made.compile("sgd", {"a": "mse", "b": "mae"}, metrics={"a": ["mae"]}, weighted_metrics={"b": ["mse"]})
    data = Indexed.from_arrays(X, {name: np.eye(3)[LABELS] for name in outputs})
    flat_model = FlatModel(made, data.example(4), "fp32")
    training = Training(model=lambda: made, data=data, validation=data)
    known = evaluated(training, made)
    evaluating = Tasks(training, flat_model, 4)
    assert set(evaluating.evaluate(flat_model.initial()).metrics) == set(known)
    evaluating.close()


def padded(sizes, lengths=(4, 8)):
    """Sequences of these lengths, whose tokens have a label each."""
    rows = [(np.full(size, size % 5, np.int32), np.full(size, size % 3)) for size in sizes]
    return Indexed.from_items(rows, lengths=lengths)


def tagger(inputs=True):
    parts = [keras.layers.Embedding(5, 2), keras.layers.Dense(3, activation="softmax")]
    network = keras.Sequential([keras.Input((None,), dtype="int32"), *parts] if inputs else parts)
    network.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return network


SHORT_AND_LONG = [2] * 16 + [7] * 13
LONG_AND_SHORT = [7] * 16 + [2] * 13


@pytest.mark.by_day(1)
@pytest.mark.parametrize("inputs", [True, False], ids=["Input", "no Input"])
@pytest.mark.parametrize("sizes", [SHORT_AND_LONG, LONG_AND_SHORT])
def test_batches_of_several_lengths_are_evaluated_as_in_keras(sizes, inputs):
    data, network = padded(sizes), tagger(inputs)
    flat_model = FlatModel(network, data.example(8), "fp32")
    runner = Tasks(Training(model=tagger, data=data, validation=data), flat_model, 8)
    found = runner.evaluate(flat_model.initial()).metrics
    assert runner.evaluate(flat_model.initial()).metrics == found
    rows = [row for batch in data.whole(8) for row in zip(*batch.as_given(), strict=True)]
    assert len(rows) == 29
    spec = (tf.TensorSpec((None,), tf.int32), tf.TensorSpec((None,), tf.int64))
    plain = tf.data.Dataset.from_generator(lambda: iter(rows), output_signature=spec).padded_batch(8)
    with quiet_end():
        expected = network.evaluate(plain, return_dict=True, verbose=0)
    assert found == pytest.approx({f"val_{name}": value for name, value in expected.items()}, rel=1e-5)
    runner.close()


def sized_images():
    """Batches of images of 4, 5 and 6 pixels, the last one short."""
    generator = np.random.default_rng(0)
    for size, rows in ((4, 8), (4, 8), (5, 8), (6, 3)):
        yield generator.normal(size=(rows, size, size, 3)).astype(np.float32), np.ones((rows, 1), np.float32)


def pooled(inputs=True):
    layers = keras.layers
    parts = [layers.Conv2D(2, 1), layers.GlobalAveragePooling2D(), layers.Dense(1)]
    network = keras.Sequential([keras.Input((None, None, 3)), *parts] if inputs else parts)
    network.compile("sgd", "mse", steps_per_execution=2)
    return network


@pytest.mark.by_day(1)
@pytest.mark.parametrize("inputs", [True, False], ids=["Input", "no Input"])
def test_images_of_several_sizes_are_evaluated(inputs):
    images, network = Stream(sized_images, samples=27), pooled(inputs)
    flat_model = FlatModel(network, images.example(8), "fp32")
    runner = Tasks(Training(model=pooled, data=images, validation=images), flat_model, 8)
    squares = [np.square(network(x).numpy() - y).ravel() for x, y in sized_images()]
    loss = runner.evaluate(flat_model.initial()).metrics["val_loss"]
    assert loss == pytest.approx(np.concatenate(squares).mean(), rel=1e-5)
    runner.close()


class Judged(keras.Sequential):
    """Evaluates in its own way, as Keras' `fit` lets it."""

    def evaluate(self, x=None, y=None, **options):
        logs = super().evaluate(x, y, **options)
        return logs | {"seen": float(sum(len(labels) for _, labels in x))}


class Told(keras.Sequential):
    def evaluate(self, x=None, **options):
        super().evaluate(x, **options)
        return [1.0, 2.0]


class Broken(keras.Sequential):
    def evaluate(self, x=None, **options):
        raise RuntimeError("no evaluation today")


def own(kind):
    network = kind([keras.Input((4,)), keras.layers.Dense(3, activation="softmax")])
    network.compile("sgd", "categorical_crossentropy", metrics=["accuracy"])
    return network


@pytest.mark.by_day(1)
@pytest.mark.parametrize("jit", [True, False])
def test_own_evaluate_of_a_model_is_called(jit):
    network = own(Judged)
    network.jit_compile = jit
    runner, flat = tasks(network, validation=DATA)
    found = runner.evaluate(flat).metrics
    assert network.jit_compile is jit
    assert found.pop("val_seen") == 8.0
    runner.close()
    plain, flat = tasks(own(keras.Sequential), validation=DATA)
    plain.evaluate(flat)
    assert set(found) == set(plain.evaluate(flat).metrics) == {"val_loss", "val_accuracy"}
    plain.close()


@pytest.mark.nightly
def test_own_evaluate_judges_the_given_parameters_as_keras_does():
    networks = own(Judged), own(keras.Sequential)
    found = []
    for network in networks:
        runner, flat = tasks(network, validation=DATA)
        found.append(runner.evaluate(np.linspace(-1, 1, flat.size, dtype="float32")).metrics)
        runner.close()
    assert found[0] == {**found[1], "val_seen": 8.0}


@pytest.mark.nightly
def test_own_evaluate_that_gives_no_names_is_a_user_error():
    runner, flat = tasks(own(Told), validation=DATA)
    with pytest.raises(UserError, match=r"evaluate\(return_dict=True\) returned a list, not a dict"):
        runner.evaluate(flat)
    runner.close()


def test_error_of_an_own_evaluate_is_told():
    runner, flat = tasks(own(Broken), validation=DATA)
    with pytest.raises(UserError, match="no evaluation today"):
        runner.evaluate(flat)
    runner.close()


def test_drain_ends_an_own_evaluation():
    drain = threading.Event()
    drain.set()
    network = own(Judged)
    flat_model = FlatModel(network, DATA.example(4), "fp32")
    runner = Tasks(Training(model=lambda: network, data=DATA, validation=DATA), flat_model, 4, None, drain)
    with pytest.raises(Interrupted):
        runner.evaluate(flat_model.initial())
    runner.close()


def test_metrics_of_an_own_evaluate_are_not_known_before():
    network = own(Judged)
    assert evaluated(Training(model=lambda: network, data=DATA, validation=DATA), network) is None


def test_own_evaluate_needs_no_call_and_no_test_step():
    class Alone(Uncalled):
        def evaluate(self, x=None, **_):
            return {"energy": float(sum(tf.reduce_sum(self.inner(each)) for each, _ in x))}

    network = Alone()
    network.compile("sgd")
    runner, flat = tasks(network, validation=DATA)
    assert set(runner.evaluate(flat).metrics) == {"val_energy"}
    runner.close()


def test_evaluation_that_does_not_fit_here_may_fit_on_another_worker():
    """As CUDA's libraries say it; a step of training may need less."""

    def full():
        raise tf.errors.InternalError(None, None, "cuDNN: CUDNN_STATUS_ALLOC_FAILED")

    network = model()
    runner, flat = tasks(network, validation=DATA)
    network.make_test_function = full
    with pytest.raises(OutOfMemory, match="ALLOC_FAILED"):
        runner.evaluate(flat)
    runner.close()


class OwnEvaluate(Tracking):
    def evaluate(self, *arguments, **options):
        return super().evaluate(*arguments, **options)


@pytest.mark.parametrize("kind", [Tracking, OwnEvaluate])
def test_a_mean_that_a_model_tracks_counts_each_batch_once(kind):
    network = tracking(kind)
    data = Indexed.from_arrays(X)
    flat_model = FlatModel(network, data.example(4), "fp32")
    runner = Tasks(Training(model=lambda: network, data=data, validation=data), flat_model, 4)
    expected = pytest.approx(np.square(X).mean(), rel=1e-5)
    assert runner.evaluate(flat_model.initial()).metrics == {"val_loss": expected}
    runner.close()
