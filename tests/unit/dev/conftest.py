"""What tests of the release and of published images share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.dev.registry import serving


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """HOST:PORT of a registry on loopback."""
    with serving(tmp_path) as address:
        yield address
