"""Which tools are built again after which change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

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
