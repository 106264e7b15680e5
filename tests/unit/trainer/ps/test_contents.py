"""Which pushes a shard holds, after a month of replacements."""

from shoal_trainer.ps.contents import KEPT_INCARNATIONS, Contents


def test_contents_after_many_replacements_load_quickly() -> None:
    # To look at all workers for each of them would take an hour; the test has a minute.
    spans = [(slot, incarnation, 1, 9) for slot in range(1000) for incarnation in range(KEPT_INCARNATIONS)]
    assert Contents(spans).spans() == tuple(spans)


def test_newest_incarnations_of_each_slot_are_kept() -> None:
    contents = Contents((0, incarnation, 1, 2) for incarnation in range(KEPT_INCARNATIONS + 10))
    contents.add((1, 3, 1))
    contents.add((0, 2, 1))  # too old to come back
    assert contents.newest() == {0: KEPT_INCARNATIONS + 9, 1: 3}
    assert [span[:2] for span in contents.spans()] == [
        *((0, incarnation) for incarnation in range(10, KEPT_INCARNATIONS + 10)),
        (1, 3),
    ]
