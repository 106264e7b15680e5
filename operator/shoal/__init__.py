"""Shoal keeps a TensorFlow training job moving while its spot GPU workers come and go."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`shoal.Client`, for notebooks. It is imported when it is asked for: the operator does without."""
    if name == "Client":
        return import_module("shoal.client").Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
