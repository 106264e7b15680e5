"""Snapshots: publication, restore into any number of shards, retention, and damage."""

from __future__ import annotations

import atexit
import functools
import hashlib
import io
import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import to_json

from dev.night import examples
from shoal_trainer.contract import Message
from shoal_trainer.errors import SnapshotError
from shoal_trainer.ps.shard import ShardCopy, ShardStore
from shoal_trainer.snapshot import shard_file
from shoal_trainer.snapshot.manifest import PIECE, Manifest, ShardFile
from shoal_trainer.snapshot.published import path
from shoal_trainer.snapshot.storage import LocalStorage, Storage
from shoal_trainer.snapshot.store import SnapshotStore
from shoal_trainer.wire.messages import BegunPush, Progress, PushMeta
from tests.unit.trainer.ps.shards import Clock, push_to
from tests.unit.trainer.snapshot.saving import MODEL, N, latest, save, shards, whole


@pytest.mark.parametrize(("before", "after"), [(1, 1), (3, 3), (1, 4), (4, 1), (3, 2), (2, 5)])
def test_snapshot_restores_into_any_number_of_shards(local: SnapshotStore, before: int, after: int) -> None:
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
        # Of another number, none is in some shards only: what was, is counted for good.
        assert copy.pushes == (((0, 0, 1, 4),) if before == after else ())
        shard = ShardStore(copy.index, after, 1)
        shard.restore(copy)
        assert shard.hello(0, 0, MODEL).last_seq == 3


@pytest.mark.parametrize("after", [1, 3])
def test_what_one_part_lacks_is_not_applied_in_another_number_of_shards(
    local: SnapshotStore, after: int
) -> None:
    """A push that one part has, and another has not, is in no state that they make together: it is sent again."""
    ahead, behind = shards(2, pushes=5)[0], shards(2, pushes=3)[1]
    assert save(local, [ahead, behind]).applied == {(0, 0): 3}
    for index in range(after):
        assert (found := local.load_newest(index, after)) is not None
        assert found[1].applied == {(0, 0): 3}


def test_who_pushed_to_one_part_only_has_applied_nothing() -> None:
    state: dict[str, Any] = {"shards": 2, "epoch": 0, "version": 1, "file": "f", "size": 1, "sha256": "0"}
    one = ShardFile(index=0, low=0, high=1, applied=[(0, 0, 5), (1, 2, 4)], **state)
    other = ShardFile(index=1, low=1, high=2, applied=[(0, 0, 7)], **state)
    made = Manifest(number=1, epoch=0, run="uid", shards=(one, other), model=MODEL)
    assert made.applied == {(0, 0): 5, (1, 2): 0}


PART = """{
    "index": 0, "shards": 1, "epoch": 2, "version": 7, "samples": 14, "updates": 6, "pace": 0.5, "filled": 0.75,
    "agreement": 0.25, "usual": 1.5, "low": 0, "high": 8, "file": "0000000001-2.shard-0-of-1-0a1b2c3d", "size": 128,
    "sha256": "c0ffee", "applied": [[0, 0, 7], [1, 0, 2]], "pushes": [[0, 0, 1, 8], [1, 0, 1, 3]],
    "begun": [[1, 0, 3, 2, -1, [[0, -1, 4, 6]]]]
}"""


def test_a_part_has_the_same_keys_in_the_manifests_of_all_versions() -> None:
    part, known = ShardFile.model_validate_json(PART), json.loads(PART)
    assert json.loads(part.to_json()) == known
    assert part.begun == (BegunPush(1, 0, 3, 2, -1, (Progress(0, -1, 4, 6),)),)
    for later in ("samples", "updates", "pace", "filled", "agreement", "usual", "applied", "pushes", "begun"):
        del known[later]
    assert ShardFile.model_validate(known).pushes == ()


def test_restored_shard_continues_bit_for_bit(local: SnapshotStore) -> None:
    (shard,) = shards(1)
    save(local, [shard])
    found = local.load_newest(0, 1)
    assert found is not None
    clock = Clock()
    again = ShardStore(0, 1, 1, clock=clock)
    again.restore(found[1])
    again.hello(0, 0, MODEL)
    clock.now += 100  # nobody else comes with a copy
    results = []
    for one in (shard, again):
        exchanged = np.sin(np.arange(N, dtype=np.float32))
        push_to(one, 0, 0, 4, 3, PushMeta(samples=1), exchanged)
        results.append(exchanged)
    np.testing.assert_array_equal(results[0], results[1])


def test_unpublished_snapshot_is_invisible(storage: Storage) -> None:
    store, (shard,) = SnapshotStore(storage), shards(1)
    assert latest(store) is None
    assert store.load_newest(0, 1) is None
    copy = shard.copy()
    assert copy is not None
    store.write_shard(store.next_number(), 0, copy)
    assert latest(store) is None
    saved = save(store, [shard], ledger={"snake_case": [1, 2]}, wall_time=5.0)
    assert latest(store) == saved
    assert saved.ledger == {"snake_case": [1, 2]}
    assert saved.applied == {(0, 0): 3}
    found = store.load_newest(0, 1)
    assert found is not None
    np.testing.assert_array_equal(found[1].arrays["m"], copy.arrays["m"])


@pytest.mark.parametrize("named", [(0, 0, 1), (1, 2)])
def test_manifest_that_does_not_name_each_shard_once_is_not_published(
    local: SnapshotStore, named: tuple[int, ...]
) -> None:
    files = {s.index: local.write_shard(1, 0, copy) for s in shards(3) if (copy := s.copy())}
    parts = tuple(files[index] for index in named)
    with pytest.raises(SnapshotError, match="does not name each of its"):
        local.publish(Manifest(number=1, epoch=0, run="uid", shards=parts, model=MODEL))
    assert latest(local) is None


def test_snapshot_published_during_a_load_is_used(
    local: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shard,) = shards(1)
    save(local, [shard])
    push_to(shard, 0, 0, 4, 3, PushMeta(samples=1), np.ones(N, dtype=np.float32))
    load = SnapshotStore.load_shard

    def slow(self: SnapshotStore, manifest: Manifest, index: int, count: int) -> ShardCopy:
        if manifest.number == 1:
            save(local, [shard])
        return load(self, manifest, index, count)

    monkeypatch.setattr(SnapshotStore, "load_shard", slow)
    found = local.load_settled(0, 1)
    assert found is not None
    assert (found[0].number, found[1].version) == (2, 4)


def test_prune_keeps_the_newest_snapshots(storage: Storage) -> None:
    store, (shard,) = SnapshotStore(storage), shards(1, pushes=1)
    for _ in range(5):
        save(store, [shard])
        store.prune(2, 0)
    assert [manifest.number for manifest in store.manifests()] == [5, 4]
    files = [name[:12] for name in storage.names("snapshots") if name[0] == "0"]
    assert files == ["0000000004-0", "0000000005-0"]
    assert store.load_newest(0, 1) is not None


def test_prune_counts_no_snapshot_that_could_not_be_loaded(local: SnapshotStore, tmp_path: Path) -> None:
    """Nor removes one for it, as long as there is nothing newer that can be."""
    (shard,) = shards(1, pushes=1)
    saved = [save(local, [shard]) for _ in range(4)]
    for damaged in saved[1:]:
        (tmp_path / "snapshots" / damaged.shards[0].file).write_bytes(b"damaged")
    store = SnapshotStore(LocalStorage(tmp_path))
    assert latest(store) == saved[0]

    def kept() -> list[int]:
        store.prune(3, 0)
        return [manifest.number for manifest in store.manifests()]

    assert kept() == [4, 3, 2, 1]
    for numbers in ([5, 1], [6, 5, 1], [7, 6, 5]):
        save(store, [shard])
        assert kept() == numbers


@pytest.mark.parametrize("damage", ["bit", "short", "long", "absent", "manifest", "half manifest", "empty"])
def test_damaged_snapshot_is_skipped_and_logged(
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


def test_file_that_is_read_wrongly_once_is_not_damaged(
    local: SnapshotStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit that flips on its way would cost all since the snapshot before, or end the job at a rollback."""
    (shard,) = shards(1)
    newest = [save(local, [shard]), save(local, [shard])][-1]
    opened: list[str] = []

    def flips(_: LocalStorage, name: str) -> io.BytesIO:
        content = bytearray((tmp_path / name).read_bytes())
        if "shard-" in name:
            content[len(content) // 2] ^= not opened
            opened.append(name)
        return io.BytesIO(content)

    monkeypatch.setattr(LocalStorage, "open", flips)
    found = local.load_newest(0, 1)
    assert found is not None
    assert found[0] == newest
    assert len(opened) == 2
    copy = shard.copy()
    assert copy is not None
    assert {name: values.tolist() for name, values in found[1].arrays.items()} == {
        name: values.tolist() for name, values in copy.arrays.items()
    }


def test_shard_with_a_damaged_part_logs_an_error_and_loads_the_previous_snapshot(
    local: SnapshotStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The other shards do not read this file: they load the newest snapshot."""
    stores = shards(2)
    save(local, stores)
    name = save(local, stores).shards[1].file
    file = tmp_path / "snapshots" / name
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    found = [local.load_newest(index, 2) for index in (0, 1)]
    assert [item and item[0].number for item in found] == [2, 1]
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.levelno == logging.ERROR
    assert name in record.getMessage()
    assert "skipped by shard 1 of 2" in record.getMessage()


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(st.one_of(st.integers(0, 400), st.integers(0, 10**7)), st.integers(1, 255)),
        min_size=1,
        max_size=3,
    )
)
def test_any_damage_to_a_shard_file_is_detected(damage: list[tuple[int, int]]) -> None:
    """Damage raises SnapshotError instead of returning wrong values."""
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


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.integers(0, 10**4), st.integers(1, 127)), min_size=1, max_size=3))
def test_damaged_manifest_is_skipped_or_restores_the_same_values(damage: list[tuple[int, int]]) -> None:
    root, name, original, values = fuzzed_manifest()
    content = bytearray(original)
    for place, value in damage:
        content[place % len(content)] ^= value
    (root / name).write_bytes(content)
    found = SnapshotStore(LocalStorage(root)).load_newest(0, 1)
    if found is not None:
        np.testing.assert_array_equal(found[1].arrays["parameters"], values)


def test_manifest_that_is_too_large_to_be_read_is_not_published(
    local: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else, some snapshots later, there would be none."""
    monkeypatch.setattr("shoal_trainer.snapshot.published.MAX_MANIFEST", 100_000)
    save(local, shards(1))
    with pytest.raises(SnapshotError, match="more than 100000 bytes"):
        save(local, shards(1), ledger={"history": "x" * 100_000})
    found = latest(local)
    assert found is not None
    assert found.number == 1


@pytest.mark.parametrize("change", [{"parameters": 9 * N}, {"statistics": 9 * N}, {"statistics": 0}])
def test_manifest_whose_shards_do_not_cover_the_model_is_skipped(
    local: SnapshotStore, tmp_path: Path, change: dict[str, int]
) -> None:
    manifest = save(local, shards(2))
    wrong = manifest.model_copy(update={"model": MODEL.model_copy(update=change)})
    (tmp_path / path(1)).write_text(wrong.to_json())
    assert local.load_newest(0, 2) is None
    assert local.load_newest(0, 3) is None


@functools.cache
def fuzzed_manifest() -> tuple[Path, str, bytes, np.ndarray]:
    """A folder with a snapshot, its manifest's name and content, and its parameters."""
    root = Path(tempfile.mkdtemp(prefix="shoal-test-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    store, (shard,) = SnapshotStore(LocalStorage(root)), shards(1, pushes=1)
    name, copy = path(save(store, [shard]).number), shard.copy()
    assert copy is not None
    return root, name, (root / name).read_bytes(), copy.arrays["parameters"]


@functools.cache
def fuzzed_file() -> bytes:
    (shard,) = shards(1, pushes=1)
    copy = shard.copy()
    assert copy is not None
    return b"".join(bytes(chunk) for chunk in shard_file.chunks(copy))


def test_manifest_is_read_once_and_not_by_who_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 100,000 files its ledger takes a second to read."""
    storage, (shard,) = LocalStorage(tmp_path), shards(1)
    other, store = SnapshotStore(storage), SnapshotStore(storage)
    save(other, [shard])
    read, names = LocalStorage.read, []

    def counted(self: LocalStorage, name: str) -> bytes:
        names.append(name)
        return read(self, name)

    monkeypatch.setattr(LocalStorage, "read", counted)
    for _ in range(4):
        save(store, [shard], ledger={"large": 1})
        store.prune(3, 0)
    assert names == ["snapshots/manifest-0000000001.json"]
    found = store.load_newest(0, 1)
    assert found is not None
    assert (found[0].number, found[0].ledger) == (5, {"large": 1})


def test_a_long_ledger_is_made_json_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = [[file, [(0, file)]] for file in range(3 * PIECE + 1)]
    ledger = {
        "passes": [[0, ranges, None]],
        "data": {"files": [f"part-{i}" for i in range(PIECE + 1)]},
        "loss": float("nan"),
        "none": [],
    }
    made = Manifest(number=1, epoch=0, run="uid", shards=(), model=MODEL, ledger=ledger)
    longest = [0]

    def measured(value: Any, **options: Any) -> bytes:
        longest[0] = max(longest[0], len(value) if isinstance(value, list | tuple) else 1)
        return to_json(value, **options)

    monkeypatch.setattr("shoal_trainer.snapshot.manifest.to_json", measured)
    assert json.loads(made.to_json()) == json.loads(Message.to_json(made))
    assert longest[0] == PIECE
