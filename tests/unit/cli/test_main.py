"""The root of the command line."""

from __future__ import annotations

import importlib.metadata

import pytest
from click.testing import CliRunner

from shoal import __version__
from shoal.cli import main


def test_version_without_installed_distribution_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> str:  # as in the image of the operator, where the package is copied
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    result = CliRunner().invoke(main, ["--version"])
    assert result.exit_code == 0, result.output
    assert __version__ in result.output
