"""Record files of numbers."""

import numpy as np
import tensorflow as tf


def parse(record):
    return tf.strings.to_number(record), 0


def write_records(path, values, compression=""):
    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for value in values:
            writer.write(str(value).encode())


def seen(batches):
    return [int(value) for batch in batches for value in np.asarray(batch.x)[: batch.samples]]
