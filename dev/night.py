"""What the tests play by day of cases that differ little, and one night of what would take several."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, combinations
from typing import TypeVar

T = TypeVar("T")
NIGHTS = 7


def by_day(cases: Sequence[T], number: int, parameters: Callable[[T], Mapping[str, str]]) -> Sequence[T]:
    """So many of them, or all if there are fewer: the first, then each time one whose values were played least.

    So each value of each parameter is played, if the number allows it, and then each pair of values. Of equals, those
    come first that are spread evenly: cases that stand side by side are the most alike.
    """
    number = min(number, len(cases))
    spread = [index * len(cases) // number for index in range(number)]
    left = dict.fromkeys(chain(spread, range(len(cases))))
    values = [list(parameters(case).items()) for case in cases]
    parts = [[list(combinations(each, size)) for size in (1, 2)] for each in values]
    played, chosen = Counter[tuple[tuple[str, str], ...]](), list[T]()
    while len(chosen) < number:
        best = min(left, key=lambda index: [sum(map(played.__getitem__, each)) for each in parts[index]])
        del left[best]
        chosen.append(cases[best])
        played.update(chain(*parts[best]))
    return chosen


def examples(number: int) -> int:
    """How many random examples a test is given that has this many at night: a quarter of them."""
    return number if os.environ.get("SHOAL_NIGHTLY") else number // 4


def again(number: int) -> bool:
    """Whether the plan of this number, from 0, of a story is made once more without memory: all, and by day a third.

    The first of those is not the story's first, which has nothing to remember.
    """
    return bool(os.environ.get("SHOAL_NIGHTLY")) or number % 3 == 1


def of_tonight(cases: Sequence[T]) -> Sequence[T]:
    """Those of the night SHOAL_NIGHT, which is 1 to 7 as in `date +%u`; all of them if it is empty or not set."""
    night = os.environ.get("SHOAL_NIGHT")
    return cases[int(night) % NIGHTS :: NIGHTS] if night else cases
