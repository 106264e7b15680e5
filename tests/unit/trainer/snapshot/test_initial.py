"""The snapshot of another run that a run starts from: one choice for all shards and restarts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shoal_trainer.errors import Unreachable, UserError
from shoal_trainer.ps.shard import ShardCopy, ShardStore
from shoal_trainer.snapshot.initial import RECORD, InitialSnapshot, load_initial
from shoal_trainer.snapshot.manifest import FORMAT, Manifest, sealed
from shoal_trainer.snapshot.storage import LocalStorage, Storage
from shoal_trainer.snapshot.store import LOAD_TRIES, SnapshotStore
from shoal_trainer.wire.messages import PushMeta
from tests.unit.trainer.ps.shards import push_to
from tests.unit.trainer.snapshot.saving import save, shards


class Other:
    """A run of two shards that still trains."""

    def __init__(self, folder: Path) -> None:
        storage = LocalStorage(folder)
        self.uri, self.folder = storage.uri, folder
        self.store = SnapshotStore(storage)
        self.shards: list[ShardStore] = shards(2)
        self.publish()

    def publish(self, retain: int = 3) -> None:
        """Train one step, publish a snapshot, and remove older ones."""
        for shard in self.shards:
            version = shard.history.version
            push_to(
                shard, 0, 0, version + 1, version, PushMeta(samples=1), np.ones(shard.size, dtype=np.float32)
            )
        save(self.store, self.shards)
        self.store.prune(retain, 0)


@pytest.fixture
def other(tmp_path: Path) -> Other:
    return Other(tmp_path / "other")


@pytest.fixture
def own(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "own")


def test_all_shards_start_from_the_snapshot_that_shard_0_chose(own: LocalStorage, other: Other) -> None:
    chosen = load_initial(own, other.uri, 0, 2)
    other.publish()
    loaded = [load_initial(own, other.uri, index, 2) for index in (0, 1)]  # shard 0 restarts
    assert [manifest.number for manifest, _ in (chosen, *loaded)] == [1, 1, 1]
    assert [copy.version for _, copy in (chosen, *loaded)] == [4, 4, 4]


def test_a_choice_of_another_run_s_snapshot_is_none(own: LocalStorage, other: Other, tmp_path: Path) -> None:
    """A job with `storage.run` was replaced, before its first snapshot, by one that starts from another run."""
    load_initial(own, other.uri, 0, 2)
    third = Other(tmp_path / "third")
    third.publish()
    with pytest.raises(Unreachable, match="shard 0 has not chosen"):
        load_initial(own, third.uri, 1, 2)
    assert [load_initial(own, third.uri, index, 2)[0].number for index in (0, 1, 0)] == [2, 2, 2]


def test_other_shards_wait_until_shard_0_has_chosen(own: LocalStorage, other: Other) -> None:
    with pytest.raises(Unreachable, match="shard 0 has not chosen"):
        load_initial(own, other.uri, 1, 2)
    load_initial(own, other.uri, 0, 2)
    assert load_initial(own, other.uri, 1, 2)[0].number == 1


@pytest.mark.parametrize("index", [0, 1])
def test_missing_chosen_snapshot_is_a_user_error(own: LocalStorage, other: Other, index: int) -> None:
    load_initial(own, other.uri, 0, 2)
    other.publish(retain=1)
    with pytest.raises(UserError, match=r"Snapshot 1 of .* no longer exists\. Start a new run"):
        load_initial(own, other.uri, index, 2)


@pytest.mark.parametrize("index", [0, 1])
def test_restarted_shard_takes_the_newest_if_the_chosen_snapshot_is_gone(
    own: LocalStorage, other: Other, index: int, caplog: pytest.LogCaptureFixture
) -> None:
    load_initial(own, other.uri, 0, 2)
    other.publish(retain=1)
    assert load_initial(own, other.uri, index, 2, follows=True)[0].number == 2
    assert "snapshot 1 of" in caplog.text
    assert "taking snapshot 2 instead" in caplog.text


def test_damaged_chosen_snapshot_is_a_user_error(own: LocalStorage, other: Other) -> None:
    manifest, _ = load_initial(own, other.uri, 0, 2)
    part = manifest.shards[1]
    (other.folder / "snapshots" / part.file).write_bytes(bytes(part.size))
    with pytest.raises(UserError, match=f"{part.file}: .* remove its manifest"):
        load_initial(own, other.uri, 1, 2)


def test_folder_without_snapshot_is_a_user_error(own: LocalStorage, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no complete snapshot to start from"):
        load_initial(own, (tmp_path / "nothing").as_uri(), 0, 2)
    with pytest.raises(Unreachable):
        load_initial(own, (tmp_path / "nothing").as_uri(), 1, 2)


def test_run_of_another_version_is_named_with_the_format_that_it_has(own: LocalStorage, other: Other) -> None:
    """Not this run's snapshots, of which there are none: the other run's are to be kept."""
    content = {"format": FORMAT + 1, "number": 2, "epoch": 0, "shards": "of a later kind"}
    (other.folder / "snapshots" / "manifest-0000000002.json").write_bytes(sealed(json.dumps(content)))
    says = (
        rf"{other.uri}.*manifest-0000000002\.json has format {FORMAT + 1}, and this version .* up to {FORMAT}"
    )
    with pytest.raises(UserError, match=says):
        load_initial(own, other.uri, 0, 2)


def test_snapshot_removed_during_the_choice_is_replaced_by_a_newer_one(
    own: LocalStorage, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = SnapshotStore.load_shard

    def slow(store: SnapshotStore, manifest: Manifest, index: int, count: int) -> ShardCopy:
        if manifest.number == 1:
            other.publish(retain=1)
        return load(store, manifest, index, count)

    monkeypatch.setattr(SnapshotStore, "load_shard", slow)
    assert load_initial(own, other.uri, 0, 2)[0].number == 2
    assert load_initial(own, other.uri, 1, 2)[0].number == 2


def test_choice_ends_although_the_other_run_publishes_during_each_load(
    own: LocalStorage, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = SnapshotStore.load_shard

    def slow(store: SnapshotStore, manifest: Manifest, index: int, count: int) -> ShardCopy:
        other.publish()
        return load(store, manifest, index, count)

    monkeypatch.setattr(SnapshotStore, "load_shard", slow)
    assert load_initial(own, other.uri, 0, 2)[0].number == 1


def test_choice_of_another_incarnation_of_shard_0_is_used(
    own: LocalStorage, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = LocalStorage.create

    def late(storage: LocalStorage, name: str, data: bytes) -> bool:
        monkeypatch.setattr(LocalStorage, "create", create)
        other.publish()
        assert load_initial(own, other.uri, 0, 2)[0].number == 2
        return storage.create(name, data)

    monkeypatch.setattr(LocalStorage, "create", late)
    assert load_initial(own, other.uri, 0, 2)[0].number == 2
    assert InitialSnapshot.model_validate_json(own.read(RECORD)).number == 2


def test_record_of_an_earlier_version_is_of_any_run(own: LocalStorage, other: Other) -> None:
    own.write(RECORD, [b'{"number":1}'])
    other.publish()
    assert load_initial(own, other.uri, 0, 2)[0].number == 1


def test_incomplete_record_is_replaced_by_shard_0(own: LocalStorage, other: Other) -> None:
    """Its writer was killed on a volume without hard links."""
    own.write(RECORD, [b'{"numb'])
    with pytest.raises(Unreachable):
        load_initial(own, other.uri, 1, 2)
    load_initial(own, other.uri, 0, 2)
    assert InitialSnapshot.model_validate_json(own.read(RECORD)).number == 1
    assert load_initial(own, other.uri, 1, 2)[0].number == 1


def test_snapshots_of_the_run_neither_read_nor_remove_the_record(storage: Storage, other: Other) -> None:
    load_initial(storage, other.uri, 0, 1)
    store, trained = SnapshotStore(storage), shards(1)
    assert store.next_number() == 1
    for _ in range(3):
        save(store, trained)
        store.prune(1, 0)
    assert [manifest.number for manifest in store.manifests()] == [3]
    assert load_initial(storage, other.uri, 0, 1)[0].number == 1


def test_run_that_removes_its_snapshots_faster_than_they_are_read_is_a_user_error(
    own: LocalStorage, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be read for ever. Each snapshot that is read is removed meanwhile, as from an object store."""
    load, loads = SnapshotStore.load_shard, 0

    def slow(store: SnapshotStore, manifest: Manifest, index: int, count: int) -> ShardCopy:
        nonlocal loads
        loads += 1
        for _ in range(3):
            other.publish()
        return load(store, manifest, index, count)

    monkeypatch.setattr(SnapshotStore, "load_shard", slow)
    with pytest.raises(
        UserError, match=r"still trains.*removed 3 times.*Raise its snapshot\.retain or snapshot\.every"
    ):
        load_initial(own, other.uri, 0, 2)
    assert loads == LOAD_TRIES
