"""Clocks of others that are ahead: nothing is waited for longer than it is meant to be."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dev.night import examples
from shoal.api.kube import Node, Pod
from shoal.api.training_job import TrainingJob
from shoal.controllers.arrival import as_heard
from shoal.controllers.state import ClusterState, Wakes
from shoal.manifests.names import first_incarnation
from shoal.policy.common.timers import Timers
from shoal.policy.common.times import TOLERATED
from shoal.policy.facts.blip import suspicion
from shoal.policy.model import Reason
from tests.unit.controllers.clusters import KEY, Rig
from tests.unit.policy import build

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
MOMENTS = st.integers(-7200, 7200).map(lambda seconds: build.stamp(NOW + timedelta(seconds=seconds)))


@st.composite
def pods(draw: st.DrawFn) -> Pod:
    grace = draw(st.none() | st.integers(0, 600))
    meta = {"name": "p", "uid": "u", "resourceVersion": "1", "creationTimestamp": draw(MOMENTS)}
    if grace is not None:
        meta |= {"deletionTimestamp": draw(MOMENTS), "deletionGracePeriodSeconds": grace}
    kinds = draw(st.lists(st.sampled_from(["Ready", "PodScheduled", "DisruptionTarget"]), unique=True))
    conditions = [{"type": each, "status": "True", "lastTransitionTime": draw(MOMENTS)} for each in kinds]
    state = draw(
        st.sampled_from(
            [
                {"running": {"startedAt": draw(MOMENTS)}},
                {"terminated": {"exitCode": 1, "startedAt": draw(MOMENTS), "finishedAt": draw(MOMENTS)}},
                {"waiting": {"reason": "Pulling"}},
            ]
        )
    )
    status = {
        "startTime": draw(st.none() | MOMENTS),
        "conditions": conditions,
        "containerStatuses": [{"name": "worker", "state": state}],
    }
    return Pod.model_validate({"metadata": meta, "status": status})


def times(part: Any) -> dict[str, str]:
    """All that look like times, by their place."""
    if isinstance(part, str):
        return {"": part} if part.startswith("202") and part.endswith("Z") else {}
    inner = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    return {f"{name}/{below}": time for name, each in inner for below, time in times(each).items()}


@given(pods(), st.integers(0, 10_000))
@settings(max_examples=examples(300))
def test_no_time_of_a_pod_is_ahead_and_what_was_heard_first_stays(pod: Pod, later: int) -> None:
    heard = as_heard(None, pod, NOW)
    latest = NOW + TOLERATED
    grace = timedelta(seconds=pod.metadata.deletion_grace_period_seconds or 0)
    before, after = (times(each.model_dump(mode="json")) for each in (pod, heard))
    assert before.keys() == after.keys()
    for name, said in before.items():
        limit = latest + grace if name.startswith("metadata/deletion") else latest
        assert after[name] <= build.stamp(limit)
        assert (after[name] == said) == (said <= build.stamp(limit))
    assert as_heard(heard, heard, NOW) is heard
    again = as_heard(heard, pod, NOW + timedelta(seconds=later))
    for name, first in times(again.model_dump(mode="json")).items():
        assert first == after[name] or first == before[name] <= build.stamp(
            latest + timedelta(seconds=later) + grace
        )


@pytest.mark.parametrize("moment", [NOW, NOW - HOUR, NOW + TOLERATED])
def test_what_is_not_ahead_is_kept_as_it_is(moment: datetime) -> None:
    manifest = build.node_manifest("n")
    manifest["status"]["conditions"][0]["lastTransitionTime"] = build.stamp(moment)
    node = Node.model_validate(manifest)
    assert as_heard(None, node, NOW) is node


def test_a_job_whose_last_leader_had_a_clock_that_is_ahead() -> None:
    slot = {"role": "worker", "index": 0, "incarnation": 0, "state": "Draining", "cause": "NodeShutdown"}
    manifest = build.job_manifest()
    manifest["status"] = {
        "startTime": build.stamp(NOW - HOUR),
        "slots": [{**slot, "endedAt": build.stamp(NOW + HOUR)}],
    }
    state = ClusterState(Wakes(), wall=lambda: NOW)
    state.jobs.put(TrainingJob.model_validate(manifest))
    [job] = state.jobs.all()
    assert job.status.slots[0].ended_at == NOW
    assert job.status.start_time == NOW - HOUR


def test_the_pods_of_a_named_run_are_numbered_alike_by_each_process_at_any_time() -> None:
    """By when the API server says that the job was made: a minute later another first number was told to a server that
    replaced one, which began anew, and did not ask the workers for what they had."""
    manifest = build.job_manifest(storage={"uri": "s3://bucket/runs", "run": "nightly"})
    manifest["metadata"]["creationTimestamp"] = build.stamp(NOW + timedelta(seconds=30))
    seen = []
    for later in (0, 60):
        state = ClusterState(Wakes(), wall=lambda later=later: NOW + timedelta(seconds=later))
        state.jobs.put(TrainingJob.model_validate(manifest))
        seen += map(first_incarnation, state.jobs.all())
    assert seen[0] == seen[1]


def suspected(state: ClusterState, nodes: int, now: datetime) -> Reason | None:
    """What is suspected of a node that is not heard."""
    seen = build.observe(
        build.job(),
        nodes={str(number): build.node(str(number)) for number in range(nodes)},
        silent_nodes=state.silent_nodes,
        nodes_heard_again=state.nodes_heard_again,
        now=now,
    )
    return suspicion(seen, None, Timers(now))


def test_nodes_that_turn_unknown_together_do_so_now_though_the_clock_of_their_cluster_is_behind() -> None:
    """By such a clock they had been Unknown for long: none was waited for, and parameter servers were replaced."""
    state, later = ClusterState(Wakes(), wall=lambda: now), timedelta(seconds=30)

    def put(version: int, ready: str, said: datetime) -> None:
        for number in range(3):
            manifest = build.node_manifest(f"n{number}", ready=ready)
            manifest["metadata"]["resourceVersion"] = str(version)
            manifest["status"]["conditions"][0]["lastTransitionTime"] = build.stamp(said)
            manifest["spec"]["taints"] = [{"key": f"example.org/{version}", "effect": "NoSchedule"}]
            state.nodes.put(Node.model_validate(manifest))

    now = NOW
    put(1, "True", now - 2 * HOUR)
    put(2, "Unknown", now - HOUR)
    assert state.silent_nodes == [NOW] * 3
    now += later
    found = suspected(state, 10, now)
    assert found is not None
    assert found.reason == "ManyNodesUnknown"
    put(3, "Unknown", NOW - HOUR)
    assert state.silent_nodes == [NOW] * 3  # it is the same silence
    put(4, "True", now - HOUR)
    put(5, "Unknown", now - TOLERATED)
    assert state.silent_nodes == [now - TOLERATED] * 3  # as of a clock that somebody sets


def test_nodes_that_were_unknown_while_the_watch_was_behind_have_been_heard_again() -> None:
    """A list that was read while they came back showed the last ones alone, which were believed gone."""
    state = ClusterState(Wakes(), wall=lambda: NOW)

    def put(number: int, version: int, ready: str, said: datetime) -> None:
        manifest = build.node_manifest(f"n{number}", ready=ready)
        manifest["metadata"]["resourceVersion"] = str(version)
        manifest["status"]["conditions"][0]["lastTransitionTime"] = build.stamp(said)
        state.nodes.put(Node.model_validate(manifest))

    for number in range(6):
        put(number, 1, "True", NOW - HOUR)
    assert state.nodes_heard_again == []
    for number in range(5):
        put(number, 2, "True", NOW)
    put(5, 2, "Unknown", NOW - timedelta(seconds=14))
    found = suspected(state, 6, NOW)
    assert found is not None
    put(5, 3, "True", NOW)
    assert state.nodes_heard_again == [NOW] * 6


@pytest.mark.looptime
def test_node_that_booted_while_the_watch_was_behind_was_not_silent() -> None:
    state = ClusterState(Wakes(), wall=lambda: NOW)
    for boot, said in (("one", NOW - HOUR), ("two", NOW)):
        manifest = build.node_manifest("n0", boot=boot)
        manifest["metadata"]["resourceVersion"] = "1" if boot == "one" else "2"
        manifest["status"]["conditions"][0]["lastTransitionTime"] = build.stamp(said)
        state.nodes.put(Node.model_validate(manifest))
    assert state.nodes_heard_again == []


@pytest.mark.looptime
def test_taint_without_a_time_was_added_when_it_was_first_seen() -> None:
    """A failure an hour later is none of its node."""
    taint = {"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}
    before = build.node()
    first = as_heard(before, build.node(taints=[taint]), NOW)
    assert [each.time_added for each in first.spec.taints] == [build.stamp(NOW)]
    later = as_heard(first, build.node(taints=[taint], boot="boot-2"), NOW + HOUR)
    assert later.spec.taints == first.spec.taints
    unknown = as_heard(None, build.node(taints=[taint]), NOW)
    assert [each.time_added for each in unknown.spec.taints] == [None], "it may be older"
    assert as_heard(unknown, build.node(taints=[taint]), NOW).spec.taints == unknown.spec.taints


@pytest.mark.looptime
async def test_a_pod_that_stays_on_a_lost_node_is_removed_in_time_though_the_clock_of_its_server_is_ahead() -> (
    None
):
    """`forceDeleteAfterSeconds` is a minute. It was one more than the hour by which that clock is ahead."""
    rig = Rig()
    rig.state.nodes.put(build.node("spot-0"))
    rig.apply(workers={"replicas": 1})
    await rig.reconcile(KEY)
    rig.see()
    path = "/api/v1/namespaces/ns/pods/digits-worker-0-0"
    rig.cluster.change(path, spec={"nodeName": "spot-0"})
    rig.run_pods()
    rig.see()
    await rig.reconcile(KEY)
    rig.state.nodes.drop(build.node("spot-0").metadata.uid)
    deleted = build.stamp(rig.wall + HOUR)
    meta = {
        **rig.cluster.objects[path]["metadata"],
        "deletionTimestamp": deleted,
        "deletionGracePeriodSeconds": 20,
    }
    rig.cluster.change(path, metadata=meta)
    for _ in range(30):
        rig.see()
        await rig.reconcile(KEY)
        await rig.pass_time(5)
    assert path not in rig.cluster.objects


@pytest.mark.parametrize("grace", [0, 10**12, 2**63 - 1])
def test_grace_may_be_any_number(grace: int) -> None:
    """Whoever may delete a pod says it, and the API server keeps it as it is."""
    meta = {"name": "p", "uid": "u", "resourceVersion": "1", "creationTimestamp": build.stamp(NOW)}
    meta |= {"deletionTimestamp": build.stamp(NOW), "deletionGracePeriodSeconds": grace}
    pod = Pod.model_validate({"metadata": meta})
    heard = as_heard(None, pod, NOW)
    assert heard.metadata.deletion_timestamp == build.stamp(NOW)
    assert (heard.metadata.deletion_grace_period_seconds or 0) <= 2**31


def test_clock_that_is_set_back_is_not_waited_for() -> None:
    """What this process wrote an hour ahead, it hears of again."""
    manifest = build.job_manifest()
    slot = {"index": 0, "state": "Ended", "cause": "Error", "endedAt": build.stamp(NOW + HOUR)}
    manifest["status"] = {"observedGeneration": 1, "startTime": build.stamp(NOW + HOUR), "slots": [slot]}
    written = as_heard(None, TrainingJob.model_validate(manifest), NOW + HOUR)
    heard = as_heard(written, written, NOW)
    assert heard.status.slots[0].ended_at == NOW
    assert heard.status.start_time == NOW
