"""Reading files: formats, offsets, null values, and errors of the file or the parse function."""

import errno
import re

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from shoal_trainer import Files, UserError
from shoal_trainer.data.source import Part
from shoal_trainer.errors import Unreachable
from tests.unit.trainer.data.records import parse, seen, write_records


def test_record_file_is_read_from_any_offset(tmp_path):
    write_records(tmp_path / "a.tfrecord", range(50))
    files = Files.tfrecord(f"{tmp_path}/*.tfrecord", parse)
    (name,) = files.list()
    batches = list(files.read(Part(20, None, None, name), 16))
    assert seen(batches) == list(range(20, 50))
    assert batches[-1].end == 50
    assert seen(files.read(Part(20, 30, None, name), 16)) == list(range(20, 30))


def test_parquet_rows_keep_their_order_and_types(tmp_path):
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(6000, dtype=np.float32)), 2)
    pq.write_table(
        pa.table({"v": vectors, "y": np.arange(3000), "name": ["n"] * 3000}), tmp_path / "a.parquet"
    )
    files = Files.parquet(
        str(tmp_path / "a.parquet"), lambda row: (row["v"][0], row["y"]), columns=["v", "y"]
    )
    batches = list(files.read(Part(0, None, None, files.list()[0]), 512))
    assert sum(b.samples for b in batches) == 3000
    assert np.array_equal(
        np.concatenate([np.asarray(b.x)[: b.samples] for b in batches]), np.arange(0, 6000, 2)
    )
    with pytest.raises(UserError, match="no column w"):
        list(
            Files.parquet(str(tmp_path / "a.parquet"), dict, columns=["w"]).read(
                Part(0, None, None, files.list()[0]), 4
            )
        )


def test_csv_file_is_read_from_an_offset(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,0\n2,1\n3,0\n")
    files = Files.csv(f"{tmp_path}/*.csv", lambda x, y: (x, y), [tf.float32, 0])
    assert seen(files.read(Part(1, None, None, files.list()[0]), 2)) == [2, 3]


def test_empty_file_has_no_batch_and_example_uses_the_next_file(tmp_path):
    write_records(tmp_path / "a.tfrecord", [])
    write_records(tmp_path / "b.tfrecord", [7])
    files = Files.tfrecord(f"{tmp_path}/*.tfrecord", parse)
    assert list(files.read(Part(0, None, None, files.list()[0]), 4)) == []
    assert seen([files.example(4)]) == [7]


def test_unreadable_file_is_named(tmp_path):
    (tmp_path / "bad.tfrecord").write_bytes(b"this is no record file at all, but text")
    files = Files.tfrecord(f"{tmp_path}/*.tfrecord", parse)
    with pytest.raises(UserError, match=r"bad\.tfrecord cannot be read"):
        list(files.read(Part(0, None, None, files.list()[0]), 4))
    (tmp_path / "bad.parquet").write_bytes(b"this is no parquet file at all, but text")
    parquet = Files.parquet(f"{tmp_path}/*.parquet", dict)
    with pytest.raises(UserError, match=r"bad\.parquet"):
        list(parquet.read(Part(0, None, None, parquet.list()[0]), 4))


@pytest.mark.by_day(3)
@pytest.mark.parametrize("written", ["", "GZIP", "ZLIB"])
@pytest.mark.parametrize("declared", ["", "GZIP", "ZLIB"])
def test_wrong_compression_is_named(tmp_path, written, declared):
    write_records(tmp_path / "a.tfrecord", range(4), written)
    files = Files.tfrecord(f"{tmp_path}/*.tfrecord", parse, compression=declared)
    if declared == written:
        assert seen([files.example(4)]) == [0, 1, 2, 3]
        return
    with pytest.raises(UserError, match=r"Check the compression of Files\.tfrecord"):
        files.example(4)


def test_unknown_compression_is_refused():
    with pytest.raises(UserError, match='\'gzip\'\\) must be one of "", "GZIP", "ZLIB"'):
        Files.tfrecord("*.tfrecord", parse, compression="gzip")


def test_data_set_that_never_ends_is_refused(tmp_path):
    write_records(tmp_path / "a.tfrecord", range(4))
    files = Files(f"{tmp_path}/*.tfrecord", lambda path: tf.data.TFRecordDataset(path).map(parse).repeat())
    with pytest.raises(
        UserError, match=r"Files\(fn=…\) returns a data set that never ends.*Remove .repeat\(\)"
    ):
        files.example(4)


def test_interleaved_data_set_with_an_end_can_be_taken(tmp_path):
    write_records(tmp_path / "a.tfrecord", range(4))

    def fn(path):
        rare = tf.data.TFRecordDataset(path).map(parse)
        order = tf.data.Dataset.range(2).repeat(3)
        return tf.data.Dataset.choose_from_datasets([rare.repeat(), rare.repeat()], order).take(1000)

    files = Files(f"{tmp_path}/*.tfrecord", fn)
    assert len(seen(files.read(Part(0, None, None, files.list()[0]), 4))) == 6


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            KeyError("label"),
            UserError,
            r"cannot open .*/a\.tfrecord: KeyError: 'label' \(.*test_files\.py:\d+ in fn\)",
        ),
        (TypeError("not a table"), UserError, r"cannot open .*/a\.tfrecord: TypeError: not a table"),
        (ValueError("odd"), UserError, r"cannot open .*/a\.tfrecord: odd"),
        (
            tf.errors.NotFoundError(None, None, "vocab.txt; No such file"),
            UserError,
            r"cannot open .*vocab\.txt",
        ),
        (tf.errors.UnavailableError(None, None, "no answer"), Unreachable, r"/a\.tfrecord: no answer"),
        (ConnectionResetError(104, "reset"), Unreachable, r"/a\.tfrecord: .*reset"),
    ],
)
def test_error_of_the_data_function_names_the_file(tmp_path, error, kind, words):
    def fn(_path):
        raise error

    write_records(tmp_path / "a.tfrecord", range(4))
    with pytest.raises(kind, match=words):
        Files(f"{tmp_path}/*.tfrecord", fn).example(4)


def test_unmatched_pattern_and_unknown_store_are_user_errors():
    with pytest.raises(UserError, match="No file matches"):
        Files.tfrecord("/nowhere/*.tfrecord", parse).list()
    with pytest.raises(UserError, match="nope"):
        Files.tfrecord("nope://bucket/*.tfrecord", parse).list()


def test_object_store_files_are_fetched(tmp_path):
    write_records(tmp_path / "a.tfrecord", range(10))
    store = fsspec.filesystem("memory")
    store.pipe_file("/bucket/a.tfrecord", (tmp_path / "a.tfrecord").read_bytes())
    files = Files.tfrecord("memory://bucket/*.tfrecord", parse)
    assert files.list() == ("memory:///bucket/a.tfrecord",)
    assert seen(files.read(Part(3, None, None, files.list()[0]), 4)) == list(range(3, 10))
    with pytest.raises(UserError, match="does not exist"):
        list(files.read(Part(0, None, None, "memory:///bucket/b.tfrecord"), 4))


@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    ("column", "kind"),
    [
        ([1, None, 3], pa.int64()),
        ([1, None, 3], pa.uint8()),
        ([True, None, False], pa.bool_()),
        (["a", None, "c"], pa.string()),
        ([[1, 2], [None, 3], [4, 5]], pa.list_(pa.int32(), 2)),
        ([[1.0, 2.0], None, [3.0, 4.0]], pa.list_(pa.float32(), 2)),
    ],
)
def test_null_in_a_non_float_column_is_refused(tmp_path, column, kind):
    pq.write_table(pa.table({"age": pa.array(column, kind), "y": [1, 2, 3]}), tmp_path / "a.parquet")
    files = Files.parquet(f"{tmp_path}/*.parquet", lambda row: row["age"])
    message = r"a\.parquet cannot be read: column age has nulls.* Fill them in, or .*columns=\[…\]"
    with pytest.raises(UserError, match=message):
        list(files.read(Part(0, None, None, files.list()[0]), 4))
    others = Files.parquet(f"{tmp_path}/*.parquet", lambda row: row["y"], columns=["y"])
    assert seen(others.read(Part(0, None, None, files.list()[0]), 4)) == [1, 2, 3]


@pytest.mark.parametrize(
    ("column", "kind"),
    [([1, None, 3], pa.float32()), ([[1.0, 2.0], [None, 3.0]], pa.list_(pa.float64(), 2))],
)
def test_null_in_a_float_column_becomes_nan(tmp_path, column, kind):
    pq.write_table(pa.table({"x": pa.array(column, kind)}), tmp_path / "a.parquet")
    files = Files.parquet(f"{tmp_path}/*.parquet", lambda row: row["x"])
    (batch,) = files.read(Part(0, None, None, files.list()[0]), len(column))
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
def test_unsupported_parquet_column_is_named_with_its_type(tmp_path, kind):
    pq.write_table(pa.table({"vx": pa.array([None], kind), "y": [1]}), tmp_path / "a.parquet")
    files = Files.parquet(f"{tmp_path}/*.parquet", lambda row: row["vx"])
    shown = str(kind).replace("item:", "element:")  # Parquet's name for it
    with pytest.raises(
        UserError,
        match=re.escape(f"The Parquet column vx has type {shown}. Of nested types, only fixed-size lists"),
    ):
        list(files.read(Part(0, None, None, files.list()[0]), 4))
    others = Files.parquet(f"{tmp_path}/*.parquet", lambda row: row["y"], columns=["y"])
    assert seen(others.read(Part(0, None, None, files.list()[0]), 4)) == [1]


def wrong_shape(*_):
    return tf.ensure_shape(tf.constant("a"), [64])


def wrong_key(*_):
    return {"a": 1}["label"]


@pytest.mark.parametrize(
    ("wrong", "words"), [(wrong_shape, "ValueError: Shape must be rank 1"), (wrong_key, "KeyError: 'label'")]
)
@pytest.mark.parametrize("kind", ["tfrecord", "parquet", "csv"])
def test_parse_function_error_does_not_blame_the_file(tmp_path, kind, wrong, words):
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    write_records(tmp_path / "a.tfrecord", [1])
    (tmp_path / "a.csv").write_text("x\n1\n")
    more = ([0],) if kind == "csv" else ()
    files = getattr(Files, kind)(f"{tmp_path}/*.{kind}", wrong, *more)
    with pytest.raises(UserError, match=f"The parse function failed: {words}") as caught:
        files.example(4)
    assert "remove" not in str(caught.value)
    assert re.search(rf"test_files.py:\d+ in {wrong.__name__}\)", str(caught.value))


def test_io_error_in_a_parse_function_is_unreachable(tmp_path):
    write_records(tmp_path / "a.tfrecord", [1])

    def looks_up(_record):
        raise OSError(errno.EIO, "Input/output error")

    as_it_is = tf.autograph.experimental.do_not_convert(looks_up)  # autograph would wrap the error
    with pytest.raises(Unreachable, match="Input/output error"):
        Files.tfrecord(f"{tmp_path}/*.tfrecord", as_it_is).example(4)


@pytest.mark.parametrize("text", ["", "x,y\n"])
def test_csv_file_without_rows_has_no_samples(tmp_path, text):
    (tmp_path / "a.csv").write_text(text)
    files = Files.csv(f"{tmp_path}/*.csv", lambda x, y: (x, y), [tf.float32, 0])
    assert list(files.read(Part(0, None, None, files.list()[0]), 2)) == []
