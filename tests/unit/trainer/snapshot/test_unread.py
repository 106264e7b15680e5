"""A file of a snapshot that the storage has, and does not give: a bad sector, a mode, an object that was archived."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal_trainer.coordinator.follower import Follower
from shoal_trainer.coordinator.protocol import RollBackShard
from shoal_trainer.errors import SnapshotError, TrainerError, Unreachable
from shoal_trainer.snapshot import shard_file
from shoal_trainer.snapshot.initial import load_initial
from shoal_trainer.snapshot.manifest import Manifest
from shoal_trainer.snapshot.storage import LocalStorage
from shoal_trainer.snapshot.store import SnapshotStore
from shoal_trainer.snapshot.unread import UNREAD_SECONDS
from tests.unit.trainer.ps.shards import Clock
from tests.unit.trainer.snapshot.saving import Alive, save, shards


class Worn(LocalStorage):
    """The files that `refuses` says cannot be read, of some only the content; all is written."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.refuses: Callable[[str], bool] = lambda _: False
        self.waits: Callable[[], None] = lambda: None
        """Until a read has failed."""

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        if self.refuses(name):
            self.waits()
            raise Unreachable(f"cannot read {name}: {os.strerror(errno.EIO)}")
        with super().open(name) as handle:
            yield handle


class Bench:
    """Three snapshots, and a process that loads them every ten seconds."""

    def __init__(self, folder: Path) -> None:
        self.storage, self.clock = Worn(folder), Clock()
        self.store, trained = SnapshotStore(self.storage, self.clock), shards(1)
        self.saved = [save(self.store, trained) for _ in range(3)]

    def part(self, number: int) -> str:
        return self.saved[number - 1].shards[0].file

    def tries(self, seconds: float, load: Callable[[], Manifest | None] | None = None) -> Manifest | None:
        """What is loaded within so long."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            with contextlib.suppress(Unreachable):
                return load() if load else self.newest()
            self.clock.now += 10.0
        return None

    def newest(self) -> Manifest | None:
        found = self.store.load_newest(0, 1)
        return found and found[0]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def without_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("damaged", [False, True])
def test_a_snapshot_that_was_unreadable_for_a_while_is_kept(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    """Two could not be read, until an older one was: the newer of them is loaded, and the other is as good.

    Unless that has been read, and is damaged.
    """
    bench.saved.append(save(bench.store, shards(1)))
    away, read = {bench.part(3), bench.part(4)}, bench.store._read_part
    if damaged:
        (tmp_path / "snapshots" / bench.part(3)).write_bytes(b"damaged")
        away.remove(bench.part(3))

    def reads(part: Any, *rest: Any) -> Any:
        if part.file == bench.part(2):
            away.clear()
        return read(part, *rest)

    monkeypatch.setattr(bench.store, "_read_part", reads)
    bench.storage.refuses = lambda name: name.removeprefix("snapshots/") in away
    found = bench.tries(400)
    assert found is not None
    assert found.number == 4
    save(bench.store, shards(1))
    bench.store.prune(3, 0)
    assert [manifest.number for manifest in bench.store.manifests()] == ([5, 4, 2] if damaged else [5, 4, 3])


@pytest.mark.parametrize("file", ["part", "manifest"])
def test_older_snapshot_is_taken_where_a_file_of_the_newest_alone_cannot_be_read(
    bench: Bench, caplog: pytest.LogCaptureFixture, file: str
) -> None:
    name = bench.part(3) if file == "part" else "manifest-0000000003.json"
    bench.storage.refuses = lambda each: each.endswith(name)
    assert bench.tries(UNREAD_SECONDS) is None
    assert caplog.records == []
    assert bench.tries(1) == bench.saved[1]
    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert f"{name} alone cannot be read" in record.getMessage()
    assert "Input/output error" in record.getMessage()
    assert "skipped" in record.getMessage()
    bench.storage.refuses = lambda _: False
    assert bench.newest() == bench.saved[2]


@pytest.mark.parametrize("what", ["snapshots/manifest-", ".shard-", ""])
def test_outage_of_the_storage_is_waited_for(
    bench: Bench, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """Also one of its large files only: no older snapshot can be read then, and the newest comes when it is over."""
    bench.storage.refuses = lambda each: what in each
    assert bench.tries(5 * UNREAD_SECONDS) is None
    assert len(caplog.records) <= 3, "each once"
    bench.storage.refuses = lambda _: False
    assert bench.newest() == bench.saved[2]


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(timeout=st.sampled_from([0.05, 5.0, 30.0]), seconds=st.floats(100, 400))
def test_newest_comes_whenever_an_outage_of_all_content_ends(
    bench: Bench, timeout: float, seconds: float
) -> None:
    """Also while what is newer was just skipped: each read fails after its timeout; lists and sizes work."""
    bench.store = SnapshotStore(bench.storage, bench.clock)
    ends = bench.clock.now + seconds

    def fail() -> None:
        bench.clock.now += timeout

    bench.storage.refuses, bench.storage.waits = lambda _: bench.clock.now < ends, fail
    assert bench.tries(seconds + 100) == bench.saved[2]


@pytest.mark.parametrize("whole", [1, 2])
def test_newest_that_can_be_read_is_taken_if_those_above_it_still_fail(bench: Bench, whole: int) -> None:
    """After each of them had its minute."""
    bench.storage.refuses = lambda each: any(each.endswith(bench.part(n)) for n in range(whole + 1, 4))
    assert bench.tries(3 * UNREAD_SECONDS) == bench.saved[whole - 1]
    bench.storage.refuses = lambda _: False
    assert bench.newest() == bench.saved[2]


def test_failures_far_apart_are_no_unreadable_file(bench: Bench) -> None:
    """As of a job that is rolled back once an hour."""
    bench.storage.refuses = lambda each: each.endswith(bench.part(3))
    for _ in range(9):
        with pytest.raises(Unreachable):
            bench.newest()
        bench.clock.now += UNREAD_SECONDS + 1


def test_manifest_that_cannot_be_read_keeps_no_later_snapshot_from_being_saved(bench: Bench) -> None:
    bench.storage.refuses = lambda each: each.endswith("manifest-0000000003.json")
    assert bench.tries(UNREAD_SECONDS + 10) == bench.saved[1]
    for number in (4, 5, 6):
        bench.clock.now += 600.0
        assert save(bench.store, shards(1)).number == number
        bench.store.prune(3, 0)
    assert [manifest.number for manifest in bench.store.manifests()] == [6, 5, 4]


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(course=st.lists(st.tuples(st.booleans(), st.integers(1, 30)), min_size=1, max_size=20))
def test_file_that_is_read_now_and_then_is_waited_for(bench: Bench, course: list[tuple[bool, int]]) -> None:
    """None is skipped before it has failed for a minute without a success."""
    bench.store = SnapshotStore(bench.storage, bench.clock)
    failing_since: float | None = None
    for fails, pause in course:
        bench.storage.refuses = lambda each, fails=fails: fails and each.endswith(bench.part(3))  # type: ignore[misc]
        failing_since = (bench.clock.now if failing_since is None else failing_since) if fails else None
        try:
            found = bench.newest()
        except Unreachable:
            assert fails
        else:
            assert found is not None
            assert found.number == 3 or bench.clock.now - (failing_since or 0.0) >= UNREAD_SECONDS
            assert found.number == 2 or not fails
        bench.clock.now += pause


def test_named_snapshot_that_cannot_be_read_is_given_up_after_a_while(bench: Bench, tmp_path: Path) -> None:
    bench.storage.refuses = lambda each: each.endswith(bench.part(3))
    with pytest.raises(SnapshotError, match="alone cannot be read"):
        bench.tries(UNREAD_SECONDS + 10, lambda: bench.store.load_number(3, 0, 1)[0])
    own = LocalStorage(tmp_path / "own")
    start = lambda: load_initial(own, bench.storage.uri, 0, 1, other=bench.store)[0]  # noqa: E731
    assert bench.tries(UNREAD_SECONDS + 10, start) == bench.saved[1]


def test_shard_that_alone_cannot_read_what_the_job_rolled_back_to_says_so(tmp_path: Path) -> None:
    """It cannot begin from another one: PS 0 and the other shards have that. It waited for ever, and nobody knew."""
    storage, clock = Worn(tmp_path), Clock()
    store, trained = SnapshotStore(storage, clock), shards(2)
    before = save(store, trained)
    save(store, trained)
    store.publish(before.model_copy(update={"number": store.next_number(), "generation": 1}))
    storage.refuses = lambda each: each.endswith(before.shards[1].file)
    began, follower = clock.now, Follower(trained[1], store)
    while True:
        with pytest.raises(TrainerError) as raised:
            follower.handlers()["roll-back"](RollBackShard(generation=1))
        if not isinstance(raised.value, Unreachable):
            break
        clock.now += 10.0
    assert UNREAD_SECONDS <= clock.now - began <= UNREAD_SECONDS + 10
    assert follower.failed is raised.value
    assert before.shards[1].file in str(follower.failed)


@pytest.mark.parametrize("timeout", [0.0, 30.0])
def test_shard_waits_for_what_the_job_rolled_back_to_while_no_other_part_can_be_read(
    tmp_path: Path, timeout: float
) -> None:
    """As in an outage of large reads, in which all else answers: the job ended for a minute of it."""
    storage, clock = Worn(tmp_path), Clock()
    store, trained = SnapshotStore(storage, clock), shards(2)
    before = save(store, trained)
    save(store, trained)
    store.publish(before.model_copy(update={"number": store.next_number(), "generation": 1}))
    ends, follower = clock.now + 300.0, Follower(trained[1], store)
    storage.refuses = lambda each: clock.now < ends and "/shard-" in each

    def fail() -> None:
        clock.now += timeout

    storage.waits = fail
    while clock.now < ends:
        with contextlib.suppress(Unreachable):
            follower.handlers()["roll-back"](RollBackShard(generation=1))
        clock.now += 4.0
    follower.handlers()["roll-back"](RollBackShard(generation=1))
    assert follower.failed is None
    assert trained[1].history.generation == 1


def test_shard_waits_for_the_manifest_that_it_is_to_return_to(bench: Bench) -> None:
    """Which generation a file has that cannot be read is not known: that of the rollback may still come."""
    bench.storage.refuses = lambda each: "manifest-" in each

    def load() -> Manifest | None:
        found = bench.store.load_generation(0, 0, 1)
        return found and found[0]

    assert bench.tries(5 * UNREAD_SECONDS, load) is None
    bench.storage.refuses = lambda _: False
    assert load() == bench.saved[2]


def test_older_snapshot_is_read_once_where_the_newer_one_still_fails(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = list[str]()
    read_into = shard_file.read_into

    def counted(handle: IO[bytes], *rest: Any) -> None:
        reads.append(handle.name)
        read_into(handle, *rest)

    monkeypatch.setattr(shard_file, "read_into", counted)
    bench.storage.refuses = lambda each: each.endswith(bench.part(3))
    assert bench.tries(UNREAD_SECONDS + 10) == bench.saved[1]
    assert len(reads) == 1


def test_nothing_of_what_a_file_was_read_into_stays_in_memory(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither while it is waited for, nor once another snapshot is loaded instead: a parameter server has no room."""
    alive = Alive(monkeypatch)
    bench.storage.refuses = lambda each: each.endswith(bench.part(3))
    for _ in range(3):
        with pytest.raises(Unreachable):
            bench.newest()
        assert alive.now == 0
    bench.clock.now += UNREAD_SECONDS / 2
    assert bench.tries(UNREAD_SECONDS) == bench.saved[1]
    assert (alive.now, alive.most) == (0, 1)


def test_a_damaged_file_that_was_passed_over_is_not_kept_in_memory(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_gc: None
) -> None:
    """Not even until the next full collection of garbage, which comes after the next snapshot."""
    alive = Alive(monkeypatch)
    damaged = tmp_path / "snapshots" / bench.part(3)
    damaged.write_bytes(bytes(damaged.stat().st_size))
    assert bench.newest() == bench.saved[1]
    assert (alive.now, alive.most) == (0, 1)
