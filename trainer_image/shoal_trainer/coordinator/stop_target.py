"""Checks whether an evaluation has reached the target metric of `spec.training.stopAfter`. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from shoal_trainer.contract import StopAfter
from shoal_trainer.errors import UserError


def target_reached(stop_after: StopAfter, metrics: Mapping[str, float | None]) -> str:
    """A description of the target that was reached; empty if none was. A non-finite metric (None) reaches no target.

    `UserError` if the metric does not exist, or its direction is unknown.
    """
    name, target = stop_after.metric, stop_after.value
    if name is None or target is None:
        return ""
    if name not in metrics and f"val_{name}" not in metrics:
        raise UserError(
            f"spec.training.stopAfter.metric is {name!r}, but the evaluation returns {', '.join(sorted(metrics))}. "
            "Use one of these."
        )
    evaluated = name if name in metrics else f"val_{name}"
    value = metrics[evaluated]
    if value is None or not math.isfinite(value):
        return ""
    if (direction := stop_after.direction) is None:
        raise UserError(
            f"spec.training.stopAfter.metric is {name!r}; whether lower or higher is better is unknown. Set its mode "
            "to Min or Max."
        )
    reached = value <= target if direction == "Min" else value >= target
    return f"{evaluated} reached {value:.4g}" if reached else ""
