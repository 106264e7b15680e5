"""A small language model of bytes: AdamW with warm-up and cosine, clipping, a weight per token.

The text is Python's own documentation. Weights travel with the labels, for a loss and an accuracy of one's own.
"""

from pydoc_data.topics import topics

import keras
import numpy as np

from shoal_trainer import Indexed, Training

LENGTH, BYTES, WIDTH = 64, 128, 64


def sequences(seed: int = 0):
    """Texts, and the next byte of each with its weight; a part of the texts is shorter, and blanks count less."""
    text = "\n".join(topics[key] for key in sorted(topics)).encode("ascii", "replace")[:200_000]
    data = np.frombuffer(text, "uint8").astype("int32")
    count = (len(data) - 1) // LENGTH
    x = data[: count * LENGTH].reshape(count, LENGTH).copy()
    y = data[1 : count * LENGTH + 1].reshape(count, LENGTH)
    rng = np.random.default_rng(seed)
    lengths = np.where(rng.random(count) < 0.3, rng.integers(16, LENGTH, count), LENGTH)
    weights = (np.arange(LENGTH) < lengths[:, None]).astype("float32")
    x[weights == 0] = 0
    weights *= np.where(y == ord(" "), 0.3, 1.0)
    order = rng.permutation(count)
    return x[order], np.stack([y, weights], -1).astype("float32")[order]


class Positions(keras.layers.Layer):
    """Adds a learned vector for each position."""

    def build(self, shape):
        """`shape`: (batch, length, width)."""
        self.vectors = self.add_weight(shape=shape[1:], initializer="uniform")

    def call(self, x):
        """Add."""
        return x + self.vectors


def network():
    """Two blocks of a transformer that reads from left to right: 120,704 parameters."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    h = Positions()(keras.layers.Embedding(BYTES, WIDTH)(inputs))
    for _ in range(2):
        a = keras.layers.LayerNormalization()(h)
        h = h + keras.layers.MultiHeadAttention(4, WIDTH // 4)(a, a, use_causal_mask=True)
        a = keras.layers.LayerNormalization()(h)
        h = h + keras.layers.Dense(WIDTH)(keras.layers.Dense(4 * WIDTH, activation="gelu")(a))
    return keras.Model(inputs, keras.layers.Dense(BYTES)(keras.layers.LayerNormalization()(h)))


def loss(y, logits):
    """Cross-entropy with a weight per token."""
    return keras.losses.sparse_categorical_crossentropy(y[..., 0], logits, from_logits=True) * y[..., 1]


def accuracy(y, logits):
    """The weighted share of bytes that are foreseen."""
    hit = keras.metrics.sparse_categorical_accuracy(y[..., 0], logits) * y[..., 1]
    return keras.ops.sum(hit, -1) / keras.ops.maximum(keras.ops.sum(y[..., 1], -1), 1e-6)


def build():
    """Compiled for four epochs of batches of 32."""
    rate = keras.optimizers.schedules.CosineDecay(1e-4, 500, warmup_target=3e-3, warmup_steps=50)
    model = network()
    model.compile(keras.optimizers.AdamW(rate, clipnorm=1.0), loss, metrics=[accuracy])
    return model


x, y = sequences()
held_out = len(x) // 10
job = Training(
    model=build,
    data=Indexed.from_arrays(x[held_out:], y[held_out:]),
    validation=Indexed.from_arrays(x[:held_out], y[:held_out]),
)
