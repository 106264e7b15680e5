"""What the tests play by day of cases that differ little, and one night of what would take several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
NIGHTS = 7


def by_day(cases: Sequence[T], number: int) -> Sequence[T]:
    """So many of them, or all if there are fewer, spread evenly: cases that stand side by side are the most alike."""
    number = min(number, len(cases))
    return [cases[index * len(cases) // number] for index in range(number)]


def examples(number: int) -> int:
    """How many random examples a test is given that has this many at night: a quarter of them."""
    return number if os.environ.get("SHOAL_NIGHTLY") else number // 4


def of_tonight(cases: Sequence[T]) -> Sequence[T]:
    """Those of the night SHOAL_NIGHT, which is 1 to 7 as in `date +%u`; all of them if it is empty or not set."""
    night = os.environ.get("SHOAL_NIGHT")
    return cases[int(night) % NIGHTS :: NIGHTS] if night else cases
