"""Snapshots: all or nothing, newest epoch wins, damage is found, any number of shards restores."""

from __future__ import annotations

import errno
import functools
import hashlib
import io
import itertools
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moto.server import ThreadedMotoServer

from shoal_trainer.errors import Fenced, SnapshotError, TrainerError, Unreachable, UserError
from shoal_trainer.ps.layout import GRAIN, bounds
from shoal_trainer.ps.shard import ShardCopy, ShardStore
from shoal_trainer.snapshot import claims, shard_file
from shoal_trainer.snapshot.claims import Claim
from shoal_trainer.snapshot.manifest import Manifest
from shoal_trainer.snapshot.storage import LocalStorage, RemoteStorage, Storage, open_storage
from shoal_trainer.snapshot.store import SnapshotStore
from shoal_trainer.wire.messages import ModelSpec, OptimizerConfig, PushMeta

N, STATISTICS = 70_000, 500
MODEL = ModelSpec(
    fingerprint="f" * 64,
    parameters=N - STATISTICS,
    statistics=STATISTICS,
    optimizer=OptimizerConfig(name="adam", batch_size=1),
)


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A real S3 server on loopback; yields its endpoint."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["file", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "file":
        return open_storage(tmp_path.as_uri(), "ns/job/uid")
    options = {"endpoint_url": request.getfixturevalue("s3"), "key": "k", "secret": "s"}
    bucket = f"bucket-{abs(hash(request.node.name)) % 10**9}"
    storage = RemoteStorage(f"s3://{bucket}/ns/job/uid", **options)
    storage._fs.mkdir(bucket)
    return storage


@pytest.fixture
def local(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(LocalStorage(tmp_path))


def shards(count: int, pushes: int = 3) -> list[ShardStore]:
    stores = []
    for index, (low, high) in enumerate(bounds(N, count)):
        shard = ShardStore(index, count, 0)
        shard.hello(0, 0, MODEL)
        shard.initialize(np.linspace(-1, 1, N, dtype=np.float32)[low:high])
        for seq in range(1, pushes + 1):
            gradient = np.cos(np.arange(N, dtype=np.float32) * seq)[low:high]
            shard.push(0, 0, seq, seq - 1, PushMeta(samples=1), gradient)
        stores.append(shard)
    return stores


def save(store: SnapshotStore, stores: list[ShardStore], epoch: int = 0, **fields: Any) -> Manifest:
    number = store.next_number()
    files = [store.write_shard(number, epoch, copy) for shard in stores if (copy := shard.copy())]
    return store.publish(
        Manifest(number=number, epoch=epoch, job_uid="uid", shards=tuple(files), model=MODEL, **fields)
    )


def whole(copies: list[ShardCopy], name: str) -> np.ndarray:
    return np.concatenate([copy.arrays[name] for copy in copies])


@pytest.mark.parametrize(("before", "after"), [(1, 1), (3, 3), (1, 4), (4, 1), (3, 2), (2, 5)])
def test_it_restores_into_any_number_of_shards(local: SnapshotStore, before: int, after: int) -> None:
    stores = shards(before)
    save(local, stores)
    originals = [copy for shard in stores if (copy := shard.copy())]
    found = [local.load_newest(index, after) for index in range(after)]
    copies = [item[1] for item in found if item is not None]
    assert len(copies) == after
    for name in ("parameters", "m", "v"):
        np.testing.assert_array_equal(whole(copies, name), whole(originals, name))
    for copy in copies:
        assert (copy.version, copy.samples, copy.updates, copy.applied) == (3, 3, 3, {(0, 0): 3})
        shard = ShardStore(copy.index, after, 1)
        shard.restore(copy)
        assert shard.hello(0, 0, MODEL).last_seq == 3


def test_a_restored_shard_goes_on_bit_for_bit(local: SnapshotStore) -> None:
    (shard,) = shards(1)
    save(local, [shard])
    found = local.load_newest(0, 1)
    assert found is not None
    again = ShardStore(0, 1, 1)
    again.restore(found[1])
    again.hello(0, 0, MODEL)
    results = []
    for one in (shard, again):
        exchanged = np.sin(np.arange(N, dtype=np.float32))
        one.push(0, 0, 4, 3, PushMeta(samples=1), exchanged)
        results.append(exchanged)
    np.testing.assert_array_equal(*results)


def test_a_snapshot_is_seen_only_when_published(storage: Storage) -> None:
    store, (shard,) = SnapshotStore(storage), shards(1)
    assert store.latest() is None
    assert store.load_newest(0, 1) is None
    copy = shard.copy()
    assert copy is not None
    store.write_shard(store.next_number(), 0, copy)
    assert store.latest() is None
    saved = save(store, [shard], ledger={"snake_case": [1, 2]}, wall_time=5.0)
    assert store.latest() == saved
    assert saved.ledger == {"snake_case": [1, 2]}
    assert saved.applied == {(0, 0): 3}
    found = store.load_newest(0, 1)
    assert found is not None
    np.testing.assert_array_equal(found[1].arrays["m"], copy.arrays["m"])


def test_an_old_epoch_never_covers_a_newer_one(storage: Storage) -> None:
    old, new, (shard,) = SnapshotStore(storage), SnapshotStore(storage), shards(1)
    save(old, [shard], epoch=1)
    save(new, [shard], epoch=2)
    with pytest.raises(Fenced, match="epoch 2, this is 1"):
        save(old, [shard], epoch=1)
    latest = new.latest()
    assert latest is not None
    assert (latest.epoch, latest.number) == (2, 2)


def test_two_incarnations_fight_for_the_manifest(storage: Storage) -> None:
    """Both publish as fast as they can: numbers never repeat, and once the newer one is seen it stays."""
    (shard,) = shards(1)
    outcome: dict[int, Any] = {1: None, 2: None}
    copy = shard.copy()
    assert copy is not None
    part = SnapshotStore(storage).write_shard(1, 1, copy)

    def publish(epoch: int) -> None:
        store = SnapshotStore(storage)
        try:
            for _ in range(8):
                store.publish(Manifest(number=1, epoch=epoch, job_uid="uid", shards=(part,), model=MODEL))
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


def test_who_is_claimed_by_a_higher_incarnation_publishes_nothing(storage: Storage) -> None:
    store, (shard,) = SnapshotStore(storage), shards(1)
    save(store, [shard])
    Claim(storage, 0, 0).make()
    assert [name for name in storage.names("snapshots") if name.startswith("epoch")] == []
    Claim(storage, 0, 2).make()
    Claim(storage, 0, 2).make()  # started again in place
    Claim(storage, 1, 7).make()  # another shard
    Claim(storage, 0, 3).check()
    for lower in (0, 1):
        with pytest.raises(Fenced, match=f"incarnation 2 of shard 0 is there, this is incarnation {lower}"):
            Claim(storage, 0, lower).check()
    with pytest.raises(Fenced, match="this is incarnation 1"):
        Claim(storage, 0, 1).make()
    with pytest.raises(Fenced, match="incarnation 2 has claimed the storage, this is 0"):
        save(store, [shard])
    assert save(store, [shard], epoch=2).number == 2
    store.prune(3)
    assert [name for name in storage.names("snapshots") if name.startswith("epoch")] == [
        "epoch-0-2",
        "epoch-1-7",
    ]


def test_a_part_of_a_shard_that_was_replaced_is_in_no_snapshot(local: SnapshotStore, tmp_path: Path) -> None:
    stores = shards(2)
    files = [local.write_shard(1, 0, copy) for shard in stores if (copy := shard.copy())]
    local.check(files)
    Claim(LocalStorage(tmp_path), 1, 1).make()
    with pytest.raises(Unreachable, match="shard 1 was replaced"):
        local.check(files)


def test_a_snapshot_that_comes_while_an_older_one_is_loaded_is_taken(
    local: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shard,) = shards(1)
    save(local, [shard])
    shard.push(0, 0, 4, 3, PushMeta(samples=1), np.ones(N, dtype=np.float32))
    load = SnapshotStore.load_shard

    def slow(self: SnapshotStore, manifest: Manifest, index: int, count: int) -> ShardCopy:
        if manifest.number == 1:
            save(local, [shard])
        return load(self, manifest, index, count)

    monkeypatch.setattr(SnapshotStore, "load_shard", slow)
    found = local.load_settled(0, 1)
    assert found is not None
    assert (found[0].number, found[1].version) == (2, 4)


claimed = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), max_size=12)


@given(claimed, st.lists(st.text(max_size=12)))
def test_of_each_shard_the_highest_claim_counts_and_is_kept(
    made: list[tuple[int, int]], others: list[str]
) -> None:
    names = [*others, *(f"epoch-{index}-{epoch}" for index, epoch in made), "manifest-0000000001.json"]
    newest = {index: max(e for i, e in made if i == index) for index, _ in made}
    assert claims.highest(names) == newest
    kept = set(names) - set(claims.outdated(names))
    assert claims.highest(kept) == newest
    assert kept - set(others) - {"manifest-0000000001.json"} == {f"epoch-{i}-{e}" for i, e in newest.items()}


def test_only_so_many_are_kept(storage: Storage) -> None:
    store, (shard,) = SnapshotStore(storage), shards(1, pushes=1)
    for _ in range(5):
        save(store, [shard])
        store.prune(2)
    assert [manifest.number for manifest in store.manifests()] == [5, 4]
    assert [name for name in storage.names("snapshots") if name[0] == "0"] == ["0000000004-0", "0000000005-0"]
    assert store.load_newest(0, 1) is not None


@pytest.mark.parametrize("damage", ["bit", "short", "long", "absent", "manifest", "half manifest", "empty"])
def test_a_damaged_snapshot_is_skipped_with_a_message(
    local: SnapshotStore, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    (shard,) = shards(1)
    good = save(local, [shard])
    bad = save(local, [shard])
    file = tmp_path / "snapshots" / bad.shards[0].file
    manifest = tmp_path / "snapshots" / f"manifest-{bad.number:010d}.json"
    content = bytearray(file.read_bytes())
    if damage == "bit":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif damage == "short":
        file.write_bytes(content[:-1])
    elif damage == "long":
        file.write_bytes(content + b"\0")
    elif damage == "absent":
        file.unlink()
    elif damage == "manifest":
        manifest.write_text('{"number": "x"}')
    elif damage == "half manifest":
        manifest.write_bytes(manifest.read_bytes()[:50])
    else:
        manifest.write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        found = local.load_newest(0, 1)
    assert found is not None
    assert found[0].number == good.number
    assert "skipped" in caplog.text
    assert save(local, [shard]).number == bad.number + 1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.one_of(st.integers(0, 400), st.integers(0, 10**7)), st.integers(1, 255)),
        min_size=1,
        max_size=3,
    )
)
def test_no_damage_at_all_is_taken_for_a_snapshot(damage: list[tuple[int, int]]) -> None:
    """The fuzzer of the file's decoder: refused in words, never a crash, never wrong numbers."""
    original = fuzzed_file()
    content = bytearray(original)
    for place, value in damage:
        content[place % len(content)] ^= value
    arrays = {"parameters": np.zeros(N, np.float32), "m": np.zeros(N, np.float32)}
    arguments = (len(content), hashlib.sha256(original).hexdigest(), 0, N, arrays)
    if content == original:
        shard_file.read_into(io.BytesIO(content), *arguments)
    else:
        with pytest.raises(SnapshotError):
            shard_file.read_into(io.BytesIO(content), *arguments)


@functools.cache
def fuzzed_file() -> bytes:
    (shard,) = shards(1, pushes=1)
    copy = shard.copy()
    assert copy is not None
    return b"".join(bytes(chunk) for chunk in shard_file.chunks(copy))


def test_a_full_disk_is_said_and_leaves_nothing(local: SnapshotStore, tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)

    def chunks() -> Iterator[bytes]:
        yield b"x" * 100
        raise OSError(28, "No space left on device")

    with pytest.raises(Unreachable, match="No space left on device"):
        storage.write("snapshots/file", chunks())
    assert storage.names("snapshots") == []


def test_storage_that_is_away_is_unreachable() -> None:
    away = RemoteStorage(
        "s3://bucket/run",
        endpoint_url="http://127.0.0.1:9",
        key="k",
        secret="s",
        config_kwargs={"retries": {"max_attempts": 0}, "connect_timeout": 1},
    )
    with pytest.raises(Unreachable, match="cannot list"):
        SnapshotStore(away).latest()


def test_an_unknown_scheme_is_a_user_error() -> None:
    with pytest.raises(UserError, match="storage nothing://x"):
        open_storage("nothing://x")


def test_a_path_is_a_storage_too(tmp_path: Path) -> None:
    for uri in (str(tmp_path), tmp_path.as_uri()):
        storage = open_storage(uri, "a/b")
        storage.write("model/file", [b"1", b"2"])
        assert (tmp_path / "a" / "b" / "model" / "file").read_bytes() == b"12"
        assert storage.uri == (tmp_path / "a" / "b").as_uri()


def test_storage_basics(storage: Storage) -> None:
    assert storage.names("x") == []
    storage.write("x/one", [b"abc", memoryview(b"def")])
    storage.write("x/one", [b"abcdef", b"g"])
    assert storage.read("x/one") == b"abcdefg"
    assert storage.size("x/one") == 7
    assert storage.create("x/two", b"1")
    assert not storage.create("x/two", b"2")
    assert storage.read("x/two") == b"1"
    assert storage.names("x") == ["one", "two"]
    with storage.open("x/one") as handle:
        assert handle.read(3) == b"abc"
    storage.remove("x/one")
    storage.remove("x/never")
    assert storage.names("x") == ["two"]
    for missing in (storage.read, storage.size):
        with pytest.raises(FileNotFoundError):
            missing("x/one")


def test_a_volume_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    storage = LocalStorage(tmp_path)
    assert storage.create("manifest", b"1")
    assert not storage.create("manifest", b"2")
    assert storage.read("manifest") == b"1"
    assert storage.names("") == ["manifest"]


def test_writes_leave_no_parts_behind(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("a", [b"1"])
    storage.create("b", b"1")
    storage.create("b", b"2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@settings(deadline=None)
@given(st.integers(1, 10 * GRAIN), st.integers(1, 12))
def test_ranges_cover_everything_once(size: int, count: int) -> None:
    parts = bounds(size, count)
    assert len(parts) == count
    assert parts[0][0] == 0
    assert parts[-1][1] == size
    assert all(high == low for (_, high), (low, _) in itertools.pairwise(parts))
    assert all(low % GRAIN == 0 for low, high in parts if low < high)
    lengths = [high - low for low, high in parts]
    assert max(lengths) - min(lengths) <= 2 * GRAIN
