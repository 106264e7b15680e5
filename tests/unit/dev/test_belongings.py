"""What a job lacks beside its pods is seen, at the end of the storms and of the virtual chaos."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.belongings import Json, lacking

JOB: Json = {"metadata": {"uid": "job"}, "spec": {"parameterServers": {"replicas": 2}}}


def labelled(name: str, shard: int = 0, incarnation: int = 0, **more: Any) -> Json:
    labels = {
        "shoal.dev/role": "ps",
        "shoal.dev/index": str(shard),
        "shoal.dev/incarnation": str(incarnation),
    }
    return {"metadata": {"name": name, "labels": labels, "ownerReferences": [{"uid": "job"}]}, **more}


def server(shard: int, incarnation: int = 0, phase: str = "Running") -> Json:
    return labelled(f"ps-{shard}-{incarnation}", shard, incarnation, status={"phase": phase})


def service(shard: int, incarnation: int = 0) -> Json:
    selector = {"shoal.dev/index": str(shard), "shoal.dev/incarnation": str(incarnation)}
    return labelled(f"ps-{shard}", shard, spec={"selector": selector})


def whole() -> dict[str, list[Json]]:
    budget = {"minAvailable": 2, "selector": {"matchLabels": {"shoal.dev/role": "ps"}}}
    return {
        "pods": [server(0), server(1)],
        "services": [service(0), service(1)],
        "poddisruptionbudgets": [labelled("budget", spec=budget)],
        "secrets": [labelled("secret")],
    }


def test_a_job_that_has_all_lacks_nothing() -> None:
    found = whole()
    assert lacking(JOB, found["pods"], found) == []


@pytest.mark.parametrize("kind", ["services", "poddisruptionbudgets", "secrets"])
def test_an_object_that_is_not_there_or_another_job_s(kind: str) -> None:
    found = whole()
    other = copy.deepcopy(found[kind].pop())
    assert any(kind in words for words in lacking(JOB, found["pods"], found))
    other["metadata"]["ownerReferences"] = [{"uid": "another"}]
    found[kind].append(other)
    assert any(kind in words for words in lacking(JOB, found["pods"], found))


@pytest.mark.parametrize("turned", [service(0, 1), service(1)], ids=["another incarnation", "another shard"])
def test_a_service_that_leads_to_no_server_of_its_shard(turned: Json) -> None:
    found = whole()
    turned["metadata"] = service(0)["metadata"]
    found["services"][0] = turned
    (wrong,) = lacking(JOB, found["pods"], found)
    assert "not to the server of shard 0" in wrong


def test_a_service_that_leads_to_a_server_that_has_ended() -> None:
    found = whole()
    found["pods"] = [server(0, phase="Failed"), server(0, 1), server(1)]
    assert "ps-0 leads to ['ps-0-0']" in lacking(JOB, found["pods"], found)[0]


def test_a_budget_of_another_number_or_of_other_pods() -> None:
    for change in ({"minAvailable": 1}, {"selector": {"matchLabels": {"shoal.dev/index": "0"}}}):
        found = whole()
        found["poddisruptionbudgets"][0]["spec"] |= change
        (wrong,) = lacking(JOB, found["pods"], found)
        assert wrong.startswith("budget keeps")
