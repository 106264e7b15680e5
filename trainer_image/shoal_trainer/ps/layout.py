"""Which part of the flat vector lies on which shard: contiguous ranges, so that no name is ever looked up."""

from __future__ import annotations

GRAIN = 16_384
"""Ranges begin at multiples of 64 KiB of fp32, so that every part stays aligned for kernels and pages."""

Bounds = tuple[int, int]


def bounds(size: int, shards: int) -> tuple[Bounds, ...]:
    """Half-open ranges [low, high) of a vector of `size` values, one for each of `shards`, equal to one grain.

    A vector with fewer grains than shards leaves some shards empty; they still count pushes.
    """
    if shards < 1:
        raise ValueError(f"shards must be at least 1, not {shards}")
    grains = -(-size // GRAIN)
    cuts = [min(size, grains * index // shards * GRAIN) for index in range(shards)] + [size]
    return tuple((cuts[index], cuts[index + 1]) for index in range(shards))
