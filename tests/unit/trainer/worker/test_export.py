"""What an export contains beside `model.keras`, and what the end of the job says about it."""

import keras
import numpy as np
import pytest

from shoal_trainer import Indexed, Training, UserError
from shoal_trainer.worker.flat_model import FlatModel
from shoal_trainer.worker.tasks import Tasks

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
DATA = Indexed.from_arrays(np.ones((8, 4), np.float32), np.ones((8, 1), np.float32))


class Guide(keras.Model):
    """As in Keras' guide: Keras saves it, and cannot load it without `get_config`."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)


def exported(model):
    flat_model = FlatModel(model, DATA.example(4), "fp32")
    tasks = Tasks(Training(model=Guide, data=DATA), flat_model, 4)
    outcome = tasks.export(flat_model.initial() + 1)
    weights = outcome.files.get("model.weights.h5")
    copy = None if weights is None else weights.read_bytes()
    tasks.close()
    return outcome, copy


def compiled(model, optimizer="sgd"):
    model.compile(optimizer, "mse")
    return model


def test_subclassed_model_is_exported_with_its_weights(tmp_path):
    outcome, weights = exported(compiled(Guide()))
    assert {"model.keras", "model.weights.h5"} <= set(outcome.files)
    assert not outcome.message
    path = tmp_path / "model.weights.h5"
    path.write_bytes(weights)
    other = Guide()
    other(np.ones((1, 4)))
    other.load_weights(path)
    assert np.array_equal(other.dense.bias.numpy(), [1])


def test_sequential_model_needs_no_weights_file():
    outcome, weights = exported(compiled(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])))
    assert weights is None
    assert "model.keras" in outcome.files


def test_end_of_a_job_with_ema_says_which_parameters_are_exported():
    optimizer = keras.optimizers.SGD(0.1, use_ema=True)
    outcome, _ = exported(compiled(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), optimizer))
    assert "the moving average of use_ema" in outcome.message


def test_model_in_place_of_a_function_is_refused():
    with pytest.raises(
        UserError, match="must be a function that returns a compiled Keras model, not the model"
    ):
        Training(model=compiled(Guide()), data=DATA)
