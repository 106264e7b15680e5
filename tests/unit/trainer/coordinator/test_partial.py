"""Samples in some shards only: against plain sets of pushes, and across restarts of the coordinator."""

import json
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_trainer.contract import JobIdentity, StopAfter
from shoal_trainer.coordinator.coordinator import Coordinator
from shoal_trainer.coordinator.partial import Partial
from shoal_trainer.coordinator.protocol import DataSpec, Join, Leave
from shoal_trainer.coordinator.reconciler import Reconciler
from shoal_trainer.errors import Unreachable
from shoal_trainer.ps import journal
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.contents import KEPT_INCARNATIONS, Contents, arriving, uneven
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.wire.messages import MAX_JOURNAL, Entry, ModelSpec, OptimizerConfig, Progress, PushMeta
from tests.unit.trainer.coordinator.remote_shard import RemoteShard
from tests.unit.trainer.ps.shards import push_to

MODEL = ModelSpec(fingerprint="0" * 64, parameters=8, optimizer=OptimizerConfig(name="delta"))
pushes = st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 12))
shards = st.lists(st.sets(pushes), min_size=1, max_size=3)


def contents(held):
    result = Contents()
    for push in held:
        result.add(push)
    return result


def compared(shards):
    """What `Partial` is told of the shards' contents."""
    return shards, uneven(shards)


@given(shards)
def test_uneven_is_the_union_minus_the_intersection(held):
    found = [contents(one) for one in held]
    assert set(uneven(found)) == set.union(*held) - set.intersection(*held)
    assert [Contents(one.spans()).spans() for one in found] == [one.spans() for one in found]
    for push in uneven(found):
        lacking = [one for one in held if push not in one]
        seqs = [[seq for *worker, seq in one if tuple(worker) == push[:2]] for one in lacking]
        assert arriving(found, push) == all(push[2] > max(have, default=0) for have in seqs)


def test_partial_pushes_of_forgotten_incarnations_stay_counted():
    one, other, partial = contents([(0, 0, 1)]), contents([]), Partial()
    partial.learn([Entry(1, 0, 0, 1, 1, 0, -1, 4, 6)])
    for shard in (one, other):
        shard.add((0, KEPT_INCARNATIONS, 1))
    assert not uneven([one, other])
    assert not uneven([contents([(0, 0, 1), (0, KEPT_INCARNATIONS, 1)]), other])
    counted = [Progress(0, -1, 4, 6)], False
    for publish in (
        False,
        True,
    ):  # before the snapshot after which the incarnation is forgotten, and after it
        if publish:
            partial.published(*compared([one, other]))
        assert partial.count(*compared([one, other]), set()) == counted
        loaded = Partial()
        loaded.load(json.loads(json.dumps(partial.dump(*compared([one, other]), 2))), 2)
        assert loaded.count(*compared([one, other]), set()) == counted


def test_push_that_arrived_everywhere_is_not_partial_when_its_incarnation_is_forgotten():
    one, other, partial = contents([(0, 0, 1)]), contents([]), Partial()
    partial.learn([Entry(1, 0, 0, 1, 1, 0, -1, 4, 6)])
    assert partial.count(*compared([one, other]), {(0, 0)}) == ([], True)
    partial.published(*compared([one, other]))  # it was in flight while the snapshot was taken
    other.add((0, 0, 1))
    assert partial.count(*compared([one, other]), {(0, 0)}) == ([], False)
    for shard in (one, other):
        shard.add((0, KEPT_INCARNATIONS, 1))
    assert partial.count(*compared([one, other]), set()) == ([], False)
    assert partial.dump(*compared([one, other]), 2)["forGood"] == []
    partial.published(*compared([one, other]))
    assert partial.count(*compared([one, other]), set()) == ([], False)


@given(shards)
def test_partial_samples_of_another_run_stay_partial(held):
    found = [contents(one) for one in held]
    partial, begun = Partial(), Partial()
    partial.learn(Entry(1, *push, 1, 0, -1, push[2], push[2] + 1) for push in uneven(found))
    begun.load(json.loads(json.dumps(partial.dump(*compared(found), len(found)))), 2, other_run=True)
    mine, _ = partial.count(*compared(found), set())
    assert sorted(begun.count(*compared([Contents(), Contents()]), set())[0]) == sorted(mine)


@given(shards, st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_partial_samples_survive_resharding(held, cuts):
    found = [contents(one) for one in held]
    partial = Partial()
    partial.learn(Entry(1, *push, 1, 0, -1, push[2], push[2] + 1) for push in uneven(found))
    mine, _ = partial.count(*compared(found), set())
    for count in cuts:
        begun = Partial()
        begun.load(json.loads(json.dumps(partial.dump(*compared(found), len(found)))), count)
        if count != len(found):
            found = [Contents() for _ in range(count)]
        assert sorted(begun.count(*compared(found), set())[0]) == sorted(mine)
        partial = begun


def lost(push):
    """The journal's entry of a push that covers one sample of its own."""
    slot, incarnation, seq = push
    return Entry(1, *push, 1, slot, incarnation, seq, seq + 1)


def samples(marks):
    return sorted((e, f, at) for e, f, start, stop in marks for at in range(start, stop))


@given(st.lists(st.sets(pushes), min_size=2, max_size=3), st.lists(st.tuples(st.integers(0, 2), pushes)))
def test_what_is_kept_as_ranges_counts_as_before(held, arrive):
    """Against one that keeps each push: what arrives after a snapshot, and snapshots of what has arrived."""
    found, each, ranges = [contents(one) for one in held], Partial(), Partial()
    for shard, push in [(0, None), *arrive]:
        one = found[shard % len(found)]
        if push is not None and push[2] > one.passed(push[:2]):
            one.add(push)
        for partial in (each, ranges):
            partial.learn(map(lost, uneven(found)))
        now = [Contents(one.spans()) for one in found]
        saved = json.loads(json.dumps(ranges.dump(*compared(now), len(now))))
        ranges.published(*compared(now))
        loaded = Partial()
        loaded.load(saved, len(now))
        present = {(slot, max(one.newest().get(slot, 0) for one in now)) for slot in range(3)}
        for at_end in (False, True):
            expected, in_flight = each.count(*compared(now), present, at_end=at_end)
            for partial in (ranges, loaded):
                marks, also = partial.count(*compared(now), present, at_end=at_end)
                assert (samples(marks), also) == (samples(expected), in_flight)


def test_pushes_that_a_shard_has_lost_for_good_become_ranges_with_the_next_snapshot():
    """Tens of thousands, of each of which nothing is done under the shard's lock from then on."""
    one, other = Contents([(0, 0, 1, 1000)]), Contents([(0, 0, 1, 10), (0, 0, 900, 1000)])
    partial = Partial()
    partial.learn(map(lost, uneven([one, other])))
    assert len(partial.dump(*compared([one, other]), 2)["pushes"]) == 890
    partial.published(*compared([one, other]))
    partial.learn(map(lost, uneven([one, other])))  # of one that a part names as begun
    saved = partial.dump(*compared([one, other]), 2)
    assert (saved["pushes"], saved["settled"]) == ([], ((0, 0, 10, 900),))
    assert saved["forGood"] == [Progress(0, 0, 10, 900)]
    assert not partial.unknown(uneven([one, other]))
    assert partial.count(*compared([one, other]), {(0, 0)}) == ([Progress(0, 0, 10, 900)], False)


def test_pushes_of_a_worker_that_was_replaced_become_ranges():
    shards = [Contents([(0, 0, 1, 20), (0, 1, 1, 2)]), Contents([(0, 0, 1, 10), (0, 1, 1, 2)])]
    partial = Partial()
    partial.learn(map(lost, uneven(shards)))
    partial.published(*compared(shards))
    assert partial.dump(*compared(shards), 2)["pushes"] == []


class Bench:
    """A coordinator with two shards (or `count`) that starts from `saved`."""

    def __init__(self, count=2, saved=None, **pieces):
        self.shards = [ShardStore(index, count, 0, **pieces) for index in range(count)]
        self.coordinator = Coordinator(
            JobIdentity(namespace="n", name="j", uid="u"), StopAfter(epochs=1), 2, self.shards[0]
        )
        if saved is not None:
            self.coordinator.load(saved)
        others = [RemoteShard(shard, None) for shard in self.shards[1:]]
        self.other = others[0] if others else None
        self.reconciler = Reconciler(self.shards[0], others, self.coordinator)
        for shard in self.shards:
            shard.workers.connect(0, 0)
            shard.hello(0, 0, MODEL)
            shard.offer(0, 0, aligned(shard.size))
        self.coordinator.join(Join(slot=0, incarnation=0, data=DataSpec(size=64), batch_size=2))

    def push(self, seq, *to):
        meta = PushMeta(samples=2, progress=(Progress(0, -1, 2 * seq, 2 * seq + 2),))
        for index in to:
            shard = self.shards[index]
            push_to(shard, 0, 0, seq, 0, meta, aligned(shard.size), delta=True)

    def parts(self):
        """What a snapshot of these shards would contain."""
        return [
            SimpleNamespace(pushes=shard.history.contents.spans(), begun=shard.history.begun())
            for shard in self.shards
        ]

    def save(self):
        """The ledger as the snapshotter writes it into a manifest."""
        parts = self.parts()
        saved = self.coordinator.record.dump() | {"partial": self.reconciler.manifest_part(parts)}
        self.reconciler.published(parts)
        return json.loads(json.dumps(saved))

    @property
    def counted(self):
        return self.coordinator.record.counters.partial, self.coordinator.record.counters.partial_ranges


@pytest.mark.parametrize("act", ["compare", "manifest_part", "published"])
def test_contents_are_compared_once_and_without_the_lock(act, monkeypatch):
    """After weeks they name tens of thousands of incarnations, and pushes and heartbeats would wait."""
    bench, held = Bench(), []
    bench.push(1, 1)

    def noted(contents):
        held.append(bench.coordinator.lock._is_owned())
        return uneven(contents)

    for name, module in sys.modules.items():
        if name.startswith("shoal_trainer.") and getattr(module, "uneven", None) is uneven:
            monkeypatch.setattr(module, "uneven", noted)
    arguments = [] if act == "compare" else [bench.parts()]
    getattr(bench.reconciler, act)(*arguments)
    assert held == [False]


def test_pushes_in_flight_count_as_partial_at_the_end_only():
    bench = Bench()
    bench.push(1, 0, 1)
    bench.push(2, 1)
    assert not bench.reconciler.compare()
    assert bench.counted == (0, set())
    assert not bench.reconciler.compare(at_end=True)
    assert bench.counted == (2, {(0, 2)})
    bench.push(2, 0)
    assert bench.reconciler.compare(at_end=True)
    assert bench.counted == (0, set())
    bench.push(3, 0)
    bench.push(4, 0, 1)
    assert bench.reconciler.compare()
    assert bench.counted == (2, {(0, 3)})


@pytest.mark.parametrize("count", [1, 2])
def test_part_of_a_push_that_a_vanished_worker_leaves_counts_as_partial(count):
    bench = Bench(count, large=0, piece=4)
    meta = PushMeta(samples=2, progress=(Progress(0, -1, 8, 10),))
    stream = bench.shards[-1].pushing(0, 0, 1, 0, meta, delta=True)
    stream.step(aligned(4))
    stream.close()
    assert not bench.reconciler.compare()  # its worker may continue it
    assert bench.counted == (0, set())
    saved = bench.save()
    bench.coordinator.leave(Leave(slot=0, incarnation=0))
    assert bench.reconciler.compare()
    assert bench.counted == (2, {(0, 4)})
    assert saved["partial"]["pushes"] == [[0, 0, 1, [[0, -1, 8, 10]]]]


@pytest.mark.parametrize(
    "mark", [Progress(0, -1, 0, 1 << 18), Progress(1 << 40, -1, 0, 2), Progress(0, 3, 0, 2)]
)
def test_positions_that_the_data_do_not_have_are_not_partial(mark):
    """Of a damaged worker, and as a manifest may have them: each range of it is named under the shard's lock."""
    bench = Bench()
    meta = PushMeta(samples=2, progress=(mark,))
    push_to(bench.shards[1], 0, 0, 1, 0, meta, aligned(8), delta=True)
    bench.reconciler.compare(at_end=True)
    assert bench.counted == (0, set())
    bench = Bench(saved=bench.save())
    bench.shards[1].history.contents.add((0, 0, 1))
    bench.reconciler.compare(at_end=True)
    assert bench.counted == (0, set())


def test_pushes_of_a_worker_that_left_count_as_partial():
    bench = Bench()
    bench.push(1, 1)
    bench.coordinator.leave(Leave(slot=0, incarnation=0))
    assert bench.reconciler.compare()
    assert bench.counted == (2, {(0, 1)})


def test_manifest_keeps_partial_pushes_after_journal_truncation():
    bench = Bench()
    bench.push(1, 1)
    bench.push(2, 0, 1)
    parts = bench.parts()
    saved = bench.reconciler.manifest_part(parts)
    for shard in bench.shards:
        shard.history.journal.published(shard.history.version)
    bench.reconciler.published(parts)
    assert bench.reconciler.compare()
    assert bench.counted == (2, {(0, 1)})
    bench.coordinator.record.partial = Partial()
    bench.coordinator.record.partial.load(json.loads(json.dumps(saved)), 2)
    assert bench.reconciler.compare()
    assert bench.counted == (2, {(0, 1)})


def test_push_in_flight_at_the_cut_of_a_snapshot_is_not_counted_when_its_worker_leaves():
    bench = Bench()
    bench.push(1, 1)
    parts = bench.parts()
    bench.push(1, 0)
    bench.coordinator.leave(Leave(slot=0, incarnation=0))
    assert bench.reconciler.manifest_part(parts)["pushes"] == [[0, 0, 1, [Progress(0, -1, 2, 4)]]]
    assert bench.counted == (0, set())


def test_snapshot_is_delayed_once_for_unknown_pushes_of_a_lost_shard():
    bench = Bench()
    bench.push(1, 1)
    parts = bench.parts()
    bench.shards[1].history.journal.published(1)
    with pytest.raises(Unreachable, match="was lost"):
        bench.reconciler.manifest_part(parts)
    assert bench.reconciler.manifest_part(parts)["pushes"] == []


def test_journals_that_overflow_while_the_parts_are_written_do_not_delay_a_snapshot(monkeypatch):
    """The shards are copied one after the other: what was pushed between is looked up when all are written."""
    monkeypatch.setattr(journal, "MAX_JOURNAL", 8)
    bench = Bench()
    bench.push(1, 0, 1)
    copies = [bench.shards[0].copy()]
    bench.push(2, 0, 1)
    bench.push(3, 0, 1)
    copies.append(bench.shards[1].copy())
    for seq in range(4, 30):
        bench.push(seq, 0, 1)
    pushes = bench.reconciler.manifest_part(copies)["pushes"]
    assert pushes == [[0, 0, seq, [Progress(0, -1, 2 * seq, 2 * seq + 2)]] for seq in (2, 3)]


def test_one_lost_answer_does_not_throw_the_written_parts_away(monkeypatch):
    bench, calls = Bench(), []
    bench.push(1, 1)
    pushes = bench.other.pushes

    def lost_once(of):
        calls.append(of)
        if len(calls) == 1:
            raise Unreachable("timed out")
        return pushes(of)

    monkeypatch.setattr(bench.other, "pushes", lost_once)
    assert bench.reconciler.manifest_part(bench.parts())["pushes"] == [[0, 0, 1, [Progress(0, -1, 2, 4)]]]


def test_full_journal_is_compared_while_a_push_is_under_way():
    """The other shard has returned from its snapshot, because the journals are full."""
    bench = Bench(large=0, piece=4)
    shard = bench.shards[1]
    meta = PushMeta(samples=2, progress=(Progress(0, -1, 8, 10),))
    for seq in range(1, MAX_JOURNAL + 1):
        shard.history.record((0, 0), seq, meta)
    shard.pushing(0, 0, MAX_JOURNAL + 1, 0, meta, delta=True).step(aligned(4))
    assert not bench.reconciler.compare()


def test_unreachable_shard_leaves_the_count_unchanged():
    bench = Bench()
    bench.push(1, 1)
    bench.reconciler.compare(at_end=True)
    bench.other.down = True
    with pytest.raises(Unreachable, match="the shard is down"):
        bench.reconciler.compare(at_end=True)
    assert bench.counted == (2, {(0, 1)})


def test_partial_count_is_kept_when_the_shard_count_changes():
    first = Bench()
    first.push(1, 0)
    first.coordinator.leave(Leave(slot=0, incarnation=0))
    assert first.reconciler.compare()
    assert first.counted == (2, {(0, 1)})
    saved = first.save()
    for count in (3, 1, 2, 2):
        bench = Bench(count, saved)
        assert bench.counted == (2, {(0, 1)})
        assert bench.reconciler.compare()
        assert bench.counted == (2, {(0, 1)})
        with bench.shards[0].lock:
            bench.coordinator.rewind(saved)
        assert bench.reconciler.compare()
        assert bench.counted == (2, {(0, 1)})
        saved = bench.save()


def test_comparison_that_a_rollback_overtakes_counts_nothing(monkeypatch):
    """Its contents are of pushes that the rollback has undone."""
    bench = Bench()
    saved, copies = bench.save(), [shard.copy() for shard in bench.shards]
    bench.push(1, 1)
    bench.coordinator.leave(Leave(slot=0, incarnation=0))
    pushes, calls = bench.other.pushes, []

    def then_roll_back(of):
        answer = pushes(of)
        if not calls:
            with bench.shards[0].lock:
                bench.shards[0].roll_back(copies[0].model_copy(update={"generation": 1}))
                bench.coordinator.rewind(saved)
            bench.shards[1].roll_back(copies[1].model_copy(update={"generation": 1}))
        calls.append(of)
        return answer

    monkeypatch.setattr(bench.other, "pushes", then_roll_back)
    with pytest.raises(Unreachable, match="rolled back"):
        bench.reconciler.compare()
    assert bench.counted == (0, set())
    assert bench.reconciler.compare()
    assert bench.counted == (0, set())
