"""Models without `call`, run by their own `train_step`, like the VAEs and GANs in the Keras guides."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from shoal_trainer import Indexed, Training
from shoal_trainer.data.source import Part
from shoal_trainer.errors import UserError
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.worker.flat_model import FlatModel
from shoal_trainer.worker.layout import flatten
from shoal_trainer.worker.tasks import Tasks
from tests.unit.trainer.worker.running import on_host

L, ops = keras.layers, keras.ops
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)  # from Keras' saving code with NumPy 2
DATA = Indexed.from_arrays(np.random.default_rng(0).uniform(size=(40, 6)).astype("float32"))


class Unsaved(keras.Model):
    def __init__(self, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder, self.decoder = encoder, decoder
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            mean, spread = ops.split(self.encoder(data), 2, axis=1)
            result = self.decoder(mean + ops.exp(0.5 * spread) * 0.5)
            divergence = ops.mean(ops.exp(spread) + ops.square(mean) - 1 - spread)
            loss = ops.mean(ops.square(result - data)) + 0.1 * divergence
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


@keras.saving.register_keras_serializable()
class VAE(Unsaved):
    def get_config(self):
        return {
            part: keras.saving.serialize_keras_object(getattr(self, part)) for part in ("encoder", "decoder")
        }

    @classmethod
    def from_config(cls, config):
        return cls(**keras.saving.deserialize_keras_object(config))


def vae(*, kind=VAE, encoder=True, decoder=True):
    keras.utils.set_random_seed(1)
    keras.backend.clear_session(free_memory=False)
    parts = [
        keras.Sequential([*([keras.Input((size,))] if built else []), L.Dense(8, "relu"), L.Dense(out)])
        for built, size, out in ((encoder, 6, 4), (decoder, 2, 6))
    ]
    model = kind(*parts)
    model.compile(keras.optimizers.Adam(0.01))
    return model


def test_model_without_call_trains_as_in_keras_and_is_exported():
    batches = list(DATA.read(Part(0, 37), 8))
    flat_model, plain = FlatModel(vae(), batches[0], "fp32"), vae()
    buffer = aligned(flat_model.layout.size)
    buffer[:] = flat_model.initial()
    assert np.array_equal(buffer, flatten(plain, flat_model.layout))
    for batch in batches:
        result = flat_model.step(flat_model.vector.alias(buffer), batch)
        plain.reset_metrics()
        logs = plain.train_step(tf.constant(batch.x[: batch.samples]))
        assert result.loss == pytest.approx(float(logs["loss"]), rel=1e-5)
        buffer += result.update
    assert np.abs(buffer - flatten(plain, flat_model.layout)).max() < 2e-5
    tasks = Tasks(Training(model=vae, data=DATA), flat_model, 8)
    loaded = keras.models.load_model(tasks.export(buffer).files["model.keras"], compile=False)
    assert np.array_equal(flatten(loaded, flat_model.layout), buffer)
    tasks.close()


def test_unbuilt_parts_are_refused():
    example = DATA.example(8)
    with pytest.raises(UserError, match=r"no call\(\) to create them. Build its parts"):
        FlatModel(vae(encoder=False, decoder=False), example, "fp32")
    with pytest.raises(UserError, match=r"creates variables, which would not be trained. Build its parts"):
        FlatModel(vae(decoder=False), example, "fp32").trace()


def test_unserializable_model_without_call_exports_its_weights(caplog):
    """As in the Keras guides: parts are passed to `__init__`, and `get_config` is missing."""
    flat_model = FlatModel(vae(kind=Unsaved), DATA.example(8), "fp32")
    tasks = Tasks(Training(model=vae, data=DATA), flat_model, 8)
    assert "model/ will contain model.weights.h5 but not model.keras" in caplog.text
    flat = flat_model.initial() + 1
    files = tasks.export(flat).files
    assert list(files) == ["model.weights.h5"]
    other = vae(kind=Unsaved)
    other.built = True
    other.optimizer.build(other.trainable_variables)
    other.load_weights(files["model.weights.h5"])
    assert np.array_equal(flatten(other, flat_model.layout), flat)
    tasks.close()


class GAN(keras.Model):
    """As on keras.io: two optimizers, and a `train_step` that returns two losses, neither of them `loss`."""

    def __init__(self, discriminator, generator):
        super().__init__()
        self.discriminator, self.generator = discriminator, generator
        self.seed_generator = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, real):
        size = ops.shape(real)[0]
        noise = keras.random.normal((size, 2), seed=self.seed_generator)
        both = ops.concatenate([self.generator(noise), real], axis=0)
        labels = ops.concatenate([ops.ones((size, 1)), ops.zeros((size, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(ops.zeros((size, 1)), self.discriminator(self.generator(noise)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


def gan():
    keras.utils.set_random_seed(1)
    keras.backend.clear_session(free_memory=False)
    discriminator = keras.Sequential([keras.Input((6,)), L.Dense(8, "relu"), L.Dense(1)])
    generator = keras.Sequential([keras.Input((2,)), L.Dense(8, "relu"), L.Dense(6)])
    model = GAN(discriminator, generator)
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.optimizers.Adam(0.01),
        keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return model


@pytest.mark.nightly
@on_host  # tf.random draws other numbers in XLA
def test_gan_without_a_value_named_loss_trains_as_in_keras():
    batches = list(DATA.read(Part(0, 37), 8))
    flat_model, plain = FlatModel(gan(), batches[0], "fp32"), gan()
    buffer = aligned(flat_model.layout.size)
    buffer[:] = flat_model.initial()
    for batch in batches:
        result = flat_model.step(flat_model.vector.alias(buffer), batch)
        plain.reset_metrics()
        logs = plain.train_step(tf.constant(batch.x[: batch.samples]))
        assert result.loss == pytest.approx(float(logs["d_loss"]), rel=1e-4)
        buffer += result.update
    assert np.abs(buffer - flatten(plain, flat_model.layout)).max() < 2e-5


@pytest.mark.by_day(1)
@pytest.mark.parametrize("logs", [{}, None, 0.5])
def test_train_step_without_any_value_is_refused(logs):
    class Silent(GAN):
        def train_step(self, real):
            super().train_step(real)
            return logs

    plain = gan()
    model = Silent(plain.discriminator, plain.generator)
    model.compile(plain.d_optimizer, plain.g_optimizer, plain.loss_fn)
    with pytest.raises(UserError, match="train_step must return a dict with its loss, not"):
        FlatModel(model, DATA.example(8), "fp32").trace()
