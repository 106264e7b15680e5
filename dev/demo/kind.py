"""The demo on kind, where a Docker engine answers. Not yet run: see dev/README.md.

kind's nodes run systemd but no logind that the kubelet listens to, so the notice is played: the kubelet is stopped,
the node's status says what a kubelet says at a shutdown, and the containers get their SIGTERM.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dev.cluster.control_plane import AUDIT_POLICY
from dev.commands import command
from dev.console import step
from dev.demo.backend import docker_answers
from dev.errors import DevError
from dev.images import DEMO, IMAGES
from dev.paths import ROOT
from shoal_trainer.contract import CONTROL_PORT, STATUS_PATH

CLUSTER = "shoal-demo"


class Kind:
    """A Docker engine, `kind`, `kubectl` and `helm`."""

    name = "kind"

    def __init__(self) -> None:
        self.folder = ROOT / "build" / "kind"
        self._nodes: dict[str, str] = {}

    @property
    def kubeconfig(self) -> Path:
        """Its own file: the user's is left alone."""
        return self.folder / "kubeconfig"

    @property
    def audit_log(self) -> Path:
        """Mounted from the control plane's container."""
        return self.folder / "logs" / "audit.log"

    @property
    def env(self) -> dict[str, str]:
        """KUBECONFIG only."""
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig)}

    def check(self) -> None:
        """The commands that must be there."""
        lacking = [name for name in ("docker", "kind", "kubectl", "helm") if shutil.which(name) is None]
        if lacking:
            raise DevError(f"For CLUSTER=kind install: {', '.join(lacking)}.")
        if not docker_answers():
            raise DevError("No Docker engine answers this user: start it, or see that `docker info` works.")

    def up(self) -> None:
        """Images by Docker, then the cluster of kind.yaml, then the images into it."""
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        (self.folder / "audit-policy.yaml").write_text(json.dumps(AUDIT_POLICY))
        for name in DEMO:
            image = IMAGES[name]
            with step(f"building {image.reference} with Docker", every=30):
                target = ["--target", image.target] if image.target else []
                context = ROOT / image.context
                dockerfile = str(context / image.dockerfile)
                command("docker", "build", *target, "-f", dockerfile, "-t", image.reference, str(context))
        with step("kind cluster", every=30):
            config = str(Path(__file__).with_name("kind.yaml"))
            kubeconfig = str(self.kubeconfig)
            self.down()
            options = ["--name", CLUSTER, "--config", config, "--kubeconfig", kubeconfig]
            command("kind", "create", "cluster", *options, cwd=ROOT)
        for name in DEMO:
            with step(f"loading {IMAGES[name].reference}", every=30):
                command("kind", "load", "docker-image", "--name", CLUSTER, IMAGES[name].reference)

    def notice(self, node: str) -> None:
        """The node's own words, then SIGTERM to what runs on it."""
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
        """From within the pod: there is no route to it from here, and it listens on its own address only."""
        del certificate  # asked inside the pod itself, so there is nobody else to be mistaken for it
        url = f"https://{pod['status']['podIP']}:{CONTROL_PORT}{STATUS_PATH}"
        script = (
            "import ssl, sys, urllib.request as u;"
            f"r = u.Request({url!r}, headers={{'Authorization': 'Bearer ' + sys.stdin.read()}});"
            "print(u.urlopen(r, timeout=2, context=ssl._create_unverified_context()).read().decode())"
        )
        words = ["kubectl", "exec", "-i", pod["metadata"]["name"], "--", "python", "-c", script]
        return command(*words, stdin=token, env=self.env, timeout=10).encode()

    def folder_of_volume(self, path: str) -> Path | None:
        """Inside the nodes' containers: not readable here."""
        del path
        return None

    def down(self) -> None:
        """The cluster of this name, if there is one."""
        command("kind", "delete", "cluster", "--name", CLUSTER, check=False)
