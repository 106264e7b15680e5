"""The operator's own planning on recorded revocations: it keeps deadlines, for less than uniform progress pays."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.bounded_risk import NAMES, short
from benchmarks.planned import OURS, Asked, figures
from benchmarks.planning_policy import Stock, learned
from shoal.sizing.simulate.replay import step_of

UNIFORM = "uniform progress"
WORTH = 0.85
"""What is paid at most where the slack is shorter than a start-up, over on-demand alone and over uniform progress."""


@pytest.mark.nightly
def test_operator_keeps_deadlines_for_less_than_uniform_progress() -> None:
    found = figures(Asked(0.3, 1.1), NAMES[0], 1)
    assert found.in_time[OURS] == 1
    assert found.cost[OURS] <= WORTH * min(found.cost[UNIFORM], 1.0)
    assert found.cost["oracle"] <= found.cost[OURS]


@pytest.mark.nightly
def test_operator_pays_less_on_all_traces_together() -> None:
    every = [figures(Asked(0.3, 1.1), name, 10) for name in NAMES]
    assert np.mean([each.in_time[OURS] for each in every]) >= 0.95
    assert np.mean([each.cost[OURS] for each in every]) <= WORTH
    assert all(each.cost[OURS] < each.cost[UNIFORM] for each in every)


def test_pool_runs_out_when_pods_have_waited_in_vain_and_has_nodes_again_when_one_comes() -> None:
    stock = Stock(short().spot)  # nodes take 180 s: twice that is in vain
    assert not stock.see(0.0, there=14, asked=16, lost=0)
    assert stock.waits
    assert not stock.see(350.0, there=14, asked=16, lost=0)
    assert stock.see(370.0, there=14, asked=16, lost=0)
    assert (stock.outs, stock.out) == (1, 370.0)
    assert stock.see(400.0, there=15, asked=16, lost=0)
    assert (stock.starts.starts, stock.starts.start_seconds) == (15, 15 * 180.0 + 400.0)
    later = stock.again()
    assert (later.waits, later.starts, later.outs) == (False, stock.starts, 1)


def test_what_is_learned_is_of_jobs_one_after_another() -> None:
    """All starts of a job that goes on for ever are of nodes that were lost: mostly long waits."""
    scenario = short()
    nodes = np.full(3 * round(scenario.deadline / step_of(scenario)), 12)
    found = learned(scenario, nodes, np.zeros_like(nodes))
    assert found.starts.starts == 3 * 12
    assert found.outs >= 3
    assert found.lost == 0
