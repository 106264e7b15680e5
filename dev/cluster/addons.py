"""The add-ons of a cluster: DNS, and storage for volume claims.

CoreDNS is a process next to the API server, so it needs no image and no node; kube-proxy routes the usual service
address to it. Storage is a pool of host folders: all nodes share the machine's file system, so a claim follows its
pod to any node.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dev.cluster.control_plane import ControlPlane
from dev.cluster.network import Addresses
from dev.cluster.node import DNS_IP

STORAGE_CLASS = "shoal-local"
VOLUMES = 16

Manifest = dict[str, Any]


def corefile(kubeconfig: Path) -> str:
    """The configuration of CoreDNS, with short TTLs."""
    return f"""
.:53 {{
    errors
    health 127.0.0.1:8080
    ready 127.0.0.1:8181
    kubernetes cluster.local in-addr.arpa ip6.arpa {{
        kubeconfig {kubeconfig} shoal-dev
        ttl 5
        fallthrough in-addr.arpa ip6.arpa
    }}
    cache 5
}}
"""


def start_dns(plane: ControlPlane, addresses: Addresses) -> None:
    """Start CoreDNS in the control plane's namespace."""
    path = plane.folder / "Corefile"
    path.write_text(corefile(plane.kubeconfig))
    plane.processes.start("coredns", [plane.tools["coredns"], "-conf", str(path)], netns=addresses.netns)


def dns_manifests(addresses: Addresses) -> list[Manifest]:
    """The DNS Service and its endpoint."""
    meta = {"name": "kube-dns", "namespace": "kube-system"}
    ports = [
        {"name": "dns", "port": 53, "protocol": "UDP"},
        {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
    ]
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": meta,
            "spec": {"clusterIP": DNS_IP, "ports": ports},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {**meta, "labels": {"kubernetes.io/service-name": "kube-dns"}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [addresses.control_plane], "conditions": {"ready": True}}],
            "ports": ports,
        },
    ]


def storage_manifests(folder: Path) -> list[Manifest]:
    """The default storage class and its pool of volumes. Creates their folders.

    A volume is bound once: after its claim is deleted, its content is kept (Retain).
    """
    volumes = []
    for number in range(VOLUMES):
        path = folder / f"volume-{number:02d}"
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o777)  # hostPath has no fsGroup, and pods are not root
        volumes.append(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": path.name},
                "spec": {
                    "storageClassName": STORAGE_CLASS,
                    "capacity": {"storage": "100Gi"},
                    "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
                    "persistentVolumeReclaimPolicy": "Retain",
                    "hostPath": {"path": str(path), "type": "Directory"},
                },
            }
        )
    storage_class = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {
            "name": STORAGE_CLASS,
            "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
        },
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "Immediate",
    }
    return [storage_class, *volumes]
