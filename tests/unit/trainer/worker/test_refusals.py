"""Models that cannot be trained, and what their errors say."""

import keras
import pytest

from shoal_trainer import Indexed
from shoal_trainer.errors import UserError
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.worker.flat_model import FlatModel
from shoal_trainer.worker.optimizers import place
from tests.unit.trainer.worker.models import X, Y, compiled, functional
from tests.unit.trainer.worker.trained import BATCHES, SGD


def test_worker_side_gradient_accumulation_is_refused():
    optimizer = keras.optimizers.Adamax(0.1, gradient_accumulation_steps=2)
    flat_model = FlatModel(functional(optimizer), BATCHES[0], "fp32")
    with pytest.raises(
        UserError, match=r"gradient_accumulation_steps=2 is not supported: .*Adamax\. A worker"
    ):
        place(flat_model.model, flat_model.layout, 16)


def multi(default, **others):
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(default, others))


class Lookahead(SGD):
    """It follows a copy of the parameters, which it makes when it is built."""

    def build(self, var_list):
        super().build(var_list)
        self.slow = self.add_optimizer_variables(var_list, "slow")
        for slow, variable in zip(self.slow, var_list, strict=True):
            slow.assign(variable.value)

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)
        slow = self.slow[self._get_variable_index(variable)]
        slow.assign(0.5 * slow + 0.5 * variable)
        variable.assign(slow)


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        (keras.optimizers.ScheduleFreeAdamW(), "ScheduleFreeAdamW"),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.Ftrl()), "Ftrl"),
        (multi(SGD(0.1), bias=keras.optimizers.Ftrl()), "Ftrl"),
        (Lookahead(0.1), "Lookahead"),
    ],
    ids=["copy", "sum", "one of several", "own"],
)
def test_optimizer_whose_state_holds_the_parameters_is_refused(optimizer, name):
    """The first step of each new worker would push the difference to the initial parameters, or to none."""
    flat_model = FlatModel(functional(optimizer), BATCHES[0], "fp32")
    with pytest.raises(UserError, match=rf"{name} is not supported: .* Use AdamW or Adagrad"):
        place(flat_model.model, flat_model.layout, 16)


class Layerwise(keras.optimizers.Adamax):
    """Its rate differs by the layer that a variable is of, which it knows by its path."""

    def build(self, variables):
        super().build(variables)
        self.factors = [{"kernel": 0.1, "bias": 1.0}[each.path.split("/")[1]] for each in variables]

    def update_step(self, gradient, variable, learning_rate):
        factor = self.factors[self._get_variable_index(variable)]
        super().update_step(gradient, variable, learning_rate * factor)


def test_optimizer_that_knows_only_the_variables_of_its_model_is_accepted():
    flat_model = FlatModel(functional(Layerwise(0.1)), BATCHES[0], "fp32")
    assert not place(flat_model.model, flat_model.layout, 16).on_server


def test_accumulation_of_one_of_several_optimizers_is_refused():
    flat_model = FlatModel(functional(multi(SGD(0.1, gradient_accumulation_steps=5))), BATCHES[0], "fp32")
    with pytest.raises(UserError, match=r"gradient_accumulation_steps=5 is not supported: .*MultiOptimizer"):
        place(flat_model.model, flat_model.layout, 16)


def test_averages_that_overwrite_the_parameters_are_warned_of(caplog):
    model = functional(SGD(0.1, use_ema=True, ema_overwrite_frequency=5))
    place(model, FlatModel(model, BATCHES[0], "fp32").layout, 16)
    assert "ema_overwrite_frequency: each worker overwrites" in caplog.text


def test_unaligned_buffer_is_refused():
    flat_model = FlatModel(functional(), BATCHES[0], "fp32")
    with pytest.raises(ValueError, match="aligned"):
        flat_model.vector.alias(aligned(flat_model.layout.size + 1)[1:])


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

    class Steps(keras.Sequential):
        def make_train_function(self, force=False):
            self.train_function = print

    for make, words in [
        (not_compiled, "not compiled"),
        (lambda: 7, "must return a keras.Model"),
        (lambda: compiled(Steps()), r"make_train_function\(\) of its own, .*Override train_step"),
        (lambda: compiled(Broken()), "cannot be built from the first batch"),
        (
            not_a_tensor,
            r"compile\(loss=<lambda>\) cannot be computed for the first batch, y of .*: TypeError: float",
        ),
    ]:
        with pytest.raises(UserError, match=words):
            FlatModel(make(), BATCHES[0], "fp32")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"loss": "sparse_categorical_crosentropy"},
         r"compile\(loss=…\) got 'sparse_cat.*\(str\). Did you mean 'sparse_categorical_crossentropy'"),
        ({"loss": 7}, r"compile\(loss=…\) got 7 \(int\). Pass an object of keras.losses"),
        ({"loss": ["mse", 7]}, r"compile\(loss=…\) got 7 \(int\)"),
        ({"loss": "mse", "metrics": ["acuracy"]}, r"compile\(metrics=…\) got 'acuracy' .*Did you mean 'accuracy'"),
        ({"loss": "mse", "weighted_metrics": [0.5]}, r"compile\(weighted_metrics=…\) got 0.5 \(float\)"),
    ],
)  # fmt: skip
def test_wrong_compile_argument_is_named(arguments, words):
    model = functional()
    model.compile("sgd", **arguments)
    with pytest.raises(UserError, match=words):
        FlatModel(model, BATCHES[0], "fp32")


@pytest.mark.parametrize(
    "arguments",
    [
        {"loss": "crossentropy", "metrics": ["acc", "Accuracy", keras.metrics.SparseCategoricalAccuracy]},
        {"loss": keras.losses.SparseCategoricalCrossentropy, "metrics": ["sparse_categorical_accuracy"]},
    ],
)
def test_every_form_of_a_loss_and_metric_is_accepted(arguments):
    model = functional()
    model.compile("sgd", **arguments)
    FlatModel(model, BATCHES[0], "fp32")


def test_error_in_a_loss_names_its_line():
    def my_loss(y, p):
        return y["label"] - p

    model = functional()
    model.compile("sgd", loss=my_loss)
    with pytest.raises(
        UserError, match=r"compile\(loss=my_loss\) cannot be computed .*test_refusals.py:\d+ in my_loss\)"
    ):
        FlatModel(model, BATCHES[0], "fp32")


def test_stateful_recurrent_layer_is_refused():
    inputs = keras.Input(batch_shape=(16, 6, 6))
    model = compiled(keras.Model(inputs, keras.layers.Dense(4)(keras.layers.LSTM(3, stateful=True)(inputs))))
    batch = Indexed.from_arrays(X[..., 0], Y).example(16)
    with pytest.raises(UserError, match=r"The layer 'lstm.*' is stateful.*Use stateful=False"):
        FlatModel(model, batch, "fp32")


def test_other_layer_with_a_stateful_attribute_is_accepted():
    class Counts(keras.layers.Layer):
        stateful = True

        def call(self, x):
            return x

    layers = [keras.Input((6, 6, 1)), Counts(), keras.layers.Flatten(), keras.layers.Dense(4)]
    FlatModel(compiled(keras.Sequential(layers)), BATCHES[0], "fp32").trace()


def test_step_that_changes_what_is_trainable_is_refused():
    class Toggles(keras.Model):
        def __init__(self):
            super().__init__()
            self.body = keras.Sequential([keras.Input((36,)), keras.layers.Dense(8)])
            self.head = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])

        def call(self, x):
            return self.head(self.body(keras.ops.reshape(x, (-1, 36))))

        def train_step(self, data):
            self.head.trainable = False
            return super().train_step(data)

    flat_model = FlatModel(compiled(Toggles()), BATCHES[0], "fp32")
    with pytest.raises(UserError, match=r"The training step changes what is trainable"):
        flat_model.trace()


def test_step_that_needs_run_eagerly_is_refused_with_a_hint():
    class Eager(keras.Model):
        def __init__(self):
            super().__init__()
            self.out = keras.layers.Dense(4)

        def call(self, x):
            return self.out(keras.ops.reshape(x, (-1, 36)))

        def train_step(self, data):
            logs = super().train_step(data)
            logs["loss"].numpy()
            return logs

    flat_model = FlatModel(compiled(Eager(), run_eagerly=True), BATCHES[0], "fp32")
    with pytest.raises(UserError, match=r"cannot be traced: .*also with run_eagerly=True"):
        flat_model.trace()


def test_loaded_server_side_optimizer_is_warned_of(caplog):
    model = functional(SGD(0.1))
    flat_model = FlatModel(model, BATCHES[0], "fp32")
    place(model, flat_model.layout, 16)
    assert not caplog.text
    model.train_on_batch(BATCHES[0].x, BATCHES[0].y)
    place(model, flat_model.layout, 16)
    assert "SGD has made 1 steps already; the parameter servers start it with fresh state" in caplog.text
