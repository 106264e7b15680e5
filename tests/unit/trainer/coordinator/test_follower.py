"""Rollback on a shard other than shard 0: from the snapshot of the new generation, or a failure with a message."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from shoal_trainer.contract import ShardReport
from shoal_trainer.coordinator.follower import Follower
from shoal_trainer.coordinator.protocol import AskReport, RollBackShard, SnapshotShard
from shoal_trainer.errors import SnapshotError, Unreachable, UserError
from shoal_trainer.ps.shard import ShardCopy, ShardStore
from shoal_trainer.snapshot.manifest import Manifest, ShardFile
from shoal_trainer.snapshot.storage import LocalStorage
from shoal_trainer.snapshot.store import SnapshotStore
from tests.unit.trainer.snapshot.saving import save, shards


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(LocalStorage(tmp_path))


def damage(folder: Path, manifest: Manifest, index: int) -> str:
    """Change this shard's file, but not its size; returns its name."""
    file = folder / "snapshots" / manifest.shards[index].file
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return manifest.shards[index].file


def commit(store: SnapshotStore, manifest: Manifest, generation: int = 1) -> None:
    """Publish a rollback to this snapshot."""
    store.publish(manifest.model_copy(update={"number": store.next_number(), "generation": generation}))


def roll_back(follower: Follower, generation: int = 1) -> None:
    follower.handlers()["roll-back"](RollBackShard(generation=generation))


def test_shard_rolls_back_once_the_manifest_of_the_generation_exists(store: SnapshotStore) -> None:
    stores = shards(2)
    manifest, follower = save(store, stores), Follower(stores[1], store)
    with pytest.raises(Unreachable, match="no snapshot of generation 1 yet"):
        roll_back(follower)
    commit(store, manifest)
    roll_back(follower)
    assert (stores[1].history.generation, stores[1].history.version, follower.failed) == (1, 3, None)
    roll_back(follower)  # its answer was lost


def test_report_says_for_how_long_nothing_of_a_part_was_written(tmp_path: Path) -> None:
    """The coordinator would wait for ten minutes for the answer, and know nothing."""
    now, reported = [10.0], []

    class Hangs(LocalStorage):
        def write(self, name: str, chunks: Iterable[bytes | memoryview], _: object = None) -> None:
            for _chunk in chunks:
                now[0] += 1.0
                reported.append(told())
            now[0] += 40.0
            reported.append(told())
            raise Unreachable("the storage hangs")

    def told() -> float:
        report = follower.handlers()["report"](AskReport())
        assert isinstance(report, ShardReport)
        return report.snapshot_idle_seconds

    follower = Follower(shards(2)[1], SnapshotStore(Hangs(tmp_path), lambda: now[0]))
    with pytest.raises(Unreachable, match="hangs"):
        follower.handlers()["snapshot"](SnapshotShard(number=1, epoch=0))
    assert set(reported[:-1]) == {1.0}
    assert reported[-1] == 40.0
    assert told() == 0.0


def test_damaged_part_of_a_rollback_fails_the_shard(store: SnapshotStore, tmp_path: Path) -> None:
    """It would otherwise wait forever: an intact snapshot of an older generation does not help."""
    stores = shards(2)
    save(store, stores)
    newest, follower = save(store, stores), Follower(stores[1], store)
    name = damage(tmp_path, newest, 1)
    commit(store, newest)
    with pytest.raises(UserError, match=f"Shard 1 cannot load .*{name}.*SHA-256.*remove the manifests"):
        roll_back(follower)
    assert isinstance(follower.failed, UserError)
    assert stores[1].history.generation == 0


def test_damaged_part_of_another_shard_does_not_matter(store: SnapshotStore, tmp_path: Path) -> None:
    stores = shards(2)
    manifest, follower = save(store, stores), Follower(stores[1], store)
    damage(tmp_path, manifest, 0)
    commit(store, manifest)
    roll_back(follower)
    assert stores[1].history.generation == 1


def test_recovering_shard_with_a_damaged_part_still_waits_for_copies(
    store: SnapshotStore, tmp_path: Path
) -> None:
    manifest = save(store, shards(2))
    damage(tmp_path, manifest, 1)
    commit(store, manifest)
    follower = Follower(ShardStore(1, 2, 1), store)
    with pytest.raises(Unreachable, match="SHA-256"):
        roll_back(follower)
    assert follower.failed is None


def test_snapshot_replaced_while_it_is_read_fails_nothing(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This shard's successor has rolled back, and a newer snapshot was published."""
    stores = shards(2)
    manifest, follower = save(store, stores), Follower(stores[1], store)
    commit(store, manifest)
    load = SnapshotStore.load_shard

    def slow(self: SnapshotStore, manifest: Manifest, index: int, count: int) -> ShardCopy:
        monkeypatch.setattr(SnapshotStore, "load_shard", load)
        save(store, stores, generation=1)
        store.prune(1, 0)
        return load(self, manifest, index, count)

    monkeypatch.setattr(SnapshotStore, "load_shard", slow)
    roll_back(follower)
    assert (stores[1].history.generation, follower.failed) == (1, None)


def test_numbered_snapshot_that_does_not_exist_is_an_error(store: SnapshotStore) -> None:
    save(store, shards(1))
    assert store.load_number(1, 0, 1)[0].number == 1
    with pytest.raises(SnapshotError, match="no longer exists"):
        store.load_number(2, 0, 1)


def test_shard_that_writes_a_snapshot_does_not_load_another_one(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third copy of the model would not fit into its memory."""
    stores = shards(2)
    manifest, follower = save(store, stores), Follower(stores[1], store)
    commit(store, manifest)
    write = SnapshotStore.write_shard

    def slow(self: SnapshotStore, number: int, epoch: int, copy: ShardCopy) -> ShardFile:
        with pytest.raises(Unreachable, match="still writing"):
            roll_back(follower)
        return write(self, number, epoch, copy)

    monkeypatch.setattr(SnapshotStore, "write_shard", slow)
    follower.handlers()["snapshot"](SnapshotShard(number=9, epoch=0, published=0, generation=0))
    roll_back(follower)
    assert stores[1].history.generation == 1
