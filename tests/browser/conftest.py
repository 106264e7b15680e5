"""The page in a real browser. `python -m dev setup` installs Chromium where it may."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.chromium import needs_chromium


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(needs_chromium)
