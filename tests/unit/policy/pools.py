"""A world with CapacityPools, for tests of where workers live."""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import timedelta
from typing import Any

from shoal.api.capacity_pool import CapacityPool
from shoal.api.training_job import TrainingJob
from shoal.controllers.planning.translate import wished
from shoal.policy.actions import CreatePod
from shoal.policy.model import Observation, Plan, Proposal
from tests.unit.policy import build
from tests.unit.policy.world import World


def pool(
    name: str, kind: str = "Spot", price: float | None = 1, limit: int = 10, **spec: Any
) -> CapacityPool:
    status = spec.pop("status", {})
    return CapacityPool.model_validate(
        {
            "metadata": {"name": name},
            "spec": {
                "capacityType": kind,
                "accelerator": {"name": "T4"},
                "nodeSelector": {"pool": name},
                "tolerations": [{"key": "gpu", "operator": "Exists"}],
                "limits": {"nodes": limit},
                **({"price": {"perHour": price}} if price else {}),
                **spec,
            },
            "status": status,
        }
    )


EXHAUSTED = {
    "conditions": [
        {
            "type": "Exhausted",
            "status": "True",
            "reason": "NoNodes",
            "lastTransitionTime": build.stamp(build.NOW),
        }
    ]
}


class Pools(World):
    """A world with pools: a pod is bound to a node that has the labels of its selector."""

    def __init__(self, *pools: CapacityPool, nodes: dict[str, int], **workers: Any) -> None:
        self.pools = {each.metadata.name: each for each in pools}
        self.proposal: Proposal | None = None
        self.elsewhere: dict[str, int] = {}
        self.others: dict[str, int] = {}
        """Other jobs with pods, by node."""
        self.unreadable: dict[str, str] = {}
        """Why pools cannot be read, by name."""
        self.no_pools = ""
        """Why none can be read."""
        elasticity, servers = workers.pop("elasticity", {}), workers.pop("servers", {})
        super().__init__(
            spot_nodes=0,
            spec={
                "parameterServers": {"replicas": 1, **servers},
                "workers": {
                    "maxReplicas": 20,
                    "minReplicas": 0,
                    "maxSurge": "100%",
                    "pools": list(self.pools),
                    **workers,
                },
                "elasticity": elasticity,
            },
        )
        for name, number in nodes.items():
            for i in range(number):
                self.add(f"{name}-{i}", name)

    def add(self, node: str, label: str) -> None:
        """A node of a pool."""
        self.nodes[node] = build.node_manifest(node, spot=not label.startswith("od"))
        self.nodes[node]["metadata"]["labels"]["pool"] = label

    def specs(self, pool: str) -> tuple[int, int]:
        """The generations of what a pod for a pool is made of."""
        return self.job.metadata.generation, self.pools[pool].metadata.generation

    def observation(self) -> Observation:
        others = {**self.others}
        return replace(
            super().observation(),
            pools=self.pools,
            unreadable_pools=self.unreadable,
            no_pools=self.no_pools,
            proposal=self.proposal,
            taken=self.elsewhere,
            others_on=lambda nodes: {node: others[node[1]] for node in nodes if node[1] in others},
        )

    def _create(self, action: CreatePod) -> None:
        super()._create(action)
        if action.name in self.pods:  # else a quota refused it
            self.pods[action.name]["spec"]["nodeSelector"] = action.manifest["spec"].get("nodeSelector", {})

    def _room_for(self, pod: dict[str, Any]) -> str | None:
        selector = pod["spec"].get("nodeSelector") or {}
        if not selector:
            return super()._room_for(pod)
        alive = {"Pending", "Running"}
        used = {p["spec"].get("nodeName") for p in self.pods.values() if p["status"]["phase"] in alive}
        for name, node in sorted(self.nodes.items()):
            fits = selector.items() <= node["metadata"]["labels"].items()
            if fits and name not in used and not self.leaving(name) and name not in self.dead_nodes:
                return name
        return None

    def by_pool(self) -> dict[str, int]:
        """Running workers by pool."""
        found: dict[str, int] = {}
        for name, pod in self.pods.items():
            if "-worker-" in name and pod["status"]["phase"] == "Running":
                label = pod["metadata"]["labels"].get("shoal.dev/pool", "")
                found[label] = found.get(label, 0) + 1
        return found

    def at_work(self) -> int:
        """Slots with a worker that runs and is not asked to end."""
        pods = map(self.pod, self.pods)
        stays = [pod.place for pod in pods if pod.running and not pod.metadata.deletion_timestamp]
        return len({place.index for place in stays if place is not None and place.role == "worker"})

    def propose(self, counts: dict[str, int], *, age: int = 3600, **more: Any) -> None:
        since = self.now - timedelta(seconds=age)
        self.proposal = Proposal(counts, 1, more.pop("reason", "cheaper"), since=since, **more)

    def propose_each_minute(self, *proposed: dict[str, int]) -> list[dict[str, int]]:
        """The plans while a planner proposes these counts one after another, remembering what it proposed before."""
        plans = []
        wait = TrainingJob.model_validate(self.manifest).spec.elasticity.stabilization_seconds
        for counts in proposed:
            since, before = wished(counts, self.now, self.proposal, wait)
            self.proposal = Proposal(counts, 1, "cheaper", since=since, before=before)
            self.reconcile()
            plans.append(self.status["plan"]["pools"])
            self.tick(seconds=60)
        return plans


class Near(Pools):
    """Workers have to be near a parameter server (zonePolicy Same), whose own node is late."""

    def __init__(self, *pools: CapacityPool, **more: Any) -> None:
        super().__init__(*pools, **{"nodes": {}, "zonePolicy": "Same", **more})
        self.has_server = False

    def _room_for(self, pod: dict[str, Any]) -> str | None:
        if pod["metadata"]["labels"]["shoal.dev/role"] == "ps":
            return super()._room_for(pod) if self.has_server else None
        bound = (p["spec"].get("nodeName") for name, p in self.pods.items() if "-ps-" in name)
        return super()._room_for(pod) if any(bound) else None

    def wait(self, seconds: int) -> None:
        """Let time pass."""
        end = self.now + timedelta(seconds=seconds)
        while self.now < end:
            self.reconcile()
            self.tick(5.0)
        self.reconcile()


def created(made: Plan) -> list[dict[str, Any]]:
    return [a.manifest for a in made.actions if isinstance(a, CreatePod) and a.role == "worker"]


AUTO = {"mode": "Auto"}


def auto(**workers: Any) -> Pools:
    world = Pools(
        pool("a", price=1), pool("b", price=2), pool("od", "OnDemand", price=3),
        **{"nodes": {"a": 8, "b": 8, "od": 8}, "replicas": 2, "elasticity": AUTO, **workers},
    )  # fmt: skip
    world.settle()
    return world


FALLBACK = {"afterSeconds": 300, "returnAfterSeconds": 1800}


class Avoiding(Pools):
    """A scheduler that keeps pods from the nodes that they avoid."""

    def _create(self, action: CreatePod) -> None:
        super()._create(action)
        if action.name in self.pods:
            affinity = action.manifest["spec"].get("affinity") or {}
            self.pods[action.name]["spec"]["affinity"] = copy.deepcopy(affinity)

    def _room_for(self, pod: dict[str, Any]) -> str | None:
        every, avoided = self.nodes, str(pod["spec"].get("affinity"))
        self.nodes = {name: node for name, node in every.items() if f"'{name}'" not in avoided}
        try:
            return super()._room_for(pod)
        finally:
            self.nodes = every
