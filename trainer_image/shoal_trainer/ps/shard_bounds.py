"""The range of the flat parameter vector that each shard holds."""

from __future__ import annotations

GRAIN = 16_384
"""Ranges begin at multiples of this many values (64 KiB of fp32), so that they are aligned for kernels and pages."""

Bounds = tuple[int, int]


def bounds(size: int, shards: int) -> tuple[Bounds, ...]:
    """Half-open ranges [low, high) of a vector of `size` values, one per shard, equal in length to within two grains.

    If there are fewer grains than shards, some shards are empty; they still count pushes. `ValueError` for no shards.
    """
    if shards < 1:
        raise ValueError(f"shards must be at least 1, not {shards}")
    grains = -(-size // GRAIN)
    cuts = [min(size, grains * index // shards * GRAIN) for index in range(shards)] + [size]
    return tuple((cuts[index], cuts[index + 1]) for index in range(shards))
