"""What the API server will not make: asked for again in time and not before, and told in a condition."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from shoal.cluster.transport import Answer
from shoal.errors import Unavailable
from shoal.policy.names import budget_name, secret_name
from tests.unit.controller.clusters import EVERYTHING, JOB_PATH, KEY, NOW, Rig

pytestmark = pytest.mark.looptime

Fault = Callable[[str, str], Answer | None]


def refusing(kind: str, status: int, message: str = "no", reason: str = "") -> Fault:
    answer = Answer(status, json.dumps({"message": message, "reason": reason}).encode())
    return lambda method, path: answer if method == "POST" and path.endswith(f"/{kind}") else None


def nothing(_method: str, _path: str) -> None:
    return None


async def passes(rig: Rig, number: int = 5) -> list[float | None]:
    """What each of some passes at one moment asks for."""
    wishes = []
    for _ in range(number):
        rig.see()
        wishes.append(await rig.reconcile(KEY))
    return wishes


def condition(rig: Rig, kind: str) -> tuple[str, str, str]:
    found = rig.job.status.condition(kind)
    return (found.status, found.reason, found.message) if found else ("", "", "")


@pytest.mark.parametrize("kind", ["secrets", "services", "poddisruptionbudgets"])
@pytest.mark.parametrize(
    ("status", "message", "again"),
    [(403, "forbidden: no such right", 30), (403, "exceeded quota: few", 5), (422, "invalid", None)],
)
async def test_what_is_refused_is_asked_for_once_and_then_in_time(
    kind: str, status: int, message: str, again: int | None
) -> None:
    rig = Rig()
    rig.apply()
    rig.cluster.fault = refusing(kind, status, message)
    wishes = await passes(rig)
    assert len(rig.cluster.writes("POST", kind)) == 1
    assert all(wish is None or wish >= 1.0 for wish in wishes)
    told = [condition(rig, which) for which in ("Stalled", "QuotaExceeded", "Degraded")]
    assert any(status_ == "True" and message in words for status_, _, words in told)
    if again is None:
        rig.pass_time(3600)
        await passes(rig)
        assert len(rig.cluster.writes("POST", kind)) == 1
        return
    rig.pass_time(again - 1)
    wish = (await passes(rig))[-1]
    assert len(rig.cluster.writes("POST", kind)) == 1
    assert wish is not None
    rig.pass_time(wish)
    await passes(rig)
    assert len(rig.cluster.writes("POST", kind)) == 2
    rig.cluster.fault = nothing
    rig.pass_time(again)
    await passes(rig)
    assert rig.pods() == EVERYTHING
    rig.run_pods()
    await passes(rig)
    assert not [which for which in ("Stalled", "QuotaExceeded") if condition(rig, which)[0] == "True"]


@pytest.mark.parametrize("kind", ["secrets", "services"])
async def test_pods_are_not_made_before_what_they_need(kind: str) -> None:
    rig = Rig()
    rig.apply()
    rig.cluster.fault = refusing(kind, 403, "exceeded quota: few")
    for _ in range(5):
        await passes(rig, 2)
        rig.pass_time(6)
    assert rig.pods() == set()


@pytest.mark.parametrize("status", [403, 422])
async def test_pods_do_not_wait_for_the_disruption_budget(status: int) -> None:
    rig = Rig()
    rig.apply()
    rig.cluster.fault = refusing("poddisruptionbudgets", status, "policy is not for you")
    await passes(rig)
    assert rig.pods() == EVERYTHING
    rig.run_pods()
    await passes(rig)
    state, reason, words = condition(rig, "Degraded")
    assert (state, reason) == ("True", "NoDisruptionBudget")
    assert "policy is not for you" in words
    assert condition(rig, "Stalled")[0] != "True"
    rig.cluster.fault = nothing
    body = rig.cluster.objects[JOB_PATH]
    rig.cluster.change(JOB_PATH, metadata={**body["metadata"], "generation": 2})
    rig.pass_time(31)
    await passes(rig)
    assert condition(rig, "Degraded")[0] == "False"


async def test_a_pass_that_could_change_nothing_does_not_come_again_at_once() -> None:
    """Whatever a later plan overlooks: there is a second between two passes that are in vain."""
    rig = Rig()
    rig.apply()
    rig.cluster.fault = refusing("pods", 409, "digits-ps-0-0 exists", "AlreadyExists")  # and GET says 404
    assert await rig.reconcile(KEY) == 1.0


# --- what is there --------------------------------------------------------------------------------------------------


async def test_a_secret_that_somebody_deleted_is_made_again() -> None:
    rig = Rig()
    rig.apply()
    await passes(rig)
    path = f"/api/v1/namespaces/ns/secrets/{secret_name(rig.job)}"
    made = rig.cluster.objects.pop(path)
    for pod in rig.pods():
        rig.cluster.change(f"/api/v1/namespaces/ns/pods/{pod}", spec={"nodeName": "spot-0"})
    wish = (await passes(rig))[-1]  # pods are bound and have not started: they may wait for it
    assert wish is not None
    assert wish <= 301
    rig.pass_time(wish)
    await passes(rig)
    assert rig.cluster.objects[path]["data"] == made["data"]


async def test_what_is_there_costs_one_request_in_five_minutes() -> None:
    rig = Rig()
    rig.apply()
    await passes(rig)
    rig.run_pods()
    rig.cluster.asked.clear()
    for _ in range(60):
        rig.pass_time(10)
        await passes(rig, 1)
    assert len(rig.cluster.writes("POST", "secrets")) == 1
    assert len(rig.cluster.writes("POST", "poddisruptionbudgets")) == 1


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_full_quota_says_nothing_against_a_secret_that_is_there(restarted: bool) -> None:
    """Quotas are asked before anybody looks whether the object exists."""
    rig = Rig()
    rig.apply()
    await passes(rig)
    rig.run_pods()
    await passes(rig)
    rig.cluster.fault = refusing("secrets", 403, "exceeded quota: secrets")
    rig.pass_time(301)
    if restarted:
        rig.answers.forget(rig.job.metadata.uid)
    rig.cluster.objects.pop("/api/v1/namespaces/ns/pods/digits-worker-1-0")
    wishes = await passes(rig)
    assert "digits-worker-1-1" in rig.pods()
    assert len(rig.cluster.writes("POST", "secrets")) == 2
    assert all(wish is None or wish >= 1.0 for wish in wishes)


# --- what an answer means -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["secrets", "services", "pods"])
@pytest.mark.parametrize("status", [401, 404, 405, 409])
async def test_what_speaks_of_the_moment_is_tried_again(kind: str, status: int) -> None:
    rig = Rig()
    rig.apply()
    rig.cluster.fault = refusing(kind, status, "Operation cannot be fulfilled on resourcequotas", "Conflict")
    with pytest.raises(Unavailable):
        await rig.reconcile(KEY)
    rig.cluster.fault = nothing
    await passes(rig)
    assert rig.pods() == EVERYTHING
    created: dict[str, Any] = rig.cluster.objects
    assert f"/api/v1/namespaces/ns/secrets/{secret_name(rig.job)}" in created
    assert f"/apis/policy/v1/namespaces/ns/poddisruptionbudgets/{budget_name(rig.job)}" in created


# --- a name that an earlier run still has ---------------------------------------------------------------------------


async def test_a_pod_of_the_earlier_run_on_a_dead_machine_is_named() -> None:
    rig = Rig()
    path = "/api/v1/namespaces/ns/pods/digits-ps-0-0"
    owner = {"kind": "TrainingJob", "name": "digits", "uid": "the-earlier-run", "controller": True}
    until = NOW + timedelta(seconds=60)
    meta = {
        "name": "digits-ps-0-0",
        "namespace": "ns",
        "labels": {"shoal.dev/job": "digits"},
        "ownerReferences": [owner],
        "deletionTimestamp": until.isoformat(),
        "deletionGracePeriodSeconds": 60,
    }
    rig.cluster.add(path, {"metadata": meta, "spec": {"nodeName": "safe-7"}})
    rig.apply()
    await passes(rig)
    assert condition(rig, "Stalled")[0] != "True"  # it is ending
    rig.pass_time(66)
    wish = (await passes(rig))[-1]
    state, reason, words = condition(rig, "Stalled")
    assert (state, reason) == ("True", "NameCollision")
    assert "digits-ps-0-0" in words
    assert "kubectl delete node safe-7" in words
    assert wish is not None
    assert wish >= 1.0
    rig.cluster.objects.pop(path)
    await passes(rig)
    assert rig.pods() == EVERYTHING
    assert condition(rig, "Stalled")[0] == "False"


async def test_it_is_named_also_where_no_watch_shows_it() -> None:
    rig = Rig()
    meta = {"name": "digits-ps-0-0", "namespace": "ns", "deletionTimestamp": NOW.isoformat()}
    path = "/api/v1/namespaces/ns/pods/digits-ps-0-0"
    rig.cluster.add(path, {"metadata": meta, "spec": {"nodeName": "safe-7"}})
    rig.apply()
    rig.pass_time(6)
    rig.state.pods.replace([], rig.cluster.version)
    await rig.reconcile(KEY)
    assert "on node safe-7" in condition(rig, "Stalled")[2]
