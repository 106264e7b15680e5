"""A PyDataset that reads files, a batch each, and shuffles them: BatchNormalization, Nesterov, top-3 accuracy."""

from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits

FOLDER = Path(__file__).with_name("shards")


def make():
    FOLDER.mkdir(exist_ok=True)
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order].astype("uint8"), y[order]
    for i in range(110):
        np.savez(f"{FOLDER}/{i:03d}.npz", x=x[i * 16 : i * 16 + 16], y=y[i * 16 : i * 16 + 16])


class Shards(keras.utils.PyDataset):
    def __init__(self, numbers, shuffle=True, **kwargs):
        super().__init__(**kwargs)
        self.numbers, self.shuffle = list(numbers), shuffle

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, i):
        with np.load(f"{FOLDER}/{self.numbers[i]:03d}.npz") as f:
            return f["x"].astype("float32") / 16.0, f["y"]

    def on_epoch_end(self):
        if self.shuffle:
            np.random.shuffle(self.numbers)


def build():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.02, momentum=0.9, nesterov=True),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(3)],
    )
    return model


if __name__ == "__main__":
    if not FOLDER.exists():
        make()
    keras.utils.set_random_seed(0)
    model = build()
    history = model.fit(
        Shards(range(88), workers=2), validation_data=Shards(range(88, 110), False), epochs=8, verbose=0
    )
    print(history.history)
