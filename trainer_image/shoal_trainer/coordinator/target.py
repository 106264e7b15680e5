"""Whether an evaluation has reached what `spec.training.stopAfter` asks for. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from shoal_trainer.contract import StopAfter
from shoal_trainer.errors import UserError

MINIMIZED = ("loss", "error", "mse", "mae")


def target_reached(stop_after: StopAfter, metrics: Mapping[str, float | None]) -> str:
    """What was reached, in words; empty where nothing was. `UserError` for a metric that there is not.

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
    reached = value <= target if any(word in name for word in MINIMIZED) else value >= target
    return f"{name} reached {value:.4g}" if reached else ""
