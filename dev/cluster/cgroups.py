"""A cgroup for each node, in every hierarchy of the machine (v1, v2, or both).

With a shared root, kubelets delete each other's pods. The folders remain when a node is killed, so they are removed
by name.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PERIOD_MICROSECONDS = 10_000
V2_CONTROLLERS = "+cpu +cpuset +memory +pids +io"


def unified(root: Path = ROOT) -> bool:
    """Whether the machine has cgroup v2 only."""
    return (root / "cgroup.controllers").exists()


def hierarchies(root: Path = ROOT) -> list[Path]:
    """The folders in which a node's cgroup is created."""
    if unified(root):
        return [root]
    return sorted(p for p in root.iterdir() if p.is_dir() and not p.is_symlink()) if root.is_dir() else []


def create(name: str, root: Path = ROOT) -> None:
    """Create the node's cgroup in every hierarchy.

    On v2 the controllers are enabled for children first (systemd does this; not tested without systemd).
    """
    if unified(root):
        with contextlib.suppress(OSError):
            (root / "cgroup.subtree_control").write_text(V2_CONTROLLERS)
    for hierarchy in hierarchies(root):
        if hierarchy.name == "unified":
            continue  # with both versions, containerd and kubelet use v1
        (hierarchy / name).mkdir(exist_ok=True)
        if hierarchy.name == "cpuset":  # on v1 an empty cpuset accepts no process
            for file in ("cpuset.cpus", "cpuset.mems"):
                (hierarchy / name / file).write_text((hierarchy / file).read_text())


def limit(name: str, cores: float, root: Path = ROOT) -> None:
    """Limit the CPU time of all processes of the node's pods, in cores; 0: no limit.

    The period is a tenth of the usual one, so that also short pieces of work take their share of time each. They come
    before other work of the machine, so that the limit, and not the machine, sets their speed.
    """
    quota = round(cores * PERIOD_MICROSECONDS)
    if unified(root):
        (root / name / "cpu.max").write_text(f"{quota or 'max'} {PERIOD_MICROSECONDS}")
        (root / name / "cpu.weight").write_text(str(10 * 100))
        return
    for hierarchy in hierarchies(root):
        folder = hierarchy / name
        if (folder / "cpu.cfs_quota_us").exists():
            (folder / "cpu.cfs_quota_us").write_text("-1")  # the kernel checks each of the two with the other
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
            (folder / "cpu.cfs_quota_us").write_text(str(quota or -1))
            (folder / "cpu.shares").write_text(str(10 * 1024))


@dataclass(frozen=True)
class Used:
    """What the processes of a node's pods had of the CPUs so far, in seconds, and how their limit held them back."""

    cpu: float = 0.0
    periods: int = 0
    throttled: int = 0
    """Periods in which they had used up their share."""
    throttled_seconds: float = 0.0


def used(name: str, root: Path = ROOT) -> Used:
    """What the node's pods had of the CPUs so far.

    Raises:
        OSError: there is no such node.
    """
    if unified(root):
        found = _numbers(root / name / "cpu.stat")
        cpu, waited = found["usage_usec"] / 1e6, found.get("throttled_usec", 0) / 1e6
    else:
        found = _numbers(root / "cpu" / name / "cpu.stat")
        cpu = int((root / "cpuacct" / name / "cpuacct.usage").read_text()) / 1e9
        waited = found["throttled_time"] / 1e9
    return Used(cpu, found.get("nr_periods", 0), found.get("nr_throttled", 0), waited)


def _numbers(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value in map(str.split, path.read_text().splitlines())}


def remove(prefix: str, root: Path = ROOT, seconds: float = 5.0) -> list[Path]:
    """Remove the cgroups whose name begins with `prefix`, children first. Returns those that are busy."""
    deadline = time.monotonic() + seconds
    while True:
        left = [
            top for hierarchy in hierarchies(root) for top in hierarchy.glob(f"{prefix}*") if top.is_dir()
        ]
        for top in left:
            for folder in sorted((p for p in top.rglob("*") if p.is_dir()), reverse=True):
                with contextlib.suppress(OSError):
                    folder.rmdir()
            with contextlib.suppress(OSError):
                top.rmdir()
        left = [top for top in left if top.exists()]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)
