"""Elastic distributed training of Keras models with asynchronous parameter servers.

The public names are loaded when they are first used: the operator shares `contract`, and needs no numpy for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal_trainer.data.arrays import Arrays
    from shoal_trainer.data.files import Files
    from shoal_trainer.data.indexed import Indexed
    from shoal_trainer.data.stream import Stream
    from shoal_trainer.errors import TrainerError, UserError
    from shoal_trainer.training import Training

__all__ = ["Arrays", "Files", "Indexed", "Stream", "TrainerError", "Training", "UserError"]

_HOMES = {
    "Arrays": "data.arrays",
    "Files": "data.files",
    "Indexed": "data.indexed",
    "Stream": "data.stream",
    "TrainerError": "errors",
    "Training": "training",
    "UserError": "errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
