"""All that Shoal uses of Keras and TensorFlow that is not their public API.

A new release may change any of it, so it is in one place, the dependencies have an upper bound, and
`tests/unit/trainer/worker/test_keras_internals.py` says what each name must do.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import tensorflow as tf
from keras import Model
from keras.layers import Embedding, Layer
from keras.metrics import Mean
from keras.random import SeedGenerator
from keras.src import backend
from keras.src.backend.common.global_state import get_global_attribute, set_global_attribute
from keras.src.losses import ALL_OBJECTS_DICT as ALL_LOSSES
from keras.src.metrics import ALL_OBJECTS_DICT as ALL_METRICS
from keras.src.metrics.reduction_metrics import MeanMetricWrapper
from keras.src.models import Functional
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator
from keras.src.trainers.compile_utils import CompileMetrics, MetricsList
from keras.src.trainers.trainer import Trainer, model_supports_jit
from tensorflow.python.eager import context
from tensorflow.python.framework.auto_control_deps_utils import get_read_only_resource_input_indices_graph
from tensorflow.python.ops import custom_gradient

# What is defined elsewhere.
__all__ = [
    "ALL_LOSSES",
    "ALL_METRICS",
    "CompileMetrics",
    "Functional",
    "MeanMetricWrapper",
    "MetricsList",
    "Trainer",
    "global_seed_generator",
    "model_supports_jit",
]

NUMBERS = "object_name_uids"
"""Keras' name of the numbers of each name that it has given."""
_SEEING = threading.RLock()
"""Held while a method is another one: where workers are threads of a process, several trace at once."""

# --- models and layers


def layers_of(model: Any) -> Iterator[Any]:
    """The model and all its layers, also those inside of others."""
    yield from model._flatten_layers()


def layer_variables(layer: Any) -> tuple[list[Any], list[Any]]:
    """The trainable and the other variables of a layer itself, without seeds and metrics."""
    return layer._trainable_variables, layer._non_trainable_variables


def seed_generators(layer: Any) -> list[Any]:
    """The seed generators of a layer itself."""
    return list(getattr(layer, "_seed_generators", ()))


def build_symbolically(model: Any, data: Any) -> None:
    """Create the variables of the model, its loss and metrics from one batch, without computing."""
    model._symbolic_build(data_batch=data)


@contextlib.contextmanager
def _seen(kind: Any, method: str, see: Callable[..., None]) -> Iterator[None]:
    """Call `see(object, arguments…)` at each call of this method in this block, also one that a subclass makes."""
    with _SEEING:
        call = getattr(kind, method)

        @functools.wraps(call)
        def seen(*arguments: Any, **named: Any) -> Any:
            see(*arguments, *named.values())
            return call(*arguments, **named)

        setattr(kind, method, seen)
        try:
            yield
        finally:
            setattr(kind, method, call)


@contextlib.contextmanager
def names_given_back(*, always: bool = False) -> Iterator[None]:
    """After this block, Keras goes on with the numbers in names ("dense_1") as if nothing had been made in it.

    If it raises, or `always`: what is made after a model, as by a callback that adds a layer, needs other names.
    """
    numbers, kept = copy.copy(get_global_attribute(NUMBERS)), False
    try:
        yield
        kept = not always
    finally:
        if not kept:
            set_global_attribute(NUMBERS, numbers)


def embeddings_called(see: Callable[[Any, Any], None]) -> contextlib.AbstractContextManager[None]:
    """Call `see(layer, ids)` at each look-up of an `Embedding` in this block."""
    return _seen(Embedding, "call", see)


def seeds_drawn(see: Callable[[Any], None]) -> contextlib.AbstractContextManager[None]:
    """Call `see(generator)` at each draw from a `SeedGenerator` in this block, but Shoal's own."""
    return _seen(SeedGenerator, "next", lambda generator, *_: see(generator))


def losses_added(see: Callable[[Any], None]) -> contextlib.AbstractContextManager[None]:
    """Call `see(layer)` at each `add_loss` of a layer in this block, also that of its `activity_regularizer`."""
    return _seen(Layer, "add_loss", lambda layer, *_: see(layer))


def means_updated(see: Callable[..., None]) -> contextlib.AbstractContextManager[None]:
    """Call `see(metric, values…)` at each update of a `Mean` in this block."""
    return _seen(Mean, "update_state", see)


def inputs_structure(model: Any) -> Any:
    """How the inputs of a functional model are nested; None for another model, which has a single structure."""
    return getattr(model, "_inputs_struct", None)


def takes_training(model: Any) -> bool:
    """Whether `call()` has the argument `training`."""
    return bool(model._call_has_training_arg)


def compute_loss(model: Any, x: Any, y: Any, predicted: Any, weights: Any) -> Any:
    """What the model's `compute_loss` gives in training, also one that does not take `training`."""
    return model._compute_loss(x, y, predicted, weights, training=True)


def loss_tracker(model: Any) -> Any:
    """The metric with the mean loss."""
    return model._loss_tracker


def evaluate(model: Any, elements: Iterable[Any]) -> dict[str, Any]:
    """What `model.evaluate` gives for these batches, which may differ in shape, as those of a data set may not."""
    model.make_test_function()
    model.reset_metrics()
    logs: dict[str, Any] = {}
    for element in elements:
        logs = model.test_function(iter((element,)))
    return dict(model._get_metrics_result_or_logs(logs))


def flat_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Logs as `fit` gives them: a dict within, such as the results of all metrics of `compile()`, is a part of them.

    They keep their order. Of two with one name, that counts whose place in the alphabet is later.
    """
    found: dict[str, Any] = {}
    for name, value in (*logs.items(), *sorted(logs.items())):
        found |= flat_logs(value) if isinstance(value, dict) else {name: value}
    return found


@contextlib.contextmanager
def batches_taken_first(model: Any, *kinds: Literal["train", "test"]) -> Iterator[None]:
    """In this block `fit` and `evaluate` take each batch from their data set before its step begins.

    Keras takes it within a step that is traced for all: the step that finds no more still counts in the metrics, and
    batches of several shapes have none.
    """
    names = [f"{kind}_function" for kind in kinds if not makes_own_function(model, kind)]
    for name in names:
        getattr(model, f"make_{name}")()
    functions = {name: getattr(model, name) for name in names}

    def taking(function: Callable[[Iterator[Any]], Any], iterator: Iterator[Any]) -> Any:
        first = next(iterator)
        others = itertools.islice(iterator, model.steps_per_execution - 1)
        return function(itertools.chain([first], others))

    for name, function in functions.items():
        setattr(model, name, functools.partial(taking, function))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(model, name, function)


def makes_own_function(model: Any, kind: Literal["train", "test"]) -> bool:
    """Whether the model replaces what calls its steps."""
    name = f"make_{kind}_function"
    return getattr(type(model), name) is not getattr(Model, name)


# --- compile()


def compiled_loss(model: Any) -> Any:
    """The `CompileLoss` of a model; None without a loss."""
    return model._compile_loss


def compiled_metrics(model: Any) -> Any:
    """The `CompileMetrics` of a model; None without metrics."""
    return model._compile_metrics


def user_loss(compiled: Any) -> Any:
    """The argument `loss` of `compile()`."""
    return compiled._user_loss


def user_metrics(compiled: Any) -> tuple[Any, Any]:
    """The arguments `metrics` and `weighted_metrics` of `compile()`."""
    return compiled._user_metrics, compiled._user_weighted_metrics


def flat_losses(compiled: Any, change: Callable[[Any], Any] | None = None) -> list[Any]:
    """The losses of the outputs, none before they are built: named tuples with `path`, `loss` and `loss_weights`.

    `change` replaces each.
    """
    if change is not None:
        compiled._flat_losses = [change(each) for each in compiled._flat_losses]
    return list(compiled._flat_losses or ())


def flat_metrics(compiled: Any) -> tuple[list[Any], list[Any]]:
    """The `metrics` and `weighted_metrics` of each output, each an object with a list `metrics`, or None."""
    return compiled._flat_metrics, compiled._flat_weighted_metrics


def of_outputs(compiled: Any, structure: Any) -> list[Any]:
    """The part of labels, predictions or weights that belongs to each output."""
    return list(compiled._flatten_y(structure))


def mean_of_function(metric: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function of a `MeanMetricWrapper`, and its arguments."""
    return metric._fn, metric._fn_kwargs


# --- optimizers


def learning_rate_of(optimizer: Any) -> Any:
    """The learning rate: a variable, a schedule or a function."""
    return optimizer._learning_rate


def iterations_of(optimizer: Any) -> Any:
    """The variable with the batches that it has seen; `iterations` are these by `gradient_accumulation_steps`."""
    return optimizer._iterations


def set_current_rate(optimizer: Any, rate: Callable[[], Any]) -> None:
    """Make the optimizer compute its current learning rate with this function."""
    optimizer._get_current_learning_rate = rate


def clipped(optimizer: Any, gradients: list[Any]) -> list[Any]:
    """The gradients, clipped as the optimizer does before it applies them."""
    found: list[Any] = optimizer._clip_gradients(gradients)
    return found


def decays(optimizer: Any, variable: Any) -> bool:
    """Whether the optimizer decays this variable."""
    return bool(optimizer._use_weight_decay(variable))


# --- callbacks


def remember_if_better(callback: Any, value: float) -> None:
    """Update the best value of a callback that monitors a metric."""
    if callback.monitor_op is None:
        callback._set_monitor_op()
    if callback._is_improvement(value, callback.best):
        callback.best = value


# --- the backend


def keras_mask(tensor: Any) -> Any:
    """The mask of a tensor, if it has one."""
    return backend.get_keras_mask(tensor)


def set_keras_mask(tensor: Any, mask: Any) -> None:
    """Set the mask of a tensor; None: none."""
    backend.set_keras_mask(tensor, mask)


def as_column(tensor: Any) -> Any:
    """A tensor of the shape (batch,) as (batch, 1), with the logits behind a sigmoid, which Keras finds at a tensor."""
    column, logits = tf.reshape(tensor, (-1, 1)), getattr(tensor, "_keras_logits", None)
    if logits is None and tf.is_symbolic_tensor(tensor) and tensor.op.type == "Sigmoid":
        (logits,) = tensor.op.inputs
    if logits is not None:
        column._keras_logits = tf.reshape(logits, (-1, 1))
    return column


def output_shape(function: Callable[..., Any], *arguments: Any) -> tuple[int | None, ...]:
    """The shape of what a function gives, without computing it."""
    return tuple(backend.compute_output_spec(function, *arguments).shape)


def replace_global_seed_generator(generator: Any) -> None:
    """Replace the generator that `keras.random` uses if a layer passes none."""
    set_global_attribute(GLOBAL_SEED_GENERATOR, generator)


def resource_of(variable: Any) -> Any:
    """TensorFlow's variable of Keras' one."""
    return variable._value


# --- TensorFlow


@contextlib.contextmanager
def without_seed() -> Iterator[None]:
    """In this block TensorFlow draws as if nobody had given it a seed."""
    seed = context.global_seed()
    context.set_global_seed(None)
    try:
        yield
    finally:
        context.set_global_seed(seed)


@contextlib.contextmanager
def custom_gradients(inside: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """In this block, functions with a gradient of their own (`tf.custom_gradient`) are traced within `inside()`."""
    with _SEEING:
        trace = custom_gradient._graph_mode_decorator

        def traced(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            @functools.wraps(function)
            def within(*given: Any, **named: Any) -> Any:
                with inside():
                    return function(*given, **named)

            return trace(within, args, kwargs)

        custom_gradient._graph_mode_decorator = traced
        try:
            yield
        finally:
            custom_gradient._graph_mode_decorator = trace


def made_of(dataset: Any) -> list[Any]:
    """The data sets from which a transformation makes this one; none for one of arrays, files or a generator."""
    return list(getattr(dataset, "_inputs", tuple)())


def function_graph(graph: Any, name: str) -> Any:
    """The graph of a function that the graph calls."""
    return graph._get_function(name).graph


def assigned_handles(graph: Any) -> set[int]:
    """The ids of the variables' handles that a traced function assigns."""
    read = {id(graph.inputs[index]) for index in get_read_only_resource_input_indices_graph(graph)}
    return {id(outer) for outer, inner in graph.captures if id(inner) not in read}


def call_traced(function: Any, tensors: list[Any]) -> Any:
    """Call a `ConcreteFunction` without binding arguments to names, which takes as long as the call."""
    return function._call_flat(tensors, function.captured_inputs)
