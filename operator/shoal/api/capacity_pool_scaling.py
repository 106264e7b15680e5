"""What sets the size of a CapacityPool, and how: the cluster's autoscaler, a `scale` subresource, or a cloud's API."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from shoal.api.base import Strict
from shoal.api.rules import rules


class ScaleTarget(Strict):
    """An object with a `scale` subresource that sets the pool's size."""

    api_version: str = Field(min_length=1, max_length=253)
    """Its apiVersion."""
    kind: str = Field(min_length=1, max_length=63)
    """Its kind: MachineDeployment, NodePool, …"""
    name: str = Field(min_length=1, max_length=253)
    """Its name."""
    namespace: str | None = Field(None, max_length=63)
    """Its namespace. Unset: cluster-scoped."""


class Buffer(Strict):
    """A CapacityBuffer, which asks the cluster's autoscaler for nodes before there are pods."""

    namespace: str = Field(min_length=1, max_length=63)
    """Namespace of the CapacityBuffer and of its PodTemplate, which are named `shoal-` and the pool's name."""
    requests: dict[str, str] = Field(min_length=1, max_length=16)
    """Resources of one unit of the buffer. They have to fill a node, so that one unit is one node: `cpu: "7"`."""


class EksNodegroup(Strict):
    """A managed node group of EKS."""

    region: str = Field(min_length=1, max_length=63)
    """The AWS region."""
    cluster: str = Field(min_length=1, max_length=100)
    """Name of the EKS cluster."""
    nodegroup: str = Field(min_length=1, max_length=63)
    """Name of the node group."""


class GkeNodePool(Strict):
    """A node pool of GKE."""

    project: str = Field(min_length=1, max_length=63)
    """The Google Cloud project."""
    location: str = Field(min_length=1, max_length=63)
    """Region or zone of the cluster."""
    cluster: str = Field(min_length=1, max_length=63)
    """Name of the GKE cluster."""
    node_pool: str = Field(min_length=1, max_length=63)
    """Name of the node pool."""


class CloudGroup(Strict):
    """A node group of a cloud."""

    model_config = ConfigDict(
        json_schema_extra=rules(("has(self.eks) != has(self.gke)", "set exactly one of eks and gke"))
    )

    eks: EksNodegroup | None = None
    """A managed node group of EKS."""
    gke: GkeNodePool | None = None
    """A node pool of GKE."""


class Subject(Strict):
    """What is scaled."""

    target: ScaleTarget | None = None
    """For mode Scale: the object to scale."""
    buffer: Buffer | None = None
    """For mode Buffer: the CapacityBuffer."""
    cloud: CloudGroup | None = None
    """For mode Cloud: the node group."""


def _only_with(mode: str, field: str, what: str) -> tuple[str, str]:
    # The server checks the default `{}` too, before it fills in the mode.
    return (
        f"(has(self.mode) && self.mode == '{mode}') == has(self.{field})",
        f"set {field} ({what}) if and only if mode is {mode}",
    )


class Scaling(Subject):
    """How the pool is scaled to the recommended size."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            _only_with("Scale", "target", "the object to scale"),
            _only_with("Buffer", "buffer", "the namespace and requests of the CapacityBuffer"),
            _only_with("Cloud", "cloud", "the node group: eks or gke"),
        )
    )

    mode: Literal["Pods", "Buffer", "Scale", "Cloud"] = "Pods"
    """Pods: pending pods make the cluster's autoscaler add nodes. The others need `shoal-pools` (the chart's
    `pools.enabled`). Buffer: a CapacityBuffer asks the autoscaler for nodes. Scale: the `scale` subresource of
    `target`. Cloud: the cloud's API for node groups."""
    shrink_after_seconds: int = Field(600, ge=0, le=86_400)
    """The pool shrinks after less has been recommended for this long. Not for mode Buffer, which shrinks at once. In
    mode Pods: how long your autoscaler keeps an idle node. Plans count it as the price of leaving a node."""
    min_nodes: int | None = Field(None, ge=0, le=10_000)
    """For modes Scale and Cloud: never fewer nodes than these, those of jobs included. Unset: 0; but until a job has
    used the pool, those that it was found with stay beside what is recommended, since pods of others are not seen."""
    shrink: Literal["WhenNoServers", "WhenIdle"] = "WhenNoServers"
    """For modes Scale and Cloud: whoever gets a smaller size chooses which nodes go, unless empty ones go first
    (Karpenter). WhenNoServers: the pool shrinks only while no node has a parameter server; workers that are hit are
    replaced on the nodes that stay. WhenIdle: only while no node has a pod of a job."""
