"""How far jobs get on the way to plans that share full pools."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shoal.sizing.fleet.moves import Move, reached

POOLS = "abc"
counts = st.dictionaries(st.sampled_from(POOLS), st.integers(0, 3))
moves = st.lists(st.builds(Move, counts, counts, st.integers(0, 4)), min_size=1, max_size=4)


def test_one_spare_worker_or_one_free_node_is_enough_to_change_places() -> None:
    swap = [Move({"a": 3}, {"b": 3}, 3), Move({"b": 3}, {"a": 3}, 3)]
    stay, done = [Counter(a=3), Counter(b=3)], [Counter(b=3), Counter(a=3)]
    assert [+has for has in reached(swap, {"a": 3, "b": 3})] == stay
    assert [+has for has in reached(swap, {"a": 4, "b": 3})] == done
    spare = [Move({"a": 3}, {"b": 3}, 2), swap[1]]
    assert [+has for has in reached(spare, {"a": 3, "b": 3})] == done


@given(moves, st.integers(0, 3))
def test_each_gets_no_more_than_there_is_and_keeps_its_floor(jobs: list[Move], free: int) -> None:
    limits = {pool: sum(job.now.get(pool, 0) for job in jobs) + free for pool in POOLS}
    ends = reached(jobs, limits)
    for pool in POOLS:
        assert sum(has[pool] for has in ends) <= limits[pool]
    for job, has in zip(jobs, ends, strict=True):
        floor = min(job.floor, sum(job.now.values()), sum(job.then.values()))
        assert has.total() >= floor
        for pool in POOLS:
            between = sorted((job.now.get(pool, 0), job.then.get(pool, 0)))
            assert between[0] <= has[pool] <= between[1]
    assert (
        free == 0
        or all(+has == +Counter(job.then) for job, has in zip(jobs, ends, strict=True))
        or any(sum(job.then.get(pool, 0) for job in jobs) > limits[pool] for pool in POOLS)
    )
