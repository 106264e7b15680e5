"""A simulated cluster for the plan: pods, nodes, a scheduler, kubelets, a quota, and an operator that may crash.

It behaves as Kubernetes does and knows nothing of the policies. `taken` records what really happened to each pod, so
that invariants can compare it with what the plan counted.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any, Self, TypeVar, cast

from pydantic import BaseModel
from pydantic_core import to_json

from dev.night import again
from shoal.api.kube import Node, Pod, Service
from shoal.api.training_job import TrainingJob
from shoal.api.training_job_status import Slot
from shoal.controllers.kept import with_known_parts
from shoal.manifests.names import first_incarnation, secret_name
from shoal.manifests.platforms import GENERIC
from shoal.policy.actions import (
    ConfirmAbsent,
    CreateDisruptionBudget,
    CreatePod,
    CreateSecret,
    CreateService,
    CreateWorkload,
    DeleteDisruptionBudget,
    DeletePod,
    DeleteService,
    DeleteWorkload,
    RequeueWorkload,
    TellWorkload,
    UpdateService,
)
from shoal.policy.decide.admission import asked_anew
from shoal.policy.facts.read import read
from shoal.policy.facts.sightings import Memory
from shoal.policy.model import Observation, Plan, Refusal, RefusalKind
from shoal.policy.plan import plan
from shoal_trainer.contract import StatusReport
from tests.unit.policy import build
from tests.unit.policy.queue import Queue

M = TypeVar("M", bound=BaseModel)
REMOVALS = (DeletePod, DeleteService, DeleteDisruptionBudget, DeleteWorkload, RequeueWorkload)


@dataclass
class World:
    """One job in one cluster."""

    workers: int = 3
    servers: int = 1
    spot_nodes: int = 5
    surge: int = 1
    spec: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now = build.NOW
        self.manifest = build.job_manifest(
            **{
                "workers": {
                    "replicas": self.workers,
                    "maxReplicas": 6,
                    "minReplicas": 0,
                    "maxSurge": self.surge,
                },
                "parameterServers": {"replicas": self.servers},
                "runPolicy": {"backoffLimit": 10_000},
                **self.spec,
            }
        )
        self.status: dict[str, Any] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        self.services: dict[str, dict[str, Any]] = {}
        self.existing: set[str] = set()
        self.refusals: dict[str, Refusal] = {}
        self.nodes = {f"spot-{i}": build.node_manifest(f"spot-{i}") for i in range(self.spot_nodes)}
        self.nodes |= {f"safe-{i}": build.node_manifest(f"safe-{i}", spot=False) for i in range(2)}
        self.dead_nodes: set[str] = set()
        self.silent: set[str] = set()
        self.stuck: set[str] = set()
        """Pods whose deletion does not complete, because of a finalizer or a hung kubelet."""
        self.fenced: set[str] = set()
        """Hung, and fenced by the coordinator."""
        self.report: StatusReport | None = None
        """A report that replaces the true one."""
        self.report_age = 0.0
        self.platform = GENERIC
        self.quota: int | None = None
        self.quota_says = "exceeded quota: pods"
        self.queue = Queue()
        self.taken: set[str] = set()
        """Pods that were disrupted or failed, by name: each may be counted once."""
        self.ever_lost: set[str] = set()
        self.noticed: set[str] = set()
        """Pods whose node was announced to go, though that may have been withdrawn since."""
        self.created: list[str] = []
        self.deleted: list[str] = []
        self.unrecorded: set[str] = set()
        """Created, but the operator crashed before the status was written."""
        self.asked: set[str] = set()
        """Pods that the API server said do not exist."""
        self.asked_nodes: set[str] = set()
        self.last_plan: Plan | None = None
        self.first_look = False
        """The operator crashed, and has recorded nothing since."""
        self._memory = Memory()
        self._plans = count()
        self._spec = to_json(self.manifest["spec"])
        self._parsed: dict[tuple[type[Any], str], tuple[bytes, Any]] = {}

    # --- the operator -----------------------------------------------------------------------------------------------

    @property
    def job(self) -> TrainingJob:
        if (spec := to_json(self.manifest["spec"])) != self._spec:  # as the API server counts
            self._spec = spec
            self.manifest["metadata"]["generation"] += 1
        return self._same(TrainingJob, "", {**self.manifest, "status": self.status})

    def _same(self, model: type[M], name: str, manifest: dict[str, Any]) -> M:
        """The object. As in a cache, what has not changed is the same one as before."""
        text, old = self._parsed.get((model, name), (b"", None))
        if (now := to_json(manifest)) == text:
            return cast("M", old)
        fresh = model.model_validate(manifest)
        if isinstance(fresh, TrainingJob):
            fresh = with_known_parts(old, fresh) if old is not None else fresh
        elif old == fresh:
            fresh = old
        self._parsed[model, name] = now, fresh
        return fresh

    def _plan(self) -> Plan:
        """The plan, which is the same without what is remembered of earlier ones.

        The nodes that it says its workers have are those of its status and its actions, but of pods that get none.
        """
        seen = self.observation()
        made = plan(seen, self._memory)
        assert not again(next(self._plans)) or made == plan(seen)
        if made.nodes is not None:
            slots = (each for each in made.status.slots if each.role == "worker" and each.has_pod)
            pods = (each for each in made.actions if isinstance(each, CreatePod) and each.role == "worker")
            places = {(each.pool, each.index) for each in (*slots, *pods) if each.pool}
            less = Counter(pool for pool, _ in places) - Counter(made.nodes)
            assert Counter(made.nodes) + less == Counter(pool for pool, _ in places)
            assert not less or less == Counter(pool for pool, _ in read(seen).in_vain)
        return made

    @property
    def slots(self) -> list[dict[str, Any]]:
        """The records, with their defaults."""
        names = {f.alias or n: n for n, f in Slot.model_fields.items()}
        slots = [Slot.model_validate(each) for each in self.status.get("slots", [])]
        return [{a: v for a, n in names.items() if (v := getattr(s, n)) is not None} for s in slots]

    def condition(self, kind: str) -> dict[str, Any]:
        return next((c for c in self.status["conditions"] if c["type"] == kind), {})

    def observation(self) -> Observation:
        running = {n for n, p in self.pods.items() if p["status"]["phase"] == "Running" and "-worker-" in n}
        running -= self.unheard
        report = self.report or build.report(
            self._places(self.silent), self._places(running - self.silent - self.fenced),
            self._places(self.fenced & self.pods.keys()),
        )  # fmt: skip
        nodes = {n: self._same(Node, n, o) for n, o in self.nodes.items()}
        return Observation(
            job=self.job,
            now=self.now,
            at=build.at(self.now),
            first_look=self.first_look,
            images=build.IMAGES,
            pods=tuple(self.pod(name) for name in self.pods),
            services={n: Service.model_validate(s) for n, s in self.services.items()},
            existing=frozenset(self.existing),
            workloads=self.queue.seen(),
            no_workloads=self.queue.unreadable,
            flavors=self.queue.flavors,
            nodes=nodes,
            silent_nodes=build.silent(nodes.values()),
            report=report,
            report_age=self.report_age,
            refusals=tuple(self.refusals.values()),
            gone_pods=dict.fromkeys(self.asked, ""),
            absent_nodes=frozenset(self.asked_nodes),
            platform=self.platform,
        )

    @property
    def unheard(self) -> set[str]:
        """Pods on machines that are gone."""
        return {n for n, p in self.pods.items() if p["spec"].get("nodeName") in self.dead_nodes}

    def _places(self, names: set[str]) -> list[tuple[int, int]]:
        return [(p.index, p.incarnation) for p in (self.pod(n).place for n in sorted(names)) if p]

    def pod(self, name: str) -> Pod:
        return self._same(Pod, name, self.pods[name])

    def reconcile(self, crash_after: int | None = None) -> Plan:
        """Reconcile as the controller does: create, plan again, write the status, delete; again if that is due at once.

        With `crash_after` the operator crashes after this many actions and writes no status. Returns a plan with all
        creations and the removals of the first plan, all events, and when the last plan wants to be called again.
        """
        actions: list[Any] = []
        events: list[Any] = []
        removals: list[Any] | None = None
        for _ in range(3):
            number = 0
            for _ in range(4):
                made = self._plan()
                to_make = [a for a in made.actions if not isinstance(a, REMOVALS)]
                removals = (
                    [a for a in made.actions if isinstance(a, REMOVALS)] if removals is None else removals
                )
                for action in to_make:
                    if number == crash_after:
                        break
                    self._apply(action)
                    number += 1
                    if not isinstance(action, ConfirmAbsent):
                        actions.append(action)
                if crash_after is not None:
                    self.refusals, self.asked = {}, set()
                    self.existing -= {secret_name(self.job)}
                    self.first_look = bool(self.services)
                    return made
                if not to_make:
                    break
            self.last_plan = made
            self.status = made.status.model_dump(mode="json", by_alias=True, exclude_none=True)
            self.first_look = False
            events += made.events
            self.unrecorded -= self.pods.keys()
            for action in made.actions:
                if isinstance(action, REMOVALS):
                    self._apply(action)
            if made.wake_after != 0.0 or made.status.finished:
                break
        return Plan((*actions, *(removals or ())), made.status, tuple(events), made.wake_after)

    def settle(self, most: int = 60) -> Plan:
        """Reconcile and let time pass until nothing changes."""
        for _ in range(most):
            before = self.status
            made = self.reconcile()
            if not made.actions and self.status == before and not self.tick():
                return made
            self.tick()
        raise AssertionError(f"does not settle: {self.last_plan}")

    def settled(self) -> Self:
        """This world, once nothing changes any more."""
        self.settle()
        return self

    def _apply(self, action: Any) -> None:
        match action:
            case CreateSecret(name) | CreateDisruptionBudget(name, _):
                self.existing.add(name)
            case DeleteDisruptionBudget(name):
                self.existing.discard(name)
            case CreateService(name, manifest):
                manifest = copy.deepcopy(manifest)
                manifest["metadata"]["uid"] = f"uid-{name}"
                assert name not in self.services, "an existing Service was created again"
                self.services[name] = manifest
            case UpdateService(name, selector):
                self.services[name]["spec"]["selector"] = selector
            case DeleteService(name, _):
                self.services.pop(name, None)
            case CreatePod():
                self._create(action)
            case ConfirmAbsent(name, kind):
                there = self.pods if kind == "Pod" else self.nodes
                if name not in there:
                    (self.asked if kind == "Pod" else self.asked_nodes).add(name)
            case CreateWorkload(name, manifest):
                self.queue.create(name, manifest)
            case TellWorkload(name, _, kind, status, reason, message):
                self.queue.tell(name, kind, status, reason, message)
            case RequeueWorkload(name) | DeleteWorkload(name):
                assert all(p["status"]["phase"] in {"Failed", "Succeeded"} for p in self.pods.values())
                self.queue.give_back(name, self.now, delete=isinstance(action, DeleteWorkload))
            case DeletePod(name, uid, grace):
                assert self.pods[name]["metadata"]["uid"] == uid
                self.deleted.append(name)
                self.delete(name, grace)

    def _create(self, action: CreatePod) -> None:
        name = action.name
        if name in self.pods:
            raise AssertionError(f"{name} was created although it exists")
        if self.quota is not None and len(self.pods) >= self.quota:
            times = self.refusals[name].times + 1 if name in self.refusals else 0
            self.refusals[name] = Refusal(
                RefusalKind.QUOTA, name, self.quota_says, (1, 0), build.at(self.now), times
            )
            return
        self.refusals.pop(name, None)
        self.queue.check(self.job, action)
        first_server = action.role == "ps" and action.incarnation == first_incarnation(self.job)
        assert name not in self.created or first_server, f"{name} existed before"
        self.created.append(name)
        self.unrecorded.add(name)
        manifest = build.pod_manifest(
            action.role, action.index, action.incarnation, phase="Pending", node=None, created=self.now
        )
        manifest["metadata"]["labels"] = action.manifest["metadata"]["labels"]
        self.pods[name] = manifest

    # --- Kubernetes -------------------------------------------------------------------------------------------------

    def tick(self, seconds: float = 2.0) -> bool:
        """Time passes: the scheduler binds, kubelets start and end pods. True if anything moved."""
        self.now += timedelta(seconds=seconds)
        moved = False
        for name in list(self.pods):
            moved |= self._tick_pod(name)
        return moved

    def _tick_pod(self, name: str) -> bool:
        pod = self.pods[name]
        status, node = pod["status"], pod["spec"].get("nodeName")
        if node and (node in self.dead_nodes or node not in self.nodes):
            return False
        if pod["metadata"].get("deletionTimestamp"):
            if name in self.stuck:
                return False
            self._remove(name)
            self.silent.discard(name)
            return True
        if node is None:
            target = self._room_for(pod)
            if target:
                pod["spec"]["nodeName"] = target
                status["startTime"] = at = build.stamp(self.now)
                bound = {"type": "PodScheduled", "status": "True", "lastTransitionTime": at}
                status["conditions"] = [bound]
            return target is not None
        if self.leaving(node) and status["phase"] in {"Pending", "Running"}:
            self.end(name, 143)
            self.taken.add(name)
            return True
        if status["phase"] == "Pending":
            status["phase"] = "Running"
            status["conditions"] = [*status.get("conditions", ()), {"type": "Ready", "status": "True"}]
            return True
        return False

    def _room_for(self, pod: dict[str, Any]) -> str | None:
        role = pod["metadata"]["labels"]["shoal.dev/role"]
        used = {
            p["spec"].get("nodeName")
            for p in self.pods.values()
            if p["status"]["phase"] in {"Pending", "Running"}
        }
        prefix = "spot" if role == "worker" else "safe"
        for name in sorted(self.nodes):
            free = role == "ps" or name not in used
            good = name not in self.dead_nodes and not self.leaving(name)
            if name.startswith(prefix) and free and good and not self.nodes[name]["spec"]["taints"]:
                return name
        return None

    def leaving(self, node: str) -> bool:
        ready = self.nodes[node]["status"]["conditions"][0]
        return ready["status"] == "False"

    def delete(self, name: str, grace: int | None = None) -> None:
        pod = self.pods[name]
        if grace == 0 or not pod["spec"].get("nodeName") or pod["status"]["phase"] in {"Failed", "Succeeded"}:
            self._remove(name)
            self.silent.discard(name)
        elif not pod["metadata"].get("deletionTimestamp"):
            seconds = 20
            pod["metadata"] |= {
                "deletionTimestamp": build.stamp(self.now + timedelta(seconds=seconds)),
                "deletionGracePeriodSeconds": seconds,
            }

    def end(self, name: str, code: int, reason: str = "Error", message: str = "") -> None:
        status = self.pods[name]["status"]
        status["phase"] = "Succeeded" if code == 0 else "Failed"
        status["conditions"] = [{"type": "Ready", "status": "False"}]
        status["containerStatuses"][0] |= {"state": build.ended(code, reason, message), "ready": False}
        self.silent.discard(name)

    # --- faults -----------------------------------------------------------------------------------------------------

    def _on(self, node: str) -> list[str]:
        return [n for n, p in self.pods.items() if p["spec"].get("nodeName") == node]

    def notice(self, node: str) -> None:
        """The node says that it is shutting down."""
        self.noticed |= set(self._on(node))
        if node not in self.dead_nodes and node in self.nodes:
            ready = {"type": "Ready", "status": "False", "message": "node is shutting down"}
            self.nodes[node]["status"]["conditions"] = [ready]
            self.taken |= {n for n in self._on(node) if self._lives(n)}

    def taint(self, node: str, *, on: bool = True) -> None:
        """The cluster autoscaler is to take the node, or has changed its mind."""
        self.noticed |= set(self._on(node))
        taint = {"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}
        self.nodes[node]["spec"]["taints"] = [taint] if on else []

    def kill_node(self, node: str) -> None:
        """The machine is gone; Kubernetes sees that its status is unknown."""
        if node in self.nodes:
            self.taken |= {n for n in self._on(node) if self._lives(n)}
            self.ever_lost |= set(self._on(node))
            self.dead_nodes.add(node)
            self.nodes[node]["status"]["conditions"] = [{"type": "Ready", "status": "Unknown"}]

    def remake_node(self, node: str) -> None:
        """A machine comes up under the old name; the pods of the old one are forgotten or failed."""
        taken = [n for n in self._on(node) if self._lives(n)]
        self.taken |= set(taken)
        self.ever_lost |= set(self._on(node))
        for name in taken:
            self.end(name, 137)
        self.dead_nodes.discard(node)
        boot = f"boot-{len(self.created)}-{self.now.timestamp()}"
        self.nodes[node] = build.node_manifest(node, spot=node.startswith("spot"), boot=boot)

    def kill_pod(self, name: str, code: int, reason: str = "Error") -> None:
        """Its process ends."""
        if self._lives(name) and self.pods[name]["status"]["phase"] == "Running":
            self.taken.add(name)
            self.end(name, code, reason)

    def vanish(self, name: str) -> None:
        """The pod object is gone, without a trace."""
        if self._lives(name):
            self.taken.add(name)
        self.silent.discard(name)
        self._remove(name)

    def evict(self, name: str) -> None:
        """Evicted through the API."""
        if self._lives(name):
            self.taken.add(name)
            self.pods[name]["status"]["conditions"].append(
                {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
            )
            self.delete(name)

    def hush(self, name: str) -> None:
        """PS 0 does not hear it any more."""
        if "-worker-" in name and self.pods[name]["status"]["phase"] == "Running":
            self.silent ^= {name}

    def _remove(self, name: str) -> None:
        self.pods.pop(name, None)
        at = build.at(self.now)
        self.refusals |= {
            n: asked_anew(r, at) for n, r in self.refusals.items() if r.kind is RefusalKind.QUOTA
        }

    def _lives(self, name: str) -> bool:
        pod = self.pods[name]
        return pod["status"]["phase"] in {"Pending", "Running"} and not pod["metadata"].get(
            "deletionTimestamp"
        )

    def heal(self) -> None:
        """Everything is well again: new machines, no quota."""
        for node in list(self.nodes):
            if node in self.dead_nodes or self.leaving(node):
                self.remake_node(node)
            self.taint(node, on=False)
        self.quota, self.silent = None, set()
        self.manifest["spec"]["suspend"] = False
        self.queue.heal()


def running_world(**how: Any) -> World:
    """A world whose job runs with all its pods."""
    return World(**how).settled()
