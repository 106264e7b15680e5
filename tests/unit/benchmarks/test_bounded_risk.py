"""A policy that may be late in some runs: what it saves, and that it knows nothing of its runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks import bounded_risk
from benchmarks.bounded_risk import TRACES, bounded, least_on_demand, rehearse, short
from shoal.errors import UsageError
from shoal.sizing.simulate.policies import Policy, Shoal
from shoal.sizing.simulate.replay import Supply, step_of, supply
from shoal.sizing.simulate.scenario import Scenario
from shoal.sizing.simulate.summary import run
from shoal.sizing.simulate.traces import read_trace


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    [
        "aws-p2-xlarge-89-hours.csv",
        "aws-p3-2xlarge-32-nodes.csv",
        "gcp-v100-24-hours.csv",
    ],
)
def test_stated_confidence_costs_less_than_certainty_where_slack_is_shorter_than_a_start(name: str) -> None:
    """The safety rule alone buys everything on-demand here: 0.9 to 1.06 of on-demand only."""
    scenario, trace = short(), read_trace(TRACES / name)
    dear = run(scenario, [trace], runs=200).outcome("on-demand only")
    ours = bounded(scenario, trace, 0.95, runs=200)
    assert np.mean(ours.finish <= scenario.deadline) >= 0.88  # the day of the last trace got worse
    assert np.mean(ours.cost) <= 0.85 * (dear.cost["mean"] or 0)


def test_no_run_meets_a_time_of_which_its_policy_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    long = short(0.5, 1.2)
    source = supply(
        [read_trace(TRACES / "aws-p3-2xlarge-32-nodes.csv")], step_of(long), 200, np.random.default_rng(0)
    )
    horizon, length = int(long.deadline / step_of(long)), int(source.lengths[0])
    seen: list[set[int]] = []

    def best(
        scenario: Scenario, rehearsed: Supply, confidence: float, horizon: int, seed: int
    ) -> Callable[[Supply], Policy]:
        seen.append({(int(first) + n) % length for first in rehearsed.offset for n in range(horizon)})
        return lambda _: Shoal()

    monkeypatch.setattr(bounded_risk, "_best", best)
    rehearse(long, source, 0.95)
    for first in source.offset:
        chosen = seen[0 if first * 2 >= length else 1]
        assert not chosen & {(int(first) + n) % length for n in range(horizon)}
    with pytest.raises(UsageError, match="at least 6 deadlines: give longer ones"):
        rehearse(short(100, 1.2), source, 0.95)


def test_least_on_demand_workers() -> None:
    rule = {"rate": 1.0, "left": 100.0, "startup": 10.0, "most": 16, "workers": 16}
    assert least_on_demand(0.0, there=0, **rule) == 0
    assert least_on_demand(180.0, there=0, **rule) == 2  # two new ones make 180 steps
    assert least_on_demand(181.0, there=0, **rule) == 3
    assert least_on_demand(200.0, there=2, **rule) == 2  # those that run need no start-up
    assert least_on_demand(900.0, there=0, spot=8.0, **rule) == 2  # spot is counted on for 800
    assert least_on_demand(1e9, there=0, **rule) == 16
    assert least_on_demand(np.array([0.0, 180.0]), there=np.zeros(2), **rule).tolist() == [0, 2]
