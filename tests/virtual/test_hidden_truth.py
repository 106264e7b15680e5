"""The real operator against a hidden truth: it learns speeds, and moves jobs between pools that run out and lose nodes.

In virtual time, on the virtual cluster, with the operator killed at three of its writes. `make test` plays five
scenarios; with SHOAL_NIGHTLY=1, fifty, of which deadlines and costs are judged, too.
"""

from __future__ import annotations

import os
from functools import cache
from math import comb
from statistics import median

import pytest

from tests.virtual.hidden import Scenario, draw
from tests.virtual.hidden_story import PROMISED, Story, Told
from tests.virtual.hindsight import best_in_hindsight, uniform_progress

SEEDS = range(50) if os.environ.get("SHOAL_NIGHTLY") else range(5)
pytestmark = pytest.mark.timeout(60 * len(SEEDS))
HALF, NEAR, MOSTLY = 0.08, 0.15, 0.7
"""Of the ends that are predicted at half: the median error, and how many are within 15 %."""
UNLIKELY = 0.01
"""A share of late jobs that would be seen this seldom if promises were kept."""
WORSE, ABOUT = 1.3, 1.05
"""The most that is paid: in the median, as a multiple of the best in hindsight; in all, of uniform progress.

What the project wants is 1.25 and 1. It was 1.21 and 0.94 over these 50, and 1.12 and 0.91 over 43 others later.
"""


@cache
def played(seed: int) -> tuple[Scenario, Told]:
    scenario = draw(seed)
    return scenario, Story(scenario).play()


@pytest.mark.parametrize("seed", SEEDS)
def test_pools_plans_and_accounts_hold_whatever_happens(seed: int) -> None:
    """No pool beyond its limit, no change of a plan without a reason, no spec written, each thing counted once."""
    scenario, told = played(seed)
    assert not told.broken, "\n".join(told.broken[:10])
    assert len(told.seconds) == len(scenario.jobs)
    assert told.changes


@pytest.mark.nightly
def test_deadlines_are_kept_as_often_as_promised() -> None:
    promised = late = 0
    for seed in SEEDS:
        scenario, told = played(seed)
        for job in scenario.jobs:
            promised += job.name in told.promised
            late += job.name in told.promised and told.seconds[job.name] > job.deadline
    assert promised >= len(SEEDS)
    # The binomial test: late jobs are not so many that a promise of 95 % is unlikely to be true.
    chance = sum(
        comb(promised, n) * (1 - PROMISED) ** n * PROMISED ** (promised - n)
        for n in range(late, promised + 1)
    )
    print(f"{late} of {promised} promised jobs late")
    assert chance >= UNLIKELY, f"{late} of {promised} jobs were late that were promised to be in time"


@pytest.mark.nightly
def test_the_end_that_is_predicted_at_half_is_near_the_true_one() -> None:
    """Stock-outs that come later are in no prediction: some jobs end much later than was said at half."""
    errors = []
    for seed in SEEDS:
        _, told = played(seed)
        errors += [end / told.seconds[name] - 1 for name, (_, end) in told.at_half.items()]
    assert len(errors) >= len(SEEDS)
    off, near = median(abs(error) for error in errors), sum(abs(error) <= NEAR for error in errors)
    print(f"predicted at half: median error {off:.1%}, {near / len(errors):.0%} within {NEAR:.0%}")
    assert off <= HALF
    assert near >= MOSTLY * len(errors)


@pytest.mark.nightly
def test_cost_is_near_the_best_in_hindsight_and_uniform_progress() -> None:
    """Uniform progress knows the speeds from the first second; the operator has to learn them."""
    ratios, ours, theirs = [], 0.0, 0.0
    for seed in SEEDS:
        scenario, told = played(seed)
        cost, _ = uniform_progress(scenario)
        ratios.append(told.cost / best_in_hindsight(scenario))
        ours, theirs = ours + told.cost, theirs + cost
    print(
        f"cost over hindsight: median {median(ratios):.2f}, most {max(ratios):.1f}; over uniform: {ours / theirs:.3f}"
    )
    assert median(ratios) <= WORSE, sorted(ratios)
    assert ours <= ABOUT * theirs
