"""The ledger as a state machine: whatever workers do and lose, each position of a pass is done exactly once."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shoal_trainer.coordinator.ledger import Ledger, Segment


def ledger(size: int | None = 100, files: int = 0, batch: int = 4, epochs: int | None = 2) -> Ledger:
    return Ledger(size=size, files=files, batch_size=batch, seed="run", epochs=epochs)


class AnyWorkers(RuleBasedStateMachine):
    """Workers ask, push, vanish and give back in any order; the ledger is saved and restored in between."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = ledger()
        self.trained: Counter[tuple[int, int]] = Counter()

    @rule(slot=st.integers(0, 3))
    def ask(self, slot: int) -> None:
        self.ledger.grant(slot, 0, 1)

    @precondition(lambda self: self.ledger.leases)
    @rule(data=st.data())
    def push(self, data: st.DataObject) -> None:
        token = data.draw(st.sampled_from(sorted(self.ledger.leases)))
        lease = self.ledger.leases[token]
        assert lease.segment.stop is not None
        end = data.draw(st.integers(lease.offset, lease.segment.stop))
        assert self.ledger.advance(token, end) == end - lease.offset
        self.trained.update((lease.segment.epoch, position) for position in range(lease.offset, end))

    @precondition(lambda self: self.ledger.leases)
    @rule(slot=st.integers(0, 3))
    def vanish(self, slot: int) -> None:
        self.ledger.release(lambda lease: lease.slot == slot)

    @rule()
    def push_of_a_lease_that_is_gone(self) -> None:
        assert self.ledger.advance((0, 10**6), 50) == 0

    @rule()
    def save_and_restore(self) -> None:
        other = ledger()
        other.load(self.ledger.dump())
        assert other.dump() == self.ledger.dump()
        self.ledger = other

    @invariant()
    def nothing_is_done_twice(self) -> None:
        assert all(times == 1 for times in self.trained.values())
        assert self.ledger.done_samples == len(self.trained)

    @invariant()
    def done_leased_and_free_cover_each_open_pass(self) -> None:
        for epoch, of in self.ledger.passes.items():
            free = {p for s in of.free for p in range(s.start, s.stop or 0)}
            held = [lease.rest for lease in self.ledger.leases.values() if lease.segment.epoch == epoch]
            leased = {p for rest in held for p in range(rest.start, rest.stop or 0)}
            done = {position for e, position in self.trained if e == epoch}
            assert free | leased | done == set(range(100))
            assert len(free) + len(leased) + len(done) == 100

    def teardown(self) -> None:
        self.ledger.release(lambda _: True)
        while (lease := self.ledger.grant(0, 1, 2)) is not None:
            assert lease.segment.stop is not None
            self.ledger.advance(lease.token, lease.segment.stop)
            self.trained.update((lease.segment.epoch, p) for p in range(lease.offset, lease.segment.stop))
        assert self.ledger.finished
        assert self.trained == Counter(
            {(epoch, position): 1 for epoch in range(2) for position in range(100)}
        )


TestAnyWorkers = AnyWorkers.TestCase
TestAnyWorkers.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_passes_are_visited_in_other_orders_and_the_same_for_the_same_seed() -> None:
    def order(seed: str) -> list[int]:
        one = Ledger(size=64, files=0, batch_size=1, seed=seed, epochs=2)
        starts = []
        while (lease := one.grant(0, 0, 1)) is not None:
            starts.append(lease.segment.start)
            one.advance(lease.token, lease.segment.stop or 0)
        return starts

    first = order("a")
    assert first == order("a")
    assert first != order("b")
    assert sorted(first[:32]) == sorted(first[32:])
    assert first[:32] != first[32:]


def test_a_pass_begins_when_the_one_before_has_nothing_free_and_two_are_never_ahead() -> None:
    one = ledger(size=8, batch=4, epochs=None)
    leases = [one.grant(0, 0, 1) for _ in range(5)]
    assert [lease.segment.epoch if lease else None for lease in leases] == [0, 0, 1, 1, None]


def test_a_limit_cuts_a_lease_and_leaves_the_rest() -> None:
    one = ledger(size=64, batch=16, epochs=1)
    cut = one.grant(0, 0, 1, limit=5)
    assert cut is not None
    rest = one.grant(0, 0, 1)
    assert rest is not None
    assert (cut.segment.start, cut.segment.stop) == (rest.segment.start - 5, rest.segment.start)


def test_files_of_unknown_length_are_learned_in_the_first_pass() -> None:
    one = ledger(size=None, files=3, epochs=2)
    lengths = {0: 7, 1: 0, 2: 4}
    for _ in range(3):
        lease = one.grant(0, 0, 1)
        assert lease is not None
        assert lease.segment.stop is None
        length = lengths[lease.segment.file]
        if length:
            assert one.advance(lease.token, length) == length
        one.file_ended(lease.token, length)
    assert one.total() == 11
    seconds = [one.grant(0, 0, 1) for _ in range(2)]
    assert {lease.segment.stop for lease in seconds if lease} == {
        7,
        4,
    }  # the empty file is not given out again
    for lease in seconds:
        assert lease is not None
        one.advance(lease.token, lease.segment.stop or 0)
    assert one.finished
    assert one.done_samples == 22


def test_a_file_that_is_given_back_goes_on_where_it_was() -> None:
    one = ledger(size=None, files=1, epochs=1)
    lease = one.grant(0, 0, 1)
    assert lease is not None
    one.advance(lease.token, 30)
    one.release(lambda _: True)
    again = one.grant(1, 0, 1)
    assert again is not None
    assert (again.segment.start, again.segment.stop) == (30, None)


@settings(max_examples=100, deadline=None)
@given(done=st.integers(0, 40), begin=st.integers(0, 99), length=st.integers(1, 40))
def test_taking_a_piece_out_leaves_the_rest_and_reports_what_was_not_done(
    done: int, begin: int, length: int
) -> None:
    one = ledger(epochs=1)
    progressed = 0
    while progressed < done and (lease := one.grant(0, 0, 1)) is not None:
        assert lease.segment.stop is not None
        progressed += one.advance(lease.token, lease.segment.stop)
    piece = Segment(0, -1, begin, min(100, begin + length))
    taken = one.take(piece, lambda _: True)
    left = one.passes[0].free if 0 in one.passes else []
    positions = [p for s in (*taken, *left) for p in range(s.start, s.stop or 0)]
    assert len(positions) == len(set(positions)) == 100 - progressed
    assert all(begin <= p < begin + length for s in taken for p in range(s.start, s.stop or 0))


def test_a_ledger_of_other_data_is_refused() -> None:
    with pytest.raises(ValueError, match="other data"):
        ledger(size=99).load(ledger().dump())


def test_settling_opens_a_pass_that_the_snapshot_did_not_know() -> None:
    one = ledger(size=8, batch=4, epochs=3)
    assert one.settle(Segment(1, -1, 0, 4), lambda _: True) == 4
    assert one.done_samples == 4
    free = [s for epoch in one.passes for s in one.passes[epoch].free]
    assert replace(free[0], epoch=0)
    assert sum((s.stop or 0) - s.start for s in free) == 12
