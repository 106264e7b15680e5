"""Texts in four classes: TextVectorization in the tf.data pipeline, cache, an Embedding with a mask, Adam."""

import keras
import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
labels = rng.integers(0, 4, 2400)
lengths = rng.integers(5, 30, len(labels))
texts = np.array(
    [
        " ".join(
            f"word{rng.integers(0, 400) if rng.random() < 0.8 else 400 + 50 * label + rng.integers(50)}"
            for _ in range(n)
        )
        for label, n in zip(labels, lengths, strict=True)
    ]
)
x_train, y_train, x_val, y_val = texts[:2000], labels[:2000], texts[2000:], labels[2000:]

vectorize = keras.layers.TextVectorization(max_tokens=1000, output_sequence_length=30)
vectorize.adapt(x_train)


def to_ids(text, label):
    return vectorize(text), label


train_ds = (
    tf.data.Dataset.from_tensor_slices((x_train, y_train))
    .shuffle(2000)
    .batch(16)
    .map(to_ids)
    .cache()
    .prefetch(2)
)
val_ds = tf.data.Dataset.from_tensor_slices((x_val, y_val)).batch(16).map(to_ids).cache()


def build():
    model = keras.Sequential(
        [
            keras.Input((30,), dtype="int64"),
            keras.layers.Embedding(1000, 32, mask_zero=True),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(4, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(5e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    model = build()
    history = model.fit(train_ds, validation_data=val_ds, epochs=8, verbose=0)
    print(history.history)
