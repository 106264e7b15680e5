"""Storages: files, errors, and atomic writes."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shoal_trainer.errors import BadName, Fenced, Unreachable, UserError
from shoal_trainer.snapshot import storage as storage_module
from shoal_trainer.snapshot.claims import Claim, check_storage
from shoal_trainer.snapshot.storage import LocalStorage, RemoteStorage, Storage, open_storage
from shoal_trainer.snapshot.store import SnapshotStore
from tests.unit.trainer.snapshot.saving import latest


def test_names_in_a_bucket_are_no_patterns(s3: str) -> None:
    """`[`, `*` and `?` in the URI of a storage: nothing would be removed, or what is of another run."""
    for name in ("runs[lr=0.1]", "runs*", "runs"):
        storage = RemoteStorage(f"s3://patterns/{name}", endpoint_url=s3, key="k", secret="s")
        if not storage._fs.exists("patterns"):
            storage._fs.mkdir("patterns")
        storage.write("a/[b]", [b"1"])
        storage.write("a/b", [b"2"])
        storage.write("c", [b"3"])
        storage.write("c0", [b"4"])
    for name in ("runs[lr=0.1]", "runs*"):
        storage = RemoteStorage(f"s3://patterns/{name}", endpoint_url=s3, key="k", secret="s")
        storage.remove("a/[b]")
        assert storage.names("a") == ["b"]
        storage.remove("a")
        storage.remove("c")
        assert storage.names("") == ["c0"]
    other = RemoteStorage("s3://patterns/runs", endpoint_url=s3, key="k", secret="s")
    assert (other.names(""), other.names("a")) == (["a", "c", "c0"], ["[b]", "b"])


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


REFUSALS = {
    "The specified bucket does not exist": "Create the bucket",
    "Access Denied": "read, write, list and delete",
    "x@y.iam does not have storage.objects.create access to the Google Cloud Storage bucket.": "read, write, list",
    "The AWS Access Key Id you provided does not exist in our records.": "valid credentials",
    "Unable to locate credentials": "valid credentials",
    "The provided token has expired.": "valid credentials",
    "The authorization header is malformed; the region 'us-east-1' is wrong; expecting 'eu-west-1'": "AWS_REGION",
    "The bucket you are attempting to access must be addressed using the specified endpoint.": "AWS_REGION",
    'Could not connect to the endpoint URL: "http://minoi.team:9000/b/a"': "AWS_ENDPOINT_URL",
    'Connect timeout on endpoint URL: "http://minio.team:9000/b/a"': "AWS_ENDPOINT_URL",
    "SSL validation failed for https://minio/b [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: "
    "certificate signature failure (_ssl.c:1010)": "AWS_CA_BUNDLE",
    "The request signature we calculated does not match the signature you provided.": "valid credentials",
    "User: arn:aws:iam::1:role/x is not authorized to perform: kms:GenerateDataKey on resource: k": "KMS key",
    "User: arn:aws:iam::1:role/region-credentials is not authorized to perform: s3:PutObject": "read, write, list",
    "Cannot connect to host storage.googleapis.com:443 ssl:default [Name or service not known]": "DNS",
}


@pytest.mark.parametrize(("words", "advice"), REFUSALS.items(), ids=REFUSALS.values())
def test_bucket_that_refuses_is_told_with_what_to_change(
    words: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = RemoteStorage("memory://refused")

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(words)

    monkeypatch.setattr(storage._fs, "pipe_file", refuse)
    with pytest.raises(Unreachable, match=re.escape(words.rstrip("."))) as told:
        storage.create("a", b"x")
    assert advice in str(told.value)


@pytest.mark.parametrize(
    "words",
    [
        "Please reduce your request rate.",
        'Read timeout on endpoint URL: "https://b.s3.eu-west-1.amazonaws.com/x"',
        'Connection was closed before we received a valid response from endpoint URL: "https://b.amazonaws.com/x".',
    ],
)
def test_outage_that_nobody_can_mend_is_told_without_advice(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = RemoteStorage("memory://busy")

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(words)

    monkeypatch.setattr(storage._fs, "pipe_file", refuse)
    with pytest.raises(Unreachable, match=f"{re.escape(words)}$"):
        storage.create("a", b"x")


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
    storage.sweep()
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


@pytest.mark.parametrize("how", ["write", "create"])
def test_file_is_on_the_disk_before_its_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Nobody reads a part of it, and no power cut takes it back: an older snapshot may be gone by then."""
    storage = LocalStorage(tmp_path)
    done: list[str] = []

    def told(what: Callable[..., Any], said: Callable[..., str]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            result = what(*given, **more)
            done.append(said(*given))
            return result

        return call

    def of(descriptor: int) -> str:
        return "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"

    monkeypatch.setattr(os, "fsync", told(os.fsync, of))
    for name in ("link", "replace"):
        monkeypatch.setattr(os, name, told(getattr(os, name), lambda *_: "name"))
    if how == "write":
        storage.write("manifest", [b"x"])
    else:
        assert storage.create("manifest", b"x")
    assert done == ["file", "name", "folder"]
    assert (tmp_path / "manifest").read_bytes() == b"x"


def test_writes_leave_no_temporary_files(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("a", [b"1"])
    storage.create("b", b"1")
    storage.create("b", b"2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_file_may_have_a_name_as_long_as_the_disk_takes(tmp_path: Path) -> None:
    storage, name = LocalStorage(tmp_path, "ps-0"), "w" * 255
    storage.write(f"logs/{name}", [b"x"])
    assert storage.create(f"model/{name}", b"x")
    assert storage.read(f"logs/{name}") == storage.read(f"model/{name}") == b"x"


@pytest.mark.parametrize("name", ["logs/" + "w" * 256, "logs/folder", "logs/file/below", "logs/file/b/c"])
def test_name_that_a_volume_cannot_have_is_no_outage(tmp_path: Path, name: str) -> None:
    """It would be retried for ever; and nothing of it is written before that is known."""
    storage, sent = LocalStorage(tmp_path), []
    storage.write("logs/folder/below", [b"1"])
    storage.write("logs/file", [b"2"])

    def chunks() -> Iterator[bytes]:
        sent.append(b"x")
        yield b"x"

    with pytest.raises(BadName, match=rf"cannot write .*{name[:20]}.*Choose another name"):
        storage.write(name, chunks())
    assert sent == []
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()) == [
        "logs/file",
        "logs/folder/below",
    ]
    storage.remove(name if "ww" in name else "none")
    if name != "logs/folder":
        for read in (storage.read, storage.size):
            with pytest.raises(FileNotFoundError):
                read(name)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EISDIR, errno.EIO, errno.ESTALE])
def test_bytes_that_cannot_be_written_are_an_outage(tmp_path: Path, code: int) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"x"
        raise OSError(code, os.strerror(code))

    with pytest.raises(Unreachable):
        LocalStorage(tmp_path).write("file", chunks())


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EEXIST, errno.ENOTDIR])
@pytest.mark.parametrize("sick", ["run", "*.part"])
def test_volume_that_refuses_all_names_is_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, sick: str
) -> None:
    """As a mount that went away: what fails for the folder of the run, and for every file in it, is of no name."""

    def refusing(method: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(path: Path, *args: Any, **options: Any) -> Any:
            if path.match(sick):
                raise OSError(code, os.strerror(code))
            return method(path, *args, **options)

        return refuse

    storage = LocalStorage(tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", refusing(Path.mkdir))
        patched.setattr(Path, "open", refusing(Path.open))
        with pytest.raises(Unreachable):
            check_storage(storage, "this", lambda _: False)
        with pytest.raises(Unreachable):
            Claim(storage, 0, 1).make()
    Claim(storage, 0, 1).make()


def test_name_that_a_bucket_cannot_have_is_no_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = RemoteStorage("memory://long")

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENAMETOOLONG, "Your key is too long")

    monkeypatch.setattr(storage._fs, "open", refuse)
    with pytest.raises(BadName, match=r"Your key is too long\. Choose a shorter name"):
        storage.write("a", [b"x"])


def test_incomplete_files_of_a_killed_server_are_removed_by_its_successor(tmp_path: Path) -> None:
    """Not those of another server, nor those that this process writes, nor what a user keeps there."""

    def opened(writer: str) -> LocalStorage:
        storage = open_storage(tmp_path.as_uri(), "run", writer)
        assert isinstance(storage, LocalStorage)
        return storage

    killed, other, successor = opened("ps-1"), opened("ps-11"), opened("ps-1")
    run = tmp_path / "run"
    (users := run / "logs" / "deep" / ".download.part").parent.mkdir(parents=True)
    users.write_bytes(b"x")
    with contextlib.ExitStack() as written:

        def begun(by: LocalStorage, name: str) -> Path:
            return written.enter_context(by._write_temporary(run / name, [b"x"]))

        first, second = (begun(killed, name) for name in ("snapshots/a", "logs/deep/history.csv"))
        earlier = [begun(each, "snapshots/b") for each in (killed, other)]  # as earlier versions named them
        earlier = [path.rename(path.with_name(f".model.keras{path.name}")) for path in earlier]
        kept = [begun(each, "snapshots/a") for each in (other, successor)]
        successor.sweep("snapshots")
        assert (first.exists(), second.exists()) == (False, True)
        assert [path.exists() for path in earlier] == [False, True]
        successor.sweep()
        assert not second.exists()
        assert all(path.exists() for path in [*kept, users])


def test_folder_that_another_server_removes_meanwhile_ends_no_cleaning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path, "ps-0")
    left = [tmp_path / folder / ".ps-0-01234567.01234567.part" for folder in "abc"]
    for part in left:
        part.parent.mkdir()
        part.write_bytes(b"x")
    unlink = Path.unlink

    def beside(path: Path, *, missing_ok: bool = False) -> None:
        unlink(path, missing_ok=missing_ok)
        if len(others := [part for part in left if part.exists()]) == 2:
            unlink(others[0])
            others[0].parent.rmdir()

    monkeypatch.setattr(Path, "unlink", beside)
    storage.sweep()
    assert not any(part.exists() for part in left)


def test_process_that_ends_leaves_nothing_half_written(tmp_path: Path) -> None:
    """Its threads write until it is gone."""
    storage, writing, go = LocalStorage(tmp_path), threading.Event(), threading.Event()

    def slow() -> Iterator[bytes]:
        yield b"half"
        writing.set()
        assert go.wait(60)

    with ThreadPoolExecutor(1) as pool:
        write = pool.submit(storage.write, "snapshots/a", slow())
        assert writing.wait(60)
        storage.close()
        assert list(tmp_path.rglob("*.part")) == []
        go.set()
        with pytest.raises(Unreachable):
            write.result(60)
    with pytest.raises(Unreachable, match="this process ends"):
        storage.write("snapshots/a", [b"x"])
    assert storage.names("snapshots") == []


@pytest.mark.parametrize("chunk", [1, 300, 5000])
def test_writer_is_as_fast_as_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """The page cache would take a model at once, and one sync of it then take so long that its sender gives up."""
    monkeypatch.setattr(storage_module, "SYNC_BYTES", 1000)
    synced, fsync = [0], os.fsync

    def count(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            synced.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", count)
    LocalStorage(tmp_path).write("model", [bytes(chunk)] * (10_000 // chunk))
    assert synced[-1] == (tmp_path / "model").stat().st_size
    assert max(b - a for a, b in itertools.pairwise(synced)) <= max(1000 + chunk, chunk)


@pytest.mark.parametrize("fails", ["write", "close", "commit", ""])
def test_upload_is_confirmed_when_its_last_part_is_sent_and_aborted_if_it_fails(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """What was sent again after an error lost the chunk that the error had kept from the buffer, and was committed."""
    storage = RemoteStorage("memory://aborted")
    calls: list[str] = []

    class Upload:
        closed = False

        def __getattr__(self, name: str) -> Any:
            def call(*_: Any) -> None:
                calls.append(name)
                if name == fails:
                    raise OSError(f"{name} failed")

            return call

    monkeypatch.setattr(storage._fs, "open", lambda *_, **__: Upload())
    confirm = lambda: calls.append("confirmed")  # noqa: E731
    if not fails:
        storage.write("a", [b"bytes"], confirm)
        assert calls == ["write", "close", "confirmed", "commit"]
        return
    with pytest.raises(Unreachable, match=f"{fails} failed"):
        storage.write("a", [b"bytes"], confirm)
    assert ("confirmed" in calls) == (fails == "commit")
    assert calls[-2:] == [fails, "discard"]


@pytest.mark.parametrize("size", [0, 5, 17 << 20])
def test_object_of_a_replaced_writer_never_appears(s3: str, size: int) -> None:
    storage = RemoteStorage("s3://confirmed/run", endpoint_url=s3, key="k", secret="s")
    if not storage._fs.exists("confirmed"):
        storage._fs.mkdir("confirmed")

    def replaced() -> None:
        raise Fenced("a newer incarnation exists")

    with pytest.raises(Fenced):
        storage.write("a", [bytes(size)], replaced)
    assert storage.names("") == []
    storage.write("a", [bytes(size)])
    assert storage.size("a") == size
    storage.remove("a")
