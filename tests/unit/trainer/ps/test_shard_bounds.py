"""How the flat vector is split into shards."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_trainer.ps.shard_bounds import GRAIN, bounds


@settings(deadline=None)
@given(st.integers(1, 10 * GRAIN), st.integers(1, 12))
def test_bounds_cover_the_vector_once(size: int, count: int) -> None:
    parts = bounds(size, count)
    assert len(parts) == count
    assert parts[0][0] == 0
    assert parts[-1][1] == size
    assert all(high == low for (_, high), (low, _) in itertools.pairwise(parts))
    assert all(low % GRAIN == 0 for low, high in parts if low < high)
    lengths = [high - low for low, high in parts]
    assert max(lengths) - min(lengths) <= 2 * GRAIN
