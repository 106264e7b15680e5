"""A Keras model as one traced function of a flat parameter vector.

    (parameters as received, batch) -> (update as sent, loss, metrics)

The function takes the flat vector apart into the model's variables, so a step costs little more than its gradient (an
eager assignment of each variable would take 48 ms for a ResNet-110). The receive buffer is passed without a copy
(dlpack); the caller must not receive into a buffer while a step reads it.

How it does that, and what becomes of an update, depends on where it computes (`on_host`, `on_device`). On an
accelerator all of it is one XLA cluster where Keras uses XLA, and a batch crosses the bus while the step before runs.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from shoal_trainer.data.batch import Batch, map_leaves
from shoal_trainer.data.user_code import where
from shoal_trainer.errors import TrainerError, UserError, WorkerFailed
from shoal_trainer.features import flops_per_sample
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.coding import coded, decode, encode, place
from shoal_trainer.ps.statistics import Statistics
from shoal_trainer.wire.messages import Average, MetricSum
from shoal_trainer.worker.averages import MovingAverages
from shoal_trainer.worker.build import BUILD_PARTS, build
from shoal_trainer.worker.findings import Findings
from shoal_trainer.worker.gradient_step import GradientStep
from shoal_trainer.worker.hardware import NO_ACCELERATOR, accelerators, device_name
from shoal_trainer.worker.inputs import Inputs, unlike
from shoal_trainer.worker.keras_internals import (
    assigned_handles,
    call_traced,
    clipped,
    iterations_of,
    learning_rate_of,
    set_current_rate,
)
from shoal_trainer.worker.layout import Layout, flatten, layout_of, precision_of, unflatten
from shoal_trainer.worker.on_device import DeviceVector
from shoal_trainer.worker.on_host import HostVector
from shoal_trainer.worker.optimizer_step import AppliedStep, optimizer_step
from shoal_trainer.worker.optimizers import (
    accumulated,
    clips,
    has_own_step,
    parts,
    unwrap,
    why_one_device,
    why_worker,
)
from shoal_trainer.worker.out_of_memory import memory_is_enough
from shoal_trainer.worker.seeds import keep_drawing, vary_others, vary_seeds
from shoal_trainer.worker.several_devices import NotPure, SeveralDevices
from shoal_trainer.worker.training_metrics import TrainingMetrics, as_vector, from_vector
from shoal_trainer.worker.vector import Inclusion, Mean, Vector
from shoal_trainer.worker.weighing import share_sums
from shoal_trainer.worker.xla import INSTEAD, unsupported

log = logging.getLogger(__name__)

Wire = Literal["bf16", "fp32"]
MAX_SHAPES = 8
"""Shapes of batches for which the step is traced with its shapes fixed; XLA compiles it for each."""
ONE_DEVICE = "the model computes on one of this worker's accelerators"
MAX_OVERFLOWS = 24
"""Overflows of mixed_float16 in a row, each of which halves the loss's scale, before they count as a diverged model."""


@dataclass(frozen=True)
class Step:
    """The result of a step: `update` (coded as on the wire, see `ps/coding`), the mean loss, whether both are finite.

    `skipped`: mixed_float16 discarded the gradient (an overflow, a non-finite batch); the optimizer takes no step.
    `left_out`: `on_nan="skip"` did, which Keras would not have done.
    """

    update: Any
    """An array on the host, `OnDevice` on an accelerator."""
    loss: float
    finite: bool
    skipped: bool = False
    metrics: tuple[MetricSum, ...] = ()
    left_out: bool = False


class FlatModel:
    """A built and compiled Keras model as a function of a flat vector.

    `worker` (see `vary_seeds`) makes Dropout differ between workers, as the job's `seed` says; the first worker keeps
    the seeds of the model.
    `reference`: the samples of a push of weight 1 (None: those of `example`). Gradients for the servers are those of a
    loss that, if it is a sum, is one of so many samples.
    `on_host`: compute without an accelerator (None: detect). `devices`: where to compute (None: on all accelerators;
    empty: TensorFlow chooses); several share each batch.
    """

    def __init__(
        self,
        model: Any,
        example: Batch,
        wire: Wire,
        worker: tuple[int, ...] = (0, 0),
        *,
        seed: int = 0,
        reference: int | None = None,
        on_host: bool | None = None,
        devices: Sequence[str] | None = None,
    ) -> None:
        self.model = model
        self.wire: Wire = wire
        self.example = example
        build(model, example)
        keep_drawing()
        vary_seeds(model, worker, seed)
        self._vary = partial(vary_others, model, worker=worker, seed=seed)
        self.layout: Layout = layout_of(model)
        self._averages = MovingAverages(model, self.layout)
        self.found = Findings()
        self.on_server = not why_worker(model)
        self._share = (reference or example.size) / example.size
        if self.on_server:
            share_sums(model, self._share)
        self.why_one_device = "" if self.on_server else why_one_device(model)
        """Why only one of several devices can compute, as far as that is known before a step is traced."""
        self._own_step = has_own_step(model)
        self._whole = False
        """Whether it is Keras' own step that computes, because of what a trace has shown."""
        self._on_host = device_name() == NO_ACCELERATOR if on_host is None else on_host
        if devices is None:
            devices = () if self._on_host else _several(accelerators())
        self._wire_dtype: npt.DTypeLike = np.uint16 if wire == "bf16" else np.float32
        self._compute_on(self._usable(devices))
        with tf.device(self._device):
            self._updates = tf.Variable(0, dtype=tf.int64, trainable=False)
        if not self.on_server:
            self.found.counts = _count_for(model.optimizer, self._updates)
        self.updates = 0
        """Those of the job, at the parameters of an evaluation."""
        self._function: Any = None
        """For any shape of a batch, without XLA, which would compile for each."""
        self._traced: dict[tuple[Any, ...], Any] = {}
        """By the shapes of a batch."""
        self._functions = list[Any]()
        """What was traced: TensorFlow holds the variables of a trace weakly, and some are of the step alone."""
        self._copies: dict[tuple[str, int], Any] = {}
        """See `SeveralDevices`."""
        self._overflows = 0

    def trace(self) -> None:
        """Trace the step function.

        Raises `UserError` with the message of Keras or TensorFlow if that fails, `OutOfMemory` if it does not fit.
        """
        failed: Exception | None = None
        weights = len(self.model.weights)
        try:
            with memory_is_enough():
                self._trace_first()
        except WorkerFailed:
            raise
        except Exception as error:
            failed = error
        if layout_of(self.model) != self.layout:
            if len(self.model.weights) == weights:
                text = "changes what is trainable. Set `trainable` before compile(), and apply the gradients of the "
                text += "variables that each part of the step trains"
            else:
                text = f"creates variables, which would not be trained. {BUILD_PARTS}"
            raise UserError(f"The training step {text}") from failed
        if isinstance(failed, UserError):
            raise failed
        if failed is not None:
            hint = " Shoal traces it, also with run_eagerly=True." if self.model.run_eagerly else ""
            raise UserError(f"The model's training step cannot be traced: {where(failed)}{hint}") from failed
        self._vary(self.found.generators)
        by_samples = 1 / self._share if self.on_server else 1.0
        self.found.warn(self.model, by_samples / self.device_count)

    def compile(self) -> None:
        """Run the traced step once, and undo what it assigns: XLA compiles in the first call, for up to minutes."""
        (traced,) = self._traced.values()
        before = [(variable, variable.read_value()) for variable in traced.variables]
        try:
            with memory_is_enough():
                self.step(self.vector.alias(self.coded(self.vector.dtype)), self.example)
        finally:
            for variable, value in before:
                variable.assign(value)
            self._overflows = 0

    def _trace_first(self) -> None:
        """Trace the step for the example: on one device if several cannot share it, whole if no part stands alone."""
        failed: Exception | None = None
        try:
            self._trace(self._inputs.specs)
        except Exception as error:
            if self.found.whole:
                pass
            elif isinstance(error, NotPure):
                log.warning("%s: the model uses variables that Keras does not know", ONE_DEVICE)
                self._compute_on(self.devices[:1])
                self._trace_first()
            elif isinstance(error, TrainerError) or not (self.on_server or self.device_count > 1):
                raise
            else:  # perhaps of what TensorFlow does with variables only
                failed, self.found.whole = error, f"no part of the step can be traced apart ({where(error)})"
        if self.found.whole and not self._whole:
            self._take_whole()
            try:
                self._trace(self._inputs.specs)
            except Exception as error:
                raise failed or error  # noqa: B904

    def _take_whole(self) -> None:
        """Compute with Keras' own step from now on."""
        counts = _count_for(self.model.optimizer, self._updates) if self.on_server else self.found.counts
        self.found = Findings(whole=self.found.whole, counts=counts)
        self.on_server, self.why_one_device, self._whole = False, self.found.whole, True
        share_sums(self.model, 1.0)
        if self.device_count > 1:
            self._compute_on(self._usable(self.devices))

    def _trace(self, specs: list[Any]) -> Any:
        """Trace the step for these shapes, with XLA if the model uses it."""
        dtype = self.vector.dtype
        flat = tf.TensorSpec((self._width(dtype),), tf.as_dtype(dtype))
        function = tf.function(self._body(xla=bool(self.model.jit_compile)), autograph=False)
        traced = function.get_concrete_function(*[flat] * self.device_count, *specs)
        self._functions.append(function)
        self._traced[tuple(tuple(spec.shape) for spec in specs)] = traced
        return traced

    def _body(self, *, xla: bool) -> Callable[..., Any]:
        """(parameters, arguments), of each device -> (pieces of the update, numbers).

        `xla`: what a device computes is one XLA cluster.
        """
        metrics = TrainingMetrics(self.model, weighted=self.example.parts == 3)
        structure = self._inputs.structure
        step: Any
        if self.on_server:
            step = GradientStep(self.model, self.found, metrics, self._averages, self._updates)
        elif self.device_count > 1:
            step = AppliedStep(self.model, self.found, metrics, self._averages, self._updates)
        else:
            step = optimizer_step(self.model, self.found, metrics, self._averages, xla=xla)

        def on_one(flat: Any, *arguments: Any) -> Any:
            rest = iter(arguments)
            with tf.device(self._device):
                values = self.vector.decode(flat)
                pieces, loss, sums, overflowed = step(values, map_leaves(lambda _: next(rest), structure))
                self.found.metrics = tuple(sums)
                # With `reduction=None`, a loss has one value per sample.
                numbers = as_vector(tf.reduce_mean(tf.cast(loss, tf.float32)), sums)
                return self._encode(values, pieces, numbers, overflowed)

        compute: Callable[..., Any] = on_one
        if self.device_count > 1:
            decode = self.vector.decode
            compute = SeveralDevices(
                step, self.devices, structure, decode, self._encode, self.found, self._copies, xla=xla
            )
        elif xla and self.on_server:
            compute = tf.function(on_one, autograph=False, jit_compile=True)
        return lambda *tensors: self.vector.returned(*compute(*tensors))

    def step(self, parameters: Any, batch: Batch, updates: int = 0, upcoming: Batch | None = None) -> Step:
        """Run one step at `parameters`, a tensor or the same `on_devices`, after `updates` updates.

        `upcoming`, if it is known: the batch of the next step, which is copied to the accelerator meanwhile. Raises
        `UserError` for a batch with which the model cannot compute.
        """
        if not self._traced:
            self.trace()
        if self.found.counts:
            self._updates.assign(updates)
        try:
            pieces, numbers = self._call(parameters, batch, upcoming)
        except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
            if refused := unsupported(error):
                raise UserError(
                    f"XLA, which Keras uses on a GPU, cannot compile the training step: {refused}. {INSTEAD}"
                ) from error
            raise UserError(
                f"A training step failed: {where(error)}.{unlike(batch, self.example)} Check the data for labels "
                "outside the loss's range, indices outside an Embedding's, or text instead of numbers."
            ) from error
        except (ValueError, TypeError) as error:
            raise UserError(
                f"A training step failed: {where(error)}.{unlike(batch, self.example)} Make all samples alike in "
                "structure, dtype and shape."
            ) from error
        update, finite, numbers = self.vector.update(pieces, np.asarray(numbers))
        loss, metrics = from_vector(self.found.metrics, numbers[:-1])
        skipped = bool(numbers[-1])
        self._overflows = self._overflows + 1 if skipped else 0
        overflow = skipped and self._overflows <= MAX_OVERFLOWS
        return Step(update, loss, overflow or (finite and math.isfinite(loss)), skipped, metrics)

    def _call(self, parameters: Any, batch: Batch, upcoming: Batch | None) -> tuple[list[Any], Any]:
        given, shapes = self._inputs.place(batch, upcoming)
        copies = parameters if isinstance(parameters, list) else self.vector.on_devices(parameters)
        tensors = [*copies, *given]
        traced = self._traced.get(shapes)
        # The short batch of a custom train_step may have any size, and XLA would compile for each.
        if traced is None and not self._own_step and len(self._traced) < MAX_SHAPES:
            traced = self._trace([tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in given])
        pieces: list[Any]
        if traced is not None:
            pieces, numbers = call_traced(traced, tensors)
            return pieces, numbers
        if self._function is None:
            self._function = tf.function(self._body(xla=False), autograph=False, reduce_retracing=True)
            if not self._own_step:
                log.warning(
                    "the batches have more than %d shapes; lengths=… of the data would limit them", MAX_SHAPES
                )
        pieces, numbers = self._function(*tensors)
        return pieces, numbers

    def still(self, parameters: list[Any]) -> Any:
        """The update of a step at `parameters`, `on_devices`, that moves nothing."""
        size, trainable = self.layout.size, self.layout.trainable
        current, still = aligned(size), aligned(size)
        decode(self.vector.read(parameters[0]), current, trainable)
        for low, high, _ in self.averages:
            still[low:high] = current[low:high]
        update = coded(size, trainable, self._wire_dtype)
        encode(still, update, trainable)
        return self.vector.as_update(update)

    def mean(self) -> Mean:
        """The mean of updates, where they are; clipped if the optimizer clips what it accumulates."""
        clip = accumulated(self.model) > 1 and clips(unwrap(self.model.optimizer))
        return self.vector.mean(self._clipped if clip else None)

    def _clipped(self, flat: Any) -> Any:
        """The gradients of an update, a tensor in fp32, as the optimizer clips the mean of what it accumulates."""
        entries = self.layout.entries[: self.layout.tensors]
        pieces = zip(tf.split(flat, [entry.size for entry in entries]), entries, strict=True)
        gradients = [tf.reshape(piece, entry.shape) for piece, entry in pieces]
        found = clipped(unwrap(self.model.optimizer), gradients)
        return tf.concat([tf.reshape(piece, [-1]) for piece in found], 0)

    def inclusion(self) -> Inclusion:
        """Adds updates to parameters, where both are."""
        statistics = Statistics(self.averages, self.layout.trainable, self.layout.size)
        return self.vector.inclusion(statistics.differences, xla=bool(self.model.jit_compile))

    def coded(self, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """The model's current parameters, in an aligned array (`ps/coding`)."""
        out = coded(self.layout.size, self.layout.trainable, dtype)
        encode(self.initial(), out, self.layout.trainable)
        return out

    def initial(self) -> npt.NDArray[np.float32]:
        """The model's current parameters, fp32, shape (layout.size,)."""
        return flatten(self.model, self.layout)

    @property
    def precision(self) -> str:
        """See `precision_of`."""
        return precision_of(self.model)

    def flops_per_sample(self) -> float:
        """Floating point operations of one sample's forward pass; 0 if they cannot be counted. For another thread."""
        try:
            return float(flops_per_sample(self.model, self.example.x))
        except Exception as error:  # a model without call(), a layer that needs more than one sample
            log.info("the FLOPs of the model cannot be counted: %s", where(error))
            return 0.0

    def only_read(self) -> list[Any]:
        """TensorFlow's variables of numbers that the step reads and does not assign, as it does seeds and metrics."""
        found = dict[int, Any]()
        for traced in self._traced.values():
            assigned = assigned_handles(traced.graph)
            found |= {id(v.handle): v for v in traced.variables if id(v.handle) not in assigned}
        return [variable for variable in found.values() if variable.dtype != tf.string]

    def load(self, flat: npt.NDArray[np.float32]) -> None:
        """Set the model's variables, to evaluate or save it."""
        unflatten(self.model, self.layout, flat)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """In this block, `iterations` of an optimizer on the servers are `updates`: the model may compute with them."""
        iterations = iterations_of(unwrap(self.model.optimizer))
        before = int(iterations.numpy())
        if self.on_server:
            iterations.assign(self.updates)
        try:
            yield
        finally:
            iterations.assign(before)

    @property
    def averages(self) -> tuple[Average, ...]:
        """The moving averages in the flat vector, once the step is traced."""
        return self._averages.ranges

    @property
    def _device(self) -> str | None:
        """The first device, by name; None if TensorFlow chooses it."""
        return self.devices[0] if self.devices else None

    @property
    def device_count(self) -> int:
        """How many devices share a batch."""
        return len(self.devices) or 1

    @property
    def wire_bytes(self) -> int:
        """The bytes of a push or a pull."""
        return self._width(self._wire_dtype) * np.dtype(self._wire_dtype).itemsize

    def _width(self, dtype: npt.DTypeLike) -> int:
        """The elements of a coded array."""
        return place(self.layout.size, self.layout.trainable, dtype)

    def _usable(self, devices: Sequence[str]) -> tuple[str, ...]:
        """Those of the devices on which the model can compute, each with at least one row of a batch."""
        if len(devices) > 1 and self.why_one_device:
            log.warning("%s: %s", ONE_DEVICE, self.why_one_device)
            return tuple(devices[:1])
        return tuple(devices[: self.example.size])

    def _compute_on(self, devices: tuple[str, ...]) -> None:
        self.devices = devices
        self.vector: Vector
        if self._on_host:
            self.vector = HostVector(self.layout, self._wire_dtype)
        else:
            self.vector = DeviceVector(self.layout, self._wire_dtype, devices)
        self._inputs = Inputs(self.example, devices, as_given=self._own_step, on_host=self._on_host)

    def _encode(
        self, before: list[Any], pieces: list[Any], numbers: Any, overflowed: Any
    ) -> tuple[list[Any], Any]:
        """The update, of gradients and differences (new - old) from the values `before`, and all numbers."""
        numbers = tf.concat([numbers, [tf.cast(overflowed, tf.float32)]], 0)
        observed = self._averages.observed(before, pieces)
        return self.vector.encode([tf.reshape(piece, [-1]) for piece in observed], numbers)


def _count_for(optimizer: Any, updates: tf.Variable) -> bool:
    """Make learning-rate schedules on the worker follow the updates of the job, not those of this worker.

    Returns whether there are some.
    """
    rates = [(part, learning_rate_of(part)) for part in parts(optimizer)]
    kind = keras.optimizers.schedules.LearningRateSchedule
    scheduled = [(part, rate) for part, rate in rates if isinstance(rate, kind)]
    for part, schedule in scheduled:
        set_current_rate(part, partial(schedule, updates))
    return bool(scheduled)


def _several(devices: tuple[str, ...]) -> tuple[str, ...]:
    """Devices that must be named; TensorFlow finds a single one, and uses the CPU for what it cannot do."""
    return devices if len(devices) > 1 else ()
