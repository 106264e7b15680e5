"""Builders of the objects in an observation."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from shoal.api.kube import Node, Pod
from shoal.api.training_job import TrainingJob
from shoal.policy.facts.blip import silent_since
from shoal.policy.model import Images, Observation
from shoal_trainer.contract import Outcome, Phase, StatusReport, TerminationMessage, WorkerReport, WorkerState

NOW = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)
UID = "0a1b2c3d-0000-4000-8000-000000000001"
IMAGES = Images(ps="shoal/ps:test", worker="shoal/worker:test", worker_gpu="shoal/worker-gpu:test")


def job_manifest(**spec: Any) -> dict[str, Any]:
    """A TrainingJob as the API server returns it; keyword arguments replace parts of the spec."""
    return {
        "apiVersion": "shoal.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "digits", "namespace": "team", "uid": UID, "generation": 1},
        "spec": {
            "storage": {"ephemeral": {}},
            "training": {"entrypoint": "digits:job", "batchSize": 128, "stopAfter": {"epochs": 3}},
            "workers": {"replicas": 3, "maxSurge": 1},
            **spec,
        },
    }


def job(status: dict[str, Any] | None = None, **spec: Any) -> TrainingJob:
    """A TrainingJob."""
    return TrainingJob.model_validate({**job_manifest(**spec), "status": status or {}})


def stamp(moment: datetime) -> str:
    """The timestamp format of Kubernetes."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def pod_manifest(
    role: str = "worker",
    index: int = 0,
    incarnation: int = 0,
    *,
    phase: str = "Running",
    node: str | None = "spot-0",
    created: datetime = NOW,
    state: dict[str, Any] | None = None,
    last: dict[str, Any] | None = None,
    restarts: int = 0,
    conditions: list[dict[str, Any]] | None = None,
    deleting: datetime | None = None,
    grace: int = 20,
    **status: Any,
) -> dict[str, Any]:
    """A pod of the job. `state`: of its training container; `deleting`: when its grace period ends."""
    name = f"digits-{role}-{index}-{incarnation}"
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": "team",
        "uid": f"uid-{name}",
        "creationTimestamp": stamp(created),
        "labels": {
            "shoal.dev/job": "digits",
            "shoal.dev/job-uid": UID,
            "shoal.dev/role": role,
            "shoal.dev/index": str(index),
            "shoal.dev/incarnation": str(incarnation),
        },
        "ownerReferences": [{"uid": UID, "kind": "TrainingJob", "name": "digits", "controller": True}],
    }
    if deleting:
        metadata |= {"deletionTimestamp": stamp(deleting), "deletionGracePeriodSeconds": grace}
    running = phase == "Running" and state is None
    return {
        "metadata": metadata,
        "spec": {"nodeName": node},
        "status": {
            "phase": phase,
            "conditions": [{"type": "Ready", "status": str(running)}, *(conditions or [])],
            "containerStatuses": [
                {
                    "name": role,
                    "ready": running,
                    "restartCount": restarts,
                    "state": state or {},
                    "lastState": last or {},
                }
            ],
            **status,
        },
    }


def pod(role: str = "worker", index: int = 0, incarnation: int = 0, **how: Any) -> Pod:
    """The same, parsed."""
    return Pod.model_validate(pod_manifest(role, index, incarnation, **how))


def ended(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    """The state of a container that ended."""
    return {"terminated": {"exitCode": code, "reason": reason, "message": message}}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    """The state of a container that has not started."""
    return {"waiting": {"reason": reason, "message": message}}


def node_manifest(
    name: str = "spot-0",
    *,
    spot: bool = True,
    ready: str = "True",
    message: str = "",
    taints: list[dict[str, Any]] | None = None,
    uid: str | None = None,
    boot: str = "boot-1",
    conditions: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """A node as GKE labels it."""
    labels = {"cloud.google.com/gke-nodepool": "spot-pool" if spot else "safe-pool"}
    if spot:
        labels["cloud.google.com/gke-spot"] = "true"
    return {
        "metadata": {"name": name, "uid": uid or f"uid-{name}", "labels": labels},
        "spec": {"taints": taints or []},
        "status": {
            "conditions": [{"type": "Ready", "status": ready, "message": message}, *(conditions or [])],
            "nodeInfo": {"bootID": boot},
        },
    }


def node(name: str = "spot-0", **how: Any) -> Node:
    """The same, parsed."""
    return Node.model_validate(node_manifest(name, **how))


def report(
    silent: list[tuple[int, int]] | None = None,
    active: list[tuple[int, int]] | None = None,
    fenced: list[tuple[int, int]] | None = None,
    **fields: Any,
) -> StatusReport:
    """A report of parameter server 0; `silent`, `active`, `fenced`: (slot, incarnation) of workers."""
    states = {WorkerState.SILENT: silent, WorkerState.ACTIVE: active, WorkerState.FENCED: fenced}
    workers = tuple(
        WorkerReport(slot=s, incarnation=i, state=state)
        for state, workers_in_state in states.items()
        for s, i in (workers_in_state or [])
    )
    return StatusReport(**{"job_uid": UID, "phase": Phase.TRAINING, "step": 1, "workers": workers, **fields})


def termination_message(outcome: Outcome = Outcome.SUCCEEDED, **fields: Any) -> str:
    """A termination message."""
    return TerminationMessage(outcome=outcome, **fields).to_json()


def observe(a_job: TrainingJob, *pods: Pod, **more: Any) -> Observation:
    """An observation: by default with three healthy spot nodes and a safe one."""
    nodes = {n.metadata.name: n for n in [*(node(f"spot-{i}") for i in range(3)), node("safe-0", spot=False)]}
    nodes = more.pop("nodes", nodes)
    now = more.get("now", NOW)
    return Observation(**{"job": a_job, "now": now, "at": at(now), "images": IMAGES, "pods": pods, "nodes": nodes,
                          "silent_nodes": silent(nodes.values()), **more})  # fmt: skip


def at(now: datetime) -> float:
    """The other clock then, if nobody sets this one."""
    return (now - NOW).total_seconds()


def silent(nodes: Iterable[Node]) -> list[datetime]:
    """Since when nodes are Unknown."""
    return sorted(since for each in nodes if (since := silent_since(each)) is not None)
