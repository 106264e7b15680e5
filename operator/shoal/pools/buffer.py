"""Mode Buffer: a CapacityBuffer, so that the cluster's autoscaler makes nodes before there are pods.

A buffer is spare capacity, beside nodes in use and those for which pods wait, so it is what is recommended less these.
It shrinks at once: a unit too many is a node too many. A unit goes where a worker of the pool goes. Both objects are
applied (server-side) and belong to the CapacityPool: Kubernetes deletes them with it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from shoal.api.base import API_VERSION, Reason
from shoal.api.capacity_pool import CapacityPool
from shoal.api.capacity_pool_scaling import Buffer
from shoal.cluster.transport import APPLY_PATCH, Transport
from shoal.errors import ScalingError
from shoal.manifests.placement import Where, node_affinity, node_selector, tolerations
from shoal.manifests.platforms import Platform
from shoal.manifests.pods import GPU
from shoal.pools.driver import checked
from shoal.pools.ownership import MANAGER
from shoal.pools.rules import Pace, Target

GROUP = "autoscaling.x-k8s.io"
STRATEGY = "buffer.x-k8s.io/active-capacity"
TEMPLATE = "shoal.dev/template"
"""Annotation of a buffer: a digest of the unit that it was applied with."""
NOW = Pace(between=Pace().between * 0, shrink_after=Pace().shrink_after * 0)


class BufferDriver:
    """Sizes the CapacityBuffer of one pool. `selector`: labels of the nodes of all pods of jobs."""

    pace = NOW

    def __init__(
        self,
        transport: Transport,
        pool: CapacityPool,
        buffer: Buffer,
        platform: Platform,
        selector: Mapping[str, str],
    ) -> None:
        self._transport = transport
        self._pool = pool
        self._buffer = buffer
        self._template = _template(pool, buffer, platform, selector)
        self._digest = hashlib.sha256(json.dumps(self._template, sort_keys=True).encode()).hexdigest()[:12]
        self._name = f"shoal-{pool.metadata.name}"
        self._what = f"CapacityBuffer {buffer.namespace}/{self._name}"
        self._version = ""

    async def read(self) -> Target:
        """See `Driver`."""
        answer = await self._transport.request("GET", await self._path())
        if answer.is_absent:
            return Target(nodes=0, absent=True)
        found: dict[str, Any] = json.loads(checked(answer, self._what, "read").body)
        meta = found["metadata"]
        managers = {entry.get("manager") for entry in meta.get("managedFields", ())}
        other = None
        if MANAGER not in managers:
            words = f"{self._what} exists and is not Shoal's: delete it, or use another namespace"
            other = Reason("NotOurs", words)
        return Target(
            nodes=int((found.get("spec") or {}).get("replicas") or 0),
            sized_by=other,
            outdated=(meta.get("annotations") or {}).get(TEMPLATE) != self._digest,
        )

    async def resize(self, nodes: int, _seen: Target, /) -> None:
        """See `Driver`."""
        path = await self._path()
        await self._apply(
            self._template_path, self._object("v1", "PodTemplate", {"template": self._template})
        )
        spec = {
            "provisioningStrategy": STRATEGY,
            "podTemplateRef": {"name": self._name},
            "replicas": nodes,
        }
        body = self._object(f"{GROUP}/{self._version}", "CapacityBuffer", {"spec": spec})
        body["metadata"]["annotations"] = {TEMPLATE: self._digest}
        await self._apply(path, body)

    async def let_go(self) -> None:
        """See `Driver`."""
        for path in (await self._path(), self._template_path):
            answer = await self._transport.request("DELETE", path)
            if not answer.is_absent:
                checked(answer, path, "delete")

    @property
    def _template_path(self) -> str:
        return f"/api/v1/namespaces/{self._buffer.namespace}/podtemplates/{self._name}"

    async def _path(self) -> str:
        """The buffer's path, in the version that the API server prefers."""
        if not self._version:
            answer = await self._transport.request("GET", f"/apis/{GROUP}")
            if answer.status == 404:
                words = (
                    "the cluster has no CapacityBuffers: install their CRD with an autoscaler that reads them, or set "
                    "spec.scaling.mode to Pods"
                )
                raise ScalingError("TargetNotFound", words)
            group = json.loads(checked(answer, GROUP, "discover").body)
            self._version = group["preferredVersion"]["version"]
        within = f"namespaces/{self._buffer.namespace}/capacitybuffers"
        return f"/apis/{GROUP}/{self._version}/{within}/{self._name}"

    async def _apply(self, path: str, body: dict[str, Any]) -> None:
        query = {"fieldManager": MANAGER}
        answer = await self._transport.request(
            "PATCH", path, query=query, body=body, content_type=APPLY_PATCH
        )
        checked(answer, f"{body['kind']} {self._buffer.namespace}/{self._name}", "apply")

    def _object(self, version: str, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        pool = self._pool
        owner = {
            "apiVersion": API_VERSION,
            "kind": pool.kind,
            "name": pool.metadata.name,
            "uid": pool.metadata.uid,
        }
        meta = {"name": self._name, "namespace": self._buffer.namespace, "ownerReferences": [owner]}
        return {"apiVersion": version, "kind": kind, "metadata": meta, **fields}


def _template(
    pool: CapacityPool, buffer: Buffer, platform: Platform, selector: Mapping[str, str]
) -> dict[str, Any]:
    """One unit: a pod that only a node of the pool has room for."""
    where, spec = Where(pool.spec.capacity_type, pool), pool.spec
    extended = {
        name: count for name, count in buffer.requests.items() if "/" in name
    }  # limits equal requests
    unit = {"requests": buffer.requests, "limits": extended}
    pod = {
        "nodeSelector": {**selector, **node_selector(where)},
        "affinity": node_affinity(where, platform),
        "tolerations": tolerations(where, platform, gpu=spec.accelerator is not None or GPU in extended),
        "containers": [{"name": "unit", "image": "pause", "resources": unit}],  # it never starts
    }
    return {"spec": pod}
