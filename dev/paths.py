"""Paths of the cache and of running clusters, outside the checkout."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The checkout."""


def cache() -> Path:
    """The cache of this user: `${XDG_CACHE_HOME:-~/.cache}/shoal`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "shoal"


def clusters() -> Path:
    """A folder for each cluster that runs: its processes, certificates, logs and databases."""
    return cache() / "clusters"
