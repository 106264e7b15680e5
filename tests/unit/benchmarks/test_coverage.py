"""Intervals of speeds hold as much as they say, of laws that are drawn."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.coverage import WANTED, asked
from shoal.sizing.speed import priors

LAWS = 300


@pytest.fixture(scope="module")
def inside() -> Counter[str]:
    return Counter(
        what for seed in range(LAWS) for what, error, sigma in asked(seed) if abs(error) <= priors.Z90 * sigma
    )


@pytest.mark.nightly
@pytest.mark.parametrize("what", WANTED)
def test_nine_of_ten_truths_are_inside(inside: Counter[str], what: str) -> None:
    """A width that is wrong by a quarter would have 80 or 96 % inside."""
    assert 0.83 <= inside[what] / LAWS <= 0.95
