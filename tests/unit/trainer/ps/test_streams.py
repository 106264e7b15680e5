"""Any order of pieces of pushes, pulls and snapshots: what an answer says of its parameters is true."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dev.night import examples
from shoal_trainer.errors import Fenced, Unreachable
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.contents import KEPT_INCARNATIONS
from shoal_trainer.ps.history import History
from shoal_trainer.ps.shard import Answer, ShardCopy, ShardStore
from shoal_trainer.ps.streams import Stream
from shoal_trainer.ps.update_rules import filled_by
from shoal_trainer.ps.walks import Begun, Walks
from shoal_trainer.wire.messages import AnswerMeta, Held, ModelSpec, OptimizerConfig, Progress, PushMeta
from tests.unit.trainer.ps.shards import Clock, blocked, grad, held_up, push_to

REENTRANT = threading.RLock
PIECE, PIECES, WORKERS = 64, 4, 3
SIZE = PIECE * PIECES - 10  # the last piece is shorter
MODEL = ModelSpec(
    fingerprint="f" * 64, parameters=SIZE, optimizer=OptimizerConfig(name="delta", batch_size=1)
)
Content = dict[tuple[int, int], int]
"""(slot, sequence number) -> how many pieces."""


def large(epoch: int = 0, clock: Clock | None = None) -> ShardStore:
    return ShardStore(0, 1, epoch, boot=1 + epoch, clock=clock or Clock(), large=0, piece=PIECE)


def started(clock: Clock | None = None) -> ShardStore:
    shard = large(clock=clock)
    shard.hello(0, 0, MODEL)
    shard.offer(0, 0, grad(0.0, SIZE))
    return shard


def vector(slot: int, seq: int) -> np.ndarray:
    """The update of a push: sums of them tell which ones are in it."""
    return grad(float(1 << (slot * 7 + seq - 1)), SIZE)


def content(values: np.ndarray) -> Content:
    """Which pushes are in how many of the first pieces; fails if one is in a later piece and not in an earlier one."""
    found: Content = {}
    for piece in range(PIECES):
        bits = int(values[piece * PIECE])
        assert (values[piece * PIECE : (piece + 1) * PIECE] == bits).all()
        for bit in (bit for bit in range(21) if bits >> bit & 1):
            push = bit // 7, bit % 7 + 1
            assert found.get(push, 0) == piece, f"{push} is in piece {piece}, not in all before"
            found[push] = piece + 1
    return found


def stated(meta: AnswerMeta, whole: set[tuple[int, int]]) -> Content:
    parts = {(push.slot, push.seq): push.pieces for push in meta.begun}
    return dict.fromkeys(whole, PIECES) | parts


def meta_of(seq: int) -> PushMeta:
    return PushMeta(samples=1, progress=(Progress(0, -1, seq, seq + 1),))


class Interleaved(RuleBasedStateMachine):
    """Streams of three workers that push and pull, break, and are resent; snapshots between their pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.shard = started(self.clock)
        self.streams: dict[int, tuple[Stream[Any], np.ndarray, bool]] = {}
        self.seqs = dict.fromkeys(range(WORKERS), 0)
        self.unanswered: set[int] = set()
        self.copy: ShardCopy | None = None

    def whole(self) -> set[tuple[int, int]]:
        return {(slot, seq) for slot, _, seq in self.shard.history.contents}

    @rule(slot=st.integers(0, WORKERS - 1), pull=st.booleans())
    def begin(self, slot: int, pull: bool) -> None:
        if slot in self.streams:
            return
        if pull:
            self.streams[slot] = self.shard.pulling(slot, 0), grad(0.0, SIZE), False
            return
        if slot not in self.unanswered:
            if self.seqs[slot] == 7:
                return
            self.seqs[slot] += 1
            self.unanswered.add(slot)
        seq = self.seqs[slot]
        stream = self.shard.pushing(slot, 0, seq, self.shard.history.version, meta_of(seq), delta=True)
        self.streams[slot] = stream, vector(slot, seq), True

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), patient=st.booleans())
    def step(self, data: st.DataObject, patient: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.streams)))
        stream, io, pushes = self.streams[slot]
        if patient and held_up(stream):
            return
        stream.step(io, 0)
        if stream._walk.position < PIECES:
            return
        del self.streams[slot]
        stream.close()
        self.unanswered -= {slot} if pushes else set()
        if not stream.result.meta.torn:
            assert content(io) == stated(stream.result.meta, self.whole())

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def break_off(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.streams)))
        stream, _, _ = self.streams.pop(slot)
        stream.close()

    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        def between() -> None:
            for slot in sorted(self.streams):
                if data.draw(st.booleans()):
                    stream, io, _ = self.streams[slot]
                    if not blocked(stream) and stream._walk.position < PIECES - 1:
                        stream.step(io, 0)

        self.copy = copy = self.shard.copy(between)
        assert copy is not None
        parts = {(push.slot, push.seq): push.pieces for push in copy.begun}
        whole = {(slot, seq) for slot, _, first, stop in copy.pushes for seq in range(first, stop)}
        assert content(copy.arrays["parameters"]) == dict.fromkeys(whole, PIECES) | parts
        assert copy.version == len(whole)

    @precondition(lambda self: self.copy is not None)
    @rule()
    def restart(self) -> None:
        """From the snapshot, without copies: what it lacks is lost, and sent again as far as it is unanswered."""
        for stream, _, _ in self.streams.values():
            stream.close()
        self.streams.clear()
        self.shard = large(self.shard.epoch + 1, self.clock)
        assert self.copy is not None
        self.shard.restore(self.copy)
        self.shard.hello(0, 0, MODEL)
        self.clock.now += 100
        self.seqs = {slot: max(self.shard.history.applied.get((slot, 0), 0), 0) for slot in range(WORKERS)}
        begun = {push.slot: push.seq for push in self.shard.history.begun() if push.closed < 0}
        self.unanswered = set(begun)
        self.seqs |= begun

    @invariant()
    def parameters_are_what_the_shard_says(self) -> None:
        parts = {(push.slot, push.seq): push.pieces for push in self.shard.history.begun()}
        assert self.shard.model is not None
        assert content(self.shard.model.parameters) == dict.fromkeys(self.whole(), PIECES) | parts


TestInterleaved = Interleaved.TestCase
TestInterleaved.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


def walked(stream: Stream[Any], io: np.ndarray, pieces: int) -> None:
    for _ in range(pieces):
        stream.step(io, 0)


def test_worker_that_vanishes_leaves_a_part_of_its_push_and_may_continue_it() -> None:
    shard = started()
    stream = shard.pushing(0, 0, 1, 0, meta_of(1), delta=True)
    walked(stream, vector(0, 1), 2)
    stream.close()
    assert (shard.history.version, shard.history.contents.spans(), shard.history.samples) == (0, (), 0)
    assert [(push.seq, push.pieces, push.progress) for push in shard.history.begun()] == [
        (1, 2, meta_of(1).progress)
    ]
    answer = push_to(shard, 0, 0, 1, 0, meta_of(1), io := vector(0, 1), delta=True)
    assert content(io) == {(0, 1): PIECES}
    assert (answer.version, answer.meta.begun, shard.history.begun()) == (1, (), ())


def test_workers_that_were_lost_amid_a_push_are_forgotten_and_cost_an_answer_nothing() -> None:
    """Of 10,000 of them, each answer took 2 ms of the shard's lock."""
    history, asked, slots = History(), list[Begun](), 20
    history.in_pieces(PIECES)
    for number in range(10_000):
        slot, incarnation = number % slots, number // slots
        push = history.begin((slot, incarnation), 1, meta_of(1))
        assert push is not None
        history.walks.begun[push.worker], push.pieces = push, 1
        history.version = number
        history.begin((slot, incarnation + 1), 1, meta_of(1))
    assert len(history.begun()) == slots * KEPT_INCARNATIONS

    class Missing(dict[Begun, int]):
        def get(self, push: Begun, pieces: Any = None) -> Any:
            asked.append(push)
            return super().get(push, pieces)

    walk = history.walks.begin()
    walk.missing = Missing()
    assert [push.closed for push in history.begun(walk, 9_998)] == [9_998, 9_999]
    assert len(asked) == 2


def test_workers_that_were_lost_amid_a_push_cost_the_next_one_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 5,000 of them, each push took 0.3 ms of the shard's lock."""
    history, slots = History(), 500
    history.in_pieces(PIECES)
    for slot in range(slots):
        push = history.begin((slot, 0), 5, meta_of(5))
        assert push is not None
        history.walks.begun[push.worker], push.pieces = push, 1
        history.begin((slot, 1), 1, meta_of(1))

    class Unread(dict[Begun, int]):
        def __iter__(self) -> Any:
            raise AssertionError("all of them are looked at")

    history._closed = Unread(history._closed)
    assert history.begin((slots, 0), 1, meta_of(1)) is not None
    with pytest.raises(Unreachable, match="later push than 5"):
        history.begin((0, 0), 5, meta_of(5))
    assert history.begin((0, 0), 6, meta_of(6)) is not None
    history._set_begun(history.begun())
    with pytest.raises(Unreachable, match="later push than 5"):
        history.begin((0, 0), 5, meta_of(5))


def test_part_of_a_push_is_given_up_when_its_worker_sends_the_next_one() -> None:
    shard = started()
    stream = shard.pushing(0, 0, 1, 0, meta_of(1), delta=True)
    walked(stream, vector(0, 1), 1)
    stream.close()
    push_to(shard, 0, 0, 2, 0, meta_of(2), vector(0, 2), delta=True)
    assert [(push.seq, push.pieces, push.closed) for push in shard.history.begun()] == [(1, 1, 0)]
    with pytest.raises(Unreachable, match="later push"):
        large_again = shard.pushing(0, 1, 5, 0, meta_of(5), delta=True)
        walked(large_again, vector(0, 5), 1)
        shard.pushing(0, 1, 4, 0, meta_of(4), delta=True)


def test_parts_of_pushes_of_workers_that_were_refused_are_told_until_the_next_snapshot() -> None:
    """Else each answer of a job that was scaled down names them to its end, and each piece looks at all of them."""
    shard = started()
    for slot in (1, 2, 3):
        shard.workers.connect(slot, 0)
        stream = shard.pushing(slot, 0, 1, 0, meta_of(1), delta=True)
        walked(stream, vector(slot % 3, slot), 1)
        if slot < 3:
            stream.close()  # that of slot 3 does not know yet that its worker was refused
    shard.workers.fence(1, 1)
    shard.workers.leave(2, 0)
    shard.workers.fence(3, 1)
    push_to(shard, 0, 0, 2, 0, meta_of(2), vector(0, 2), delta=True)
    copy = shard.copy()
    assert copy is not None
    assert [(push.slot, push.closed) for push in copy.begun] == [(1, 1), (2, 1), (3, -1)]
    push_to(shard, 0, 0, 3, 1, meta_of(3), vector(0, 3), delta=True)
    shard.history.journal.published(2)
    answer = push_to(shard, 0, 0, 4, 2, meta_of(4), vector(0, 4), delta=True)
    assert [push.slot for push in answer.meta.begun] == [3]
    assert [push.worker for push in shard.history.walks.begun.values()] == [(3, 0)]


def test_late_duplicate_of_a_push_that_was_given_up_is_refused() -> None:
    shard = started()
    first = shard.pushing(0, 0, 1, 0, meta_of(1), delta=True)
    walked(first, vector(0, 1), 1)
    first.close()
    shard.pushing(0, 0, 2, 0, meta_of(2), delta=True).close()  # nothing of it arrives
    with pytest.raises(Unreachable, match="later push"):
        shard.pushing(0, 0, 1, 0, meta_of(1), delta=True)


def test_worker_is_fenced_in_the_middle_of_its_push() -> None:
    shard = started()
    stream = shard.pushing(0, 0, 1, 0, meta_of(1), delta=True)
    walked(stream, vector(0, 1), PIECES - 1)
    shard.workers.fence(0, 1)
    with pytest.raises(Fenced):
        stream.step(vector(0, 1), 0)
    assert shard.history.version == 0


def test_push_of_a_fenced_worker_does_not_begin() -> None:
    shard = started()
    shard.workers.fence(0, 1)
    with pytest.raises(Fenced):
        shard.pushing(0, 0, 1, 0, meta_of(1), delta=True)
    assert not shard.history.walks.open


def test_incarnation_of_a_part_fences_older_ones_after_a_restart() -> None:
    shard = started()
    stream = shard.pushing(0, 3, 1, 0, meta_of(1), delta=True)
    walked(stream, vector(0, 1), 1)
    copy = shard.copy()
    assert copy is not None
    again = large(1)
    again.restore(copy)
    with pytest.raises(Fenced):
        again.hello(0, 2, MODEL)


def test_shard_that_adopts_a_copy_knows_the_part_of_a_push_in_it() -> None:
    shard = started()
    snapshot = shard.copy()
    stream = shard.pushing(0, 0, 1, 0, meta_of(1), delta=True)
    walked(stream, vector(0, 1), 2)
    answer = push_to(shard, 1, 0, 1, 0, meta_of(1), io := vector(1, 1), delta=True)
    again = adopted(snapshot, answer, io)
    assert [(push.push, push.pieces) for push in again.history.walks.begun.values()] == [((0, 0, 1), 2)]
    push_to(again, 0, 0, 1, 0, meta_of(1), io := vector(0, 1), delta=True)
    assert content(io) == {(0, 1): PIECES, (1, 1): PIECES}


def test_shard_that_adopts_a_copy_knows_the_parts_that_were_given_up_before_its_snapshot() -> None:
    shard = started()
    stream = shard.pushing(0, 0, 1, 0, meta_of(1), delta=True)
    walked(stream, vector(0, 1), 2)
    stream.close()
    push_to(shard, 0, 0, 2, 0, meta_of(2), vector(0, 2), delta=True)
    snapshot = shard.copy()
    shard.history.journal.published(1)
    answer = push_to(shard, 1, 0, 1, 1, meta_of(1), io := vector(1, 1), delta=True)
    assert answer.meta.begun == ()  # every shard that could adopt it has that snapshot
    again = adopted(snapshot, answer, io)
    assert [(push.slot, push.seq, push.pieces, push.closed) for push in again.history.begun()] == [
        (0, 1, 2, 0)
    ]


def adopted(snapshot: ShardCopy | None, answer: Answer, values: np.ndarray) -> ShardStore:
    """A shard that was restored from a snapshot and has adopted the copy of worker 1."""
    assert snapshot is not None
    shard = large(1, clock := Clock())
    shard.restore(snapshot)
    assert shard.hello(1, 0, MODEL, Held(version=answer.version)).wants_copy
    shard.offer(1, 0, values.copy(), answer.version, answer.meta)
    clock.now += 1.0  # others may have newer copies
    shard.hello(0, 0, MODEL)
    assert shard.history.version == answer.version
    return shard


def test_rollback_ends_the_streams_and_their_parts() -> None:
    shard = started()
    copy = shard.copy()
    assert copy is not None
    stream = shard.pushing(0, 0, 1, 0, meta_of(1), delta=True)
    walked(stream, vector(0, 1), 2)
    shard.roll_back(copy)
    with pytest.raises(Unreachable):
        stream.step(vector(0, 1), 0)
    stream.close()
    assert shard.history.begun() == ()
    assert not shard.copy().arrays["parameters"].any()  # type: ignore[union-attr]


def test_worker_that_is_greeted_while_a_rollback_waits_is_refused_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was told the generation of before, and would keep its steps and leases of that."""
    shard, greeted = started(), []
    copy = shard.copy()
    assert copy is not None

    def waits(_: object) -> bool:
        greeted.append(shard.hello(0, 0, MODEL))
        return True

    monkeypatch.setattr(shard._moved, "wait_for", waits)
    shard.roll_back(copy.model_copy(update={"generation": 1}))
    assert greeted[0].generation == 0
    with pytest.raises(Unreachable):
        shard.pulling(0, 0, boot=greeted[0].boot)
    again = shard.hello(0, 0, MODEL)
    assert again.generation == 1
    shard.pulling(0, 0, boot=again.boot).close()


def test_worker_learns_which_of_its_pushes_rollbacks_have_undone() -> None:
    shard = started()
    copy = shard.copy()
    assert copy is not None
    for generation in (1, 2):
        shard.run(shard.pushing(0, 0, generation, 0, meta_of(1), delta=True), vector(0, 1))
        shard.roll_back(copy.model_copy(update={"generation": generation}))
        assert shard.hello(0, 0, MODEL).last_seq == generation
        assert shard.history.applied == {}
    shard.roll_back(copy.model_copy(update={"generation": 3}))
    assert shard.hello(0, 0, MODEL).last_seq == 2


def test_push_that_begins_while_a_walk_works_on_its_first_piece_is_behind_it() -> None:
    walks = Walks(2)
    walks.take(reader := walks.begin())
    writer = walks.begin(push := Begun((0, 0), 1))
    assert walks.busy(writer)
    walks.done(reader)
    walks.take(writer)
    walks.done(writer)
    walks.take(reader)
    assert reader.missing == {push: 0}


def test_slow_answer_is_torn_only_by_a_push_that_has_waited() -> None:
    shard = started()
    slow, io = shard.pulling(1, 0), grad(0.0, SIZE)
    walked(slow, io, 1)
    fast = shard.pushing(0, 0, 1, 0, meta_of(1), delta=True)
    walked(fast, vector(0, 1), 1)
    assert held_up(fast)
    walked(slow, io, 1)
    assert not held_up(fast)
    walked(fast, vector(0, 1), PIECES - 1)
    walked(slow, io, PIECES - 2)
    assert slow.result.meta.torn
    assert not fast.result.meta.torn
    shard.hello(1, 0, MODEL)


def test_lock_is_held_for_one_piece_at_most_while_a_snapshot_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shard, held, free = started(), [], []
    work = Stream._do

    def records(stream: Stream[object], io: object, writes: bool) -> None:
        held.append(shard.lock._is_owned())  # type: ignore[attr-defined]
        work(stream, io, writes)  # type: ignore[arg-type]

    def other_thread() -> None:
        with ThreadPoolExecutor(1) as pool:
            free.append(pool.submit(shard.report).result(10).ready)

    monkeypatch.setattr(Stream, "_do", records)
    assert shard.copy(other_thread) is not None
    assert held == [False] * (PIECES - 1) + [True]
    assert free == [True] * (PIECES - 1)


def test_pushes_of_two_workers_are_applied_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On different pieces: else a shard would use one of its processors, however many workers push."""
    shard, both = started(), threading.Barrier(2)
    ahead, behind = (shard.pushing(slot, 0, 1, 0, meta_of(1), delta=True) for slot in range(2))
    walked(ahead, vector(0, 1), 1)
    assert shard.model is not None
    add = shard.model.add

    def meets(*arguments: Any) -> bool:
        both.wait(10)
        return add(*arguments)

    monkeypatch.setattr(shard.model, "add", meets)
    with ThreadPoolExecutor(2) as pool:
        steps = [
            pool.submit(walked, stream, vector(slot, 1), 1) for slot, stream in enumerate((ahead, behind))
        ]
    assert [step.exception() for step in steps] == [None, None]
    assert [(push.slot, push.pieces) for push in shard.history.begun()] == [(0, 2), (1, 1)]


class Timed:
    """A lock that tells for how much processor time it was held at most."""

    def __init__(self) -> None:
        self._lock = REENTRANT()
        self._depth, self._since, self.longest = 0, 0.0, 0.0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = self._lock.acquire(blocking, timeout)
        if taken and not self._depth:
            self._since = time.thread_time()
        self._depth += taken
        return taken

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self.longest = max(self.longest, time.thread_time() - self._since)
        self._lock.release()

    def _is_owned(self) -> bool:
        return self._lock._is_owned()  # type: ignore[attr-defined]

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@pytest.mark.parametrize(
    "size", [40_000_000, pytest.param(500_000_000, marks=pytest.mark.nightly)], ids=["40 M", "500 M"]
)
def test_a_snapshot_holds_the_lock_for_20_ms_at_most_whatever_its_size(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(threading, "RLock", Timed)
        shard = ShardStore(0, 1, 0)
    shard.hello(0, 0, MODEL.model_copy(update={"parameters": size}))
    shard.offer(0, 0, aligned(size))
    lock: Any = shard.lock
    lock.longest = 0.0
    assert shard.copy() is not None
    assert 0.0 < lock.longest <= 0.02


def test_no_push_overtakes_a_snapshot() -> None:
    shard, seen = started(), []
    stream, waiting = shard.pushing(0, 0, 1, 0, meta_of(1), delta=True), threading.Event()

    def push() -> None:
        waiting.set()
        walked(stream, vector(0, 1), PIECES - 1)

    pusher = threading.Thread(target=push)

    def between() -> None:
        if not waiting.is_set():
            stream.step(vector(0, 1), 0)  # the copy has passed this piece
            assert blocked(stream)
            pusher.start()
            waiting.wait(10)
        seen.append(shard.history.version)

    copy = shard.copy(between)
    pusher.join(10)
    assert copy is not None
    assert seen == [0] * (PIECES - 1)
    assert (copy.version, shard.history.version) == (0, 1)
    assert not copy.arrays["parameters"].any()


def test_answers_of_streams_follow_the_optimizer_bit_for_bit() -> None:
    """Two pushes that alternate piece by piece have the result of one after the other."""
    config = OptimizerConfig(name="adam", learning_rate=0.1, batch_size=1)
    model = MODEL.model_copy(update={"optimizer": config, "parameters": SIZE - 5, "statistics": 5})
    answers = []
    for shard in (ShardStore(0, 1, 0, boot=1), large()):
        shard.hello(0, 0, model)
        shard.offer(0, 0, np.linspace(-1, 1, SIZE, dtype=np.float32))
        ios = [grad(0.5, SIZE), grad(-2.0, SIZE)]
        if shard.piece:
            streams = [shard.pushing(slot, 0, 1, 0, PushMeta(samples=1), ahead=1.0) for slot in range(2)]
            for _ in range(PIECES):
                for stream, io in zip(streams, ios, strict=True):
                    stream.step(io, 0)
        else:
            for slot, io in enumerate(ios):
                push_to(shard, slot, 0, 1, 0, PushMeta(samples=1), io, ahead=1.0)
        assert shard.model is not None
        answers.append([*(io[: SIZE - 5] for io in ios), *shard.model.arrays().values()])
    for one, other in zip(*answers, strict=True):
        np.testing.assert_array_equal(one[: SIZE - 5], other[: SIZE - 5])


@pytest.mark.parametrize("overlaps", [False, True])
def test_interrupted_push_is_weighed_once(overlaps: bool) -> None:
    """Also if workers have joined in between, and if the server notices the broken connection later."""
    shard = large()
    model = MODEL.model_copy(
        update={"optimizer": OptimizerConfig(name="adam", learning_rate=0.1, batch_size=1)}
    )
    shard.hello(0, 0, model)
    shard.offer(0, 0, grad(0.0, SIZE))
    first, gradient = shard.pushing(0, 0, 1, 0, meta_of(1)), grad(1.0, SIZE)
    for low, high in list(first.spans())[:2]:
        first.step(gradient[low:high])
    if not overlaps:
        first.close()
    shard.workers.set_live(8)
    push_to(shard, 0, 0, 1, 0, meta_of(1), grad(1.0, SIZE))
    first.close()
    assert shard.history.version == 1
    assert shard.model is not None
    assert shard.model.updates == 1
    assert len(set(shard.model.parameters.tolist())) == 1


def test_snapshot_counts_no_step_of_a_push_that_began_behind_it() -> None:
    """Nothing of such a gradient is in the copy, so its step of the optimizer is not either."""
    shard = large()
    config = OptimizerConfig(name="adam", learning_rate=0.1, batch_size=1)
    shard.hello(0, 0, MODEL.model_copy(update={"optimizer": config}))
    shard.offer(0, 0, grad(0.0, SIZE))
    push_to(shard, 0, 0, 1, 0, meta_of(1), grad(1.0, SIZE))
    before = shard.pushing(0, 0, 2, 1, meta_of(2))
    before.step(grad(1.0, SIZE), 0)
    behind = shard.pushing(1, 0, 1, 1, meta_of(1))
    pieces = iter(range(PIECES))

    def between() -> None:
        if next(pieces) == 1:
            behind.step(grad(1.0, SIZE), 0)

    copy = shard.copy(between)
    assert copy is not None
    assert [(push.slot, push.pieces) for push in copy.begun] == [(0, 1)]
    assert shard.model is not None
    assert (copy.updates, shard.model.updates) == (2, 3)
    assert copy.filled is not None
    assert filled_by(config.beta_1, 1) < copy.filled <= filled_by(config.beta_1, 2) < shard.model.filled


def test_staleness_of_a_slow_push_is_that_of_its_first_piece() -> None:
    """Its statistics would move by less in the pieces that other pushes overtake."""
    shard = large()
    spec = MODEL.model_copy(
        update={
            "parameters": PIECE, "statistics": SIZE - PIECE,
            "optimizer": OptimizerConfig(name="sgd", learning_rate=0.1, batch_size=1),
        }
    )  # fmt: skip
    shard.hello(0, 0, spec)
    shard.offer(0, 0, grad(0.0, SIZE))
    zero, moved = grad(0.0, SIZE), grad(0.0, SIZE)
    moved[PIECE:] = 1.0
    slow = shard.pushing(0, 0, 1, 0, meta_of(1))
    for number, (low, high) in enumerate(slow.spans()):
        slow.step(moved[low:high])
        if number < PIECES - 1:
            push_to(shard, 1, 0, number + 1, shard.history.version, meta_of(number + 1), zero.copy())
    assert shard.model is not None
    assert len(set(shard.model.parameters[PIECE:].tolist())) == 1
