"""A Keras model as one traced function of a flat parameter vector.

    (parameters as received, batch) -> (update as sent, loss, metrics)

The function takes the flat vector apart into the model's variables, so a step costs little more than its gradient (an
eager assignment of each variable would take 48 ms for a ResNet-110). The receive buffer is passed without a copy
(dlpack); the caller must not receive into a buffer while a step reads it.

An accelerator decodes, encodes and concatenates by itself, in one XLA cluster where Keras uses XLA. So the flat vectors
cross the bus in the wire's format, half the bytes in bf16, each once per push; a batch crosses it while the step before
it runs, and an update, of which a step returns only a few numbers, while the next one runs (`on_device`). Without an
accelerator, TensorFlow's casts and concatenation would take several passes over memory, so parameters are passed as
fp32, and a kernel encodes gradients in one pass into the update. Only small ones are concatenated first: a deep model
has hundreds, and each output of the function has a cost of its own in Python.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from shoal_trainer.data.batch import Batch, map_leaves
from shoal_trainer.data.user_code import where
from shoal_trainer.errors import UserError, WorkerFailed
from shoal_trainer.features import flops_per_sample
from shoal_trainer.ps import kernels
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.coding import coded, decode, encode, place, values
from shoal_trainer.ps.pieces import parts
from shoal_trainer.ps.statistics import Statistics
from shoal_trainer.wire.messages import Average, MetricSum
from shoal_trainer.worker.averages import MovingAverages
from shoal_trainer.worker.build import BUILD_PARTS, build
from shoal_trainer.worker.findings import Findings
from shoal_trainer.worker.gradient_step import GradientStep
from shoal_trainer.worker.hardware import NO_ACCELERATOR, accelerators, device_name
from shoal_trainer.worker.inputs import Inputs, unlike
from shoal_trainer.worker.keras_internals import call_traced, clipped, learning_rate_of, set_current_rate
from shoal_trainer.worker.layout import Layout, flatten, layout_of, unflatten
from shoal_trainer.worker.local_step import local_step
from shoal_trainer.worker.memory import memory_is_enough
from shoal_trainer.worker.on_device import (
    DeviceInclusion,
    DeviceMean,
    OnDevice,
    cut,
    encoded,
    exact,
    exactly,
    squares,
)
from shoal_trainer.worker.on_host import HostInclusion, HostMean, Inclusion, Mean
from shoal_trainer.worker.optimizers import accumulated, clips, has_own_step, unwrap, why_worker
from shoal_trainer.worker.seeds import keep_drawing, vary_seeds
from shoal_trainer.worker.several_devices import NotPure, SeveralDevices
from shoal_trainer.worker.training_metrics import TrainingMetrics, as_vector, from_vector
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

    `worker` (slot, incarnation) makes Dropout differ between workers, as the job's `seed` says; the first worker keeps
    the seeds of the model.
    `on_host`: compute without an accelerator (None: detect). `devices`: where to compute (None: on all accelerators;
    empty: TensorFlow chooses); several share each batch.
    `dtype`: the type of the parameters that a step takes, fp32, or uint16 where they are coded (`ps/coding`).
    """

    def __init__(
        self,
        model: Any,
        example: Batch,
        wire: Wire,
        worker: tuple[int, int] = (0, 0),
        *,
        seed: int = 0,
        on_host: bool | None = None,
        devices: Sequence[str] | None = None,
    ) -> None:
        self.model = model
        self.wire: Wire = wire
        self.example = example
        build(model, example)
        keep_drawing()
        vary_seeds(model, worker, seed)
        self.layout: Layout = layout_of(model)
        self._averages = MovingAverages(model, self.layout)
        self.found = Findings()
        self.on_server = not why_worker(model)
        self._own_step = has_own_step(model)
        self._may_overflow = self.on_server and isinstance(
            model.optimizer, keras.optimizers.LossScaleOptimizer
        )
        self._updates = None if self.on_server else _count_for(unwrap(model.optimizer))
        self._on_host = device_name() == NO_ACCELERATOR if on_host is None else on_host
        if devices is None:
            devices = () if self._on_host else _several(accelerators())
        self.devices = self._usable(devices)
        self._wire_dtype = np.uint16 if wire == "bf16" else np.float32
        self.dtype: npt.DTypeLike = np.float32 if self._on_host else self._wire_dtype
        self._inputs = self._inputs_of(example)
        self._function: Any = None
        """For any shape of a batch, without XLA, which would compile for each."""
        self._traced: dict[tuple[Any, ...], Any] = {}
        """By the shapes of a batch."""
        self._copies: dict[tuple[str, int], Any] = {}
        """See `SeveralDevices`."""
        self._overflows = 0
        self._spare: list[npt.NDArray[Any]] = []
        self._readbacks = ThreadPoolExecutor(1, thread_name_prefix="readback")

    def trace(self) -> None:
        """Trace the step function.

        Raises `UserError` with the message of Keras or TensorFlow if that fails, `OutOfMemory` if it does not fit.
        """
        failed: Exception | None = None
        weights = len(self.model.weights)
        try:
            with memory_is_enough():
                try:
                    self._trace(self._inputs.specs)
                except NotPure:
                    log.warning("%s: the model uses variables that Keras does not know", ONE_DEVICE)
                    self.devices = self.devices[:1]
                    self._inputs = self._inputs_of(self.example)
                    self._trace(self._inputs.specs)
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
        self.found.warn(self.model)

    def compile(self) -> None:
        """Run the traced step once, and undo what it assigns: XLA compiles in the first call, for up to minutes."""
        (traced,) = self._traced.values()
        before = [(variable, variable.read_value()) for variable in traced.variables]
        try:
            with memory_is_enough():
                self.step(self.on_device(self.alias(self.coded(self.dtype))), self.example)
        finally:
            for variable, value in before:
                variable.assign(value)
            self._overflows = 0

    def _trace(self, specs: list[Any]) -> Any:
        """Trace the step for these shapes, with XLA if the model uses it."""
        flat = tf.TensorSpec((self._width(self.dtype),), tf.as_dtype(self.dtype))
        function = tf.function(self._body(xla=bool(self.model.jit_compile)), autograph=False)
        traced = function.get_concrete_function(*[flat] * self.device_count, *specs)
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
            step = GradientStep(self.model, self.found, metrics, self._averages)
        else:
            step = local_step(self.model, self.found, metrics, self._averages, xla=xla)

        def on_one(flat: Any, *arguments: Any) -> Any:
            rest = iter(arguments)
            with tf.device(self._device):
                values = self._decode(flat)
                pieces, loss, sums = step(values, map_leaves(lambda _: next(rest), structure))
                self.found.metrics = tuple(sums)
                # With `reduction=None`, a loss has one value per sample.
                return self._encode(
                    values, pieces, as_vector(tf.reduce_mean(tf.cast(loss, tf.float32)), sums)
                )

        compute: Callable[..., Any] = on_one
        if self.device_count > 1:
            compute = SeveralDevices(
                step, self.devices, structure, self._decode, self._encode, self.found, self._copies, xla=xla
            )
        elif xla and self.on_server:
            compute = tf.function(on_one, autograph=False, jit_compile=True)
        if self._on_host:
            return compute

        def fetched(*tensors: Any) -> Any:
            pieces, numbers = compute(*tensors)
            with tf.device(self._device):  # the update is read while the next step runs
                pieces = [tf.identity(piece) for piece in pieces]
            with tf.device("/CPU:0"):
                return pieces, tf.identity(numbers)

        return fetched

    def step(self, parameters: Any, batch: Batch, updates: int = 0, upcoming: Batch | None = None) -> Step:
        """Run one step at `parameters`, a tensor that `alias` made of the receive buffer, after `updates` updates.

        `upcoming`, if it is known: the batch of the next step, which is copied to the accelerator meanwhile. Raises
        `UserError` for a batch with which the model cannot compute.
        """
        if not self._traced:
            self.trace()
        if self._updates is not None:
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
        update, finite, moves, numbers = self._update(pieces, np.asarray(numbers))
        loss, metrics = from_vector(self.found.metrics, numbers)
        skipped = self._may_overflow and not moves
        self._overflows = self._overflows + 1 if skipped else 0
        overflow = skipped and self._overflows <= MAX_OVERFLOWS
        return Step(update, loss, overflow or (finite and math.isfinite(loss)), skipped, metrics)

    def _call(self, parameters: Any, batch: Batch, upcoming: Batch | None) -> tuple[list[Any], Any]:
        given, shapes = self._inputs.place(batch, upcoming)
        several = self.device_count > 1
        copies = self.on_device(parameters) if several and not isinstance(parameters, list) else parameters
        tensors = [*copies, *given] if several else [copies, *given]
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

    def still(self, parameters: Any) -> Any:
        """The update of a step at `parameters` that moves nothing."""
        size, trainable = self.layout.size, self.layout.trainable
        with tf.device("/CPU:0"):
            first = parameters[0] if isinstance(parameters, list) else parameters
            read = np.asarray(memoryview(tf.identity(first)))
        current, still = aligned(size), aligned(size)
        decode(read, current, trainable)
        for low, high, _ in self.averages:
            still[low:high] = current[low:high]
        update = coded(size, trainable, self._wire_dtype)
        encode(still, update, trainable)
        if self._on_host:
            return update
        with tf.device(self._device):
            pieces = tf.split(tf.constant(update), cut(update.size, trainable))
        return OnDevice(pieces, 0.0, self._readbacks)

    def mean(self) -> Mean:
        """The mean of updates, where they are."""
        optimizer = unwrap(self.model.optimizer)
        clip = self._clipped if accumulated(self.model) > 1 and clips(optimizer) else None
        if self._on_host:
            return HostMean(self.layout.size, self.layout.trainable, self.reuse, clip)
        return DeviceMean(self._device, self.layout.trainable, self._readbacks, clip)

    def _clipped(self, flat: Any) -> Any:
        """The gradients of an update, a tensor in fp32, as the optimizer clips the mean of what it accumulates."""
        entries = self.layout.entries[: self.layout.tensors]
        pieces = zip(tf.split(flat, [entry.size for entry in entries]), entries, strict=True)
        gradients = [tf.reshape(piece, entry.shape) for piece, entry in pieces]
        found = clipped(unwrap(self.model.optimizer), gradients)
        return tf.concat([tf.reshape(piece, [-1]) for piece in found], 0)

    def inclusion(self) -> Inclusion:
        """Adds updates to parameters, where both are."""
        size = self.layout.size
        differences = Statistics(self.averages, self.layout.trainable, size).differences
        if self._on_host:
            return HostInclusion(size, self.alias, differences)
        return DeviceInclusion(self._device, differences, xla=bool(self.model.jit_compile))

    def reuse(self, update: npt.NDArray[Any]) -> None:
        """Let a later step overwrite this update, which saves the allocation of new pages."""
        if self._on_host and not self._spare:
            self._spare.append(update)

    def alias(self, buffer: npt.NDArray[Any]) -> Any:
        """A tensor that shares the memory of a 64-byte aligned buffer."""
        if buffer.ctypes.data % 64:
            raise ValueError("the buffer is not 64-byte aligned")  # TensorFlow would abort the process
        return tf.experimental.dlpack.from_dlpack(buffer.__dlpack__())

    def on_device(self, parameters: Any) -> Any:
        """The parameters where the step computes: steps of one push share one copy to an accelerator.

        With several devices a list, of copies of the first one's.
        """
        if self._on_host:
            return parameters
        copies = [self.upload(parameters)]
        for device in self.devices[1:]:
            with tf.device(device):
                copies.append(tf.identity(copies[0]))
        return copies[0] if len(copies) == 1 else copies

    def upload(self, parameters: Any) -> Any:
        """A copy of the parameters on the first accelerator; itself if they are there already, or without one."""
        if self._on_host:
            return parameters
        with tf.device(self._device):
            return tf.identity(parameters)

    def upload_when(self, answer: Future[Any], parameters: Any) -> Future[Any] | None:
        """What `upload` gives once the answer is there, made while a step runs; None without an accelerator.

        The future has None if the answer is an error.
        """
        if self._on_host:
            return None
        copy: Future[Any] = Future()

        def arrived(answer: Future[Any]) -> None:
            try:
                failed = answer.cancelled() or answer.exception() is not None
                copy.set_result(None if failed else self.upload(parameters))
            except Exception as error:  # such as no memory
                copy.set_exception(error)

        answer.add_done_callback(arrived)
        return copy

    def coded(self, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """The model's current parameters, in an aligned array (`ps/coding`)."""
        out = coded(self.layout.size, self.layout.trainable, dtype)
        encode(self.initial(), out, self.layout.trainable)
        return out

    def initial(self) -> npt.NDArray[np.float32]:
        """The model's current parameters, fp32, shape (layout.size,)."""
        return flatten(self.model, self.layout)

    def flops_per_sample(self) -> float:
        """Floating point operations of one sample's forward pass; 0 if they cannot be counted. For another thread."""
        try:
            return float(flops_per_sample(self.model, self.example.x))
        except Exception as error:  # a model without call(), a layer that needs more than one sample
            log.info("the FLOPs of the model cannot be counted: %s", where(error))
            return 0.0

    def load(self, flat: npt.NDArray[np.float32]) -> None:
        """Set the model's variables, to evaluate or save it."""
        unflatten(self.model, self.layout, flat)

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
        if len(devices) > 1 and not self.on_server:
            log.warning("%s: its optimizer or its train_step runs on the worker", ONE_DEVICE)
            return tuple(devices[:1])
        return tuple(devices[: self.example.size])

    def _inputs_of(self, example: Batch) -> Inputs:
        return Inputs(example, self.devices, as_given=self._own_step, on_host=self._on_host)

    def _decode(self, flat: Any) -> list[Any]:
        trainable, statistics = self.layout.trainable, flat[self.layout.trainable :]
        if self.dtype == np.uint16:
            flat, statistics = tf.bitcast(flat[:trainable], tf.bfloat16), exact(statistics)
        pieces = []
        for run in self.layout.runs:  # a slice shares memory, but costs an operation; a split copies
            entries = self.layout.entries[run]
            low, high = entries[0].offset, entries[-1].offset + entries[-1].size
            part = flat[low:high] if low < trainable else statistics[low - trainable : high - trainable]
            pieces += tf.split(part, [entry.size for entry in entries])
        found = zip(self.layout.entries, pieces, strict=True)
        return [tf.cast(tf.reshape(piece, entry.shape), entry.dtype) for entry, piece in found]

    def _encode(self, before: list[Any], pieces: list[Any], numbers: Any) -> tuple[list[Any], Any]:
        """The update, of gradients and differences (new - old) from the values `before`, and all numbers."""
        flat = [tf.reshape(piece, [-1]) for piece in self._averages.observed(before, pieces)]
        if self._on_host:
            flat = [tf.cast(piece, tf.float32) for piece in flat]
            return [tf.concat(flat[run], 0) for run in self.layout.runs], numbers
        trained = self.layout.tensors
        kind = tf.bfloat16 if self.wire == "bf16" else tf.float32
        gradients = tf.concat([tf.cast(piece, kind) for piece in flat[:trained]], 0)
        update = [
            encoded(piece, self._wire_dtype)
            for piece in tf.split(gradients, cut(self.layout.trainable, self.layout.trainable))
        ]
        finite = tf.reduce_all(tf.math.is_finite(tf.cast(gradients, tf.float32)))
        moves = tf.reduce_any(gradients != 0)
        of_update = [squares(update), *(tf.cast(flag, tf.float32) for flag in (moves, finite))]
        if statistics := [tf.cast(piece, tf.float32) for piece in flat[trained:]]:
            together = tf.concat(statistics, 0)
            of_update[-1] *= tf.cast(tf.reduce_all(tf.math.is_finite(together)), tf.float32)
            update.append(exactly(together, self.layout.trainable, self._wire_dtype))
        return update, tf.concat([numbers, tf.stack(of_update)], 0)

    def _update(
        self, pieces: list[Any], numbers: npt.NDArray[Any]
    ) -> tuple[Any, bool, bool, npt.NDArray[Any]]:
        """The result of `_encode`: the update, whether it is finite, whether it is not zero, the other numbers."""
        if not self._on_host:
            numbers, (square, moves, finite) = numbers[:-3], numbers[-3:].tolist()
            return OnDevice(pieces, math.sqrt(square), self._readbacks), bool(finite), bool(moves), numbers
        trainable = self.layout.trainable
        update = self._spare.pop() if self._spare else coded(self.layout.size, trainable, self._wire_dtype)
        target, finite, low = values(update, trainable), True, 0
        for piece in pieces:
            array = np.asarray(memoryview(piece))
            for part, into in parts(target, low, low + array.size):
                finite &= kernels.encode(array[part.start - low : part.stop - low], into)
            low += array.size
        moves = not self._may_overflow or _any(update[: self.layout.trainable])
        return update, finite, moves, numbers


def _any(values: npt.NDArray[Any]) -> bool:
    """Whether a value is not 0; usually one of the first few is."""
    return bool(values[:4096].any() or values.any())


def _count_for(optimizer: Any) -> tf.Variable | None:
    """Make a learning-rate schedule on the worker follow the updates of the job, not those of this worker."""
    schedule = learning_rate_of(optimizer)
    if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        return None
    updates = tf.Variable(0, dtype=tf.int64, trainable=False)
    set_current_rate(optimizer, lambda: schedule(updates))
    return updates


def _several(devices: tuple[str, ...]) -> tuple[str, ...]:
    """Devices that must be named; TensorFlow finds a single one, and uses the CPU for what it cannot do."""
    return devices if len(devices) > 1 else ()
