"""When training ends, and in which direction a metric improves."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from shoal_trainer.contract.message import Message

FALLS = (
    "loss", "error", "(root_)?mean_squared_error", "r?mse", "mean_absolute_error", "mae", "mape", "msle",
    "mean_absolute_percentage_error", "mean_squared_logarithmic_error", "log_?cosh(_error)?", "huber(_loss)?",
    "poisson", "(squared_|categorical_)?hinge", "bce", "((binary|(sparse_)?categorical)_)?(focal_)?crossentropy",
    "kl_divergence", "kullback_leibler_divergence", "kld", "ctc", "circle", "perplexity", "false_(positives|negatives)",
)  # fmt: skip
"""Patterns of metrics that improve as they decrease: Keras' losses and errors, by all of their names."""
AT_MOST_ONE = (
    "((binary|(sparse_)?(top_(k|[0-9]+)_)?categorical|(sparse_)?top_(k|[0-9]+))_)?acc(uracy)?", "((roc|pr)_)?auc",
    "(precision|recall|sensitivity|specificity)(_at_(precision|recall|sensitivity|specificity))?",
    "f1(_?score)?", "f_?beta_score", "(one_hot_)?(mean_|binary_|m)?io_?u", "r2(_score)?", "cosine_similarity",
    "(concordance|pearson)_correlation",
)  # fmt: skip
"""Patterns of metrics that improve as they increase up to 1."""
RISES = (*AT_MOST_ONE, "true_(positives|negatives)")
"""Patterns of metrics that improve as they increase."""


def names_of(*patterns: str) -> str:
    """A pattern for RE2 and Python that matches these names, optionally with `val_` before or `_1` after them."""
    return f"(?i)^(val_)?({'|'.join(patterns)})(_[0-9]+)?$"


class StopAfter(Message):
    """When training ends: after N epochs or steps of the whole job, or when a metric reaches a value."""

    epochs: int | None = None
    steps: int | None = None
    metric: str | None = None
    value: float | None = Field(None, allow_inf_nan=False)
    mode: Literal["Min", "Max"] | None = None
    """Whether the metric must decrease or increase to the value; None: inferred from its name."""

    @property
    def direction(self) -> Literal["Min", "Max"] | None:
        """The mode, or the one inferred from the metric's name; None if it cannot be inferred."""
        if self.mode is not None or self.metric is None:
            return self.mode
        if re.match(names_of(*FALLS), self.metric):
            return "Min"
        return "Max" if re.match(names_of(*RISES), self.metric) else None

    @model_validator(mode="after")
    def _together(self) -> StopAfter:
        if (self.metric is None) != (self.value is None):
            raise ValueError("stopAfter.metric and stopAfter.value go together: set both or neither")
        return self
