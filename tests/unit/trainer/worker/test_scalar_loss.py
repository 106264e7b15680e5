"""A loss function that returns one number for the whole batch."""

import keras
import numpy as np
import pytest

from shoal_trainer import Indexed
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.worker.flat_model import FlatModel

TOKENS = np.array([[1, 2, 3, 0, 0], [4, 0, 0, 0, 0], [1, 1, 1, 1, 1], [2, 3, 0, 0, 0]] * 2, np.int32)


def masked():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(5, 4, mask_zero=True)(inputs)
    model = keras.Model(inputs, keras.layers.GRU(3, return_sequences=True)(x))
    model.compile(
        keras.optimizers.SGD(0.1), lambda true, predicted: keras.ops.mean(keras.ops.square(true - predicted))
    )
    return model


@pytest.mark.by_day(1)
@pytest.mark.parametrize("length", [5, 8])  # 8: as many steps as samples
def test_scalar_loss_on_masked_sequences_equals_keras(length):
    x = np.resize(TOKENS, (8, length))
    y = np.random.default_rng(0).normal(size=(8, length, 3)).astype("float32")
    data = Indexed.from_arrays(x, y)
    batch = data.example(8)
    flat_model = FlatModel(masked(), batch, "fp32")
    buffer = aligned(flat_model.layout.size)
    buffer[:] = flat_model.initial()
    loss = flat_model.step(flat_model.vector.alias(buffer), batch).loss
    assert loss == pytest.approx(float(masked().train_on_batch(batch.x, batch.y)), rel=1e-5)
