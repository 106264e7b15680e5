"""Embeddings: Keras does not sum the gradients of a repeated row before it squares or clips them."""

import keras
import numpy as np
import pytest

from shoal_trainer import Indexed
from shoal_trainer.data.source import Part
from shoal_trainer.worker.flat_model import FlatModel
from shoal_trainer.worker.layout import flatten
from shoal_trainer.worker.optimizers import why_worker
from tests.unit.trainer.worker.models import compiled
from tests.unit.trainer.worker.trained import Server, pushed

rng = np.random.default_rng(0)
DATA = Indexed.from_arrays(rng.integers(0, 5, (80, 7)).astype("int32"), rng.integers(0, 4, 80))
BATCHES = list(DATA.read(Part(0, 80), 16))
o = keras.optimizers


class Gathers(keras.layers.Layer):
    """An embedding that is not recognizable by its class."""

    def build(self, _):
        self.rows = self.add_weight(shape=(5, 3), name="rows")

    def call(self, x):
        return keras.ops.take(self.rows, x, axis=0)


def words(optimizer, layer=None, *, nested=False, trainable=True):
    keras.utils.set_random_seed(1)
    keras.backend.clear_session()
    layer = layer or keras.layers.Embedding(5, 3)
    layer.trainable = trainable
    if nested:
        layer = keras.Sequential([keras.Input((7,), dtype="int32"), layer])
    i = keras.Input((7,), dtype="int32")
    return compiled(keras.Model(i, keras.layers.Dense(4)(keras.layers.Flatten()(layer(i)))), optimizer)


@pytest.mark.parametrize(
    ("optimizer", "where"),
    [
        (lambda: o.Adam(0.01), "squares"),
        (lambda: o.AdamW(0.01), "squares"),
        (lambda: o.Adagrad(0.05), "squares"),
        (lambda: o.SGD(0.1, clipnorm=0.1), "clips"),
        (lambda: o.SGD(0.1, clipvalue=0.001), "clips"),
        (lambda: o.SGD(0.1, momentum=0.9, nesterov=True), ""),
        (lambda: o.SGD(0.1, weight_decay=0.01), ""),
    ],
)
def test_embedding_is_trained_as_in_keras(optimizer, where):
    server, plain = Server(words(optimizer()), example=BATCHES[0]), words(optimizer())
    reason = server.placement.reason
    assert reason == (where and f"Keras {where} the gradients of repeated rows of an Embedding separately")
    for batch in BATCHES:
        server.step(batch)
        plain.train_on_batch(batch.x, batch.y)
    assert np.abs(flatten(plain, server.flat_model.layout) - server.flat()).max() < 2e-5


def test_accumulated_embedding_gradients_are_summed_as_in_keras():
    def make():
        return words(o.Adam(0.01, gradient_accumulation_steps=5))

    server, plain = Server(make(), example=BATCHES[0]), make()
    assert server.placement.on_server
    pushed(server, BATCHES)
    for batch in BATCHES:
        plain.train_on_batch(batch.x, batch.y)
    assert np.abs(flatten(plain, server.flat_model.layout) - server.flat()).max() < 2e-5


def test_nested_trainable_embedding_is_detected():
    assert why_worker(words("adam", nested=True))
    assert not why_worker(words("adam", trainable=False))
    assert not why_worker(words("adam", Gathers()))


@pytest.mark.parametrize(("optimizer", "warns"), [("adam", True), ("sgd", False)])
def test_custom_gathering_layer_logs_a_warning(optimizer, warns, caplog):
    FlatModel(words(optimizer, Gathers()), BATCHES[0], "fp32").trace()
    assert ("rows will differ from plain Keras" in caplog.text) == warns
