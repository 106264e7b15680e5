"""A temporary folder for each test: the marker that a parameter server leaves there would mislead a later run."""

import tempfile

import pytest


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path_factory, monkeypatch):
    """It outlives the containers of a test, but not their pod."""
    folder = str(tmp_path_factory.mktemp("tmp"))
    monkeypatch.setattr(tempfile, "tempdir", folder)
    monkeypatch.setenv("TMPDIR", folder)
