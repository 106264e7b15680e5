"""Makes losses of any rank accept weights per sample or per token, and ignore the padding of a batch.

Keras 3 multiplies a loss of shape (B, T) or (B, H, W) with weights of shape (B,): it fails, or if T equals B it weights
the wrong axis. So the losses of `compile()` are wrapped: each gets weights of its own rank. A Keras mask on the weights
marks the real rows; each loss gets it as a mask on the prediction, so that Keras divides by the number of real rows,
also if the prediction or the labels (`ignore_class`) have another mask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from shoal_trainer.data.batch import map_leaves
from shoal_trainer.errors import UserError
from shoal_trainer.worker.keras_internals import (
    as_column,
    compiled_loss,
    flat_losses,
    keras_mask,
    output_shape,
    set_keras_mask,
)

MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
OF_ELEMENTS = (
    keras.losses.binary_crossentropy,
    keras.losses.binary_focal_crossentropy,
    keras.losses.hinge,
    keras.losses.huber,
    keras.losses.log_cosh,
    keras.losses.mean_absolute_error,
    keras.losses.mean_absolute_percentage_error,
    keras.losses.mean_squared_error,
    keras.losses.mean_squared_logarithmic_error,
    keras.losses.poisson,
    keras.losses.squared_hinge,
)
"""The mean, over the last axis, of a value of each element: of an output of the shape (batch,) over the batch."""


def weigh_samples(model: Any) -> None:
    """Wrap the losses of a compiled model, so that they accept one weight per sample."""
    compiled = compiled_loss(model)
    if compiled is None:
        return

    def wrap() -> None:
        losses = flat_losses(
            compiled,
            lambda each: (
                each if isinstance(each.loss, WeighedLoss) else each._replace(loss=WeighedLoss(each.loss))
            ),
        )
        for each, metric in zip(losses, compiled.metrics, strict=False):  # none with one output
            _count_samples(metric, each.loss)

    def build(y_true: Any, y_pred: Any) -> None:
        keras_build(y_true, y_pred)
        wrap()

    if compiled.built:
        wrap()
    else:
        keras_build, compiled.build = compiled.build, build


def share_sums(model: Any, share: float) -> None:
    """Make the losses of a built model that are sums those of a batch of the job, for pushes that count by samples.

    `share`: how many batches of this worker are one that a push of weight 1 has. That a push counts by its samples
    suits a mean; a sum grows with the batch already.
    """
    compiled = compiled_loss(model)
    for each in flat_losses(compiled) if compiled is not None else ():
        each.loss.share = share


def filled(weights: Any, samples: Any) -> Any:
    """Weights (one tensor, or a structure per output) with a mask that marks the rows from `samples` on as padding."""

    def marked(given: Any) -> Any:
        given = tf.identity(given)
        set_keras_mask(given, tf.range(tf.shape(given)[0]) < samples)
        return given

    return map_leaves(marked, weights)


@contextlib.contextmanager
def counted_whole(model: Any, whole: Any, real: Any) -> Iterator[None]:
    """Multiply losses that are no means, in this block: the mean of several devices' losses is then that of the batch.

    `whole`: how many times as many rows the batch has as a device's share; `real`: which share of its rows is real;
    scalar tensors.
    """
    compiled = compiled_loss(model)
    losses = [each.loss for each in flat_losses(compiled)] if compiled is not None else []
    for loss in losses:
        loss.whole, loss.real = whole, real
    try:
        yield
    finally:
        for loss in losses:
            loss.whole = loss.real = None


def losses_of_outputs(model: Any) -> dict[str, Any]:
    """The mean loss of each of several outputs in the batch that was traced last, by its name in Keras' logs."""
    compiled = compiled_loss(model)
    if compiled is None or not compiled.built:
        return {}
    pairs = zip(compiled.metrics, flat_losses(compiled), strict=False)  # no metrics with one output
    found = {metric.name: each.loss.mean for metric, each in pairs}
    for each in flat_losses(compiled):
        each.loss.mean = None  # a tensor of the function that is being traced
    return {name: mean for name, mean in found.items() if mean is not None}


def overstated(model: Any) -> Any:
    """By how much the losses of the batch that was traced last are those of a full one: sums, whose rows weigh more."""
    compiled = compiled_loss(model)
    losses = flat_losses(compiled) if compiled is not None else []
    found = [each.loss.excess * (1.0 if each.loss_weights is None else each.loss_weights) for each in losses]
    for each in losses:
        each.loss.excess = 0.0  # a tensor of the function that is being traced
    return sum(found)


class WeighedLoss:
    """A wrapped loss of `compile()`."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss
        self.share = 1.0
        """See `share_sums`."""
        self.samples: Any = None
        """The number of rows of the last batch, a scalar tensor of the function that is being traced."""
        self.classes: int | None = None
        """Of labels that are the numbers of classes, once it was traced."""
        self.ignored: int | None = getattr(loss, "ignore_class", None)
        self.whole: Any = None
        self.real: Any = None
        """See `counted_whole`."""
        self.excess: Any = 0.0
        """See `overstated`."""
        self.mean: Any = None
        """See `losses_of_outputs`."""

    def __call__(self, y_true: Any, y_pred: Any, weights: Any = None) -> Any:
        """Compute the loss as Keras does; `weights` has the shape (batch, …), of a rank up to the loss's."""
        found = self._computed(y_true, y_pred, weights)
        reduction = "mean" if self._is_of_rows(y_true, y_pred) else getattr(self._loss, "reduction", "mean")
        if self.share != 1 and reduction == "sum":
            found *= self.share
        elif self.share != 1 and reduction not in MEANS:  # values, of whose gradients Keras takes the sum
            found = self.share * found + tf.stop_gradient((1 - self.share) * found)
        mean = tf.reduce_mean(found)
        if self.whole is not None and reduction not in MEANS:
            found *= tf.cast(self.whole, found.dtype)
        if (true := keras_mask(weights)) is not None:  # in a step of training
            if reduction == "sum":
                real = tf.reduce_mean(tf.cast(true, found.dtype)) if self.real is None else self.real
                self.excess = found * (1 - tf.cast(real, found.dtype))
            self.mean = mean if found.shape.rank else found - self.excess
        return found

    def _computed(self, y_true: Any, y_pred: Any, weights: Any) -> Any:
        loss = self._loss
        if _is_of_classes(loss) and not keras.tree.is_nested(y_pred):
            self.classes = y_pred.shape[-1]
        self.samples = tf.shape(keras.tree.flatten(y_pred)[0])[0]
        if weights is None or type(loss).__call__ is not keras.losses.Loss.__call__:
            return loss(y_true, y_pred, weights)
        shape, true = self._shape(y_true, y_pred), keras_mask(weights)
        if len(weights.shape) == max(1, len(shape)) + 1 and weights.shape[-1] == 1:
            weights = tf.squeeze(weights, -1)  # a column, which Keras takes as well
        _check_rank(weights, shape)
        if not shape:  # one number per batch: a mask of the prediction would not fit weights of rank 1
            weight = tf.reduce_mean(weights)
            if true is None or not self._is_of_rows(y_true, y_pred):
                return loss(y_true, y_pred, weight)
            values = self._values(as_column(y_true), as_column(y_pred))
            rows = tf.cast(true, values.dtype)
            mean = tf.math.divide_no_nan(tf.reduce_sum(values * rows), tf.reduce_sum(rows))
            return mean * tf.cast(weight, values.dtype)
        if true is not None and loss.reduction in MEANS:  # Keras divides by the real rows, not by all
            weights *= tf.reduce_mean(tf.cast(true, weights.dtype))
        weights = with_rank(weights, len(shape))
        if loss.reduction == "mean_with_sample_weight":  # it divides by the sum of the weights
            sizes = [tf.shape(y_pred)[axis] if size is None else size for axis, size in enumerate(shape)]
            weights = tf.broadcast_to(weights, sizes)
        if true is None or not tf.is_tensor(y_pred):
            return loss(y_true, y_pred, weights)
        own_mask = keras_mask(y_pred)
        rows = with_rank(true, len(shape) if own_mask is None else len(own_mask.shape))
        mask = rows if own_mask is None else tf.logical_and(rows, tf.cast(own_mask, "bool"))
        # Mask the prediction itself, not a copy: Keras finds the logits behind a softmax by the tensor's identity.
        set_keras_mask(y_pred, mask)
        try:
            return loss(y_true, y_pred, weights)
        finally:
            set_keras_mask(y_pred, own_mask)

    def _is_of_rows(self, y_true: Any, y_pred: Any) -> bool:
        """Whether the loss is one number per batch that is a mean over its rows, whatever its reduction.

        Beside a column of labels Keras makes a column of the output, and has a value of each row to reduce.
        """
        if len(getattr(y_true, "shape", ())) != 1:
            return False
        loss = self._loss
        of_elements = computes_as(loss, keras.losses.MeanSquaredError) and is_of_elements(loss.fn, y_pred)
        return of_elements and getattr(loss, "axis", -1) == -1 and keras_mask(y_pred) is None

    def _shape(self, y_true: Any, y_pred: Any) -> tuple[int | None, ...]:
        """The shape of the values before Keras reduces them."""
        return output_shape(self._values, y_true, y_pred)

    def _values(self, *arguments: Any) -> Any:
        return self._loss.call(*keras.tree.map_structure(self._cast, arguments))

    def _cast(self, value: Any) -> Any:
        return keras.ops.convert_to_tensor(value, dtype=self._loss.dtype)


def computes_as(thing: Any, kind: type) -> bool:
    """Whether a loss or a layer computes as this class does: a subclass may override `call`."""
    return all(getattr(type(thing), name, None) is getattr(kind, name) for name in ("call", "__call__"))


def is_of_elements(function: Any, y_pred: Any) -> bool:
    """Whether this function gives the mean over a batch of one number per sample, and each sample's of columns."""
    return any(function is each for each in OF_ELEMENTS) and len(getattr(y_pred, "shape", ())) == 1


def _is_of_classes(loss: Any) -> bool:
    """Whether a loss, given as an object, a function or a name, takes the numbers of classes for labels."""
    sparse = keras.losses.SparseCategoricalCrossentropy
    is_sparse = getattr(loss, "fn", None) is keras.losses.sparse_categorical_crossentropy
    return is_sparse and computes_as(loss, sparse)


def _count_samples(metric: Any, loss: WeighedLoss) -> None:
    """Weight the mean loss of one output by the samples of each batch.

    Keras passes the static batch size. Where that is None each batch counts 1, and so does a read beyond the last
    batch: the count is increased although no batch arrives.
    """
    update = metric.update_state
    metric.update_state = lambda value, sample_weight=None: update(value, sample_weight=loss.samples)  # noqa: ARG005


def _check_rank(weights: Any, shape: tuple[int | None, ...]) -> None:
    """Raise `UserError` for weights with other axes than the loss, which might be broadcast."""
    given = tuple(weights.shape)
    fits = len(given) <= max(1, len(shape)) and all(
        None in pair or 1 in pair or pair[0] == pair[1] for pair in zip(given[1:], shape[1:], strict=False)
    )
    if not fits:
        raise UserError(
            f"sample_weight has the shape {given[1:]} per sample, but the loss has values of the shape {shape[1:]} per "
            "sample. Give one weight per sample, or one for each of these values."
        )


def with_rank(rows: Any, rank: int) -> Any:
    """A tensor with more axes of length 1 at its end, up to this rank."""
    return tf.reshape(rows, tf.concat([tf.shape(rows), tf.ones(max(0, rank - len(rows.shape)), tf.int32)], 0))
