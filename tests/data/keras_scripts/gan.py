"""A GAN: a train_step of its own with two optimizers and metrics, no call(), a callback that writes images."""

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

x = load_digits(return_X_y=True)[0].astype("float32") / 16.0
x = x[np.random.default_rng(0).permutation(len(x))][:1600]
LATENT = 16

discriminator = keras.Sequential(
    [keras.Input((64,)), keras.layers.Dense(64), keras.layers.LeakyReLU(), keras.layers.Dense(1)],
    name="discriminator",
)
generator = keras.Sequential(
    [
        keras.Input((LATENT,)),
        keras.layers.Dense(64),
        keras.layers.LeakyReLU(),
        keras.layers.Dense(64, activation="sigmoid"),
    ],
    name="generator",
)


class GAN(keras.Model):
    def __init__(self, discriminator, generator):
        super().__init__()
        self.discriminator, self.generator = discriminator, generator
        self.seed_generator = keras.random.SeedGenerator(1337)
        self.d_loss_tracker = keras.metrics.Mean(name="d_loss")
        self.g_loss_tracker = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_tracker, self.g_loss_tracker]

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    def train_step(self, real):
        count = tf.shape(real)[0]
        generated = self.generator(keras.random.normal((count, LATENT), seed=self.seed_generator))
        labels = tf.concat([tf.ones((count, 1)), tf.zeros((count, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(tf.concat([generated, real], axis=0)))
        gradients = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(gradients, self.discriminator.trainable_weights, strict=True))
        noise = keras.random.normal((count, LATENT), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(tf.zeros((count, 1)), self.discriminator(self.generator(noise)))
        gradients = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(gradients, self.generator.trainable_weights, strict=True))
        self.d_loss_tracker.update_state(d_loss)
        self.g_loss_tracker.update_state(g_loss)
        return {"d_loss": self.d_loss_tracker.result(), "g_loss": self.g_loss_tracker.result()}


class SaveImages(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        images = self.model.generator(keras.random.normal((4, LATENT), seed=1))
        np.save(f"generated_{epoch}.npy", images)


def build():
    gan = GAN(discriminator, generator)
    gan.compile(
        d_optimizer=keras.optimizers.Adam(1e-3),
        g_optimizer=keras.optimizers.Adam(1e-3),
        loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return gan


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    model = build()
    ds = tf.data.Dataset.from_tensor_slices(x).shuffle(len(x)).batch(16)
    history = model.fit(ds, epochs=6, callbacks=[SaveImages()], verbose=0)
    print(history.history)
