"""The requirements of real nodes: root, a few packages, and three sysctls that are restored."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from dev.commands import command
from dev.console import say, step
from dev.errors import DevError
from dev.paths import clusters

COMMANDS = {
    "containerd": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "ip": "iproute2",
    "nsenter": "util-linux",
}
BROWSER_COMMANDS = {"chromium": "chromium", "npm": "npm"}
"""A browser for the tests of the operator's page, and what fetches axe-core for it."""
IMAGE_COMMANDS = {"buildah": "buildah", "mmdebstrap": "mmdebstrap"}
CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
CNI_PACKAGE = "containernetworking-plugins"

# The kubelet sets these for the whole machine, from any namespace.
SYSCTLS = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops")
NOT_ROOT = (
    "Real nodes need root on Linux: they are made of namespaces and containers. "
    "Use `sudo make demo`, or a Docker engine with kind (CLUSTER=kind). "
    "`python -m dev up --control-plane` needs neither."
)


def cni_folder() -> Path:
    """The folder of the CNI plugins."""
    for folder in CNI_FOLDERS:
        if (folder / "bridge").exists():
            return folder
    return CNI_FOLDERS[0]


def missing(commands: dict[str, str]) -> list[str]:
    """The Debian packages of the missing commands."""
    packages = [package for name, package in commands.items() if shutil.which(name, path=_PATH) is None]
    if commands is COMMANDS and not (cni_folder() / "bridge").exists():
        packages.append(CNI_PACKAGE)
    return packages


_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def is_root() -> bool:
    """Whether this is Linux, and root."""
    return sys.platform.startswith("linux") and os.geteuid() == 0


def prepare() -> None:
    """Check for root on Linux, and install missing packages.

    Raises:
        DevError: not Linux, not root, or a package that cannot be installed here.
    """
    if not is_root():
        raise DevError(NOT_ROOT)
    install(missing(COMMANDS) + missing(IMAGE_COMMANDS))


def prepare_browser() -> None:
    """Install what the tests of the page need. Not every distribution has it: they fail without."""
    try:
        install(missing(BROWSER_COMMANDS))
    except DevError as error:
        say(f"the tests of the operator's page will fail: {error}")


def install(packages: Sequence[str]) -> None:
    """Install Debian packages.

    Raises:
        DevError: they cannot be installed here.
    """
    if not packages:
        return
    if shutil.which("apt-get") is None:
        raise DevError(
            f"Install these first (names of the Debian packages): {' '.join(packages)}. "
            "Only apt-get is supported."
        )
    with step(f"installing {' '.join(packages)} with apt-get"):
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        command("apt-get", "update", "-q", env=env)
        command("apt-get", "install", "-q", "-y", "--no-install-recommends", *packages, env=env)


def save_sysctls(proc: Path = Path("/proc/sys")) -> None:
    """Save the sysctls, unless another cluster of this user has done so."""
    with _sysctl_record() as record:
        if not record.exists():
            values = {name: (proc / name).read_text().strip() for name in SYSCTLS if (proc / name).exists()}
            record.write_text(json.dumps(values))


def restore_sysctls(proc: Path = Path("/proc/sys")) -> None:
    """Restore the saved sysctls. Call it when no cluster with nodes is left."""
    with _sysctl_record() as record:
        try:
            values = json.loads(record.read_text())
        except (FileNotFoundError, ValueError):
            return
        for name, value in values.items():
            (proc / name).write_text(value)
        record.unlink()


@contextlib.contextmanager
def _sysctl_record() -> Iterator[Path]:
    clusters().mkdir(parents=True, exist_ok=True)
    with (clusters() / ".sysctl.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield clusters() / ".sysctl.before"
