"""CEL rules, patterns and bounds that the API server enforces, with their error messages."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationInfo

MOST = 2**31 - 1
"""The bound of int32, as for Kubernetes' own counts. As seconds (68 years) it can be added to any date."""


AS_WRITTEN = object()
"""The context of a validation of what a person writes now, and can correct."""


def _stored(most: int) -> BeforeValidator:
    """Clamps values of objects that were stored before the bound existed."""

    def at_most(value: Any, info: ValidationInfo) -> Any:
        is_number = isinstance(value, int | float)
        return min(value, most) if is_number and info.context is not AS_WRITTEN else value

    return BeforeValidator(at_most)


STORED = _stored(MOST)
Natural = Annotated[int, Field(ge=0, le=MOST), STORED]
Positive = Annotated[int, Field(ge=1, le=MOST), STORED]
QUOTED = "^[-+]?([0-9]+([.][0-9]*)?|[.][0-9]+)([eE][-+]?[0-9]{1,2})?$"
AMOUNT = QUOTED.replace("[-+]?(", "[+]?(", 1)
RATE = "^[+]?(0*[0-9]{1,3}([.][0-9]*)?|[.][0-9]+|0*1000([.]0*)?)([eE]-[0-9]{1,2})?$"
SIZE = "^[+]?(0*[1-9][0-9]*([.][0-9]*)?|[0-9]*[.]0*[1-9][0-9]*)([eE][-+]?[0-9]{1,2})?$"
NAME = "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
"""Names of Kubernetes' objects."""
_WORD = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
LABEL_KEY = f"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?{_WORD}$"
LABEL_VALUE = f"^({_WORD})?$"
"""Of nodes' labels and taints. Other letters are refused by the CRDs alone: a pool that an older one took is read."""


def quoted(pattern: str) -> Callable[[dict[str, Any]], None]:
    """For `json_schema_extra` of a number: the same in quotes is accepted, if it matches.

    A schema can have one type, and CEL sees no field without one: what is wrong is refused in the server's own words.
    """

    def extend(schema: dict[str, Any]) -> None:
        del schema["type"]
        schema |= {"x-kubernetes-preserve-unknown-fields": True, "pattern": pattern, "maxLength": 32}
        schema |= {"maxItems": 0, "maxProperties": 0, "not": {"enum": [True, False, [], {}]}}
        if (least := schema.get("minimum", 0)) % 1:
            # Of a bound, the server takes the whole part, for whole numbers.
            schema |= {"allOf": [{"minimum": int(least), "exclusiveMinimum": True}]}
        if "exclusiveMinimum" in schema:  # in OpenAPI 3.0 it says how `minimum` is meant
            schema |= {"minimum": schema["exclusiveMinimum"], "exclusiveMinimum": True}

    return extend


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and re.fullmatch(QUOTED, value) else value


UNQUOTED = BeforeValidator(_number)
"""A number in quotes is one also where text is not taken for a number otherwise."""
Number = Annotated[float, Field(allow_inf_nan=False, json_schema_extra=quoted(QUOTED)), UNQUOTED]
"""A number of a spec: 0.97 and 1e-3, as YAML has it, or "0.97". Kubernetes' conventions advise against the first, since
a controller that writes back what it read may write another number: none writes a spec, and none compares these. A
status has decimal strings, whose digits are chosen."""
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False, json_schema_extra=quoted(AMOUNT)), UNQUOTED]
"""Such a number of zero or more: money, a time."""
MOST_PER_HOUR = 1000
Rate = Annotated[
    float,
    Field(ge=0, le=MOST_PER_HOUR, allow_inf_nan=False, json_schema_extra=quoted(RATE)),
    _stored(MOST_PER_HOUR),
    UNQUOTED,
]
"""How often per hour, up to every few seconds: a plan is tried by drawing as many events."""

Size = Annotated[float, Field(gt=0, allow_inf_nan=False, json_schema_extra=quoted(SIZE)), UNQUOTED]
"""Such a number above zero."""


Confidence = Annotated[
    float,
    Field(ge=0.5, le=0.999, json_schema_extra=quoted("^[+]?0*[.]([5-8][0-9]*|9[0-9]{0,2})$")),
    UNQUOTED,
]
"""A probability that can be promised: a plan is tried in 1,000 runs."""


def rules(*pairs: tuple[str, str]) -> dict[str, Any]:
    """(CEL rule, message) pairs as a schema extension. A message says what to change."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in pairs]}


def unchanging(*pairs: tuple[str, str]) -> Callable[[dict[str, Any]], None]:
    """For `json_schema_extra`: these rules, and one for each field that refuses a change and names the field.

    One for the whole would name none. CEL sees no field without a type: give it one.
    """

    def extend(schema: dict[str, Any]) -> None:
        schema.update(rules(*pairs))
        for name in schema["properties"]:
            has, same = f"has(self.{name})", f"self.{name} == oldSelf.{name}"
            new = "delete the job first, or choose another name; training.initialFrom continues this run"
            schema["x-kubernetes-validations"].append(
                {
                    "rule": f"{has} == has(oldSelf.{name}) && (!{has} || {same})",
                    "message": f"{name} is immutable: {new}",
                    "fieldPath": f".{name}",
                }
            )

    return extend


def explained(pattern: str, message: str, also: str = "") -> Callable[[dict[str, Any]], None]:
    """For `json_schema_extra`: replace `pattern` with a CEL rule that has a message. `also`: more of the rule.

    The error of a pattern shows only the expression, and no CEL rule is evaluated when it does not match.
    """

    def explain(schema: dict[str, Any]) -> None:
        schema.pop("pattern")
        schema.update(rules((f"self.matches('{pattern}'){also}", message)))

    return explain
