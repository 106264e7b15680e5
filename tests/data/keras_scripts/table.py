"""A table with two inputs and two outputs: Normalization, Embedding, BatchNormalization, weights per output."""

import keras
import numpy as np
import pandas as pd
from sklearn.utils.class_weight import compute_class_weight

rng = np.random.default_rng(1)
n = 4000
names = [f"f{i}" for i in range(6)]
df = pd.DataFrame(rng.normal(size=(n, 6)).astype("float32"), columns=names)
df["country"] = rng.integers(0, 20, n)
effect = rng.normal(size=20)
logit = df["f0"] * 2 - df["f1"] + effect[df["country"]] - 2
df["churn"] = (rng.random(n) < 1 / (1 + np.exp(-logit))).astype("int64")
df["revenue"] = 3 * df["f4"] + 2 * effect[df["country"]] + rng.normal(size=n)
train, val = df[:3200], df[3200:]


def split(d):
    return (
        {"numeric": d[names], "country": d[["country"]]},
        {"churn": d["churn"].to_numpy("float32"), "revenue": d["revenue"].to_numpy("float32")},
    )


x_train, y_train = split(train)
x_val, y_val = split(val)
classes = compute_class_weight("balanced", classes=np.array([0, 1]), y=train["churn"])
weights = {"churn": classes[train["churn"]], "revenue": np.ones(len(train))}


def build():
    numeric = keras.Input((6,), name="numeric")
    country = keras.Input((1,), dtype="int32", name="country")
    normalized = keras.layers.Normalization()
    normalized.adapt(x_train["numeric"].to_numpy())
    embedded = keras.layers.Flatten()(keras.layers.Embedding(20, 4)(country))
    h = keras.layers.Concatenate()([normalized(numeric), embedded])
    h = keras.layers.BatchNormalization()(keras.layers.Dense(32, activation="relu")(h))
    churn = keras.layers.Dense(1, activation="sigmoid", name="churn")(h)
    revenue = keras.layers.Dense(1, name="revenue")(h)
    model = keras.Model({"numeric": numeric, "country": country}, {"churn": churn, "revenue": revenue})
    model.compile(
        keras.optimizers.Adam(5e-3),
        loss={"churn": "binary_crossentropy", "revenue": "mse"},
        loss_weights={"churn": 1.0, "revenue": 0.1},
        metrics={"churn": ["accuracy", keras.metrics.AUC(name="auc")], "revenue": ["mae"]},
    )
    return model


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    model = build()
    history = model.fit(
        x_train,
        y_train,
        sample_weight=weights,
        validation_data=(x_val, y_val),
        batch_size=16,
        epochs=8,
        verbose=0,
    )
    print(history.history)
