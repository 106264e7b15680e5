"""Pid 1 of one node: starts containerd, kubelet and kube-proxy, and reaps orphans. The node ends with it.

The system's Python runs it as a script inside the node's namespaces, with a JSON file of (hostname, commands) as its
argument, so it only uses the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESTART_SECONDS = 0.3


def main(path: Path) -> None:
    """Start the node and run until it ends."""
    config = json.loads(path.read_text())
    socket.sethostname(config["name"])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run"], check=True)
    Path("/run/lock").mkdir()
    for name, value in config["sysctls"].items():
        with contextlib.suppress(OSError):
            Path("/proc/sys", name).write_text(value)
    running: dict[int, dict[str, Any]] = {}
    for process in config["processes"]:
        running[_start(process)] = process
        if socket_path := process.get("socket"):
            _await_socket(Path(socket_path))
    while True:
        ended, _ = os.wait()
        if process := running.pop(ended, None):
            # Restart processes as systemd does: the kubelet exits if containerd is not ready.
            time.sleep(RESTART_SECONDS)
            running[_start(process)] = process


def _start(process: dict[str, Any]) -> int:
    descriptor = os.open(process["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    command, env = process["command"], {**os.environ, **process.get("env", {})}
    null = os.open(os.devnull, os.O_RDONLY)
    streams = [(os.POSIX_SPAWN_DUP2, null, 0), *((os.POSIX_SPAWN_DUP2, descriptor, n) for n in (1, 2))]
    try:
        return os.posix_spawnp(command[0], command, env, file_actions=streams)
    finally:
        os.close(descriptor)
        os.close(null)


def _await_socket(path: Path, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(path))
            return
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
