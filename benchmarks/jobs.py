"""Entrypoints of the jobs for the real worker loop: synthetic data, no input cost; and the digits of `tasks`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from benchmarks import accelerator, models
from shoal_trainer import Indexed, Training

SAMPLES = 50_000
"""As in CIFAR-10: fewer samples make shorter leases and more requests to the coordinator."""


def _data(shape: tuple[int, ...]) -> Any:
    rng = np.random.default_rng(0)
    size = math.prod(shape)
    # Overlapping windows of one long row save memory.
    x = sliding_window_view(rng.standard_normal(SAMPLES + size - 1, np.float32), size).reshape(-1, *shape)
    return Indexed.from_arrays(x, rng.integers(0, 10, SAMPLES).astype(np.int32))


def compute(model: str) -> Training:
    """`mlp`, `resnet20` or `resnet110`: real compute."""

    def build() -> Any:
        return models.compiled(
            models.mlp() if model == "mlp" else models.resnet(int(model.removeprefix("resnet")))
        )

    return Training(model=build, data=_data((784,) if model == "mlp" else (32, 32, 3)))


def sleeping(parameters: int, milliseconds: int, tensors: int = 8, wire: str = "bf16") -> Training:
    """A step that takes `milliseconds` and almost no CPU time, like a step on an accelerator.

    The parameters are in `tensors` tensors of similar size (all but the last a multiple of 64, as in most layers), so
    that `FlatModel` takes apart and concatenates as for a model.
    """

    def build() -> Any:
        import keras
        import tensorflow as tf

        from benchmarks.strategy_peer import sleep_op

        class Sleeping(keras.layers.Layer):  # type: ignore[misc]
            def build(self, _shape: Any) -> None:
                part = parameters // tensors // 64 * 64
                sizes = [part] * (tensors - 1) + [parameters - (tensors - 1) * part]
                self.parts = [
                    self.add_weight(shape=(n,), initializer="zeros", name=f"w{i}")
                    for i, n in enumerate(sizes)
                ]

            def call(self, x: Any) -> Any:
                slept = sleep_op(tf.reshape(x, [-1])[0] * 0.0, milliseconds / 1000)

                @tf.custom_gradient  # type: ignore[untyped-decorator]
                def device(*parts: Any) -> Any:
                    """No work for the host: the gradients are the weights."""
                    return tf.reshape(slept, [1, 1]), lambda _: list(parts)

                return x[:, :10] + device(*[tf.convert_to_tensor(part) for part in self.parts])

        model = keras.Sequential([keras.Input((16,)), Sleeping()])
        return models.compiled(model)

    return Training(model=build, data=_data((16,)), wire="fp32" if wire == "fp32" else "bf16")


def on_accelerator(parameters: int, milliseconds: int, steps: int = 1) -> Training:
    """A step on a simulated accelerator behind a bus (`accelerator`); `steps` of them per push."""
    job = sleeping(parameters, milliseconds)

    def build() -> Any:
        accelerator.install(milliseconds / 1000)
        return models.compiled(job.model())

    return replace(job, model=build, batches_per_push=steps)


def digits(seed: int, milliseconds: int) -> Training:
    """Digits with momentum, as `virtual_job` trains them from this seed, with steps that take `milliseconds` longer."""
    from benchmarks import tasks  # scikit-learn, which no other job needs: `join` measures imports

    network, data = tasks.network_of("digits"), tasks.data_of("digits")
    rate = tasks.optimizer_of("digits", "momentum").learning_rate

    def build() -> Any:
        import keras
        import tensorflow as tf
        from keras import layers

        from benchmarks.strategy_peer import sleep_op

        class Pause(layers.Layer):  # type: ignore[misc]
            def call(self, x: Any, training: bool = False) -> Any:
                if not training:
                    return x
                return x + tf.reshape(sleep_op(x[0, 0] * 0.0, milliseconds / 1000), [1, 1])

        model = keras.Sequential([keras.Input(data.x.shape[1:]), Pause()])
        for width in (64, 64):
            model.add(layers.Dense(width, "relu"))
        model.add(layers.Dense(10))
        first, shapes = network.start(np.random.default_rng(seed)), [w.shape for w in model.get_weights()]
        cuts = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
        model.set_weights([w.reshape(s) for w, s in zip(np.split(first, cuts), shapes, strict=True)])
        model.compile(
            keras.optimizers.SGD(rate, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return model

    held_out = Indexed.from_arrays(data.test_x, data.test_y)
    return Training(model=build, data=Indexed.from_arrays(data.x, data.y), validation=held_out, seed=seed)
