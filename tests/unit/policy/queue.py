"""Kueue as the plan sees it: a queue with room for one job or none, its Workloads, and a view of them that may fail."""

from __future__ import annotations

import copy
from datetime import datetime
from typing import Any

from pydantic_core import to_json

from shoal.api.kueue import ResourceFlavor, Workload
from shoal.api.labels import Place
from shoal.api.training_job import TrainingJob
from shoal.manifests.pods import QUEUE
from shoal.manifests.workload import requeued, stands_for
from shoal.policy.actions import CreatePod
from tests.unit.policy import build

NODES = {"nodeLabels": {"gpu": "t4"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}
FLAVOR = ResourceFlavor.model_validate({"metadata": {"name": "t4"}, "spec": NODES})


class Queue:
    """One LocalQueue."""

    def __init__(self) -> None:
        self.room = True
        self.workloads: dict[str, dict[str, Any]] = {}
        self.flavors = {"t4": FLAVOR}
        self.unreadable = ""
        self.hidden = False
        """The operator's watch is behind: it has not seen any Workload."""
        self.made = 0

    def seen(self) -> tuple[Workload, ...]:
        """What the operator sees."""
        return () if self.hidden else tuple(Workload.model_validate(each) for each in self.workloads.values())

    # --- what the operator asks for ---------------------------------------------------------------------------------

    def create(self, name: str, manifest: dict[str, Any]) -> None:
        """POST; a 409 is success."""
        if name in self.workloads:
            return
        fresh = copy.deepcopy(manifest)
        self.made += 1
        fresh["metadata"] |= {"uid": f"uid-{name}-{self.made}", "resourceVersion": "1"}
        self.workloads[name] = {**fresh, "status": {"conditions": []}}

    def tell(self, name: str, kind: str, status: str, reason: str, message: str = "") -> None:
        """Set one condition."""
        if name in self.workloads:
            conditions = self.workloads[name]["status"]["conditions"]
            conditions[:] = [each for each in conditions if each["type"] != kind]
            conditions.append(
                {"type": kind, "status": status, "reason": reason, "message": message,
                 "lastTransitionTime": build.stamp(build.NOW)}
            )  # fmt: skip

    def give_back(self, name: str, now: datetime, *, delete: bool) -> None:
        """DELETE, or the status by which an evicted Workload waits again."""
        if name not in self.workloads:
            return
        if delete:
            del self.workloads[name]
        elif (patch := requeued(self.workloads[name], now)) is not None:
            status = self.workloads[name]["status"]
            status.pop("admission", None)
            for each in patch["status"]["conditions"]:
                self.tell(name, each["type"], each["status"], each["reason"], each["message"])

    def check(self, job: TrainingJob, action: CreatePod) -> None:
        """A pod that the Workload stands for is made only on an admission, with what that says, and is not queued."""
        if job.spec.run_policy.scheduling_policy.queue_as != "Workload":
            return
        manifest = action.manifest
        queued = QUEUE in manifest["metadata"]["labels"]
        if not stands_for(job, Place(action.role, action.index, action.incarnation)):
            assert queued
            return
        assert not queued
        assert manifest["spec"]["nodeSelector"]["gpu"] == "t4"
        assert any("admission" in each["status"] for each in self.workloads.values()), "a pod without quota"

    # --- Kueue ------------------------------------------------------------------------------------------------------

    @property
    def reserved(self) -> list[str]:
        """Workloads with quota."""
        return [name for name, each in self.workloads.items() if "admission" in each["status"]]

    def decide(self) -> bool:
        """Look at each Workload that waits; True if anything changed."""
        before = to_json(self.workloads)
        for name, each in self.workloads.items():
            if "admission" in each["status"]:
                continue
            if self.room and not self.reserved:
                flavors = {"cpu": "t4", "memory": "t4"}
                each["status"]["admission"] = {
                    "clusterQueue": "all",
                    "podSetAssignments": [
                        {"name": s["name"], "flavors": flavors} for s in each["spec"]["podSets"]
                    ],
                }
                self.tell(name, "QuotaReserved", "True", "QuotaReserved")
                self.tell(name, "Evicted", "False", "QuotaReserved")
                self.tell(name, "Admitted", "True", "Admitted")
            else:
                self.tell(name, "QuotaReserved", "False", "Pending", "no room")
        return before != to_json(self.workloads)

    def preempt(self) -> None:
        """A job of a higher priority needs the quota."""
        for name in self.reserved:
            self.tell(name, "Evicted", "True", "Preempted", "to make room")
        self.room = False

    def heal(self) -> None:
        """There is room, and everything is seen."""
        self.room, self.unreadable, self.hidden = True, "", False
        self.decide()
