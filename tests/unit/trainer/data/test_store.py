"""Where files are stored: full disks, outages, folders and patterns."""

import errno
import re
import tempfile
from pathlib import Path

import fsspec
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from shoal_trainer import Files, UserError
from shoal_trainer.data.read_errors import NOT_THERE, is_outage
from shoal_trainer.data.source import Part
from shoal_trainer.errors import DiskFull, Unreachable
from tests.unit.trainer.data.records import parse


def full(number):
    return OSError(number, "no room")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT])
def test_file_too_large_for_the_worker_disk_ends_the_worker_and_not_the_job(monkeypatch, number):
    store = fsspec.filesystem("memory")
    store.pipe_file("/bucket/part-3", bytes(3_500_000))
    files = Files.tfrecord("memory://bucket/part-*", parse)

    def get(path, target):
        raise full(number)

    monkeypatch.setattr(store, "get_file", get)
    with pytest.raises(DiskFull, match=r"/bucket/part-3 \(3\.5 MB\).* no room.*ephemeral-storage.*worker"):
        list(files.read(Part(0, None, file="memory:///bucket/part-3"), 4))

    def size(path):
        raise TimeoutError

    monkeypatch.setattr(store, "size", size)
    with pytest.raises(DiskFull, match=r"/bucket/part-3 does not fit"):
        list(files.read(Part(0, None, file="memory:///bucket/part-3"), 4))


def test_without_a_temporary_directory_the_disk_is_full(monkeypatch):
    fsspec.filesystem("memory").pipe_file("/bucket/part-3", b"1")

    def no_folder(**_):
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", no_folder)
    with pytest.raises(DiskFull, match=r"part-3.*No usable temporary directory.*ephemeral-storage"):
        list(
            Files.tfrecord("memory://bucket/*", parse).read(Part(0, None, file="memory:///bucket/part-3"), 4)
        )


def raises(error):
    def call(*_, **__):
        raise error

    return call


OUTAGES = [
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.ESTALE, "Stale file handle"),
    OSError(errno.ETIMEDOUT, "Connection timed out"),
    ConnectionError("reset"),
]


@pytest.mark.parametrize("error", OUTAGES)
def test_volume_that_does_not_answer_is_unreachable(monkeypatch, tmp_path, error):
    (tmp_path / "a.txt").write_text("1")
    name = f"file://{tmp_path}/a.txt"
    text = Files(f"{tmp_path}/*", tf.data.TextLineDataset)

    def rows():
        yield 1.0
        raise error

    def broken(_path):
        return tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec((), tf.float32))

    for fn in (broken, raises(error)):
        with pytest.raises(Unreachable, match=r"a\.txt: "):
            list(Files(f"{tmp_path}/*", fn).read(Part(0, None, file=name), 1))
    monkeypatch.setattr(Path, "stat", raises(error))
    with pytest.raises(Unreachable, match=r"a\.txt: "):
        list(text.read(Part(0, None, file=name), 1))
    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.ls", raises(error))
    with pytest.raises(Unreachable):
        text.list()
    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.info", raises(error))
    with pytest.raises(Unreachable):
        Files(f"{tmp_path}/a.txt", tf.data.TextLineDataset).list()


@pytest.mark.parametrize(
    "error",
    [
        OSError("Corrupt snappy compressed data"),
        ValueError("no such field"),
        KeyError("label"),
        FileNotFoundError(errno.ENOENT, "No such file or directory"),
    ],
)
def test_damaged_file_and_user_code_errors_are_user_errors(tmp_path, error):
    (tmp_path / "a.txt").write_text("1")

    def rows():
        yield 1.0
        raise error

    def broken(_path):
        return tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec((), tf.float32))

    with pytest.raises(UserError, match=r"a\.txt cannot be read: .*(snappy|field|label|No such file).*Fix"):
        list(Files(f"{tmp_path}/*", broken).read(Part(0, None, file=f"{tmp_path}/a.txt"), 1))


@given(
    number=st.sampled_from(sorted(errno.errorcode)),
    where=st.sampled_from(["raised", "in a data set"]),
)
def test_os_errors_are_outages_except_missing_files(number, where):
    error = OSError(number, "words")
    if where != "raised":
        text = (
            f"{{{{function_node x}}}} {type(error).__name__}: {error}\nTraceback (most recent call last):\n"
        )
        error = tf.errors.UnknownError(None, None, text)
    assert is_outage(error) is (number not in NOT_THERE)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (tf.errors.DataLossError, False),
        (tf.errors.InvalidArgumentError, False),
        (tf.errors.UnknownError, True),
        (tf.errors.UnavailableError, True),
        (tf.errors.AbortedError, True),
        (tf.errors.PermissionDeniedError, True),
        (tf.errors.NotFoundError, True),  # whether the file exists is checked before a retry
    ],
)
def test_tensorflow_error_types_are_classified(kind, expected):
    assert is_outage(kind(None, None, "/data/a; Input/output error")) is expected


def test_folders_are_not_data_files(tmp_path):
    (tmp_path / "train" / "old").mkdir(parents=True)
    (tmp_path / "train" / "a.csv").write_text("1")
    (tmp_path / "train" / "b.csv").symlink_to(tmp_path / "train" / "a.csv")
    (tmp_path / "train" / "broken.csv").symlink_to(tmp_path / "nowhere")
    (tmp_path / "train" / "more").symlink_to(tmp_path / "train" / "old")
    store = fsspec.filesystem("memory")
    for name in ("a.csv", "b.csv", "old/c.csv"):
        store.pipe_file(f"/folders/train/{name}", b"1")
    for place in (f"file://{tmp_path}", str(tmp_path), "memory:///folders"):
        base = place if "://" in place else f"file://{place}"
        names = tuple(f"{base}/train/{name}" for name in ("a.csv", "b.csv"))
        assert Files(f"{place}/train/*", tf.data.TextLineDataset).list() == names
        for pattern in (f"{place}/train", f"{place}/train/", f"{place}/tr*"):
            words = f"{base}/train is a folder. Use a pattern, for example {pattern.rstrip('/')}/*.parquet."
            with pytest.raises(UserError, match=re.escape(words)):
                Files(pattern, tf.data.TextLineDataset).list()
    with pytest.raises(UserError, match="is a folder"):
        list(Files("*", tf.data.TextLineDataset).read(Part(0, None, file=str(tmp_path / "train")), 1))


@pytest.mark.parametrize(
    "error",
    [RuntimeError("EndpointConnectionError"), TimeoutError(), PermissionError(errno.EACCES, "rotated")],
)
@pytest.mark.parametrize("pattern", ["memory://bucket/*.tfrecord", "memory://bucket/a.tfrecord"])
def test_store_outage_while_listing_is_unreachable(monkeypatch, error, pattern):
    store = fsspec.filesystem("memory")
    files = Files.tfrecord(pattern, parse)
    for name in ("glob", "info"):
        monkeypatch.setattr(store, name, raises(error))
    with pytest.raises(Unreachable, match=re.escape(repr(pattern))):
        files.list()
    monkeypatch.setattr("fsspec.core.url_to_fs", raises(error))
    with pytest.raises(Unreachable, match=re.escape(repr(pattern))):
        files.list()
    with pytest.raises(Unreachable, match=r"a\.tfrecord"):
        list(files.read(Part(0, None, file="memory:///bucket/a.tfrecord"), 4))


def test_invalid_pattern_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="entire path component"):
        Files(f"{tmp_path}/**.csv", tf.data.TextLineDataset).list()
    with pytest.raises(UserError, match="No file matches"):
        Files(f"{tmp_path}/a.csv", tf.data.TextLineDataset).list()


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError("no answer"),
        RuntimeError("EndpointConnectionError"),
        PermissionError(errno.EACCES, "the credential was rotated"),
    ],
)
def test_store_outage_while_fetching_is_unreachable(monkeypatch, error):
    store = fsspec.filesystem("memory")

    def away(path, target):
        raise error

    monkeypatch.setattr(store, "get_file", away)
    files = Files.tfrecord("memory://bucket/*.tfrecord", parse)
    with pytest.raises(Unreachable, match=re.escape(f"memory:///bucket/a.tfrecord: {error}")):
        list(files.read(Part(0, None, file="memory:///bucket/a.tfrecord"), 4))
