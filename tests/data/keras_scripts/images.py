"""A CNN on images: a tf.data pipeline with map and shuffle, augmentation layers, Dropout, Adam."""

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

images, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(images))
images, labels = images[order].reshape(-1, 8, 8, 1).astype("uint8"), labels[order]


def scale(image, label):
    return tf.cast(image, tf.float32) / 16.0, label


train_ds = (
    tf.data.Dataset.from_tensor_slices((images[:1400], labels[:1400]))
    .map(scale, num_parallel_calls=tf.data.AUTOTUNE)
    .shuffle(1400)
    .batch(16)
    .prefetch(tf.data.AUTOTUNE)
)
val_ds = tf.data.Dataset.from_tensor_slices((images[1400:], labels[1400:])).map(scale).batch(16)


def build():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.RandomTranslation(0.05, 0.05),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    model = build()
    history = model.fit(train_ds, validation_data=val_ds, epochs=8, verbose=0)
    print(history.history)
