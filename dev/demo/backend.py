"""The interface of the demo to a cluster: local, or kind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

from dev.errors import DevError

NEITHER = (
    "The demo needs a Kubernetes cluster that it may break. It makes one as root on Linux (Debian's packages are "
    "installed as needed): `sudo make demo`. `CLUSTER=kind make demo` uses a Docker engine and `kind` instead; nobody "
    "has run that yet, so it is never chosen by itself."
)


class Backend(Protocol):
    """A cluster of one on-demand and three spot nodes."""

    name: str

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""

    @property
    def audit_log(self) -> Path:
        """The audit log of the API server, with writes at stage ResponseComplete."""

    @property
    def env(self) -> dict[str, str]:
        """The environment for kubectl and helm."""

    def check(self) -> None:
        """Raise DevError with what is missing on this machine."""

    def up(self) -> None:
        """Start the cluster with the images."""

    def notice(self, node: str) -> None:
        """Begin the shutdown of a node's machine."""

    def kill(self, node: str) -> None:
        """Kill the machine of a node."""

    def ask(self, pod: dict[str, Any], token: str, certificate: str) -> bytes:
        """The coordinator's status report, from the pod of PS 0. Raises OSError or DevError if it does not answer."""

    def folder_of_volume(self, path: str) -> Path | None:
        """The path of a hostPath volume on this machine, if it can be read."""

    def left(self) -> str:
        """What a cluster that is kept lacks, and how it is to be had; empty if nothing, or if that is not known."""

    def down(self) -> None:
        """Remove the cluster in any state."""


def choose() -> Backend:
    """The cluster of the variable CLUSTER; by default the local one, which every release is tried on.

    Raises:
        DevError: it is not possible here; the message says what is missing.
    """
    from dev.demo.kind import Kind
    from dev.demo.local import Local

    wanted = os.environ.get("CLUSTER", "")
    if wanted not in {"", "kind", "local"}:
        raise DevError(f"CLUSTER is {wanted!r}; it may be kind or local.")
    if wanted == "kind":
        return Kind()
    if sys.platform.startswith("linux") and os.geteuid() == 0:
        return Local()
    raise DevError(NEITHER)


def docker_answers() -> bool:
    """Whether this user can use a Docker engine."""
    if shutil.which("docker") is None:
        return False
    try:
        return (
            subprocess.run(["docker", "info"], capture_output=True, timeout=20, check=False).returncode == 0
        )
    except subprocess.TimeoutExpired:
        return False
