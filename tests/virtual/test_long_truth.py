"""What is promised of jobs of one to fourteen days: kept neither less nor more often than it says."""

from __future__ import annotations

from functools import cache
from math import comb

import pytest

from tests.virtual.long_truth import LongStory, Told, draw

SEEDS = range(48)
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600 * len(SEEDS))]
UNLIKELY = 0.001
"""A number of promises kept that is seen this seldom, to either side."""


@cache
def played(seed: int) -> Told:
    return LongStory(draw(seed)).play()


@pytest.mark.parametrize("seed", SEEDS)
def test_workers_that_slow_down_for_good_are_believed(seed: int) -> None:
    """A job that is promised to be in time, though its workers are several times slower than before, is in time."""
    told = played(seed)
    assert 2 <= told.drop <= 10 if draw(seed).tight is not None else told.drop == 1
    assert told.held or told.promised < 0.98
    assert told.in_time or told.promised < 0.98


def test_promises_are_kept_as_often_as_they_say() -> None:
    """By tenths of the chance that was told; a promise of 0.9 to 1 that is kept always says too little."""
    unlikely = []
    for tenth in range(10):
        found = [told for told in map(played, SEEDS) if min(int(told.promised * 10), 9) == tenth]
        said, kept = (
            sum(told.promised for told in found) / max(len(found), 1),
            sum(told.held for told in found),
        )
        print(f"promised {tenth / 10:.1f} to {tenth / 10 + 0.1:.1f}: {said:.2f} of {len(found)}, kept {kept}")
        if found and min(at_most(kept, len(found), said), 1 - at_most(kept - 1, len(found), said)) < UNLIKELY:
            unlikely.append((tenth, said, kept, len(found)))
    assert not unlikely


def at_most(kept: int, number: int, chance: float) -> float:
    """The chance that so many or fewer of a number are kept."""
    return sum(comb(number, n) * chance**n * (1 - chance) ** (number - n) for n in range(kept + 1))
