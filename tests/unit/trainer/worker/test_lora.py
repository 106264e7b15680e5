"""A text task as KerasHub builds it: its own preprocessing, weights per token, and LoRA on a frozen backbone."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from shoal_trainer import Training
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.worker.compose import build_flat_model
from shoal_trainer.worker.loop import End
from tests.unit.trainer.ps.shards import pull_from
from tests.unit.trainer.worker.fakes import FakeCoordinator
from tests.unit.trainer.worker.running import Running
from tests.unit.trainer.worker.test_compose import CONFIG

L = keras.layers
LENGTH, VOCABULARY, RANK = 8, 32, 2
TEXTS = np.array([" ".join(str((n * k) % 30 + 1) for k in range(1, 3 + n % 6)) for n in range(64)])


class Preprocessor:
    """Text to tokens: labels are the next tokens, weights say which of them are text.

    As the tokenizers of KerasHub, it takes text as a string, a list or a tensor, and no array.
    """

    def __call__(self, x, y=None, sample_weight=None):
        assert isinstance(x, tf.Tensor | list | str)
        assert y is None
        assert sample_weight is None
        words = tf.strings.split(x).to_tensor(default_value="0", shape=[None, LENGTH + 1])
        tokens = tf.strings.to_number(words, tf.int32)
        return {"ids": tokens[:, :-1]}, tokens[:, 1:], tf.cast(tokens[:, 1:] != 0, tf.float32)


class Task(keras.Model):
    """As `keras_hub.src.utils.pipeline_model.PipelineModel`: `fit` and `evaluate` preprocess, `train_step` does not."""

    def __init__(self):
        ids = keras.Input((None,), dtype="int32", name="ids")
        embedding = L.Embedding(VOCABULARY, 8)
        h = embedding(ids)
        for _ in range(2):
            attended = L.MultiHeadAttention(2, 4)(h, h, use_causal_mask=True)
            h = L.LayerNormalization()(h + attended)
        super().__init__({"ids": ids}, L.Dense(VOCABULARY)(h))
        self.preprocessor = Preprocessor()

    def preprocess_samples(self, x, y=None, sample_weight=None):
        return self.preprocessor(x, y, sample_weight)

    def evaluate(self, x=None, **options):
        return super().evaluate(x.map(self.preprocess_samples), **options)


def build():
    keras.utils.set_random_seed(3)
    model = Task()
    for layer in model.layers:
        layer.trainable = False
        if isinstance(layer, L.Dense | L.Embedding):
            layer.trainable = True
            layer.enable_lora(RANK)
    sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), sparse, weighted_metrics=["accuracy"])
    return model


def training():
    return Training(model=build, data=(TEXTS,), validation=(TEXTS[:16],), wire="fp32")


def test_only_what_is_trained_is_exchanged():
    flat_model = build_flat_model(training(), CONFIG)
    trained = RANK * (VOCABULARY + 8) + RANK * (8 + VOCABULARY) + VOCABULARY
    assert flat_model.layout.size == flat_model.layout.trainable == trained
    assert flat_model.on_server
    assert all("lora" in each.path or "bias" in each.path for each in flat_model.layout.entries)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("engine", ["host", "gpu"], indirect=True)
def test_texts_are_preprocessed_for_training_and_once_for_evaluation(start_servers):
    coordinator = FakeCoordinator(len(TEXTS), epochs=2, tasks=("evaluate",))
    servers = start_servers(coordinator)
    running = Running(training(), servers, coordinator)
    frozen = {v.path: v.numpy() for v in running.flat_model.model.non_trainable_variables}
    before = running.flat_model.initial()
    assert running.start().join() is End.FINISHED
    assert coordinator.samples == 2 * len(TEXTS)
    ((kind, metrics, _, _),) = coordinator.results
    assert kind == "evaluate"
    assert metrics["val_loss"] < 3.5  # ln 32 is 3.47, and the words are few
    after = np.zeros_like(before)
    pull_from(servers.stores[0], 0, after)
    assert not np.array_equal(before, after)
    model = running.flat_model.model
    changed = [v.path for v in model.non_trainable_variables if not np.array_equal(frozen[v.path], v.numpy())]
    assert [path for path in changed if "seed" not in path and "metric" not in path] == []


def test_step_is_that_of_keras_on_the_tokens():
    flat_model = build_flat_model(training(), CONFIG)
    plain = build()
    x, y, weights = plain.preprocess_samples(tf.constant(TEXTS[:4]))
    expected = plain.test_on_batch(x, y, weights, return_dict=True)
    buffer = aligned(flat_model.layout.size)
    buffer[:] = flat_model.initial()
    step = flat_model.step(flat_model.vector.alias(buffer), flat_model.example)
    assert step.loss == pytest.approx(float(expected["loss"]), rel=1e-4)
    (accuracy,) = step.metrics
    assert accuracy.total / accuracy.weight == pytest.approx(float(expected["accuracy"]), abs=1e-5)
