"""The status of a CapacityPool: each count once, what is wrong with it, and the size that it should have."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dev.night import examples
from shoal.api.base import Reason
from shoal.api.capacity_pool import CapacityPool
from shoal.api.capacity_pool_scaling import Subject
from shoal.api.capacity_pool_status import CapacityPoolStatus, OlderPool
from shoal.api.kube import Node
from shoal.api.training_job import TrainingJob
from shoal.controllers.capacitypool import counted
from shoal.controllers.capacitypool.measure import measure
from shoal.controllers.capacitypool.overlaps import older_overlap
from shoal.controllers.capacitypool.seen import Seen
from shoal.controllers.capacitypool.selectors import selects
from shoal.controllers.trainingjob.claims import holdings
from shoal.pools.wish import wish_of
from shoal.sizing.fleet.resources import fleet_pool
from shoal.sizing.speed import priors
from tests.unit.policy import build

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
R = TypeVar("R", CapacityPool, TrainingJob)


OTHER = OlderPool(name="b", node_selector={"pool": "a"})


def pool(status: CapacityPoolStatus | None = None, **spec: Any) -> CapacityPool:
    whole = {
        "nodeSelector": {"pool": "spot"},
        "limits": {"nodes": 4},
        "price": {"perHour": 0.3},
        "startupSeconds": 60,
        **spec,
    }
    found = CapacityPool.model_validate(
        {"metadata": {"name": "spot", "uid": "p", "generation": 3}, "spec": whole}
    )
    return found.model_copy(update={"status": status or CapacityPoolStatus()})


def job(name: str, status: dict[str, Any], **spec: Any) -> TrainingJob:
    manifest = build.job_manifest(**{"elasticity": {"mode": "Auto"}, **spec})
    manifest["metadata"] |= {"name": name, "uid": name}
    return TrainingJob.model_validate({**manifest, "status": status})


def usage(**counts: int) -> dict[str, Any]:
    return {"poolUsage": {"spot": counts}}


def ended(at: datetime, *, released: bool = True) -> dict[str, Any]:
    stamp = build.stamp(at)
    done = {"type": "Complete", "status": "True", "reason": "Trained", "lastTransitionTime": stamp}
    return {"completionTime": stamp, "conditions": [done], "released": released}


def plan(count: int) -> dict[str, Any]:
    return {"plan": {"pools": {"spot": count}}}


def seen(of: CapacityPool, *jobs: TrainingJob, **more: Any) -> Seen:
    held = {f"team/{each.metadata.name}": n for each in jobs if (n := holdings(each)[of.metadata.name])}
    basis = {"pool": of, "now": NOW, "nodes": (), "used": 0, "jobs": jobs, "held": held, "waiting": ()}
    given = {**basis, "servers_waiting": 0, **more}
    workers = len(given["waiting"]) - given["servers_waiting"]
    one_each = {"worker_nodes": sum(given["held"].values()), "more_nodes": workers}
    return Seen(**{**one_each, **given})


def test_pod_that_waits_for_ever_exhausts_its_pool_for_a_while_and_not_for_ever() -> None:
    """Its requests may fit no node at all. Another that waits begins a while of its own."""
    pods = (waiting(3600.0),)
    assert condition(measure(seen(pool(), waiting=pods)), "Exhausted") == ("False", "NodesAvailable")
    first = measure(seen(pool(), waiting=(waiting(1000.0),)))
    assert condition(first, "Exhausted") == ("True", "NoNodes")
    later = seen(pool(first), waiting=(waiting(3600.0),), now=NOW + timedelta(seconds=2600))
    assert condition(measure(later), "Exhausted") == ("False", "NodesAvailable")
    again = measure(seen(pool(), waiting=(*pods, waiting(1000.0))))
    assert (condition(again, "Exhausted"), again.waiting) == (("True", "NoNodes"), 2)


def test_pool_that_still_gets_nodes_is_not_exhausted_by_a_pod_that_none_of_them_takes() -> None:
    """It asked for what fits no node, and others got theirs; but of five that wait together, one may be served."""

    def told(age: float, since: float) -> tuple[str, str]:
        status = measure(seen(pool(), nodes=[node()], waiting=(waiting(since),), newest=waiting(age)))
        return condition(status, "Exhausted")

    assert told(119, 1000) == ("False", "NodesAvailable")
    assert told(121, 1000) == ("True", "NoNodes")
    assert told(1000, 121) == ("True", "NoNodes")
    assert told(121, 3600) == ("False", "NodesAvailable"), "one that has waited for so long says nothing"


def test_a_pool_that_one_of_two_operators_cannot_see_is_told_alike_by_both() -> None:
    """They wrote another number of nodes, and another condition, in turns."""
    sees = measure(seen(pool(), job("one", plan(3)), nodes=[node()], operator="a"))
    blind = measure(seen(pool(sees), nodes_readable=False, operator="b"))
    again = measure(seen(pool(blind), job("one", plan(3)), nodes=[node()], operator="a"))
    assert condition(sees, "Ready") == ("True", "Valid")
    for told in (blind, again):
        assert condition(told, "Ready") == ("Unknown", "NodesUnreadable")
        assert told.nodes == 1
    assert again == blind
    assert measure(seen(pool(again), nodes_readable=False, operator="b")) == again


def test_a_pool_whose_nodes_nobody_can_read_is_not_sized() -> None:
    """Its parameter servers would count nowhere, and shoal-pools take their nodes."""
    blind = measure(seen(pool(), job("one", plan(3)), nodes_readable=False))
    assert condition(blind, "Ready") == ("Unknown", "NodesUnreadable")
    assert (found := wish_of(pool(blind), Subject(), NOW).problem) is not None
    assert found.reason == "PoolNotReady"
    assert fleet_pool(pool(blind), NOW) == fleet_pool(pool(), NOW), (
        "plans go on with what its description says"
    )
    assert condition(measure(seen(pool(blind), job("one", plan(3)))), "Ready") == ("True", "Valid")


def test_sums_are_numbers_however_large_they_grow() -> None:
    most = 2**63 - 1
    used = {"poolUsage": {"spot": {"starts": 1, "startSeconds": 2**32, "startSecondsSquared": most - 1}}}
    status = measure(seen(pool(), job("one", used), job("two", used)))
    assert counted.sums_of(status).start_seconds_squared == pytest.approx(2 * most)
    sums = counted.sums_of(status).text().model_copy(update={"starts": "many"})
    edited = status.model_copy(update={"sums": sums})
    assert measure(seen(pool(edited), job("one", used))).startup.seen == 0


def test_rates_are_sums_over_jobs() -> None:
    one = job(
        "a", usage(nodeSeconds=7200, starts=2, startSeconds=100, startSecondsSquared=5200, interruptions=1)
    )
    starts = {"starts": 2, "startSeconds": 100, "startSecondsSquared": 5200}
    two = job("b", usage(nodeSeconds=3600, unfulfilled=3, warmStarts=4, warmStartSeconds=80, **starts))
    status = measure(seen(pool(), one, two))
    assert (status.interruptions.per_hour, status.interruptions.node_hours) == ("0.3333", "3")
    assert (status.startup.seconds, status.startup.deviation_seconds, status.startup.seen) == (70, 10, 4)
    assert (status.startup.warm_seconds, status.startup.warm_seen) == (20, 4)
    assert status.unfulfilled.waits == 3
    assert status.observed_generation == 3
    assert fleet_pool(pool(status), NOW).measured_startup_seconds == 70, (
        "until a node is there, and until it trains"
    )
    static = measure(seen(pool(), job("c", usage(warmStarts=4, warmStartSeconds=80))))
    assert fleet_pool(pool(static), NOW).measured_startup_seconds == 20, "no worker waits for a node there"


def test_what_nobody_measured_has_no_rate() -> None:
    """A 0 in `kubectl get cpool` would be the best of all pools, whatever the spec expects of it."""
    assert measure(seen(pool())).interruptions.per_hour is None
    assert measure(seen(pool(), job("a", usage(nodeSeconds=3600)))).interruptions.per_hour == "0"


def test_what_was_counted_loses_weight_with_time() -> None:
    """After 100,000 calm hours a pool that lost a node an hour seemed to lose one in 34 hours, for years."""
    calm = usage(nodeSeconds=100_000 * 3600, interruptions=1000)
    worse = usage(nodeSeconds=102_000 * 3600, interruptions=3000)
    of = share(pool(), job("a", calm), operator="shoal")
    month = NOW + timedelta(days=30)
    half = fleet_pool(of, month)
    assert (half.interruptions_seen, half.node_hours) == (500, 50_000), "though nobody has written since"
    for days in (1, 30, 180):
        of = share(of, job("a", calm), operator="shoal", now=NOW + timedelta(days=days), used=1)
    status = share(of, job("a", worse), operator="shoal", now=NOW + timedelta(days=180)).status
    assert float(status.interruptions.node_hours) == pytest.approx(100_000 / 64 + 2000, rel=0.01)
    assert float(status.interruptions.per_hour) == pytest.approx((1000 / 64 + 2000) / 3562, rel=0.01)
    gone = share(pool(status), operator="shoal", now=NOW + timedelta(days=210)).status
    assert gone.interruptions.seen == pytest.approx(status.interruptions.seen / 2, abs=1)


class Jobs(RuleBasedStateMachine):
    """Jobs that use the pool, end and are deleted, and an operator that crashes before or after its writes.

    Now and then it is installed anew under another name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(priors, "HALF_LIFE", 1e15)  # how counts lose weight is another test
        self.now, self.nobody = NOW, 0.0
        self.stored = CapacityPoolStatus()
        self.jobs: dict[str, int] = {}
        self.ended: dict[str, dict[str, Any]] = {}
        self.seen: dict[str, int] = {}
        """What the pool has stored of each job."""
        self.operator = 0
        self.truth = 0
        self.unseen = 0
        self.made = 0

    def teardown(self) -> None:
        self.patch.undo()

    @rule(count=st.integers(0, 5))
    def use(self, count: int) -> None:
        for name in self.jobs.keys() - self.ended.keys():
            self.jobs[name] += count
            self.truth += count

    @rule()
    def create(self) -> None:
        self.made += 1
        self.jobs[f"job-{self.made}"] = 0

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if runs := sorted(self.jobs.keys() - self.ended.keys()):
            self.ended[data.draw(st.sampled_from(runs))] = ended(self.now, released=False)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.ended:
            self.ended[data.draw(st.sampled_from(sorted(self.ended)))]["released"] = True

    @rule()
    def rename(self) -> None:
        self.operator += 1

    @rule(seconds=st.one_of(st.integers(1, 500), st.integers(3000, 5000)))
    def wait(self, seconds: int) -> None:
        self.now += timedelta(seconds=seconds)

    @rule(written=st.booleans())
    def reconcile(self, written: bool) -> None:
        status, until = self.measured(), self.stored.stock.counted_until
        if written:
            self.stored, self.seen = status, dict(self.jobs)
            passed = (self.now - until).total_seconds() if until is not None else 0
            self.nobody += passed if passed > 600 else 0

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        if self.jobs:
            name = data.draw(st.sampled_from(sorted(self.jobs)))
            self.unseen += self.jobs.pop(name) - self.seen.get(name, 0)
            self.ended.pop(name, None)

    def measured(self) -> CapacityPoolStatus:
        jobs = [
            job(name, usage(interruptions=count) | self.ended.get(name, {}))
            for name, count in self.jobs.items()
        ]
        nodes = [Node.model_validate({"metadata": {"name": "n", "labels": {"pool": "spot"}}})]
        operator = f"shoal-{self.operator}"
        return measure(seen(pool(self.stored), *jobs, nodes=nodes, used=1, now=self.now, operator=operator))

    @invariant()
    def nothing_is_counted_twice_and_what_was_seen_is_never_lost(self) -> None:
        assert self.measured().interruptions.seen == self.truth - self.unseen

    @invariant()
    def each_second_is_counted_once(self) -> None:
        stock = self.stored.stock
        if stock.counted_until is None:
            assert stock.watched_seconds == "0"
        else:
            self.began = getattr(self, "began", stock.counted_until)
            seconds = (stock.counted_until - self.began).total_seconds()
            assert float(stock.watched_seconds) <= seconds
            assert float(stock.watched_seconds) >= 0.99 * (seconds - self.nobody)


TestJobs = Jobs.TestCase
TestJobs.settings = settings(max_examples=examples(60), stateful_step_count=25, deadline=None)


def test_pool_keeps_the_nodes_that_jobs_use_and_buys_none_for_advice() -> None:
    """Advice moved nothing, and yet what it names was bought, and what runs was scaled away beneath it."""
    slots = [
        {"role": "worker", "index": i, "pool": "spot", "state": "Running", "node": f"n{i}"} for i in (0, 1)
    ]
    moved = {"slots": slots, "plan": {"pools": {"other": 8}}}
    for mode in ("Advise", "Auto"):  # in Auto the new workers are made before the old ones go
        status = measure(seen(pool(), job("a", moved, elasticity={"mode": mode}), used=2))
        assert (status.recommended.nodes, status.recommended.reason) == (2, "2 for team/a")
    advice = job("a", plan(3), elasticity={"mode": "Advise"})
    assert measure(seen(pool(), advice)).recommended.nodes == 0
    going = job("a", {"plan": {"pools": {"other": 8}}})
    nodes = [Node.model_validate({"metadata": {"name": f"n{i}"}}) for i in range(3)]
    status = measure(seen(pool(), going, used=2, nodes=nodes))
    assert (status.recommended.nodes, status.recommended.reason) == (2, "2 in use")


def test_recommended_size_is_the_sum_of_plans_within_the_limit() -> None:
    done = {
        "conditions": [
            {
                "type": "Complete",
                "status": "True",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
                "reason": "x",
            }
        ]
    }
    jobs = [
        job("a", plan(3)),
        job("b", plan(2)),
        job("c", plan(9), suspend=True),
        job("d", {**plan(9), **done}),
    ]
    recommended = measure(seen(pool(), *jobs)).recommended
    assert recommended.nodes == 4
    assert recommended.reason == "3 for team/a, 2 for team/b; the limit is 4"
    assert measure(seen(pool())).recommended.reason == "no job plans to use it"


@pytest.mark.parametrize(
    ("sees", "size", "why"),
    [
        ({"servers_waiting": 20, "server_nodes": 2}, 2, "2 for parameter servers"),
        ({"used": 1, "apart": 1}, 1, "1 for parameter servers"),
        ({"used": 2, "apart": 1, "held": {"team/a": 2}}, 3, "2 for team/a, 1 for parameter servers"),
        ({"used": 3, "apart": 1}, 3, "2 in use, 1 for parameter servers"),
        ({"used": 2, "held": {"team/a": 2}}, 2, "2 for team/a"),  # the server is beside a worker
    ],
)
def test_parameter_servers_have_their_nodes(sees: dict[str, Any], size: int, why: str) -> None:
    """A pool of parameter servers that somebody has to scale never got its first node."""
    nodes = [f"node-{number}" for number in range(sees.get("used", 0))]
    recommended = measure(seen(pool(), **sees, nodes=nodes)).recommended
    assert (recommended.nodes, recommended.reason) == (size, why)


def test_plans_leave_out_the_nodes_that_parameter_servers_fill() -> None:
    """A server had one of four nodes and the plan four workers: the pool was out of nodes, tried again, and so on."""
    status, asked, wants = None, None, list[int]()
    for second in range(0, 4 * 3600, 15):
        now, of = NOW + timedelta(seconds=second), pool(status)
        most = fleet_pool(of, now).nodes
        wants.append(3 if of.status.exhausted is not None else most)  # no more than run, while there are none
        asked = (asked or now) if wants[-1] > 3 else None
        pods = () if asked is None else (asked,)
        sees = {"nodes": range(4), "used": 4, "serving": 1, "apart": 1, "full": 1, "waiting": pods}
        status = measure(seen(of, job("one", plan(wants[-1])), now=now, **sees))
    assert wants[1:] == [3] * (len(wants) - 1)
    assert (status.recommended.nodes, status.recommended.reason) == (
        4,
        "3 for team/one, 1 for parameter servers",
    )


def waiting(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def condition(status: CapacityPoolStatus, kind: str) -> tuple[str, str]:
    [found] = [each for each in status.conditions if each.type == kind]
    return found.status, found.reason


def test_pool_is_exhausted_when_pods_wait_for_longer_than_a_start() -> None:
    status = measure(seen(pool(), waiting=(waiting(119), waiting(10))))
    assert condition(status, "Exhausted") == ("False", "NodesAvailable")
    status = measure(seen(pool(), waiting=(waiting(121), waiting(10))))
    assert condition(status, "Exhausted") == ("True", "NoNodes")
    assert status.unfulfilled.pending == 1
    [told] = [each.message for each in status.conditions if each.type == "Exhausted"]
    assert "no node has the labels of spec.nodeSelector (pool=spot): if some should, label them" in told
    measured = job("a", usage(starts=1, startSeconds=300, startSecondsSquared=90000))
    patient = measure(seen(pool(), measured, waiting=(waiting(500),)))
    assert condition(patient, "Exhausted") == ("False", "NodesAvailable"), (
        "what was measured outweighs the prior"
    )


@pytest.mark.parametrize(("said", "waits"), [(5, 30), (20, 80), (30, 120), (60, 120), (180, 360)])
def test_start_up_that_nobody_measured_is_not_held_to_a_short_guess(said: int, waits: int) -> None:
    """Else each node is given up just before it comes, and none is ever seen to start."""
    guessed = pool(startupSeconds=said)
    for seconds, exhausted in ((waits - 1, "False"), (waits + 1, "True")):
        status = measure(seen(guessed, waiting=(waiting(seconds),)))
        assert condition(status, "Exhausted")[0] == exhausted
    quick = job("a", usage(starts=2, startSeconds=40, startSecondsSquared=800))
    for seconds, exhausted in ((max(said, 40) - 1, "False"), (max(said, 40) + 1, "True")):
        status = measure(seen(guessed, quick, waiting=(waiting(seconds),)))
        assert condition(status, "Exhausted")[0] == exhausted, "what the user knows is not undercut"


def test_what_workers_do_on_their_nodes_is_no_reason_to_wait_for_one() -> None:
    """Of 54 starts, four that fetched data for hours had pods of all jobs wait for as long."""
    counts = {"starts": 54, "startSeconds": 54 * 150, "startSecondsSquared": 54 * 150**2, "warmStarts": 54}
    for began in (54 * 30, 50 * 30 + 4 * 600):
        jobs = job("a", usage(**counts, warmStartSeconds=began))
        status = measure(seen(pool(), jobs))
        assert status.startup.seconds == round(150 + began / 54)
        for waits, exhausted in ((299, "False"), (301, "True")):
            found = measure(seen(pool(status), jobs, waiting=(waiting(waits),)))
            assert condition(found, "Exhausted")[0] == exhausted


WARM_AND_COLD = {"warmStarts": 80, "warmStartSeconds": 80 * 20}
COLD = {"starts": 20, "startSeconds": 20 * 180, "startSecondsSquared": 20 * 180**2}
QUICK = {"starts": 10_000, "startSeconds": 600_000, "startSecondsSquared": 36_000_000}


@pytest.mark.parametrize(("counts", "outs"), [({**WARM_AND_COLD, **COLD}, 0), (QUICK, 1)])
def test_nodes_that_take_longer_than_others_did_are_waited_for(counts: dict[str, int], outs: int) -> None:
    """Each node took 150 s and was given up just before: 3,523 of 3,523 seconds without nodes.

    A job leaves an exhausted pool, and its node then never comes; it tries again when that is over.
    """
    status, asked, declared = measure(seen(pool(), job("a", usage(**counts)))), NOW, 0
    for second in range(0, 4000, 15):
        now = NOW + timedelta(seconds=second)
        if now - asked >= timedelta(seconds=150):
            break
        before = condition(status, "Exhausted")[0]
        exhausted = before == "True"
        status = measure(
            seen(pool(status), job("a", usage(**counts)), now=now, waiting=() if exhausted else (asked,))
        )
        now_out = condition(status, "Exhausted")[0] == "True"
        declared += now_out and not exhausted
        if now_out or exhausted:
            asked = now
    else:
        pytest.fail("it was never waited for long enough")
    assert declared == outs


def test_a_node_that_comes_soon_after_it_was_given_up_is_a_start() -> None:
    """So that patience follows, though the pods that waited are gone. What comes much later ends a stock-out."""
    quick = job("a", usage(starts=4, startSeconds=240, startSecondsSquared=4 * 60**2))
    for late, learned in ((30, True), (600, False)):
        status = measure(seen(pool(), quick))
        asked = NOW
        for second in (119, 121):
            now = NOW + timedelta(seconds=second)
            status = measure(seen(pool(status), quick, now=now, waiting=(asked,)))
        assert condition(status, "Exhausted")[0] == "True"
        there = {"nodes": [node(pool="spot")], "newest": now + timedelta(seconds=late)}
        came = seen(pool(status), quick, now=now + timedelta(seconds=late), **there)
        status = measure(came)
        assert status.startup.seen == 4 + learned
        assert status.startup.seconds == (round((240 + 150) / 5) if learned else 60)
        assert measure(seen(pool(status), quick, now=came.now, **there)).startup == status.startup


def test_a_node_that_came_for_others_is_no_start_of_a_pod_that_still_waits() -> None:
    first = measure(seen(pool(), waiting=(waiting(121),)))
    now = NOW + timedelta(seconds=30)
    for since, starts in ((waiting(121), 0), (now, 1)):  # one that asks anew says nothing of those before
        came = measure(seen(pool(first), now=now, nodes=[node(pool="spot")], waiting=(since,), newest=now))
        assert came.startup.seen == starts


def test_exhausted_pool_is_tried_again_after_a_while_or_when_a_node_comes() -> None:
    first = measure(seen(pool(), waiting=(waiting(500),)))

    def later(seconds: float, **more: Any) -> tuple[str, str]:
        status = measure(seen(pool(first), now=NOW + timedelta(seconds=seconds), **more))
        return condition(status, "Exhausted")

    assert later(1) == later(239) == ("True", "NoNodes")
    assert later(241) == ("False", "NodesAvailable")
    assert later(241, waiting=(waiting(500),)) == ("True", "NoNodes")
    come = {"nodes": [node(pool="spot")], "newest": NOW + timedelta(seconds=1)}
    assert later(1, **come) == ("False", "NodesAvailable")
    assert later(1, nodes=come["nodes"]) == ("True", "NoNodes"), "it is there, and never got Ready"
    # The clock of the leader before this one was so far ahead.
    assert later(-20) == ("True", "NoNodes")
    assert later(-3600) == ("False", "NodesAvailable")


class Stocked:
    """A pool with two nodes that a job has, looked at every 15 s; what it counts."""

    def __init__(self) -> None:
        self.now, self.status = NOW, CapacityPoolStatus()
        self.newest = NOW

    def look(self, minutes: float, nodes: int = 2, asked: datetime | None = None, operator: str = "") -> None:
        """Look for some time. `asked`: since when a pod waits for one node more."""
        labels = {"pool": "spot"}
        there = [Node.model_validate({"metadata": {"name": f"n{i}", "labels": labels}}) for i in range(nodes)]
        for _ in range(round(minutes * 4)):
            self.now += timedelta(seconds=15)
            pods = () if asked is None else (asked,)
            self.newest = self.now if nodes > self.status.nodes else self.newest
            sees = {"nodes": there, "used": nodes, "waiting": pods, "newest": self.newest}
            self.status = measure(seen(pool(self.status), now=self.now, operator=operator, **sees))

    def counted(self) -> tuple[float, float, float]:
        """Minutes watched and out up to now, and how often it ran out: a change makes the next look count."""
        changed = pool(self.status).model_copy(
            update={"metadata": pool().metadata.model_copy(update={"generation": 4})}
        )
        found = measure(seen(changed, now=self.now, nodes=(), used=0)).stock
        return float(found.watched_seconds) / 60, float(found.out_seconds) / 60, float(found.outs)


def about(*minutes: float) -> Any:
    return pytest.approx(minutes, abs=0.6)


def test_time_out_of_stock_is_counted_and_not_the_requests_in_it() -> None:
    """Many workers wait together, and try again: that is one stock-out, of as long as it lasts."""
    of = Stocked()
    of.look(60)
    assert of.counted() == about(60, 0, 0)
    of.look(20, nodes=1, asked=of.now)
    assert of.counted() == about(80, 20, 1)
    of.look(2, nodes=1)  # nobody waits, and nobody knows
    assert of.counted() == about(80, 20, 1)
    of.look(10, nodes=1, asked=of.now)  # still out: not out again
    assert of.counted() == about(90, 30, 1)
    of.look(30)
    assert of.counted() == about(120, 30, 1)
    of.look(5, nodes=1, asked=of.now)
    assert of.counted() == about(125, 35, 2)


def test_a_pool_that_grows_while_pods_wait_has_nodes() -> None:
    """One pod that waited for ever kept all of this time from being counted, and only stock-outs were."""
    of, asked = Stocked(), NOW
    of.look(1.5, asked=asked)
    for nodes in range(3, 13):
        of.look(1.5, nodes=nodes, asked=asked)
    assert of.counted() == about(15, 0, 0)


def test_time_in_which_nobody_would_notice_a_stock_out_says_nothing() -> None:
    of = Stocked()
    of.look(60, nodes=0)
    assert of.counted() == about(0, 0, 0)
    of.look(30)
    of.now += timedelta(minutes=30)  # no operator runs
    of.look(30)
    assert 54 <= of.counted()[0] <= 60  # what it saw before it ended is not written


def test_two_operators_that_share_a_pool_count_each_second_once() -> None:
    of = Stocked()
    for each in range(240):
        of.look(0.25, operator=f"operator-{each % 3}")
    assert of.counted() == about(60, 0, 0)


def test_pool_whose_nodes_come_and_go_is_not_exhausted_in_turns() -> None:
    """With each that went, those that waited had waited since they were made: 157 changes in two hours."""
    of, changes = Stocked(), list[str]()
    for second in range(0, 7200, 15):
        now = NOW + timedelta(seconds=second)
        comes = second >= 90 and second % 90 == 0
        newest = now if comes else None
        sees = {"nodes": range(comes), "waiting": (now - timedelta(minutes=min(second / 60, 20)),)}
        of.status = measure(seen(pool(of.status), now=now, newest=newest, **sees))
        told = condition(of.status, "Exhausted")[0]
        changes += [told] if changes[-1:] != [told] else []
    assert changes == ["False"]


LOOKS = st.lists(
    st.tuples(st.integers(3, 400), st.booleans(), st.integers(0, 2), st.integers(0, 900)),
    min_size=5,
    max_size=60,
)


@given(LOOKS, st.booleans())
@settings(max_examples=examples(100), deadline=None)
def test_no_second_is_counted_twice_however_nodes_come_and_go(
    looks: list[tuple[int, bool, int, int]], older: bool
) -> None:
    """One that came and went each minute and a half made 6,200 seconds without nodes of 1,800.

    `older`: a version that does not know up to when that is known writes the status, too.
    """
    status, now, newest = CapacityPoolStatus(), NOW, None
    for number, (seconds, comes, used, asked) in enumerate(looks):
        now += timedelta(seconds=seconds)
        newest = now if comes else newest if number % 3 else None
        pods = (max(now - timedelta(seconds=asked), NOW),) if asked else ()
        there = {"nodes": range(used + comes), "used": used, "waiting": pods, "newest": newest}
        status = measure(seen(pool(status), now=now, **there))
        if older:
            stock = status.stock.model_copy(update={"known_until": None})
            status = status.model_copy(update={"stock": stock})
        out, watched = float(status.stock.out_seconds), float(status.stock.watched_seconds)
        assert out - 1 <= watched <= (now - NOW).total_seconds() + 1


def test_old_stock_outs_weigh_less() -> None:
    of = Stocked()
    of.look(10)
    of.look(50, nodes=1, asked=of.now)
    of.look(10)
    assert of.counted() == about(70, 50, 1)
    of.look(0.25, nodes=0)
    of.now += timedelta(days=30)
    of.look(0.5)
    assert of.counted() == about(35, 25, 0.5)
    planned = fleet_pool(pool(of.status), of.now + timedelta(days=30))
    assert planned.out_seconds == pytest.approx(25 * 30, rel=0.01)


def test_pool_that_stays_out_of_nodes_is_tried_less_and_less_often() -> None:
    """Each try is 130 s of a pod that waits; a try does not begin before the pool counts as having nodes."""
    status, tries, waits = measure(seen(pool())), [], None
    for second in range(0, 7200, 10):
        now = NOW + timedelta(seconds=second)
        if condition(status, "Exhausted")[0] == "False" and waits is None:
            waits = second
            tries.append(second)
        elif condition(status, "Exhausted")[0] == "True":
            waits = None
        since = () if waits is None else (waiting(-waits),)
        status = measure(seen(pool(status), now=now, waiting=since))
    assert status.out_since is not None
    gaps = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert gaps == sorted(gaps)
    assert len(tries) <= 7
    assert max(gaps) <= 1800 + 270, "a try waits for twice the patience"
    now = NOW + timedelta(hours=2)
    found = measure(seen(pool(status), now=now, nodes=[node(pool="spot")], newest=now))
    assert found.out_since is None
    assert condition(found, "Exhausted")[0] == "False"


def test_transition_time_is_kept_while_a_condition_holds() -> None:
    first = measure(seen(pool(), waiting=(waiting(500),)))
    again = measure(seen(pool(first), waiting=(waiting(500),), now=NOW + timedelta(minutes=20)))
    assert again.conditions == first.conditions


def test_a_pool_begins_with_what_a_version_without_sums_counted_of_jobs_that_exist() -> None:
    """At the upgrade its life was forgotten: 0 interruptions per hour, and no start was ever seen."""
    part = {"nodeSeconds": 36_000, "interruptions": 5, "starts": 3, "startSeconds": 300}
    before = CapacityPoolStatus.model_validate({"counted": [{"uid": "one", **part}, {"uid": "gone", **part}]})
    running = job("one", usage(**{**part, "nodeSeconds": 43_200}))
    first = measure(seen(pool(before), running))
    again = measure(seen(pool(first), running))
    for status in (first, again):
        assert (status.interruptions.seen, status.interruptions.node_hours) == (10, "22")
        assert (status.startup.seconds, status.startup.seen) == (100, 6)
    older = named("spot", YOUNG, {"pool": "spot"})
    kept = measure(seen(older, running.model_copy(update={"metadata": named("one", OLD, {}).metadata})))
    read_back = CapacityPoolStatus.model_validate_json(kept.model_dump_json(by_alias=True))
    later = measure(seen(older.model_copy(update={"status": read_back}), running))
    assert later.interruptions.seen == 0, "of an earlier pool of this name"


def test_problem_of_the_description_is_a_condition() -> None:
    assert condition(measure(seen(pool())), "Ready") == ("True", "Valid")
    assert condition(measure(seen(pool(), overlaps=OTHER)), "Ready") == ("False", "Overlaps")
    assert condition(measure(seen(pool(), problem=Reason("NoPrice", "set it"))), "Ready") == (
        "False",
        "NoPrice",
    )


def node(**labels: str) -> Node:
    return Node.model_validate({"metadata": {"name": "n", "labels": labels}})


def named(
    name: str,
    created: str,
    selector: dict[str, str],
    *,
    told: OlderPool | None = None,
    generation: int = 1,
    observed: int = 1,
) -> CapacityPool:
    """`told`: of which older pool its generation `observed` was told."""
    ready = {"type": "Ready", "status": "False", "reason": "Overlaps", "lastTransitionTime": created}
    return CapacityPool.model_validate(
        {
            "metadata": {"name": name, "uid": name, "creationTimestamp": created, "generation": generation},
            "spec": {"nodeSelector": selector, "limits": {"nodes": 4}, "price": {"perHour": 1}},
            "status": {
                "used": 2,
                "observedGeneration": observed,
                "overlaps": told,
                "conditions": [ready] if told else [],
            },
        }
    )


OLD, YOUNG = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"


@pytest.mark.parametrize(
    ("selector", "told", "nodes", "blamed"),
    [
        ({"tier": "gpu"}, False, [node(pool="a", tier="gpu")], True),  # a node is shared
        ({"tier": "gpu"}, False, [], False),  # none is, as far as anybody knows
        ({"tier": "gpu"}, True, [], True),  # one was, and went with the workers
        ({"tier": "gpu"}, True, [node(tier="gpu")], False),  # the nodes were told apart
        ({"pool": "a", "zone": "z"}, False, [], True),  # all of its nodes are the other's, too
    ],
)
def test_only_the_younger_of_two_pools_that_share_nodes_is_told_and_stays_so(
    selector: dict[str, str], told: bool, nodes: list[Node], blamed: bool
) -> None:
    old, young = named("b", OLD, {"pool": "a"}), named("a", YOUNG, selector)
    overlap = older_overlap(young, [young, old], {"b"}, [node(pool="a", tier="gpu")])
    assert overlap == OlderPool(name="b", node_selector={"pool": "a"})
    if told:
        young = named("a", YOUNG, selector, told=overlap)
    sharing = (
        {old.metadata.name}
        if any(selects(old.spec.node_selector, each.metadata.labels) for each in nodes)
        else set[str]()
    )
    assert older_overlap(young, [young, old], sharing, nodes) == (overlap if blamed else None)
    assert not older_overlap(old, [young, old], {"a"}, [node(pool="a", tier="gpu")])


def test_what_a_pool_was_told_ends_with_a_selector_that_is_corrected() -> None:
    """Also beside pools that could share nodes with it and do not: they are named by nobody."""
    old, other = named("b", OLD, {"pool": "a"}), named("c", OLD, {"lane": "slow"})
    young = named("a", YOUNG, {"tier": "gpu"})
    told = older_overlap(young, [young, old, other], {"b"}, [node(pool="a", tier="gpu")])
    still = named("a", YOUNG, {"tier": "gpu"}, told=told)
    assert older_overlap(still, [still, old, other], set(), []) == told
    corrected = named("a", YOUNG, {"tier": "own"}, told=told, generation=2)
    assert not older_overlap(corrected, [corrected, old, other], set(), [])
    assert not older_overlap(still, [still, named("b", OLD, {"pool": "b"}), other], set(), [])
    assert not older_overlap(still, [still, other], set(), []), "the older one is gone"
    wider = named("c", OLD, {"tier": "gpu"})
    overlap = older_overlap(still, [still, named("b", OLD, {"pool": "b"}), wider], set(), [])
    assert overlap == OlderPool(name="c", node_selector={"tier": "gpu"})


def test_a_pool_does_not_forget_whose_nodes_it_shares_while_they_cannot_be_read() -> None:
    """It was remembered by the words of its condition, which then are about something else."""
    old, young = named("b", OLD, {"pool": "a"}), named("a", YOUNG, {"tier": "gpu"})
    overlap = older_overlap(young, [young, old], {"b"}, [node(pool="a", tier="gpu")])
    status = measure(seen(young, overlaps=overlap))
    assert "also selected by CapacityPool b (pool=a), which is older" in status.conditions[0].message
    blind = measure(seen(young.model_copy(update={"status": status}), overlaps=overlap, nodes_readable=False))
    assert condition(blind, "Ready") == ("Unknown", "NodesUnreadable")
    young = young.model_copy(update={"status": blind})
    assert older_overlap(young, [young, old], set(), []) == overlap


def test_what_runs_in_a_pool_that_overlaps_stays_and_no_more_begins() -> None:
    assert fleet_pool(named("a", YOUNG, {"pool": "a"}, told=OTHER), NOW).room(2) == 2
    assert fleet_pool(named("a", YOUNG, {"pool": "a"}), NOW).room(2) == 4


def test_pool_without_selector_has_no_nodes() -> None:
    node = Node.model_validate({"metadata": {"name": "n", "labels": {"pool": "spot", "zone": "a"}}})
    labels = node.metadata.labels
    assert selects(pool().spec.node_selector, labels)
    assert not selects({}, labels)
    assert not selects({"pool": "spot", "zone": "b"}, labels)


def share(of: CapacityPool, *jobs: TrainingJob, operator: str, **more: Any) -> CapacityPool:
    """The pool after one operator has written its status."""
    return of.model_copy(update={"status": measure(seen(of, *jobs, operator=operator, **more))})


def test_operators_of_namespaces_share_a_pool_and_none_takes_back_what_another_said() -> None:
    """Each wrote the whole status from its own jobs: the last one won, and deleted jobs were counted twice."""
    one = job("a", {**usage(nodeSeconds=3600, interruptions=1), **plan(1)})
    two = job("b", {**usage(nodeSeconds=7200, interruptions=3), **plan(2)})
    of = pool()
    for _ in range(3):
        of = share(of, one, operator="a/shoal")
        of = share(of, two, operator="b/shoal")
    status = of.status
    assert (status.recommended.nodes, status.recommended.reason) == (3, "1 for team/a, 2 for team/b")
    assert (status.interruptions.seen, status.interruptions.node_hours) == (4, "3")
    assert [each.operator for each in status.counted] == ["a/shoal", "b/shoal"]
    of = share(of, operator="a/shoal")  # its job was deleted
    assert (of.status.interruptions.seen, len(of.status.counted)) == (4, 1)
    assert (of.status.recommended.nodes, of.status.recommended.reason) == (2, "2 for team/b")
    assert share(of, two, operator="b/shoal").status == of.status  # nothing is left to be said


def test_an_operator_that_says_nothing_more_is_forgotten_and_one_that_lives_is_not() -> None:
    one, two = job("a", {**usage(interruptions=1), **plan(1)}), job("b", plan(2))
    of = share(share(pool(), one, operator="a/shoal"), two, operator="b/shoal")
    for minute in range(0, 180, 3):
        of = share(of, two, operator="b/shoal", now=NOW + timedelta(minutes=minute))
        assert of.status.recommended.nodes == (3 if minute < 15 else 2)
    assert of.status.interruptions.seen == 1  # what was measured stays
    of = share(of, one, operator="a/shoal", now=NOW + timedelta(minutes=180))
    assert (of.status.recommended.nodes, of.status.interruptions.seen) == (3, 1)


def test_nodes_in_use_by_jobs_of_an_operator_that_is_down_stay_recommended() -> None:
    """The jobs of another team train on without their operator: after an hour their nodes were taken from them."""
    one, two = job("a", plan(1)), job("b", plan(6))
    nodes = [node() for _ in range(4)]
    of = share(pool(limits={"nodes": 9}), two, operator="team-b/shoal", used=4, nodes=nodes)
    for minute in (10, 14, 16, 600, 6000):
        now = NOW + timedelta(minutes=minute)
        of = share(of, one, operator="team-a/shoal", now=now, nodes=nodes)
        recommended = of.status.recommended
        assert (recommended.nodes, of.status.used) == (7 if minute < 15 else 5, 4)
        assert ("which does not run" in recommended.reason) == (minute > 15)
    again = share(of, one, operator="team-a/shoal", now=NOW + timedelta(minutes=6001), nodes=nodes)
    assert again.status == of.status
    of = share(of, two, operator="team-b/shoal", now=NOW + timedelta(minutes=6002), used=3, nodes=nodes)
    assert (of.status.recommended.nodes, of.status.used) == (7, 3)


@pytest.mark.parametrize("used", [0, 1])
def test_an_operator_that_is_gone_is_forgotten_though_its_clock_was_ahead(used: int) -> None:
    """Four nodes were recommended until the year was over that it had been ahead."""
    nodes = [node()] * used
    ahead = NOW + timedelta(days=400)
    of = share(pool(), job("a", plan(4)), operator="gone/shoal", now=ahead, used=used, nodes=nodes)
    of = share(of, operator="shoal", now=NOW + timedelta(days=30), nodes=nodes)
    assert of.status.recommended.nodes == used
    assert [each.operator for each in of.status.shares] == ["gone/shoal", "shoal"][1 - used :]


def test_an_operator_that_is_installed_anew_takes_over_what_was_said_of_its_jobs() -> None:
    """Under another name, that is: each of its jobs was counted twice for ever, and wanted twice for an hour."""
    one = job("a", {**usage(nodeSeconds=3600, interruptions=1), **plan(1)})
    other = job("b", {**usage(interruptions=3), **plan(2)})
    of = share(share(pool(), one, operator="old/shoal"), other, operator="b/shoal")
    for _ in range(2):
        of = share(of, one, operator="new/shoal")
        assert (of.status.interruptions.seen, of.status.recommended.nodes) == (4, 3)
    of = share(of, operator="new/shoal")
    assert (of.status.interruptions.seen, len(of.status.counted)) == (4, 1)


def test_a_job_that_cannot_be_read_for_a_while_counts_once() -> None:
    """A fresh leader took it for a deleted one, and counted its whole past again when it could be read."""
    one, hidden = job("a", usage(interruptions=1)), job("b", usage(nodeSeconds=3600, interruptions=3))
    unread = frozenset({hidden.metadata.uid})
    of = share(pool(), one, hidden, operator="shoal")
    for _ in range(2):
        of = share(of, one, operator="shoal", unread=unread.__contains__)
    of = share(of, one, hidden, operator="shoal")
    assert of.status.sums is not None
    assert (of.status.sums.interruptions, of.status.sums.node_seconds) == ("4", "3600")
    of = share(of, one, operator="shoal")  # it is deleted
    assert [each.uid for each in of.status.counted] == [one.metadata.uid]


def test_jobs_that_ended_are_remembered_as_a_sum() -> None:
    """6,000 that were kept made 1 MB of status, and a few more than etcd takes."""
    kept = [job(f"job-{n}", usage(interruptions=1) | ended(NOW)) for n in range(30)]
    late = job("late", usage(interruptions=1) | ended(NOW, released=False))
    of, sizes = pool(), list[int]()
    for minute in (0, 59, 61, 62, 200):
        of = share(of, *kept, late, operator="shoal", now=NOW + timedelta(minutes=minute))
        assert of.status.interruptions.seen == 31
        sizes.append(len(of.status.counted))
    assert sizes == [31, 31, 1, 1, 1]
    done = job("late", usage(interruptions=1) | ended(NOW))
    of = share(of, *kept, done, operator="shoal", now=NOW + timedelta(minutes=201))
    assert (of.status.interruptions.seen, len(of.status.counted)) == (31, 0)
    of = share(of, operator="shoal", now=NOW + timedelta(minutes=300))
    assert of.status.interruptions.seen == 31


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from(["use", "end", "delete", "wait"])),
        min_size=20,
        max_size=60,
    )
)
@settings(max_examples=examples(100), deadline=None)
def test_parts_have_a_bound_and_the_sum_only_grows(steps: list[tuple[int, str]]) -> None:
    """etcd takes no status of more than 1.5 MB, and one that cannot be written says nothing ever again."""
    of, now, used, ends = pool(), NOW, dict[str, int](), dict[str, datetime]()
    truth, before = 0, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counted, "MOST_PARTS", 3)
        for number, (which, what) in enumerate(steps):
            name = f"job-{which}"
            if what == "wait":
                now += timedelta(minutes=which)
            elif what == "end" and name in used:
                ends.setdefault(name, now)
            elif what == "delete":
                used.pop(name, None)
                ends.pop(name, None)
            elif what == "use" and name not in ends:
                used[name] = used.get(name, 0) + 1
                truth += 1
            now += timedelta(seconds=1)
            jobs = [
                job(name, usage(interruptions=count) | (ended(ends[name]) if name in ends else {}))
                for name, count in used.items()
            ]
            of = share(of, *jobs, operator="shoal", now=now)
            assert before <= of.status.interruptions.seen <= truth, number
            assert len(of.status.counted) <= 3
            before = of.status.interruptions.seen


def test_jobs_that_ended_make_room_before_their_hour_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted, "MOST_PARTS", 5)
    done = [job(f"done-{n}", usage(interruptions=1) | ended(NOW + timedelta(seconds=n))) for n in range(20)]
    of = pool()
    for number in range(1, 21):
        of = share(of, *done[:number], operator="shoal", now=NOW + timedelta(seconds=number))
        assert of.status.interruptions.seen == number
        assert len(of.status.counted) <= 5
    of = share(of, operator="shoal", now=NOW + timedelta(minutes=300))
    assert of.status.interruptions.seen == 20


def test_operators_of_a_shared_pool_repeat_themselves_rarely() -> None:
    one, two = job("a", plan(1)), job("b", plan(2))
    both = share(share(pool(), one, operator="a/shoal"), two, operator="b/shoal")
    changes = 0
    for second in range(0, 3600, 15):
        for operator, its in (("a/shoal", one), ("b/shoal", two)):
            again = share(both, its, operator=operator, now=NOW + timedelta(seconds=second))
            changes += again.status != both.status
            both = again
    assert changes <= 2 * 12


def test_pods_of_any_operator_that_wait_in_vain_show_that_the_pool_is_exhausted() -> None:
    of = share(pool(), operator="a/shoal", waiting=(waiting(1000),))
    of = share(of, operator="b/shoal")
    assert (of.status.waiting, of.status.unfulfilled.pending) == (1, 1)
    assert next(c.status for c in of.status.conditions if c.type == "Exhausted") == "True"


def made(of: R, at: str) -> R:
    """The object as one that was made then."""
    about = of.metadata.model_copy(update={"creation_timestamp": at})
    return of.model_copy(update={"metadata": about})


def test_a_pool_made_anew_under_its_name_has_nothing_of_the_life_of_the_old_one() -> None:
    """Of another accelerator and zone, it was told to be lost as often; and the nodes that it found were given away."""
    old = usage(node_seconds=144_000, interruptions=30, starts=12, start_seconds=10_800, shocks=5)
    runs = made(job("runs", old), "2026-01-01T10:00:00Z")
    begins = made(job("begins", usage(node_seconds=60)), "2026-01-01T11:30:00Z")
    anew = made(pool(), "2026-01-01T11:00:00Z")
    status = measure(seen(anew, runs, nodes=[node()]))
    assert (status.interruptions.seen, float(status.interruptions.node_hours), status.startup.seen) == (
        0,
        0,
        0,
    )
    wish = wish_of(anew.model_copy(update={"status": status}), Subject(), NOW)
    assert wish.least is None, "what it was found with stays"
    more = job(
        "runs", usage(node_seconds=147_600, interruptions=31, starts=13, start_seconds=10_900, shocks=5)
    )
    jobs = made(more, "2026-01-01T10:00:00Z"), begins
    later = measure(seen(anew.model_copy(update={"status": status}), *jobs, nodes=[node()]))
    assert (later.interruptions.seen, later.startup.seen) == (1, 1)
    assert counted.sums_of(later).node_seconds == 3660


@pytest.mark.parametrize(
    "ahead", [timedelta(minutes=5), timedelta(hours=2), timedelta(days=30), timedelta(days=365)]
)
def test_a_leader_whose_clock_was_ahead_leaves_a_pool_as_it_was_and_is_counted_on(ahead: timedelta) -> None:
    """After one look by a clock a year ahead, nothing that was measured was left, and the stock stood for a year."""
    rich = job("one", usage(node_seconds=3_600_000, interruptions=50, starts=20, start_seconds=2400))

    def look(before: CapacityPoolStatus | None, now: datetime) -> CapacityPoolStatus:
        return measure(seen(pool(before), rich, nodes=[node()], used=1, now=now))

    first = look(None, NOW)
    status = look(look(first, NOW + ahead), NOW + timedelta(minutes=1))
    for minutes in range(6, 120, 5):
        status = look(status, NOW + timedelta(minutes=minutes))
    assert status.stock.counted_until == NOW + timedelta(minutes=116)
    assert (status.interruptions.seen, status.startup.seen) == (50, 20)
    assert counted.sums_of(status).node_seconds == pytest.approx(3_600_000, rel=0.01)
    assert 6000 < float(status.stock.watched_seconds) <= 7200
    (share,) = status.shares
    assert share.at <= NOW + timedelta(minutes=116), "it is said again that the operator runs"


@pytest.mark.parametrize("ahead", [timedelta(0), timedelta(minutes=9), timedelta(days=5)])
def test_a_pool_is_exhausted_though_a_clock_was_ahead_when_its_nodes_went(ahead: timedelta) -> None:
    """There had been nodes until five days later: jobs waited beside it for as long."""
    status, gone = None, NOW + timedelta(minutes=20)
    for minutes in range(0, 20, 5):
        at = NOW + ahead + timedelta(minutes=minutes)
        status = measure(seen(pool(status), nodes=[node()], used=1, now=at))
    # The pods of the nodes that went wait, and then another one leads.
    status = measure(seen(pool(status), waiting=[gone + ahead], now=gone + ahead + timedelta(seconds=20)))
    for minutes in range(1, 13):
        status = measure(seen(pool(status), waiting=[gone], now=gone + timedelta(minutes=minutes)))
    assert condition(status, "Exhausted") == ("True", "NoNodes")
    known = status.stock.known_until
    assert known is not None
    assert known <= gone + timedelta(minutes=13)


def test_a_node_that_comes_after_a_clock_was_ahead_is_no_start() -> None:
    """It had come 30 days before anybody waited for it, squared."""
    out = measure(seen(pool(), waiting=(waiting(1000.0),), now=NOW)).model_copy(
        update={"out_since": NOW + timedelta(days=30)}
    )
    now = NOW + timedelta(minutes=1)
    status = measure(seen(pool(out), nodes=[node()], newest=now, now=now))
    sums = counted.sums_of(status)
    assert (sums.starts, sums.start_seconds_squared) == (0, 0)
