"""A train_step of your own: a variational autoencoder of digits.

Its optimizer runs on the workers, and pushes are the differences that its steps make; all else is as with compile().
"""

import keras
import tensorflow as tf
from keras import ops
from keras.layers import Dense
from sklearn.datasets import load_digits

from shoal_trainer import Indexed, Training

images = (load_digits().data / 16).astype("float32")


class Autoencoder(keras.Model):
    def __init__(self, latent: int = 4) -> None:
        super().__init__()
        self.latent = latent
        self.encoder = keras.Sequential([keras.Input((64,)), Dense(64, activation="relu"), Dense(2 * latent)])
        self.decoder = keras.Sequential(
            [keras.Input((latent,)), Dense(64, activation="relu"), Dense(64, "sigmoid")]
        )
        self.noise = keras.random.SeedGenerator(1)
        self.total = keras.metrics.Mean(name="loss")

    def call(self, x):
        return self.decoder(self.encoder(x)[:, : self.latent])

    def train_step(self, x):
        with tf.GradientTape() as tape:
            mean, spread = ops.split(self.encoder(x), 2, axis=1)
            code = mean + ops.exp(0.5 * spread) * keras.random.normal(ops.shape(mean), seed=self.noise)
            wrong = ops.mean(ops.sum(ops.square(x - self.decoder(code)), axis=1))
            prior = -0.5 * ops.mean(ops.sum(1 + spread - ops.square(mean) - ops.exp(spread), axis=1))
            loss = wrong + 0.1 * prior
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
        )
        self.total.update_state(loss)
        return {"loss": self.total.result()}

    @property
    def metrics(self):
        return [self.total]


def build():
    model = Autoencoder()
    model.compile(optimizer=keras.optimizers.Adam(0.002))
    return model


job = Training(model=build, data=Indexed.from_arrays(images))
