"""A transformer language model: AdamW with warm-up and cosine, clipnorm, a layer of its own, weights per token."""

from pydoc_data.topics import topics

import keras
import numpy as np

T, V, D = 32, 128, 32
text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")[:60_000]
data = np.frombuffer(text, "uint8").astype("int32")
n = (len(data) - 1) // T
x, y = data[: n * T].reshape(n, T).copy(), data[1 : n * T + 1].reshape(n, T).copy()
rng = np.random.default_rng(0)
lengths = np.where(rng.random(n) < 0.3, rng.integers(8, T, n), T)  # 30 % of the sequences are padded
w = (np.arange(T)[None] < lengths[:, None]).astype("float32")
x[w == 0] = 0
w *= np.where(y == ord(" "), 0.3, 1.0)
order = rng.permutation(n)
x, y, w = x[order], y[order], w[order]
k = int(n * 0.9)


class PositionEmbedding(keras.layers.Layer):
    def __init__(self, length, dim, **kwargs):
        super().__init__(**kwargs)
        self.length, self.dim = length, dim

    def build(self, shape):
        self.pos = self.add_weight(shape=(self.length, self.dim), initializer="uniform")

    def call(self, x):
        return x + self.pos

    def get_config(self):
        return {**super().get_config(), "length": self.length, "dim": self.dim}


def build():
    inputs = keras.Input((T,), dtype="int32")
    h = PositionEmbedding(T, D)(keras.layers.Embedding(V, D)(inputs))
    a = keras.layers.LayerNormalization()(h)
    h = h + keras.layers.MultiHeadAttention(2, D // 2)(a, a, use_causal_mask=True)
    h = h + keras.layers.Dense(D)(keras.layers.Dense(2 * D, activation="gelu")(h))
    model = keras.Model(inputs, keras.layers.Dense(V)(keras.layers.LayerNormalization()(h)))
    schedule = keras.optimizers.schedules.CosineDecay(1e-4, 600, warmup_target=5e-3, warmup_steps=50)
    model.compile(
        keras.optimizers.AdamW(schedule, clipnorm=1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
    )
    return model


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    model = build()
    history = model.fit(
        x[:k],
        y[:k],
        sample_weight=w[:k],
        validation_data=(x[k:], y[k:], w[k:]),
        batch_size=16,
        epochs=6,
        verbose=0,
    )
    print(history.history)
