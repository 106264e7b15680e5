"""What one night plays of what would take several: a seventh on each day of the week."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
NIGHTS = 7


def of_tonight(cases: Sequence[T]) -> Sequence[T]:
    """Those of the night SHOAL_NIGHT, which is 1 to 7 as in `date +%u`; all of them if it is empty or not set."""
    night = os.environ.get("SHOAL_NIGHT")
    return cases[int(night) % NIGHTS :: NIGHTS] if night else cases
