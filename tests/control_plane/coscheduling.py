"""The scheduler of scheduler-plugins with its plugin Coscheduling, beside the cluster's own; for tests.

It is built from the Go module in `dev/tools/coscheduling` when it is first needed (3 minutes of CPU). Pods choose it by
`schedulerName`. The controller of PodGroups, which fills in their status, is not needed for placement.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import yaml

from dev.cluster import ControlPlane
from dev.cluster.control_plane import free_ports
from dev.tools.build import ensure_apart, source_of

NAME = "coscheduling"
"""Of the scheduler, and of the module."""
PACKAGE = "sigs.k8s.io/scheduler-plugins"
PLUGIN = "Coscheduling"
WAIT_SECONDS = 10
"""How long pods keep the places that they were promised while others of their group have none; the plugin's default."""


@contextlib.contextmanager
def running(plane: ControlPlane) -> Iterator[None]:
    """PodGroups and their scheduler, until the end of the block."""
    program = ensure_apart(NAME)
    crd = str(source_of(NAME, PACKAGE) / "manifests/coscheduling/crd.yaml")
    plane.kubectl("apply", "--server-side", "-f", crd)
    plane.kubectl("wait", "--for=condition=Established", "-f", crd)
    config = plane.folder / "coscheduling.yaml"
    config.write_text(yaml.safe_dump(_configuration(str(plane.kubeconfig))))
    (port,) = free_ports(1)
    words = [str(program), f"--config={config}", f"--secure-port={port}", "--bind-address=127.0.0.1"]
    plane.processes.start(NAME, words)
    try:
        yield
    finally:
        plane.processes.stop(NAME)


def _configuration(kubeconfig: str) -> dict[str, object]:
    plugin = [{"name": PLUGIN}]
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": kubeconfig},
        "profiles": [
            {
                "schedulerName": NAME,
                "plugins": {
                    "multiPoint": {"enabled": plugin},
                    "queueSort": {"enabled": plugin, "disabled": [{"name": "*"}]},
                },
                "pluginConfig": [{"name": PLUGIN, "args": {"permitWaitingTimeSeconds": WAIT_SECONDS}}],
            }
        ],
    }
