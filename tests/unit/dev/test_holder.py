"""A cluster that a living process uses is not removed by another one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from dev.cluster import holder
from dev.cluster.local import LocalCluster
from dev.cluster.processes import Identity
from dev.errors import DevError
from dev.paths import ROOT

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the local cluster runs on Linux"
)


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def held_by(pid: int) -> None:
    process = Identity.of(pid)
    assert process is not None
    holder.record("spare").parent.mkdir(parents=True)
    holder.record("spare").write_text(json.dumps({"process": asdict(process), "checkout": "/there/shoal"}))


def test_a_cluster_that_another_process_uses_is_not_removed(other: subprocess.Popen[bytes]) -> None:
    """The demo of one checkout removed the cluster of another's, which was in its middle."""
    held_by(other.pid)
    cluster = LocalCluster("spare")
    for change in (cluster.down, cluster.refuse_another):
        with pytest.raises(DevError, match=rf"used by process {other.pid} of the checkout /there/shoal"):
            change()
    assert holder.record("spare").exists()


def test_a_process_that_has_ended_uses_nothing(other: subprocess.Popen[bytes]) -> None:
    held_by(other.pid)
    other.kill()
    other.wait()
    holder.refuse_another("spare")


def test_who_holds_a_cluster_may_remove_it() -> None:
    holder.refuse_another("spare")
    holder.hold("spare")
    holder.refuse_another("spare")
    found = json.loads(holder.record("spare").read_text())
    assert found["checkout"] == str(ROOT)
    assert found["process"]["pid"] == os.getpid()
    holder.release("spare")
    assert not holder.record("spare").exists()
