"""Sysctls, cgroups and requirements of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from dev.cli import main as dev
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


def ask(monkeypatch: pytest.MonkeyPatch, *, root: bool, refused: str = "") -> tuple[str, list[str]]:
    """What `dev setup` says, and which packages it installs, where apt-get has no package of a name."""
    installed: list[str] = []

    def apt(*words: str, env: object) -> None:
        if refused in words:
            raise DevError(f"E: Unable to locate package {refused}")
        installed.extend(words[5:])

    monkeypatch.setattr(host, "is_root", lambda: root)
    monkeypatch.setattr(host, "missing", lambda commands: list(commands.values()))
    monkeypatch.setattr(host, "command", apt)
    monkeypatch.setattr("shutil.which", lambda *_, **__: "apt-get")
    monkeypatch.setattr("dev.tools.ensure", lambda *_: None)
    monkeypatch.setattr("dev.images.build", lambda *_: {})
    monkeypatch.setattr("dev.cli.ensure_template", lambda _: None)
    done = CliRunner().invoke(dev, ["setup"])
    return done.output + ("" if done.exit_code == 0 else f" exit {done.exit_code}"), installed


def test_only_who_is_not_root_has_no_tests_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any error of the preparation was told as that."""
    said, _ = ask(monkeypatch, root=False)
    assert "the tests of the nodes tier are skipped" in said
    said, installed = ask(monkeypatch, root=True, refused="containerd")
    assert "Unable to locate package containerd" in said
    assert said.endswith("exit 2")
    assert installed == []


def test_a_distribution_without_a_browser_has_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    said, installed = ask(monkeypatch, root=True, refused="chromium")
    assert {"containerd", "buildah"} <= set(installed)
    assert "exit" not in said


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
