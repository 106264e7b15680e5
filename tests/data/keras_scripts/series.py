"""An LSTM on padded series: Masking, ReduceLROnPlateau, EarlyStopping, ModelCheckpoint, CSVLogger."""

import keras
import numpy as np

rng = np.random.default_rng(2)
N, T = 1600, 24
lengths, y = rng.integers(10, T + 1, N), rng.integers(0, 3, N)
x = np.full((N, T, 2), -1.0, "float32")
for i in range(N):
    t, f, phase = np.arange(lengths[i]), 0.2 + 0.2 * y[i], rng.random() * 6.28
    waves = np.stack([np.sin(f * t + phase), np.cos(2 * f * t + phase)], 1)
    x[i, : lengths[i]] = waves + rng.normal(0, 0.2, waves.shape)
x_train, y_train, x_val, y_val = x[:1200], y[:1200], x[1200:], y[1200:]


def build():
    model = keras.Sequential(
        [
            keras.Input((T, 2)),
            keras.layers.Masking(-1.0),
            keras.layers.LSTM(24),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.RMSprop(5e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


callbacks = [
    keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=2),
    keras.callbacks.EarlyStopping(monitor="val_loss", patience=4, restore_best_weights=True),
    keras.callbacks.ModelCheckpoint("best.keras", monitor="val_accuracy", save_best_only=True),
    keras.callbacks.CSVLogger("log.csv"),
]

if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    model = build()
    history = model.fit(
        x_train,
        y_train,
        validation_data=(x_val, y_val),
        batch_size=16,
        epochs=10,
        callbacks=callbacks,
        verbose=0,
    )
    print(history.history)
