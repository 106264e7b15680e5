"""The cost of a request does not grow with the number of workers; operations are counted, not time."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_trainer.contract import JobIdentity, StopAfter
from shoal_trainer.coordinator import lease_index
from shoal_trainer.coordinator.assigning import IDLE_SECONDS
from shoal_trainer.coordinator.coordinator import Coordinator
from shoal_trainer.coordinator.lease_index import END, Grant, LeaseIndex, Segment, overlap
from shoal_trainer.coordinator.members import Members
from shoal_trainer.coordinator.protocol import DataSpec, Join
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.wire.messages import ModelSpec, Progress, PushMeta
from tests.unit.trainer.coordinator.bench import next_work
from tests.unit.trainer.ps.shards import Clock, push_to

WORKERS = 200


@pytest.fixture
def coordinator():
    clock = Clock()  # on a slow machine a second passes, after which all are looked at
    shard = ShardStore(0, 1, 0, clock=clock)
    job = JobIdentity(namespace="n", name="j", uid="u")
    found = Coordinator(job, StopAfter(epochs=1), 2, shard, clock=clock)
    shard.hello(0, 0, ModelSpec(fingerprint="0" * 64, parameters=4))
    shard.offer(0, 0, aligned(4))
    for slot in range(WORKERS):
        shard.workers.connect(slot, 0)
        found.join(Join(slot=slot, incarnation=0, data=DataSpec(size=2**20), batch_size=2))
    return found


def test_push_compares_few_of_many_leases(coordinator, monkeypatch):
    leases = [next_work(coordinator, slot, 0).lease for slot in range(WORKERS)]
    assert len(coordinator.record.ledger.leases) == WORKERS
    looked = []
    monkeypatch.setattr(lease_index, "overlap", lambda one, other: looked.append(one) or overlap(one, other))
    for seq, lease in enumerate(leases, 1):
        mark = Progress(lease.epoch, -1, lease.start, lease.start + 2)
        meta = PushMeta(samples=2, progress=(mark,))
        push_to(coordinator.shard, 0, 0, seq, seq - 1, meta, aligned(4))
    assert len(looked) <= 2 * WORKERS
    assert coordinator.record.ledger.done_samples == 2 * WORKERS


def test_request_for_work_reads_no_other_member(coordinator, monkeypatch):
    coordinator.tick()
    looked = []
    present = Members.present
    monkeypatch.setattr(Members, "present", lambda self: looked.append(self) or present(self))
    monkeypatch.setattr(Members, "active", lambda self: looked.append(self) or [])
    for slot in range(WORKERS):
        next_work(coordinator, slot, 0)
    assert looked == []


@pytest.mark.parametrize(("workers", "seconds"), [(1, IDLE_SECONDS), (200, IDLE_SECONDS), (1000, 1.0)])
def test_idle_pause_grows_with_the_number_of_workers(coordinator, workers, seconds):
    coordinator.members.live = workers
    generation_to_come = 1
    assert next_work(coordinator, 0, 0, generation_to_come).seconds == pytest.approx(seconds)


@st.composite
def disjoint(draw):
    """Leases of 2 epochs and 2 files; those of a file do not overlap, and the last one may be open."""
    found: list[Segment] = []
    for epoch in range(2):
        for file in range(2):
            cuts = sorted(draw(st.sets(st.integers(0, 40), max_size=10)))
            pairs = list(zip(cuts[::2], cuts[1::2], strict=False))
            found += [Segment(epoch, file, start, stop) for start, stop in pairs]
            if draw(st.booleans()):
                found.append(Segment(epoch, file, 41, None))
    return draw(st.permutations(found))


def brute_force(leases: Iterable[Grant], segment: Segment) -> list[Grant]:
    found = [lease for lease in leases if overlap(lease.segment, segment)]
    return sorted(found, key=lambda lease: lease.segment.start)


@given(disjoint(), st.integers(0, 1), st.integers(0, 1), st.integers(0, 45), st.integers(0, 12), st.data())
def test_overlapping_leases_are_those_of_a_full_scan(segments, epoch, file, start, length, data):
    leases = LeaseIndex()
    for counter, segment in enumerate(segments):
        leases.add(Grant((1, counter), (0, 0), segment))
    removed = data.draw(st.sets(st.sampled_from(sorted(leases)))) if leases else set()
    for token in removed:
        leases.remove(token)
    assert list(leases) == [(1, n) for n in range(len(segments)) if (1, n) not in removed]
    for stop in (start + length, None):
        segment = Segment(epoch, file, start, stop)
        assert leases.overlapping(segment) == brute_force(leases.values(), segment)
    assert leases.in_epoch(epoch) == any(lease.segment.epoch == epoch for lease in leases.values())


def test_lease_with_learned_end_is_not_found_beyond_it():
    leases = LeaseIndex()
    leases.add(Grant((1, 1), (0, 0), Segment(0, 3, 8, None)))
    leases.add(Grant((1, 1), (0, 0), Segment(0, 3, 8, 20)))
    assert leases.overlapping(Segment(0, 3, 20, None)) == []
    assert [lease.segment.end for lease in leases.overlapping(Segment(0, 3, 0, END))] == [20]
