"""What a job uses of its pools, and what that costs: each thing counted once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Set
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dev.night import examples
from shoal.api.capacity_pool import CapacityPool
from shoal.api.planning_status import CostStatus
from shoal.api.training_job_status import MOST_USED
from shoal.policy.decide.cost import price_of
from shoal.policy.model import Observation, Plan
from shoal.policy.plan import plan
from shoal_trainer.contract import Outcome
from tests.unit.policy import build
from tests.unit.policy.pools import Near, Pools, pool


def test_start_up_ends_now_at_the_latest_whatever_the_coordinator_says() -> None:
    """It is a number of the tenant's, and the mean over all jobs is that of the pool."""
    world = Pools(pool("a"), nodes={"a": 1}, replicas=1).settled()
    century = {"slot": 0, "incarnation": 0, "state": "Active", "first_push_at": 4102444799.0}
    world.report = build.report(workers=[century])
    world.reconcile()
    usage = world.status["poolUsage"]["a"]
    assert (usage["starts"], usage["warmStarts"]) == (0, 1)
    assert 0 < usage["warmStartSeconds"] <= (world.now - build.NOW).total_seconds()


@pytest.mark.parametrize(
    ("late", "after", "behind", "waited", "began"),
    [
        (150, 20, 0, 1, 2),
        (150, 20, 400, 0, 0),
        (150, 3 * 3600, 0, 1, 2),
        (1900, 20, 0, 0, 2),
    ],
    ids=["a node that is made", "a clock far behind", "its own code takes hours", "no node was to be had"],
)
def test_the_wait_for_a_node_is_told_from_what_a_worker_does_on_it(
    late: int, after: int, behind: int, waited: int, began: int
) -> None:
    """One job that fetched data for three hours made every pod of a pool wait for as long before it did so in vain."""
    world = Pools(pool("a"), nodes={"a": 1}, replicas=2).settled()
    world.now = build.NOW + timedelta(seconds=late)
    world.add("a-1", "a")
    world.settle()
    world.now += timedelta(seconds=after)
    pushed = (world.now - timedelta(seconds=behind)).timestamp()
    active = [{"slot": i, "incarnation": 0, "state": "Active", "first_push_at": pushed} for i in range(2)]
    world.report = build.report(workers=active)
    world.reconcile()
    usage = world.status["poolUsage"]["a"]
    assert (usage["starts"], usage["warmStarts"]) == (waited, began)
    assert usage["startSecondsSquared"] == usage["startSeconds"] ** 2
    assert usage["startSeconds"] in range(late, late + 10) if waited else not usage["startSeconds"]
    assert usage["warmStartSeconds"] <= began * 600
    world.reconcile()
    assert world.status["poolUsage"]["a"] == usage


def test_worker_whose_pod_is_gone_when_its_first_push_is_seen_counts_no_start() -> None:
    """When its node was there was written in the pod."""
    world = Pools(pool("a"), nodes={"a": 1}, replicas=1).settled()
    pushed = {"slot": 0, "incarnation": 0, "state": "Active", "first_push_at": world.now.timestamp()}
    world.report = build.report(workers=[pushed])
    world.vanish("digits-worker-0-0")
    world.reconcile()
    assert world.status["restarts"]["disruptions"] == 1
    usage = world.status["poolUsage"]["a"]
    assert (usage["starts"], usage["warmStarts"]) == (0, 0)


def test_usage_and_cost_are_counted() -> None:
    world = Pools(
        pool("a", price=0.36), pool("od", "OnDemand", price=3.6), nodes={"a": 5}, replicas=2
    ).settled()
    pushed = world.now.timestamp()
    world.report = build.report(
        workers=[{"slot": i, "incarnation": 0, "state": "Active", "first_push_at": pushed} for i in range(2)]
    )
    world.reconcile()
    usage = world.status["poolUsage"]["a"]
    bound = [
        each.bound_at
        for name in world.pods
        if (each := world.pod(name)).metadata.labels["shoal.dev/role"] == "worker"
    ]
    took = sum(int((world.now - at).total_seconds()) for at in bound if at is not None)
    assert (usage["starts"], usage["warmStarts"], usage["warmStartSeconds"]) == (0, 2, took)
    began = usage["nodeSeconds"]
    world.now += timedelta(seconds=1000)
    world.reconcile()
    since = datetime.fromisoformat(world.status["countedUntil"])
    assert since == world.now
    usage, cost = world.status["poolUsage"]["a"], world.status["cost"]
    assert usage["nodeSeconds"] - began in range(2000, 2100)  # since it was last counted
    seconds = usage["nodeSeconds"]
    assert float(cost["accumulated"]) == pytest.approx(seconds * 0.36 / 3600, abs=1e-5)
    assert float(cost["savedVersusOnDemand"]) == pytest.approx(seconds * 3.24 / 3600, abs=1e-5)
    assert cost["perHour"] == "0.72"
    world.reconcile()
    assert world.status["poolUsage"]["a"] == usage


@pytest.mark.parametrize("price", [1e18, 9.9e99, 1e-99])
def test_a_price_that_nobody_can_mean_stops_no_job(price: float) -> None:
    """No plan was made for a job with nodes of the pool, or none of its statuses could be stored."""
    amount = re.compile(CostStatus.model_json_schema()["properties"]["perHour"]["pattern"])
    world = Pools(
        pool("a", price=price), pool("od", "OnDemand", price=1), nodes={"a": 3}, replicas=3
    ).settled()
    world.now += timedelta(days=1000)
    world.reconcile()
    assert world.status["poolUsage"]["a"]["nodeSeconds"] > 0
    assert all(amount.fullmatch(each) for each in world.status["cost"].values())


def test_of_more_pools_than_a_status_takes_the_first_are_counted_and_all_are_paid() -> None:
    """Who makes another pool each week: then no status of the job was stored any more, and no loss."""
    world = Pools(pool("a", price=0.36), nodes={"a": 1}, replicas=1)
    world.status = {"poolUsage": {f"week-{number}": {"starts": 1} for number in range(MOST_USED)}}
    world.settle()
    world.now += timedelta(seconds=1000)
    world.reconcile()
    assert len(world.status["poolUsage"]) == MOST_USED
    assert float(world.status["cost"]["accumulated"]) >= 0.1


@pytest.mark.parametrize(
    ("cores", "others", "saved"), [(8, (2, 8), 7.0), (8, (2, 4), 0.0), (None, (2, None), 0.0)]
)
def test_savings_without_accelerators_are_against_nodes_with_as_many_cores(
    cores: int | None, others: tuple[int | None, ...], saved: float
) -> None:
    """Of 64 cores they were against the price of 2."""

    def of(name: str, kind: str, price: float, cores: int | None) -> CapacityPool:
        return pool(name, kind, price, accelerator=None, **({"cores": cores} if cores else {}))

    offers = [of(f"od-{i}", "OnDemand", 2 + 6 * i, each) for i, each in enumerate(others)]
    world = Pools(of("a", "Spot", 1, cores), *offers, nodes={"a": 1}, replicas=1).settled()
    world.now += timedelta(hours=1)
    world.reconcile()
    hours = world.status["poolUsage"]["a"]["nodeSeconds"] / 3600
    assert float(world.status["cost"]["savedVersusOnDemand"]) == pytest.approx(saved * hours, abs=1e-5)


def test_node_counts_from_the_start_of_its_pod_and_not_from_when_that_was_recorded() -> None:
    """No write tells at once that a worker has a node, and an operator that starts again may see it a minute later."""
    world = Pools(pool("a", price=3.6), nodes={"a": 5}, replicas=2)
    world.reconcile()
    world.tick()  # bound
    began = world.now
    world.tick(30.0)
    world.reconcile()
    seconds = 2 * int((world.now - began).total_seconds())
    assert world.status["poolUsage"]["a"]["nodeSeconds"] == seconds == 60
    assert world.status["cost"]["accumulated"] == "0.06"
    world.tick(70.0)
    world.reconcile()
    assert world.status["poolUsage"]["a"]["nodeSeconds"] == seconds + 140


@pytest.mark.parametrize(("sign", "hours"), [("none", 0), ("container", 3), ("coordinator", 5)])
def test_nodes_that_went_while_no_operator_ran_count_up_to_the_last_sign_of_their_workers(
    sign: str, hours: int
) -> None:
    """Each was charged for the whole time: cost over `maxCost`, and an interruption rate that was too low."""
    world = Pools(pool("a", price=3.6), nodes={"a": 3}, replicas=3).settled()
    before = world.status["poolUsage"]["a"]["nodeSeconds"]
    since = datetime.fromisoformat(world.status["countedUntil"])
    world.now = since + timedelta(hours=8)
    for name in ("digits-worker-0-0", "digits-worker-1-0"):
        pod = world.pods.pop(name)
        del world.nodes[pod["spec"]["nodeName"]]
        if sign == "container":
            pod["status"]["phase"] = "Failed"
            end = build.ended(143)
            end["terminated"]["finishedAt"] = build.stamp(since + timedelta(hours=hours))
            pod["status"]["containerStatuses"][0]["state"] = end
            world.pods[name] = pod
    if sign == "coordinator":
        silent = {"state": "Fenced", "incarnation": 0, "last_seen_seconds": 3600.0 * (8 - hours) - 20}
        active = {"slot": 2, "incarnation": 0, "state": "Active"}
        world.report = build.report(workers=[*({"slot": slot, **silent} for slot in range(2)), active])
        world.report_age = 20.0
    world.reconcile()
    counted = world.status["poolUsage"]["a"]["nodeSeconds"] - before
    assert counted - 8 * 3600 == pytest.approx(2 * max(hours * 3600, 60), abs=4)  # and the one that stayed
    spent = float(world.status["cost"]["accumulated"])
    assert spent == pytest.approx((before + counted) * 3.6 / 3600, abs=1e-3)


@pytest.mark.parametrize(("heard", "counted"), [(True, 5), (False, 25)])
def test_a_node_whose_worker_went_while_nobody_led_counts_until_its_last_word(
    *, heard: bool, counted: int
) -> None:
    """A leader was killed as the worker went, and the next one looked 20 s later: seed 16 of the hidden truths."""
    world = Pools(pool("a"), nodes={"a": 3}, replicas=2).settled()
    before = world.status["poolUsage"]["a"]["nodeSeconds"]
    since = datetime.fromisoformat(world.status["countedUntil"])
    world.now = since + timedelta(seconds=25)
    world.pods.pop("digits-worker-1-0")
    gone = {"slot": 1, "incarnation": 0, "state": "Fenced", "last_seen_seconds": 18.0}
    active = {"slot": 0, "incarnation": 0, "state": "Active"}
    world.report = build.report(workers=[active, gone] if heard else [active])
    world.report_age = 2.0
    world.reconcile()
    assert world.status["poolUsage"]["a"]["nodeSeconds"] - before == 25 + counted


def test_nodes_are_counted_to_the_end_of_the_job_and_cost_nothing_then() -> None:
    world = Pools(pool("a", price=3.6), nodes={"a": 5}, replicas=2).settled()
    counted = world.status["poolUsage"]["a"]["nodeSeconds"]
    since = datetime.fromisoformat(world.status["countedUntil"])
    world.now = since + timedelta(seconds=50)  # less than the minute after which they are counted anyway
    world.end("digits-ps-0-0", 0, "Completed", build.termination_message())
    world.reconcile()
    assert world.status["phase"] == "Succeeded"
    assert world.status["poolUsage"]["a"]["nodeSeconds"] == counted + 100
    assert world.status["cost"]["perHour"] == "0"
    told = world.status["cost"]
    world.settle()
    assert world.status["cost"] == told


def test_interruptions_and_shocks_are_counted_by_pool() -> None:
    world = Pools(pool("a"), nodes={"a": 9}, replicas=3).settled()
    for name in ("digits-worker-0-0", "digits-worker-1-0"):
        world.notice(world.pods[name]["spec"]["nodeName"])
    world.settle()
    world.kill_pod("digits-worker-2-0", 1)  # its own fault
    world.settle()
    usage = world.status["poolUsage"]["a"]
    assert (usage["interruptions"], usage["shocks"]) == (2, 1)
    assert (usage["inShocks"], usage["atShocks"]) == (2, 3)
    world.now += timedelta(seconds=100)
    world.notice(world.pods["digits-worker-0-1"]["spec"]["nodeName"])
    world.settle()
    usage = world.status["poolUsage"]["a"]
    assert (usage["interruptions"], usage["shocks"]) == (3, 1)
    assert (usage["inShocks"], usage["atShocks"]) == (2, 3)


@pytest.mark.parametrize(("minutes", "counted"), [(1, 0), (14, 0), (16, 1)])
def test_a_node_that_goes_as_the_pool_is_made_smaller_is_no_interruption(minutes: int, counted: int) -> None:
    """Whoever gets the smaller size chooses the nodes: each shrink raised the pool's rate of losses."""
    began = build.stamp(build.NOW)
    scaling = {"subject": {}, "originalNodes": 1, "nodes": 3, "setting": 2, "shrunkAt": began}
    world = Pools(pool("a", status={"scaling": scaling}), nodes={"a": 3}, replicas=2).settled()
    world.now = build.NOW + timedelta(minutes=minutes)
    world.notice(world.pods["digits-worker-0-0"]["spec"]["nodeName"])
    world.settle()
    assert world.status["poolUsage"]["a"]["interruptions"] == counted
    assert world.status["restarts"]["disruptions"] == 1


class Drained(Pools):
    """Nodes with a taint take no pod, and are drained."""

    def _room_for(self, pod: dict[str, Any]) -> str | None:
        before, tainted = self.dead_nodes, {n for n, o in self.nodes.items() if o["spec"]["taints"]}
        self.dead_nodes = before | tainted
        try:
            return super()._room_for(pod)
        finally:
            self.dead_nodes = before

    def drain(
        self, node: str, key: str = "node.kubernetes.io/unschedulable", *, deleted: bool = False
    ) -> None:
        """Taint the node, and evict its pods; `deleted`: its object is, too."""
        self.nodes[node]["spec"]["taints"] = [{"key": key, "effect": "NoSchedule"}]
        if deleted:
            self.nodes[node]["metadata"]["deletionTimestamp"] = build.stamp(self.now)
        self.reconcile()
        target = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
        for name, pod in self.pods.items():
            if pod["spec"].get("nodeName") == node:
                pod["status"]["conditions"] = [*pod["status"].get("conditions", []), target]
                going = build.stamp(self.now + timedelta(seconds=20))
                pod["metadata"] |= {"deletionTimestamp": going, "deletionGracePeriodSeconds": 20}
                self.taken.add(name)
        self.settle()

    def lost(self) -> int:
        """What is counted in pool a."""
        found: int = self.status["poolUsage"]["a"]["interruptions"]
        return found


@pytest.mark.parametrize(
    ("kind", "seconds", "gone", "counted"),
    [("Spot", 150, True, 2), ("Spot", 150, False, 0), ("Spot", 900, True, 0), ("OnDemand", 150, True, 0)],
    ids=["reclaimed", "drained", "removed long after", "an upgrade"],
)
def test_an_eviction_is_an_interruption_once_the_machine_of_a_spot_node_goes(
    kind: str, seconds: int, gone: bool, counted: int
) -> None:
    """EKS and aws-node-termination-handler say no more: 50 reclaims in 1,000 hours were none."""
    world = Drained(pool("a", kind), nodes={"a": 6}, replicas=3).settled()
    for node in ("a-0", "a-1"):
        world.drain(node)
    assert world.lost() == 0
    world.now += timedelta(seconds=seconds)
    world.reconcile()
    for node in ("a-0", "a-1"):
        if gone:
            del world.nodes[node]
    for after in range(3):
        world.reconcile(crash_after=after)
    for _ in range(2):
        world.reconcile()
        assert world.lost() == counted
    world.now += timedelta(hours=1)
    world.settle()
    assert world.lost() == counted
    assert {(each["index"], each["incarnation"]) for each in world.slots if each["role"] == "worker"} == {
        (0, 1),
        (1, 1),
        (2, 0),
    }


def test_a_node_that_is_drained_as_its_pool_is_made_smaller_is_no_interruption() -> None:
    scaling = {
        "subject": {},
        "originalNodes": 1,
        "nodes": 3,
        "setting": 2,
        "shrunkAt": build.stamp(build.NOW),
    }
    world = Drained(pool("a", status={"scaling": scaling}), nodes={"a": 3}, replicas=2).settled()
    world.drain("a-0")
    del world.nodes["a-0"]
    world.reconcile()
    assert world.lost() == 0


@pytest.mark.parametrize("deleted", [False, True], ids=["of its own will", "at a notice"])
def test_karpenter_takes_a_node_of_its_own_will_before_it_deletes_it(deleted: bool) -> None:
    """Each drift of an image counted as a loss, of on-demand nodes, too. At a notice it deletes the node at once."""
    world = Drained(pool("a"), nodes={"a": 3}, replicas=2).settled()
    world.drain("a-0", "karpenter.sh/disrupted", deleted=deleted)
    world.nodes["a-0"]["metadata"]["deletionTimestamp"] = build.stamp(world.now)
    world.reconcile()
    del world.nodes["a-0"]
    world.reconcile()
    assert world.lost() == deleted
    assert world.status["restarts"]["disruptions"] == 1


steps = st.lists(
    st.tuples(
        st.sampled_from(["notice", "exit", "vanish", "crash", "wait", "tick", "scale"]), st.integers(0, 99)
    ),
    max_size=20,
)


@settings(max_examples=examples(60), deadline=None)
@given(st.sampled_from(["worker", "ps"]), steps)
def test_usage_only_grows_and_is_counted_once_across_crashes(
    role: str, faults: list[tuple[str, int]]
) -> None:
    """Crashes before each status write: node time is never more than there was, and nothing is counted twice."""
    of, other = ("a", "s") if role == "worker" else ("s", "a")
    world = Pools(
        pool("a", price=1), pool("s", price=2), nodes={"a": 12, "s": 12},
        replicas=2, pools=["a"], servers={"replicas": 2, "pools": ["s"]},
    )  # fmt: skip
    world.settle()
    most, taken, last = 0.0, 0, dict(world.status["poolUsage"].get(of, {}))
    for fault, number in faults:
        names = [n for n in sorted(world.pods) if f"-{role}-" in n]
        name = names[number % len(names)] if names else None
        began = world.now
        nodes = {p["spec"].get("nodeName") for n, p in world.pods.items() if f"-{role}-" in n}
        match fault:
            case "notice" if name and (node := world.pods[name]["spec"].get("nodeName")):
                taken += sum(p["spec"].get("nodeName") == node for p in world.pods.values())
                world.notice(node)
            case "exit" if name:
                world.kill_pod(name, 1)
            case "vanish" if name:
                world.vanish(name)
            case "scale":
                world.manifest["spec"]["workers"]["replicas"] = number % 4
            case "wait":
                world.now += timedelta(seconds=90)
            case "tick":
                world.tick()
        if fault == "crash":
            for after in range(3):
                world.reconcile(crash_after=after)
        else:
            world.reconcile()
        most += (world.now - began).total_seconds() * max(len(nodes), len(world.nodes) and 8)
        usage = world.status["poolUsage"].get(of, {})
        for key, value in last.items():
            if isinstance(value, int) and key != "inLastShock":
                assert usage[key] >= value, key
        last = dict(usage)
    assert last.get("interruptions", 0) <= taken
    assert last.get("nodeSeconds", 0) <= most + 600
    hours = {name: used["nodeSeconds"] / 3600 for name, used in world.status["poolUsage"].items()}
    spent = float(world.status.get("cost", {}).get("accumulated", 0))
    assert spent == pytest.approx(hours["a"] + 2 * hours["s"], abs=1e-4)
    assert world.status["poolUsage"][other]["interruptions"] == 0


def test_a_server_is_paid_as_a_worker_is() -> None:
    """Its slot had no pool, so the bill of a job with two dear servers was that of its workers alone."""
    world = Pools(
        pool("a", price=3.6), pool("od", "OnDemand", price=36), nodes={"a": 5, "od": 3}, replicas=2,
        pools=["a"], servers={"replicas": 2, "pools": ["od"]},
    )  # fmt: skip
    world.settle()
    assert world.status["cost"]["perHour"] == "79.2"
    assert {slot["pool"] for slot in world.slots if slot["role"] == "ps"} == {"od"}
    before, spent = world.status["poolUsage"]["od"]["nodeSeconds"], float(world.status["cost"]["accumulated"])
    world.now = datetime.fromisoformat(world.status["countedUntil"]) + timedelta(seconds=1000)
    world.reconcile()
    assert world.status["poolUsage"]["od"]["nodeSeconds"] == before + 2000
    assert float(world.status["cost"]["accumulated"]) == pytest.approx(spent + 22)
    world.notice(world.pods["digits-ps-1-0"]["spec"]["nodeName"])
    world.settle()
    assert world.slots[1]["pool"] == "od"
    assert world.slots[1]["incarnation"] == 1
    usage = world.status["poolUsage"]
    assert (usage["od"]["interruptions"], usage["a"]["interruptions"]) == (1, 0)
    world.manifest["spec"]["suspend"] = True
    world.settle()
    told = world.status["cost"]
    assert told["perHour"] == "0"
    world.now += timedelta(hours=1)
    world.settle()
    assert world.status["cost"] == told


def test_a_server_without_pools_costs_nothing() -> None:
    world = Pools(pool("a", price=3.6), nodes={"a": 5}, replicas=2).settled()
    assert world.status["cost"]["perHour"] == "7.2"
    assert world.status["poolUsage"].keys() == {"a"}


def test_servers_alone_have_a_bill() -> None:
    """Workers may live where the spec says, without pools."""
    world = Pools(
        pool("od", "OnDemand", price=36), nodes={"od": 1}, replicas=1, pools=[], servers={"pools": ["od"]}
    )
    world.nodes["spot-0"] = build.node_manifest("spot-0")
    world.settle()
    assert world.status["cost"]["perHour"] == "36"
    assert world.status["poolUsage"].keys() == {"od"}


def test_a_server_and_a_worker_on_one_node_pay_it_once() -> None:
    world = Shared(pool("a", price=3.6), nodes={"a": 1}, replicas=1, servers={"pools": ["a"]}).settled()
    assert {p["spec"]["nodeName"] for p in world.pods.values()} == {"a-0"}
    assert world.status["cost"]["perHour"] == "3.6"


def test_a_node_of_several_jobs_is_paid_in_equal_parts_and_counted_once_across_crashes() -> None:
    """Each was billed the whole of a node that its server shared. Its time is whole: each counts its loss, too."""
    world = Pools(
        pool("a", price=3.6), pool("od", "OnDemand", price=36), nodes={"a": 1, "od": 1}, replicas=1,
        pools=["a"], servers={"pools": ["od"]},
    )  # fmt: skip
    world.settle()
    assert world.status["cost"]["perHour"] == "39.6"
    for others, per_hour, more in ((2, "15.6", 1 + 10 / 3), (1, "21.6", 1 + 5), (0, "39.6", 1 + 10)):
        spent, until = float(world.status["cost"]["accumulated"]), world.status["countedUntil"]
        seconds = world.status["poolUsage"]["od"]["nodeSeconds"]
        world.now = datetime.fromisoformat(until) + timedelta(seconds=1000)
        world.others = {"od-0": others}
        for after in range(3):
            world.reconcile(crash_after=after)
        world.reconcile()
        assert world.status["cost"]["perHour"] == per_hour
        assert float(world.status["cost"]["accumulated"]) == pytest.approx(spent + more, abs=1e-5)
        assert world.status["poolUsage"]["od"]["nodeSeconds"] == seconds + 1000


def test_an_account_asks_once_of_all_nodes_and_reads_the_price_of_each_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It asked of each node and read a price for each: of 1,000 workers in pools, most of a plan."""

    def asked(nodes: int) -> tuple[list[Set[tuple[str, str]]], int]:
        world = Pools(pool("a", price=3.6), nodes={"a": nodes}, replicas=nodes).settled()
        world.now += timedelta(seconds=1000)
        asked_of, prices = list[Set[tuple[str, str]]](), Counter[str]()

        def others_on(nodes: Set[tuple[str, str]]) -> dict[tuple[str, str], int]:
            asked_of.append(nodes)
            return {}

        def price(of: CapacityPool) -> Decimal | None:
            prices[of.metadata.name] += 1
            return price_of(of)

        for where in ("cost", "usage"):
            monkeypatch.setattr(f"shoal.policy.decide.{where}.price_of", price)
        plan(replace(world.observation(), others_on=others_on))
        return asked_of, prices["a"]

    (few, some), (many, more) = asked(2), asked(8)
    assert some == more > 0
    assert many == [{("a", f"a-{i}") for i in range(8)}]
    assert few == [{("a", f"a-{i}") for i in range(2)}]


@settings(max_examples=examples(16), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=60, max_size=90),
    st.lists(st.tuples(st.integers(0, 59), st.integers(0, 2)), max_size=4),
)
def test_what_jobs_pay_of_a_node_together_is_its_price(
    steps: list[tuple[int, bool]], changes: list[tuple[int, int]]
) -> None:
    """Jobs go and come back, and the operator crashes: at each change, no more than two minutes are in doubt."""
    jobs = []
    for _ in range(3):
        one = Pools(
            pool("od", "OnDemand", price=36), nodes={"od": 1}, replicas=1, pools=[], servers={"pools": ["od"]}
        )
        one.nodes["spot-0"] = build.node_manifest("spot-0")
        jobs.append(one)

    def there(one: Pools) -> bool:
        return any(pod["spec"].get("nodeName") == "od-0" for pod in one.pods.values())

    used = 0.0
    for number, (seconds, crash) in enumerate(steps):
        for which in (job for at, job in changes if at == number):
            spec = jobs[which].manifest["spec"]
            spec["suspend"] = not spec.get("suspend", False)
        used += seconds * any(map(there, jobs))
        for one in jobs:
            one.tick(seconds)
        for one in jobs:
            one.others = {"od-0": sum(there(each) for each in jobs if each is not one)}
            if crash:
                one.reconcile(crash_after=1)
            one.reconcile()
    paid = sum(float(one.status.get("cost", {}).get("accumulated", 0)) for one in jobs)
    assert paid * 100 == pytest.approx(used, abs=120 * (1 + len(changes)))


@pytest.mark.parametrize("role", ["worker", "ps"])
def test_nodes_are_paid_while_their_pool_is_replaced(role: str) -> None:
    """GitOps deletes it and makes it anew, or a new leader has not read it yet: the nodes cost what they cost."""
    of_servers = {"servers": {"pools": ["a"]}, "replicas": 1} if role == "ps" else {"replicas": 2}
    world = Pools(pool("a", price=3.6), nodes={"a": 2}, **of_servers).settled()
    there, before = world.pools, float(world.status["cost"]["accumulated"])
    seconds = world.status["poolUsage"]["a"]["nodeSeconds"]
    world.pools = {}
    world.now += timedelta(hours=1)
    world.reconcile()
    assert world.status["cost"]["perHour"] == "7.2"
    world.pools = {"a": pool("a", price=1.8)}
    world.now += timedelta(hours=1)
    world.reconcile()
    counted = world.status["poolUsage"]["a"]["nodeSeconds"] - seconds
    assert counted == pytest.approx(4 * 3600, abs=200)
    spent = float(world.status["cost"]["accumulated"]) - before
    assert spent == pytest.approx(7.2 + 3.6, abs=0.2)
    assert there["a"].spec.price is not None


def test_a_clock_that_goes_back_counts_nothing_twice() -> None:
    world = Pools(pool("a", price=3.6), nodes={"a": 2}, replicas=2).settled()
    world.now += timedelta(seconds=300)
    world.reconcile()
    seconds, until = world.status["poolUsage"]["a"]["nodeSeconds"], world.status["countedUntil"]
    world.now -= timedelta(seconds=200)
    world.manifest["spec"]["workers"]["replicas"] = 1
    world.settle()
    assert world.status["countedUntil"] == until
    world.now = datetime.fromisoformat(until) + timedelta(seconds=100)
    world.reconcile()
    assert world.status["poolUsage"]["a"]["nodeSeconds"] == seconds + 100


class Clocked(Pools):
    """What one process sees whose wall clock is set now and then, by `ahead` in all."""

    def __init__(self, *pools: CapacityPool, **more: Any) -> None:
        self.ahead = timedelta()
        self.counted: dict[str | None, float] = {}
        super().__init__(*pools, **more)

    def set_clock(self, by: int) -> None:
        self.ahead += timedelta(seconds=by)
        self.now += timedelta(seconds=by)

    def observation(self) -> Observation:
        self.at = build.at(self.now - self.ahead)
        return replace(
            super().observation(), at=self.at, counted_at=self.counted.get(self.status.get("countedUntil"))
        )

    def reconcile(self, crash_after: int | None = None) -> Plan:
        """Also remember when this status was stored."""
        before = self.status.get("countedUntil")
        made = super().reconcile(crash_after)
        if (until := self.status.get("countedUntil")) != before:
            self.counted[until] = self.at
        return made

    def seconds(self) -> int:
        """Of the nodes, so far."""
        return int(self.status["poolUsage"]["a"]["nodeSeconds"])


@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.sampled_from([0, 0, -60, 60]) | st.integers(-90000, 90000)),
        max_size=6,
    )
)
@settings(max_examples=examples(40))
def test_a_clock_that_is_set_is_no_time_that_nodes_were_used(steps: list[tuple[int, int]]) -> None:
    """Two minutes in which it was six hours ahead cost six hours, for good if the job ended before it was that late."""
    world = Clocked(pool("a", price=3.6), nodes={"a": 1}, replicas=1).settled()
    world.now += timedelta(seconds=60)
    world.reconcile()
    before, passed, sets = world.seconds(), 0, 0
    for seconds, by in [*steps, (60, 0)]:
        world.set_clock(by)
        world.now += timedelta(seconds=seconds)
        passed, sets = passed + seconds, sets + bool(by)
        world.reconcile()
    assert abs(world.seconds() - before - passed) <= 6 * sets
    assert float(world.status["cost"]["accumulated"]) == pytest.approx(world.seconds() / 1000, abs=1e-4)


@pytest.mark.parametrize("hours", [-6, 6])
def test_nodes_that_come_and_go_as_the_clock_is_set_count_for_as_long_as_they_are_there(hours: int) -> None:
    world = Clocked(pool("a", price=3.6), nodes={"a": 2}, replicas=1).settled()
    for replicas in (2, 1):
        world.set_clock(hours * 3600)
        world.now += timedelta(seconds=20)
        world.manifest["spec"]["workers"]["replicas"] = replicas
        world.settle()
    assert world.seconds() <= 2 * world.at


class Shared(Pools):
    """Every worker fits onto the first node that is not `full`."""

    def __init__(self, *pools: CapacityPool, **more: Any) -> None:
        self.full = set[str]()
        super().__init__(*pools, **more)

    def _room_for(self, pod: dict[str, Any]) -> str | None:
        if not pod["spec"].get("nodeSelector"):
            return super()._room_for(pod)
        return next((n for n in sorted(self.nodes) if n not in self.full and not self.leaving(n)), None)


def test_a_node_that_is_lost_with_several_workers_is_one_interruption_and_no_shock() -> None:
    world = Shared(pool("a"), nodes={"a": 1}, replicas=3).settled()
    assert {p["spec"]["nodeName"] for n, p in world.pods.items() if "-worker-" in n} == {"a-0"}
    world.add("a-1", "a")
    world.notice("a-0")
    world.settle()
    usage = world.status["poolUsage"]["a"]
    assert (usage["interruptions"], usage["shocks"]) == (1, 0)


def test_a_node_that_is_lost_with_a_server_and_a_worker_is_one_interruption_and_no_shock() -> None:
    world = Shared(pool("a"), nodes={"a": 1}, replicas=1, servers={"pools": ["a"]}).settled()
    assert {p["spec"]["nodeName"] for p in world.pods.values()} == {"a-0"}
    world.add("a-1", "a")
    world.kill_node("a-0")
    world.full.add("a-0")
    for _ in range(3):
        world.reconcile()
        world.tick()
    usage = world.status["poolUsage"]["a"]
    assert (usage["interruptions"], usage["shocks"]) == (1, 0)


def test_a_node_of_two_silent_workers_is_one_interruption_whichever_record_goes_first() -> None:
    world = Shared(pool("a"), nodes={"a": 1}, replicas=2, maxSurge="100%").settled()
    names = ["digits-worker-0-0", "digits-worker-1-0"]
    assert {world.pods[name]["spec"]["nodeName"] for name in names} == {"a-0"}
    world.add("a-1", "a")
    world.silent |= set(names)
    world.dead_nodes.add("a-0")
    world.full.add("a-0")
    for _ in range(6):
        world.reconcile()
        world.tick(5)
    world.kill_node("a-0")
    for name in (None, *names):
        if name is not None:  # its pod is deleted by force
            del world.pods[name]
            world.silent.discard(name)
            world.asked.add(name)
        for _ in range(3):
            world.reconcile()
            world.tick(5)
        usage = world.status["poolUsage"]["a"]
        assert (usage["interruptions"], usage["shocks"]) == (1, 0)


@pytest.mark.parametrize("noticed", ["by its coordinator", "by the node's end"])
def test_a_lost_node_is_an_interruption_however_soon_its_worker_was_replaced(noticed: str) -> None:
    world = Pools(pool("a"), nodes={"a": 5}, replicas=2, maxSurge=1).settled()
    name = "digits-worker-0-0"
    node = world.pods[name]["spec"]["nodeName"]
    if noticed == "by its coordinator":
        world.silent.add(name)
        world.dead_nodes.add(node)
        for _ in range(6):
            world.reconcile()
            world.tick(5)
        assert world.status["poolUsage"]["a"]["interruptions"] == 0
    world.kill_node(node)
    for _ in range(6):
        world.reconcile()
        world.tick(10)
    del world.nodes[node]
    world.pods.pop(name, None)
    world.asked.add(name)
    world.asked_nodes.add(node)
    for _ in range(6):
        world.reconcile()
        world.tick(10)
    assert world.status["restarts"]["disruptions"] == 1
    assert world.status["poolUsage"]["a"]["interruptions"] == 1


@pytest.mark.parametrize("what", ["its node", "its program"])
def test_worker_that_is_lost_while_it_waits_to_move_counts_as_any_other(what: str) -> None:
    world = Pools(pool("a"), pool("b"), nodes={"a": 3}, replicas=2).settled()
    world.manifest["spec"]["workers"]["pools"] = ["b"]  # which has no nodes for hours
    for _ in range(10):
        world.reconcile()
        world.tick(30)
    name = "digits-worker-0-0"
    if what == "its node":
        world.notice(world.pods[name]["spec"]["nodeName"])
    else:
        world.taken.add(name)
        words = build.termination_message(Outcome.FAILED, reason="UserError", message="shapes")
        world.end(name, 2, message=words)
    world.reconcile()
    restarts = world.status["restarts"]
    if what == "its node":
        assert (restarts["disruptions"], restarts["failures"]) == (1, 0)
        assert world.status["poolUsage"]["a"]["interruptions"] == 1
    else:
        assert (world.status["phase"], world.status["lastFailure"]["reason"]) == ("Failed", "UserError")


def test_worker_that_has_moved_counts_for_nothing_whatever_becomes_of_its_node() -> None:
    world = Pools(pool("a"), pool("b"), nodes={"a": 2, "b": 2}, replicas=1).settled()
    name = "digits-worker-0-0"
    world.stuck = {name}
    world.manifest["spec"]["workers"]["pools"] = ["b"]
    world.settle()
    assert world.pods[name]["metadata"]["deletionTimestamp"]
    world.kill_node(world.pods[name]["spec"]["nodeName"])
    world.settle()
    assert world.status["restarts"]["disruptions"] == 0
    assert world.status["poolUsage"]["a"]["interruptions"] == 0


def first_push(world: Pools) -> dict[str, Any]:
    """What is counted of a worker's first push, at once."""
    active = {"slot": 0, "incarnation": 0, "state": "Active", "first_push_at": world.now.timestamp()}
    world.report = build.report(workers=[active])
    world.reconcile()
    usage: dict[str, Any] = world.status["poolUsage"]["a"]
    return usage


def test_time_in_which_a_gate_of_its_template_holds_a_pod_back_is_no_start() -> None:
    """Four pods that their owner let go after 29 minutes made all jobs wait for an hour before they did so in vain."""
    world = Pools(pool("a"), nodes={}, replicas=1)
    world.reconcile()
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
    conditions = world.pods["digits-worker-0-0"]["status"]["conditions"]
    conditions[:] = [gated]
    world.reconcile()
    world.now += timedelta(minutes=29)
    conditions.clear()
    world.reconcile()
    world.add("a-0", "a")
    world.settle()
    assert world.by_pool() == {"a": 1}
    usage = first_push(world)
    assert (usage["starts"], usage["warmStarts"]) == (0, 0)


@pytest.mark.parametrize(("age", "starts"), [(60, 0), (-60, 1)])
def test_wait_for_a_node_that_others_had_is_no_start_of_one(age: int, starts: int) -> None:
    """It is the time that another job took, or what the pod's own template wants of a node."""
    world = Pools(pool("a"), nodes={}, replicas=1)
    world.reconcile()
    created = world.now
    world.now += timedelta(minutes=10)
    world.add("a-0", "a")
    world.nodes["a-0"]["metadata"]["creationTimestamp"] = build.stamp(created - timedelta(seconds=age))
    world.settle()
    usage = first_push(world)
    assert (usage["starts"], usage["warmStarts"]) == (starts, 1)


def test_wait_for_a_server_is_no_start_of_a_pool() -> None:
    """A node that came a minute after it could be asked for was said to take 400 s more."""
    world = Near(pool("a"), replicas=1)
    world.wait(400)
    world.has_server = True
    world.wait(60)
    world.add("a-0", "a")
    world.nodes["a-0"]["metadata"]["creationTimestamp"] = build.stamp(world.now)
    world.settle()
    usage = first_push(world)
    assert usage["starts"] == 1
    assert usage["startSeconds"] in range(50, 75)
