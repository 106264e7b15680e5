"""Jobs whose pods cannot be made take no nodes from the plans of others."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from dev.night import examples
from shoal.sizing.fleet import FleetJob, plan_fleet
from tests.unit.sizing.fleet.test_fleet import PROFILE, SPOT, STEADY, job
from tests.unit.sizing.fleet.test_shares import IDLE

POOLS = [replace(SPOT, limit=6), replace(STEADY, limit=6)]


@st.composite
def refused(draw: st.DrawFn) -> FleetJob:
    """Of any priority and wish, with and without a plan that it carries out."""
    known = draw(st.booleans())
    return job(
        "",
        model=PROFILE.model if known else None,
        priority=draw(st.integers(-1, 1)),
        min_workers=draw(st.sampled_from([1, 6])),
        max_workers=6,
        deadline_seconds=draw(st.sampled_from([60.0, 3600.0, None])),
        prefer=draw(st.sampled_from(["MinCost", "MinTime"])),
        planned=draw(st.sampled_from([{}, {"spot": 6}, {"spot": 1}, {"steady": 6}])),
        kept_to={"spot": 0, "steady": 0},
    )


@settings(max_examples=examples(6), deadline=None)
@given(
    st.lists(refused(), min_size=1, max_size=5),
    st.sampled_from(["MinCost", "MinTime"]),
    st.sampled_from([0, 4]),
)
def test_plan_of_a_job_is_what_it_would_be_without_those_whose_pods_are_refused(
    others: list[FleetJob], prefer: str, runs: int
) -> None:
    """They took all nodes: what each asks for was taken from what others were planned."""
    honest = job("honest", prefer=prefer, running={"steady": runs}, planned={"steady": runs})
    others = [replace(each, name=f"other-{number}") for number, each in enumerate(others)]
    alone = plan_fleet(POOLS, [IDLE], [honest]).jobs["honest"]
    assert plan_fleet(POOLS, [IDLE], [honest, *others]).jobs["honest"] == alone


def test_job_has_the_nodes_of_its_pods_while_more_are_refused() -> None:
    pools = [replace(STEADY, limit=8)]
    has = job("has", pools=("steady",), prefer="MinTime", deadline_seconds=None, running={"steady": 3}, priority=1,
              planned={"steady": 4}, kept_to={"steady": 3})  # fmt: skip
    other = job("other", pools=("steady",), prefer="MinTime", deadline_seconds=None)
    found = plan_fleet(pools, [IDLE], [has, other]).jobs
    assert found["other"].counts == {"steady": 5}
    assert found["has"].counts["steady"] >= 3
