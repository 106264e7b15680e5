"""The metrics of `compile()` in training, compared with those of Keras' own `fit`."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from shoal_trainer.data.batch import fill
from shoal_trainer.worker.feed import Ready
from shoal_trainer.worker.send import Pile
from shoal_trainer.worker.training_metrics import TrainingMetrics
from shoal_trainer.worker.weighing import weigh_samples
from shoal_trainer.worker.work import DataWork
from tests.unit.trainer.worker.trained import Server

ROWS, SIZE = 22, 8
RNG = np.random.default_rng(7)
X = RNG.normal(size=(ROWS, 5)).astype(np.float32)
LABELS = RNG.integers(0, 3, ROWS)
WEIGHTS = RNG.uniform(0.5, 2.0, ROWS).astype(np.float32)
"""The last batch has 6 rows, which Shoal fills up to 8."""


def batches(x, y, weights=None):
    """Batches of `SIZE` rows, as workers get them, with the rows that fill up the last one."""
    parts = (x, y) if weights is None else (x, y, weights)
    for low in range(0, ROWS, SIZE):
        rows = keras.tree.map_structure(lambda part, low=low: part[low : low + SIZE], parts)
        yield fill(rows, SIZE, min(ROWS, low + SIZE))


def trained(model, x, y, weights=None):
    """The means over one epoch without updates of the parameters."""
    given = list(batches(x, y, weights))
    server = Server(model, example=given[0])
    server.take()
    pile = Pile(server.flat_model.mean())
    for batch in given:
        pile.add(server.flat_model.step(server.tensor, batch), Ready(DataWork((0, 1), 0, 0, ROWS), batch))
    sums = pile.metrics
    assert set(server.flat_model.found.metrics) == {name for name, _, _ in sums}
    return {name: total / weight for name, total, weight in sums}


def fitted(model, x, y, weights=None):
    """The logs of one epoch of Keras, whose learning rate is 0."""
    logs = model.fit(x, y, SIZE, sample_weight=weights, shuffle=False, verbose=0).history
    return {name: values[0] for name, values in logs.items()}


def classifier(optimizer="SGD", **options):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, "softmax")])
    rate = getattr(keras.optimizers, optimizer)(0.0)
    model.compile(rate, "sparse_categorical_crossentropy", **options)
    return model


@pytest.mark.by_day(1)
@pytest.mark.parametrize("optimizer", ["SGD", "Adamax"])  # on the servers; on the worker
@pytest.mark.parametrize("jit_compile", [False, True])
def test_means_are_those_of_keras(optimizer, jit_compile):
    options = {
        "metrics": ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top"), "accuracy"],
        "jit_compile": jit_compile,
    }
    expected = fitted(classifier(optimizer, **options), X, LABELS)
    found = trained(classifier(optimizer, **options), X, LABELS)
    assert list(found) == ["accuracy", "top", "accuracy_1"]
    assert found == pytest.approx({name: expected[name] for name in found}, rel=1e-6)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("weights", [WEIGHTS, None])
@pytest.mark.parametrize("optimizer", ["SGD", "Adamax"])
def test_weighted_metrics_use_the_sample_weights(weights, optimizer):
    options = {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}
    expected = fitted(classifier(optimizer, **options), X, LABELS, weights)
    found = trained(classifier(optimizer, **options), X, LABELS, weights)
    assert list(found) == ["accuracy", "weighted_accuracy"]
    assert found == pytest.approx({name: expected[name] for name in found}, rel=1e-6)


def test_metrics_that_are_no_means_are_left_to_the_evaluation():
    metrics = [
        *(keras.metrics.AUC(), keras.metrics.Precision(), keras.metrics.RootMeanSquaredError()),
        *(keras.metrics.MeanIoU(2), keras.metrics.F1Score(), "mae"),
    ]
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, "sigmoid")])
    model.compile("sgd", "binary_crossentropy", metrics=metrics)
    assert list(trained(model, X, (LABELS[:, None] > 0).astype(np.float32))) == ["mae"]


def two_outputs(optimizer="SGD", reduction="sum_over_batch_size"):
    keras.utils.set_random_seed(4)
    x = keras.Input((5,))
    outputs = {"kind": keras.layers.Dense(3, "softmax")(x), "size": keras.layers.Dense(1)(x)}
    model = keras.Model(x, outputs)
    model.compile(
        getattr(keras.optimizers, optimizer)(0.0),
        {
            "kind": "sparse_categorical_crossentropy",
            "size": keras.losses.MeanSquaredError(reduction=reduction),
        },
        loss_weights={"kind": 1.0, "size": 0.5},
        metrics={"kind": ["accuracy"], "size": ["mae", "mse"]},
    )
    return model


@pytest.mark.by_day(1)
@pytest.mark.parametrize("optimizer", ["SGD", "Adamax"])  # on the servers; on the worker
@pytest.mark.parametrize("weights", [WEIGHTS, None])
def test_losses_and_metrics_of_several_outputs(optimizer, weights):
    y = {"kind": LABELS, "size": X[:, :1] * 2}
    given = None if weights is None else {"kind": weights, "size": weights[::-1].copy()}
    plain = two_outputs(optimizer)
    weigh_samples(plain)  # Keras itself would count the losses of a short batch like those of a full one
    expected, found = fitted(plain, X, y, given), trained(two_outputs(optimizer), X, y, given)
    assert list(found) == ["kind_loss", "size_loss", "kind_accuracy", "size_mae", "size_mse"]
    assert found == pytest.approx({name: expected[name] for name in found}, rel=1e-5)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("optimizer", ["SGD", "Adamax"])
@pytest.mark.parametrize("reduction", ["sum", None])
def test_losses_of_outputs_make_up_the_loss_whatever_their_reduction(reduction, optimizer):
    y = {"kind": LABELS, "size": X[:, :1] * 2}
    server = Server(model := two_outputs(optimizer, reduction), example=next(batches(X, y)))
    server.take()
    for batch in batches(X, y):
        step = server.flat_model.step(server.tensor, batch)
        found = {each.name: each.total / each.weight for each in step.metrics}
        x, y_true = batch.as_given()
        predicted = model(x)
        kind = keras.losses.sparse_categorical_crossentropy(y_true["kind"], predicted["kind"])
        size = keras.losses.mean_squared_error(y_true["size"], predicted["size"])
        assert found["kind_loss"] == pytest.approx(float(np.mean(kind)), rel=1e-5)
        reduced = np.sum(size) if reduction == "sum" else np.mean(size)
        assert found["size_loss"] == pytest.approx(float(reduced), rel=1e-5)
        assert step.loss == pytest.approx(found["kind_loss"] + 0.5 * found["size_loss"], rel=1e-5)


def tagger():
    """A sequence model with a mask: Keras counts only the steps that are not padding."""
    keras.utils.set_random_seed(5)
    tokens = keras.Input((4,), dtype="int32")
    embedded = keras.layers.Embedding(6, 5, mask_zero=True)(tokens)
    model = keras.Model(
        tokens, keras.layers.Dense(3, "softmax")(keras.layers.LSTM(4, return_sequences=True)(embedded))
    )
    model.compile(keras.optimizers.SGD(0.0), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@pytest.mark.nightly
def test_masks_count_as_in_keras():
    tokens, tags = RNG.integers(0, 6, (ROWS, 4)), RNG.integers(0, 3, (ROWS, 4))
    tokens[:, 0] = 1  # no row is all padding
    found = trained(tagger(), tokens, tags)
    assert found == pytest.approx({"accuracy": fitted(tagger(), tokens, tags)["accuracy"]}, rel=1e-6)


def largest(y_true, y_pred):
    return tf.reduce_max(tf.abs(y_pred))


def share(y_true, y_pred):
    return tf.cast(tf.argmax(y_pred, -1) == tf.cast(tf.reshape(y_true, [-1]), tf.int64), tf.float32)


def test_functions_as_metrics():
    found = trained(classifier(metrics=[share, largest]), X, LABELS)
    expected = fitted(classifier(metrics=[share]), X, LABELS)
    assert found["share"] == pytest.approx(expected["share"], rel=1e-6)
    model = classifier()
    each = [np.abs(model.predict(X[low : low + SIZE], verbose=0)).max() for low in range(0, ROWS, SIZE)]
    assert found["largest"] == pytest.approx(np.average(each, weights=[8, 8, 6]), rel=1e-5)


class OwnStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3, "softmax")
        self.score = keras.metrics.Mean(name="score")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        logs = super().train_step(data)
        self.score.update_state(tf.reduce_mean(self(data[0])[:, 0]))
        return {
            **logs,
            "score": self.score.result(),
            "rows": tf.shape(data[0])[0],
            "vector": self.dense.bias.value,
        }


def test_what_an_own_train_step_returns_is_averaged_over_samples():
    keras.utils.set_random_seed(6)
    model = OwnStep()
    metrics = ["accuracy", keras.metrics.SparseCategoricalCrossentropy(name="entropy")]
    model.compile(
        keras.optimizers.SGD(0.0), "sparse_categorical_crossentropy", metrics=[*metrics, CountingMean()]
    )
    found = trained(model, X, LABELS)
    assert set(found) == {
        "accuracy",
        "entropy",
        "score",
        "rows",
    }  # not a vector, nor a metric that is no mean
    assert found["rows"] == pytest.approx((8 * 8 + 8 * 8 + 6 * 6) / 22)
    predicted = model.predict(X, verbose=0)
    assert found["accuracy"] == pytest.approx((predicted.argmax(-1) == LABELS).mean(), rel=1e-6)
    assert found["score"] == pytest.approx(predicted[:, 0].mean(), rel=1e-5)


class OfTheGuide(keras.Model):
    """As Keras' guide "Customizing what happens in fit() with TensorFlow" writes it: its logs have a dict within."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3, "softmax")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predicted)
        return {metric.name: metric.result() for metric in self.metrics}


def test_logs_within_those_of_an_own_train_step_are_among_them_as_in_fit():
    def build():
        keras.utils.set_random_seed(6)
        model = OfTheGuide()
        model.compile(keras.optimizers.SGD(0.0), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    found = trained(build(), X, LABELS)
    assert found == {"accuracy": pytest.approx(fitted(build(), X, LABELS)["accuracy"], rel=1e-6)}


def test_loss_within_the_logs_of_an_own_train_step_is_that_of_the_step():
    class Within(OfTheGuide):
        def train_step(self, data):
            logs = super().train_step(data)
            return {"other": {"rows": tf.shape(data[0])[0]}, "losses": {"loss": logs["loss"]}}

    def build(kind):
        keras.utils.set_random_seed(6)
        model = kind()
        model.compile(keras.optimizers.SGD(0.0), "sparse_categorical_crossentropy")
        return model

    (batch, *_) = batches(X, LABELS)
    losses = []
    for kind in (Within, OfTheGuide):
        server = Server(build(kind), example=batch)
        server.take()
        losses.append(server.flat_model.step(server.tensor, batch).loss)
    assert losses[0] == losses[1]


class CountingMean(keras.metrics.Mean):
    def __init__(self):
        super().__init__(name="counting")

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(tf.reduce_mean(y_pred))

    def result(self):
        return 2 * super().result()


def test_model_without_metrics_sends_none():
    server = Server(classifier(), example=next(batches(X, LABELS)))
    assert server.flat_model.found.metrics == ()
    assert TrainingMetrics(keras.Sequential(), weighted=False).sums(None, None, None, 1) == {}


def test_non_finite_metric_is_left_out():
    def undefined(y_true, y_pred):
        return tf.reduce_mean(y_pred, -1) * float("nan")

    given = next(batches(X, LABELS))
    server = Server(classifier(metrics=[undefined, "accuracy"]), example=given)
    server.take()
    step = server.flat_model.step(server.tensor, given)
    assert step.finite
    assert [name for name, _, _ in step.metrics] == ["accuracy"]


class Tracked(keras.Model):
    """Its layer and its loss keep means of their own; another one is of evaluations."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.dense.size = keras.metrics.Mean(name="size")
        self.part, self.judged = keras.metrics.Mean(name="part"), keras.metrics.Mean(name="judged")

    def call(self, x):
        predicted = self.dense(x)
        self.dense.size.update_state(keras.ops.mean(predicted))
        return predicted

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        self.part.update_state(loss / 3)
        if not training:
            self.judged.update_state(loss)
        return loss


@pytest.mark.parametrize("optimizer", ["SGD", "Adamax"])  # on the servers; on the worker
def test_means_that_a_model_tracks_are_those_of_keras(optimizer, monkeypatch):
    monkeypatch.setitem(globals(), "ROWS", 2 * SIZE)

    def built():
        keras.utils.set_random_seed(6)
        model = Tracked()
        model.compile(getattr(keras.optimizers, optimizer)(0.0), "mse", metrics=["mae"])
        return model

    y = X[:, :1]
    found, expected = trained(built(), X, y), fitted(built(), X[:ROWS], y[:ROWS])
    assert set(found) == {"mae", "size", "part"}
    assert found == pytest.approx({name: expected[name] for name in found}, rel=1e-5)


class Scored(keras.Model):
    """Its step returns what metrics give, under names of its own."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.auc, self.mean = keras.metrics.AUC(name="auc"), keras.metrics.Mean(name="mean")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        predicted = self(x)
        self.auc.update_state(y > 0, tf.sigmoid(predicted))
        self.mean.update_state(predicted)
        score = self.auc.result()
        return {
            "loss": tf.reduce_mean(predicted),
            "mean": self.mean.result(),
            "score": score,
            "half": tf.cast(tf.cast(score, tf.float16), tf.float32),
        }


def test_results_of_metrics_that_are_no_means_are_left_out_under_any_name(caplog):
    model = Scored()
    model.compile("sgd")
    assert list(trained(model, X, X[:, :1])) == ["mean"]
    told = [each.getMessage() for each in caplog.records if "cannot be added up" in each.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("score, half: not among the metrics of training")
