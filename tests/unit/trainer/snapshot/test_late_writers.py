"""Parts that are written late, and storage listings that are stale."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from shoal_trainer import background
from shoal_trainer.coordinator.follower import Follower
from shoal_trainer.coordinator.protocol import SnapshotShard
from shoal_trainer.errors import Fenced, Unreachable
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.snapshot import claims
from shoal_trainer.snapshot.claims import Claim, Watch
from shoal_trainer.snapshot.manifest import Manifest, ShardFile, sealed
from shoal_trainer.snapshot.storage import LocalStorage
from shoal_trainer.snapshot.store import PUBLISH_TRIES, SnapshotStore
from shoal_trainer.wire.messages import ModelSpec, PushMeta
from tests.unit.trainer.ps.shards import push_to

SECONDS = 120
MODEL = ModelSpec(fingerprint="0" * 64, parameters=40_000)


class SlowStorage(LocalStorage):
    """Blocks the first write of shard 1 until `go` is set."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.started, self.go = threading.Event(), threading.Event()

    def write(
        self, name: str, chunks: Iterable[bytes | memoryview], confirm: Callable[[], object] = lambda: None
    ) -> None:
        if "shard-1" in name and not self.started.is_set():
            content = [bytes(chunk) for chunk in chunks]
            self.started.set()
            assert self.go.wait(SECONDS)
            super().write(name, content, confirm)
        else:
            super().write(name, chunks, confirm)


class StaleListing(LocalStorage):
    """Lists a folder as it was when `freeze` was called."""

    frozen: list[str] | None = None
    calls = 0

    def freeze(self) -> None:
        self.frozen = super().names("snapshots")

    def names(self, folder: str) -> list[str]:
        self.calls += 1
        assert self.calls < 1000, "the listing is repeated without end"
        return super().names(folder) if self.frozen is None else self.frozen


def shards(count: int) -> list[ShardStore]:
    stores = [ShardStore(index, count, 0) for index in range(count)]
    for shard in stores:
        shard.workers.connect(0, 0)
        shard.hello(0, 0, MODEL)
        shard.offer(0, 0, aligned(shard.size))
    return stores


def push(stores: list[ShardStore], seq: int) -> None:
    for shard in stores:
        push_to(shard, 0, 0, seq, seq - 1, PushMeta(samples=1), np.ones(shard.size, np.float32), delta=True)


def part(store: SnapshotStore, number: int, shard: ShardStore, epoch: int = 0) -> ShardFile:
    copy = shard.copy()
    assert copy is not None
    return store.write_shard(number, epoch, copy)


def manifest(number: int, *files: ShardFile, epoch: int = 0) -> Manifest:
    return Manifest(number=number, epoch=epoch, run="uid", shards=files, model=MODEL)


def versions(store: SnapshotStore, count: int) -> list[tuple[int, int]]:
    """(snapshot, version) from which each shard would start."""
    found = [store.load_newest(index, count) for index in range(count)]
    return [(item[0].number, item[1].version) for item in found if item is not None]


def test_part_written_after_publication_leaves_published_snapshot_intact(tmp_path: Path) -> None:
    """PS 0 restarts in place while shard 1 writes: the second attempt has the same number and epoch."""
    storage = SlowStorage(tmp_path)
    store, stores = SnapshotStore(storage), shards(2)
    push(stores, 1)
    request = SnapshotShard(number=1, epoch=0)
    write_part = Follower(stores[1], store)._write_part
    late = threading.Thread(target=write_part, args=(request,))
    late.start()
    assert storage.started.wait(SECONDS)
    push(stores, 2)
    files = part(store, 1, stores[0]), write_part(request)
    store.publish(manifest(1, *files))
    storage.go.set()
    late.join(SECONDS)
    assert versions(store, 2) == [(1, 2), (1, 2)]


def test_second_request_during_a_write_is_refused(tmp_path: Path) -> None:
    storage = SlowStorage(tmp_path)
    stores = shards(2)
    snapshot = Follower(stores[1], SnapshotStore(storage)).handlers()["snapshot"]
    first: list[object] = []
    writing = threading.Thread(target=lambda: first.append(snapshot(SnapshotShard(number=1, epoch=0))))
    writing.start()
    assert storage.started.wait(SECONDS)
    with pytest.raises(Unreachable, match="shard 1 is still writing"):
        snapshot(SnapshotShard(number=1, epoch=0))
    storage.go.set()
    writing.join(SECONDS)
    assert isinstance(first[0], ShardFile)
    assert snapshot(SnapshotShard(number=2, epoch=0)) is not None


def test_prune_removes_files_that_no_manifest_names(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    store, (shard,) = SnapshotStore(storage), shards(1)
    leftover, kept = part(store, 1, shard), part(store, 1, shard)
    store.publish(manifest(1, kept))
    store.prune(3, 0)
    assert storage.names("snapshots") == [kept.file, "manifest-0000000001.json"]
    assert leftover.file != kept.file
    assert store.load_newest(0, 1) is not None


def test_prune_removes_no_file_where_a_kept_manifest_is_unreadable(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    store, (shard,) = SnapshotStore(storage), shards(1)
    first = part(store, 1, shard)
    store.publish(manifest(1, first))
    store.publish(manifest(2, first))
    storage.write("snapshots/manifest-0000000002.json", [b"{"])
    leftover = part(store, 1, shard)
    SnapshotStore(storage).prune(3, 0)
    assert storage.size(f"snapshots/{leftover.file}") == leftover.size
    assert storage.size(f"snapshots/{first.file}") == first.size


def test_prune_removes_attempts_that_were_never_published(tmp_path: Path) -> None:
    """Those of this server and of the one that it has replaced; not those of a server that has replaced this one."""
    storage = LocalStorage(tmp_path)
    store, (shard,) = SnapshotStore(storage), shards(1)
    store.publish(manifest(1, published := part(store, 1, shard)))
    failed = part(store, 2, shard)
    Claim(storage, 0, 1).make()
    of_successor = part(store, 2, shard, epoch=1)
    files = [published.file, failed.file, of_successor.file]
    store.prune(3, 0)
    assert [name for name in storage.names("snapshots") if name in files] == files
    store.prune(3, 1)
    assert [name for name in storage.names("snapshots") if name in files] == files[:1]


def test_prune_removes_what_it_can_and_says_what_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file that stays must not keep all later ones: the volume would fill."""
    storage = LocalStorage(tmp_path)
    store, (shard,) = SnapshotStore(storage), shards(1)
    first, *_ = [store.publish(manifest(n, part(store, n, shard))) for n in (1, 2, 3)]
    stays, unlink = first.shards[0].file, os.unlink

    def refuse(path: Any, **options: Any) -> None:
        if Path(path).name == stays:
            raise PermissionError(errno.EACCES, "Permission denied")
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(Unreachable, match=r"cannot remove .*/snapshots: Permission denied"):
        store.prune(1, 0)
    kept = [name for name in storage.names("snapshots") if "manifest" not in name]
    assert [name[:12] for name in kept] == ["0000000001-0", "0000000003-0"]


def test_a_manifest_that_cannot_be_removed_keeps_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one under the retention of a bucket: the storage would grow by each snapshot."""
    storage = LocalStorage(tmp_path)
    store, (shard,) = SnapshotStore(storage), shards(1)
    for number in (1, 2, 3):
        store.publish(manifest(number, newest := part(store, number, shard)))
    remove = storage.remove

    def refuse(name: str) -> None:
        if name.endswith("manifest-0000000001.json"):
            raise Unreachable(f"cannot remove {name}: it is under retention")
        remove(name)

    monkeypatch.setattr(storage, "remove", refuse)
    with pytest.raises(Unreachable, match="under retention"):
        store.prune(1, 0)
    kept = [newest.file, "manifest-0000000001.json", "manifest-0000000003.json"]
    assert storage.names("snapshots") == kept


class KeepsFolders(LocalStorage):
    """As a bucket with folders of its own (hierarchical namespace), of which objects are removed. Counts its calls."""

    calls = 0

    def names(self, folder: str) -> list[str]:
        self.calls += 1
        return super().names(folder)

    def remove(self, name: str) -> None:
        self.calls += 1
        path = self.root / name
        for file in path.iterdir() if path.is_dir() else [path]:
            file.unlink(missing_ok=True)


def test_prune_does_not_ask_for_what_was_removed_long_ago(tmp_path: Path) -> None:
    """Folders of attempts stayed in such a bucket: each prune asked for all of them, after a day for minutes."""
    storage = KeepsFolders(tmp_path)
    store, (shard,) = SnapshotStore(storage), shards(1)

    def calls_of(number: int) -> int:
        store.publish(manifest(number, part(store, number, shard)))
        storage.calls = 0
        store.prune(2, 0)
        return storage.calls

    assert [calls_of(number) for number in range(1, 7)] == [1, 1, 3, 3, 3, 3], "a list, a manifest and a part"
    assert len(storage.names("snapshots")) == 4


def test_snapshots_of_a_version_with_folders_are_read_and_removed(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    store, (shard,) = SnapshotStore(storage), shards(1)
    for number in (1, 2):
        file = part(store, number, shard)
        earlier = file.model_copy(update={"file": file.file.replace(".", "/")})
        (tmp_path / "snapshots" / earlier.file).parent.mkdir()
        (tmp_path / "snapshots" / file.file).rename(tmp_path / "snapshots" / earlier.file)
        store.publish(manifest(number, earlier))
    store = SnapshotStore(storage)
    assert versions(store, 1) == [(2, 0)]
    store.prune(1, 0)
    assert storage.names("snapshots") == ["0000000002-0", "manifest-0000000002.json"]
    store.publish(manifest(3, newest := part(store, 3, shard)))
    store.prune(1, 0)
    assert storage.names("snapshots") == [newest.file, "manifest-0000000003.json"]


def test_prune_with_a_stale_listing_keeps_what_was_just_published(tmp_path: Path) -> None:
    storage = StaleListing(tmp_path)
    store, (shard,) = SnapshotStore(storage), shards(1)
    store.publish(manifest(1, part(store, 1, shard)))
    newest = part(store, 2, shard)
    storage.frozen = [name for name in storage.names("snapshots") if "manifest" in name] + [newest.file]
    store.publish(manifest(2, newest))
    store.prune(1, 0)
    assert storage.size(f"snapshots/{newest.file}") == newest.size


def test_publish_with_a_stale_listing_takes_the_next_free_number(tmp_path: Path) -> None:
    storage = StaleListing(tmp_path)
    store, (shard,) = SnapshotStore(storage), shards(1)
    file = part(store, 1, shard)
    store.publish(manifest(1, file))
    storage.freeze()
    store.publish(manifest(2, file))
    assert store.publish(manifest(2, file)).number == 3


def test_publish_with_a_stale_listing_is_fenced_by_the_refused_number(tmp_path: Path) -> None:
    storage = StaleListing(tmp_path)
    store, (shard,) = SnapshotStore(storage), shards(1)
    file = part(store, 1, shard)
    storage.freeze()
    store.publish(manifest(1, file, epoch=2))
    with pytest.raises(Fenced, match="epoch 2, this is 1"):
        store.publish(manifest(1, file, epoch=1))


def test_publish_gives_up_after_a_bounded_number_of_refusals(tmp_path: Path) -> None:
    storage = StaleListing(tmp_path)
    store, (shard,) = SnapshotStore(storage), shards(1)
    file = part(store, 1, shard)
    storage.freeze()
    for number in range(1, PUBLISH_TRIES + 1):
        storage.create(f"snapshots/manifest-{number:010d}.json", sealed(manifest(number, file).to_json()))
    with pytest.raises(Unreachable, match="is taken"):
        store.publish(manifest(1, file))
    assert storage.calls <= PUBLISH_TRIES + 1


def test_claims_watch_survives_an_unexpected_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module, name in ((claims, "LOOK_SECONDS"), (background, "RETRY_SECONDS")):
        monkeypatch.setattr(module, name, 0.001)
    claim, errors, fenced = (
        Claim(LocalStorage(tmp_path), 0, 0),
        [Fenced("a newer one"), KeyError("x")],
        Event(),
    )

    def check() -> None:
        raise errors.pop()

    monkeypatch.setattr(claim, "check", check)
    Watch(claim, lambda _: fenced.set()).start()
    assert fenced.wait(SECONDS)
    assert "KeyError" in caplog.text
