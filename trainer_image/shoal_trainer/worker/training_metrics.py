"""The metrics of `compile()`, the losses of several outputs and what a model tracks, in training: the sums of one step.

The coordinator adds them up to the means of an epoch.

Only means over samples are sums that can be added: accuracies and errors, but not AUC, precision or a root mean square.
Those have values in the evaluation only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from shoal_trainer.wire.messages import MAX_METRICS, MetricSum
from shoal_trainer.worker.keras_internals import (
    MeanMetricWrapper,
    as_column,
    compiled_loss,
    compiled_metrics,
    flat_logs,
    flat_metrics,
    keras_mask,
    loss_tracker,
    mean_of_function,
    means_updated,
    of_outputs,
    output_shape,
)
from shoal_trainer.worker.weighing import is_of_elements, losses_of_outputs, with_rank

Sums = Mapping[str, tuple[Any, Any]]
"""By name of the metric: the weighted sum of its values, and the sum of the weights; scalar tensors."""


class TrainingMetrics:
    """Those metrics of a built model that are means. `weighted`: the data contain sample weights."""

    def __init__(self, model: Any, *, weighted: bool) -> None:
        self._model = model
        self._compiled = compiled_metrics(model)
        found = []
        groups: tuple[tuple[bool, Any], ...] = ()
        if self._compiled is not None and self._compiled.built:
            groups = tuple(zip((False, weighted), flat_metrics(self._compiled), strict=True))
        for weighs, outputs in groups:
            for output, metrics in enumerate(outputs):
                found += [(output, weighs, metric) for metric in (metrics.metrics if metrics else ())]
        named = zip(_names(self._compiled), found, strict=False)
        self._parts = [(name, *part) for name, part in named if _is_mean_of_function(part[-1])]
        self._updated = set[int]()

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note which means the model's own code updates in this block, where a step is traced."""
        self._updated = set()
        with means_updated(lambda metric, *_: self._updated.add(id(metric))):
            yield

    def sums(
        self,
        y: Any,
        predicted: Any,
        weights: Any,
        samples: Any,
        value: Callable[[Any], Any] = tf.convert_to_tensor,
    ) -> Sums:
        """The sums over the batch that was traced last, whose first `samples` rows are real. `weights`: see `Batch`.

        `value`: gives what the step made of a metric's variable that was 0 before it.
        """
        count = tf.cast(samples, tf.float32)
        losses = {
            name: (tf.cast(mean, tf.float32) * count, count)
            for name, mean in losses_of_outputs(self._model).items()
        }
        # As in Keras, an update of what is tracked counts as often as it says.
        tracked = {each.name: (value(each.total), value(each.count)) for each in self._tracked()}
        own = {**losses, **self._of_compile(y, predicted, weights, samples)}
        return dict(
            [*own.items(), *((name, pair) for name, pair in tracked.items() if name not in own)][:MAX_METRICS]
        )

    def _tracked(self) -> Iterator[Any]:
        """The means that layers, `call` or `compute_loss` have updated, and that are in Keras' logs."""
        losses = compiled_loss(self._model)
        known = [loss_tracker(self._model), *(losses.metrics if losses is not None else ())]
        others = (each for each in self._model.metrics if all(each is not one for one in known))
        return (
            each for each in others if id(each) in self._updated and _is_mean(each) and each.name != "loss"
        )

    def _of_compile(self, y: Any, predicted: Any, weights: Any, samples: Any) -> Sums:
        if not self._parts:
            return {}
        targets, outputs, each = (of_outputs(self._compiled, part) for part in (y, predicted, weights))
        if len(each) < len(targets):  # as Keras: one weight for all outputs
            each = [each[0]] * len(targets)
        size = tf.shape(each[0])[0]
        rows = tf.cast(tf.range(size) < samples, tf.float32)
        share = tf.cast(samples / size, tf.float32)
        given = [tf.cast(one, tf.float32) * share for one in each]
        return {
            name: _sums(metric, targets[output], outputs[output], given[output] if weighs else rows)
            for name, output, weighs, metric in self._parts
            if output < len(targets)  # as Keras: no targets, no metrics
        }


@contextlib.contextmanager
def no_means(model: Any) -> Iterator[set[str]]:
    """The names of the tensors that `result()` of a metric gives in this block, if it is no mean over samples."""
    compiled, found = compiled_metrics(model), set[str]()
    inside = compiled.metrics if compiled is not None and compiled.built else ()
    metrics = [each for each in (*model.metrics, *inside) if each is not compiled and not _is_mean(each)]

    def noting(result: Callable[[], Any]) -> Callable[[], Any]:
        def noted() -> Any:
            value = result()
            found.update(each.name for each in tf.nest.flatten(value) if tf.is_symbolic_tensor(each))
            return value

        return noted

    for metric in metrics:
        metric.result = noting(metric.result)
    try:
        yield found
    finally:
        for metric in metrics:
            del metric.result


def sums_of_logs(logs: Mapping[str, Any], samples: Any, results: Collection[str]) -> tuple[Sums, list[str]]:
    """The sums of the numbers that a custom `train_step` returned for one batch, each counted once per sample.

    And the names of those that are `results` of metrics that are no means, which are left out.
    """
    count = tf.cast(samples, tf.float32)
    numbers = {name: value for name, value in flat_logs(logs).items() if name != "loss" and _is_number(value)}
    left_out = [name for name, value in numbers.items() if _is_one_of(value, results)]
    values = {name: tf.cast(value, tf.float32) for name, value in numbers.items() if name not in left_out}
    return {name: (value * count, count) for name, value in list(values.items())[:MAX_METRICS]}, left_out


def _is_one_of(value: Any, names: Collection[str]) -> bool:
    """Whether a tensor is one of these, in any dtype."""
    while tf.is_symbolic_tensor(value) and value.name not in names and value.op.type in {"Cast", "Identity"}:
        value = value.op.inputs[0]
    return tf.is_symbolic_tensor(value) and value.name in names


def as_vector(loss: Any, sums: Sums) -> Any:
    """The loss and the sums as one fp32 tensor of the shape (1 + 2 * len(sums),): one output of a traced function."""
    numbers = [loss, *(number for pair in sums.values() for number in pair)]
    return tf.stack([tf.reshape(tf.cast(number, tf.float32), ()) for number in numbers])


def from_vector(names: Iterable[str], vector: Any) -> tuple[float, tuple[MetricSum, ...]]:
    """The inverse of `as_vector`. Sums that are not finite are left out."""
    loss, *numbers = np.asarray(vector).tolist()
    pairs = zip(names, numbers[::2], numbers[1::2], strict=True)
    return loss, tuple(MetricSum(*each) for each in pairs if np.isfinite(each[1:]).all())


def _names(compiled: Any) -> list[str]:
    """The names of the metrics in Keras' logs, in the order of `compiled.metrics`."""
    if compiled is None or not compiled.built:
        return []
    try:
        return list(compiled.result())
    except Exception:  # of a metric that has no result before its first batch
        return []


def _is_mean(metric: Any) -> bool:
    """Whether the metric's result is the sum of its values divided by the sum of their weights."""
    return getattr(type(metric), "result", None) is keras.metrics.Mean.result


def _is_mean_of_function(metric: Any) -> bool:
    return _is_mean(metric) and type(metric).update_state is MeanMetricWrapper.update_state


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (tf.is_tensor(value) and value.shape.rank == 0)


def _sums(metric: Any, target: Any, predicted: Any, weights: Any) -> tuple[Any, Any]:
    def values(true: Any, found: Any) -> Any:
        return function(true, found, **arguments)

    function, arguments = mean_of_function(metric)
    shape = output_shape(values, target, predicted)
    zeros = [tf.zeros(variable.shape, variable.dtype) for variable in metric.variables]
    if len(shape) > 0 and shape[0] == predicted.shape[0]:
        if (mask := keras_mask(predicted)) is not None:
            weights = with_rank(weights, len(mask.shape))
        total, count = metric.stateless_update_state(zeros, target, predicted, weights)
        return total, count
    if is_of_elements(function, predicted):
        given = as_column(target), as_column(predicted)
        total, count = metric.stateless_update_state(zeros, *given, weights)
        return total, count
    # A function that returns one number for the batch, which Keras counts once.
    total, count = metric.stateless_update_state(zeros, target, predicted)
    size = tf.reduce_sum(tf.reduce_mean(weights, axis=list(range(1, len(weights.shape)))))
    return total * size, count * size
