"""Checks the target metric of the job before training, as soon as the model's metrics are known. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

from shoal_trainer.contract import StopAfter, names_of
from shoal_trainer.errors import UserError

SHARES = ("([a-z]+_)*acc(uracy)?", "((roc|pr)_)?auc", "precision", "recall", "f1(_?score)?")
"""Patterns of metrics that are at most 1."""


def check_target(stop_after: StopAfter, evaluated: Collection[str] | None) -> None:
    """Raise `UserError` if no evaluation can reach the target.

    `evaluated`: the metrics of an evaluation (`val_loss`, …), none without validation data; None if they are not known
    before it.
    """
    name = stop_after.metric
    if name is None:
        return
    if evaluated is not None and not evaluated:
        raise UserError(
            f"Training should stop at a value of {name}, but nothing is evaluated without Training(validation=…). "
            "Set validation."
        )
    if evaluated is not None and not {name, f"val_{name}"} & set(evaluated):
        near = difflib.get_close_matches(name, evaluated, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UserError(
            f"Training should stop at a value of the unknown metric {name}; known: {', '.join(evaluated)}.{hint}"
        )
    value = stop_after.value
    if (
        value is not None
        and stop_after.direction == "Max"
        and value > 1
        and re.match(names_of(*SHARES), name)
    ):
        raise UserError(
            f"Training should stop when {name} reaches {value:g}, but it is at most 1. Give it as a share, for example "
            "0.95."
        )
    if stop_after.direction is None:
        raise UserError(
            f"Training should stop at a value of {name}, but it is unknown whether lower or higher is better. Set the "
            "mode to min or max (--mode, or spec.training.stopAfter.mode)."
        )
