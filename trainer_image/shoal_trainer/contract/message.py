"""The base of all messages. Operator and trainer are upgraded independently, so unknown keys are ignored."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

VERSION = 1


class Message(BaseModel):
    """Base of all messages: camelCase in JSON, frozen, unknown keys ignored."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, frozen=True, extra="ignore", ser_json_inf_nan="null"
    )

    def to_json(self) -> str:
        """The message as compact JSON with camelCase keys."""
        return self.model_dump_json(by_alias=True, exclude_none=True)
