"""What tracing a training step shows about a model, and the warnings about it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger(__name__)


@dataclass
class Findings:
    """Filled while a step is traced.

    `assigned`: variables that the step assigns and the layout lacks, but seeds and metrics. `generators`: of seeds,
    other than Keras' global one, from which the step draws. `without_gradient`: positions of
    trainable variables. `rows`: variables whose gradients are rows, which Keras would not sum. `metrics`: the names of
    the metrics whose sums the step returns. `embeddings`: by its path in x, the smallest Embedding that looks an
    array up as it is. `counts`: whether the step depends on the number of updates before it.
    `no_means`: what a custom step returns that no sums over batches make up. `whole`: why only Keras' whole step can
    compute the model, and no part of it apart, as a trace of a part has shown. `adding`: the names of the layers that
    add losses in `call`, which may be means or sums over samples.
    """

    assigned: Sequence[Any] = ()
    generators: Sequence[Any] = ()
    without_gradient: tuple[int, ...] = ()
    rows: Sequence[Any] = ()
    metrics: tuple[str, ...] = ()
    embeddings: Mapping[tuple[Any, ...], Any] = field(default_factory=dict)
    counts: bool = False
    no_means: Sequence[str] = ()
    whole: str = ""
    adding: Sequence[str] = ()

    def warn(self, model: Any, of_sums: float) -> None:
        """Log where training differs from plain Keras. `of_sums`: how many times as much a sum over samples counts."""
        if self.adding and of_sums != 1:
            log.warning(
                "%s: if what add_loss adds is a sum over samples, it counts %.3g times as much as in Keras' fit on one "
                "accelerator with the job's batchSize: each accelerator adds up its own samples, and a push counts by "
                "its samples. A mean over samples counts as in fit.",
                ", ".join(self.adding),
                of_sums,
            )
        if self.assigned:
            log.warning(
                "%s: not exchanged, although training assigns it. Each worker has its own values, a replacement starts "
                "with the initial ones, and the exported model contains those of one worker.",
                _paths(self.assigned),
            )
        if self.without_gradient:
            log.warning(
                "%s: not trained, because the loss has no gradient for these variables (unused, or hidden from Keras, "
                "for example in a @tf.function).",
                _paths([model.trainable_variables[index] for index in self.without_gradient]),
            )
        if self.no_means:
            log.warning(
                "%s: not among the metrics of training, because the result of a metric that is no mean over samples "
                "(AUC, precision) cannot be added up over batches and workers. An evaluation has it.",
                ", ".join(self.no_means),
            )
        if others := {str(variable.dtype) for variable in model.trainable_variables} - {"float32"}:
            kinds = ", ".join(sorted(others))
            log.warning("the model has weights in %s; they are held and exchanged in float32", kinds)
        if self.rows:
            log.info(
                "%s: the gradients of a row that occurs several times in a batch are summed; plain Keras on TensorFlow "
                "squares or clips them one by one.",
                _paths(self.rows),
            )


def _paths(variables: Sequence[Any]) -> str:
    return ", ".join(variable.path for variable in variables)
