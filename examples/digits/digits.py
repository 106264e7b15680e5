"""Handwritten digits: 1,797 real images of 8 x 8 pixels that come with scikit-learn."""

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from shoal_trainer import Indexed, Training

images, labels = load_digits(return_X_y=True)
images = (images / 16).reshape(-1, 8, 8, 1).astype("float32")
x, x_test, y, y_test = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)


def build():
    layers = keras.layers
    model = keras.Sequential([keras.Input((8, 8, 1))])
    for filters in (32, 64):
        model.add(layers.Conv2D(filters, 3, padding="same", activation="relu"))
    model.add(layers.MaxPooling2D())
    model.add(layers.Flatten())
    model.add(layers.Dropout(0.3))
    model.add(layers.Dense(10, activation="softmax"))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


job = Training(model=build, data=Indexed.from_arrays(x, y), validation=Indexed.from_arrays(x_test, y_test))
