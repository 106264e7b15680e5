"""Files: iris flowers in Parquet. Each worker leases a file at a time; more files than workers keep all of them busy.

The files are written here so that the example runs anywhere. In a cluster the pattern is `s3://bucket/train/*.parquet`,
and Shoal downloads each file to the worker that trains on it.
"""

import tempfile
from pathlib import Path

import keras
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf
from keras.layers import Dense
from sklearn.datasets import load_iris

from shoal_trainer import Files, Training

NAMES = ["sepal_length", "sepal_width", "petal_length", "petal_width"]
FOLDER = Path(tempfile.gettempdir()) / "shoal-flowers"


def write(files: int = 6) -> None:
    """Write the table as files of 25 rows, shuffled: a file is read as a whole, so each should look like the table."""
    table = load_iris(as_frame=True).frame.sample(frac=1, random_state=0).set_axis([*NAMES, "kind"], axis=1)
    FOLDER.mkdir(exist_ok=True)
    for number in range(files):
        pq.write_table(pa.Table.from_pandas(table.iloc[number::files]), FOLDER / f"part-{number}.parquet")


def parse(row):
    return tf.stack([tf.cast(row[name], tf.float32) for name in NAMES]), row["kind"]


def build():
    model = keras.Sequential([Dense(32, activation="relu"), Dense(3, activation="softmax")])
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


if not (FOLDER / "part-0.parquet").exists():
    write()
data = Files.parquet(f"{FOLDER}/*.parquet", parse)
job = Training(model=build, data=data, validation=data)
