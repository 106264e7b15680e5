"""The ledger as a state machine: in any order of events, each position of an epoch is trained exactly once."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dev.night import examples
from shoal_trainer.coordinator import lease_index
from shoal_trainer.coordinator.lease_index import Grant, Segment
from shoal_trainer.coordinator.ledger import Ledger
from shoal_trainer.coordinator.ranges import MAX_RANGES, RANGE_BLOCKS, Portion


def ledger(
    size: int | None = 100, files: int = 0, batch: int = 4, epochs: int | None = 2, block: int = 0
) -> Ledger:
    return Ledger(size=size, files=files, batch_size=batch, seed="run", epochs=epochs, block=block)


class AnyWorkers(RuleBasedStateMachine):
    """Workers ask, push, vanish and return leases in any order; the ledger is saved and restored in between."""

    block = 0

    def __init__(self) -> None:
        super().__init__()
        self.ledger = ledger(block=self.block)
        self.trained: Counter[tuple[int, int]] = Counter()
        self.frozen: list[tuple[Callable[[], dict[str, Any]], dict[str, Any]]] = []

    @rule(slot=st.integers(0, 3), batch=st.integers(1, 9), share=st.floats(0.01, 1))
    def ask(self, slot: int, batch: int, share: float) -> None:
        held = {token: self.positions(lease) for token, lease in self.ledger.leases.items()}
        lease = self.ledger.grant((slot, 0), 1, Portion(batch, share))
        if lease is not None:
            new = self.positions(lease)
            assert new
            assert new.isdisjoint(self.trained)
            assert all(new.isdisjoint(others) for others in held.values())

    @staticmethod
    def positions(lease: Grant) -> set[tuple[int, int]]:
        return {(lease.segment.epoch, p) for p in range(lease.segment.start, lease.segment.stop or 0)}

    @precondition(lambda self: self.ledger.leases)
    @rule(data=st.data())
    def push(self, data: st.DataObject) -> None:
        token = data.draw(st.sampled_from(sorted(self.ledger.leases)))
        lease = self.ledger.leases[token]
        assert lease.segment.stop is not None
        (first, *_) = self.ledger.rest(lease)
        assert first.stop is not None
        end = data.draw(st.integers(first.start, first.stop))
        self.push_positions(Segment(first.epoch, -1, first.start, end))

    @rule(epoch=st.integers(0, 1), start=st.integers(0, 99), length=st.integers(0, 30))
    def push_of_anything(self, epoch: int, start: int, length: int) -> None:
        """Under a reassigned lease, or of a completed epoch."""
        self.push_positions(Segment(epoch, -1, start, min(100, start + length)))

    def push_positions(self, segment: Segment) -> None:
        positions = [(segment.epoch, position) for position in range(segment.start, segment.stop or 0)]
        again = self.ledger.apply(segment)
        repeated = [(s.epoch, position) for s in again for position in range(s.start, s.stop or 0)]
        assert repeated == [position for position in positions if self.trained[position]]
        self.trained.update(positions)

    @rule(
        slot=st.integers(0, 3), epoch=st.integers(0, 1), start=st.integers(0, 99), length=st.integers(1, 30)
    )
    def reclaim(self, slot: int, epoch: int, start: int, length: int) -> None:
        segment = Segment(epoch, -1, start, min(100, start + length))
        lease = self.ledger.reclaim((slot, 0), 2, segment, 3)
        assert lease is None or (lease.worker[0], lease.token[0]) == (slot, 2)
        assert self.ledger.reclaim((slot, 0), 2, segment, 3) == lease

    @precondition(lambda self: self.ledger.leases)
    @rule(slot=st.integers(0, 3))
    def vanish(self, slot: int) -> None:
        self.ledger.release(lambda lease: lease.worker[0] == slot)

    @rule()
    def save_and_restore(self) -> None:
        other = ledger(block=self.block)
        other.load(self.ledger.dump())
        assert other.dump() == self.ledger.dump()
        self.ledger = other

    @rule()
    def freeze(self) -> None:
        self.frozen.append((self.ledger.frozen(), self.ledger.dump()))

    @invariant()
    def frozen_state_stays_what_it_was(self) -> None:
        for frozen, dumped in self.frozen[-3:]:
            assert frozen() == dumped

    @invariant()
    def what_is_done_is_counted_once(self) -> None:
        assert self.ledger.done_samples == len(self.trained)

    @invariant()
    def done_leased_and_free_cover_each_open_epoch(self) -> None:
        for epoch, state in self.ledger.open_epochs.items():
            held = [
                rest
                for lease in self.ledger.leases.values()
                if lease.segment.epoch == epoch
                for rest in self.ledger.rest(lease)
            ]
            leased = [p for rest in held for p in range(rest.start, rest.stop or 0)]
            done = {position for e, position in self.trained if e == epoch}
            assert len(leased) == len(set(leased))
            assert done.isdisjoint(leased)
            # Free segments may include positions that are done or leased: `grant` skips them.
            # None: not listed yet, so all of the epoch.
            listed = self.ledger.ranges.visiting(epoch, {}) if state.free is None else state.all_free()
            free = {p for s in listed or () for p in range(s.start, s.stop or 0)}
            assert free | set(leased) | done == set(range(100))

    @invariant()
    def what_is_leased_is_counted(self) -> None:
        by_worker: Counter[tuple[int, int]] = Counter()
        by_batch: Counter[int] = Counter()
        for lease in self.ledger.leases.values():
            samples = sum((rest.stop or 0) - rest.start for rest in self.ledger.rest(lease))
            by_worker[lease.worker] += samples
            by_batch[lease.batch] += samples
        assert {(slot, 0): self.ledger.held((slot, 0)) for slot in range(4)} == {
            (slot, 0): by_worker[slot, 0] for slot in range(4)
        }
        assert sum((state.leased for state in self.ledger.open_epochs.values()), Counter()) == +by_batch
        current = sum(
            (rest.stop or 0) - rest.start
            for lease in self.ledger.leases.values()
            if lease.segment.epoch == self.ledger.completed
            for rest in self.ledger.rest(lease)
        )
        assert self.ledger.counts()[1] == current

    def teardown(self) -> None:
        self.ledger.release(lambda _: True)
        while (lease := self.ledger.grant((0, 1), 2)) is not None:
            self.push_positions(lease.segment)
        assert self.ledger.finished
        assert set(self.trained) == {(epoch, position) for epoch in range(2) for position in range(100)}


TestAnyWorkers = AnyWorkers.TestCase
TestAnyWorkers.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


class AnyWorkersOfBlocks(AnyWorkers):
    """Of data that are read in blocks."""

    block = 12


TestAnyWorkersOfBlocks = AnyWorkersOfBlocks.TestCase
TestAnyWorkersOfBlocks.settings = TestAnyWorkers.settings


def test_each_epoch_has_its_own_order_fixed_by_the_seed() -> None:
    def order(seed: str) -> list[int]:
        one = Ledger(size=64, files=0, batch_size=1, seed=seed, epochs=2)
        starts = []
        while (lease := one.grant((0, 0), 1)) is not None:
            starts.append(lease.segment.start)
            one.apply(lease.segment)
        return starts

    first = order("a")
    assert first == order("a")
    assert first != order("b")
    assert sorted(first[:32]) == sorted(first[32:])
    assert first[:32] != first[32:]


def test_worker_goes_on_with_the_range_that_it_has_begun() -> None:
    """Who reads a part of a block reads all of it."""
    one = Ledger(size=4 * 2048, files=0, batch_size=32, seed="s", epochs=1, block=1024)
    assert one.ranges.length == RANGE_BLOCKS * 1024
    ends: dict[int, int | None] = {}
    begun = set()
    for slot in [0, 1, 2, 3] * 3:
        lease = one.grant((slot, 0), 1, Portion(32, 0.1))
        assert lease is not None
        start = lease.segment.start
        assert ends.get(slot, start) == start
        begun.add(start // one.ranges.length)
        ends[slot] = lease.segment.stop
    assert begun == {0, 1, 2, 3}
    other = one.grant((4, 0), 1, Portion(32, 0.1))
    assert other is not None
    assert other.segment.start in ends.values()  # nothing else is free


def test_worker_that_is_alone_is_granted_whole_ranges_as_they_are_visited() -> None:
    one = Ledger(size=3000, files=0, batch_size=32, seed="s", epochs=1, block=512)
    granted = [one.grant((0, 0), 1, Portion(32)) for _ in range(3)]
    assert [lease.segment for lease in granted if lease] == one.ranges.visiting(0, {})
    assert one.grant((0, 0), 1) is None


@pytest.mark.parametrize("block", [0, 100])
def test_half_of_an_epoch_that_is_to_be_judged_is_left(block: int) -> None:
    one = Ledger(size=100, files=0, batch_size=1, seed="s", epochs=1, block=block)
    granted = [one.grant((slot, 0), 1, Portion(share=0.1), half_of=0) for slot in range(40)]
    assert sum((lease.segment.stop or 0) - lease.segment.start for lease in granted if lease) == 50


def test_who_is_late_finds_as_much_as_the_others_have() -> None:
    """Ten equal workers hold half of what is left; and each, as it goes on, no more than its part of that."""
    one = Ledger(size=1000, files=0, batch_size=10, seed="s", epochs=1, block=500)
    for slot in range(10):
        lease = one.grant((slot, 0), 1, Portion(10, 0.1))
        assert lease is not None
        assert (lease.segment.stop or 0) - lease.segment.start == 50
    assert one.counts() == (0, 500)


def test_worker_that_holds_enough_is_granted_more_only_of_its_part() -> None:
    one = Ledger(size=1000, files=0, batch_size=10, seed="s", epochs=1)
    mine = Portion(10, 0.5, enough=20)
    granted = []
    while (lease := one.grant((0, 0), 1, mine)) is not None:
        granted.append(lease)
    assert 1000 / 3 - 10 < one.held((0, 0)) <= 1000 / 3
    for lease in granted[:-1]:
        one.apply(lease.segment)
    assert one.grant((0, 0), 1, mine) is not None


def test_file_is_cut_to_few_pieces_and_only_when_its_length_is_known() -> None:
    one = ledger(size=None, files=2, epochs=2)
    for _ in range(2):
        lease = one.grant((0, 0), 1, Portion(4, 0.01))
        assert lease is not None
        assert lease.segment[2:] == (0, None)
        one.apply(lease.segment._replace(stop=400))
        one.file_ended(lease.token, 400)
    pieces = []
    while (lease := one.grant((len(pieces), 0), 1, Portion(4, 0.01))) is not None:
        pieces.append(lease.segment)
    assert {(stop or 0) - start for _, _, start, stop in pieces} == {100}
    assert len(set(pieces)) == 8


def test_steps_are_counted_in_the_batches_of_those_who_hold_them() -> None:
    one = Ledger(size=10_000, files=0, batch_size=32, seed="s", epochs=None)
    small, large = one.grant((0, 0), 1, Portion(32), steps=7), None
    assert small is not None
    assert (small.segment.stop or 0) - small.segment.start == 7 * 32
    assert one.grant((1, 0), 1, Portion(64), steps=7) is None
    large = one.grant((1, 0), 1, Portion(64), steps=10)
    assert large is not None
    assert (large.segment.stop or 0) - large.segment.start == 3 * 64
    assert one.leased_steps() == 10


def test_next_epoch_opens_when_nothing_is_free_and_at_most_one_ahead() -> None:
    one = ledger(size=8, batch=4, epochs=None)
    leases = [one.grant((0, 0), 1) for _ in range(5)]
    assert [lease.segment.epoch if lease else None for lease in leases] == [0, 0, 1, 1, None]


@pytest.mark.parametrize(("size", "ahead"), [(8, 64), (10**9, 64), (None, 1)])
def test_epochs_without_evaluation_may_run_far_ahead(size: int | None, ahead: int) -> None:
    # A vanished worker's lease is free after seconds, in which many workers can train many epochs.
    one = Ledger(size=size, files=0 if size else 3, batch_size=4, seed="s", epochs=None, in_step=False)
    held = one.grant((0, 0), 1)
    assert held is not None
    if size == 8:
        while (lease := one.grant((1, 0), 1)) is not None:
            one.apply(lease.segment)
        assert one.opened == 1 + ahead
        assert one.completed == 0
        one.apply(held.segment)
        assert one.completed == 1 + ahead
    assert one.ahead == ahead


def test_file_lengths_are_learned_in_the_first_epoch() -> None:
    one = ledger(size=None, files=3, epochs=2)
    lengths = {0: 7, 1: 0, 2: 4}
    for _ in range(3):
        lease = one.grant((0, 0), 1)
        assert lease is not None
        assert lease.segment.stop is None
        length = lengths[lease.segment.file]
        if length:
            assert one.apply(lease.segment._replace(stop=length)) == []
        one.file_ended(lease.token, length)
    assert one.total() == 11
    seconds = [one.grant((0, 0), 1) for _ in range(2)]
    assert {lease.segment.stop for lease in seconds if lease} == {
        7,
        4,
    }  # the empty file is not leased again
    for lease in seconds:
        assert lease is not None
        one.apply(lease.segment)
    assert one.finished
    assert one.done_samples == 22


def test_returned_file_resumes_at_its_position() -> None:
    one = ledger(size=None, files=1, epochs=1)
    lease = one.grant((0, 0), 1)
    assert lease is not None
    one.apply(lease.segment._replace(stop=30))
    one.release(lambda _: True)
    again = one.grant((1, 0), 1)
    assert again is not None
    assert (again.segment.start, again.segment.stop) == (30, None)


def test_ledger_of_other_data_is_refused() -> None:
    with pytest.raises(ValueError, match="other data"):
        ledger(size=99).load(ledger().dump())


def test_push_opens_an_epoch_unknown_to_the_snapshot() -> None:
    one = ledger(size=8, batch=4, epochs=3)
    assert one.apply(Segment(1, -1, 0, 4)) == []
    assert one.done_samples == 4
    left = []
    while (lease := one.grant((0, 0), 1)) is not None:
        left.append((lease.segment.epoch, lease.segment.start))
        one.apply(lease.segment)
    assert sorted(left) == [(0, 0), (0, 4), (1, 4), (2, 0), (2, 4)]


def test_positions_of_a_complete_epoch_are_repeated() -> None:
    one = ledger(size=4, batch=4, epochs=2)
    lease = one.grant((0, 0), 1)
    assert lease is not None
    one.apply(lease.segment)
    one.release(lambda _: True)
    while one.grant((0, 0), 1) is not None:
        pass
    assert (one.completed, one.open_epochs.get(0)) == (1, None)
    assert one.apply(Segment(0, -1, 1, 3)) == [Segment(0, -1, 1, 3)]


def test_push_without_lease_does_not_scan_all_free_ranges(monkeypatch) -> None:
    # Recovery replays thousands of pushes under the lock, on a ledger with thousands of ranges.
    one = ledger(size=4 * MAX_RANGES, batch=4, epochs=1)
    one.grant((0, 0), 1)
    looked = 0

    def overlap(first: Segment, second: Segment) -> bool:
        nonlocal looked
        looked += 1
        return original(first, second)

    original = lease_index.overlap
    monkeypatch.setattr(lease_index, "overlap", overlap)
    for number in range(100):
        assert one.apply(Segment(0, -1, number * 8, number * 8 + 4)) == []
    assert looked <= 200


@pytest.mark.parametrize("size", [1, 100, 10**6, 10**9])
def test_ranges_per_epoch_are_bounded(size: int) -> None:
    one = Ledger(size=size, files=0, batch_size=32, seed="s", epochs=1)
    assert one.ranges.per_epoch <= MAX_RANGES
    assert one.ranges.length % 32 == 0


@pytest.mark.parametrize("segment", [Segment(7, -1, 0, 4), Segment(0, 0, 0, 4), Segment(0, -1, 0, 2**63)])
def test_positions_outside_the_data_are_ignored(segment: Segment) -> None:
    one = ledger(size=8, batch=4, epochs=3)
    assert one.apply(segment) == []
    assert one.reclaim((0, 0), 1, segment, 4) is None
    assert one.done_samples == one.opened == 0


def test_a_push_that_names_an_epoch_far_ahead_lists_no_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """It arrives under the shard's lock; each list takes milliseconds for large data."""
    made, listed = ledger(size=1_000_000, epochs=None), []
    visiting = made.ranges.visiting
    monkeypatch.setattr(made.ranges, "visiting", lambda epoch, _: listed.append(epoch) or visiting(epoch, {}))
    made.apply(Segment(3000, -1, 0, 4))
    assert made.opened == 3001
    assert len(listed) <= 1  # the first epoch, to see whether it is complete
    again = ledger(size=1_000_000, epochs=None)
    again.load(made.dump())
    assert again.dump() == made.dump()


def test_a_push_beyond_the_limit_is_ignored_with_and_without_a_number_of_epochs() -> None:
    for epochs in (None, 1_000_000):
        made = ledger(epochs=epochs)
        assert made.apply(Segment(500_000, -1, 0, 4)) == []
        assert made.opened == 0


@pytest.mark.parametrize("epochs", [None, 5])
def test_data_without_a_sample_end_no_epoch(epochs):
    ledger = Ledger(size=None, files=2, batch_size=4, seed="0", epochs=epochs)
    for _ in range(2):
        ledger.file_ended(ledger.grant((0, 0), 1).token, 0)
    assert ledger.grant((0, 0), 1) is None
    assert ledger.completed <= 1


def test_request_that_gets_nothing_looks_at_no_file() -> None:
    """At the end of 100,000 files, hundreds of idle workers ask again and again, under the shard's lock."""

    class Lengths(dict[int, int]):
        def values(self) -> Any:
            raise AssertionError("all lengths were read")

        __iter__ = values

    one = ledger(size=None, files=3, epochs=1)
    for _ in range(3):
        lease = one.grant((0, 0), 1)
        assert lease is not None
        one.file_ended(lease.token, 64)
    one.lengths = Lengths(one.lengths)
    assert one.grant((1, 0), 1) is None
    assert one.total() == 192
