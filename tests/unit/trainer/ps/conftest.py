"""Compiled kernels, and parameter servers that end with their test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal_trainer.ps import kernels
from shoal_trainer.security import Credentials, create_secret_dir
from tests.unit.trainer.ps.house import House


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """Compile the kernels once, before any test's deadline runs."""
    for _ in kernels.compile_all():
        pass


@pytest.fixture
def credentials(tmp_path: Path) -> Credentials:
    return create_secret_dir(tmp_path / "secret")


@pytest.fixture
def house(credentials: Credentials) -> Iterator[House]:
    house = House(credentials)
    yield house
    house.close()
