"""A loss or a layer that depends on `optimizer.iterations` (a ramp, annealing) sees the updates of the job."""

import keras
import numpy as np
import pytest

from shoal_trainer import Indexed, Training
from shoal_trainer.worker.flat_model import FlatModel
from shoal_trainer.worker.keras_internals import iterations_of
from shoal_trainer.worker.tasks import Tasks
from tests.unit.trainer.worker.trained import parameters

X = np.ones((4, 1), np.float32)
DATA = Indexed.from_arrays(X, 2 * X)


class Ramp(keras.Model):
    """Its loss is multiplied by the number of the step."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="zeros")

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss * keras.ops.cast(self.optimizer.iterations, loss.dtype)


def built(optimizer, **options):
    model = Ramp()
    model.compile(optimizer, "mse", **options)
    return FlatModel(model, DATA.example(4), "fp32")


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_step_counts_the_updates_of_the_job(jit_compile):
    flat_model = built("adam", jit_compile=jit_compile)
    flat_model.trace()
    losses = [flat_model.step(parameters(flat_model), DATA.example(4), updates).loss for updates in (0, 3, 7)]
    assert losses == [0, 12, 28]
    assert (
        int(flat_model.model.optimizer.iterations) == 0
    )  # as in the exported model, whose optimizer has no state


def test_a_step_with_a_scaled_loss_counts_them_too():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        flat_model = built(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=2.0))
    finally:
        keras.config.set_dtype_policy("float32")
    flat_model.trace()
    assert flat_model.step(parameters(flat_model), DATA.example(4), 3).loss == 12


@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_that_accumulates_counts_the_updates_not_the_batches(scaled):
    optimizer = keras.optimizers.SGD(0.01, gradient_accumulation_steps=2)
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0)
    flat_model = built(optimizer)
    flat_model.trace()
    losses = [flat_model.step(parameters(flat_model), DATA.example(4), batches).loss for batches in (1, 3, 7)]
    assert losses == [0, 4, 12]


@pytest.mark.parametrize("accumulated", [None, 2])
def test_a_step_reads_no_variable_of_the_optimizer(accumulated):
    """Only one of several devices would have it."""
    flat_model = built(keras.optimizers.SGD(0.01, gradient_accumulation_steps=accumulated))
    flat_model.trace()
    (traced,) = flat_model._traced.values()
    handles = {id(handle) for handle in traced.captured_inputs}
    assert id(iterations_of(flat_model.model.optimizer).value.handle) not in handles


@pytest.mark.parametrize("accumulated", [None, 2])
def test_an_evaluation_counts_the_updates_up_to_its_parameters(accumulated):
    flat_model = built(keras.optimizers.Adam(gradient_accumulation_steps=accumulated))
    tasks = Tasks(Training(model=lambda: flat_model.model, data=DATA, validation=DATA), flat_model, 4)
    for updates in (3, 7):
        flat_model.updates = updates * (accumulated or 1)  # batches, as in Keras
        assert tasks.evaluate(flat_model.initial()).metrics == {"val_loss": 4.0 * updates}
    assert int(flat_model.model.optimizer.iterations) == 0
    tasks.close()
