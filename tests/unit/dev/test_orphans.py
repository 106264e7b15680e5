"""A control plane whose process was killed is stopped by whoever starts the next one; those of living ones are not."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dev.cluster import control_plane, holder
from dev.cluster.control_plane import ControlPlane, orphans
from dev.cluster.processes import Identity
from dev.paths import clusters
from dev.tools import Tools

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the local cluster runs on Linux"
)


@pytest.fixture(autouse=True)
def nothing_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(control_plane, "ensure", lambda _names: Tools(tmp_path))
    monkeypatch.setattr(control_plane, "locate", lambda: Tools(tmp_path))


def left(name: str, by: Identity | None, namespace: str = "") -> ControlPlane:
    """A control plane with one process, that this one holds, whose pid is of a namespace; "": of ours."""
    namespace = namespace or str(Path("/proc/self/ns/pid").readlink())
    plane = ControlPlane(clusters() / name, Tools(Path()))
    plane.processes.start("etcd", ["sleep", "1000"])
    if by is not None:
        holder.record(name).write_text(
            json.dumps({"process": asdict(by), "checkout": "/x", "namespace": namespace})
        )
    return plane


def test_next_control_plane_stops_what_a_killed_process_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though another process has its pid; not what one in a container holds, whose pid says nothing here."""
    me = Identity.of(os.getpid())
    assert me is not None
    another = replace(me, started=me.started - 1)
    killed, elsewhere = left("control-plane-1-a", another), left("control-plane-4-d", another, "pid:[1]")
    living, unknown = left("control-plane-2-b", me), left("control-plane-3-c", None)
    monkeypatch.setattr(ControlPlane, "launch", lambda plane, _more: plane.folder.mkdir())
    try:
        with ControlPlane.start() as plane:
            assert not killed.folder.exists()
            assert not killed.processes.running("etcd")
            for each in (living, unknown, elsewhere):
                assert each.processes.running("etcd")
            assert not orphans()
        assert not plane.folder.exists()
        assert not holder.record(plane.folder.name).exists()
        assert not holder.record(killed.folder.name).exists()
    finally:
        for each in (killed, living, unknown, elsewhere):
            each.stop()
