"""A Keras model as one traced function of a flat parameter vector.

    (parameters as received, batch) -> (update as sent, loss)

The function slices the flat vector into the model's variables, so a step costs little more than its gradient (an eager
assignment of each variable would take 48 ms for a ResNet-110). The receive buffer is passed without a copy (dlpack);
the caller must not receive into a buffer while a step reads it.

An accelerator decodes, encodes and concatenates by itself, so that the flat vectors cross the bus in the wire's format,
half the bytes in bf16. Without one, TensorFlow's casts and concatenation would take several passes over memory, so
parameters are passed as fp32, and a kernel encodes each gradient in one pass into the update.
"""

from __future__ import annotations

import logging
import math
import reprlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from keras.src.backend.common.global_state import set_global_attribute
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator

from shoal_trainer.data.batch import Batch, leaves, map_leaves
from shoal_trainer.data.user_code import where
from shoal_trainer.errors import UserError
from shoal_trainer.ps import kernels
from shoal_trainer.worker.build import BUILD_PARTS, build
from shoal_trainer.worker.hardware import NO_ACCELERATOR, device_name
from shoal_trainer.worker.layout import Layout, flatten, layout_of, unflatten, variables_of
from shoal_trainer.worker.optimizers import has_own_step, takes_rows_apart, unwrap, why_worker
from shoal_trainer.worker.weighing import filled

log = logging.getLogger(__name__)

Wire = Literal["bf16", "fp32"]


@dataclass(frozen=True)
class Step:
    """The result of a step: `update` (wire dtype, shape (layout.size,)), the mean loss, whether both are finite.

    `skipped`: mixed_float16 discarded the gradient (an overflow, a non-finite batch); the optimizer takes no step.
    """

    update: npt.NDArray[Any]
    loss: float
    finite: bool
    skipped: bool = False


class FlatModel:
    """A built and compiled Keras model as a function of a flat vector.

    `worker` (slot, incarnation) makes Dropout differ between workers; the first worker keeps the seeds of the model.
    `on_host`: compute without an accelerator (None: detect). `dtype`: the type of the parameters that a step takes,
    fp32, or uint16 with bf16 bits.
    """

    def __init__(
        self,
        model: Any,
        example: Batch,
        wire: Wire,
        worker: tuple[int, int] = (0, 0),
        *,
        on_host: bool | None = None,
    ) -> None:
        self.model = model
        self.wire: Wire = wire
        self.example = example
        build(model, example)
        _keep_drawing()
        _vary_seeds(model, worker)
        self.layout: Layout = layout_of(model)
        self.on_server = not why_worker(model)
        self._own_step = has_own_step(model)
        self._may_overflow = self.on_server and isinstance(
            model.optimizer, keras.optimizers.LossScaleOptimizer
        )
        self._updates = None if self.on_server else _count_for(unwrap(model.optimizer))
        self._on_host = device_name() == NO_ACCELERATOR if on_host is None else on_host
        self._wire_dtype = np.uint16 if wire == "bf16" else np.float32
        self.dtype: npt.DTypeLike = np.float32 if self._on_host else self._wire_dtype
        self._specs = [_spec(leaf) for leaf in leaves(self._arguments(example))]
        self._shapes = [tuple(spec.shape) for spec in self._specs]
        self._function: Any = None
        self._traced: Any = None
        self._spare: list[npt.NDArray[Any]] = []

    def trace(self) -> None:
        """Trace the step function. Raises `UserError` with the message of Keras or TensorFlow if that fails."""
        body = self._gradient_body() if self.on_server else self._difference_body()
        structure = self._arguments(self.example)

        def flat_body(flat: Any, *arguments: Any) -> Any:
            rest = iter(arguments)
            return body(flat, map_leaves(lambda _: next(rest), structure))

        flat = tf.TensorSpec((self.layout.size,), tf.as_dtype(self.dtype))
        self._function = tf.function(flat_body, autograph=False, reduce_retracing=True)
        failed: Exception | None = None
        try:
            self._traced = self._function.get_concrete_function(flat, *self._specs)
        except Exception as error:
            failed = error
        if layout_of(self.model) != self.layout:
            raise UserError(
                f"The training step creates variables, which would not be trained. {BUILD_PARTS}"
            ) from failed
        if failed is not None:
            raise UserError(f"The model's training step cannot be traced: {where(failed)}") from failed

    def step(self, parameters: Any, batch: Batch, updates: int = 0) -> Step:
        """Run one step at `parameters`, a tensor that `alias` made of the receive buffer, after `updates` updates."""
        if self._traced is None:
            self.trace()
        if self._updates is not None:
            self._updates.assign(updates)
        arguments = list(leaves(self._arguments(batch)))
        tensors = [
            parameters,
            *(_tensor(leaf, spec) for leaf, spec in zip(arguments, self._specs, strict=True)),
        ]
        if all(np.shape(leaf) == shape for leaf, shape in zip(arguments, self._shapes, strict=True)):
            # As `ConcreteFunction.__call__`, without binding arguments to names, which takes as long as the call.
            pieces, loss = self._traced._call_flat(tensors, self._traced.captured_inputs)
        else:  # retraces for samples of another shape
            pieces, loss = self._function(*tensors)
        (update, finite), mean = self._update(pieces), float(loss)
        skipped = self._may_overflow and not _any(update[: self.layout.trainable])
        return Step(update, mean, finite and math.isfinite(mean), skipped)

    def reuse(self, update: npt.NDArray[Any]) -> None:
        """Let a later step overwrite this update, which saves the allocation of new pages."""
        if self._on_host and not self._spare:
            self._spare.append(update)

    def alias(self, buffer: npt.NDArray[Any]) -> Any:
        """A tensor that shares the memory of a 64-byte aligned buffer."""
        if buffer.ctypes.data % 64:
            raise ValueError("the buffer is not 64-byte aligned")  # TensorFlow would abort the process
        return tf.experimental.dlpack.from_dlpack(buffer.__dlpack__())

    def initial(self) -> npt.NDArray[np.float32]:
        """The model's current parameters, fp32, shape (layout.size,)."""
        return flatten(self.model, self.layout)

    def load(self, flat: npt.NDArray[np.float32]) -> None:
        """Set the model's variables, to evaluate or save it."""
        unflatten(self.model, self.layout, flat)

    def _arguments(self, batch: Batch) -> Any:
        """The arguments of a step. A custom `train_step` gets the real samples as the data function yields them."""
        return (
            batch.as_given() if self._own_step else (batch.x, batch.y, batch.weights, np.int32(batch.samples))
        )

    def _decode(self, flat: Any) -> list[Any]:
        if self.dtype == np.uint16:
            flat = tf.bitcast(flat, tf.bfloat16)
        pieces = zip(self.layout.entries, self.layout.pieces(flat), strict=True)
        return [tf.cast(tf.reshape(piece, entry.shape), entry.dtype) for entry, piece in pieces]

    def _encode(self, pieces: list[Any], loss: Any) -> tuple[list[Any], Any]:
        if self._on_host:
            return [tf.cast(piece, tf.float32) for piece in pieces], tf.cast(loss, tf.float32)
        kind = tf.bfloat16 if self.wire == "bf16" else tf.float32
        flat = tf.concat([tf.cast(tf.reshape(piece, [-1]), kind) for piece in pieces], 0)
        if self.wire == "bf16":
            flat = tf.bitcast(flat, tf.uint16)
        with tf.device("/CPU:0"):
            return [tf.identity(flat)], tf.identity(tf.cast(loss, tf.float32))

    def _update(self, pieces: list[Any]) -> tuple[npt.NDArray[Any], bool]:
        """The result of `_encode` in the wire's format, and whether it is finite."""
        arrays = [np.asarray(memoryview(piece)).reshape(-1) for piece in pieces]
        if not self._on_host:
            return arrays[0], kernels.finite(arrays[0])
        update = self._spare.pop() if self._spare else np.empty(self.layout.size, self._wire_dtype)
        finite = True
        for piece, place in zip(arrays, self.layout.pieces(update), strict=True):
            finite &= kernels.encode(piece, place)
        return update, finite

    def _gradient_body(self) -> Callable[..., Any]:
        """(flat, (x, y, weights, samples)) -> gradients of the trainable part, new - old of the statistics."""
        model, optimizer = self.model, unwrap(self.model.optimizer)
        trainable, statistics = variables_of(model)
        scaler = _Scaler(model.optimizer)

        def compute(values: list[Any], x: Any, y: Any, weights: Any, samples: Any, scale: Any) -> Any:
            weights = filled(weights, samples)
            trained, before = values[: len(trainable)], values[len(trainable) :]
            statistics_before = {id(v): value for v, value in zip(statistics, before, strict=True)}
            others = model.non_trainable_variables
            others_before = [statistics_before.get(id(v), v.value) for v in others]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(trained)
                loss, after = _forward(model, trained, others_before, x, y, weights)
                scaled = loss * tf.cast(scale, loss.dtype)
            gradients = tape.gradient(scaled, trained, unconnected_gradients=tf.UnconnectedGradients.ZERO)
            _warn_of_rows(model, gradients)
            gradients = [tf.convert_to_tensor(g) / tf.cast(scale, g.dtype) for g in gradients]
            others_after = dict(zip((id(v) for v in others), after, strict=True))
            for variable, old, new in zip(others, others_before, after, strict=True):
                if id(variable) not in statistics_before and new is not None and new is not old:
                    variable.assign(new)
            differences = [
                tf.zeros_like(old)
                if others_after.get(id(v)) is None
                else tf.cast(others_after[id(v)], old.dtype) - old
                for v, old in zip(statistics, before, strict=True)
            ]
            return gradients, differences, loss

        if model.jit_compile:
            compute = tf.function(compute, autograph=False, jit_compile=True)

        def body(flat: Any, data: Any) -> Any:
            x, y, weights, samples = data
            gradients, differences, loss = compute(self._decode(flat), x, y, weights, samples, scaler.scale())
            gradients, loss = scaler.settle(list(gradients), loss)
            return self._encode([*optimizer._clip_gradients(gradients), *differences], loss)

        return body

    def _difference_body(self) -> Callable[..., Any]:
        """(flat, data) -> new - old of everything, after the model's `train_step`."""
        model = self.model
        trainable, statistics = variables_of(model)
        variables = trainable + statistics

        def body(flat: Any, data: Any) -> Any:
            before = self._decode(flat)
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)
            model.reset_metrics()  # so that the logged loss is that of this step, not a mean
            loss = _loss_of(model.train_step(data) if self._own_step else _step(model, *data))
            after = [tf.convert_to_tensor(v.value) for v in variables]
            return self._encode([new - old for old, new in zip(before, after, strict=True)], loss)

        return body


class _Scaler:
    """Loss scaling of `mixed_float16`: dynamic as in `LossScaleOptimizer`, fixed, or none.

    Each worker has its own scale, which depends on its overflows. A step that overflowed pushes zeros.
    """

    def __init__(self, optimizer: Any) -> None:
        self._dynamic = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        self._fixed = None if self._dynamic else optimizer.loss_scale_factor
        if self._dynamic:
            self._scale = tf.Variable(float(optimizer.initial_scale), trainable=False)
            self._good = tf.Variable(0, trainable=False)
            self._grow_after = int(optimizer.dynamic_growth_steps)

    def scale(self) -> Any:
        if self._dynamic:
            return tf.convert_to_tensor(self._scale)
        return tf.constant(float(self._fixed or 1.0))

    def settle(self, gradients: list[Any], loss: Any) -> tuple[list[Any], Any]:
        if not self._dynamic:
            return gradients, loss
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in gradients])
        grow = tf.logical_and(finite, self._good >= self._grow_after - 1)
        factor = tf.where(finite, tf.where(grow, 2.0, 1.0), 0.5)
        self._good.assign(tf.where(tf.logical_and(finite, tf.logical_not(grow)), self._good + 1, 0))
        self._scale.assign(self._scale * factor)
        return [tf.where(finite, g, tf.zeros_like(g)) for g in gradients], loss


def _any(values: npt.NDArray[Any]) -> bool:
    """Whether a value is not 0; usually one of the first few is."""
    return bool(values[:4096].any() or values.any())


def _forward(
    model: Any, trainable: list[Any], non_trainable: list[Any], x: Any, y: Any, weights: Any
) -> tuple[Any, Any]:
    """The loss and new values of the non-trainable variables, computed by Keras without its variables.

    The metrics of `compile()` are not computed in training, only in the evaluation.
    """
    kwargs = {"training": True} if model._call_has_training_arg else {}
    predicted, after, losses = model.stateless_call(trainable, non_trainable, x, return_losses=True, **kwargs)
    if losses:  # from regularizers and add_loss in this call; compute_loss must use these
        model._losses_override = losses
    try:
        loss, (_, new, _) = model.stateless_compute_loss(
            trainable, after, [v.value for v in model.metrics_variables], x=x, y=y, y_pred=predicted,
            sample_weight=weights, training=True,
        )  # fmt: skip
    finally:
        model._losses_override = []
    return loss, new


def _step(model: Any, x: Any, y: Any, weights: Any, samples: Any) -> Any:
    """Run Keras' own `train_step` without the metrics."""
    model.compute_metrics = lambda *_, **__: {"loss": model._loss_tracker.result()}
    try:
        return model.train_step((x, y, filled(weights, samples)))
    finally:
        del model.compute_metrics


def _warn_of_rows(model: Any, gradients: list[Any]) -> None:
    """Warn about sparse gradients that `why_worker` cannot see in the model's layers."""
    rows = [v.path for v, g in zip(model.trainable_variables, gradients, strict=True) if _is_rows(g)]
    if rows and takes_rows_apart(model):
        log.warning(
            "%s will differ from plain Keras: Keras does not sum the gradients of repeated rows of a batch before it "
            "squares or clips them; the parameter servers do. Use a keras.layers.Embedding, or an optimizer that the "
            "parameter servers do not implement: both run on the workers as in Keras.",
            ", ".join(rows),
        )


def _is_rows(gradient: Any) -> bool:
    return isinstance(gradient, tf.IndexedSlices)


def _loss_of(logs: Any) -> Any:
    """The loss that a custom `train_step` returns, or its first value if it has none (a GAN)."""
    if not isinstance(logs, dict) or not logs:
        raise UserError(
            f"The model's train_step must return a dict with its loss, not {reprlib.repr(logs)}. Return for example "
            '{"loss": loss}.'
        )
    return tf.reduce_mean(logs["loss"] if "loss" in logs else next(iter(logs.values())))


def _tensor(leaf: Any, spec: tf.TensorSpec) -> Any:
    # For an array, `constant` has less overhead than `convert_to_tensor`.
    array = isinstance(leaf, np.ndarray)
    return tf.constant(leaf, spec.dtype) if array else tf.convert_to_tensor(leaf, spec.dtype)


def _spec(leaf: Any) -> tf.TensorSpec:
    tensor = tf.convert_to_tensor(leaf)
    return tf.TensorSpec(tensor.shape, tensor.dtype)


class _Drawing(keras.random.SeedGenerator):  # type: ignore[misc]
    """Keras' global generator, which also advances in a stateless call; else each step draws the same numbers."""

    def next(self, ordered: bool = True) -> Any:
        state = self.state._value
        drawn = state.read_value()
        state.assign(drawn + tf.constant([0, 1], drawn.dtype) if ordered else (drawn + 1) * 5387 % 933199)
        return drawn


def _keep_drawing() -> None:
    """Replace the global generator, which `keras.random` uses if a layer passes none."""
    original = global_seed_generator()
    generator = _Drawing(0, name="seed_generator")  # a valid name in a SavedModel
    generator.state.assign(original.state)
    set_global_attribute(GLOBAL_SEED_GENERATOR, generator)


def _count_for(optimizer: Any) -> tf.Variable | None:
    """Make a learning-rate schedule on the worker follow the updates of the job, not those of this worker."""
    schedule = optimizer._learning_rate
    if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        return None
    updates = tf.Variable(0, dtype=tf.int64, trainable=False)
    optimizer._get_current_learning_rate = lambda: schedule(updates)
    return updates


def _vary_seeds(model: Any, worker: tuple[int, int]) -> None:
    if worker == (0, 0):
        return
    generators = [g for layer in model._flatten_layers() for g in getattr(layer, "_seed_generators", ())]
    for generator in [*generators, global_seed_generator()]:
        path = f"{generator.state.path}/{worker[0]}/{worker[1]}".encode()
        state = np.asarray(generator.state.numpy())
        generator.state.assign(np.array([zlib.crc32(path), zlib.adler32(path)]).astype(state.dtype))
