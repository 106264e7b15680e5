"""The base of all messages. Operator and trainer are upgraded independently, so unknown keys are ignored."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class _Given:
    """In place of the set of the fields that were given to an object: it would be a third of what the object takes."""

    def __get__(self, one: BaseModel | None, of: type | None = None) -> Any:
        return self if one is None else set(one.__dict__)

    def __set__(self, one: BaseModel, fields: set[str]) -> None:
        pass


SMALL = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", ser_json_inf_nan="null")
"""Of the parts that a message has very many of: dataclasses with slots. With them, a report of ten workers takes
6 KiB; with models it were 9 (`tests/unit/controllers/test_memory.py`)."""
Model = TypeVar("Model", bound=BaseModel)


def lean(model: type[Model]) -> type[Model]:
    """A model, and those that are derived from it, which do not keep what was given to them, and say: everything."""
    model.__pydantic_fields_set__ = _Given()  # type: ignore[assignment]  # of which pydantic makes no set
    return model


@lean
class Message(BaseModel):
    """Base of all messages: camelCase in JSON, frozen, unknown keys ignored."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, frozen=True, extra="ignore", ser_json_inf_nan="null"
    )

    def to_json(self) -> str:
        """The message as compact JSON with camelCase keys."""
        return self.model_dump_json(by_alias=True, exclude_none=True)
