"""What is wrong with an object that its model refuses, in the words of the CRD: a pattern alone explains nothing."""

from __future__ import annotations

from pydantic import BaseModel, ValidationError

from shoal.api.crd import Schema, structural


def words_of(error: ValidationError, model: type[BaseModel]) -> str:
    """Field by field: what the field's rule says, where it has one, otherwise what pydantic says."""
    schema = structural(model)
    return "; ".join(
        f"{'.'.join(map(str, each['loc']))}: {_rule(schema, each['loc']) or each['msg']}"
        for each in error.errors()
    )


def _rule(schema: Schema, path: tuple[int | str, ...]) -> str:
    """The message of the rule of the text at this path; empty if there is none."""
    for part in path:
        schema = schema.get("properties", {}).get(part) or schema.get("items") or {}
    rules = schema.get("x-kubernetes-validations") if schema.get("type") == "string" else None
    return rules[0]["message"] if rules else ""
