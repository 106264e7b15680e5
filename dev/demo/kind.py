"""The demo on kind, with a Docker engine. Not run yet: see dev/README.md. Chosen only by CLUSTER=kind.

The cluster is that of kind-config.yaml, to which an audit log of the API server is added for the demo's figures.
The kubelets of kind do not use logind, so the notice is simulated: the kubelet is stopped, the node's status is that
of a shutdown, and the containers get SIGTERM.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from dev.cluster.control_plane import AUDIT_POLICY
from dev.commands import command
from dev.console import step
from dev.demo.backend import docker_answers
from dev.errors import DevError
from dev.images import DEMO, IMAGES
from dev.paths import ROOT
from shoal_trainer.contract import CONTROL_PORT, STATUS_PATH

CLUSTER = "shoal-demo"
CONFIG = ROOT / "kind-config.yaml"
_AUDIT_PATCH = """\
kind: ClusterConfiguration
apiServer:
  extraArgs:
    - {name: audit-policy-file, value: /etc/kubernetes/audit/policy.yaml}
    - {name: audit-log-path, value: /var/log/kubernetes/audit.log}
  extraVolumes:
    - {name: policy, hostPath: /etc/kubernetes/audit, mountPath: /etc/kubernetes/audit, readOnly: true}
    - {name: log, hostPath: /var/log/kubernetes, mountPath: /var/log/kubernetes, pathType: DirectoryOrCreate}
"""


def audited(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The configuration of a kind cluster whose API server writes its audit log into `folder`/logs.

    `folder`/audit-policy.yaml must exist when the cluster is made.
    """
    mounts = [
        {
            "hostPath": str(folder / "audit-policy.yaml"),
            "containerPath": "/etc/kubernetes/audit/policy.yaml",
            "readOnly": True,
        },
        {"hostPath": str(folder / "logs"), "containerPath": "/var/log/kubernetes"},
    ]
    extra = {"extraMounts": mounts, "kubeadmConfigPatches": [_AUDIT_PATCH]}
    nodes = [{**node, **(extra if node["role"] == "control-plane" else {})} for node in config["nodes"]]
    return {**config, "nodes": nodes}


class Kind:
    """A Docker engine, `kind`, `kubectl` and `helm`."""

    name = "kind"

    def __init__(self) -> None:
        self.folder = ROOT / "build" / "kind"
        self._nodes: dict[str, str] = {}

    @property
    def kubeconfig(self) -> Path:
        """A separate file: the user's kubeconfig is not changed."""
        return self.folder / "kubeconfig"

    @property
    def audit_log(self) -> Path:
        """Mounted from the control plane's container."""
        return self.folder / "logs" / "audit.log"

    @property
    def env(self) -> dict[str, str]:
        """Sets only KUBECONFIG."""
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig)}

    def check(self) -> None:
        """Check the commands and the Docker engine."""
        missing = [name for name in ("docker", "kind", "kubectl", "helm") if shutil.which(name) is None]
        if missing:
            raise DevError(f"For CLUSTER=kind install: {', '.join(missing)}.")
        if not docker_answers():
            raise DevError("No Docker engine answers this user: start it, or make `docker info` work.")

    def up(self) -> None:
        """Build the images with Docker, create the cluster of kind-config.yaml, load the images."""
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        (self.folder / "audit-policy.yaml").write_text(json.dumps(AUDIT_POLICY))
        bases = (IMAGES[name].after for name in DEMO)
        for name in dict.fromkeys((*filter(None, bases), *DEMO)):
            image = IMAGES[name]
            with step(f"building {image.reference} with Docker", every=30):
                target = ["--target", image.target] if image.target else []
                context = ROOT / image.context
                dockerfile = str(context / image.dockerfile)
                command("docker", "build", *target, "-f", dockerfile, "-t", image.reference, str(context))
        with step("kind cluster", every=30):
            config = self.folder / "kind-config.yaml"
            config.write_text(yaml.safe_dump(audited(yaml.safe_load(CONFIG.read_text()), self.folder)))
            kubeconfig = str(self.kubeconfig)
            self.down()
            options = ["--name", CLUSTER, "--config", str(config), "--kubeconfig", kubeconfig]
            command("kind", "create", "cluster", *options, cwd=ROOT)
        for name in DEMO:
            with step(f"loading {IMAGES[name].reference}", every=30):
                command("kind", "load", "docker-image", "--name", CLUSTER, IMAGES[name].reference)

    def notice(self, node: str) -> None:
        """Set the node's status, then send SIGTERM to its containers."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {
            "type": "Ready",
            "status": "False",
            "reason": "KubeletNotReady",
            "message": "node is shutting down",
        }
        status = {"status": {"conditions": [{**ready, "lastTransitionTime": now, "lastHeartbeatTime": now}]}}
        command("docker", "exec", node, "systemctl", "stop", "kubelet")
        patch = ["patch", "node", node, "--subresource=status", "--type=strategic", "-p", json.dumps(status)]
        command("kubectl", *patch, env=self.env)
        stop = "crictl ps -q | xargs -r -n1 -P16 crictl stop --timeout 15"
        subprocess.Popen(["docker", "exec", "-d", node, "sh", "-c", stop])

    def kill(self, node: str) -> None:
        """SIGKILL to the node's container."""
        command("docker", "kill", node)

    def ask(self, pod: dict[str, Any], token: str, certificate: str) -> bytes:
        """Ask from within the pod, since there is no route to it from here."""
        del certificate  # the request stays inside the pod
        url = f"https://{pod['status']['podIP']}:{CONTROL_PORT}{STATUS_PATH}"
        script = (
            "import ssl, sys, urllib.request as u;"
            f"r = u.Request({url!r}, headers={{'Authorization': 'Bearer ' + sys.stdin.read()}});"
            "print(u.urlopen(r, timeout=2, context=ssl._create_unverified_context()).read().decode())"
        )
        words = ["kubectl", "exec", "-i", pod["metadata"]["name"], "--", "python", "-c", script]
        return command(*words, stdin=token, env=self.env, timeout=10).encode()

    def folder_of_volume(self, path: str) -> Path | None:
        """The volumes are inside the nodes' containers."""
        del path
        return None

    def left(self) -> str:
        """Nobody has tried it."""
        return ""

    def down(self) -> None:
        """Delete the cluster, if it exists."""
        command("kind", "delete", "cluster", "--name", CLUSTER, check=False)
        self.kubeconfig.unlink(missing_ok=True)
