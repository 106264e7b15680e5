"""The chart is rendered by the real helm."""

from pathlib import Path

import pytest

from dev.tools.build import ensure


@pytest.fixture(scope="session")
def tools() -> Path:
    return ensure(("helm", "kubectl")).folder
