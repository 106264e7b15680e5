"""Whether an evaluation has reached what `spec.training.stopAfter` asks for. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from shoal_trainer.contract import StopAfter
from shoal_trainer.errors import UserError

MINIMIZED = ("loss", "error", "mse", "mae")


def target_reached(stop_after: StopAfter, metrics: Mapping[str, float]) -> str:
    """What was reached, in words; empty where nothing was. `UserError` for a metric that there is not."""
    name, target = stop_after.metric, stop_after.value
    if name is None or target is None:
        return ""
    value = metrics.get(name, metrics.get(f"val_{name}"))
    if value is None:
        raise UserError(
            f"spec.training.stopAfter.metric is {name!r}, but the evaluation gives {', '.join(sorted(metrics))}."
        )
    reached = value <= target if any(word in name for word in MINIMIZED) else value >= target
    return f"{name} reached {value:.4g}" if reached else ""
