"""Trades against their definition, pair by pair."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.controllers.planning.trades import trades

counts = st.dictionaries(st.sampled_from("abc"), st.integers(0, 4))
jobs = st.dictionaries(st.sampled_from("klmn"), counts)


@given(
    jobs,
    jobs,
    st.dictionaries(st.sampled_from("ab"), st.integers(0, 8)),
    st.lists(st.integers(0, 2), min_size=4),
)
def test_trades_are_as_defined(
    planned: dict[str, dict[str, int]],
    held: dict[str, dict[str, int]],
    limits: dict[str, int],
    levels: list[int],
) -> None:
    priorities = dict(zip("klmn", levels, strict=False))
    found = trades(planned, held, limits, priorities)
    assert found.keys() == planned.keys()
    for job, wants in planned.items():
        has, pools, higher = held.get(job, {}), set(), False
        for pool, limit in limits.items():
            before, after = has.get(pool, 0), wants.get(pool, 0)
            meanwhile = sum(
                max(planned.get(other, {}).get(pool, 0), held.get(other, {}).get(pool, 0))
                for other in {*planned, *held}
            )
            if before != after and meanwhile > limit:
                pools.add(pool)
                above = any(
                    theirs.get(pool) and priorities[other] > priorities[job]
                    for other, theirs in planned.items()
                )
                higher |= before > after and above
        assert found[job] == (pools, higher)
