"""What happened to an object, in the words of a core/v1 Event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Event"]


@dataclass(frozen=True)
class Event:
    """Something that happened. Reasons are stable words for programs; repetitions are one Event with a count."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str
