"""Claims: only the newest epoch may publish."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_trainer.errors import Fenced, RunTaken, SnapshotError, TrainerError, Unreachable, UserError
from shoal_trainer.snapshot import claims
from shoal_trainer.snapshot.claims import Claim, check_storage
from shoal_trainer.snapshot.manifest import Manifest
from shoal_trainer.snapshot.storage import LocalStorage, RemoteStorage, Storage
from shoal_trainer.snapshot.store import SnapshotStore
from tests.unit.trainer.snapshot.saving import MODEL, latest, save, shards


def test_older_epoch_cannot_publish_over_a_newer_one(storage: Storage) -> None:
    old, new, (shard,) = SnapshotStore(storage), SnapshotStore(storage), shards(1)
    save(old, [shard], epoch=1)
    save(new, [shard], epoch=2)
    with pytest.raises(Fenced, match="epoch 2, this is 1"):
        save(old, [shard], epoch=1)
    newest = latest(new)
    assert newest is not None
    assert (newest.epoch, newest.number) == (2, 2)


def test_concurrent_publishers_keep_the_newer_epoch(storage: Storage) -> None:
    """Numbers are unique, and no older epoch publishes after the newer one's first manifest."""
    (shard,) = shards(1)
    outcome: dict[int, Any] = {1: None, 2: None}
    copy = shard.copy()
    assert copy is not None
    part = SnapshotStore(storage).write_shard(1, 1, copy)

    def publish(epoch: int) -> None:
        store, published = SnapshotStore(storage), 0
        while published < 8 and outcome[epoch] is None:
            try:
                store.publish(Manifest(number=1, epoch=epoch, run="uid", shards=(part,), model=MODEL))
                published += 1
            except Unreachable:  # the other took every number that this one tried
                continue
            except TrainerError as error:
                outcome[epoch] = error

    threads = [threading.Thread(target=publish, args=(epoch,)) for epoch in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcome[2] is None
    assert outcome[1] is None or isinstance(outcome[1], Fenced)
    epochs = [manifest.epoch for manifest in SnapshotStore(storage).manifests()][::-1]
    assert epochs == sorted(epochs)
    assert epochs.count(2) == 8


def test_server_below_the_highest_claim_is_fenced(storage: Storage) -> None:
    store, (shard,) = SnapshotStore(storage), shards(1)
    save(store, [shard])
    Claim(storage, 0, 0).make()
    assert [name for name in storage.names("snapshots") if name.startswith("epoch")] == []
    Claim(storage, 0, 2).make()
    Claim(storage, 0, 2).make()  # restarted in place
    Claim(storage, 1, 7).make()  # another shard
    Claim(storage, 0, 3).check()
    for lower in (0, 1):
        with pytest.raises(Fenced, match=f"incarnation 2 of shard 0 exists, this is incarnation {lower}"):
            Claim(storage, 0, lower).check()
    with pytest.raises(Fenced, match="this is incarnation 1"):
        Claim(storage, 0, 1).make()
    with pytest.raises(Fenced, match="incarnation 2 has claimed the storage, this is 0"):
        save(store, [shard])
    assert save(store, [shard], epoch=2).number == 2
    store.prune(3, 2)
    assert [name for name in storage.names("snapshots") if name.startswith("epoch")] == [
        "epoch-0-2",
        "epoch-1-7",
    ]


def test_claim_of_another_job_says_so(storage: Storage) -> None:
    """Two clusters have one Git folder, `storage.run` and bucket. A later job of a run that has ended just goes on."""
    Claim(storage, 0, 5, "ended").make()
    Claim(storage, 0, 8, "here").make()
    Claim(storage, 0, 8, "here").check()
    with pytest.raises(Fenced) as error:
        Claim(storage, 0, 7, "here").check()
    assert not isinstance(error.value, RunTaken)
    Claim(storage, 0, 9, "there").make()
    with pytest.raises(
        RunTaken, match=r"uid there, of another cluster.*this is incarnation 8\. Give each job a storage"
    ):
        Claim(storage, 0, 8, "here").check()


@pytest.mark.parametrize("content", [b"claimed\n", b"job a", b"", b"\xff"])
def test_claim_of_which_the_job_is_not_known_fences(tmp_path: Path, content: bytes) -> None:
    """Of an earlier version, half written, or that cannot be read."""
    storage = LocalStorage(tmp_path)
    storage.create("snapshots/epoch-0-2", content)
    with pytest.raises(Fenced) as error:
        Claim(storage, 0, 1, "a").check()
    assert not isinstance(error.value, RunTaken)


def test_part_of_a_replaced_shard_is_refused(local: SnapshotStore, tmp_path: Path) -> None:
    stores = shards(2)
    files = [local.write_shard(1, 0, copy) for shard in stores if (copy := shard.copy())]
    local.check(files)
    Claim(LocalStorage(tmp_path), 1, 1).make()
    with pytest.raises(SnapshotError, match="shard 1 was replaced"):
        local.check(files)


def at_once(_seconds: float) -> bool:
    """No pause, and the process does not end."""
    return False


claimed = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), max_size=12)


@given(claimed, st.lists(st.text(max_size=12)))
def test_highest_claim_of_each_shard_is_kept(made: list[tuple[int, int]], others: list[str]) -> None:
    names = [*others, *(f"epoch-{index}-{epoch}" for index, epoch in made), "manifest-0000000001.json"]
    newest = {index: max(e for i, e in made if i == index) for index, _ in made}
    assert claims.highest(names) == newest
    kept = set(names) - set(claims.outdated(names))
    assert claims.highest(kept) == newest
    assert kept - set(others) - {"manifest-0000000001.json"} == {f"epoch-{i}-{e}" for i, e in newest.items()}


def test_storage_that_creates_once_is_accepted_and_left_clean(storage: Storage) -> None:
    check_storage(storage, "uid-0-0", at_once)
    storage.create("snapshots/probe-uid-0-0", b"1")  # an earlier try was killed
    check_storage(storage, "uid-0-0", at_once)
    assert not [name for name in storage.names("snapshots") if name.startswith("probe")]


def test_storage_that_ignores_conditional_writes_ends_the_job(tmp_path: Path) -> None:
    """Some S3 endpoints do. A server that was replaced would replace its successor's snapshots."""

    class Ignores(LocalStorage):
        def create(self, name: str, data: bytes) -> bool:
            self.write(name, [data])
            return True

    with pytest.raises(UserError, match=r"ignores conditional writes.*or a volume"):
        check_storage(Ignores(tmp_path), "uid-0-0", at_once)


def test_storage_that_does_not_list_what_is_written_ends_the_job(s3: str) -> None:
    """As S3 clients with two slashes after the bucket: a successor would find no claim and no snapshot."""
    plain, slashes = (
        RemoteStorage(f"s3://slashes{path}", endpoint_url=s3, key="k", secret="s")
        for path in ("/runs", "//runs")
    )
    plain._fs.mkdir("slashes")
    check_storage(plain, "uid-0-0", at_once)
    with pytest.raises(UserError, match=r"does not list what is written there.*s3://BUCKET/PATH"):
        check_storage(slashes, "uid-0-0", at_once)
    assert plain._fs.find("slashes") == []


def test_listing_may_be_some_seconds_behind(tmp_path: Path) -> None:
    class Late(LocalStorage):
        seconds = 0.0

        def names(self, folder: str) -> list[str]:
            return super().names(folder) if self.seconds > 5 else []

    storage = Late(tmp_path)

    def pause(seconds: float) -> bool:
        storage.seconds += seconds
        return False

    check_storage(storage, "uid-0-0", pause)
    with pytest.raises(Unreachable, match="not listed yet"):  # of a process that ends
        check_storage(Late(tmp_path), "uid-0-0", lambda _: True)


def test_storage_that_refuses_deletion_is_accepted(tmp_path: Path) -> None:
    class Keeps(LocalStorage):
        def remove(self, name: str) -> None:
            raise Unreachable("AccessDenied")

    for _ in range(2):
        check_storage(Keeps(tmp_path), "uid-0-0", at_once)
