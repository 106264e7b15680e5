"""The demo on the local cluster: real kubelets in network namespaces."""

from __future__ import annotations

import ssl
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dev.cluster import host
from dev.cluster.local import DEFAULT_NODES, LocalCluster
from dev.commands import side_by_side
from dev.console import say
from dev.images import DEMO, IMAGES, build
from dev.tools import ensure
from shoal_trainer.contract import CONTROL_PORT, STATUS_PATH


class Local:
    """A local cluster, as root on Linux."""

    name = "local"

    def __init__(self, cluster: str = "local") -> None:
        self.cluster = LocalCluster(cluster)

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.cluster.plane.kubeconfig

    @property
    def audit_log(self) -> Path:
        """The audit log of the API server."""
        return self.cluster.plane.audit_log

    @property
    def env(self) -> dict[str, str]:
        """With the built kubectl and helm first on PATH."""
        return self.cluster.plane.env

    def check(self) -> None:
        """Check for root, install missing packages; refuse to begin while another process uses the cluster."""
        host.prepare()
        self.cluster.refuse_another()

    def up(self, nodes: Sequence[tuple[str, bool]] = DEFAULT_NODES) -> None:
        """Build tools and images concurrently: one compiles while the other downloads."""
        pause = ensure(("pause",))
        side_by_side(lambda: build(DEMO, pause), ensure)
        if self.cluster.plane.processes.running("kube-apiserver"):
            say("a cluster of an earlier demo is still running: removing it first")
            self.cluster.down()
        self.cluster.up(nodes, [IMAGES[name].reference for name in DEMO])

    def notice(self, node: str) -> None:
        """Trigger the kubelet's graceful shutdown."""
        self.cluster.node(node).power_button()

    def kill(self, node: str) -> None:
        """SIGKILL to the node's pid 1."""
        self.cluster.kill(node)

    def ask(self, pod: dict[str, Any], token: str, certificate: str) -> bytes:
        """Ask the pod directly: this machine has a route to it."""
        context = ssl.create_default_context(cadata=certificate)
        context.check_hostname = False  # the certificate is pinned; it names no address
        url = f"https://{pod['status']['podIP']}:{CONTROL_PORT}{STATUS_PATH}"
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=2, context=context) as answer:
            return bytes(answer.read())

    def folder_of_volume(self, path: str) -> Path | None:
        """All nodes share this machine's file system."""
        return Path(path)

    def left(self) -> str:
        """The dead nodes: no cloud takes them off the list, nor makes others."""
        dead = [node.spec.name for node in self.cluster.nodes() if not node.alive]
        if not dead:
            return ""
        return (
            f"{', '.join(dead)} {'is' if len(dead) == 1 else 'are'} dead, and counted until `kubectl delete node "
            f"{' '.join(dead)}`; `python -m dev node add NAME --spot` makes another one"
        )

    def down(self) -> None:
        """Remove the cluster."""
        self.cluster.down()
