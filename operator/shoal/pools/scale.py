"""Mode Scale: the `scale` subresource of any object, such as a Cluster API MachineDeployment or a Karpenter NodePool.

The object itself is read too, because the subresource does not say who sizes it. A write carries the version that was
read: whatever changed meanwhile is judged first.
"""

from __future__ import annotations

import json
from typing import Any

from shoal.api.capacity_pool_scaling import ScaleTarget
from shoal.cluster.transport import MERGE_PATCH, Transport
from shoal.errors import ScalingError
from shoal.pools.driver import checked
from shoal.pools.ownership import MANAGER, most_nodes, sized_by, takes_empty_first
from shoal.pools.rules import Pace, Target


class ScaleDriver:
    """Sizes one object."""

    def __init__(self, transport: Transport, target: ScaleTarget, pace: Pace) -> None:
        self._transport = transport
        self._target = target
        self.pace = pace
        where = f"{target.namespace}/" if target.namespace else ""
        self._what = f"{target.kind} {where}{target.name}"
        self._path = ""

    async def read(self) -> Target:
        """See `Driver`."""
        path = await self._find()
        found = await self._get(path, f"read {self._what}")
        scale = await self._get(f"{path}/scale", f"read the scale of {self._what}")
        return Target(
            nodes=int((scale.get("spec") or {}).get("replicas") or 0),
            maximum=most_nodes(found),
            sized_by=sized_by(found),
            version=str(found["metadata"].get("resourceVersion", "")),
            empty_first=takes_empty_first(found),
        )

    async def resize(self, nodes: int, seen: Target, /) -> None:
        """See `Driver`."""
        path = f"{await self._find()}/scale"
        body = {"metadata": {"resourceVersion": seen.version}, "spec": {"replicas": nodes}}
        query = {"fieldManager": MANAGER}
        answer = await self._transport.request(
            "PATCH", path, query=query, body=body, content_type=MERGE_PATCH
        )
        checked(answer, self._what, "scale")

    async def let_go(self) -> None:
        """See `Driver`; the object stays."""

    async def _get(self, path: str, doing: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            checked(await self._transport.request("GET", path), "", doing).body
        )
        return found

    async def _find(self) -> str:
        """The object's path: the API server knows the plural of its kind."""
        if self._path:
            return self._path
        target = self._target
        group = f"/apis/{target.api_version}" if "/" in target.api_version else f"/api/{target.api_version}"
        answer = await self._transport.request("GET", group)
        if answer.status == 404:
            words = f"the cluster has no API {target.api_version}: correct spec.scaling.target.apiVersion"
            raise ScalingError("TargetNotFound", words)
        resources = json.loads(checked(answer, target.api_version, "discover").body).get("resources", [])
        named = {each["name"] for each in resources}
        own = next((e for e in resources if e["kind"] == target.kind and "/" not in e["name"]), None)
        if own is None or f"{own['name']}/scale" not in named:
            words = f"{target.api_version} has no kind {target.kind} with a scale subresource: correct "
            raise ScalingError("TargetNotFound", f"{words}spec.scaling.target")
        if own["namespaced"] != (target.namespace is not None):
            change = "set its namespace" if own["namespaced"] else "remove its namespace"
            scope = "namespaced" if own["namespaced"] else "cluster-scoped"
            words = f"{target.kind} is {scope}: {change} in spec.scaling.target"
            raise ScalingError("TargetNotFound", words)
        within = f"/namespaces/{target.namespace}" if target.namespace else ""
        self._path = f"{group}{within}/{own['name']}/{target.name}"
        return self._path
