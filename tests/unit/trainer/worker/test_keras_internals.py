"""The contract of what is not public in Keras and TensorFlow. A new release that breaks one of these is found here."""

import ast
import contextlib
import tomllib
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from shoal_trainer.worker import keras_internals as internals
from shoal_trainer.worker.alone import quiet_end
from tests.unit.trainer.worker.models import functional

ROOT = Path(__file__).parents[4]
TRAINER = ROOT / "trainer_image" / "shoal_trainer"
PRIVATE = ("keras.src", "tensorflow.python")


@pytest.fixture(scope="module")
def model():
    made = functional(norm=True, dropout=0.5)
    data = tuple(map(tf.constant, (np.zeros((4, 6, 6, 1), np.float32), np.zeros(4, np.int64))))
    internals.build_symbolically(made, (*data, None))
    return made


def test_only_one_module_imports_what_is_private():
    found = set()
    for path in TRAINER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(name.startswith(PRIVATE) for name in names):
                found.add(path.name)
    assert found == {"keras_internals.py"}


def test_dependencies_have_an_upper_bound():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in ("trainer", "trainer-gpu"):
        bounded = [each for each in extras[extra] if each.startswith(("keras", "tensorflow"))]
        assert len(bounded) >= 2
        assert all("<" in each for each in bounded), bounded


def test_private_attributes_of_others_are_used_nowhere_else():
    """Names with an underscore that nothing in this package defines."""
    trees = {path.name: ast.parse(path.read_text()) for path in TRAINER.rglob("*.py")}
    own = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name):
                own.add(node.id)
            elif isinstance(node, ast.arg):
                own.add(node.arg)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own.add(node.attr)
    theirs = {
        f"{name}: {node.attr}"
        for name, tree in trees.items()
        if name != "keras_internals.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if node.attr
        not in own | {"_replace", "_make", "_asdict", "_fields", "_exit"}  # of the standard library
    }
    assert theirs == set()


def test_layers_and_their_variables(model):
    layers = list(internals.layers_of(model))
    assert layers[0] is model
    norm = next(layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization))
    trainable, others = internals.layer_variables(norm)
    assert [len(trainable), len(others)] == [2, 2]
    dropout = next(layer for layer in layers if isinstance(layer, keras.layers.Dropout))
    assert len(internals.seed_generators(dropout)) == 1
    assert internals.takes_training(model)
    assert isinstance(model, internals.Functional)
    assert len(keras.tree.flatten(internals.inputs_structure(model))) == 1
    assert internals.inputs_structure(keras.Sequential()) is None


def test_generators_that_are_drawn_from():
    generator, seen, draw = keras.random.SeedGenerator(1), [], keras.random.SeedGenerator.next
    with internals.seeds_drawn(seen.append):
        keras.random.normal((1,), seed=generator)
    keras.random.normal((1,), seed=keras.random.SeedGenerator(2))
    assert seen == [generator]
    assert keras.random.SeedGenerator.next is draw


def test_layers_that_add_losses():
    class Adds(keras.layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.sum(x))
            return x

    layers = [Adds(), keras.layers.Dense(1, activity_regularizer="l2"), keras.layers.Dense(1)]
    seen, add = [], keras.layers.Layer.add_loss
    with internals.losses_added(seen.append):
        for layer in layers:
            layer(np.ones((2, 3)))
    assert seen == layers[:2]
    assert keras.layers.Layer.add_loss is add


def test_names_that_are_given_back():
    first = keras.layers.Dense(1).name
    with internals.names_given_back(always=True):
        second = keras.layers.Dense(1).name
    with contextlib.suppress(KeyError), internals.names_given_back():
        raise KeyError(keras.layers.Dense(1).name)
    with internals.names_given_back():
        assert keras.layers.Dense(1).name == second != first
    assert keras.layers.Dense(1).name != second


def test_embeddings_that_are_called():
    class Clipped(keras.layers.Embedding):
        def call(self, inputs):
            return super().call(keras.ops.clip(inputs, 0, 4))

    layers, seen, call = [keras.layers.Embedding(5, 2), Clipped(5, 2)], [], keras.layers.Embedding.call
    with internals.embeddings_called(lambda layer, ids: seen.append((layer, ids.numpy().tolist()))):
        for layer in layers:
            layer(np.array([3]))
            layer(inputs=np.array([-7 if layer is layers[1] else 0]))
    assert seen == [(layers[0], [3]), (layers[0], [0]), (layers[1], [3]), (layers[1], [0])]
    assert keras.layers.Embedding.call is call


def test_loss_and_metrics_of_compile(model):
    loss, metrics = internals.compiled_loss(model), internals.compiled_metrics(model)
    assert loss.built
    assert metrics.built
    assert isinstance(internals.user_loss(loss), keras.losses.Loss)
    assert internals.user_metrics(metrics) == (["accuracy"], None)
    (each,) = internals.flat_losses(loss)
    assert each.path == ()
    (changed,) = internals.flat_losses(loss, lambda one: one._replace(name="other"))
    assert changed.name == "other"
    internals.flat_losses(loss, lambda _: each)
    assert internals.loss_tracker(model).name == "loss"
    assert "mse" in internals.ALL_LOSSES
    assert "mse" in internals.ALL_METRICS
    metrics_of, weighted_of = internals.flat_metrics(metrics)
    assert [each.name for each in metrics_of[0].metrics] == ["accuracy"]
    assert weighted_of == [None]
    assert internals.of_outputs(metrics, 7) == [7]
    wrapper = internals.MeanMetricWrapper(lambda true, found, k: k * (true - found), name="m", k=2)
    function, arguments = internals.mean_of_function(wrapper)
    assert function(3, 1, **arguments) == 4


def test_compute_loss_without_the_argument_training():
    class Old(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            return x + y + y_pred + sample_weight

    assert internals.compute_loss(Old(), 1, 2, 3, 4) == 10


def test_compute_loss_in_training(model):
    x, y = tf.zeros((4, 6, 6, 1)), tf.zeros(4, tf.int64)
    predicted = model(x)
    found = internals.compute_loss(model, x, y, predicted, None)
    assert float(found) == float(model.compute_loss(x, y, predicted))


def test_evaluation_of_batches(model):
    x, y = np.ones((6, 6, 6, 1), np.float32), np.arange(6) % 4
    found = internals.evaluate(model, [(x[:4], y[:4]), (x[4:], y[4:])])
    expected = model.evaluate(x, y, batch_size=4, return_dict=True, verbose=0)
    assert {name: float(value) for name, value in found.items()} == pytest.approx(expected)


def test_logs_within_logs():
    logs = {"compile_metrics": {"accuracy": 0.5, "of": {"one": 2.0}}, "loss": 1.0}
    assert internals.flat_logs(logs) == {"accuracy": 0.5, "one": 2.0, "loss": 1.0}
    of_a_gan = {"loss": 7.0, "generator": {"loss": 2.0}, "discriminator": {"loss": 5.0}}
    assert internals.flat_logs(of_a_gan) == {"loss": 7.0}, "as in fit, which goes by the alphabet"


@pytest.mark.parametrize("steps", [1, 2])
def test_batches_that_are_taken_before_their_steps(steps):
    """Data of unknown length and shape give what arrays give, also if several steps are one call."""
    made = functional(norm=True)
    made.steps_per_execution = steps
    x, y = np.ones((6, 6, 6, 1), np.float32), np.arange(6) % 4
    spec = (tf.TensorSpec([None] * 4), tf.TensorSpec([None], tf.int64))
    rows = [(x[low : low + 2], y[low : low + 2]) for low in (0, 2, 4)]
    data = tf.data.Dataset.from_generator(lambda: iter(rows), output_signature=spec)
    with internals.batches_taken_first(made, "train", "test"), quiet_end():
        found = made.evaluate(data, return_dict=True, verbose=0)
        made.fit(data, epochs=2, verbose=0, shuffle=False)
    assert int(made.optimizer.iterations) == 6
    expected = functional(norm=True).evaluate(x, y, batch_size=2, return_dict=True, verbose=0)
    assert found == pytest.approx(expected)


def test_optimizers():
    optimizer = keras.optimizers.AdamW(0.25, clipvalue=1.0)
    variable = keras.Variable(np.zeros(2), name="kernel")
    optimizer.build([variable])
    assert float(internals.learning_rate_of(optimizer)) == 0.25
    assert np.asarray(internals.clipped(optimizer, [tf.constant([3.0, -0.5])])[0]).tolist() == [1.0, -0.5]
    assert internals.decays(optimizer, variable)
    optimizer.exclude_from_weight_decay(var_list=[variable])
    assert not internals.decays(optimizer, variable)
    accumulating = keras.optimizers.SGD(gradient_accumulation_steps=3)
    accumulating.build([variable])
    internals.iterations_of(accumulating).assign(7)
    assert int(accumulating.iterations) == 2
    scheduled = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5))
    scheduled.build([variable])
    internals.set_current_rate(scheduled, lambda: tf.constant(4.0))
    scheduled.apply([tf.constant([1.0, 1.0])])
    assert variable.numpy().tolist() == [-4.0, -4.0]


def test_backend():
    tensor = tf.zeros((2, 3))
    assert internals.keras_mask(tensor) is None
    internals.set_keras_mask(tensor, tf.constant([True, False]))
    assert np.asarray(internals.keras_mask(tensor)).tolist() == [True, False]
    internals.set_keras_mask(tensor, None)
    assert internals.keras_mask(tensor) is None
    assert internals.output_shape(lambda x: keras.ops.sum(x, -1), keras.KerasTensor((4, 3))) == (4,)
    checkpoint = keras.callbacks.ModelCheckpoint("a.keras", monitor="val_loss", save_best_only=True)
    for value, best in ((2.0, 2.0), (3.0, 2.0), (1.0, 1.0)):
        internals.remember_if_better(checkpoint, value)
        assert checkpoint.best == best


@pytest.mark.parametrize("activation", [keras.activations.sigmoid, tf.sigmoid, keras.ops.tanh])
def test_a_column_has_the_logits_of_its_tensor(activation):
    @tf.function
    def losses(logits):
        y = activation(logits)
        ones = tf.ones_like(y)
        column = internals.as_column(y)
        return keras.ops.binary_crossentropy(ones, y), keras.ops.binary_crossentropy(ones[:, None], column)

    vector, column = losses(tf.constant([-50.0, 50.0, 1.0]))
    assert column.shape == (3, 1)
    assert np.array_equal(vector, column[:, 0])


def test_seeds():
    before = internals.global_seed_generator()
    other = keras.random.SeedGenerator(3)
    assert internals.resource_of(other.state).read_value().numpy().tolist() == other.state.numpy().tolist()
    internals.replace_global_seed_generator(other)
    assert internals.global_seed_generator() is other
    internals.replace_global_seed_generator(before)


def test_block_without_a_seed():
    keras.utils.set_random_seed(1)
    drawn = []
    for _ in range(2):
        with internals.without_seed():
            drawn.append(float(tf.random.uniform(())))
        drawn.append(float(tf.random.uniform(())))
    assert drawn[1] == drawn[3]
    assert len(set(drawn)) == 3


def test_functions_with_a_gradient_of_their_own():
    entered = []

    @contextlib.contextmanager
    def inside():
        entered.append(True)
        yield
        entered.append(False)

    @tf.custom_gradient
    def function(x):
        entered.append("traced")
        return 2 * x, lambda upstream: 2 * upstream

    with internals.custom_gradients(inside):
        tf.function(lambda x: function(x) + 1).get_concrete_function(tf.TensorSpec(()))
    tf.function(function).get_concrete_function(tf.TensorSpec(()))
    assert entered == [True, "traced", False, "traced"]


def test_data_sets_and_what_they_are_made_of():
    rows = tf.data.Dataset.from_tensor_slices(np.ones((4, 2)))
    batched = rows.map(lambda row: row).batch(2)
    way = [batched, *internals.made_of(batched)]
    way += internals.made_of(way[-1])
    assert ["Batch" in type(each).__name__ for each in way] == [True, False, False]
    assert "TensorSlice" in type(way[-1]).__name__
    assert internals.made_of(way[-1]) == []
    for name, made in (
        ("Unbatch", batched.unbatch()),
        ("FlatMap", rows.flat_map(tf.data.Dataset.from_tensors)),
    ):
        assert name in type(made).__name__
    assert "Interleave" in type(rows.interleave(tf.data.Dataset.from_tensors)).__name__
    assert "Window" in type(rows.window(2)).__name__
    assert "TFRecord" in type(tf.data.TFRecordDataset("x")).__name__


def test_traced_functions():
    read, assigned = tf.Variable(1.0), tf.Variable(2.0)

    @tf.function
    def function(x):
        assigned.assign(read + x)
        return 2 * assigned

    outer = tf.function(lambda x: function(x) + 1).get_concrete_function(tf.TensorSpec(()))
    (call,) = (op for op in outer.graph.get_operations() if op.type == "StatefulPartitionedCall")
    inner = internals.function_graph(outer.graph, call.get_attr("f").name)
    assert any(op.type == "AssignVariableOp" for op in inner.get_operations())
    concrete = function.get_concrete_function(tf.TensorSpec(()))
    assert internals.assigned_handles(concrete.graph) == {id(assigned.handle)}
    assert float(internals.call_traced(concrete, [tf.constant(3.0)])) == 8.0


def test_choice_of_xla(model):
    assert internals.model_supports_jit(model)
    assert callable(internals.Trainer._resolve_auto_jit_compile)
