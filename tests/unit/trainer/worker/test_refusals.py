"""Models that cannot be trained, and what their errors say."""

import keras
import pytest

from shoal_trainer.errors import UserError
from shoal_trainer.ps.buffers import aligned
from shoal_trainer.worker.flat_model import FlatModel
from shoal_trainer.worker.optimizers import place
from tests.unit.trainer.worker.models import compiled, functional
from tests.unit.trainer.worker.trained import BATCHES, SGD


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: SGD(0.1, gradient_accumulation_steps=2, clipnorm=1.0),
        lambda: keras.optimizers.RMSprop(0.1, gradient_accumulation_steps=2),
    ],
)
def test_worker_side_gradient_accumulation_is_refused(optimizer):
    flat_model = FlatModel(functional(optimizer()), BATCHES[0], "fp32")
    with pytest.raises(UserError, match="gradient_accumulation_steps=2 is not supported"):
        place(flat_model.model, flat_model.layout, 16)


def test_unaligned_buffer_is_refused():
    flat_model = FlatModel(functional(), BATCHES[0], "fp32")
    with pytest.raises(ValueError, match="aligned"):
        flat_model.alias(aligned(flat_model.layout.size + 1)[1:])


def test_unusable_models_are_user_errors():
    def not_compiled():
        return keras.Sequential([keras.layers.Dense(1)])

    def not_a_tensor():
        model = functional()
        model.compile("sgd", loss=lambda y, p: p if float(y[0]) > 0 else -p)
        return model

    class Broken(keras.Model):
        def call(self, x):
            return keras.ops.reshape(x, (-1, 7))

    for make, words in [
        (not_compiled, "not compiled"),
        (lambda: 7, "must return a keras.Model"),
        (lambda: compiled(Broken()), "cannot be built from the first batch"),
        (not_a_tensor, "cannot be built from the first batch.*: TypeError: float"),
    ]:
        with pytest.raises(UserError, match=words):
            FlatModel(make(), BATCHES[0], "fp32")
