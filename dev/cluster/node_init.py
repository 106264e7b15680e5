"""Pid 1 of one node: starts containerd, kubelet and kube-proxy, and takes in orphans. When it ends, so does the node.

Run as a script by the system's Python inside the node's namespaces, with a JSON file of (hostname, commands) as its
argument; the standard library is all it has.
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


def main(path: Path) -> None:
    """Start the node and stay."""
    config = json.loads(path.read_text())
    socket.sethostname(config["name"])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run"], check=True)
    Path("/run/lock").mkdir()
    for name, value in config["sysctls"].items():
        with contextlib.suppress(OSError):
            Path("/proc/sys", name).write_text(value)
    for process in config["processes"]:
        with Path(process["log"]).open("ab") as log:
            env = {**os.environ, **process.get("env", {})}
            subprocess.Popen(process["command"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)
        if socket_path := process.get("socket"):
            _await_socket(Path(socket_path))
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


def _await_socket(path: Path, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(path))
            return
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
