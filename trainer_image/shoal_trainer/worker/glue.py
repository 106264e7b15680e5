"""Keras on one side, a flat vector on the other: the worker's one traced function.

    (parameters as they came off the wire, batch) -> (update as it goes onto the wire, loss)

The flat vector is sliced into the model's variables inside the function, so the step costs what the gradient costs
(one eager assignment for each variable would cost 48 ms for a ResNet-110). Parameters come in without a copy (dlpack
over the receive buffer); the caller must not receive into a buffer while a step reads it.

With an accelerator the flat vectors cross the bus as the wire carries them, half the bytes in bf16: it decodes, encodes
and concatenates itself. On the host alone TensorFlow's casts and concatenation cost several passes over memory, so
parameters come in as fp32 and each gradient is encoded by a kernel, in one pass, straight into the update.
"""

from __future__ import annotations

import logging
import math
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
from shoal_trainer.errors import UserError
from shoal_trainer.ps import kernels
from shoal_trainer.worker.build import BUILD_PARTS, brief, build
from shoal_trainer.worker.hardware import NO_ACCELERATOR, device_name
from shoal_trainer.worker.layout import Layout, flatten, layout_of, unflatten, variables_of
from shoal_trainer.worker.optimizers import has_own_step, takes_rows_apart, unwrap, why_worker
from shoal_trainer.worker.weighing import filled

log = logging.getLogger(__name__)

Wire = Literal["bf16", "fp32"]


@dataclass(frozen=True)
class Step:
    """What one step made: `update` (wire dtype, shape (layout.size,)), the mean loss, whether both are finite.

    `skipped`: there is no gradient (an overflow of mixed_float16, a batch that is not finite), so no optimizer step.
    """

    update: npt.NDArray[Any]
    loss: float
    finite: bool
    skipped: bool = False


class Glue:
    """A built and compiled Keras model, seen as a function of a flat vector.

    `worker` (slot, incarnation) makes Dropout differ between workers; the first worker keeps the seeds of the model.
    `on_host`: no accelerator computes (None: as TensorFlow finds). `dtype`: of the parameters that a step takes, fp32
    or uint16 that holds bf16 bits.
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
        self._specs = [_spec(leaf) for leaf in leaves(self._given(example))]
        self._shapes = [tuple(spec.shape) for spec in self._specs]
        self._function: Any = None
        self._traced: Any = None
        self._spare: list[npt.NDArray[Any]] = []

    def trace(self) -> None:
        """Trace the step function now. Raises `UserError` with Keras' or TensorFlow's words where it cannot be."""
        body = self._gradient_body() if self.on_server else self._difference_body()
        structure = self._given(self.example)

        def flat_body(flat: Any, *given: Any) -> Any:
            rest = iter(given)
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
                f"A training step creates variables that would not be trained. {BUILD_PARTS}"
            ) from failed
        if failed is not None:
            raise UserError(f"The model's training step cannot be traced: {brief(failed)}") from failed

    def step(self, parameters: Any, batch: Batch, updates: int = 0) -> Step:
        """One step at `parameters`, a tensor made by `alias` from the wire's buffer, to which `updates` have led."""
        if self._traced is None:
            self.trace()
        if self._updates is not None:
            self._updates.assign(updates)
        given = list(leaves(self._given(batch)))
        tensors = [parameters, *(_tensor(leaf, spec) for leaf, spec in zip(given, self._specs, strict=True))]
        if all(np.shape(leaf) == shape for leaf, shape in zip(given, self._shapes, strict=True)):
            # As `ConcreteFunction.__call__` does it, without binding each argument to its name, which costs as much.
            pieces, loss = self._traced._call_flat(tensors, self._traced.captured_inputs)
        else:  # samples of another shape are traced anew
            pieces, loss = self._function(*tensors)
        (update, finite), mean = self._update(pieces), float(loss)
        skipped = self._may_overflow and not _any(update[: self.layout.trainable])
        return Step(update, mean, finite and math.isfinite(mean), skipped)

    def reuse(self, update: npt.NDArray[Any]) -> None:
        """Nobody needs this update any more: a later step may overwrite it, which saves the kernel new pages."""
        if self._on_host and not self._spare:
            self._spare.append(update)

    def alias(self, buffer: npt.NDArray[Any]) -> Any:
        """A tensor over a 64-byte aligned buffer, without a copy: what lands in the buffer is in the tensor."""
        if buffer.ctypes.data % 64:
            raise ValueError("the buffer is not 64-byte aligned; TensorFlow would abort the process")
        return tf.experimental.dlpack.from_dlpack(buffer.__dlpack__())

    def initial(self) -> npt.NDArray[np.float32]:
        """The model's present parameters, fp32, shape (layout.size,)."""
        return flatten(self.model, self.layout)

    def load(self, flat: npt.NDArray[np.float32]) -> None:
        """Set the model's variables, to evaluate or to save it."""
        unflatten(self.model, self.layout, flat)

    def _given(self, batch: Batch) -> Any:
        """What a step takes of a batch.

        A `train_step` of the user's own knows nothing of rows that are filled up, and unpacks what his data give.
        """
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
        """What `_encode` made, as it goes onto the wire, and whether it is finite."""
        made = [np.asarray(memoryview(piece)).reshape(-1) for piece in pieces]
        if not self._on_host:
            return made[0], kernels.finite(made[0])
        update = self._spare.pop() if self._spare else np.empty(self.layout.size, self._wire_dtype)
        finite = True
        for piece, place in zip(made, self.layout.pieces(update), strict=True):
            finite &= kernels.encode(piece, place)
        return update, finite

    def _gradient_body(self) -> Callable[..., Any]:
        """(flat, (x, y, weights, samples)) -> gradients of the trainable part, new - old of the statistics."""
        model, optimizer = self.model, unwrap(self.model.optimizer)
        trainable, statistics = variables_of(model)
        scaler = _Scaler(model.optimizer)

        def compute(values: list[Any], x: Any, y: Any, weights: Any, samples: Any, scale: Any) -> Any:
            weights = filled(weights, samples)
            now, before = values[: len(trainable)], values[len(trainable) :]
            given = {id(v): value for v, value in zip(statistics, before, strict=True)}
            others = model.non_trainable_variables
            held = [given.get(id(v), v.value) for v in others]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(now)
                loss, after = _forward(model, now, held, x, y, weights)
                scaled = loss * tf.cast(scale, loss.dtype)
            gradients = tape.gradient(scaled, now, unconnected_gradients=tf.UnconnectedGradients.ZERO)
            _warn_of_rows(model, gradients)
            gradients = [tf.convert_to_tensor(g) / tf.cast(scale, g.dtype) for g in gradients]
            moved = dict(zip((id(v) for v in others), after, strict=True))
            for variable, old, new in zip(others, held, after, strict=True):
                if id(variable) not in given and new is not None and new is not old:
                    variable.assign(new)
            differences = [
                tf.zeros_like(old) if moved.get(id(v)) is None else tf.cast(moved[id(v)], old.dtype) - old
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
            model.reset_metrics()  # so that what it logs is the loss of this step, no mean over many
            loss = _loss_of(model.train_step(data) if self._own_step else _step(model, *data))
            after = [tf.convert_to_tensor(v.value) for v in variables]
            return self._encode([new - old for old, new in zip(before, after, strict=True)], loss)

        return body


class _Scaler:
    """Loss scaling of `mixed_float16`: dynamic as `LossScaleOptimizer` does it, or fixed, or none.

    The scale is each worker's own: it depends on what overflowed there. A step that overflowed pushes zeros.
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
    """Whether a value is not 0; usually the first few tell."""
    return bool(values[:4096].any() or values.any())


def _forward(
    model: Any, trainable: list[Any], held: list[Any], x: Any, y: Any, weights: Any
) -> tuple[Any, Any]:
    """Loss and new values of the non-trainable variables, as Keras computes them, without its variables.

    What `compile()` names as metrics nobody asks for while it trains: they are of the evaluation.
    """
    kwargs = {"training": True} if model._call_has_training_arg else {}
    predicted, after, losses = model.stateless_call(trainable, held, x, return_losses=True, **kwargs)
    if losses:  # of regularizers and add_loss, made in the call: compute_loss must see these, not its own
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
    """Keras' own `train_step`, without the metrics."""
    model.compute_metrics = lambda *_, **__: {"loss": model._loss_tracker.result()}
    try:
        return model.train_step((x, y, filled(weights, samples)))
    finally:
        del model.compute_metrics


def _warn_of_rows(model: Any, gradients: list[Any]) -> None:
    """Say, when the step is traced, what `why_worker` could not see in the model's layers."""
    rows = [v.path for v, g in zip(model.trainable_variables, gradients, strict=True) if _is_rows(g)]
    if rows and takes_rows_apart(model):
        log.warning(
            "%s will differ from plain Keras: it does not sum the gradients of rows that occur several times in a "
            "batch before it squares or clips them; the parameter servers do. An optimizer that they do not have, or "
            "a keras.layers.Embedding, runs on the workers as in Keras.",
            ", ".join(rows),
        )


def _is_rows(gradient: Any) -> bool:
    return isinstance(gradient, tf.IndexedSlices)


def _loss_of(logs: Any) -> Any:
    if isinstance(logs, dict) and "loss" in logs:
        return logs["loss"]
    raise UserError(
        'The model\'s train_step must return a dict with the key "loss", so that Shoal can report it.'
    )


def _tensor(leaf: Any, spec: tf.TensorSpec) -> Any:
    # Of an array `constant` makes a tensor with less Python than `convert_to_tensor`.
    array = isinstance(leaf, np.ndarray)
    return tf.constant(leaf, spec.dtype) if array else tf.convert_to_tensor(leaf, spec.dtype)


def _spec(leaf: Any) -> tf.TensorSpec:
    tensor = tf.convert_to_tensor(leaf)
    return tf.TensorSpec(tensor.shape, tensor.dtype)


class _Drawing(keras.random.SeedGenerator):  # type: ignore[misc]
    """Keras' global generator, which moves on in a stateless call, too: else every step drew the same numbers."""

    def next(self, ordered: bool = True) -> Any:
        state = self.state._value
        drawn = state.read_value()
        state.assign(drawn + tf.constant([0, 1], drawn.dtype) if ordered else (drawn + 1) * 5387 % 933199)
        return drawn


def _keep_drawing() -> None:
    """What `keras.random` draws from where a layer gives it no generator of its own."""
    held = global_seed_generator()
    generator = _Drawing(0, name="seed_generator")  # a name that a SavedModel may have
    generator.state.assign(held.state)
    set_global_attribute(GLOBAL_SEED_GENERATOR, generator)


def _count_for(optimizer: Any) -> tf.Variable | None:
    """Have a learning-rate schedule on the worker follow the job's updates, not those that this worker made itself."""
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
