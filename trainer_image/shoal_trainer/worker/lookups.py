"""Finds which arrays of a batch an Embedding looks up as they are, and what draws or adds losses, in a traced step.

The graph shows it, whatever the model is made of. Ids that the model first shifts, hashes or takes a part of are not
among them: the batch may have any numbers there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from shoal_trainer.data.batch import located
from shoal_trainer.worker.findings import Findings
from shoal_trainer.worker.keras_internals import embeddings_called, losses_added, seeds_drawn

KEEPING = {
    "Identity",
    "Cast",
    "Reshape",
    "ExpandDims",
    "Squeeze",
    "Transpose",
    "StopGradient",
    "PreventGradient",
}
"""Operations whose result has all the numbers of their first input, and no others."""
NUMBERS = {tf.int32, tf.int64, tf.float32, tf.float64}
"""Types that a cast of ids does not change."""


@contextlib.contextmanager
def lookups(found: Findings, x: Any) -> Iterator[None]:
    """Note in `found` the embeddings that look up traced arrays of `x` in this block, and what draws or adds losses."""
    sources = {id(leaf): path for path, leaf in located(x)}
    limits: dict[tuple[Any, ...], Any] = {}

    def see(layer: Any, ids: Any) -> None:
        while id(ids) not in sources and _keeps(ids):
            ids = ids.op.inputs[0]
        path = sources.get(id(ids))
        if path is not None and (path not in limits or layer.input_dim < limits[path].input_dim):
            limits[path] = layer

    generators: dict[int, Any] = {}
    adding: dict[str, Any] = {}
    with (
        embeddings_called(see),
        seeds_drawn(lambda each: generators.update({id(each): each})),
        losses_added(lambda layer: adding.update({layer.name: layer})),
    ):
        yield
    found.embeddings, found.generators = limits, list(generators.values())
    # A regularizer of activities is a mean over samples, as Keras has it.
    found.adding = [name for name, layer in adding.items() if layer.activity_regularizer is None]


def _keeps(tensor: Any) -> bool:
    """Whether a tensor has the numbers of the first input of its operation."""
    return (
        tf.is_symbolic_tensor(tensor)
        and tensor.op.type in KEEPING
        and (tensor.op.type != "Cast" or tensor.dtype in NUMBERS)
    )
