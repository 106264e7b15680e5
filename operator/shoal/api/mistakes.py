"""What is wrong with an object that its model refuses, and what to change: a type or pattern alone explains nothing."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from shoal.api.crd import Schema, structural

_OF_A_UNION = {"int", "str"}
"""How pydantic ends the path of an int-or-string: it tells a mistake once for each."""


def mistakes(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """`path.of.the.field: what to change`, for each; in the words of the CRD's rule, where the field has one."""
    schema = structural(model)
    found = []
    for each in error.errors():
        path = each["loc"]
        if len(path) > 1 and path[-1] in _OF_A_UNION:
            path = path[:-1]
        rule = "" if each["type"] == "string_type" else _rule(schema, path)  # of a text; the type comes first
        found.append(f"{'.'.join(map(str, path))}: {rule or advice(each)}")
    return [*dict.fromkeys(found)]


def _rule(schema: Schema, path: tuple[int | str, ...]) -> str:
    """The message of the rule of the text at this path; empty if there is none."""
    for part in path:
        schema = schema.get("properties", {}).get(part) or schema.get("items") or {}
    rules = schema.get("x-kubernetes-validations") if schema.get("type") == "string" else None
    return rules[0]["message"] if rules else ""


def advice(error: Any) -> str:
    """What to change about one of pydantic's errors."""
    message, given = str(error["msg"]).rstrip("."), error.get("input")
    if error["type"] == "string_type" and isinstance(given, int | float):
        return f'write the number as a string in quotes, "{given}"'
    if error["type"] == "missing":
        return "this field is required: add it"
    if error["type"] == "value_error":  # a validator of ours: its words name what was given, where that helps
        return str(error["ctx"]["error"])
    if error["type"] == "timezone_aware":
        return f"{given!r} has no time zone: write it with one, as 2026-01-01T00:00:00Z"
    if error["type"] == "unexpected_keyword_argument":
        return "there is no such argument: check its spelling"
    if error["type"] == "extra_forbidden":
        return "there is no such field: check its spelling or remove it"
    return f"{message[0].lower()}{message[1:]}, not {given!r}"
