"""The real KerasHub, where it is installed: nightly by test_newest_keras.py. test_lora.py imitates what it does."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from shoal_trainer import Training
from shoal_trainer.worker.compose import build_flat_model
from shoal_trainer.worker.loop import End
from tests.unit.trainer.worker.fakes import FakeCoordinator
from tests.unit.trainer.worker.running import Running
from tests.unit.trainer.worker.test_compose import CONFIG

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("default")]
TEXTS = np.array([" ".join("abcd"[(n * k) % 4] for k in range(1, 3 + n % 6)) for n in range(64)])


def build(folder):
    keras_hub = pytest.importorskip("keras_hub")
    vocabulary = {
        word: n for n, word in enumerate(["<|endoftext|>", "a", "b", "c", "d", "Ġ", "Ġa", "Ġb", "Ġc", "Ġd"])
    }
    (folder / "vocabulary.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("\n".join(f"Ġ {letter}" for letter in "abcd"))
    tokenizer = keras_hub.models.GPT2Tokenizer(str(folder / "vocabulary.json"), str(folder / "merges.txt"))
    backbone = keras_hub.models.GPT2Backbone(len(vocabulary), 2, 2, 16, 32, max_sequence_length=8)
    backbone.enable_lora(2)
    preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=8)
    model = keras_hub.models.GPT2CausalLM(backbone, preprocessor)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(), loss, weighted_metrics=["accuracy"])
    return model


@pytest.mark.parametrize(
    "data", [lambda: (TEXTS,), lambda: tf.data.Dataset.from_tensor_slices(TEXTS).batch(8)]
)
def test_causal_language_model_is_tuned_from_texts(tmp_path, start_servers, data):
    whole = sum(int(np.prod(v.shape)) for v in build(tmp_path).trainable_variables)
    training = Training(model=lambda: build(tmp_path), data=data(), validation=(TEXTS[:16],), wire="fp32")
    assert build_flat_model(training, CONFIG).layout.size == whole  # of LoRA alone
    coordinator = FakeCoordinator(len(TEXTS), epochs=2, tasks=("evaluate",))
    running = Running(training, start_servers(coordinator), coordinator)
    assert running.start().join() is End.FINISHED
    ((kind, metrics, _, _),) = coordinator.results
    assert kind == "evaluate"
    assert metrics["val_loss"] < 2.5  # ln 10 is 2.3, and most tokens are padding without weight
