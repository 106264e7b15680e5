"""Fake nodes: the writes of kubelets to the API server, without machines or containers.

It plays what a controller can see of a kubelet: leases, node conditions, the phases of pods, container statuses,
graceful deletion, refusals. Events on the machine are methods, so that a test controls them.

```python
async with FakeKubelet(control_plane.kubeconfig) as kubelet:
    await kubelet.add_node("spot-1", labels=SPOT, capacity={"nvidia.com/gpu": "8"})
    await kubelet.notice("spot-1")            # Ready=False, "node is shutting down"; pods keep running
    await kubelet.end_shutdown("spot-1")      # its pods stop (143), then the machine ends
    await kubelet.vanish("spot-2")            # no more heartbeats; the status of its pods stays as it was
    await kubelet.fail_pod("default", "digits-worker-0-0", exit_code=1)
```
Not played: probes (a running pod is Ready), volumes, init containers (skipped).
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from dev.cluster.node import ON_DEMAND, SPOT
from dev.kube import ApiError, Json, Kube, tolerant
from tests.doubles.pod_status import (
    addresses,
    condition,
    container_statuses,
    ended,
    has_statuses,
    now,
    now_micro,
    pod_path,
    running_containers,
    started,
    terminated,
    waiting,
)

CAPACITY = {"cpu": "32", "memory": "256Gi", "pods": "110", "ephemeral-storage": "100Gi"}
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
_ENDED = ("Succeeded", "Failed")


class FakeNode:
    """The state of one kubelet. `alive`: it sends heartbeats and serves pods; `shutting_down`: it got a notice."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.shutting_down = False


class FakeKubelet:
    """The kubelets of all fake nodes, as an asynchronous context manager.

    `start_seconds`: from bound to Running and Ready. `stop_seconds`: from SIGTERM to the end, at most the
    pod's grace period. `exit_on_term`: exit code of containers after SIGTERM. `pod_ip`: an address for
    a pod (default: made up). `image_errors`: images that cannot be pulled, with the message; their pods wait in
    ImagePullBackOff. `hold`: pods for which it answers True stay Pending although bound. The last
    two may be changed at any time and hold
    for pods that are bound afterwards.
    """

    def __init__(
        self,
        kubeconfig: Path,
        *,
        start_seconds: float = 0.0,
        stop_seconds: float = 0.0,
        heartbeat_seconds: float = 5.0,
        exit_on_term: int = 143,
        pod_ip: Callable[[Json], str] | None = None,
    ) -> None:
        self.kube = Kube(kubeconfig)
        self.start_seconds = start_seconds
        self.stop_seconds = stop_seconds
        self.heartbeat_seconds = heartbeat_seconds
        self.exit_on_term = exit_on_term
        self.image_errors: dict[str, str] = {}
        self.hold: Callable[[Json], bool] = lambda _pod: False
        self.nodes: dict[str, FakeNode] = {}
        self.pods: dict[str, Json] = {}
        """Every pod of a fake node as last seen, by uid."""
        self._pod_ip = pod_ip or addresses()
        self._handled: set[tuple[str, str]] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.kube.__aenter__()
        self._spawn(self._follow_pods())
        self._spawn(self._beat())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.kube.__aexit__(kind, error, trace)

    # --- nodes -----------------------------------------------------------------------------------------------

    async def add_node(
        self,
        name: str,
        *,
        labels: Mapping[str, str] | None = None,
        taints: Sequence[Json] = (),
        capacity: Mapping[str, str] | None = None,
        spot: bool = False,
        zone: str = "zone-a",
    ) -> None:
        """A node that is Ready when this returns. `spot=True` adds GKE's spot labels, else the on-demand label.

        After `remove_node` or a machine's end the name can be reused, with another uid and boot id.
        """
        # Registered before it is Ready: a pod can be bound to it before the API server's answer arrives.
        self.nodes[name] = FakeNode(name)
        all_labels = {
            "kubernetes.io/hostname": name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": "amd64",
            "topology.kubernetes.io/zone": zone,
            **(SPOT if spot else ON_DEMAND),
            **(labels or {}),
        }
        if labels is not None and not spot:
            for key in ON_DEMAND.keys() - labels.keys():
                all_labels.pop(key)
        body = {"metadata": {"name": name, "labels": all_labels}, "spec": {"taints": list(taints)}}
        with tolerant(409):
            await self.kube.create("/api/v1/nodes", body)
        lease = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": now_micro()}
        with tolerant(409):
            await self.kube.create(LEASES, {"metadata": {"name": name}, "spec": lease})
        resources = {**CAPACITY, **(capacity or {})}
        info = {"bootID": str(uuid.uuid4()), "kubeletVersion": "v1.36.2", "architecture": "amd64"}
        info |= {"machineID": name, "systemUUID": name, "kernelVersion": "fake", "osImage": "fake"}
        info |= {
            "containerRuntimeVersion": "fake://1",
            "kubeProxyVersion": "v1.36.2",
            "operatingSystem": "linux",
        }
        status: Json = {"capacity": resources, "allocatable": resources, "nodeInfo": info}
        status["conditions"] = [condition("Ready", "True", "KubeletReady", "kubelet is posting ready status")]
        await self.kube.patch(f"/api/v1/nodes/{name}/status", {"status": status})

    async def notice(self, name: str, *, drain_seconds: float | None = None) -> None:
        """The shutdown of a machine begins: Ready=False, "node is shutting down".

        Pods got SIGTERM but keep running; new ones are refused (reason NodeShutdown). They end with `end_shutdown`,
        or after `drain_seconds` if set.
        """
        self._node(name).shutting_down = True
        await self._set_ready(name, "False", "KubeletNotReady", "node is shutting down")
        if drain_seconds is not None:
            self._spawn(self._end_later(name, drain_seconds))

    async def end_shutdown(self, name: str, *, exit_code: int | None = None) -> None:
        """The shutdown ends: its pods are Failed (TerminationByKubelet), then the machine ends."""
        why = "Pod was terminated in response to imminent node shutdown."
        code = self.exit_on_term if exit_code is None else exit_code
        target = condition("DisruptionTarget", "True", "TerminationByKubelet", why)
        for pod in self.pods_on(name):
            with tolerant(404, 409):  # deleted meanwhile, or replaced by another pod of its name
                await self._end(pod, exit_code=code, pod_reason="Terminated", pod_message=why, extra=target)
        await self.vanish(name)

    async def vanish(self, name: str, *, unknown_after: float | None = None) -> None:
        """The machine ends without notice: no heartbeat, and the status of its pods stays as it was.

        The control plane marks the node Ready=Unknown after its grace period (40 s by default). With `unknown_after`
        it is set here, this many seconds from now.
        """
        self._node(name).alive = False
        if unknown_after is not None:
            self._spawn(self._unknown_later(name, unknown_after))

    async def appear(self, name: str) -> None:
        """The machine that had vanished was only not heard: it is back, with its pods."""
        self._node(name).alive = True
        await self._set_ready(name, "True", "KubeletReady", "kubelet is posting ready status")
        for pod in list(self.pods.values()):  # what was asked of it meanwhile
            if pod["spec"].get("nodeName") == name:
                self._see(pod)

    async def remove_node(self, name: str) -> None:
        """Remove the machine and its Node object, as a cloud controller does."""
        if node := self.nodes.pop(name, None):
            node.alive = False
        with tolerant(404):
            await self.kube.delete(f"/api/v1/nodes/{name}")
        with tolerant(404):
            await self.kube.delete(f"{LEASES}/{name}")

    # --- pods ------------------------------------------------------------------------------------------------

    def pods_on(self, node: str) -> list[Json]:
        """The pods of a node that have not ended."""
        return [
            pod
            for pod in self.pods.values()
            if pod["spec"].get("nodeName") == node and pod["status"].get("phase") not in _ENDED
        ]

    async def fail_pod(
        self,
        namespace: str,
        name: str,
        *,
        exit_code: int = 1,
        reason: str = "Error",
        message: str = "",
        pod_reason: str = "",
        extra: Json | None = None,
    ) -> None:
        """End the pod as Failed. `reason` and `message` are the container's (`OOMKilled`, …).

        `pod_reason` is the pod's own, such as `Evicted` or `OutOfnvidia.com/gpu`; `extra` is one more condition.
        """
        pod = await self._read(namespace, name)
        await self._end(
            pod,
            exit_code=exit_code,
            reason=reason,
            message=message,
            pod_reason=pod_reason,
            extra=extra,
            failed=True,
        )

    async def succeed_pod(self, namespace: str, name: str, *, message: str = "") -> None:
        """End the pod as Succeeded, exit code 0; `message` is the container's termination message."""
        await self.terminate_pod(namespace, name, exit_code=0, message=message)

    async def terminate_pod(
        self, namespace: str, name: str, *, exit_code: int = 0, message: str = "", reason: str | None = None
    ) -> None:
        """End all containers with an exit code and a termination message; 0 is Succeeded, else Failed."""
        pod = await self._read(namespace, name)
        reason = reason or ("Error" if exit_code else "Completed")
        await self._end(pod, exit_code=exit_code, reason=reason, message=message)

    async def restart_container(
        self, namespace: str, name: str, *, exit_code: int = 1, reason: str = "Error", message: str = ""
    ) -> None:
        """Restart the containers, as with restartPolicy OnFailure: `lastState` is set, and the count grows."""
        pod = await self._read(namespace, name)
        end = terminated(pod, exit_code, reason, message)
        statuses = [
            {**running, "restartCount": before.get("restartCount", 0) + 1, "lastState": {"terminated": end}}
            for running, before in zip(running_containers(pod), container_statuses(pod), strict=True)
        ]
        await self._patch_status(pod, {"containerStatuses": statuses})

    # --- what kubelets do by themselves ----------------------------------------------------------------------

    def _node(self, name: str) -> FakeNode:
        if name not in self.nodes:
            raise KeyError(f"{name} is not a fake node; the fake nodes are {sorted(self.nodes)}")
        return self.nodes[name]

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _beat(self) -> None:
        while True:
            names = [node.name for node in self.nodes.values() if node.alive]
            for chunk in _chunks(names):
                await asyncio.gather(*(self._renew(name) for name in chunk))
            await asyncio.sleep(self.heartbeat_seconds)

    async def _renew(self, name: str) -> None:
        with contextlib.suppress(ApiError, aiohttp.ClientError, TimeoutError):
            await self.kube.patch(f"{LEASES}/{name}", {"spec": {"renewTime": now_micro()}})
            node = self.nodes.get(name)
            if node is None or node.shutting_down:
                return
            status = (await self.kube.get(f"/api/v1/nodes/{name}"))["status"]
            seen = status.get("conditions", [])  # none between a node's creation and its first report
            if any(c["type"] == "Ready" and c["status"] == "Unknown" for c in seen) and node.alive:
                # The control plane gave it up while they could not hear each other.
                await self._set_ready(name, "True", "KubeletReady", "kubelet is posting ready status")

    async def _follow_pods(self) -> None:
        while True:
            try:
                listed = await self.kube.get("/api/v1/pods")
                self.pods = {}
                for pod in listed["items"]:
                    self._see(pod)
                version = listed["metadata"]["resourceVersion"]
                async for kind, pod in self.kube.watch("/api/v1/pods", resourceVersion=version):
                    if kind == "DELETED":
                        self.pods.pop(pod["metadata"]["uid"], None)
                    elif kind in ("ADDED", "MODIFIED"):
                        self._see(pod)
            except (ApiError, aiohttp.ClientError, TimeoutError, ValueError):
                await asyncio.sleep(0.2)

    def _see(self, pod: Json) -> None:
        node = self.nodes.get(pod["spec"].get("nodeName") or "")
        if node is None:
            return
        meta = pod["metadata"]
        self.pods[meta["uid"]] = pod
        if not node.alive:
            return
        if meta.get("deletionTimestamp"):
            work, todo = "stop", self._stop
        elif pod["status"].get("phase") == "Pending" and not has_statuses(pod):
            work, todo = "start", self._start
        else:
            return
        if (meta["uid"], work) not in self._handled:
            self._handled.add((meta["uid"], work))
            self._spawn(self._quietly(todo, pod, node))

    async def _quietly(self, work: Callable[..., Awaitable[object]], *about: Any) -> None:
        """Ignore that the pod was deleted (404) or replaced (409) meanwhile, as a kubelet does."""
        with contextlib.suppress(ApiError, aiohttp.ClientError, TimeoutError):
            await work(*about)

    async def _start(self, pod: Json, node: FakeNode) -> None:
        if node.shutting_down:
            message = "Pod was rejected as the node is shutting down."
            await self._patch_status(
                pod, {"phase": "Failed", "reason": "NodeShutdown", "message": message, "startTime": now()}
            )
            return
        images = [container["image"] for container in pod["spec"]["containers"]]
        if bad := next((image for image in images if image in self.image_errors), None):
            await self._patch_status(pod, waiting(pod, "ImagePullBackOff", self.image_errors[bad]))
            return
        if self.hold(pod):
            return
        if self.start_seconds:
            await asyncio.sleep(self.start_seconds)
        if not node.alive:
            self._handled.discard((pod["metadata"]["uid"], "start"))  # begun again if the machine is back
            return
        await self._patch_status(pod, started(pod, self._pod_ip(pod)))

    async def _stop(self, pod: Json, node: FakeNode) -> None:
        meta = pod["metadata"]
        await asyncio.sleep(min(self.stop_seconds, meta.get("deletionGracePeriodSeconds") or 0))
        if not node.alive:
            self._handled.discard((meta["uid"], "stop"))
            return
        if pod["status"].get("phase") not in _ENDED:
            with contextlib.suppress(ApiError):
                await self._end(pod, exit_code=self.exit_on_term)
        await self.kube.delete(pod_path(pod), grace_seconds=0, uid=meta["uid"])

    async def _end_later(self, name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._quietly(self.end_shutdown, name)

    async def _unknown_later(self, name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        message = "Kubelet stopped posting node status."
        await self._quietly(self._set_ready, name, "Unknown", "NodeStatusUnknown", message)

    async def _set_ready(self, name: str, status: str, reason: str, message: str) -> None:
        ready = condition("Ready", status, reason, message)
        await self.kube.patch(f"/api/v1/nodes/{name}/status", {"status": {"conditions": [ready]}})

    async def _read(self, namespace: str, name: str) -> Json:
        return await self.kube.get(f"/api/v1/namespaces/{namespace}/pods/{name}")

    async def _end(
        self,
        pod: Json,
        *,
        exit_code: int,
        reason: str | None = None,
        message: str = "",
        pod_reason: str = "",
        pod_message: str = "",
        extra: Json | None = None,
        failed: bool = False,
    ) -> None:
        end = terminated(pod, exit_code, reason or ("Error" if exit_code else "Completed"), message)
        phase = "Failed" if failed or exit_code else "Succeeded"
        status = ended(pod, phase, end, [extra] if extra else [])
        if pod_reason:
            status |= {"reason": pod_reason, "message": pod_message}
        await self._patch_status(pod, status)

    async def _patch_status(self, pod: Json, status: Json) -> None:
        # With the uid, the answer is 409 if another pod has the name.
        body = {"metadata": {"uid": pod["metadata"]["uid"]}, "status": status}
        await self.kube.patch(f"{pod_path(pod)}/status", body)


def _chunks(names: Sequence[str]) -> list[Sequence[str]]:
    return [names[i : i + 16] for i in range(0, len(names), 16)]
