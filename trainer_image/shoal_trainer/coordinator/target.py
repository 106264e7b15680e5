"""Whether an evaluation has reached what `spec.training.stopAfter` asks for. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from shoal_trainer.contract import StopAfter
from shoal_trainer.errors import UserError


def target_reached(stop_after: StopAfter, metrics: Mapping[str, float | None]) -> str:
    """What was reached, in words; empty where nothing was.

    `UserError` for a metric that there is not, or of which nobody knows whether it is to fall or to rise.
    One that is not finite (None, as JSON has it) has reached nothing.
    """
    name, target = stop_after.metric, stop_after.value
    if name is None or target is None:
        return ""
    if name not in metrics and f"val_{name}" not in metrics:
        raise UserError(
            f"spec.training.stopAfter.metric is {name!r}, but the evaluation gives {', '.join(sorted(metrics))}."
        )
    value = metrics.get(name, metrics.get(f"val_{name}"))
    if value is None or not math.isfinite(value):
        return ""
    if (direction := stop_after.direction) is None:
        raise UserError(
            f"spec.training.stopAfter.metric is {name!r}, which may be better when small or when great: set its mode"
            " to Min or Max."
        )
    reached = value <= target if direction == "Min" else value >= target
    return f"{name} reached {value:.4g}" if reached else ""
