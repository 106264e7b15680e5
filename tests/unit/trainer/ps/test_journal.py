"""The journal of pushes, and which worker copies it lets a recovering shard adopt."""

from __future__ import annotations

import pytest

from shoal_trainer.ps import journal as journal_module
from shoal_trainer.ps.contents import Contents
from shoal_trainer.ps.journal import PushJournal
from shoal_trainer.ps.shard import State
from shoal_trainer.wire.messages import (
    AnswerMeta,
    Entry,
    Held,
    Journal,
    Progress,
    PushMeta,
)
from tests.unit.trainer.ps.shards import MODEL, Clock, crashed, grad, pull_from, push_to, ready


def test_answer_lists_pushes_that_worker_and_snapshot_lack() -> None:
    shard = ready()

    def push(slot: int, seq: int, base: int) -> Journal:
        meta = PushMeta(
            samples=1, progress=(Progress(0, -1, shard.history.version, shard.history.version + 1),)
        )
        return push_to(shard, slot, 0, seq, base, meta, grad(0.0)).meta.journal

    first = push(0, 1, 0)
    assert first == Journal(0, (Entry(1, 0, 0, 1, 1, 0, -1, 0, 1),))
    push(1, 1, 0)
    second = push(0, 2, 1)
    assert [entry.version for entry in second.entries] == [2, 3]
    worker = PushJournal()
    for answer in (first, second):
        worker.follow(answer)
    assert [entry.version for entry in worker.since(-1).entries] == [1, 2, 3]
    shard.history.journal.published(2)
    third = push(0, 3, 3)
    assert (third.floor, [entry.version for entry in third.entries]) == (2, [4])
    whole = pull_from(shard, 0, grad(0.0)).meta.journal
    worker.follow(third)
    assert worker.since(-1) == whole
    assert [entry.version for entry in whole.entries] == [3, 4]


def test_copy_with_journal_starting_after_snapshot_is_not_adopted() -> None:
    old, copy, new = crashed(10, 6, Clock())
    new.offer(
        0,
        0,
        copy.copy(),
        old.history.version,
        AnswerMeta(old.history.samples, 1, dict(old.history.applied), Journal(7)),
    )
    assert new.history.version == 6


def test_copy_that_diverged_before_the_snapshot_is_not_adopted() -> None:
    """Its version 6 holds other pushes than the snapshot's version 6."""
    old, copy, new = crashed(10, 6, Clock())
    other = tuple(Entry(version, 3, 0, version, 1, 0, -1, 0, 1) for version in range(1, 11))
    meta = AnswerMeta(old.history.samples, 1, dict(old.history.applied), Journal(0, other))
    new.offer(0, 0, copy.copy(), old.history.version, meta)
    assert new.history.version == 6
    assert new.history.contents.spans() == ((0, 0, 1, 7),)
    meta = pull_from(old, 0, copy).meta
    new.offer(0, 0, copy, old.history.version, meta)
    assert new.history.version == 10
    assert new.history.contents.spans() == ((0, 0, 1, 11),)


def test_late_copy_is_ignored_by_a_ready_shard() -> None:
    clock = Clock()
    old, copy, new = crashed(10, 6, clock)
    new.hello(1, 0, MODEL)
    clock.now += 10.0
    assert new.state is State.READY
    assert not new.hello(0, 0, MODEL, Held(version=old.history.version)).wants_copy
    new.offer(0, 0, copy, old.history.version, pull_from(old, 0, copy).meta)
    assert (new.history.version, new.history.contents.spans()) == (6, ((0, 0, 1, 7),))


def test_late_copy_is_adopted_by_an_empty_shard() -> None:
    clock = Clock()
    old, copy, new = crashed(10, 0, clock)
    new.hello(1, 0, MODEL)
    clock.now += 10.0
    assert new.state is State.RECOVERING
    assert new.hello(0, 0, MODEL, Held(version=old.history.version)).wants_copy
    new.offer(0, 0, copy, old.history.version, pull_from(old, 0, copy).meta)
    assert (new.state, new.history.version, new.history.contents.spans()) == (
        State.READY,
        10,
        ((0, 0, 1, 11),),
    )


def test_a_push_with_several_marks_counts_its_steps_once() -> None:
    journal = PushJournal()
    marks = (Progress(0, -1, 0, 2), Progress(0, -1, 8, 10))
    journal.add(1, (0, 0, 1), PushMeta(samples=4, steps=3, progress=marks))
    assert [entry.steps for entry in journal.since(-1).entries] == [3, 0]


def test_entries_that_a_worker_knows_are_not_added_again() -> None:
    """An answer to a resent push lists what the worker may have already."""
    server, worker = PushJournal(), PushJournal()
    for version in (1, 2, 3):
        server.add(version, (0, 0, version), PushMeta(samples=1))
        worker.follow(server.since(-1))
    assert worker.since(-1) == server.since(-1)


def test_journal_that_overflows_is_told_once_and_ends_with_the_next_snapshot(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal_module, "MAX_JOURNAL", 8)
    monkeypatch.setattr(journal_module, "NEARLY_FULL", 6)
    shard, calls = ready(), []
    shard.history.journal_fills = lambda: calls.append(shard.history.version)

    def accepted() -> bool:
        """Whether a successor that was restored from the last snapshot would adopt a worker's copy."""
        restored = PushJournal(shard.history.journal.snapshot)
        return restored.accepts(shard.history.journal.since(-1), Contents())

    def push(times: int) -> None:
        for _ in range(times):
            seq = shard.history.version + 1
            push_to(shard, 0, 0, seq, seq - 1, PushMeta(1), grad(0.0))

    push(8)
    assert calls == [6]
    assert accepted()
    assert not caplog.records
    push(3)
    assert not accepted()
    assert ["8 ranges" in record.getMessage() for record in caplog.records] == [True]
    shard.history.journal.published(shard.history.version)
    push(8)
    assert accepted()
    assert calls == [6, 17]
    assert len(caplog.records) == 1


def test_what_a_copy_for_a_snapshot_had_is_kept_until_that_is_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journal_module, "MAX_JOURNAL", 4)
    journal = PushJournal()

    def add(versions: range) -> None:
        for version in versions:
            journal.add(version, (0, 0, version), PushMeta(samples=1))

    def recorded() -> list[int]:
        return [entry.version for entry in journal.recorded()]

    add(range(1, 7))
    journal.copied(6)
    add(range(7, 21))
    assert recorded() == [3, 4, 5, 6, 17, 18, 19, 20]
    assert [entry.version for entry in journal.since(-1).entries] == [17, 18, 19, 20]
    journal.published(6)
    assert recorded() == [17, 18, 19, 20]
    journal.copied(20)
    add(range(21, 23))
    journal.copied(22)  # that of version 20 was not written
    add(range(23, 24))
    assert recorded() == [19, 20, 21, 22, 23]
