"""`up` is killed in its middle; `down` finds everything, ends it, and ends nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dev.cluster import cgroups, network
from dev.cluster.local import LocalCluster
from dev.cluster.processes import Identity
from dev.errors import DevError
from dev.images import build
from dev.paths import ROOT, clusters
from dev.tools import ensure


def left_behind(local: LocalCluster) -> list[str]:
    """What of a cluster can be seen in the kernel."""
    mounts = [
        line for line in Path("/proc/self/mounts").read_text().splitlines() if str(local.folder) in line
    ]
    groups = [str(path) for root in cgroups.hierarchies() for path in root.glob(f"{local.addresses.prefix}*")]
    links = [local.addresses.link] if Path("/sys/class/net", local.addresses.link).exists() else []
    folder = [str(local.folder)] if local.folder.exists() else []
    return [*network.namespaces(local.addresses), *mounts, *groups, *links, *folder, *processes(local)]


def processes(local: LocalCluster) -> list[str]:
    """Processes whose command names the cluster's folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if f"{local.folder}/" in words and int(entry.parent.name) != os.getpid():
            found.append(words)
    return found


@contextlib.contextmanager
def sleeper(*before: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that nobody of the cluster started; ended also where the test fails, which would wait for it."""
    with subprocess.Popen([*before, "sleep", "1000"]) as process:
        try:
            yield process
        finally:
            process.kill()


def interrupted_up(number: int) -> tuple[LocalCluster, list[Identity]]:
    """`python -m dev up`, ended by a signal when its first node has started; what was running then."""
    build((), ensure())
    local = LocalCluster("spare")
    local.down()
    command = [sys.executable, "-m", "dev", "up", "--cluster", "spare"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 300
        first = local.folder / "nodes" / "ondemand-1" / "processes" / "init"
        while not first.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        process.wait(300)
    tables = [local.plane.processes, *(node.processes for node in local.nodes())]
    return local, [found for table in tables for name in table.names() if (found := table.find(name))]


@pytest.mark.nightly
def test_down_after_a_crash_of_up_leaves_nothing() -> None:
    with sleeper() as bystander:
        local, running = interrupted_up(signal.SIGKILL)
        assert sum(each.running for each in running) >= 5
        assert left_behind(local)
        done = subprocess.run(
            [sys.executable, "-m", "dev", "down", "--cluster", "spare"],
            cwd=ROOT,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert not any(each.running for each in running)
        assert left_behind(local) == []
        assert bystander.poll() is None


def test_down_twice_and_without_a_cluster_is_no_error() -> None:
    local = LocalCluster("spare")
    local.down()
    local.down()
    assert left_behind(local) == []
    assert (clusters() / ".spare.lock").exists()


def test_a_cluster_of_another_cache_is_left_alone() -> None:
    local = LocalCluster("spare")
    local.down()
    netns = local.addresses.netns
    subprocess.run(["ip", "netns", "add", netns], check=True)
    try:
        with sleeper("ip", "netns", "exec", netns) as other:
            deadline = time.monotonic() + 60
            while network.processes(local.addresses) != [other.pid]:
                assert time.monotonic() < deadline
            for act in (local.up, local.down):
                with pytest.raises(DevError, match=f"another cache folder.*{other.pid}"):
                    act()
            assert other.poll() is None
            assert network.namespaces(local.addresses) == [netns]
    finally:
        local.down()
    assert network.namespaces(local.addresses) == []
