"""Every op of a step has a GPU kernel in the worker-gpu image's TensorFlow, also where XLA does not compile it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from shoal_trainer import Indexed
from shoal_trainer.data.source import Part
from shoal_trainer.worker.flat_model import FlatModel
from tests.unit.trainer.worker.gpu_registry import gpu_kernels
from tests.unit.trainer.worker.models import DATA, OwnStep, compiled, functional, subclassed

L = keras.layers
IMAGES = next(iter(DATA.read(Part(0, 16), 16)))
TOKENS = next(
    iter(Indexed.from_arrays(np.ones((16, 7), np.int32), np.ones((16,), np.int64)).read(Part(0, 16), 16))
)
ON_HOST = {"Placeholder"}
"""What only marks the inputs of a graph."""


def text(*layers):
    return lambda: compiled(
        keras.Sequential([keras.Input((7,), dtype="int32"), L.Embedding(9, 8), *layers, L.Dense(4)]), "adam"
    )


def attention():
    inputs = keras.Input((7,), dtype="int32")
    x = L.Embedding(9, 8, mask_zero=True)(inputs)
    x = L.LayerNormalization()(x + L.MultiHeadAttention(2, 4, dropout=0.1)(x, x, use_causal_mask=True))
    return compiled(
        keras.Model(inputs, L.Dense(4)(L.GlobalAveragePooling1D()(x))), keras.optimizers.AdamW(clipnorm=1.0)
    )


def mixed():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return functional("adam", norm=True)
    finally:
        keras.config.set_dtype_policy(before)


def image(*layers):
    return lambda: compiled(keras.Sequential([keras.Input((6, 6, 1)), *layers, L.Flatten(), L.Dense(4)]))


def whole(function):
    """What only Keras' whole step computes (`Findings.whole`)."""

    class Whole(L.Dense):
        seed = keras.random.SeedGenerator(1)

        def call(self, x):
            return function(super().call, x, self.seed)

    return image(L.Flatten(), Whole(4))


def recomputed(call, x, _):
    return keras.remat(call)(x)


def noisy_rows(call, x, seed):
    return keras.ops.map(lambda row: row + keras.random.normal(keras.ops.shape(row), seed=seed), call(x))


MODELS = {
    "convolution": (lambda: functional(norm=True, dropout=0.2, regularizer="l2"), IMAGES),
    "own class": (subclassed, IMAGES),
    "own train_step": (lambda: subclassed(OwnStep, "adam"), IMAGES),
    "optimizer of the worker": (lambda: functional(keras.optimizers.Lamb(), constraint="max_norm"), IMAGES),
    "mixed_float16": (mixed, IMAGES),
    "recomputed": (whole(recomputed), IMAGES),
    "drawn in a loop": (whole(noisy_rows), IMAGES),
    "depthwise": (image(L.SeparableConv2D(4, 3), L.GroupNormalization(2), L.MaxPooling2D(), L.UpSampling2D()), IMAGES),
    "transposed": (image(L.Conv2DTranspose(4, 3, strides=2), L.PReLU(), L.AveragePooling2D(2)), IMAGES),
    "augmented": (image(L.RandomFlip(), L.RandomTranslation(0.1, 0.1), L.GaussianNoise(0.1), L.Conv2D(2, 3)), IMAGES),
    "embedding": (text(L.GlobalAveragePooling1D()), TOKENS),
    "recurrent": (text(L.LSTM(4, return_sequences=True), L.GRU(4)), TOKENS),
    "attention": (attention, TOKENS),
}  # fmt: skip


@pytest.fixture(scope="module")
def registry():
    return gpu_kernels()  # `Missing` fails: without the wheel nothing would be checked


def nodes_of(flat_model):
    """All nodes of the traced step, those of its functions included."""
    (traced,) = flat_model._traced.values()
    graph = traced.graph.as_graph_def()
    functions = {function.signature.name for function in graph.library.function}
    for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
        yield from (node for node in nodes if node.op not in functions)


def has_kernel(node, kernels):
    """Whether one of them takes the node's types."""
    return any(
        all(node.attr[name].type in types for name, types in kernel.items() if name in node.attr)
        for kernel in kernels
    )


def traced_model(model, example, wire="fp32"):
    """Its step as on a GPU, but not compiled by XLA."""
    model.jit_compile = False
    flat_model = FlatModel(model, example, wire, on_host=False)
    flat_model.trace()
    return flat_model


def kinds_of_variables(flat_model):
    """The types of all variables that the traced step reads or assigns, also those that Keras does not know."""
    return {node.attr["dtype"].type for node in nodes_of(flat_model) if node.op.endswith("VariableOp")}


def without_kernel(model, example, wire, kernels):
    """The ops of a model's step that have none, with their types; `VarHandleOp` makes the variables."""
    flat_model = traced_model(model, example, wire)
    homes = {kind for kernel in kernels["VarHandleOp"] for kind in kernel["dtype"]}
    homeless = {("VarHandleOp", tf.as_dtype(kind).name) for kind in kinds_of_variables(flat_model) - homes}
    return homeless | {
        (node.op, *sorted({tf.as_dtype(each.type).name for each in node.attr.values() if each.type}))
        for node in nodes_of(flat_model)
        if node.op not in ON_HOST and not has_kernel(node, kernels.get(node.op, ()))
    }


@pytest.mark.nightly
@pytest.mark.parametrize("wire", ["bf16", "fp32"])
@pytest.mark.parametrize("name", MODELS)
def test_every_op_of_a_step_has_a_gpu_kernel(name, wire, registry):
    make, example = MODELS[name]
    assert not without_kernel(make(), example, wire, registry)


def test_no_variable_of_a_mixed_step_is_int32():
    """A GPU has none: TensorFlow keeps them on the CPU, and XLA, Keras' default on a GPU, refuses them there."""
    make, example = MODELS["mixed_float16"]
    kinds = kinds_of_variables(traced_model(make(), example))
    assert tf.float32 in kinds
    assert tf.int32 not in kinds


class Unravels(keras.layers.Layer):
    def call(self, x):
        return x + 0 * tf.cast(tf.raw_ops.UnravelIndex(indices=tf.range(4), dims=[2, 2])[0], x.dtype)


@pytest.mark.nightly
def test_op_without_a_gpu_kernel_is_found(registry):
    model = compiled(keras.Sequential([keras.Input((6, 6, 1)), L.Flatten(), L.Dense(4), Unravels()]))
    assert without_kernel(model, IMAGES, "fp32", registry) == {("UnravelIndex", "int32")}
