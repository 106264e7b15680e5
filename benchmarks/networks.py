"""The networks of the convergence benchmark, each as functions of one flat vector, which is what a worker sees.

Perceptrons are in NumPy, so that a thousand runs take minutes; the convolutional network and the language model are
Keras models, compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]


class Network(Protocol):
    """A network of `size` parameters. `x`, `y`: the inputs and labels of a batch."""

    size: int

    def start(self, rng: np.random.Generator) -> Vector:
        """First parameters."""

    def gradient(self, flat: Vector, x: Any, y: Any) -> Vector:
        """What a worker pushes: the mean gradient of the loss, clipped as the optimizer asks."""

    def judge(self, flat: Vector, x: Any, y: Any) -> tuple[float, float]:
        """Accuracy and mean loss."""


class Perceptron:
    """Layers of these widths with rectifiers and cross-entropy.

    `embeds`: the first layer has neither bias nor rectifier. With rows of `x` that count the words of a text (a sparse
    matrix), it is then an Embedding with an average over the text.
    """

    def __init__(self, *widths: int, embeds: bool = False) -> None:
        self._shapes = list(pairwise(widths))
        self._embeds = embeds
        sizes = [n * m + m for n, m in self._shapes]
        self._cuts = np.cumsum(sizes)[:-1]
        self.size = sum(sizes)

    def start(self, rng: np.random.Generator) -> Vector:
        """He's initialization."""
        parts = []
        for layer, (n, m) in enumerate(self._shapes):
            scale = 0.05 if self._embeds and not layer else (2 / n) ** 0.5
            parts += [rng.standard_normal(n * m) * scale, np.zeros(m)]
        return np.concatenate(parts).astype(np.float32)

    def gradient(self, flat: Vector, x: Any, y: Any) -> Vector:
        """Mean gradient of the cross-entropy."""
        with np.errstate(all="ignore"):  # a run that diverges is a result
            layers = self._layers(flat)
            outputs = self._outputs(layers, x)
            p = outputs.pop()
            p = np.exp(p - p.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            p[np.arange(len(y)), y] -= 1
            p /= len(y)
            parts: list[Vector] = []
            for layer in reversed(range(len(layers))):
                linear = self._embeds and not layer
                bias = np.zeros(p.shape[1], np.float32) if linear else p.sum(0)
                parts = [np.asarray(outputs[layer].T @ p).ravel(), bias, *parts]
                if layer:
                    p = p @ layers[layer][0].T
                    if not (self._embeds and layer == 1):
                        p = p * (outputs[layer] > 0)
            return np.concatenate(parts).astype(np.float32)

    def judge(self, flat: Vector, x: Any, y: Any) -> tuple[float, float]:
        """Accuracy and mean cross-entropy."""
        with np.errstate(all="ignore"):
            logits = self._outputs(self._layers(flat), x)[-1].astype(np.float64)
            logits -= logits.max(1, keepdims=True)
            loss = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]
        return float((np.nan_to_num(logits, nan=-np.inf).argmax(1) == y).mean()), float(loss.mean())

    def _layers(self, flat: Vector) -> list[tuple[Vector, Vector]]:
        parts = np.split(flat, self._cuts)
        return [
            (part[: n * m].reshape(n, m), part[n * m :])
            for part, (n, m) in zip(parts, self._shapes, strict=True)
        ]

    def _outputs(self, layers: Sequence[tuple[Vector, Vector]], x: Any) -> list[Any]:
        """The input of each layer, and the logits."""
        outputs = [x]
        for layer, (weights, bias) in enumerate(layers):
            z = outputs[-1] @ weights + bias
            last, linear = layer == len(layers) - 1, self._embeds and not layer
            outputs.append(z if last or linear else np.maximum(z, 0))
        return outputs


class KerasNetwork:
    """A Keras model without statistics. Its last axis of labels is (class, weight).

    `clipnorm`: of each variable, as in Keras. The loss is Keras' with weights: the mean over all labels.
    """

    def __init__(self, build: Callable[[], Any], clipnorm: float | None = None) -> None:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        self._build = build
        model = build()
        variables = model.trainable_variables
        shapes = [tuple(v.shape) for v in variables]
        sizes = [int(np.prod(shape)) for shape in shapes]
        self.size = sum(sizes)

        def forward(flat: Any, x: Any, y: Any) -> tuple[Any, Any, Any]:
            parts = [
                tf.reshape(part, shape) for part, shape in zip(tf.split(flat, sizes), shapes, strict=True)
            ]
            logits = model.stateless_call(parts, [], x)[0]
            labels, weights = tf.cast(y[..., 0], tf.int32), y[..., 1]
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            right = tf.cast(tf.argmax(logits, -1, tf.int32) == labels, tf.float32)
            total = tf.reduce_sum(weights)
            return (
                tf.reduce_mean(losses * weights),
                tf.reduce_sum(right * weights) / total,
                tf.reduce_sum(losses * weights) / total,
            )

        def gradient(flat: Any, x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(flat)
                loss, _, _ = forward(flat, x, y)
            (found,) = [tape.gradient(loss, flat)]
            if clipnorm is None:
                return found
            return tf.concat([tf.clip_by_norm(part, clipnorm) for part in tf.split(found, sizes)], 0)

        self._gradient = tf.function(gradient, jit_compile=True)
        self._judge = tf.function(lambda *args: forward(*args)[1:], jit_compile=True)

    def start(self, rng: np.random.Generator) -> Vector:
        """Keras' own initialization."""
        import keras

        keras.utils.set_random_seed(int(rng.integers(1 << 31)))
        return np.concatenate([np.ravel(v) for v in self._build().get_weights()]).astype(np.float32)

    def gradient(self, flat: Vector, x: Any, y: Any) -> Vector:
        """Mean gradient."""
        return np.array(self._gradient(flat, x, y))

    def judge(self, flat: Vector, x: Any, y: Any) -> tuple[float, float]:
        """Weighted accuracy and loss."""
        accuracy, loss = self._judge(flat, x, y)
        return float(accuracy), float(loss)


def residual(classes: int = 10) -> Any:
    """A residual network for images of 14 x 14, with group normalization (He et al. 2016, Wu and He 2018)."""
    import keras
    from keras import layers

    def unit(x: Any, filters: int, stride: int = 1) -> Any:
        x = layers.ReLU()(layers.GroupNormalization(4)(x))
        return layers.Conv2D(filters, 3, stride, padding="same", use_bias=False)(x)

    inputs = keras.Input((14, 14, 1))
    x = layers.Conv2D(8, 3, padding="same", use_bias=False)(inputs)
    for filters, stride in ((8, 1), (16, 2)):
        short = x if stride == 1 else layers.Conv2D(filters, 1, stride, use_bias=False)(x)
        x = layers.Add()([short, unit(unit(x, filters, stride), filters)])
    x = layers.GlobalAveragePooling2D()(layers.ReLU()(layers.GroupNormalization(4)(x)))
    return keras.Model(inputs, layers.Dense(classes)(x))
