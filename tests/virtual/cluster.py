"""Virtual machines: kubelets, the scheduler, the node and garbage collectors, and a cloud that sells nodes.

A pod's process is apart from what the API server says of the pod: a machine that is cut off goes on training, and one
that lost its power leaves a pod that looks alive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.virtual.loop import later, now, stamp
from tests.virtual.server import ApiServer, Json, Key

STEP_SECONDS = 0.5
UNHEARD_SECONDS = 40.0
MONITOR_SECONDS = 5.0
"""How often the node lifecycle controller takes its taint from nodes that are heard again."""
"""After so long without a word of its kubelet a node is Unknown."""
DEFAULT_TOLERATION_SECONDS = 300.0
"""What the API server gives a pod that says nothing of nodes that are not heard (DefaultTolerationSeconds)."""
SPOT = {"cloud.google.com/gke-spot": "true"}
ZONE = "topology.kubernetes.io/zone"


@dataclass(eq=False)
class Machine:
    """A machine and its node."""

    name: str
    labels: Mapping[str, str]
    taints: tuple[Json, ...] = ()
    cores: int = 4
    broken: bool = False
    """Its driver: it has accelerators, by its label, and none to give."""
    powered: bool = True
    connected: bool = True
    """Whether its kubelet reaches the API server."""
    leaves_at: float | None = None
    """A notice was given: power off at this time."""
    unheard_since: float | None = None
    tainted: bool = False
    """As one that is not heard."""
    pool: str = ""
    idle_since: float | None = None
    bought_at: float = 0.0


@dataclass(eq=False)
class Process:
    """The training container of a pod."""

    pod: Key
    uid: str
    machine: Machine
    role: str
    index: int
    incarnation: int
    job: str
    """The job's uid."""
    created_at: float
    address: str
    begins_at: float
    """When its image is there."""
    begun: bool = False
    ends_at: float | None = None
    """It was told to stop, and stops then..."""
    end: tuple[int, str] | None = None
    """... or has ended with this exit code and message."""
    restarts: int = 0
    told: bool = False
    """The API server knows of its end."""
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def runs(self) -> bool:
        """Whether it computes."""
        return self.begun and self.end is None and self.machine.powered


@dataclass(eq=False)
class Shop:
    """What the cloud sells of one pool: at most `limit` nodes, and only while there is `stock`."""

    name: str
    labels: Mapping[str, str]
    limit: int
    startup: float
    price: float
    cores: int = 4
    taints: tuple[Json, ...] = ()
    stock: Callable[[float], int] = lambda _at: 1_000_000
    most: int = 0
    """The most nodes that it ever had, without those that a notice was given for."""
    node_seconds: float = 0.0
    pending: list[float] = field(default_factory=list)
    """When nodes that were bought will be there."""


class Cluster:
    """Everything that is neither the API server nor Shoal."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.machines: dict[str, Machine] = {}
        self.processes: dict[str, Process] = {}
        """By uid of the pod."""
        self.shops: dict[str, Shop] = {}
        self.start_seconds: Callable[[Process], float] = lambda _process: 2.0
        self.on_stop: Callable[[Process], None] = lambda _process: None
        """Called when a process ends gracefully."""
        self.taken: dict[str, str] = {}
        """uid of a worker's pod -> what the platform did to it."""
        self.pods_first = True
        """Whether a namespace ends as in Kubernetes 1.33 and later: all else is deleted once its pods are gone."""
        self._numbers = 0

    # --- machines

    def add(self, machine: Machine) -> Machine:
        """A machine joins."""
        self.machines[machine.name] = machine
        machine.bought_at = now()
        self._numbers += 1
        devices = {} if machine.broken or "accelerator" not in machine.labels else {"nvidia.com/gpu": "1"}
        node = {
            "metadata": {"labels": {"kubernetes.io/hostname": machine.name, ZONE: "a", **machine.labels}},
            "spec": {"taints": list(machine.taints)},
            "status": {
                "nodeInfo": {"bootID": f"boot-{self._numbers}"},
                "allocatable": {"cpu": str(machine.cores), **devices},
                "conditions": [_ready("True")],
            },
        }
        self.server.store(("nodes", "", machine.name), node)
        return machine

    def notice(self, name: str, seconds: float = 25.0) -> None:
        """The cloud takes the machine, and says so before."""
        machine = self.machines[name]
        if machine.leaves_at is None and machine.powered:
            machine.leaves_at = now() + seconds
            self._take(machine, "notice")
            if machine.connected:
                ready = _ready("False", "KubeletNotReady", "node is shutting down")
                self._conditions(machine, [ready])
            for process in self._on(machine):
                if process.end is None:
                    process.ends_at = min(
                        process.ends_at or 1e18, now() + (8.0 if process.role == "worker" else 15.0)
                    )

    def kill(self, name: str) -> None:
        """The machine loses its power without a word."""
        machine = self.machines[name]
        machine.powered = False
        machine.unheard_since = machine.unheard_since or now()
        self._take(machine, "killed")

    def disconnect(self, name: str) -> None:
        """Its kubelet does not reach the API server; its pods run on."""
        machine = self.machines[name]
        machine.connected = False
        machine.unheard_since = machine.unheard_since or now()

    def reconnect(self, name: str) -> None:
        """It does again."""
        machine = self.machines[name]
        machine.connected = True
        if machine.powered:
            machine.unheard_since = None
            if machine.leaves_at is None:  # its taint stays until the node lifecycle controller looks again
                self._conditions(machine, [_ready("True")])

    def crash(self, process: Process, code: int, message: str = "") -> None:
        """The container ends by itself."""
        if process.runs:
            process.end = code, message

    def process_of(self, pod: str) -> Process | None:
        """The process of the pod with this name."""
        return next((p for p in self.processes.values() if p.pod[2] == pod), None)

    def _take(self, machine: Machine, how: str) -> None:
        for process in self._on(machine):
            if process.role == "worker" and process.end is None:
                self.taken.setdefault(process.uid, how)

    def _on(self, machine: Machine) -> list[Process]:
        return [process for process in self.processes.values() if process.machine is machine]

    # --- time passes

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(STEP_SECONDS)
            self.step()

    def step(self) -> None:
        """Half a second."""
        self.server.tick()
        self._machines()
        for process in list(self.processes.values()):
            self._process(process)
        self._collect()
        self._schedule()
        self._cloud()

    def _machines(self) -> None:
        unheard = [m for m in self.machines.values() if m.unheard_since is not None]
        everywhere = len(unheard) > 0.55 * len(self.machines)
        looks = now() % MONITOR_SECONDS < STEP_SECONDS
        for machine in list(self.machines.values()):
            if looks and machine.tainted and machine.unheard_since is None:
                machine.tainted = False
                self._taints(machine, list(machine.taints))
            if machine.leaves_at is not None and machine.powered and now() >= machine.leaves_at:
                machine.powered = False
                machine.unheard_since = now()
            since = machine.unheard_since
            if since is None:
                continue
            if now() - since >= UNHEARD_SECONDS:
                self._conditions(
                    machine, [_ready("Unknown", "NodeStatusUnknown", "Kubelet stopped posting node status.")]
                )
                if not everywhere:
                    self._evict(machine, since + UNHEARD_SECONDS)
            if not machine.powered and now() - since >= UNHEARD_SECONDS + 20:
                self.drop(machine.name)

    def drop(self, name: str) -> None:
        """The cloud's controller deletes the node of a machine that is gone."""
        machine = self.machines.pop(name)
        machine.powered = False
        if machine.pool:
            self.shops[machine.pool].node_seconds += now() - machine.bought_at
        self.server.remove(("nodes", "", name))

    def _evict(self, machine: Machine, since: float) -> None:
        """The taint manager: after the tolerated seconds, pods of a lost node are deleted."""
        taint = {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}
        node = self.server.get("nodes", machine.name)
        if node and not any(t["key"] == taint["key"] for t in node["spec"]["taints"]):
            self._taints(machine, [*node["spec"]["taints"], {**taint, "timeAdded": stamp()}])
            machine.tainted = True
        for process in self._on(machine):
            pod = self.server.objects.get(process.pod)
            if pod is None or pod["metadata"]["uid"] != process.uid or "deletionTimestamp" in pod["metadata"]:
                continue
            tolerated = [
                t.get("tolerationSeconds", 0)
                for t in pod["spec"].get("tolerations", [])
                if t.get("key") == taint["key"]
            ]
            if now() - since >= (tolerated[0] if tolerated else DEFAULT_TOLERATION_SECONDS):
                if process.role == "worker":
                    self.taken.setdefault(process.uid, "evicted")
                gone = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
                self._status(process, conditions=[gone, *pod["status"].get("conditions", [])])
                self.server.delete(process.pod)

    def _process(self, process: Process) -> None:
        machine = process.machine
        pod = self.server.objects.get(process.pod)
        there = pod is not None and pod["metadata"]["uid"] == process.uid
        if not machine.powered:
            if not there:
                del self.processes[process.uid]
            return
        if machine.connected:
            deleting = there and "deletionTimestamp" in pod["metadata"]  # type: ignore[index]
            if not there:
                process.end = process.end or (137, "")
                del self.processes[process.uid]
                return
            if deleting and process.end is None and process.ends_at is None:
                process.ends_at = now() + (2.0 if process.role == "worker" else 3.0)
        if (
            not process.begun
            and process.end is None
            and now() >= process.begins_at
            and process.ends_at is None
        ):
            if not machine.connected:
                return
            process.begun = True
            process.extra["begun_at"] = now()
            self._status(
                process,
                phase="Running",
                podIP=process.address,
                ready=True,
                state={"running": {"startedAt": stamp()}},
            )
        if process.ends_at is not None and now() >= process.ends_at and process.end is None:
            self.on_stop(process)
            process.end = 143, ""
        if process.end is not None and machine.connected and not process.told:
            self._tell_end(process)
        if machine.connected and process.end is not None:
            fresh = self.server.objects.get(process.pod)
            if fresh and "deletionTimestamp" in fresh["metadata"]:
                self.server.remove(process.pod)
                del self.processes[process.uid]

    def _tell_end(self, process: Process) -> None:
        assert process.end is not None
        code, message = process.end
        ended = {
            "exitCode": code,
            "finishedAt": stamp(),
            "reason": "Completed" if code == 0 else "Error",
            "message": message,
        }
        leaving = process.machine.leaves_at is not None
        if process.role == "ps" and code != 0 and process.ends_at is None:
            process.restarts += 1  # the kubelet starts it again
            process.end, process.begun, process.begins_at = None, False, now() + 2.0
            state = {"waiting": {"reason": "CrashLoopBackOff"}}
            self._status(process, ready=False, state=state, last={"terminated": ended})
            return
        process.told = True
        conditions = []
        words: dict[str, Any] = {}
        if leaving:
            conditions = [{"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}]
            words = {
                "reason": "Terminated",
                "message": "Pod was terminated in response to imminent node shutdown.",
            }
        phase = "Succeeded" if code == 0 else "Failed"
        self._status(
            process, phase=phase, ready=False, state={"terminated": ended}, conditions=conditions, **words
        )

    def _status(
        self,
        process: Process,
        *,
        ready: bool | None = None,
        state: Json | None = None,
        last: Json | None = None,
        conditions: list[Json] | None = None,
        **fields: Any,
    ) -> None:
        pod = self.server.objects.get(process.pod)
        if pod is None or pod["metadata"]["uid"] != process.uid:
            return
        status = {**pod["status"], **fields}
        if conditions is not None:
            status["conditions"] = conditions
        if ready is not None:
            others = [c for c in status.get("conditions", []) if c["type"] != "Ready"]
            status["conditions"] = [*others, {"type": "Ready", "status": str(ready)}]
        if state is not None:
            status["containerStatuses"] = [
                {
                    "name": process.role,
                    "ready": bool(ready),
                    "restartCount": process.restarts,
                    "state": state,
                    "lastState": last or {},
                }
            ]
        self.server.change(process.pod, status=status)

    def _collect(self) -> None:
        """Pods of nodes that are gone, what nobody owns any more, and namespaces that end."""
        uids = {found["metadata"]["uid"] for found in self.server.objects.values()}
        nodes = {found["metadata"]["name"] for found in self.server.all("nodes")}
        for key, found in list(self.server.objects.items()):
            if key not in self.server.objects or key[0] in {"nodes", "events", "leases"}:
                continue
            node = found.get("spec", {}).get("nodeName") if key[0] == "pods" else None
            if node and node not in nodes:
                if found["status"]["phase"] not in {"Succeeded", "Failed"}:
                    gone = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}
                    self.server.change(
                        key, status={**found["status"], "phase": "Failed", "conditions": [gone]}
                    )
                else:
                    self.server.remove(key)
                continue
            owners = found["metadata"].get("ownerReferences", [])
            if owners and not any(owner["uid"] in uids for owner in owners):
                self.server.delete(key)
        for namespace, state in list(self.server.namespaces.items()):
            if state == "Terminating":
                inside = [key for key in self.server.objects if key[1] == namespace]
                pods = [key for key in inside if key[0] == "pods"]
                for key in pods if pods and self.pods_first else inside:
                    self.server.delete(key)
                if not inside:
                    del self.server.namespaces[namespace]

    # --- scheduler and cloud

    def _schedule(self) -> None:
        busy = {p.machine.name for p in self.processes.values() if p.role == "worker" and p.end is None}
        for pod in self.server.all("pods"):
            if pod["spec"].get("nodeName") or pod["status"]["phase"] != "Pending" or _is_gated(pod):
                continue
            role = pod["metadata"]["labels"]["shoal.dev/role"]
            fitting = [
                m
                for m in self.machines.values()
                if self._fits(pod, m) and (role == "ps" or m.name not in busy)
            ]
            if fitting:
                machine = min(fitting, key=lambda m: (role == "worker" and len(self._on(m)), m.name))
                busy |= {machine.name} if role == "worker" else set()
                self._bind(pod, machine)
            elif not pod["status"].get("conditions"):
                self._tell(pod)

    def _fits(self, pod: Json, machine: Machine) -> bool:
        node = self.server.get("nodes", machine.name)
        if (
            node is None
            or not machine.powered
            or not machine.connected
            or node["status"]["conditions"][0]["status"] != "True"
            or (machine.broken and pod["metadata"]["labels"]["shoal.dev/role"] == "worker")
        ):
            return False
        return _admits(pod, node["metadata"]["labels"], node["spec"]["taints"], machine.name)

    def _tell(self, pod: Json) -> None:
        """Say that it was looked at, as a scheduler does at once; its words change with each try, and say no more."""
        words = (
            f"0/{len(self.machines)} nodes are available: {len(self.machines)} Insufficient nvidia.com/gpu."
        )
        waits = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
        status = {**pod["status"], "conditions": [{**waits, "lastTransitionTime": stamp()}]}
        self.server.change(("pods", pod["metadata"]["namespace"], pod["metadata"]["name"]), status=status)

    def _bind(self, pod: Json, machine: Machine) -> None:
        meta = pod["metadata"]
        labels = meta["labels"]
        key = "pods", meta["namespace"], meta["name"]
        bound = {"type": "PodScheduled", "status": "True", "lastTransitionTime": stamp()}
        status = {**pod["status"], "startTime": stamp(), "conditions": [bound]}
        fresh = self.server.change(key, spec={**pod["spec"], "nodeName": machine.name}, status=status)
        assert fresh is not None
        number = len(self.processes) + self.server.version
        process = Process(
            pod=key,
            uid=meta["uid"],
            machine=machine,
            role=labels["shoal.dev/role"],
            index=int(labels["shoal.dev/index"]),
            incarnation=int(labels["shoal.dev/incarnation"]),
            job=meta["ownerReferences"][0]["uid"],
            created_at=now(),
            address=f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}",
            begins_at=0.0,
        )
        process.begins_at = now() + self.start_seconds(process)
        self.processes[process.uid] = process

    def _cloud(self) -> None:
        """The autoscaler: a node for each pod of a pool that waits, and idle nodes are given back."""
        waiting: dict[str, int] = dict.fromkeys(self.shops, 0)
        for pod in self.server.all("pods"):
            if pod["status"]["phase"] == "Pending" and not pod["spec"].get("nodeName"):
                for shop in self.shops.values():
                    if _admits(pod, {ZONE: "a", **shop.labels}, list(shop.taints)):
                        waiting[shop.name] += 1
                        break
        for shop in self.shops.values():
            mine = [m for m in self.machines.values() if m.pool == shop.name]
            shop.pending = sorted(shop.pending)
            while shop.pending and shop.pending[0] <= now():
                shop.pending.pop(0)
                self._numbers += 1
                name = f"{shop.name}-{self._numbers}"
                self.add(Machine(name, dict(shop.labels), shop.taints, pool=shop.name, cores=shop.cores))
                mine = [m for m in self.machines.values() if m.pool == shop.name]
            staying = [m for m in mine if m.powered and m.leaves_at is None]
            room = min(shop.limit, shop.stock(now())) - len(staying) - len(shop.pending)
            free = sum(1 for m in staying if not self._on(m))
            for _ in range(min(room, waiting[shop.name] - len(shop.pending) - free)):
                shop.pending.append(now() + shop.startup)
            shop.most = max(shop.most, len(staying) + len(shop.pending))
            for machine in mine:
                if self._on(machine) or machine.leaves_at is not None or not machine.powered:
                    machine.idle_since = None
                elif machine.idle_since is None:
                    machine.idle_since = now()
                elif now() - machine.idle_since > 60:
                    self.drop(machine.name)

    def _conditions(self, machine: Machine, conditions: list[Json]) -> None:
        key = "nodes", "", machine.name
        node = self.server.objects[key]
        before = node["status"]["conditions"][0]
        if (before["status"], before["message"]) != (conditions[0]["status"], conditions[0]["message"]):
            self.server.change(key, status={**node["status"], "conditions": conditions})

    def _taints(self, machine: Machine, taints: list[Json]) -> None:
        key = "nodes", "", machine.name
        self.server.change(key, spec={**self.server.objects[key]["spec"], "taints": taints})


def _admits(pod: Json, labels: Mapping[str, str], taints: list[Json], name: str = "") -> bool:
    spec = pod["spec"]
    if not (spec.get("nodeSelector") or {}).items() <= labels.items():
        return False
    needed = (
        (spec.get("affinity") or {})
        .get("nodeAffinity", {})
        .get("requiredDuringSchedulingIgnoredDuringExecution")
    )
    if needed and not any(
        all(_matches(e, labels) for e in term.get("matchExpressions", []))
        and all(_matches(e, {"metadata.name": name}) for e in term.get("matchFields", []))
        for term in needed["nodeSelectorTerms"]
    ):
        return False
    return all(any(_tolerates(t, taint) for t in spec.get("tolerations", [])) for taint in taints)


def _matches(expression: Json, labels: Mapping[str, str]) -> bool:
    value = labels.get(expression["key"])
    match expression["operator"]:
        case "In":
            return value in expression["values"]
        case "NotIn":
            return value not in expression["values"]
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    raise AssertionError(expression)


def _tolerates(toleration: Json, taint: Json) -> bool:
    if toleration.get("effect", taint["effect"]) not in {"", taint["effect"]}:
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key", "") in {"", taint["key"]}
    return (toleration.get("key"), toleration.get("value", "")) == (taint["key"], taint.get("value", ""))


def _is_gated(pod: Json) -> bool:
    """Whether a queue holds it back."""
    return any(each.get("reason") == "SchedulingGated" for each in pod["status"].get("conditions", ()))


def _ready(
    status: str, reason: str = "KubeletReady", message: str = "kubelet is posting ready status"
) -> Json:
    return {
        "type": "Ready",
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": later(0),
    }
