"""Data that a model preprocesses itself, as the tasks of KerasHub do in `fit`: text to tokens, with weights per token.

The worker calls neither `fit` nor `evaluate`, so the preprocessing runs where the data are read, in training while
another step computes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from shoal_trainer.data.batch import Batch, fill, map_leaves, split
from shoal_trainer.data.mapped import Mapped
from shoal_trainer.data.source import Source


def preprocessed(data: Source, model: Any) -> Source:
    """The data as the model's step needs them; the same data for a model without a preprocessor."""
    preprocesses = getattr(model, "preprocessor", None) is not None and hasattr(model, "preprocess_samples")
    return Mapped(data, partial(_applied, model.preprocess_samples)) if preprocesses else data


def _applied(function: Callable[[Any, Any, Any], Any], batch: Batch) -> Batch:
    """`function(x, y, sample_weight)` gives what Keras packs of the three: x, (x, y) or (x, y, sample_weight).

    It takes tensors, which is all that `fit` gives it: the tokenizers of KerasHub refuse an array of strings.
    """
    given = map_leaves(tf.convert_to_tensor, batch.as_given())
    return fill(function(*split(given)), batch.size, batch.end)
