"""Several inputs and outputs: numbers and a category of a patient, and two targets. Inputs are a dict, as in Keras."""

import keras
import numpy as np
from keras.layers import Concatenate, Dense, Embedding, Flatten
from sklearn.datasets import load_diabetes

from shoal_trainer import Indexed, Training

table, progress = load_diabetes(return_X_y=True)
numbers = np.delete(table, 1, axis=1).astype("float32")
sex = (table[:, 1:2] > 0).astype("int32")
progress = (progress / 100).astype("float32")


def build():
    measured = keras.Input((9,), name="numbers")
    category = keras.Input((1,), dtype="int32", name="sex")
    hidden = Dense(32, activation="relu")(Concatenate()([measured, Flatten()(Embedding(2, 4)(category))]))
    outputs = {
        "progress": Dense(1, name="progress")(hidden),
        "severe": Dense(1, "sigmoid", name="severe")(hidden),
    }
    model = keras.Model({"numbers": measured, "sex": category}, outputs)
    model.compile(
        "adam", {"progress": "mse", "severe": "binary_crossentropy"}, metrics={"severe": ["accuracy"]}
    )
    return model


job = Training(
    model=build,
    data=Indexed.from_arrays(
        {"numbers": numbers, "sex": sex},
        {"progress": progress[:, None], "severe": (progress[:, None] > 1.5).astype("float32")},
    ),
)
