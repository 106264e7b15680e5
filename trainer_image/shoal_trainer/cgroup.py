"""The limits of the container that this process runs in, by cgroup v2, or v1 on older nodes."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 60
"""cgroup v1 says a number of bytes beyond this where there is no limit."""


def memory_limit(root: Path = ROOT) -> int | None:
    """In bytes; None if there is none, as on a laptop."""
    found = _words(root / "memory.max") or _words(root / "memory/memory.limit_in_bytes")
    try:
        (limit,) = map(int, found)
    except ValueError:  # no cgroup, or "max"
        return None
    return limit if limit < NO_LIMIT else None


def cpu_limit(root: Path = ROOT) -> float | None:
    """In cores, half a core is 0.5; None if there is none."""
    v1 = (root / f"cpu/cpu.cfs_{name}_us" for name in ("quota", "period"))
    found = _words(root / "cpu.max") or [word for file in v1 for word in _words(file)]
    try:
        quota, period = map(int, found)
    except ValueError:  # no cgroup, or "max"
        return None
    return quota / period if quota > 0 and period > 0 else None  # v1 says -1 where there is no limit


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
