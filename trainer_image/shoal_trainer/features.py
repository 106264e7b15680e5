"""The features that predict a model's speed: FLOPs per sample, parameters and tensors (docs/sizing-model.md).

A worker of each job counts the FLOPs of its model once. As a library function: with it, users fill in the model of a
SpeedProfile before the first run.

FLOPs are those of the forward pass of one sample at inference. A multiply-add is two operations. Only matrix products
and convolutions count, also inside einsum, attention and recurrent layers; element-wise operations, normalization,
activations and look-ups do not. A training step takes about three times as many, a constant that each fit absorbs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal_trainer.errors import UserError

__all__ = ["Features", "model_features"]


@dataclass(frozen=True)
class Features:
    """FLOPs of one sample's forward pass, trainable parameters, trainable tensors, and the fingerprint.

    The fingerprint is that of the layout, by which workers, servers, snapshots and SpeedProfiles identify the model.
    """

    flops_per_sample: float
    parameters: int
    tensors: int
    fingerprint: str


def model_features(model: Any, input_shape: Any = None) -> Features:
    """Compute the features of a Keras model.

    Args:
        model: A built `keras.Model`.
        input_shape: The shapes of its inputs without the batch axis, in the structure of the model's inputs. Required
            only if the model leaves a dimension open, for example the length of a sequence.

    Returns:
        The `Features`.

    Raises:
        UserError: The model is not built, or a dimension of an input is open.
    """
    import keras  # heavy, and not needed to import this module
    import tensorflow as tf

    if not getattr(model, "inputs", None):
        raise UserError(f"The model {model.name!r} has no known inputs. Call model.build(input_shape) first.")
    inputs = list(model.inputs)
    shapes = (
        [tuple(t.shape[1:]) for t in inputs] if input_shape is None else _shapes(input_shape, len(inputs))
    )
    for tensor, shape in zip(inputs, shapes, strict=True):
        if any(d is None for d in shape):
            raise UserError(
                f"Input {tensor.name!r} of the model {model.name!r} has the open shape {shape}. "
                "Pass input_shape with every dimension."
            )
    specs = [
        tf.TensorSpec((1, *shape), keras.backend.standardize_dtype(tensor.dtype), name=f"input_{i}")
        for i, (shape, tensor) in enumerate(zip(shapes, inputs, strict=True))
    ]

    from shoal_trainer.worker.keras_internals import inputs_structure
    from shoal_trainer.worker.layout import layout_of

    structure = inputs_structure(model)

    def forward(*tensors: Any) -> Any:
        single = tensors[0] if len(tensors) == 1 else list(tensors)
        return model(
            single if structure is None else keras.tree.pack_sequence_as(structure, tensors), training=False
        )

    layout = layout_of(model)
    return Features(float(_flops(forward, specs)), layout.trainable, layout.tensors, layout.fingerprint)


def flops_per_sample(model: Any, x: Any) -> int:
    """FLOPs of the forward pass of one sample of the batch `x`, a structure of arrays or tensors."""
    import keras
    import tensorflow as tf

    flat = keras.tree.flatten(x)
    specs = [tf.TensorSpec((1, *leaf.shape[1:]), tf.as_dtype(leaf.dtype)) for leaf in flat]

    def forward(*tensors: Any) -> Any:
        return model(keras.tree.pack_sequence_as(x, tensors), training=False)

    return _flops(forward, specs)


def _flops(forward: Callable[..., Any], specs: Sequence[Any]) -> int:
    import tensorflow as tf

    graph = tf.function(forward, autograph=False).get_concrete_function(*specs).graph
    return _count(_used(graph), lambda name: _body(graph, name))


def _shapes(input_shape: Any, count: int) -> list[tuple[int, ...]]:
    if count == 1 and (not input_shape or not isinstance(input_shape[0], (tuple, list))):
        shapes = [tuple(input_shape)]
    else:
        values = input_shape.values() if isinstance(input_shape, dict) else input_shape
        shapes = [tuple(shape) for shape in values]
    if len(shapes) != count:
        raise UserError(f"input_shape gives {len(shapes)} shapes for {count} inputs")
    return shapes


def _used(graph: Any) -> Sequence[Any]:
    """Operations that the outputs depend on. Keras' recurrent layers trace more than they use."""
    open_ = [tensor.op for tensor in graph.outputs]
    seen = {id(op): op for op in open_}
    while open_:
        op = open_.pop()
        for before in (*(tensor.op for tensor in op.inputs), *op.control_inputs):
            if id(before) not in seen:
                seen[id(before)] = before
                open_.append(before)
    return list(seen.values())


def _body(graph: Any, name: Any) -> Any:
    """The graph of a function that the graph calls."""
    from shoal_trainer.worker.keras_internals import function_graph

    return function_graph(graph, name.decode() if isinstance(name, bytes) else name)


def _count(operations: Sequence[Any], body: Callable[[Any], Any]) -> int:
    total = 0
    for op in operations:
        kind = op.type
        if kind in ("PartitionedCall", "StatefulPartitionedCall"):
            total += _count(_used(body(op.get_attr("f").name)), body)
        elif kind in ("While", "StatelessWhile"):
            total += _trips(body(op.get_attr("cond").name)) * _count(
                _used(body(op.get_attr("body").name)), body
            )
        elif kind in ("If", "StatelessIf"):
            branches = (op.get_attr("then_branch").name, op.get_attr("else_branch").name)
            total += max(_count(_used(body(branch)), body) for branch in branches)
        elif kind in ("Case", "StatelessCase"):
            total += max(_count(_used(body(branch.name)), body) for branch in op.get_attr("branches"))
        elif kind in _COSTS:
            total += 2 * _COSTS[kind](op)
    return total


def _trips(condition: Any) -> int:
    """Iterations of a loop: the smallest constant that its counters are compared with (a sequence's length), or 1."""
    import tensorflow as tf

    compared = (tf.get_static_value(op.inputs[1]) for op in condition.get_operations() if op.type == "Less")
    bounds = [int(value) for value in compared if value is not None and int(value) > 0]
    return min(bounds, default=1)


def _dims(tensor: Any) -> list[int]:
    return [1 if d is None else int(d) for d in tensor.shape]


def _convolution(op: Any) -> int:
    """Multiply-adds: every output element sums kernel x input channels (of its group)."""
    kernel = _dims(op.inputs[1])
    return math.prod(_dims(op.outputs[0])) * math.prod(kernel[:-1])


def _transposed(op: Any) -> int:
    """Transposed convolution: every input element is multiplied with kernel x output channels."""
    kernel = _dims(op.inputs[1])
    return math.prod(_dims(op.inputs[2])) * math.prod(kernel[:-1])


def _depthwise(op: Any) -> int:
    kernel = _dims(op.inputs[1])
    return math.prod(_dims(op.outputs[0])) * kernel[0] * kernel[1]


def _product(op: Any) -> int:
    left = _dims(op.inputs[0])
    transposed = op.get_attr("transpose_a" if op.type == "MatMul" else "adj_x")
    return math.prod(_dims(op.outputs[0])) * left[-2 if transposed else -1]


def _einsum(op: Any) -> int:
    """The product of all distinct indices. An einsum of one operand is a transposition or a sum: 0."""
    if len(op.inputs) < 2:
        return 0
    equation = op.get_attr("equation")
    text = equation.decode() if isinstance(equation, bytes) else equation
    terms = text.split("->")[0].split(",")
    sizes: dict[str, int] = {}
    broadcast: list[int] = []
    for term, tensor in zip(terms, op.inputs, strict=True):
        dims = _dims(tensor)
        head, dots, tail = term.partition("...")
        middle = len(dims) - len(head) - len(tail) if dots else 0
        labels = [*head, *([""] * middle), *tail]
        kept = [d for label, d in zip(labels, dims, strict=True) if not label]
        broadcast = max(broadcast, kept, key=math.prod)
        sizes.update(
            {label: max(d, sizes.get(label, 1)) for label, d in zip(labels, dims, strict=True) if label}
        )
    return math.prod(sizes.values()) * math.prod(broadcast)


_COSTS: dict[str, Callable[[Any], int]] = {
    "BatchMatMul": _product,
    "BatchMatMulV2": _product,
    "BatchMatMulV3": _product,
    "Conv2D": _convolution,
    "Conv2DBackpropInput": _transposed,
    "Conv3D": _convolution,
    "Conv3DBackpropInputV2": _transposed,
    "DepthwiseConv2dNative": _depthwise,
    "Einsum": _einsum,
    "MatMul": _product,
}
