"""How much memory a parameter server needs."""

from __future__ import annotations

from shoal_trainer.ps.pool import MODEL_SHARE, RESERVED
from shoal_trainer.ps.update_rules import STATE, rule
from shoal_trainer.wire.messages import OptimizerConfig


def needed(parameters: int, config: OptimizerConfig) -> int:
    """Bytes that a server of these parameters should be allowed: measured in docs/benchmarks/scale.md.

    Parameters and optimizer state are fp32; a snapshot holds a copy of both while it is written.
    """
    model = 4 * parameters * (1 + len(STATE[rule(config)]))
    return int((2 + MODEL_SHARE) * model) + RESERVED
