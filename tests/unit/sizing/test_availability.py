"""What is learned of a spot pool, against the process that it is learned from."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shoal.sizing.availability import Markov, Stock
from shoal.sizing.fleet.problems import _shocks_of
from shoal.sizing.fleet.values import FleetPool
from shoal.sizing.speed import priors
from tests.virtual.long_truth import SPOT, Nodes, draw


@pytest.mark.parametrize("share", [0.01, 0.03, 0.2])
def test_share_of_the_time_out_of_stock_is_learned_as_it_is(share: float) -> None:
    """From requests, of which many come together in a stock-out, it was 0.08 to 0.16 in place of 0.01."""
    truth = replace(draw(1), out_share=share)
    learned = []
    for seed in range(8):
        nodes = Nodes(truth, SPOT, random.Random(seed))
        nodes.want(10)
        nodes.until(14 * 86400.0)
        found = Stock.watched(nodes.watched, nodes.out_seconds, nodes.outs)
        learned.append(found.out_share)
        assert found.out_seconds == pytest.approx(1800, rel=0.6)
    assert np.mean(learned) == pytest.approx(share, rel=0.35)


def test_how_sure_the_share_is_grows_with_the_time_that_was_watched() -> None:
    """A pool that was hardly watched is promised little: its share is drawn from a wide posterior."""
    rng = np.random.default_rng(0)
    spread = []
    for hours in (0, 50, 500):
        stock = Stock.watched(3600.0 * hours, 180.0 * hours, 0.1 * hours)
        supply = Markov(stock=stock).supply(rng, 400, 240, 1800.0, 100)
        spread.append(float(np.std(supply.there.mean(axis=1))))
        assert stock.out_share == pytest.approx(priors.OUT_SHARE)
    assert spread == sorted(spread, reverse=True)


def test_shocks_are_learned_from_what_was_lost_at_once() -> None:
    pool = FleetPool("spot", "T4", spot=True)
    assert _shocks_of(pool) == (priors.SHOCK_SHARE, priors.SHOCK_SIZE)
    single = replace(pool, interruptions_seen=90)
    assert _shocks_of(single) == (0.05, 0.5)
    whole = replace(pool, interruptions_seen=90, lost_in_shocks=90, there_in_shocks=90)
    assert _shocks_of(whole) == (0.95, 0.95)
    edited = replace(pool, lost_in_shocks=90)  # by hand, to what cannot be
    assert all(0 < each <= 1 for each in _shocks_of(edited))


@pytest.mark.parametrize(
    ("share", "size", "losses", "seconds"),
    [(0.3, 0.5, 2.0, 1800), (0.3, 0.2, 1.0, 7200), (0.1, 0.5, 0.0, 1800)],
)
def test_the_mean_is_that_of_what_is_drawn(share: float, size: float, losses: float, seconds: float) -> None:
    pool = Markov(losses, shock_size=size, stock=Stock(share, seconds, math.inf))
    drawn = pool.supply(np.random.default_rng(0), 2000, 120, 300.0, 16)
    assert pool.mean == pytest.approx(float(drawn.there.mean()), abs=0.015)


def test_of_a_pool_that_is_out_of_stock_those_nodes_are_there_that_have_survived_it() -> None:
    """Half of the nodes of a job that ran on were taken to be lost at once, as when a stock-out begins."""
    known = Markov(0.1, math.inf, stock=Stock(), out_now=1.0)
    rng = np.random.default_rng(0)
    there = known.supply(rng, 400, 60, 60.0, 8).stays
    assert there is not None
    assert there[:, 0].mean() > 0.98
    assert there[:, 29].mean() == pytest.approx(math.exp(-0.1 / 2), abs=0.03)  # none is replaced yet
    begins = replace(known, out_now=None, stock=Stock(out_share=0.999)).supply(rng, 400, 60, 60.0, 8).there
    assert begins[:, 0].mean() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("hours", [0.25, 1.0, 6.0])
def test_the_mean_of_a_pool_that_is_out_of_stock_is_that_of_what_is_drawn(hours: float) -> None:
    """Chances knew that there were none now, and time and cost did not."""
    pool = Markov(2.0, stock=Stock(0.1, 1800, math.inf), out_now=1.0, horizon=3600 * hours)
    drawn = pool.supply(np.random.default_rng(0), 4000, 120, 30.0 * hours, 16).stays
    assert drawn is not None
    assert pool.mean == pytest.approx(float(drawn.mean()), abs=0.03)
    assert abs(replace(pool, horizon=math.inf).mean - float(drawn.mean())) > 0.03 or hours > 1


class Counted(np.random.Generator):
    """A generator that counts the numbers of losses that are drawn."""

    losses = 0

    def poisson(self, lam: Any = 1.0, size: Any = None) -> Any:
        """As many as always."""
        self.losses += np.size(lam)
        return super().poisson(lam, size)


def test_runs_of_a_job_of_years_are_about_as_soon_drawn_as_those_of_a_day() -> None:
    """A job that said it had 1e12 samples left kept everybody's plan waiting for 18 s, each minute."""
    day, years = Counted(np.random.PCG64(0)), Counted(np.random.PCG64(0))
    pool = Markov(0.1, stock=Stock())
    pool.supply(day, 10, 120, 2 * 86400 / 120, 8)
    pool.supply(years, 10, 120, 20 * 365 * 86400 / 120, 8)
    assert years.losses <= 2 * day.losses


@pytest.mark.parametrize("losses", [0.1, 1.0])
@pytest.mark.parametrize("days", [30, 365])
def test_a_long_interval_is_no_long_stock_out(losses: float, days: int) -> None:
    """Cut into few parts, each of which is longer than a stock-out, it lost all nodes that were not replaced."""
    pool = Markov(losses, stock=Stock(0.1, 1800, math.inf))
    drawn = pool.supply(np.random.default_rng(0), 400, 120, days * 86400 / 120, 100)
    assert pool.mean == pytest.approx(float(drawn.there.mean()), abs=0.012)
