"""FLOPs of the forward pass against papers and arithmetic; a multiply-add is two operations."""

import math
import os

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
keras = pytest.importorskip("keras")
pytest.importorskip("tensorflow")

from shoal_trainer.errors import UserError  # noqa: E402
from shoal_trainer.features import flops_per_sample, model_features  # noqa: E402
from shoal_trainer.worker.layout import layout_of  # noqa: E402

layers = keras.layers


def cifar_resnet(depth: int) -> "keras.Model":
    """He et al. 2015, section 4.2: 6n+2 layers, option A shortcuts (no parameters)."""
    n = (depth - 2) // 6
    inputs = x = keras.Input((32, 32, 3))
    x = layers.Conv2D(16, 3, padding="same", use_bias=False)(x)
    for stage, width in enumerate((16, 32, 64)):
        for block in range(n):
            stride = 2 if stage and not block else 1
            y = layers.Conv2D(width, 3, stride, padding="same", use_bias=False)(x)
            y = layers.ReLU()(layers.BatchNormalization()(y))
            y = layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same", use_bias=False)(y))
            if stride == 2:
                x = layers.AveragePooling2D(2)(x)
                x = layers.Concatenate()([x, layers.Rescaling(0.0)(x)])
            x = layers.ReLU()(layers.Add()([x, y]))
    x = layers.Dense(10)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, x)


# Multiply-adds as later papers print them: 40.8 M, 69.1 M and 253 M; parameters 0.27 M, 0.46 M, 1.7 M.
@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("depth", "multiply_adds", "parameters"),
    [(20, 40.8e6, 0.27e6), (32, 69.1e6, 0.46e6), (110, 253e6, 1.73e6)],
)
def test_cifar_resnets_match_the_paper(depth: int, multiply_adds: float, parameters: float) -> None:
    found = model_features(cifar_resnet(depth))
    assert found.flops_per_sample == pytest.approx(2 * multiply_adds, rel=0.02)
    assert found.parameters == pytest.approx(parameters, rel=0.02)


@pytest.mark.nightly
def test_resnet_50_matches_the_paper() -> None:
    found = model_features(keras.applications.ResNet50(weights=None))
    # 3.86 G multiply-adds for Keras' variant (stride in the first 1x1 convolution, as in the paper: "3.8 x 10^9").
    assert found.flops_per_sample == pytest.approx(2 * 3.86e9, rel=0.02)
    assert found.parameters == pytest.approx(25.58e6, rel=0.01)


def test_mlp_flops_are_exact() -> None:
    model = keras.Sequential([keras.Input((784,)), layers.Dense(512, "relu"), layers.Dense(10)])
    found = model_features(model)
    assert found.flops_per_sample == 2 * (784 * 512 + 512 * 10)
    assert (found.parameters, found.tensors) == (784 * 512 + 512 + 512 * 10 + 10, 4)


def test_transformer_flops_are_exact() -> None:
    length, width, heads, vocabulary = 32, 64, 4, 100
    inputs = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width)(inputs)
    for _ in range(2):
        y = layers.MultiHeadAttention(heads, width // heads)(x, x)
        x = layers.LayerNormalization()(layers.Add()([x, y]))
        y = layers.Dense(width)(layers.Dense(4 * width, "gelu")(x))
        x = layers.LayerNormalization()(layers.Add()([x, y]))
    model = keras.Model(inputs, layers.Dense(vocabulary)(x))
    block = 4 * length * width**2 + 2 * length**2 * width + 2 * length * width * 4 * width
    multiply_adds = 2 * block + length * width * vocabulary
    assert model_features(model).flops_per_sample == pytest.approx(2 * multiply_adds, rel=1e-6)


def test_recurrent_layer_counts_every_time_step() -> None:
    inputs = keras.Input((20, 8))
    model = keras.Model(inputs, layers.SimpleRNN(16)(inputs))
    assert model_features(model).flops_per_sample == 2 * 20 * (8 * 16 + 16 * 16)


def test_depthwise_grouped_and_transposed_convolutions_are_exact() -> None:
    inputs = keras.Input((8, 8, 4))
    depthwise = keras.Model(inputs, layers.DepthwiseConv2D(3, padding="same", use_bias=False)(inputs))
    assert model_features(depthwise).flops_per_sample == 2 * 8 * 8 * 4 * 9
    grouped = keras.Model(inputs, layers.Conv2D(8, 3, padding="same", groups=2, use_bias=False)(inputs))
    assert model_features(grouped).flops_per_sample == 2 * 8 * 8 * 8 * 9 * 2
    transposed = keras.Model(inputs, layers.Conv2DTranspose(6, 3, 2, padding="same", use_bias=False)(inputs))
    assert model_features(transposed).flops_per_sample == 2 * 8 * 8 * 4 * 9 * 6


def test_unknown_dimension_needs_input_shape() -> None:
    inputs = keras.Input((None, 8))
    model = keras.Model(inputs, layers.Dense(4)(inputs))
    with pytest.raises(UserError, match="input_shape"):
        model_features(model)
    assert model_features(model, (10, 8)).flops_per_sample == 2 * 10 * 8 * 4


def test_fingerprint_depends_on_the_shape() -> None:
    def mlp(width: int) -> "keras.Model":
        return keras.Sequential([keras.Input((4,)), layers.Dense(width)])

    assert model_features(mlp(3)).fingerprint == model_features(mlp(3)).fingerprint
    assert model_features(mlp(3)).fingerprint != model_features(mlp(5)).fingerprint
    assert not math.isnan(model_features(mlp(3)).flops_per_sample)


def test_the_fingerprint_is_that_of_the_layout() -> None:
    """Workers, servers, snapshots and SpeedProfiles identify the model by it."""
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.BatchNormalization()])
    found = model_features(model)
    assert found.fingerprint == layout_of(model).fingerprint
    assert (found.parameters, found.tensors) == (4 * 3 + 3 + 2 * 3, 4)


def test_a_batch_gives_the_same_flops_as_the_models_inputs() -> None:
    """A worker counts with a batch, because a subclassed model has no inputs."""

    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = layers.Dense(8, "relu"), layers.Dense(2)

        def call(self, x: dict[str, object]) -> object:
            return self.second(self.first(x["a"]))

    own = Own()
    batch = {"a": np.zeros((32, 6), "float32")}
    own(batch)
    assert flops_per_sample(own, batch) == 2 * (6 * 8 + 8 * 2)
    functional = keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(2)])
    assert flops_per_sample(functional, batch["a"]) == model_features(functional).flops_per_sample


def test_inputs_may_be_a_dict() -> None:
    inputs = {"a": keras.Input((4,), name="a"), "b": keras.Input((6,), name="b")}
    model = keras.Model(inputs, layers.Dense(2)(layers.Concatenate()([inputs["a"], inputs["b"]])))
    assert model_features(model).flops_per_sample == 2 * 10 * 2
