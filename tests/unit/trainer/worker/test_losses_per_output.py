"""The mean loss of each output, in the evaluation and in `fit` alone."""

import keras
import numpy as np
import pytest

from shoal_trainer import Indexed, Training, UserError
from shoal_trainer.worker.flat_model import FlatModel
from shoal_trainer.worker.tasks import Tasks

L = keras.layers
X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = {"a": np.arange(64) % 3, "b": X[:, :1] * 2}
LOSSES = {
    "a": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "b": keras.losses.MeanSquaredError(),
}


def build():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,))
    hidden = L.Dense(8, activation="relu")(inputs)
    model = keras.Model(inputs, {"a": L.Dense(3, name="a")(hidden), "b": L.Dense(1, name="b")(hidden)})
    model.compile("sgd", LOSSES, loss_weights={"a": 1.0, "b": 0.2})
    return model


@pytest.mark.by_day(1)
@pytest.mark.parametrize("size", [16, 32, 33, 64])
def test_losses_of_the_evaluation_are_means_over_the_samples(size):
    x, y = X[:size], {name: values[:size] for name, values in Y.items()}
    data = Indexed.from_arrays(x, y)
    model = FlatModel(build(), data.example(32), "fp32")
    tasks = Tasks(Training(model=build, data=data, validation=data), model, 32)
    predicted = model.model(x)
    expected = {f"val_{name}_loss": float(LOSSES[name](y[name], predicted[name])) for name in y}
    expected["val_loss"] = expected["val_a_loss"] + 0.2 * expected["val_b_loss"]
    for _ in range(2):
        assert tasks.evaluate(model.initial()).metrics == pytest.approx(expected, rel=1e-5)
    tasks.close()


@pytest.mark.nightly
def test_losses_of_fit_add_up():
    job = Training(model=build, data=Indexed.from_arrays(X[:33], {k: v[:33] for k, v in Y.items()}))
    model = job.fit(epochs=1, batch_size=32, verbose=0)
    logs = {name: values[0] for name, values in model.history.history.items()}
    assert logs["loss"] == pytest.approx(logs["a_loss"] + 0.2 * logs["b_loss"], rel=1e-5)


def test_output_without_weights_is_named():
    weights = {"a": np.ones(64, np.float32)}
    data = Indexed.from_arrays(X, Y, weights)
    with pytest.raises(
        UserError, match=r"^sample_weight has no entry for 'b', of which y has labels\. Give each"
    ):
        FlatModel(build(), data.example(32), "fp32")


def test_fit_takes_weights_of_one_output_alone():
    """As Keras' own does."""
    weights = {"a": np.arange(64.0, dtype="float32"), "b": None}
    job = Training(model=build, data=Indexed.from_arrays(X, Y, weights))
    found = job.fit(epochs=1, batch_size=64, verbose=0).history.history["loss"]
    expected = build().fit(X, Y, sample_weight=weights, batch_size=64, verbose=0).history["loss"]
    assert found == pytest.approx(expected, rel=1e-5)


def test_output_without_labels_is_named_where_weights_are_per_output():
    def with_hidden():
        inputs = keras.Input((4,))
        hidden = L.Dense(8, name="hidden")(inputs)
        model = keras.Model(inputs, {"b": L.Dense(1, name="b")(hidden), "hidden": hidden})
        model.compile("sgd", {"b": "mse"}, weighted_metrics={"b": ["mae"]})
        return model

    y, weights = {"b": Y["b"]}, {"b": np.ones(64, np.float32)}
    with pytest.raises(UserError, match=r"^The model has the output 'hidden', of which y has no labels"):
        FlatModel(with_hidden(), Indexed.from_arrays(X, y, weights).example(32), "fp32")
    labels, none = y | {"hidden": np.zeros((64, 8))}, weights | {"hidden": np.zeros(64, np.float32)}
    FlatModel(with_hidden(), Indexed.from_arrays(X, labels, none).example(32), "fp32").trace()
