"""CEL rules and patterns: how a model says what the API server must refuse, and in which words."""

from __future__ import annotations

from typing import Any

DECIMAL = r"^-?\d+(\.\d+)?([eE]-?\d+)?$"
"""A number in quotes: the API has no floats."""


def rules(*pairs: tuple[str, str]) -> dict[str, Any]:
    """(CEL rule, message) pairs as a schema extension. The message says what to change."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in pairs]}
