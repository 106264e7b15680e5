"""What the bytes cost that a job moves between zones.

Parameters that cross zones can cost more than the GPUs: 8 workers with 25.6 M parameters in bf16 and steps of 300 ms
move about 10 TB an hour.
"""

from __future__ import annotations

from shoal.sizing.plan.problem import Pool

__all__ = ["money_per_step", "wire_bytes"]

GIB = 2**30
BF16_BYTES = 2.0


def wire_bytes(parameters: int) -> float:
    """Bytes that one update moves: the gradient to the parameter servers and the parameters back."""
    return 2 * BF16_BYTES * parameters


def money_per_step(pool: Pool, servers_zone: str, bytes_per_step: float) -> float:
    """Cost of the bytes of one step of a worker: 0 within a zone, or if no zone is named."""
    if not pool.zone or not servers_zone or pool.zone == servers_zone:
        return 0.0
    return bytes_per_step / GIB * pool.transfer_per_gib
