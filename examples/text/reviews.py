"""Text: sentences in, a class out.

Strings become numbers in the data, so that the model has only numbers and may run on a GPU with XLA.
"""

import keras
import numpy as np
from keras.layers import Dense, Embedding, GlobalAveragePooling1D

from shoal_trainer import Indexed, Training

GOOD, BAD = ["great", "fine", "lovely", "superb", "happy"], ["poor", "awful", "dull", "sad", "broken"]
THINGS = ["film", "book", "train", "soup", "phone", "song", "hotel", "garden"]


def sentences(count: int = 1200, seed: int = 0):
    """Made-up reviews: a few words, one of which gives the opinion."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, count)
    words = [
        [rng.choice(THINGS), "was", rng.choice(GOOD if label else BAD), "and", rng.choice(THINGS)]
        for label in labels
    ]
    return [" ".join(rng.permutation(each)) for each in words], labels.astype("int32")


texts, labels = sentences()
vectorize = keras.layers.TextVectorization(max_tokens=64, output_sequence_length=8)
vectorize.adapt(texts)
tokens = np.asarray(vectorize(texts), "int32")


def build(rate: float = 0.01):
    model = keras.Sequential([Embedding(64, 16), GlobalAveragePooling1D(), Dense(1, activation="sigmoid")])
    model.compile(keras.optimizers.Adam(rate), "binary_crossentropy", metrics=["accuracy"])
    return model


def job(rate: float = 0.01):
    """`args: {rate: 0.005}` in a TrainingJob, or `--arg rate=0.005`."""
    return Training(
        model=lambda: build(rate),
        data=Indexed.from_arrays(tokens[:1000], labels[:1000]),
        validation=Indexed.from_arrays(tokens[1000:], labels[1000:]),
    )
