"""`Indexed.from_arrays` gives what Keras' `fit` gives; what `fit` does not accept is refused."""

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from shoal_trainer import Indexed, Stream, Training, UserError


class Seen(keras.Model):
    """Records the shapes and types that a `train_step` gets."""

    def train_step(self, data):
        self.seen = [(tuple(part.shape[1:]), part.dtype.name) for part in keras.tree.flatten(data)]
        return {"loss": tf.constant(0.0)}


def shapes_in_fit(*arrays):
    model = Seen()
    model.compile(run_eagerly=True)
    model.fit(*arrays, batch_size=4, verbose=0)
    return model.seen


TABLE = pd.DataFrame({"a": np.arange(8.0), "b": [True, False] * 4})
CASES = {
    "float64": (np.zeros((8, 3)), np.zeros(8)),
    "float16": (np.zeros((8, 3), np.float16), np.zeros(8, np.int32)),
    "integers": (np.zeros((8, 3), np.int64), np.zeros(8, np.uint8)),
    "table": (TABLE[["a"]], TABLE["a"]),
    "table of floats and bools": (TABLE, TABLE["b"]),
    "structure": ({"u": np.zeros((8, 2)), "v": TABLE["a"]}, np.zeros((8, 1), np.float32)),
}


@pytest.mark.parametrize("name", CASES)
def test_shapes_and_types_match_fit(name):
    arrays = CASES[name]
    batch = Indexed.from_arrays(*arrays).example(4)
    ours = [(leaf.shape[1:], leaf.dtype.name) for leaf in keras.tree.flatten(batch.as_given())]
    assert ours == shapes_in_fit(*arrays)


def test_series_of_sample_weights_is_accepted():
    batch = Indexed.from_arrays(np.zeros((8, 3)), np.zeros(8), TABLE["a"]).example(8)
    assert sorted(batch.weights) == list(range(8))


def test_weights_without_labels_are_left_out_as_by_fit():
    """A `compute_loss` that uses them would weigh in training, and not in an evaluation."""
    rows, given = np.zeros((8, 3)), []

    class Weighed(keras.Model):
        def train_step(self, data):
            given.append(keras.utils.unpack_x_y_sample_weight(data)[2])
            return {"loss": tf.constant(0.0)}

    def build():
        model = Weighed()
        model.compile(run_eagerly=True)
        return model

    build().fit(rows, None, sample_weight=np.ones(8), verbose=0)
    Training(model=build, data=(rows, None, np.full(8, 5.0))).fit(verbose=0)
    assert given == [None, None]
    assert np.array_equal(Indexed.from_arrays(rows, None, np.full(8, 5.0)).example(8).weights, np.ones(8))
    with pytest.raises(UserError, match="which Keras' fit refuses"):
        Stream(lambda: [(rows, None, np.ones(8))], samples=8).example(8)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (tf.ragged.constant([[1], [1, 2]]), "got a RaggedTensor. Pass a dense array"),
        (tf.sparse.from_dense([[1, 0]]), "got a SparseTensor. Pass a dense array"),
    ],
)
def test_non_dense_tensors_are_refused(x, words):
    with pytest.raises(UserError, match=words):
        Indexed.from_arrays(x, np.zeros(2))


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (tf.ragged.constant([[1], [1, 2]]), "yields a RaggedTensor. Yield dense tensors"),
        (tf.sparse.from_dense([[1, 0], [0, 1]]), "yields a SparseTensor. Yield dense tensors"),
    ],
)
def test_non_dense_datasets_are_refused(x, words):
    data = Indexed(
        2, lambda start, stop: tf.data.Dataset.from_tensor_slices(x).skip(start).take(stop - start)
    )
    with pytest.raises(UserError, match=words):
        data.example(2)
