"""Kueue's real manager beside a control plane, with its integration for plain pods; for tests.

It is built from the Go module in `dev/tools/kueue` when it is first needed (4 minutes of CPU), since its dependencies
are older than those of Kubernetes. It runs in the network of the control plane: on loopback its webhooks are reached
through a Service of type ExternalName, and with real nodes through a Service and its endpoint. The Secret with their
certificate, which a kubelet would mount, is copied to a folder.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from dev.cluster import ControlPlane
from dev.cluster.control_plane import Network, free_ports
from dev.errors import DevError
from dev.tools.build import ensure_apart, source_of

PACKAGE = "sigs.k8s.io/kueue"
NAMESPACE = "kueue-system"
SERVICE, SECRET = "kueue-webhook-service", "webhook-server-cert"
CONVERTED = ("clusterqueues", "cohorts", "localqueues", "multikueueclusters", "workloads")
"""Kinds whose versions differ in more than their name."""
PODS = ("/mutate--v1-pod", "/validate--v1-pod")
KUEUES_OWN = "kueue-x-k8s-io"
READY_SECONDS = 60.0
COLLECTED_SECONDS = 120.0
"""The garbage collector looks for new kinds every 30 s, and begins anew where it takes longer to list them."""
Json = dict[str, Any]


@contextlib.contextmanager
def running(plane: ControlPlane, namespaces: list[str]) -> Iterator[None]:
    """Kueue, which looks after the pods of these namespaces until the end of the block.

    Workloads of pods that are gone are collected when the block begins: until then they keep their quota.

    Raises:
        DevError: it was not ready in time; the message has the end of its log.
    """
    program, source = ensure_apart("kueue", f"{PACKAGE}/cmd/kueue"), source_of("kueue", PACKAGE)
    webhook, health, metrics = free_ports(3)
    config, certificates = plane.folder / "kueue.yaml", plane.folder / "kueue-certificates"
    address = plane.network.address
    config.write_text(
        yaml.safe_dump(_configuration(address, webhook, health, metrics, namespaces, certificates))
    )
    bases = sorted((source / "config/components/crd/bases").glob("*.yaml"))
    kinds = yaml.safe_dump_all([_convertible(yaml.safe_load(base.read_text()), webhook) for base in bases])
    plane.kubectl("apply", "--server-side", "-f", "-", stdin=kinds)
    plane.kubectl("wait", "--for=condition=Established", "-f", "-", stdin=kinds)
    hooks = yaml.safe_load_all((source / "config/components/webhook/manifests.yaml").read_text())
    around = [
        *_surroundings(plane.network, webhook),
        *(_reachable(each, webhook, namespaces) for each in hooks if each),
    ]
    plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(around))
    words = [str(program), f"--config={config}", f"--kubeconfig={plane.kubeconfig}",
             "--feature-gates=VisibilityOnDemand=false"]  # fmt: skip
    shutil.rmtree(certificates, ignore_errors=True)  # of an earlier one
    plane.processes.start("kueue", words, netns=plane.network.netns)
    try:
        _await_ready(plane, namespaces[0], certificates)
        _await_collected(plane, namespaces[0])
        yield
    finally:
        plane.processes.stop("kueue")


def _configuration(
    address: str, webhook: int, health: int, metrics: int, namespaces: list[str], certificates: Path
) -> Json:
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": NAMESPACE,
        "leaderElection": {"leaderElect": False},
        "webhook": {"host": address, "port": webhook, "certDir": str(certificates)},
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": f"127.0.0.1:{metrics}"},
        "internalCertManagement": {
            "enable": True, "webhookServiceName": SERVICE, "webhookSecretName": SECRET,
        },
        "integrations": {"frameworks": ["pod"]},
        "managedJobsNamespaceSelector": _selector(namespaces),
    }  # fmt: skip


def _convertible(kind: Json, port: int) -> Json:
    """A definition with the conversion between its versions, which the manager does."""
    if kind["spec"]["names"]["plural"] in CONVERTED:
        service = {"name": SERVICE, "namespace": NAMESPACE, "path": "/convert", "port": port}
        webhook = {"clientConfig": {"service": service}, "conversionReviewVersions": ["v1"]}
        kind["spec"]["conversion"] = {"strategy": "Webhook", "webhook": webhook}
    return kind


def _selector(namespaces: list[str]) -> Json:
    key = "kubernetes.io/metadata.name"
    return {"matchExpressions": [{"key": key, "operator": "In", "values": namespaces}]}


def _surroundings(network: Network, port: int) -> list[Json]:
    service: Json = {"type": "ExternalName", "externalName": "localhost"}
    around = []
    if network.netns is not None:
        ports = [{"name": "https", "port": port, "protocol": "TCP"}]
        service = {"ports": ports}
        labels = {"kubernetes.io/service-name": SERVICE}
        around = [
            {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4", "ports": ports,
             "metadata": {"name": SERVICE, "namespace": NAMESPACE, "labels": labels},
             "endpoints": [{"addresses": [network.address], "conditions": {"ready": True}}]},
        ]  # fmt: skip
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": SERVICE, "namespace": NAMESPACE},
         "spec": service},
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET, "namespace": NAMESPACE}},
        *around,
    ]  # fmt: skip


def _reachable(configuration: Json, port: int, namespaces: list[str]) -> Json:
    """Kueue's own webhooks and those of pods; of other kinds there are none here."""
    configuration["metadata"]["name"] = f"kueue-{configuration['metadata']['name']}"
    kept = []
    for hook in configuration["webhooks"]:
        service = hook["clientConfig"]["service"]
        if service["path"] not in PODS and KUEUES_OWN not in service["path"]:
            continue
        service |= {"name": SERVICE, "namespace": NAMESPACE, "port": port}
        if service["path"] in PODS:
            hook["namespaceSelector"] = _selector(namespaces)
        kept.append(hook)
    configuration["webhooks"] = kept
    return configuration


def _await_ready(plane: ControlPlane, namespace: str, certificates: Path) -> None:
    """Wait until a pod of a queue is gated; give the manager its certificate meanwhile."""
    container = {"name": "c", "image": "x"}
    metadata = {"name": "probe", "namespace": namespace, "labels": {"kueue.x-k8s.io/queue-name": "probe"}}
    probe = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}
    path = f"/api/v1/namespaces/{NAMESPACE}/secrets/{SECRET}"
    deadline = time.monotonic() + READY_SECONDS
    while True:
        data = json.loads(plane.get(path)).get("data") or {}
        if "tls.crt" in data and not (certificates / "tls.key").exists():
            certificates.mkdir(parents=True, exist_ok=True, mode=0o700)
            for name, value in data.items():
                (certificates / name).write_bytes(base64.b64decode(value))
        with contextlib.suppress(Exception):
            made = plane.kubectl(
                "create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(probe)
            )
            if json.loads(made)["spec"].get("schedulingGates"):
                return
        if time.monotonic() > deadline or not plane.processes.running("kueue"):
            raise DevError(f"Kueue is not ready:\n{plane.processes.tail('kueue', 20)}")
        time.sleep(0.2)


def _await_collected(plane: ControlPlane, namespace: str) -> None:
    """Wait until a Workload without its pod is deleted."""
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "probe", "uid": str(uuid.uuid4())}
    template = {"spec": {"containers": [{"name": "c", "image": "x"}], "restartPolicy": "Never"}}
    orphan = {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "Workload",
        "metadata": {"name": "probe", "namespace": namespace, "ownerReferences": [owner]},
        "spec": {"queueName": "probe", "podSets": [{"name": "main", "count": 1, "template": template}]},
    }
    plane.kubectl("create", "-f", "-", stdin=json.dumps(orphan))
    try:
        words = [
            "wait",
            "--for=delete",
            f"--timeout={COLLECTED_SECONDS:.0f}s",
            "-n",
            namespace,
            "workload/probe",
        ]
        plane.kubectl(*words, timeout=2 * COLLECTED_SECONDS)
    except subprocess.CalledProcessError as error:
        raise DevError(f"no Workload is collected in {COLLECTED_SECONDS:.0f} s") from error
