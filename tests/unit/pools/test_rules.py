"""The rules of sizing, against a target whose size other hands may set too."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dev.night import examples
from shoal.api.base import Reason
from shoal.api.capacity_pool_status import Sized
from shoal.pools.rules import (
    BETWEEN_RESIZES,
    Decision,
    Pace,
    Target,
    Wish,
    decide,
    release,
)

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
PACE = Pace()
SECOND = timedelta(seconds=1)


def seconds(count: float) -> timedelta:
    return count * SECOND


def held(nodes: int, original: int = 1, **more: Any) -> Sized:
    return Sized(original_nodes=original, nodes=nodes, **more)


def test_it_grows_at_once_and_remembers_before_it_does() -> None:
    decision = decide(Wish(5, 16), None, Target(2), NOW, PACE)
    assert decision.resize == 5
    assert decision.memory == held(2, original=2, setting=5, resized_at=NOW)


def test_it_shrinks_late_to_the_highest_that_was_recommended_meanwhile() -> None:
    memory: Sized | None = held(9)
    for after, nodes in ((0, 3), (200, 7), (400, 2), (599, 2)):
        decision = decide(Wish(nodes, 16), memory, Target(9), NOW + seconds(after), PACE)
        assert decision.resize is None
        assert decision.why.reason == "ShrinksLater"
        memory = decision.memory
    assert decision.wait == seconds(1)
    decision = decide(Wish(2, 16), memory, Target(9), NOW + seconds(600), PACE)
    assert decision.resize == 7
    done = NOW + seconds(600)
    assert decision.memory == held(9, setting=7, resized_at=done, shrunk_at=done)


def test_a_recommendation_that_comes_back_stays_the_shrinking() -> None:
    memory = decide(Wish(3, 16), held(9), Target(9), NOW, PACE).memory
    memory = decide(Wish(9, 16), memory, Target(9), NOW + seconds(300), PACE).memory
    decision = decide(Wish(3, 16), memory, Target(9), NOW + seconds(600), PACE)
    assert (decision.resize, decision.wait) == (None, seconds(600))


def test_one_resize_in_two_minutes() -> None:
    memory = held(5, resized_at=NOW)
    early = decide(Wish(8, 16), memory, Target(5), NOW + seconds(119), PACE)
    assert (early.resize, early.wait, early.why.reason) == (None, SECOND, "Waits")
    assert decide(Wish(8, 16), memory, Target(5), NOW + seconds(120), PACE).resize == 8


@pytest.mark.parametrize(
    ("wish", "target", "resize"),
    [
        (Wish(20, 16), Target(2), 16),
        (Wish(20, 16), Target(2, maximum=6), 6),
        (Wish(20, 16), Target(2, step=3), 15),
        (Wish(4, 16), Target(3, step=3), 6),
        (Wish(1, 16), Target(1, minimum=2), 2),
    ],
    ids=["the pool's limit", "the target's maximum", "steps under the limit", "steps", "its minimum"],
)
def test_sizes_keep_to_every_limit(wish: Wish, target: Target, resize: int) -> None:
    assert decide(wish, held(target.nodes), target, NOW, PACE).resize == resize


def test_nodes_that_were_there_stay_until_a_job_has_used_the_pool() -> None:
    """Ten minutes after a group of other teams' nodes was named it was empty."""
    memory: Sized | None = None
    for after in (0, 700, 1400):
        decision = decide(Wish(0, 16, least=None), memory, Target(10), NOW + seconds(after), PACE)
        assert (decision.resize, decision.scaled, decision.why.reason) == (None, True, "NotUsedYet")
        memory = decision.memory
    assert memory is not None
    grown = memory.model_copy(update={"nodes": 12})
    later = decide(Wish(0, 16, least=None), grown, Target(12), NOW, PACE).memory
    assert decide(Wish(0, 16, least=None), later, Target(12), NOW + seconds(600), PACE).resize == 10
    assert decide(Wish(3, 16, least=None), memory, Target(10), NOW, PACE).resize == 13, (
        "what runs there may be others'"
    )
    assert decide(Wish(3, 16, least=None), held(13, original=10), Target(13), NOW, PACE).scaled
    above: Sized | None = None
    for after in (0, 700, 1400):
        limited = decide(Wish(3, 5, least=None), above, Target(10), NOW + seconds(after), PACE)
        assert (limited.resize, limited.scaled) == (None, True), "they are more than the limit"
        above = limited.memory
    used = decide(Wish(0, 16), memory, Target(10), NOW, PACE).memory
    assert decide(Wish(0, 16), used, Target(10), NOW + seconds(600), PACE).resize == 0


@pytest.mark.parametrize(("nodes", "step"), [(0, 1), (4, 3), (9, 1)])
def test_what_was_found_makes_no_pool_larger(nodes: int, step: int) -> None:
    decision = decide(Wish(0, 16, least=None), held(nodes, original=10), Target(nodes, step=step), NOW, PACE)
    assert (decision.resize, decision.scaled) == (None, True)


@pytest.mark.parametrize(
    ("target", "resize"), [(Target(1), 4), (Target(1, maximum=3), 3), (Target(4), None), (Target(7), 4)]
)
def test_a_pool_has_no_fewer_nodes_than_its_least_if_it_may_have_them(
    target: Target, resize: int | None
) -> None:
    pace = Pace(shrink_after=timedelta(0))
    assert decide(Wish(0, 16, least=4), held(target.nodes), target, NOW, pace).resize == resize


def test_limits_that_exclude_each_other_are_named() -> None:
    decision = decide(Wish(3, 4), held(6), Target(6, minimum=5, maximum=9), NOW, PACE)
    assert (decision.resize, decision.why.reason) == (None, "NoSizeAllowed")
    assert "at most 4 nodes are allowed by spec.limits.nodes, and at least 5" in decision.why.message


def test_a_size_of_somebody_else_stops_everything_until_it_is_back() -> None:
    memory = held(5, lower_since=NOW - seconds(500), highest=4)
    stopped = decide(Wish(8, 16), memory, Target(7), NOW, PACE)
    assert stopped.resize is None
    assert stopped.conflict is not None
    assert stopped.conflict.reason == "SizeChanged"
    assert "set 7 nodes where Shoal had set 5" in stopped.conflict.message
    assert stopped.memory == held(5)
    resumed = decide(Wish(8, 16), stopped.memory, Target(5), NOW, PACE)
    assert (resumed.conflict, resumed.resize) == (None, 8)


def test_a_write_whose_answer_was_lost_is_recognized() -> None:
    memory = decide(Wish(8, 16), held(5), Target(5), NOW, PACE).memory
    done = decide(Wish(8, 16), memory, Target(8), NOW + SECOND, PACE)
    assert (done.conflict, done.scaled) == (None, True)
    assert done.memory == held(8, resized_at=NOW)
    undone = decide(Wish(8, 16), memory, Target(5), NOW + seconds(120), PACE)
    assert undone.resize == 8


@pytest.mark.parametrize("memory", [None, held(5)])
def test_an_autoscaler_is_never_fought(memory: Sized | None) -> None:
    active = Reason("AutoscalerActive", "turn it off")
    decision = decide(Wish(8, 16), memory, Target(5, sized_by=active), NOW, PACE)
    assert (decision.conflict, decision.resize, decision.memory) == (active, None, memory)


@pytest.mark.parametrize("memory", [None, held(5)])
def test_an_old_recommendation_is_not_followed(memory: Sized | None) -> None:
    stale = Reason("Stale", "the operator does not run")
    decision = decide(Wish(8, 16, stale), memory, Target(5), NOW, PACE)
    assert (decision.why, decision.resize, decision.memory) == (stale, None, memory)


def test_time_without_recommendations_does_not_count_for_shrinking() -> None:
    memory = decide(Wish(3, 16), held(9), Target(9), NOW, PACE).memory
    memory = decide(Wish(3, 16, Reason("Stale", "")), memory, Target(9), NOW + seconds(300), PACE).memory
    assert decide(Wish(3, 16), memory, Target(9), NOW + seconds(700), PACE).wait == PACE.shrink_after


def test_a_clock_that_was_set_back_lets_it_shrink_no_later() -> None:
    ahead = held(9, lower_since=NOW + timedelta(hours=6), highest=9)
    decision = decide(Wish(3, 16), ahead, Target(9), NOW, PACE)
    assert (decision.resize, decision.wait) == (None, PACE.shrink_after)
    assert decide(Wish(3, 16), decision.memory, Target(9), NOW + PACE.shrink_after, PACE).resize == 3


@pytest.mark.parametrize("nodes", [5, 4, 7])
def test_while_it_changes_nothing_is_sent_and_no_size_is_somebody_elses(nodes: int) -> None:
    """GKE grows a regional pool zone by zone, and has nodes beside for an upgrade: both were a FieldConflict."""
    memory = held(3, setting=6)
    decision = decide(Wish(8, 16), memory, Target(nodes, busy="RECONCILING"), NOW, PACE)
    assert (decision.resize, decision.conflict, decision.unsure) == (None, None, True)
    assert (decision.why, decision.memory) == (Reason("Busy", "RECONCILING"), memory)
    leaving = release(memory, Target(nodes, busy="RECONCILING"), NOW, PACE)
    assert (leaving.resize, leaving.conflict, leaving.ended) == (None, None, False)
    theirs = Target(nodes, busy="RECONCILING", sized_by=Reason("AutoscalerActive", "turn it off"))
    assert decide(Wish(8, 16), memory, theirs, NOW, PACE).conflict == theirs.sized_by


def test_it_does_not_shrink_while_a_node_that_is_in_use_may_be_taken() -> None:
    """Of eight nodes with five in use, a size of five took two or so that trained, and perhaps the servers."""
    since, late = NOW - seconds(900), NOW
    memory = held(8, lower_since=since, highest=5)
    kept = decide(Wish(5, 16, in_use=5), memory, Target(8), late, PACE)
    assert (kept.resize, kept.why.reason, kept.memory) == (None, "NodesInUse", held(8))
    assert decide(Wish(9, 16, in_use=5), memory, Target(8), late, PACE).resize == 9
    idle = decide(Wish(5, 16), memory, Target(8), late, PACE)
    assert idle.resize == 5
    assert idle.memory is not None
    assert idle.memory.shrunk_at == late
    assert decide(Wish(5, 16, in_use=5), memory, Target(8, empty_first=True), late, PACE).resize == 5


def test_release_gives_back_the_size_that_was_found() -> None:
    memory = held(8, original=2, resized_at=NOW)
    waits = release(memory, Target(8), NOW + seconds(60), PACE)
    assert (waits.resize, waits.wait, waits.ended) == (None, seconds(60), False)
    gives = release(memory, Target(8), NOW + seconds(120), PACE)
    assert gives.resize == 2
    assert gives.memory is not None
    assert release(gives.memory, Target(2), NOW + seconds(121), PACE).ended


def test_release_leaves_the_size_of_somebody_else_until_it_is_back() -> None:
    decision = release(held(8, original=2), Target(4), NOW, PACE)
    assert (decision.ended, decision.resize, decision.why.reason) == (False, None, "LeftAsItIs")
    assert release(held(8, original=2), Target(8), NOW, PACE).resize == 2


@given(original=st.integers(0, 20), nodes=st.integers(0, 20), step=st.integers(1, 4))
def test_what_has_a_multiple_of_nodes_is_given_back_at_once_with_as_many_or_a_few_more(
    original: int, nodes: int, step: int
) -> None:
    """Found with 3 + 2 + 2 nodes, it was told to have 7, got 6, and that was taken for somebody else's doing."""
    target = Target(nodes, step=step)
    decision = release(held(nodes, original), target, NOW, PACE)
    if decision.resize is not None:
        assert decision.memory is not None
        assert decision.resize % step == 0
        target = Target(decision.resize, step=step)
        decision = release(decision.memory, target, NOW + SECOND, PACE)
    assert decision.ended
    assert original <= target.nodes < original + step
    assert (f"it was found with {original}" in decision.why.message) == (target.nodes != original)


def test_what_still_has_the_uneven_size_that_it_was_found_with_is_left_so() -> None:
    assert release(held(7, original=7), Target(7, step=3), NOW, PACE).ended


@given(
    original=st.integers(0, 20),
    nodes=st.integers(0, 20),
    minimum=st.integers(0, 6),
    maximum=st.none() | st.integers(6, 20),
)
def test_release_keeps_to_the_targets_limits(
    original: int, nodes: int, minimum: int, maximum: int | None
) -> None:
    target = Target(nodes, minimum=minimum, maximum=maximum)
    decision = release(held(nodes, original), target, NOW, PACE)
    given_back = nodes if decision.resize is None else decision.resize
    assert minimum <= given_back <= (20 if maximum is None else maximum)
    assert given_back == original or original < minimum or original > (maximum or 20)


class Sizing(RuleBasedStateMachine):
    """A target, what writes to it, and a clock. The process may die before or after a write."""

    LIMIT = 12

    def __init__(self) -> None:
        super().__init__()
        self.now = NOW
        self.nodes = 2
        self.theirs = False
        self.wish = 2
        self.memory: Sized | None = None
        self.writes: list[tuple[datetime, int, int]] = []
        self.lower_for = timedelta(0)

    @rule(after=st.integers(0, 900))
    def time_passes(self, after: int) -> None:
        self.now += seconds(after)

    @rule(nodes=st.integers(0, 20))
    def the_plan_changes(self, nodes: int) -> None:
        self.wish = nodes

    @rule(nodes=st.integers(0, 12))
    def somebody_else_sets_it(self, nodes: int) -> None:
        ours = {2} if self.memory is None else {self.memory.nodes, self.memory.setting}
        self.nodes = nodes
        self.theirs = self.memory is not None and nodes not in ours

    @precondition(lambda self: self.theirs)
    @rule()
    def they_set_it_back(self) -> None:
        assert self.memory is not None
        self.nodes, self.theirs = self.memory.nodes, False

    @rule(dies=st.sampled_from(["", "before", "after"]), asks=st.booleans())
    def it_reconciles(self, dies: str, asks: bool) -> None:
        decision = self.decision()
        self.memory = decision.memory
        if decision.resize is None or dies == "before":
            return
        self.writes.append((self.now, self.nodes, decision.resize))
        self.nodes = decision.resize
        if dies != "after":
            self.memory = self.decision().memory

    def decision(self) -> Decision:
        return decide(Wish(self.wish, self.LIMIT), self.memory, Target(self.nodes), self.now, PACE)

    @invariant()
    def nobody_is_fought(self) -> None:
        if self.theirs:
            decision = self.decision()
            assert decision.resize is None
            assert decision.conflict is not None

    @invariant()
    def limits_are_kept(self) -> None:
        assert all(after <= self.LIMIT for _, _, after in self.writes)

    @invariant()
    def resizes_are_two_minutes_apart(self) -> None:
        times = [at for at, _, _ in self.writes]
        assert all(two - one >= BETWEEN_RESIZES for one, two in itertools.pairwise(times))

    @invariant()
    def it_ends_at_the_recommended_size(self) -> None:
        """From any state that nobody else made, in at most two resizes."""
        if self.theirs:
            return
        memory, nodes, now = self.memory, self.nodes, self.now
        for _ in range(12):
            decision = decide(Wish(self.wish, self.LIMIT), memory, Target(nodes), now, PACE)
            memory, nodes = decision.memory, nodes if decision.resize is None else decision.resize
            now += decision.wait or SECOND
        assert nodes == min(self.wish, self.LIMIT)


TestSizing = Sizing.TestCase
TestSizing.settings = settings(max_examples=examples(60), stateful_step_count=25, deadline=None)
