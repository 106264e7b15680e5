"""Errors of functions that a data set maps: user errors end the job, outages are retried."""

import datetime
import decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from shoal_trainer import Files, Indexed, UserError
from shoal_trainer.data.source import Part
from shoal_trainer.errors import Unreachable


@pytest.fixture
def records(tmp_path):
    with tf.io.TFRecordWriter(str(tmp_path / "a.tfrecord")) as writer:
        for _ in range(4):
            writer.write(b"1")
    return str(tmp_path / "*.tfrecord")


def mapped(function, dtype=tf.float32):
    def parse(record):
        value = tf.numpy_function(function, [record], dtype)
        return tf.ensure_shape(value, [])

    return parse


def raising(error):
    def function(_record):
        raise error

    return function


def read(files):
    (name,) = files.list()
    return list(files.read(Part(0, None, file=name), 2))


@pytest.mark.parametrize(
    "error",
    [KeyError("label"), IndexError("3"), RuntimeError("odd"), AssertionError(), ZeroDivisionError("division by zero"),
     ValueError("odd"), FileNotFoundError(2, "No such file", "b.png")],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_error_in_a_mapped_function_is_a_user_error(records, error):
    with pytest.raises(UserError, match=type(error).__name__):
        read(Files.tfrecord(records, mapped(raising(error))))


@pytest.mark.parametrize(
    "error", [ConnectionResetError(104, "reset"), TimeoutError("late"), OSError(5, "I/O")]
)
def test_outage_in_a_mapped_function_is_unreachable(records, error):
    with pytest.raises(Unreachable):
        read(Files.tfrecord(records, mapped(raising(error))))


def test_outage_in_a_dataset_of_indexed_is_unreachable():
    def fn(start, stop):
        return tf.data.Dataset.range(start, stop).map(
            lambda n: tf.numpy_function(raising(ConnectionResetError(104, "reset")), [n], tf.float32)
        )

    with pytest.raises(Unreachable):
        next(Indexed(4, fn).read(Part(0, 4), 2))


def test_missing_file_opened_by_a_parse_function_is_a_user_error(records, tmp_path):
    image = str(tmp_path / "gone.png")
    with pytest.raises(UserError, match=r"gone\.png"):
        read(Files.tfrecord(records, lambda _record: tf.strings.length(tf.io.read_file(image))))


def test_file_removed_during_reading_is_unreachable(records):
    def fn(path):
        Path(path).unlink()
        return tf.data.TextLineDataset(path)

    files = Files(records, fn)
    with pytest.raises(Unreachable):
        read(files)


@pytest.mark.nightly  # TensorFlow tries for 50 s
def test_too_large_tensor_is_a_user_error(records):
    with pytest.raises(UserError):
        read(Files.tfrecord(records, lambda _record: tf.zeros([1 << 20, 1 << 20, 1 << 10], tf.float64)))


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([decimal.Decimal("1.5")], r"decimal128\(2, 1\)"),
        ([datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)], "timestamp"),
        ([datetime.date(2026, 1, 1)], "date32"),
        ([datetime.timedelta(1)], "duration"),
        ([None], "null"),
    ],
)
def test_parquet_column_without_tensor_type_is_named(tmp_path, values, kind):
    pq.write_table(pa.table({"x": [1.0], "odd": values}), tmp_path / "a.parquet")
    files = Files.parquet(str(tmp_path / "*.parquet"), lambda row: row["x"])
    with pytest.raises(UserError, match=rf"column odd has type {kind}.*columns="):
        read(files)
    (batch,) = read(Files.parquet(str(tmp_path / "*.parquet"), lambda row: row["x"], columns=["x"]))
    assert batch.x.tolist()[:1] == [1.0]


def test_parquet_categories_are_read_as_values(tmp_path):
    table = pa.table({"c": pa.array(["a", "b", "a", "b"]).dictionary_encode()})
    pq.write_table(table, tmp_path / "a.parquet")
    batches = read(Files.parquet(str(tmp_path / "*.parquet"), lambda row: tf.strings.length(row["c"])))
    assert np.concatenate([batch.x for batch in batches]).tolist() == [1, 1, 1, 1]


def test_missing_file_named_after_the_data_file_is_the_users(records):
    files = Files(records, lambda path: tf.data.TextLineDataset(path + ".label"))
    with pytest.raises(UserError, match=r"\.label"):
        read(files)
