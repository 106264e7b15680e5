"""Cuts a range of a vector where something other holds for a part of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def cut(spans: Iterable[tuple[int, int, T]], low: int, high: int) -> Iterator[tuple[int, int, T | None]]:
    """The range [low, high) in order, as (low, high, what holds there); None between the `spans`."""
    for start, stop, holds in sorted(spans, key=lambda span: span[:2]):
        begin, end = max(low, start), min(high, stop)
        if begin < end:
            if low < begin:
                yield low, begin, None
            yield begin, end, holds
            low = end
    if low < high:
        yield low, high, None
