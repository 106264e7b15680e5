"""The nodes are real: pods run, find each other and keep their storage; a node is taken as a cloud takes it."""

from __future__ import annotations

import json
import time
from typing import Any

from dev.audit import writes
from dev.cluster.local import LocalCluster
from dev.images import IMAGES
from dev.kube import Kube
from tests.control_plane.operators import eventually

RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


async def run_pod(kube: Kube, namespace: str, name: str, node: str, script: str, **spec: Any) -> None:
    """A pod that runs a Python script under the restricted Pod Security Standard."""
    mounts = spec.pop("mounts", [])
    container = {
        "name": "main",
        "image": IMAGES["operator"].reference,
        "imagePullPolicy": "Never",
        "command": ["python", "-u", "-c", script],
        "securityContext": RESTRICTED,
        "volumeMounts": mounts,
    }
    body = {
        "metadata": {"name": name},
        "spec": {
            "nodeName": node,
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 10,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            **spec,
        },
    }

    await kube.create(f"/api/v1/namespaces/{namespace}/pods", body)


async def pod(kube: Kube, namespace: str, name: str) -> dict[str, Any]:
    return await kube.get(f"/api/v1/namespaces/{namespace}/pods/{name}")


async def phase(kube: Kube, namespace: str, name: str, *wanted: str) -> dict[str, Any]:
    async def reached() -> dict[str, Any] | None:
        seen = await pod(kube, namespace, name)
        return seen if seen["status"].get("phase") in wanted else None

    return dict(await eventually(reached))


def ready(node: dict[str, Any]) -> dict[str, Any]:
    return next(c for c in node["status"]["conditions"] if c["type"] == "Ready")


async def test_four_nodes_are_ready_and_labelled_as_a_cloud_labels_them(
    cluster: LocalCluster, node_kube: Kube
) -> None:
    nodes = {n["metadata"]["name"]: n for n in (await node_kube.get("/api/v1/nodes"))["items"]}
    spot = {
        name
        for name, n in nodes.items()
        if n["metadata"]["labels"].get("cloud.google.com/gke-spot") == "true"
    }
    assert spot >= {"spot-1", "spot-2", "spot-3"}
    assert nodes["ondemand-1"]["metadata"]["labels"]["cloud.google.com/gke-provisioning"] == "standard"
    assert all(ready(n)["status"] == "True" for n in nodes.values())


async def test_pods_find_services_and_a_claim_follows_its_pod(
    cluster: LocalCluster, node_kube: Kube, node_namespace: str
) -> None:
    claim = {
        "metadata": {"name": "runs"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    await node_kube.create(f"/api/v1/namespaces/{node_namespace}/persistentvolumeclaims", claim)
    storage = {
        "mounts": [{"name": "runs", "mountPath": "/runs"}],
        "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}],
    }
    find = "import socket; print(socket.getaddrinfo('kubernetes.default.svc', 443)[0][4][0])"
    await run_pod(
        node_kube,
        node_namespace,
        "first",
        "spot-1",
        f"{find}; open('/runs/x', 'w').write('from spot-1')",
        **storage,
    )
    await phase(node_kube, node_namespace, "first", "Succeeded")
    assert cluster.plane.kubectl("-n", node_namespace, "logs", "first").strip() == "10.96.0.1"
    end = "open('/dev/termination-log', 'w').write(open('/runs/x').read())"
    await run_pod(node_kube, node_namespace, "second", "ondemand-1", end, **storage)
    status = (await phase(node_kube, node_namespace, "second", "Succeeded"))["status"]
    assert status["containerStatuses"][0]["state"]["terminated"]["message"] == "from spot-1"


DRAINING = """
import signal, sys, time
def stop(number, frame):
    open('/dev/termination-log', 'w').write('drained')
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
while True: signal.pause()
"""


async def test_a_notice_is_the_real_kubelets_graceful_shutdown(
    cluster: LocalCluster, node_kube: Kube, node_namespace: str
) -> None:
    cluster.add_nodes([("doomed", True)])
    await run_pod(node_kube, node_namespace, "worker", "doomed", DRAINING)
    await phase(node_kube, node_namespace, "worker", "Running")
    pressed = time.time()
    cluster.node("doomed").power_button()

    async def says_so() -> bool:
        word = ready(await node_kube.get("/api/v1/nodes/doomed"))
        return (word["status"], word["reason"], word["message"]) == (
            "False",
            "KubeletNotReady",
            "node is shutting down",
        )

    await eventually(says_so)
    said = [
        w.received.timestamp()
        for w in writes(cluster.plane.audit_log)
        if w.name == "doomed" and w.subresource == "status" and w.received.timestamp() >= pressed
    ]
    assert said[0] - pressed < 10  # of the 30 s that a cloud gives
    ended = (await phase(node_kube, node_namespace, "worker", "Failed"))["status"]
    assert ended["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 143
    assert ended["containerStatuses"][0]["state"]["terminated"]["message"] == "drained"
    disruption = next(c for c in ended["conditions"] if c["type"] == "DisruptionTarget")
    assert disruption["reason"] == "TerminationByKubelet"
    first = (await node_kube.get("/api/v1/nodes/doomed"))["metadata"]["uid"]
    cluster.kill("doomed")
    cluster.add_nodes([("doomed", True)])  # the cloud makes a new machine under the old name
    assert (await node_kube.get("/api/v1/nodes/doomed"))["metadata"]["uid"] != first


async def test_a_killed_node_tells_nobody(
    cluster: LocalCluster, node_kube: Kube, node_namespace: str
) -> None:
    cluster.add_nodes([("victim", True)])
    await run_pod(node_kube, node_namespace, "worker", "victim", DRAINING)
    address = (await phase(node_kube, node_namespace, "worker", "Running"))["status"]["podIP"]
    assert address.startswith("10.201.")
    node = cluster.node("victim")
    cluster.kill("victim")
    assert not node.folder.exists()
    assert ready(await node_kube.get("/api/v1/nodes/victim"))["status"] == "True"
    assert (await pod(node_kube, node_namespace, "worker"))["status"]["phase"] == "Running"


async def test_an_image_is_given_to_running_nodes(cluster: LocalCluster) -> None:
    cluster.load_image(IMAGES["operator"].reference)
    listed = cluster.plane.kubectl("get", "node", "ondemand-1", "-o", "json")
    names = [name for image in json.loads(listed)["status"]["images"] for name in image["names"]]
    assert IMAGES["operator"].reference in names


def test_nobody_but_root_can_read_the_clusters_keys(cluster: LocalCluster) -> None:
    for path in (cluster.plane.kubeconfig, *cluster.plane.pki.folder.glob("*.key")):
        assert path.stat().st_mode & 0o077 == 0, path
