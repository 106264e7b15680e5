"""Which tools are built again after which change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dev.errors import DevError
from dev.tools import build


def test_another_module_does_not_rebuild_kubernetes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = tmp_path / "tools"
    shutil.copytree(build.MODULE, module)
    monkeypatch.setattr(build, "MODULE", module)
    before = build.pinned()
    assert before == build.pinned()
    main = module / "coscheduling" / "main.go"
    main.write_text(main.read_text() + "// changed\n")
    assert build.pinned() == before
    ours = module / "pause" / "main.go"
    ours.write_text(ours.read_text() + "// changed\n")
    assert build.pinned() != before


def test_what_an_interrupted_go_leaves_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Go removes its work folder at SIGINT only, and `side_by_side` ends it with SIGTERM."""
    go = tmp_path / "bin" / "go"
    go.parent.mkdir()
    go.write_text('#!/bin/sh\nmkdir "${GOTMPDIR:-$TMPDIR}/go-build1"\nkill -TERM $$\n')
    go.chmod(0o755)
    monkeypatch.setenv("PATH", f"{go.parent}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with pytest.raises(DevError, match="go build"):
        build.ensure_apart("kueue")
    assert not list(tmp_path.rglob("go-build*"))
