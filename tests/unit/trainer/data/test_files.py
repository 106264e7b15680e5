import errno
import re
import tempfile
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from shoal_trainer import Files, UserError
from shoal_trainer.data.trouble import NOT_THERE, away
from shoal_trainer.errors import Unreachable


def parse(record):
    return tf.strings.to_number(record), 0


def write_records(path, values):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for value in values:
            writer.write(str(value).encode())


def seen(batches):
    return [int(value) for batch in batches for value in np.asarray(batch.x)[: batch.samples]]


def test_a_record_file_of_unknown_length_is_read_from_any_offset(tmp_path):
    write_records(tmp_path / "a.tfrecord", range(50))
    files = Files.tfrecord(f"{tmp_path}/*.tfrecord", parse)
    (name,) = files.list()
    batches = list(files.batches(name, 20, None, 16))
    assert seen(batches) == list(range(20, 50))
    assert batches[-1].end == 50
    assert seen(files.batches(name, 20, 30, 16)) == list(range(20, 30))


def test_parquet_rows_keep_their_order_and_types(tmp_path):
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(6000, dtype=np.float32)), 2)
    pq.write_table(
        pa.table({"v": vectors, "y": np.arange(3000), "name": ["n"] * 3000}), tmp_path / "a.parquet"
    )
    files = Files.parquet(
        str(tmp_path / "a.parquet"), lambda row: (row["v"][0], row["y"]), columns=["v", "y"]
    )
    batches = list(files.batches(files.list()[0], 0, None, 512))
    assert sum(b.samples for b in batches) == 3000
    assert np.array_equal(
        np.concatenate([np.asarray(b.x)[: b.samples] for b in batches]), np.arange(0, 6000, 2)
    )
    with pytest.raises(UserError, match="no column w"):
        list(
            Files.parquet(str(tmp_path / "a.parquet"), dict, columns=["w"]).batches(
                files.list()[0], 0, None, 4
            )
        )


def test_csv(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,0\n2,1\n3,0\n")
    files = Files.csv(f"{tmp_path}/*.csv", lambda x, y: (x, y), [tf.float32, 0])
    assert seen(files.batches(files.list()[0], 1, None, 2)) == [2, 3]


def test_an_empty_file_has_no_batch_and_the_example_comes_from_the_next(tmp_path):
    write_records(tmp_path / "a.tfrecord", [])
    write_records(tmp_path / "b.tfrecord", [7])
    files = Files.tfrecord(f"{tmp_path}/*.tfrecord", parse)
    assert list(files.batches(files.list()[0], 0, None, 4)) == []
    assert seen([files.example(4)]) == [7]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "bad.tfrecord").write_bytes(b"this is no record file at all, but text")
    files = Files.tfrecord(f"{tmp_path}/*.tfrecord", parse)
    with pytest.raises(UserError, match=r"bad\.tfrecord cannot be read"):
        list(files.batches(files.list()[0], 0, None, 4))
    (tmp_path / "bad.parquet").write_bytes(b"this is no parquet file at all, but text")
    parquet = Files.parquet(f"{tmp_path}/*.parquet", dict)
    with pytest.raises(UserError, match=r"bad\.parquet"):
        list(parquet.batches(parquet.list()[0], 0, None, 4))


def test_no_file_and_no_such_store():
    with pytest.raises(UserError, match="No file matches"):
        Files.tfrecord("/nowhere/*.tfrecord", parse).list()
    with pytest.raises(UserError, match="nope"):
        Files.tfrecord("nope://bucket/*.tfrecord", parse).list()


def test_files_of_an_object_store_are_fetched(tmp_path):
    write_records(tmp_path / "a.tfrecord", range(10))
    store = fsspec.filesystem("memory")
    store.pipe_file("/bucket/a.tfrecord", (tmp_path / "a.tfrecord").read_bytes())
    files = Files.tfrecord("memory://bucket/*.tfrecord", parse)
    assert files.list() == ("memory:///bucket/a.tfrecord",)
    assert seen(files.batches(files.list()[0], 3, None, 4)) == list(range(3, 10))
    with pytest.raises(UserError, match="does not exist"):
        list(files.batches("memory:///bucket/b.tfrecord", 0, None, 4))


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        ([1, None, 3], pa.int64()),
        ([1, None, 3], pa.uint8()),
        ([True, None, False], pa.bool_()),
        (["a", None, "c"], pa.string()),
        ([None, None, None], pa.null()),
        ([[1, 2], [None, 3], [4, 5]], pa.list_(pa.int32(), 2)),
        ([[1.0, 2.0], None, [3.0, 4.0]], pa.list_(pa.float32(), 2)),
    ],
)
def test_a_null_that_would_become_a_value_is_refused_and_its_column_named(tmp_path, column, kind):
    pq.write_table(pa.table({"age": pa.array(column, kind), "y": [1, 2, 3]}), tmp_path / "a.parquet")
    files = Files.parquet(f"{tmp_path}/*.parquet", lambda row: row["age"])
    message = r"a\.parquet cannot be read: column age has nulls.* fill them in, or .*columns=\[…\]"
    with pytest.raises(UserError, match=message):
        list(files.batches(files.list()[0], 0, None, 4))
    others = Files.parquet(f"{tmp_path}/*.parquet", lambda row: row["y"], columns=["y"])
    assert seen(others.batches(files.list()[0], 0, None, 4)) == [1, 2, 3]


@pytest.mark.parametrize(
    ("column", "kind"),
    [([1, None, 3], pa.float32()), ([[1.0, 2.0], [None, 3.0]], pa.list_(pa.float64(), 2))],
)
def test_a_null_among_floating_point_numbers_is_nan(tmp_path, column, kind):
    pq.write_table(pa.table({"x": pa.array(column, kind)}), tmp_path / "a.parquet")
    files = Files.parquet(f"{tmp_path}/*.parquet", lambda row: row["x"])
    (batch,) = files.batches(files.list()[0], 0, None, len(column))
    assert np.array_equal(batch.x, np.array(column, np.float64), equal_nan=True)


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.float64()),
        pa.large_list(pa.int32()),
        pa.list_(pa.list_(pa.int8(), 2), 2),
        pa.struct([("a", pa.int32())]),
    ],
)
def test_a_parquet_column_that_no_tensor_can_hold_is_named_with_its_type_and_the_file_is_not_blamed(
    tmp_path, kind
):
    pq.write_table(pa.table({"vx": pa.array([None], kind), "y": [1]}), tmp_path / "a.parquet")
    files = Files.parquet(f"{tmp_path}/*.parquet", lambda row: row["vx"])
    told = str(kind).replace("item:", "element:")  # Parquet's name for it
    with pytest.raises(
        UserError, match=re.escape(f"The Parquet column vx is {told}, and of such only lists of one fixed")
    ):
        list(files.batches(files.list()[0], 0, None, 4))
    others = Files.parquet(f"{tmp_path}/*.parquet", lambda row: row["y"], columns=["y"])
    assert seen(others.batches(files.list()[0], 0, None, 4)) == [1]


def wrong_shape(*_):
    return tf.ensure_shape(tf.constant("a"), [64])


def wrong_key(*_):
    return {"a": 1}["label"]


@pytest.mark.parametrize(
    ("wrong", "words"), [(wrong_shape, "ValueError: Shape must be rank 1"), (wrong_key, "KeyError: 'label'")]
)
@pytest.mark.parametrize("kind", ["tfrecord", "parquet", "csv"])
def test_what_a_parse_function_raises_is_said_of_it_and_of_no_file(tmp_path, kind, wrong, words):
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    write_records(tmp_path / "a.tfrecord", [1])
    (tmp_path / "a.csv").write_text("x\n1\n")
    more = ([0],) if kind == "csv" else ()
    files = getattr(Files, kind)(f"{tmp_path}/*.{kind}", wrong, *more)
    with pytest.raises(UserError, match=f"The parse function failed: {words}") as caught:
        files.example(4)
    assert "remove" not in str(caught.value)


def test_a_parse_function_that_finds_a_volume_away_is_nobodys_mistake(tmp_path):
    write_records(tmp_path / "a.tfrecord", [1])

    def looks_up(_record):
        raise OSError(errno.EIO, "Input/output error")

    as_it_is = tf.autograph.experimental.do_not_convert(
        looks_up
    )  # it would wrap the error beyond recognition
    with pytest.raises(Unreachable, match="Input/output error"):
        Files.tfrecord(f"{tmp_path}/*.tfrecord", as_it_is).example(4)


@pytest.mark.parametrize("text", ["", "x,y\n"])
def test_a_csv_file_without_a_row_is_a_file_of_no_samples(tmp_path, text):
    (tmp_path / "a.csv").write_text(text)
    files = Files.csv(f"{tmp_path}/*.csv", lambda x, y: (x, y), [tf.float32, 0])
    assert list(files.batches(files.list()[0], 0, None, 2)) == []


def full(number):
    return OSError(number, "no room")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT])
def test_a_file_for_which_the_worker_s_disk_has_no_room_is_the_user_s_to_mend(monkeypatch, number):
    store = fsspec.filesystem("memory")
    store.pipe_file("/bucket/part-3", bytes(3_500_000))
    files = Files.tfrecord("memory://bucket/part-*", parse)

    def get(path, target):
        raise full(number)

    monkeypatch.setattr(store, "get_file", get)
    with pytest.raises(UserError, match=r"/bucket/part-3 \(3\.5 MB\).* no room.*ephemeral-storage.*worker"):
        list(files.batches("memory:///bucket/part-3", 0, None, 4))

    def size(path):
        raise TimeoutError

    monkeypatch.setattr(store, "size", size)
    with pytest.raises(UserError, match=r"/bucket/part-3 does not fit"):
        list(files.batches("memory:///bucket/part-3", 0, None, 4))


def test_a_worker_s_disk_on_which_not_even_a_folder_can_be_made_is_full(monkeypatch):
    fsspec.filesystem("memory").pipe_file("/bucket/part-3", b"1")

    def no_folder(**_):
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", no_folder)
    with pytest.raises(UserError, match=r"part-3.*No usable temporary directory.*ephemeral-storage"):
        list(Files.tfrecord("memory://bucket/*", parse).batches("memory:///bucket/part-3", 0, None, 4))


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
def test_a_volume_that_does_not_answer_is_away(monkeypatch, tmp_path, error):
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
            list(Files(f"{tmp_path}/*", fn).batches(name, 0, None, 1))
    monkeypatch.setattr(Path, "stat", raises(error))
    with pytest.raises(Unreachable, match=r"a\.txt: "):
        list(text.batches(name, 0, None, 1))
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
def test_a_damaged_file_and_the_users_own_errors_are_no_outage(tmp_path, error):
    (tmp_path / "a.txt").write_text("1")

    def rows():
        yield 1.0
        raise error

    def broken(_path):
        return tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec((), tf.float32))

    with pytest.raises(UserError, match=r"a\.txt cannot be read: .*(snappy|field|label|No such file).*Mend"):
        list(Files(f"{tmp_path}/*", broken).batches(f"{tmp_path}/a.txt", 0, None, 1))


@given(
    number=st.sampled_from(sorted(errno.errorcode)),
    where=st.sampled_from(["raised", "in a data set"]),
)
def test_a_file_system_that_speaks_is_away_unless_it_says_that_there_is_no_such_file(number, where):
    error = OSError(number, "words")
    if where != "raised":
        text = (
            f"{{{{function_node x}}}} {type(error).__name__}: {error}\nTraceback (most recent call last):\n"
        )
        error = tf.errors.UnknownError(None, None, text)
    assert away(error) is (number not in NOT_THERE)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (tf.errors.DataLossError, False),
        (tf.errors.InvalidArgumentError, False),
        (tf.errors.UnknownError, True),
        (tf.errors.UnavailableError, True),
        (tf.errors.AbortedError, True),
        (tf.errors.PermissionDeniedError, True),
        (tf.errors.NotFoundError, True),  # whether the file is there is looked at before it is tried again
    ],
)
def test_tensorflow_s_own_words_for_an_outage(kind, expected):
    assert away(kind(None, None, "/data/a; Input/output error")) is expected


def test_a_folder_is_no_file_of_data(tmp_path):
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
            words = f"{base}/train is a folder: give a pattern, for example {pattern.rstrip('/')}/*.parquet."
            with pytest.raises(UserError, match=re.escape(words)):
                Files(pattern, tf.data.TextLineDataset).list()
    with pytest.raises(UserError, match="is a folder"):
        list(Files("*", tf.data.TextLineDataset).batches(str(tmp_path / "train"), 0, None, 1))


@pytest.mark.parametrize(
    "error",
    [RuntimeError("EndpointConnectionError"), TimeoutError(), PermissionError(errno.EACCES, "rotated")],
)
@pytest.mark.parametrize("pattern", ["memory://bucket/*.tfrecord", "memory://bucket/a.tfrecord"])
def test_a_store_that_does_not_answer_when_the_files_are_listed_is_away(monkeypatch, error, pattern):
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
        list(files.batches("memory:///bucket/a.tfrecord", 0, None, 4))


def test_a_pattern_that_is_none_is_the_users_to_mend(tmp_path):
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
def test_a_store_that_does_not_answer_is_unreachable_whatever_it_raises(monkeypatch, error):
    store = fsspec.filesystem("memory")

    def away(path, target):
        raise error

    monkeypatch.setattr(store, "get_file", away)
    files = Files.tfrecord("memory://bucket/*.tfrecord", parse)
    with pytest.raises(Unreachable, match=re.escape(f"memory:///bucket/a.tfrecord: {error}")):
        list(files.batches("memory:///bucket/a.tfrecord", 0, None, 4))
