"""The set of pushes of a shard after many replacements of workers."""

import pytest

from shoal_trainer.ps.contents import KEPT_INCARNATIONS, Contents, uneven
from shoal_trainer.ps.positions import Positions


def test_contents_after_many_replacements_load_quickly() -> None:
    # A quadratic algorithm would exceed the test's timeout.
    spans = [(slot, incarnation, 1, 9) for slot in range(1000) for incarnation in range(KEPT_INCARNATIONS)]
    assert Contents(spans).spans() == tuple(spans)


def test_newest_incarnations_of_each_slot_are_kept() -> None:
    contents = Contents((0, incarnation, 1, 2) for incarnation in range(KEPT_INCARNATIONS + 10))
    contents.add((1, 3, 1))
    contents.add((0, 2, 1))  # too old: not added
    assert contents.newest() == {0: KEPT_INCARNATIONS + 9, 1: 3}
    assert [span[:2] for span in contents.spans()] == [
        *((0, incarnation) for incarnation in range(10, KEPT_INCARNATIONS + 10)),
        (1, 3),
    ]


def test_incarnations_that_are_equal_everywhere_are_only_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """After weeks these are nearly all of tens of thousands."""
    spans = [(slot, incarnation, 1, 9) for slot in range(10) for incarnation in range(KEPT_INCARNATIONS)]
    shards, added = [Contents(spans) for _ in range(3)], list[tuple[int, int]]()
    shards[1].add((5, KEPT_INCARNATIONS - 1, 9))
    add = Positions.add

    def counted(positions: Positions, start: int, stop: int) -> list[tuple[int, int]]:
        added.append((start, stop))
        return add(positions, start, stop)

    monkeypatch.setattr(Positions, "add", counted)
    assert uneven(shards).spans() == ((5, KEPT_INCARNATIONS - 1, 9, 10),)
    assert len(added) < 10
