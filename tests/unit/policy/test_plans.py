"""Plans of the pools' workers: how they are adopted, changed and carried out, whatever happens."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dev.night import examples
from shoal.manifests.names import budget_name
from shoal.policy.plan import plan
from tests.unit.policy.pools import AUTO, EXHAUSTED, FALLBACK, Pools, auto, pool


def test_auto_begins_with_replicas_and_carries_a_proposal_out() -> None:
    world = auto()
    assert world.by_pool() == {"a": 2}
    assert world.condition("PlanReady")["reason"] == "Waiting"
    world.propose(
        {"a": 3, "b": 2}, reason="two b nodes keep the deadline", finish_time=world.now, cost=12.345
    )
    made = world.reconcile()
    assert "a -> " in next(e.message for e in made.events if e.reason == "PlanChanged")
    world.settle()
    assert world.by_pool() == {"a": 3, "b": 2}
    told = world.status["plan"]
    assert (told["revision"], told["summary"], told["cost"]) == (2, "3 a, 2 b", "12.35")
    assert told["reason"] == "two b nodes keep the deadline"
    assert world.condition("PlanReady")["status"] == "True"
    assert world.status["workers"]["desired"] == 5
    assert world.status["restarts"]["disruptions"] == 0


def test_job_that_runs_has_a_disruption_budget() -> None:
    world = auto()
    assert budget_name(world.job) in world.existing


@pytest.mark.parametrize(
    ("counts", "age", "urgent", "adopted"),
    [
        ({"a": 3}, 29, False, False),
        ({"a": 3}, 31, False, True),
        ({"a": 1}, 299, False, False),
        ({"a": 1}, 301, False, True),
        ({"a": 3}, 0, True, True),
    ],
)
def test_plans_grow_soon_and_shrink_late(
    counts: dict[str, int], age: int, urgent: bool, adopted: bool
) -> None:
    world = auto()
    world.propose(counts, age=age, urgent=urgent)
    world.reconcile()
    assert (world.status["plan"]["pools"] == counts) is adopted
    if not adopted:
        assert world.last_plan is not None
        assert world.last_plan.wake_after is not None
        assert world.last_plan.wake_after <= 300


def test_shrink_that_changes_a_little_each_minute_is_carried_out_as_far_as_all_agree() -> None:
    """What is to last is the wish for fewer workers, and not the number of them."""
    world = auto(replicas=8)
    plans = world.propose_each_minute(*({"a": count} for count in (7, 6, 7, 6, 5, 6, 4, 3, 3)))
    assert plans == [*[{"a": 8}] * 5, {"a": 7}, {"a": 7}, {"a": 7}, {"a": 6}]
    assert "the last 300 s" in world.status["plan"]["reason"]
    (plan,) = world.propose_each_minute({"a": 8})
    assert plan == {"a": 6}, "the wish to shrink has ended, and that to grow has only begun"


def test_growth_that_changes_more_often_than_it_must_hold_is_carried_out_as_far_as_all_agree() -> None:
    world = auto(elasticity={**AUTO, "stabilizationSeconds": {"up": 150, "down": 300}})
    plans = world.propose_each_minute(*({"a": count} for count in (4, 5, 6, 7, 8)))
    assert plans == [*[{"a": 2}] * 3, {"a": 4}, {"a": 5}]


def test_move_that_changes_a_little_each_minute_is_carried_out_as_far_as_all_agree() -> None:
    world = auto(replicas=8)
    plans = world.propose_each_minute(*({"a": 7 - n, "b": 1 + n} for n in range(7)))
    assert plans == [*[{"a": 8}] * 5, {"a": 7, "b": 1}, {"a": 6, "b": 2}]


def test_worker_that_some_plans_keep_in_one_pool_and_some_in_another_leaves_at_last() -> None:
    """All wish for fewer: which ones, the newest says."""
    world = auto(replicas=4)
    world.propose({"a": 4, "b": 4})
    world.settle()
    plans = world.propose_each_minute(*({"a": 4} if n % 2 else {"b": 4} for n in range(7)))
    assert plans == [*[{"a": 4, "b": 4}] * 5, {"a": 4}, {"a": 4}]


def test_plan_is_one_worker_above_what_a_full_resource_quota_lets_the_job_have() -> None:
    """The nodes of the others are left to other jobs. The one is tried, and shows when there is room again."""
    world = auto(nodes={"a": 6, "b": 6})
    world.quota = len(world.pods) + 2
    world.propose({"a": 4, "b": 4}, reason="eight keep the deadline")
    world.settle()
    assert world.by_pool() == {"a": 4}
    assert world.status["plan"]["pools"] == {"a": 4, "b": 1}
    assert "ResourceQuota" in world.status["plan"]["reason"]
    assert world.condition("QuotaExceeded")["status"] == "True"
    revision = world.status["plan"]["revision"]
    for _ in range(30):
        world.tick(seconds=6)
        world.propose({"a": 4, "b": 4}, reason="eight keep the deadline")
        world.settle()
        assert world.condition("QuotaExceeded")["status"] == "True"
    assert world.status["plan"]["revision"] == revision, "it does not change again and again"
    assert world.by_pool() == {"a": 4}
    assert world.status["restarts"]["disruptions"] == 0
    world.quota = None
    world.tick(seconds=60)
    world.settle()
    world.settle()
    assert world.by_pool() == {"a": 4, "b": 4}
    assert world.status["plan"]["reason"] == "eight keep the deadline"
    assert world.condition("QuotaExceeded")["status"] == "False"


def test_workers_that_a_full_quota_keeps_from_moving_stay_as_they_are() -> None:
    world = auto(nodes={"a": 6, "b": 6})
    world.quota = len(world.pods)
    world.propose({"b": 2})
    for _ in range(20):
        world.tick(seconds=6)
        world.settle()
        assert sum(world.by_pool().values()) >= 1
    assert sum(world.status["plan"]["pools"].values()) == 2


def test_plan_that_fails_for_ignorance_waits_for_a_measurement() -> None:
    world = auto()
    world.propose({"a": 2, "od": 4}, feasible=False, measured=False)
    world.settle()
    assert world.by_pool() == {"a": 2}
    world.propose(
        {"a": 3}, feasible=True, measured=False
    )  # but a guess that keeps the limits is as good as any
    world.settle()
    assert world.by_pool() == {"a": 3}
    world.propose({"a": 3, "od": 4}, feasible=False, measured=False)
    world.tick(seconds=601)
    world.settle()
    assert world.by_pool() == {"a": 3, "od": 4}  # none came


def test_plan_leaves_an_exhausted_pool_in_which_workers_wait_without_delay() -> None:
    """Nobody is disturbed by it; while a stabilization time passed, a job without a node would stand still."""
    world = auto(nodes={"a": 1, "b": 3})
    assert world.by_pool() == {"a": 1}  # the second worker waits
    world.pools["a"] = pool("a", status=EXHAUSTED)
    world.propose({"a": 1, "b": 2}, age=0)
    world.settle()
    assert world.by_pool() == {"a": 1, "b": 2}
    world.propose({"b": 2}, age=0)  # a worker that has its node is not left at once
    world.settle()
    assert world.by_pool() == {"a": 1, "b": 2}


def test_plan_that_waits_for_an_exhausted_pool_with_fewer_workers_shrinks_late() -> None:
    """It leaves the pool for no other: a request less helps nobody, and the next plan may want it again."""
    world = auto(nodes={"a": 1, "b": 3})
    world.pools["a"] = pool("a", status=EXHAUSTED)
    world.propose({"a": 1}, age=0)
    world.settle()
    assert world.status["plan"]["pools"] == {"a": 2}
    world.propose({"a": 1}, age=301)
    world.settle()
    assert world.status["plan"]["pools"] == {"a": 1}


def test_workers_that_are_too_many_work_until_the_others_have_their_nodes() -> None:
    """A plan of fewer workers, all of them in a pool that was just taken, would leave the job without any."""
    world = auto(nodes={"a": 2, "od": 2})
    world.propose({"a": 2, "od": 2})
    world.settle()
    assert world.by_pool() == {"a": 2, "od": 2}
    for node in ("a-0", "a-1"):
        world.notice(node)
    world.propose({"a": 2})
    world.settle()
    world.tick(seconds=61)
    world.settle()
    assert world.by_pool() == {"od": 2}
    assert world.status["plan"]["pools"] == {"a": 2}
    assert world.status["workers"]["desired"] == 2
    world.add("a-2", "a")
    world.settle()
    assert world.by_pool() == {"a": 1, "od": 1}
    world.add("a-3", "a")
    world.settle()
    assert world.by_pool() == {"a": 2}
    assert world.status["restarts"]["disruptions"] == 2


def test_workers_that_are_too_many_work_until_those_that_move_have_their_nodes() -> None:
    """A plan of fewer workers in another pool would leave the job with those that move, while that has no node."""
    world = auto(nodes={"od": 2})
    world.propose({"od": 2})
    world.settle()
    world.propose({"a": 1})
    world.settle()
    world.tick(seconds=61)
    world.settle()
    assert world.by_pool() == {"od": 2}
    assert (world.status["plan"]["pools"], world.status["workers"]["desired"]) == ({"a": 1}, 1)
    world.add("a-0", "a")
    world.settle()
    assert world.by_pool() == {"a": 1}
    assert world.status["restarts"]["disruptions"] == 0


def test_shrinking_drains_the_worker_of_least_speed_for_its_price() -> None:
    world = auto()
    world.propose({"a": 2, "b": 2})
    world.settle()
    world.propose({"a": 2, "b": 1}, speeds={"a": 10.0, "b": 10.0})
    world.settle()
    assert world.by_pool() == {"a": 2, "b": 1}
    assert world.status["restarts"]["disruptions"] == 0


def test_move_to_another_pool_is_make_before_break() -> None:
    world = auto(replicas=1)
    world.propose({"b": 1})
    world.reconcile()
    world.tick()
    world.reconcile()
    assert world.by_pool() == {"a": 1}  # it works until its successor runs
    world.tick()
    world.reconcile()
    world.settle()
    assert world.by_pool() == {"b": 1}
    assert world.status["restarts"] == {"failures": 0, "disruptions": 0, "byReason": {}}


def test_move_that_is_revoked_keeps_the_worker() -> None:
    world = auto(replicas=1)
    for node in [n for n in world.nodes if n.startswith("b-")]:
        del world.nodes[node]
    world.propose({"b": 1})
    world.reconcile()
    world.tick()
    world.reconcile()
    world.propose({"a": 1})
    world.settle()
    assert "digits-worker-0-0" in world.pods
    assert world.by_pool() == {"a": 1}
    assert world.status["restarts"] == {"failures": 0, "disruptions": 0, "byReason": {}}


def test_plan_never_exceeds_limits_and_max_replicas() -> None:
    world = auto(maxReplicas=12)
    world.propose({"a": 50, "b": 50})
    world.reconcile()
    assert world.status["plan"]["pools"] == {"a": 10, "b": 2}


def test_plan_takes_no_nodes_that_other_jobs_have_and_gives_none_up_for_them() -> None:
    world = auto()
    world.elsewhere = {"a": 7}
    world.propose({"a": 5})
    world.settle()
    assert world.by_pool() == {"a": 3}
    world.elsewhere = {
        "a": 8
    }  # by a race, or by a limit that was lowered: what leaves is the planner's choice
    world.now += timedelta(seconds=600)
    world.settle()
    assert world.by_pool() == {"a": 3}
    world.elsewhere = {}
    world.settle()
    assert world.by_pool() == {"a": 5}


def test_job_begins_where_other_jobs_leave_room() -> None:
    world = Pools(pool("a", limit=2), pool("b"), nodes={"a": 2, "b": 5}, replicas=2)
    world.elsewhere = {"a": 1}
    world.settle()
    assert world.by_pool() == {"a": 1, "b": 1}
    full = Pools(pool("a", limit=2), nodes={"a": 2}, replicas=2)
    full.elsewhere = {"a": 1}
    full.settle()
    assert "other jobs have 1 of their nodes" in full.condition("Degraded")["message"]


def test_advice_changes_nothing_but_is_told() -> None:
    world = Pools(
        pool("a"), pool("b"), nodes={"a": 5, "b": 5}, replicas=2, elasticity={"mode": "Advise"}
    ).settled()
    world.propose(
        {"b": 4}, reason="twice as fast", samples_per_second=123.4, relative_error=0.05, basis="measured"
    )
    made = world.reconcile()
    assert "PlanChanged" in {e.reason for e in made.events}
    world.settle()
    assert world.by_pool() == {"a": 2}
    assert world.status["plan"]["pools"] == {"b": 4}
    assert world.status["prediction"] == {
        "samplesPerSecond": "123.4",
        "relativeError": "0.05",
        "basis": "measured",
    }
    assert world.reconcile().events == ()


@pytest.mark.parametrize("planned", [True, False])
def test_pace_of_the_workers_is_forgotten_while_the_job_is_suspended(planned: bool) -> None:
    """A week later it was that of its workers still: 30 of them for 9, before one had begun."""
    world = auto()
    world.propose({"a": 2}, samples_per_second=100.0, relative_error=3.0, watched_seconds=90.0)
    world.settle()
    assert world.status["prediction"]["watchedSeconds"] == 90
    world.manifest["spec"]["suspend"] = True
    if not planned:  # nobody plans it, but a plan from before is still there
        world.proposal = None
    world.settle()
    assert not world.pods
    assert world.status["prediction"] == {"samplesPerSecond": "100", "basis": ""}


def test_finish_is_told_to_the_minute_and_never_in_the_past() -> None:
    """A job of minutes read that it had finished a while ago."""
    world = auto()
    world.propose({"a": 2}, finish_time=world.now + timedelta(seconds=100))
    finish = world.now + timedelta(minutes=2)
    for _ in range(20):
        world.tick(seconds=7)
        world.settle()
        told = datetime.fromisoformat(world.status["plan"]["finishTime"])
        assert (told.second, told) >= (0, world.now)
        assert told - max(finish, world.now) < timedelta(minutes=1)


def test_finish_of_counts_that_are_no_longer_proposed_is_told_until_it_has_passed() -> None:
    """Those that are proposed have to last before they are carried out; what they give is not what runs."""
    world = auto()
    world.propose({"a": 2}, finish_time=world.now + timedelta(seconds=100))
    world.reconcile()
    told = world.status["plan"]["finishTime"]
    world.propose({"a": 1}, age=0, finish_time=world.now + timedelta(seconds=300))
    world.tick(seconds=60)
    world.settle()
    assert world.status["plan"]["finishTime"] == told
    world.tick(seconds=100)
    world.settle()
    assert world.status["plan"]["pools"] == {"a": 2}
    assert world.status["plan"].get("finishTime") is None


@pytest.mark.parametrize("known", ["", "the model is not known yet"])
def test_reason_is_that_of_the_first_plan_that_knows_when_the_job_ends(known: str) -> None:
    """The counts stay what they were, so the first words stayed until its end: of what nobody knew yet."""
    world = auto()
    if known:
        world.propose({"a": 2}, reason=known, feasible=False)
        world.reconcile()
    world.propose({"a": 2}, reason="two keep the deadline", finish_time=world.now + timedelta(hours=1))
    world.reconcile()
    assert world.status["plan"]["reason"] == "two keep the deadline"


def test_plan_that_confirms_what_the_job_began_with_says_why() -> None:
    """It said until its end that the planner knows nothing yet."""
    world = auto()
    assert "until the planner knows more" in world.status["plan"]["reason"]
    finish = world.now + timedelta(hours=1)
    world.propose({"a": 2}, reason="two keep the deadline", finish_time=finish)
    made = world.reconcile()
    assert world.status["plan"]["reason"] == "two keep the deadline"
    assert "PlanChanged" not in {e.reason for e in made.events}
    revision = world.status["plan"]["revision"]
    world.propose({"a": 2}, reason="two keep the deadline, in 43 min", finish_time=finish)
    world.reconcile()
    assert world.status["plan"]["reason"] == "two keep the deadline", "its figures change each minute"
    assert world.status["plan"]["revision"] == revision


def test_plan_with_fewer_workers_than_the_least_is_not_carried_out() -> None:
    world = auto(minReplicas=1)
    world.propose({}, reason="no pool has a price")
    world.settle()
    assert world.by_pool() == {"a": 2}
    assert "no pool has a price" in world.condition("PlanReady")["message"]


@pytest.mark.parametrize("proposed", [False, True])
def test_workers_of_a_planned_pool_that_is_not_seen_stay(proposed: bool) -> None:
    """It may be deleted only to be made again."""
    world = auto()
    world.propose({"a": 2, "b": 2})
    world.settle()
    if not proposed:
        world.proposal = None
    b = world.pools.pop("b")
    for _ in range(3):
        world.reconcile()
        world.tick()
    assert world.by_pool() == {"a": 2, "b": 2}
    world.pools["b"] = b
    world.settle()
    assert world.status["plan"]["revision"] == 2


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize("proposed", [None, {"a": 4}, {"a": 2, "b": 2}, {"b": 3}])
def test_workers_move_out_of_a_pool_that_leaves_the_job_when_their_successors_run(
    proposed: dict[str, int] | None, least: int
) -> None:
    """The planner has not heard of the change yet, or has: no worker ends before its successor runs."""
    world = auto(replicas=4, minReplicas=least, pools=["a"])
    assert world.by_pool() == {"a": 4}
    if proposed is not None:
        world.propose(proposed, age=0)
    world.manifest["spec"]["workers"]["pools"] = ["b"]
    for _ in range(12):
        world.reconcile()
        assert sum(world.status["plan"]["pools"].values()) == 4
        assert world.at_work() == 4
        world.tick(0.5)
    world.settle()
    assert world.by_pool() == {"b": 4}
    assert "workers.pools" in world.status["plan"]["reason"]
    assert world.status["restarts"] == {"failures": 0, "disruptions": 0, "byReason": {}}


def test_workers_follow_the_first_server_to_another_zone() -> None:
    zones = {"a": "z1", "b": "z2"}
    world = Pools(
        *(pool(name, zone=zone) for name, zone in zones.items()),
        nodes={"a": 4, "b": 4}, replicas=2, zonePolicy="Same", elasticity=AUTO,
    )  # fmt: skip
    for node, zone in (("safe-0", "z1"), ("safe-1", "z2")):
        world.nodes[node]["metadata"]["labels"]["topology.kubernetes.io/zone"] = zone
    world.settle()
    assert world.by_pool() == {"a": 2}
    world.propose({"a": 2})
    world.notice("safe-0")
    world.settle()
    assert world.by_pool() == {"b": 2}


def test_proposal_with_the_new_pools_decides_where_workers_of_a_pool_that_leaves_go() -> None:
    world = auto(replicas=4, pools=["a"])
    world.manifest["spec"]["workers"]["pools"] = ["b", "od"]
    world.propose({"od": 5}, age=0)
    world.settle()
    assert world.by_pool() == {"od": 5}
    assert not any(
        pod["spec"]["nodeSelector"] == {"pool": "b"}
        for pod in world.pods.values()
        if "nodeSelector" in pod["spec"]
    )


def test_infeasible_plan_is_told() -> None:
    world = auto()
    world.propose({"a": 10}, feasible=False, reason="the deadline cannot be kept: limits.nodes of a binds")
    world.reconcile()
    ready = world.condition("PlanReady")
    assert (ready["status"], ready["reason"]) == ("False", "NotFeasible")
    assert "limits.nodes of a binds" in ready["message"]


# --- whatever happens -------------------------------------------------------------------------------------------------

counts = st.fixed_dictionaries({}, optional={name: st.integers(0, 6) for name in ("a", "b", "od")})
turns = st.lists(
    st.tuples(
        st.sampled_from(["propose", "pools", "notice", "exit", "vanish", "tick", "wait", "crash"]),
        counts,
        st.integers(0, 99),
    ),
    max_size=20,
)  # fmt: skip


@settings(max_examples=examples(80), deadline=None)
@given(turns)
def test_workers_end_where_the_plan_says_whatever_happens(
    steps: list[tuple[str, dict[str, int], int]],
) -> None:
    world = auto(maxReplicas=8, minReplicas=0)
    taken = 0
    for step, proposed, number in steps:
        names = [n for n in sorted(world.pods) if "-worker-" in n]
        name = names[number % len(names)] if names else None
        match step:
            case "propose":
                world.propose(proposed)
            case "pools":
                world.manifest["spec"]["workers"]["pools"] = list(proposed) or ["a", "b", "od"]
            case "notice" if name and (node := world.pods[name]["spec"].get("nodeName")):
                world.notice(node)
            case "exit" if name:
                world.kill_pod(name, 1)
            case "vanish" if name:
                world.vanish(name)
            case "tick":
                world.tick()
            case "wait":
                world.tick(seconds=61)
        if step == "crash":
            world.reconcile(crash_after=number % 4)
            continue
        world.reconcile()
        planned = world.status["plan"]["pools"]
        assert planned.keys() <= set(world.manifest["spec"]["workers"]["pools"])
        assert sum(planned.values()) <= 8
        assert world.status["workers"]["desired"] == sum(planned.values())
        taken = len([n for n in world.taken if "-worker-" in n])
        assert sum(world.status["restarts"]["byReason"].values()) <= taken, "a move was counted"
    world.heal()
    for _ in range(8):
        world.tick(seconds=61)
        world.reconcile()
    world.settle()
    assert world.by_pool() == world.status["plan"]["pools"]


moderate = st.fixed_dictionaries({name: st.integers(0, 3) for name in ("a", "b", "od")}).filter(
    lambda counts: sum(counts.values()) > 0
)


@settings(max_examples=examples(100), deadline=None)
@given(
    moderate, st.lists(moderate, min_size=1, max_size=3), st.sampled_from([0, 1, "100%"]), st.integers(0, 3)
)
def test_plan_that_goes_back_before_others_run_takes_its_workers_back(
    first: dict[str, int], others: list[dict[str, int]], surge: int | str, ticks: int
) -> None:
    """Wherever plans went meanwhile, whoever still works where the plan wants somebody again stays."""
    world = auto(maxReplicas=9, minReplicas=0, maxSurge=surge)
    world.propose(first)
    world.settle()
    before = {n for n, p in world.pods.items() if "-worker-" in n and p["status"]["phase"] == "Running"}
    for node in set(world.nodes):
        if world.nodes[node]["metadata"]["labels"].get("pool") and not world._on(node):
            del world.nodes[node]  # nothing else starts
    for other in others:
        world.propose(other)
        for _ in range(ticks + 1):
            world.reconcile()
            world.tick(1.0)
    still = {n for n in before if n in world.pods and not world.pods[n]["metadata"].get("deletionTimestamp")}
    world.propose(first)
    for _ in range(3):
        world.reconcile()
        world.tick(1.0)
    kept = {n for n in still if n in world.pods and not world.pods[n]["metadata"].get("deletionTimestamp")}
    assert still == kept


def moving() -> tuple[Pools, str, str]:
    """A worker that trains while its successor waits for a node of another pool; the names of both."""
    world = auto(nodes={"b": 1, "od": 0}, replicas=1, maxSurge=1)
    world.propose({"b": 1})
    world.settle()
    [old] = (name for name in world.pods if "-worker-" in name)
    world.propose({"od": 1}, urgent=True)
    world.settle()
    [new] = (name for name in world.pods if "-worker-" in name and name != old)
    return world, old, new


@pytest.mark.parametrize("seen_to_wait", [True, False])
def test_successor_that_runs_as_the_plan_goes_back_is_taken_back_from_a_worker_at_work(
    seen_to_wait: bool,
) -> None:
    """It was to move until one ran that was not made, as the worker before it had its place: both were paid for."""
    world, _, new = moving()
    world.propose({"b": 1}, urgent=True)
    if seen_to_wait:
        made = plan(world.observation())
        assert [slot.cause for slot in made.status.slots if slot.role == "worker"] == ["", "Outdated"]
        world.status = made.status.model_dump(mode="json", by_alias=True, exclude_none=True)
    world.add("od-0", "od")
    world.pods[new]["spec"]["nodeName"] = "od-0"
    world.pods[new]["status"] = {"phase": "Running"}
    world.settle()
    assert (world.by_pool(), world.deleted[-1]) == ({"b": 1}, new)
    assert not world.status["restarts"].get("byReason")


@pytest.mark.parametrize(("heard", "again"), [(True, False), (False, True), (False, False)])
def test_successor_that_runs_is_not_taken_back_from_a_worker_that_hangs_or_is_not_heard(
    heard: bool, again: bool
) -> None:
    """Nobody trained until a third pod ran. It may have fenced the other one: the watch of pods is behind."""
    world, old, new = moving()
    if heard:
        world.hush(old)
    else:
        world.report_age = 3600.0
    for _ in range(5):
        world.tick(30.0)
        world.reconcile()
    world.propose({"b": 1}, urgent=True)
    world.add("od-0", "od")
    world.pods[new]["spec"]["nodeName"] = "od-0"
    world.pods[new]["status"] = {"phase": "Running"}
    world.reconcile()
    assert new not in world.deleted
    if not heard and again:
        world.report_age = 0.0
        world.settle()
        assert (world.by_pool(), world.deleted[-1]) == ({"b": 1}, new), "one is enough, now that it is known"
    elif not heard:
        for _ in range(5):
            world.tick(30.0)
            world.reconcile()
        assert world.by_pool() == {"b": 1}, "nor are two paid for as long as nobody hears the coordinator"


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from(["Manual", "Auto"]),
    st.lists(
        st.sampled_from(
            [
                ("onDemandBase", 1), ("onDemandBase", 0), ("pools", ["b", "a", "od"]), ("pools", ["a", "od"]),
                ("pools", ["b", "od"]),
                ("pools", ["a", "b", "od"]), ("replicas", 4), ("replicas", 2), ("fallback", FALLBACK),
                ("nodeExclusion", {"failuresBeforeExclude": 2, "cooldownSeconds": 60}), ("zonePolicy", "Preferred"),
                ("zonePolicy", "Any"), ("maxSurge", 0), ("maxSurge", 1), ("maxSurge", "100%"),
            ]
        ),
        max_size=10,
    ),
)  # fmt: skip
def test_changed_fields_of_a_running_job_take_effect_and_count_nothing(
    mode: str, changes: list[tuple[str, Any]]
) -> None:
    """And where they end as they began, so do the number of workers and the place of those on demand."""
    world = auto(elasticity={"mode": mode})
    first = dict(world.manifest["spec"]["workers"])
    for field, value in [*changes, *first.items()]:
        world.manifest["spec"]["workers"][field] = value
        world.manifest["metadata"]["generation"] += 1
        world.reconcile()
        world.tick()
        world.reconcile()
    world.settle()
    found = world.by_pool()
    assert sum(found.values()) == 2
    assert found.keys() <= {"a", "b", "od"}
    assert world.status["restarts"] == {"failures": 0, "disruptions": 0, "byReason": {}}
    assert world.condition("Degraded").get("status") != "True"


@pytest.mark.parametrize("mode", ["Off", "Manual"])
def test_a_job_that_is_planned_no_longer_has_no_plan_that_is_ready(mode: str) -> None:
    world = auto()
    world.propose({"a": 3})
    world.settle()
    assert world.condition("PlanReady")["status"] == "True"
    world.manifest["spec"]["elasticity"] = {**AUTO, "mode": mode}
    world.settle()
    assert (world.condition("PlanReady")["status"], world.condition("PlanReady")["reason"]) == (
        "False",
        "NotPlanned",
    )


@pytest.mark.parametrize("mode", ["Off", "Manual"])
def test_a_job_that_was_never_planned_says_nothing_about_it(mode: str) -> None:
    world = auto(elasticity={"mode": mode}).settled()
    assert world.condition("PlanReady") == {}
