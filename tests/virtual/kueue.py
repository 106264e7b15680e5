"""Kueue in the virtual world: one queue with room for one job or none. It tells if a pod ever runs without quota.

Not unless it is `strict`: who sees the world as it was some time ago may make a pod that was admitted then.
"""

from __future__ import annotations

from typing import Any

from shoal.api.labels import JOB
from shoal.manifests.pods import QUEUE
from tests.doubles.patches import merged
from tests.virtual.loop import stamp
from tests.virtual.server import Change, Json
from tests.virtual.world import World

NODES = {"kubernetes.io/os": "linux"}


class Kueue:
    """It decides at each step of the world."""

    def __init__(self, world: World, *, strict: bool = True) -> None:
        self.world, self.server = world, world.server
        self.room = False
        self.server.store(("resourceflavors", "", "all"), {"spec": {"nodeLabels": {}}})
        world.watchers.append(self._decide)
        if strict:
            self.server.on_change.append(self._judge)

    def preempt(self) -> None:
        """Evict what was admitted, as for a job of a higher priority."""
        self.room = False
        for workload in self._admitted():
            self._tell(workload, Evicted=("True", "Preempted"))

    def is_free(self) -> bool:
        """Whether no quota is used."""
        return not self._admitted()

    def grants(self) -> bool:
        """Whether a job may run."""
        return any(not _says(each, "Evicted") for each in self._admitted())

    def is_told_ready(self) -> bool:
        """Whether one job is admitted, and all its pods have been ready."""
        return self.grants() and [_says(each, "PodsReady") for each in self._admitted()] == [True]

    def is_told_finished(self) -> bool:
        """Whether nothing is asked for any more."""
        return all(_says(each, "Finished") for each in self.server.all("workloads"))

    def asks(self) -> dict[str, int]:
        """What is asked for, by pod set."""
        return {
            s["name"]: s["count"] for each in self.server.all("workloads") for s in each["spec"]["podSets"]
        }

    def _admitted(self) -> list[Json]:
        return [
            each
            for each in self.server.all("workloads")
            if "admission" in each.get("status", {}) and not _says(each, "Finished")
        ]

    def _decide(self) -> None:
        for workload in self.server.all("workloads"):
            if "admission" in workload.get("status", {}) or _says(workload, "Finished"):
                continue
            if self.room and not self._admitted():
                sets = [{"name": s["name"], "flavors": {"cpu": "all"}} for s in workload["spec"]["podSets"]]
                admission = {"clusterQueue": "all", "podSetAssignments": sets}
                reserved = ("True", "QuotaReserved")
                self._tell(
                    workload,
                    admission,
                    QuotaReserved=reserved,
                    Admitted=("True", "Admitted"),
                    Evicted=("False", "QuotaReserved"),
                )
            elif not _says(workload, "QuotaReserved", "False"):
                self._tell(workload, QuotaReserved=("False", "Pending"))

    def _tell(self, workload: Json, admission: Json | None = None, **conditions: tuple[str, str]) -> None:
        meta, status = workload["metadata"], workload.get("status", {})
        told = {each["type"]: each for each in status.get("conditions", [])}
        for kind, (holds, reason) in conditions.items():
            told[kind] = {"type": kind, "status": holds, "reason": reason, "lastTransitionTime": stamp()}
        part: dict[str, Any] = {
            "conditions": list(told.values()),
            **({"admission": admission} if admission else {}),
        }
        key = ("workloads", meta["namespace"], meta["name"])
        self.server.store(key, {**workload, "status": merged(status, part)})

    def _judge(self, change: Change, old: Json | None) -> None:
        """No pod that is not queued itself is made without quota, and no quota is given back while one runs."""
        pods = [pod for pod in self.server.all("pods") if pod["status"]["phase"] in {"Pending", "Running"}]
        if change.key[0] == "pods" and change.kind == "ADDED":
            if self._waits_as_a_whole(change.object) and not self._admitted():
                self._broken(f"{change.key[2]} is made without quota")
        elif change.key[0] == "workloads" and old is not None and "admission" in old.get("status", {}):
            requeued = change.kind == "MODIFIED" and "admission" not in change.object["status"]
            if requeued and pods:
                self._broken(f"{change.key[2]} gives its quota back while {len(pods)} pods are there")

    def _waits_as_a_whole(self, pod: Json) -> bool:
        labels, namespace = pod["metadata"]["labels"], pod["metadata"]["namespace"]
        job = self.server.get("trainingjobs", labels[JOB], namespace)
        policy = job["spec"].get("runPolicy", {}).get("schedulingPolicy", {}) if job else {}
        return QUEUE not in labels and policy.get("queueAs") == "Workload"

    def _broken(self, words: str) -> None:
        self.world.faults_of_the_operator.append(AssertionError(words))


def _says(workload: Json, kind: str, status: str = "True") -> bool:
    found = workload.get("status", {}).get("conditions", [])
    return any((each["type"], each["status"]) == (kind, status) for each in found)
