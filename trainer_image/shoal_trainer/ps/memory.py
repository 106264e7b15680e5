"""The memory that this process may use, and how much a parameter server needs."""

from __future__ import annotations

from pathlib import Path

from shoal_trainer.ps.pool import MODEL_SHARE, RESERVED
from shoal_trainer.ps.update_rules import STATE, rule
from shoal_trainer.wire.messages import OptimizerConfig

MEMORY_MAX = Path("/sys/fs/cgroup/memory.max")
MEMORY_V1 = Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")
NO_LIMIT = 1 << 60
"""cgroup v1 says a number beyond this where there is no limit."""


def memory_limit(v2: Path = MEMORY_MAX, v1: Path = MEMORY_V1) -> int | None:
    """The container's limit in bytes; None if there is none, as on a laptop."""
    for limit in (v2, v1):
        try:
            found = int(limit.read_text())
        except (OSError, ValueError):  # not this version of cgroup, or "max"
            continue
        return found if found < NO_LIMIT else None
    return None


def needed(parameters: int, config: OptimizerConfig) -> int:
    """Bytes that a server of these parameters should be allowed: measured in docs/benchmarks/scale.md.

    Parameters and optimizer state are fp32; a snapshot holds a copy of both while it is written.
    """
    model = 4 * parameters * (1 + len(STATE[rule(config)]))
    return int((2 + MODEL_SHARE) * model) + RESERVED
