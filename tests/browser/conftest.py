"""The page in a real browser. `python -m dev setup` installs Chromium where it may."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.browser.chromium import find


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find() or (sys.platform.startswith("linux") and os.geteuid() == 0):
        return  # as root it can be installed, so its absence is a failure
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="there is no Chromium, and only root can install it"))
