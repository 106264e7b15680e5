"""CEL rules and patterns: how a model says what the API server must refuse, and in which words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

DECIMAL = r"^-?\d+(\.\d+)?([eE]-?\d+)?$"
"""A number in quotes: the API has no floats."""


def rules(*pairs: tuple[str, str]) -> dict[str, Any]:
    """(CEL rule, message) pairs as a schema extension. The message says what to change."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in pairs]}


def explained(pattern: str, message: str) -> Callable[[dict[str, Any]], None]:
    """For `json_schema_extra`: a rule with a message in the place of `pattern`.

    Of a pattern users see only the expression, and where it does not match no rule is checked.
    """

    def explain(schema: dict[str, Any]) -> None:
        schema.pop("pattern")
        schema.update(rules((f"self.matches('{pattern}')", message)))

    return explain
