"""Bounds of what is read of a report: an image is its user's own, and a reader computes with what it reports."""

from __future__ import annotations

import math
import re
from itertools import islice
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

LARGEST = 2**53
"""Counts beyond it are none, and JSON's readers do not agree about them."""
CENTURY = 4102444800
"""2100-01-01 in Unix seconds; a time in milliseconds is beyond it."""
MOST_LOG = 7 * math.log(10)
"""Of the seconds of a step: 10^7 are a third of a year, and 10^-7 are none by any clock."""
MOST_FLOPS = 1e20
MOST_METRICS = 256
"""Of an epoch. More are not told: each is a series of Prometheus."""
MOST_TEXT, MOST_SHORT = 1024, 256
"""Characters of a text, and of one of which each worker has several. What is longer is cut."""


_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
"""Unicode's category Cc, but for line breaks."""


def plain(text: str) -> str:
    """Words of somebody else with spaces for control characters: a terminal obeys them, whoever wrote them."""
    return text if text.isprintable() else _CONTROL.sub(" ", text)


def _finite(value: float) -> bool:
    return abs(value) <= 1e18  # also false for NaN


def _figures(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return {
        name: value
        for name, value in islice(values.items(), MOST_METRICS)
        if value is not None and (not isinstance(value, float) or _finite(value))
    }


Count = Annotated[int, Field(ge=0, le=LARGEST)]
Difference = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, le=LARGEST)]
UnixTime = Annotated[float | None, Field(ge=0, lt=CENTURY)]
Figure = Annotated[
    float | None, AfterValidator(lambda value: value if value is not None and _finite(value) else None)
]
"""A measurement that may be missing: None if it is not finite."""
Metrics = Annotated[dict[str, float], BeforeValidator(_figures)]
"""Values by name, without those that are not finite."""
Text = Annotated[str, AfterValidator(lambda text: plain(text[:MOST_TEXT]))]
ShortText = Annotated[str, AfterValidator(lambda text: plain(text[:MOST_SHORT]))]
Name = Annotated[
    str, AfterValidator(lambda text: text[:MOST_SHORT] if text.isascii() and text.isprintable() else "")
]
"""Of a node or a device. One letter beyond ASCII takes four bytes for each of its letters."""
