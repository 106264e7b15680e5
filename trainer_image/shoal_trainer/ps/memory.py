"""The memory that this process may use."""

from __future__ import annotations

from pathlib import Path

MEMORY_MAX = Path("/sys/fs/cgroup/memory.max")


def memory_limit(limit: Path = MEMORY_MAX) -> int | None:
    """The container's limit in bytes (cgroup v2); None if there is none, as on a laptop."""
    try:
        return int(limit.read_text())
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return None
