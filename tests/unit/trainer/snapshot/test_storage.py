"""Storages: files, errors, and atomic writes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal_trainer.errors import Unreachable, UserError
from shoal_trainer.snapshot.storage import LocalStorage, RemoteStorage, Storage, open_storage
from shoal_trainer.snapshot.store import SnapshotStore
from tests.unit.trainer.snapshot.saving import latest


def test_write_to_a_full_disk_leaves_no_file(local: SnapshotStore, tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)

    def chunks() -> Iterator[bytes]:
        yield b"x" * 100
        raise OSError(28, "No space left on device")

    with pytest.raises(Unreachable, match="No space left on device"):
        storage.write("snapshots/file", chunks())
    assert storage.names("snapshots") == []


def test_storage_outage_is_unreachable() -> None:
    unreachable = RemoteStorage(
        "s3://bucket/run",
        endpoint_url="http://127.0.0.1:9",
        key="k",
        secret="s",
        config_kwargs={"retries": {"max_attempts": 0}, "connect_timeout": 1},
    )
    with pytest.raises(Unreachable, match="cannot list"):
        latest(SnapshotStore(unreachable))


def test_write_to_a_missing_bucket_is_unreachable_and_says_so(s3: str) -> None:
    storage = RemoteStorage("s3://buckt/run", endpoint_url=s3, key="k", secret="s")
    for write in (lambda: storage.write("a/b", [b"x"]), lambda: storage.create("a/b", b"x")):
        with pytest.raises(Unreachable, match=r"cannot write s3://buckt/run/a/b: .*bucket does not exist"):
            write()
    storage._fs.mkdir("buckt")
    storage.write("a/b", [b"x"])
    assert storage.read("a/b") == b"x"


def test_unknown_scheme_is_a_user_error() -> None:
    with pytest.raises(UserError, match="storage nothing://x"):
        open_storage("nothing://x")


def test_path_and_file_uri_are_equivalent(tmp_path: Path) -> None:
    for uri in (str(tmp_path), tmp_path.as_uri()):
        storage = open_storage(uri, "a/b")
        storage.write("model/file", [b"1", b"2"])
        assert (tmp_path / "a" / "b" / "model" / "file").read_bytes() == b"12"
        assert storage.uri == (tmp_path / "a" / "b").as_uri()


def test_storage_reads_writes_lists_and_removes(storage: Storage) -> None:
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


def test_create_works_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    storage = LocalStorage(tmp_path)
    assert storage.create("manifest", b"1")
    assert not storage.create("manifest", b"2")
    assert storage.read("manifest") == b"1"
    assert storage.names("") == ["manifest"]


def test_writes_leave_no_temporary_files(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("a", [b"1"])
    storage.create("b", b"1")
    storage.create("b", b"2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_upload_that_fails_at_its_end_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = RemoteStorage("memory://aborted")
    aborted = []

    class Upload:
        closed = False

        def write(self, data: bytes) -> int:
            return len(data)

        def close(self) -> None:
            raise OSError("the last part failed")

        def discard(self) -> None:
            aborted.append(True)

    monkeypatch.setattr(storage._fs, "open", lambda *_, **__: Upload())
    with pytest.raises(Unreachable, match="the last part failed"):
        storage.write("a", [b"bytes"])
    assert aborted == [True]
