"""Small Keras models of every kind, and data for them."""

import keras
import numpy as np
import tensorflow as tf

from shoal_trainer import Indexed, Training

rng = np.random.default_rng(0)
X = rng.normal(size=(512, 6, 6, 1)).astype("float32")
Y = (X.mean(axis=(1, 2, 3)) > 0).astype("int64") + 2 * (X[:, 0, 0, 0] > 0)
DATA = Indexed.from_arrays(X, Y)


def compiled(model, optimizer="sgd", **options):
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        **options,
    )
    return model


def body(dropout=0.0, norm=False, regularizer=None, constraint=None, momentum=0.9):
    layers = keras.layers
    stack = [
        layers.Conv2D(4, 3, activation="relu", kernel_regularizer=regularizer, kernel_constraint=constraint)
    ]
    if norm:
        stack.append(layers.BatchNormalization(momentum=momentum))
    stack.append(layers.Flatten())
    if dropout:
        stack.append(layers.Dropout(dropout))
    return [*stack, layers.Dense(4, dtype="float32")]


def begin():
    """Reset seeds and names, and keep the dtype policy."""
    policy = keras.config.dtype_policy()
    keras.backend.clear_session(free_memory=False)
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(1)


def functional(optimizer="sgd", *, options=None, **features):
    begin()
    inputs = x = keras.Input((6, 6, 1))
    for layer in body(**features):
        x = layer(x)
    return compiled(keras.Model(inputs, x), optimizer, **(options or {}))


class Plain(keras.Model):
    """A subclassed model of the default body, to derive models with methods of their own from."""

    def __init__(self):
        super().__init__()
        self.parts = body()

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.parts = body(dropout=0.2, norm=True)

    def call(self, x, training=False):
        for part in self.parts:
            x = (
                part(x, training=training)
                if isinstance(part, keras.layers.BatchNormalization | keras.layers.Dropout)
                else part(x)
            )
        self.add_loss(0.001 * keras.ops.mean(keras.ops.square(x)))
        return x


class OwnStep(Subclassed):
    def train_step(self, data):
        return super().train_step(data)


def subclassed(kind=Subclassed, optimizer="sgd"):
    begin()
    return compiled(kind(), optimizer)


def job(model=functional, **options):
    return Training(model=model, data=DATA, validation=DATA, **options)


class Tracking(keras.Model):
    """An autoencoder whose steps keep the mean of the loss in a metric, as in Keras' guides; it predicts zeros."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(4, kernel_initializer="zeros")
        self.mean = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.mean]

    def call(self, x):
        return self.dense(x)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x - self(x)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.mean.update_state(loss)
        return {"loss": self.mean.result()}

    def test_step(self, x):
        self.mean.update_state(tf.reduce_mean(tf.square(x - self(x))))
        return {"loss": self.mean.result()}


def tracking(kind=Tracking):
    """That model, which learns nothing."""
    begin()
    made = kind()
    made.compile(keras.optimizers.SGD(0.0))
    return made
