"""CEL rules, patterns and bounds: how a model says what the API server must refuse, and in which words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

DECIMAL = "^-?[0-9]+([.][0-9]+)?([eE]-?[0-9]{1,2})?$"
"""A number in quotes: the API has no floats. One that a float can hold."""

MOST = 2**31 - 1
"""What Kubernetes' own counts and seconds may be: as seconds 68 years, which a date can still be moved by."""


def _at_most(value: Any) -> Any:
    return min(value, MOST) if isinstance(value, int) else value


STORED = BeforeValidator(_at_most)
"""An object that was stored before there was this bound is read as if it kept it."""
Natural = Annotated[int, Field(ge=0, le=MOST), STORED]
Positive = Annotated[int, Field(ge=1, le=MOST), STORED]


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
