"""Fixtures: compiled kernels, credentials, and parameter servers that stop after their test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal_trainer.ps.kernel_loader import load_kernels
from shoal_trainer.security import Credentials, create_secret_dir
from tests.unit.trainer.ps.cluster import Cluster


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """Compile the kernels once, outside the timeout of any test."""
    load_kernels()


@pytest.fixture
def credentials(tmp_path: Path) -> Credentials:
    return create_secret_dir(tmp_path / "secret")


@pytest.fixture
def cluster(credentials: Credentials) -> Iterator[Cluster]:
    cluster = Cluster(credentials)
    yield cluster
    cluster.close()
