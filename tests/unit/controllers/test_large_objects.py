"""What the caches keep of objects that somebody made as large as they get: bounded for each, whatever part is large.

Of each kind that is watched there is an honest object, and each of its parts is made large in turn. What is larger than
the bound is told as unreadable.
"""

from __future__ import annotations

import copy
import gc
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import pytest

from shoal.api.speed_profile import MOST_ROWS, SpeedProfile
from shoal.api.training_job import TrainingJob
from shoal.cluster.reflector import Reflector
from shoal.controllers.kept import kept
from shoal.controllers.sources import sources
from shoal.controllers.state import ClusterState, Wakes
from tests.meanwhile import during
from tests.unit.cluster.servers import SmallServer
from tests.unit.policy import build

Json = Any
CONDITION = {"type": "Ready", "status": "False", "reason": "Because", "message": "of this"}
OWNER = {"kind": "TrainingJob", "name": "digits", "uid": build.UID, "controller": True}
META = {
    "labels": {"shoal.dev/job": "digits", "shoal.dev/role": "worker"},
    "annotations": {"shoal.dev/speed-profile": "mine"},
    "ownerReferences": [OWNER],
    "finalizers": ["example.com/stay"],
}
STATE = {
    "state": {"terminated": {"reason": "Error", "message": "no"}},
    "lastState": {"waiting": {"reason": "No"}},
}
TOLERATION = {"key": "gpu", "operator": "Equal", "value": "t4", "effect": "NoSchedule"}
TEMPLATE = {
    "metadata": {"annotations": {"note": "this"}},
    "spec": {"containers": [{"name": "worker", "env": [{"name": "A", "value": "b"}]}], "unknown": [[]]},
}
HONEST: dict[str, dict[str, Json]] = {
    "trainingjobs": {
        "metadata": META,
        "spec": {
            "storage": {"uri": "s3://bucket/runs", "run": "a"},
            "runPolicy": {"failureRules": [{"onExitCodes": [1], "action": "Ignore"}]},
            "training": {
                "entrypoint": "digits:job",
                "args": {"layers": [[1]]},
                "stopAfter": {"metric": "loss", "value": 0.1},
                "batchSizes": [{"accelerator": "T4", "batchSize": 1}],
                "initialFrom": {"uri": "s3://bucket/other"},
            },
            "parameterServers": {"pools": ["safe"], "template": TEMPLATE},
            "workers": {"replicas": 1, "pools": ["spot"], "template": TEMPLATE},
        },
    },
    "pods": {
        "metadata": META,
        "spec": {
            "schedulerName": "other",
            "tolerations": [TOLERATION],
            "containers": [{"name": "worker", "resources": {"requests": {"cpu": "1"}}}],
        },
        "status": {
            "reason": "Evicted",
            "message": "it was",
            "conditions": [CONDITION],
            "initContainerStatuses": [{"name": "init", **STATE}],
            "containerStatuses": [{"name": "worker", **STATE}],
        },
    },
    "services": {"metadata": META, "spec": {"selector": {"a": "b"}}},
    "poddisruptionbudgets": {"metadata": META},
    "nodes": {
        "metadata": META,
        "spec": {"taints": [{"key": "gpu", "value": "t4", "effect": "NoSchedule"}]},
        "status": {
            "allocatable": {"cpu": "4"},
            "conditions": [CONDITION],
            "nodeInfo": {"bootID": "b", "kubeletVersion": "v1"},
        },
    },
    "capacitypools": {
        "metadata": META,
        "spec": {
            "accelerator": {"name": "T4"},
            "zone": "a",
            "nodeSelector": {"a": "b"},
            "tolerations": [TOLERATION],
            "limits": {"nodes": 1},
        },
    },
    "speedprofiles": {
        "metadata": META,
        "spec": {
            "model": {"fingerprint": "a", "flopsPerSample": 1, "parameters": 1, "tensors": 1},
            "rows": [{"accelerator": "T4", "batchSize": 1, "stepSeconds": 1, "lastSeen": "2026-01-01"}],
        },
    },
    "workloads": {
        "metadata": META,
        "status": {
            "admission": {"podSetAssignments": [{"name": "ps", "flavors": {"cpu": "t4"}}]},
            "conditions": [CONDITION],
            "admissionChecks": [
                {
                    "name": "a",
                    "podSetUpdates": [
                        {
                            "name": "ps",
                            "labels": {"a": "b"},
                            "annotations": {"a": "b"},
                            "nodeSelector": {"a": "b"},
                            "tolerations": [TOLERATION],
                        }
                    ],
                }
            ],
        },
    },
    "resourceflavors": {"metadata": META, "spec": {"nodeLabels": {"a": "b"}, "tolerations": [TOLERATION]}},
}
LIMITED = frozenset({"key", "operator", "value", "effect"})
"""Texts that the API server takes with a few characters only, of tolerations and taints; likewise those of `labels`."""
KIB = {
    "trainingjobs": 40,
    "pods": 160,
    "nodes": 160,
    "speedprofiles": 720,
    "workloads": 200,
    "capacitypools": 40,
    "resourceflavors": 32,
    "services": 8,
    "poddisruptionbudgets": 4,
}
"""The most that one may take; of a job with small limits, so that this is soon done."""
MANY_BYTES = 48 << 10
"""Of JSON, where there is much of something: in Python it is several times as much."""


def grown(
    part: Json, size: int, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[str, Callable[[Json], Json]]]:
    """The ways to make an object larger than this in Python, each with its name."""
    name = ".".join(map(str, path))
    if isinstance(part, str):
        if not (LIMITED & {*path} or path[:2] == ("metadata", "labels")):
            yield f"{name} is long", lambda _old: "\U0001f41f" + "x" * (size // 4)  # of four bytes each
        return
    inner: list[tuple[Any, Json]] = []
    if isinstance(part, list) and part:
        number = MANY_BYTES // len(json.dumps(part[0], separators=(",", ":"))) + 1
        yield f"{name} has {number}", lambda old: old * number
        inner = [(0, part[0])]
    if isinstance(part, dict) and part:
        first = next(iter(part.values()))
        many = {f"k{each}": first for each in range(MANY_BYTES // (8 + len(json.dumps(first))) + 1)}
        yield f"{name} has {len(many)}", lambda old: {**many, **old}
        inner = list(part.items())
    for key, value in inner:
        for what, grow in grown(value, size, (*path, key)):
            yield what, _at(key, grow)


def _at(key: Any, grow: Callable[[Json], Json]) -> Callable[[Json], Json]:
    def change(old: Json) -> Json:
        fresh = copy.copy(old)
        fresh[key] = grow(old[key])
        return fresh

    return change


def weight(root: object) -> int:
    """Bytes of an object and of all that it holds."""
    seen, found, size = {id(root)}, [root], 0
    while found:
        each = found.pop()
        size += sys.getsizeof(each)
        for part in gc.get_referents(each):
            if id(part) not in seen and not isinstance(part, type | ModuleType | FunctionType):
                seen.add(id(part))
                found.append(part)
    return size


def test_there_is_a_large_object_of_each_watched_kind() -> None:
    assert (
        sources("", kueue=True).keys() == HONEST.keys() == KIB.keys() == ClusterState(Wakes()).caches.keys()
    )


@pytest.mark.looptime
@pytest.mark.parametrize("kind", HONEST)
async def test_large_objects_take_little_memory_or_are_told_as_unreadable(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """19 TrainingJobs of 1 MB, 23 MiB each as Python's objects, ended the operator of every tenant."""
    monkeypatch.setattr("shoal.api.roles.MAX_TEMPLATE_BYTES", 8 << 10)
    monkeypatch.setattr("shoal.api.training_job.MAX_ARGS_BYTES", 8 << 10)
    server, told = SmallServer(), dict[str, str]()
    state, made = ClusterState(Wakes()), dict[str, str]()

    def hear(found: Mapping[str, Any], why: str) -> None:
        told[found["metadata"]["name"]] = why

    for what, grow in grown(HONEST[kind], KIB[kind] << 10):
        made[name := f"large-{len(made)}"] = what
        server.set(name, **grow(HONEST[kind]))
    server.set("honest", **HONEST[kind])
    cache = state.caches[kind]
    reflector = Reflector(server, sources("", kueue=True)[kind], cache, on_unreadable=hear)
    async with during(reflector.run()):
        await reflector.synced.wait()
    known = {each.metadata.name: weight(each) for each in cache.all()}
    assert known.keys() | told.keys() == {*made, "honest"}
    assert known["honest"] < 16 << 10
    assert {made[name]: size >> 10 for name, size in known.items() if size > KIB[kind] << 10} == {}, "KiB"
    assert all(made[name].startswith(why.partition(":")[0]) for name, why in told.items())


def test_the_largest_objects_that_are_read_take_little_memory() -> None:
    cut = {"metadata": {"name": "a"}} | copy.deepcopy(HONEST["trainingjobs"])
    for role in ("parameterServers", "workers"):
        cut["spec"][role]["template"]["spec"]["unknown"] = [[]] * (42 << 10)
    cut["spec"]["training"]["args"]["layers"] = [[]] * (15 << 10)
    rows = copy.deepcopy(HONEST["speedprofiles"])
    rows["spec"]["rows"] *= MOST_ROWS
    assert 300 << 10 < weight(kept(TrainingJob.model_validate(cut))) < 340 << 10
    assert weight(kept(SpeedProfile.model_validate(rows))) < KIB["speedprofiles"] << 10
    cut["spec"]["managedBy"] = "example.com/other"
    assert weight(kept(TrainingJob.model_validate(cut))) < 16 << 10


@pytest.mark.parametrize("form", ["list", "watch"])
def test_what_cannot_be_read_leaves_nothing(form: str) -> None:
    """An error that is kept holds the whole object, in a cycle that no garbage collection sees."""
    cut = copy.deepcopy(HONEST["trainingjobs"])
    cut["metadata"] |= {"name": "a", "namespace": "b", "uid": "c", "resourceVersion": "1"}
    cut["spec"]["workers"]["template"]["spec"]["unknown"] = [[]] * (44 << 10)
    body = json.dumps({"items": [cut]} if form == "list" else {"type": "ADDED", "object": cut}).encode()
    del cut
    told = list[str]()
    reflector = Reflector(
        SmallServer(),
        sources("")["trainingjobs"],
        ClusterState(Wakes()).jobs,
        on_unreadable=lambda _found, why: told.append(why),
    )
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(2):
        if form == "list":
            [reflector._put(each) for each in reflector._reader.page(body).items]
        else:
            reflector._take(body, "0")
    gc.collect()
    assert len(gc.get_objects()) < before + 10_000
    assert "put what is large into the image" in told[0]
