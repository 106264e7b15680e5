"""Runs the operator as its pod does: with the token of a service account, and without a kubeconfig.

What differs from a pod is the folder of the token, since the usual one belongs to the machine.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from urllib.parse import urlsplit

from dev.cluster import ControlPlane
from dev.cluster.control_plane import OPERATOR_NAMESPACE
from dev.kube import Kube, tolerant

TOKEN_SECONDS = 6 * 3600

_RUN = """
import pathlib, sys
import shoal.cluster.server
shoal.cluster.server.SERVICE_ACCOUNT = pathlib.Path(sys.argv.pop(1))
from shoal.process.main import main
main()
"""


async def mount(plane: ControlPlane, kube: Kube, name: str, folder: Path) -> None:
    """Make the service account where it is missing, and its files as the kubelet mounts them."""
    accounts = f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/serviceaccounts"
    with tolerant(409):
        await kube.create("/api/v1/namespaces", {"metadata": {"name": OPERATOR_NAMESPACE}})
    with tolerant(409):
        await kube.create(accounts, {"metadata": {"name": name}})
    request = {"spec": {"expirationSeconds": TOKEN_SECONDS}}
    token = await kube.create(f"{accounts}/{name}/token", request)
    _write(folder, token["status"]["token"], plane.pki.path("ca.crt"))


def _write(folder: Path, token: str, ca: Path | str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "token").write_text(token)
    shutil.copy(ca, folder / "ca.crt")


def command(folder: Path) -> list[str]:
    """The operator's command with this service account."""
    return [sys.executable, "-c", _RUN, str(folder)]


def environment(plane: ControlPlane, **more: str) -> dict[str, str]:
    """The environment of a pod in the operator's namespace."""
    server = urlsplit(plane.server)
    kept = {name: value for name, value in os.environ.items() if name != "KUBECONFIG"}
    return {
        **kept,
        "KUBERNETES_SERVICE_HOST": str(server.hostname),
        "KUBERNETES_SERVICE_PORT": str(server.port),
        "POD_NAMESPACE": OPERATOR_NAMESPACE,
        **more,
    }
