"""Embeddings: the gradients of a repeated row are summed; Keras on TensorFlow squares and clips them one by one."""

import keras
import numpy as np
import pytest

from shoal_trainer import Indexed
from shoal_trainer.data.source import Part
from shoal_trainer.worker.flat_model import FlatModel
from shoal_trainer.worker.layout import flatten, layout_of
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


def words(optimizer, layer=None):
    keras.utils.set_random_seed(1)
    keras.backend.clear_session(free_memory=False)
    layer = layer or keras.layers.Embedding(5, 3)
    i = keras.Input((7,), dtype="int32")
    return compiled(keras.Model(i, keras.layers.Dense(4)(keras.layers.Flatten()(layer(i)))), optimizer)


class OneHot(Gathers):
    """The same embedding as a product, of which Keras has one gradient, the sum, per row."""

    def call(self, x):
        return keras.ops.matmul(keras.ops.one_hot(x, 5), self.rows)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("optimizer", "reference"),
    [
        (lambda: o.Adam(0.01), OneHot),
        (lambda: o.AdamW(0.01), OneHot),
        (lambda: o.AdamW(0.01, clipnorm=0.1), OneHot),
        (lambda: o.Adagrad(0.05), OneHot),
        (lambda: o.SGD(0.1, clipnorm=0.1), OneHot),
        (lambda: o.SGD(0.1, clipvalue=0.001), OneHot),
        (lambda: o.SGD(0.1, momentum=0.9, nesterov=True), None),
        (lambda: o.SGD(0.1, weight_decay=0.01), None),
    ],
)
def test_embedding_is_trained_on_the_servers_with_summed_rows(optimizer, reference):
    model = words(optimizer())
    plain = words(optimizer(), reference and reference())
    plain.set_weights(model.get_weights())
    server = Server(model, example=BATCHES[0])
    assert server.placement.on_server
    for batch in BATCHES:
        server.step(batch)
        plain.train_on_batch(batch.x, batch.y)
    assert np.abs(flatten(plain, layout_of(plain)) - server.flat()).max() < 2e-5


@pytest.mark.nightly
def test_accumulated_embedding_gradients_are_summed_as_in_keras():
    def make():
        return words(o.Adam(0.01, gradient_accumulation_steps=5))

    server, plain = Server(make(), example=BATCHES[0]), make()
    assert server.placement.on_server
    pushed(server, BATCHES)
    for batch in BATCHES:
        plain.train_on_batch(batch.x, batch.y)
    assert np.abs(flatten(plain, server.flat_model.layout) - server.flat()).max() < 2e-5


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("optimizer", "says"), [("adam", True), ("sgd", False)])
@pytest.mark.parametrize("layer", [Gathers, lambda: keras.layers.Embedding(5, 3)])
def test_where_keras_would_not_sum_the_worker_says_so(optimizer, says, layer, caplog):
    caplog.set_level("INFO")
    FlatModel(words(optimizer, layer()), BATCHES[0], "fp32").trace()
    assert ("squares or clips them one by one" in caplog.text) == says
