"""Sysctls, cgroups and requirements of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from dev.cluster import cgroups, host
from dev.errors import DevError


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in host.SYSCTLS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("0\n")
    return tmp_path


def test_sysctls_are_restored_to_first_saved_values(proc: Path) -> None:
    (proc / "kernel/panic").write_text("7\n")
    host.save_sysctls(proc)
    (proc / "kernel/panic").write_text("10\n")
    host.save_sysctls(proc)  # a second cluster reads what the first one's kubelets set
    host.restore_sysctls(proc)
    assert (proc / "kernel/panic").read_text() == "7"
    (proc / "kernel/panic").write_text("3\n")
    host.restore_sysctls(proc)  # nothing is saved: nothing is changed
    assert (proc / "kernel/panic").read_text() == "3\n"


def test_prepare_without_root_raises_error_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(DevError, match=r"sudo make demo.*kind"):
        host.prepare()


def test_cgroups_are_created_in_every_hierarchy_and_removed_by_name(tmp_path: Path) -> None:
    for hierarchy in ("memory", "cpuset", "systemd", "unified"):
        (tmp_path / hierarchy).mkdir()
    for file in ("cpuset.cpus", "cpuset.mems"):
        (tmp_path / "cpuset" / file).write_text("0-1\n")
    cgroups.create("shoal-x-node-a", tmp_path)
    assert (tmp_path / "memory/shoal-x-node-a").is_dir()
    assert (tmp_path / "cpuset/shoal-x-node-a/cpuset.cpus").read_text() == "0-1\n"
    assert not (tmp_path / "unified/shoal-x-node-a").exists()
    (tmp_path / "memory/shoal-x-node-a/kubepods/pod1").mkdir(parents=True)
    (tmp_path / "memory/shoal-y-node-a").mkdir()
    for file in ("cpuset.cpus", "cpuset.mems"):  # in a real hierarchy these are not regular files
        (tmp_path / "cpuset/shoal-x-node-a" / file).unlink()
    assert cgroups.remove("shoal-x-", tmp_path, seconds=0) == []
    assert (tmp_path / "memory/shoal-y-node-a").is_dir()
