"""The shortest job: 1,797 handwritten digits that come with scikit-learn, and a small network."""

import keras
from keras.layers import Dense
from sklearn.datasets import load_digits

from shoal_trainer import Indexed, Training


def build():
    model = keras.Sequential([Dense(128, activation="relu"), Dense(10, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


x, y = load_digits(return_X_y=True)
job = Training(model=build, data=Indexed.from_arrays(x / 16, y))
