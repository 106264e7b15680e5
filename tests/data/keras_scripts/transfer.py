"""Transfer learning in two phases: a frozen backbone with weights of a file, mixed precision, then fine-tuning."""

from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits

keras.mixed_precision.set_global_policy("mixed_float16")

images, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(images))
images, labels = (images[order] / 16).reshape(-1, 8, 8, 1).astype("float32"), labels[order]
x_train, y_train, x_val, y_val = images[:1400], labels[:1400], images[1400:], labels[1400:]

WEIGHTS = Path(__file__).with_name("backbone.weights.h5")


def backbone():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.Flatten(),
        ],
        name="backbone",
    )


def build():
    base = backbone()
    base.load_weights(WEIGHTS)
    base.trainable = False
    inputs = keras.Input((8, 8, 1))
    h = keras.layers.Dropout(0.2)(base(inputs, training=False))
    model = keras.Model(inputs, keras.layers.Dense(10, dtype="float32")(h))
    model.compile(
        keras.optimizers.Adam(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    if not WEIGHTS.exists():  # stands for the weights that one downloads
        backbone().save_weights(WEIGHTS)
    model = build()
    model.fit(x_train, y_train, validation_data=(x_val, y_val), batch_size=16, epochs=6, verbose=0)
    model.get_layer("backbone").trainable = True
    model.compile(
        keras.optimizers.Adam(1e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(x_train, y_train, validation_data=(x_val, y_val), batch_size=16, epochs=2, verbose=0)
    print(history.history)
