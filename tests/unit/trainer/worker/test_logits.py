"""Crossentropies compute from logits as in Keras, so that a saturated wrong prediction has a gradient."""

import keras
import numpy as np
import pytest

from shoal_trainer import Indexed
from shoal_trainer.data.source import Part
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.worker.flat_model import FlatModel

L = keras.layers
KINDS = {
    "softmax": (lambda: L.Dense(3, activation="softmax"), "sparse_categorical_crossentropy", [1] * 8),
    "softmax layer": (L.Softmax, "sparse_categorical_crossentropy", [1] * 8),
    "one-hot": (lambda: L.Dense(3, activation="softmax"), "categorical_crossentropy", [[0, 1, 0]] * 8),
    "sigmoid": (lambda: L.Dense(1, activation="sigmoid"), "binary_crossentropy", [[0]] * 8),
    "sigmoid of (batch,)": (
        lambda: keras.Sequential([L.Dense(1), L.Reshape(()), L.Activation("sigmoid")]),
        "binary_crossentropy",
        [0] * 8,
    ),
}


def saturated(kind, optimizer="sgd", **options):
    """A model that always predicts class 0, which is wrong for the labels of its kind."""
    make, loss, _ = KINDS[kind]
    keras.utils.set_random_seed(1)
    last = make()
    layers = [keras.Input((4,)), last] if kind != "softmax layer" else [keras.Input((4,)), L.Dense(3), last]
    model = keras.Sequential(layers)
    model.compile(optimizer, loss, **options)
    kernel = model.trainable_variables[0]
    kernel.assign(np.eye(1, kernel.shape[1]).repeat(4, 0))
    return model


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("jit", "rows"),
    [(False, 8), (False, 5), pytest.param(True, 8, marks=pytest.mark.nightly), (True, 5)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_saturated_prediction_has_the_keras_gradient(kind, jit, rows):
    x, y = np.full((8, 4), 50, np.float32), np.array(KINDS[kind][2], np.int64)
    data = Indexed.from_arrays(x, y)
    flat_model = FlatModel(saturated(kind, jit_compile=jit), data.example(8), "fp32")
    buffer = aligned(flat_model.layout.size)
    buffer[:] = flat_model.initial()
    (batch,) = data.read(Part(0, rows), 8)
    result = flat_model.step(flat_model.vector.alias(buffer), batch)

    plain = saturated(kind, keras.optimizers.SGD(1.0), jit_compile=jit)
    before = np.concatenate([v.numpy().ravel() for v in plain.trainable_variables])
    loss = plain.train_on_batch(x[:rows], y[:rows])
    gradient = before - np.concatenate([v.numpy().ravel() for v in plain.trainable_variables])
    assert np.abs(gradient).max() > 1
    assert result.loss == pytest.approx(float(loss), rel=1e-5)
    np.testing.assert_allclose(result.update, gradient, rtol=1e-4)
