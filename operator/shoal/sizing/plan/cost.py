"""Prices: bytes that cross zones, and spot prices capped at the on-demand price.

Parameters that cross zones can cost more than the GPUs: 8 workers with 25.6 M parameters in bf16 and steps of 300 ms
move about 10 TB an hour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.sizing.plan.problem import Pool

__all__ = ["capped", "money_per_step", "wire_bytes"]

GIB = 2**30
WIRE_BYTES = {"fp32": 4.0, "bf16": 2.0}


def wire_bytes(parameters: int, wire: str = "bf16") -> float:
    """Bytes that one step moves: the gradient to the parameter servers and the parameters back."""
    return 2 * WIRE_BYTES[wire] * parameters


def money_per_step(pool: Pool, servers_zone: str, bytes_per_step: float) -> float:
    """Cost of the bytes of one step of a worker: 0 within a zone, or if no zone is named."""
    if not pool.zone or not servers_zone or pool.zone == servers_zone:
        return 0.0
    return bytes_per_step / GIB * pool.transfer_per_gib


def capped(pools: Sequence[Pool]) -> list[Pool]:
    """The pools, with spot prices capped at on-demand for the same hardware in the same zone (or any zone)."""
    result = []
    for pool in pools:
        alike = [p for p in pools if not p.spot and p.accelerator and p.accelerator == pool.accelerator]
        near = [p for p in alike if p.zone == pool.zone] or alike
        cap = min((p.price for p in near), default=None)
        result.append(replace(pool, price=min(pool.price, cap)) if pool.spot and cap is not None else pool)
    return result
