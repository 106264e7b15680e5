"""The part of a shard other than 0 may take any time to write, as long as something of it is written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shoal_trainer.contract import Message, Shard, ShardReport
from shoal_trainer.coordinator.control_client import POLL_SECONDS, UPLOAD_SECONDS, ShardControl
from shoal_trainer.coordinator.follower import Follower
from shoal_trainer.coordinator.protocol import SnapshotShard
from shoal_trainer.errors import Unreachable
from shoal_trainer.security import create_secret_dir
from shoal_trainer.snapshot import storage as storage_module
from shoal_trainer.snapshot.manifest import ShardFile
from shoal_trainer.snapshot.storage import LocalStorage
from shoal_trainer.snapshot.store import SnapshotStore
from tests.unit.trainer.snapshot.saving import shards


class Slow:
    """A shard that writes for `seconds`, a chunk a second, but for nothing of it after `hangs_at`."""

    def __init__(self, folder: Path, *, seconds: float, hangs_at: float = 1e9) -> None:
        self.now = 0.0
        self.ends_at, self.hangs_at = seconds, hangs_at
        self.follower = Follower(shards(2)[1], SnapshotStore(LocalStorage(folder)))
        self.control = ShardControl(
            Shard(host="127.0.0.1"),
            create_secret_dir(folder / "secret"),
            clock=lambda: self.now,
            sleep=self.passes,
        )
        self.control._client.call_beside = self.call  # type: ignore[method-assign, assignment]
        self.asked = 0

    def passes(self, seconds: float) -> None:
        self.now += seconds

    def call(self, name: str, request: Any, _answer: object, timeout: float) -> Message:
        if name == "report":
            idle = 0.0 if self.now >= self.ends_at else max(0.5, self.now - self.hangs_at)
            return ShardReport(index=1, epoch=0, snapshot_idle_seconds=idle)
        if not request.again:
            self.asked += 1
            self.written = self.follower.handlers()[name](request)
            self.now += timeout
            raise Unreachable("timed out")
        assert self.now >= self.ends_at or self.now - self.hangs_at >= UPLOAD_SECONDS
        if self.now < self.ends_at:
            raise Unreachable("it is still writing")
        answer = self.follower.handlers()[name](request)
        assert answer is not None
        return answer


@pytest.mark.parametrize("seconds", [UPLOAD_SECONDS - 1, 5000.0])
def test_part_that_takes_long_is_written_once(tmp_path: Path, seconds: float) -> None:
    shard = Slow(tmp_path, seconds=seconds)
    file = shard.control.snapshot(3, 0, 0)
    assert isinstance(file, ShardFile)
    assert file == shard.written
    assert shard.asked == 1
    assert shard.now <= max(UPLOAD_SECONDS, seconds) + POLL_SECONDS


def test_part_of_an_earlier_attempt_is_no_answer_to_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file was removed before the later attempt, which has the same number."""
    shard = Slow(tmp_path, seconds=0.0)
    shard.follower.handlers()["snapshot"](SnapshotShard(number=3, epoch=0))

    def breaks_off(*_: object) -> None:
        shard.passes(UPLOAD_SECONDS)
        raise Unreachable("the upload breaks off")

    monkeypatch.setattr(LocalStorage, "write", breaks_off)
    with pytest.raises(Unreachable, match="has not written its part"):
        shard.control.snapshot(3, 0, 0)


def test_part_of_which_nothing_is_written_any_more_is_given_up(tmp_path: Path) -> None:
    shard = Slow(tmp_path, seconds=1e9, hangs_at=700.0)
    with pytest.raises(Unreachable, match="still writing"):
        shard.control.snapshot(3, 0, 0)
    assert shard.now <= 700.0 + UPLOAD_SECONDS + POLL_SECONDS


def test_part_on_a_slow_disk_is_told_as_it_reaches_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page cache takes all of it at once, and the disk then has no more to tell until the last byte is there."""
    monkeypatch.setattr(storage_module, "SYNC_BYTES", 100_000)
    now, idle = [0.0], []
    store, (shard,) = SnapshotStore(LocalStorage(tmp_path), lambda: now[0]), shards(1)
    synced, fsync = [0], os.fsync

    def slow(descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        now[0] += max(0, size - synced[0]) / 1000  # KB/s
        synced[0] = max(size, synced[0])
        idle.append(store.idle_seconds())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    copy = shard.copy()
    assert copy is not None
    part = store.write_shard(1, 0, copy)
    assert now[0] > 700, part.size
    assert max(idle) < 300
    assert store.idle_seconds() == 0.0


def test_refusal_is_no_slow_part(tmp_path: Path) -> None:
    shard = Slow(tmp_path, seconds=10.0)
    with pytest.raises(Unreachable, match="is at generation 0, not 1"):
        shard.control.snapshot(3, 0, 0, 1)


@pytest.mark.parametrize("request_", [(4, 0), (3, 1)], ids=["another snapshot", "another server 0"])
def test_part_that_is_asked_for_again_is_not_begun_then(tmp_path: Path, request_: tuple[int, int]) -> None:
    """A restarted shard would write a later state than the other shards have written."""
    follower = Slow(tmp_path, seconds=0.0).follower
    follower.handlers()["snapshot"](SnapshotShard(number=3, epoch=0))
    number, epoch = request_
    with pytest.raises(Unreachable, match="has not written its part"):
        follower.handlers()["snapshot"](SnapshotShard(number=number, epoch=epoch, again=True))
