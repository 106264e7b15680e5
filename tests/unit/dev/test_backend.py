"""`make demo` takes the cluster that was tried; kind only when it is asked for."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from dev.demo import backend
from dev.demo.kind import CONFIG, Kind, audited
from dev.demo.local import Local
from dev.errors import DevError


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Root on Linux, with Docker and kind, as most platform engineers have it."""
    monkeypatch.delenv("CLUSTER", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(backend, "docker_answers", lambda: True)
    return monkeypatch


def test_kind_is_not_chosen_although_it_is_there(machine: pytest.MonkeyPatch) -> None:
    assert isinstance(backend.choose(), Local)


def test_kind_is_chosen_when_asked_for(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("CLUSTER", "kind")
    assert isinstance(backend.choose(), Kind)


def test_without_root_the_message_says_what_to_do(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(DevError, match=r"sudo make demo.*CLUSTER=kind"):
        backend.choose()


def test_who_keeps_a_cluster_reads_which_nodes_are_dead_and_how_to_get_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def node(name: str, alive: bool) -> SimpleNamespace:
        return SimpleNamespace(spec=SimpleNamespace(name=name), alive=alive)

    kept = Local()
    nodes = [node("ondemand-1", True), node("spot-1", True), node("spot-2", True)]
    monkeypatch.setattr(kept.cluster, "nodes", lambda: nodes)
    assert kept.left() == ""
    nodes[1:] = [node("spot-1", False), node("spot-2", False)]
    assert kept.left() == (
        "spot-1, spot-2 are dead, and counted until `kubectl delete node spot-1 spot-2`; "
        "`python -m dev node add NAME --spot` makes another one"
    )


def test_unknown_cluster_is_refused(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("CLUSTER", "minikube")
    with pytest.raises(DevError, match="may be kind or local"):
        backend.choose()


def test_audit_log_is_added_to_the_control_plane_only(tmp_path: Path) -> None:
    plain = yaml.safe_load(CONFIG.read_text())
    config = audited(plain, tmp_path)
    control_plane, *workers = config["nodes"]
    assert workers == plain["nodes"][1:]
    paths = [Path(mount["hostPath"]) for mount in control_plane["extraMounts"]]
    assert all(path.is_absolute() and path.is_relative_to(tmp_path) for path in paths)
    patch = yaml.safe_load(control_plane["kubeadmConfigPatches"][0])
    mounted = {mount["containerPath"] for mount in control_plane["extraMounts"]}
    volumes = {volume["hostPath"] for volume in patch["apiServer"]["extraVolumes"]}
    assert all(any(path.startswith(volume) for volume in volumes) for path in mounted)
    assert "extraMounts" not in plain["nodes"][0]
