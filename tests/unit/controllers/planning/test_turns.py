"""Whose turn it is among the jobs whose pods are refused."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

from shoal.api.training_job import TrainingJob
from shoal.controllers.planning.turns import TURN_SECONDS, with_turn
from shoal.sizing.fleet.jobs import fleet_job
from tests.unit.policy import build


def refused(namespace: str, name: str, **plan: Any) -> TrainingJob:
    manifest = build.job_manifest(workers={"replicas": 4, "pools": ["a"]}, elasticity={"mode": "Auto"})
    manifest["metadata"] |= {"namespace": namespace, "name": name, "uid": f"{namespace}-{name}"}
    status = {"plan": {"pools": {"a": 4}, **({"keptTo": {"a": 1}} | plan)}}
    return TrainingJob.model_validate({**manifest, "status": status}, extra="ignore")


def test_one_of_them_is_left_one_node_more_and_each_namespace_has_as_many_turns() -> None:
    jobs = [refused("crowd", f"j{n}") for n in range(4)] + [
        refused("team", "one"),
        refused("team", "well", keptTo=None),
    ]
    turns = Counter[str]()
    for turn in range(24):
        now = build.NOW + timedelta(seconds=turn * TURN_SECONDS)
        fleet = [fleet_job(each, None, now) for each in jobs]
        found = {each.name: each.kept_to for each in with_turn(fleet, now)}
        assert found["team/well"] == {}
        [chosen] = [name for name, kept in found.items() if kept == {"a": 2}]
        assert sum(kept == {"a": 1} for kept in found.values()) == 4
        turns[chosen] += 1
    assert turns == {"team/one": 12, **{f"crowd/j{n}": 3 for n in range(4)}}
