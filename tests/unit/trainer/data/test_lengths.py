"""Samples of different lengths are padded to few shapes, and grouped by length."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_trainer import Files, Indexed, Stream, UserError
from shoal_trainer.data.source import Part

SIZES = np.random.default_rng(0).integers(1, 65, 300)
LENGTHS = (16, 32, 64)


def sample(index):
    size = SIZES[index]
    return {"ids": np.full(size, index + 1), "mask": np.ones(size)}, np.int64(index % 2), np.ones(size)


def dataset(start=0, stop=300):
    def rows():
        for index in range(start, stop):
            yield sample(index)

    spec = tf.TensorSpec
    return tf.data.Dataset.from_generator(
        rows,
        output_signature=(
            {"ids": spec((None,), tf.int64), "mask": spec((None,), tf.float32)}, spec((), tf.int64),
            spec((None,), tf.float32),
        ),
    )  # fmt: skip


def items():
    class Samples:
        def __len__(self):
            return 300

        def __getitem__(self, index):
            return sample(index)

    return Indexed.from_items(Samples(), lengths=LENGTHS)


def indexed():
    return Indexed(300, dataset, lengths=LENGTHS)


def check(batches):
    """Each sample once, with its own length, in a batch of an allowed width; returns the widths."""
    seen, widths = [], []
    for batch in batches:
        x, y, weights = batch.as_given()
        width = x["ids"].shape[1]
        assert width in LENGTHS
        widths.append(width)
        for ids, mask, label, weight in zip(x["ids"], x["mask"], y, weights, strict=True):
            index = int(ids[0]) - 1
            size = SIZES[index]
            assert np.all(ids[:size] == index + 1)
            assert not ids[size:].any()
            assert mask.sum() == weight.sum() == size
            assert label == index % 2
            seen.append(index)
    assert sorted(seen) == list(range(300))
    return widths


@pytest.mark.by_day(2)
@pytest.mark.parametrize("source", [items, indexed])
@pytest.mark.parametrize("epoch", [None, 0, 1])
def test_samples_are_padded_to_allowed_lengths(source, epoch):
    widths = check(source().read(Part(0, 300, epoch), 16))
    if epoch is not None:  # samples of like length meet
        assert np.mean(widths) < 48


def test_files_are_padded(tmp_path):
    (tmp_path / "a").write_text("x")
    files = Files(f"{tmp_path}/*", lambda _path: dataset(), lengths=LENGTHS)
    check(files.read(Part(0, None, 1, f"{tmp_path}/a"), 16))


@given(cut=st.integers(1, 299), first=st.sampled_from([4, 16]))
@settings(max_examples=10, deadline=None)
def test_positions_do_not_depend_on_the_batch_size(cut, first):
    def read(start, stop, size):
        return [
            int(ids[0])
            for batch in items().read(Part(start, stop, 2), size)
            for ids in batch.x["ids"][: batch.samples]
        ]

    assert read(0, cut, first) + read(cut, 300, 8) == read(0, 300, 16)


@pytest.mark.parametrize("source", [lambda: Indexed(300, dataset, lengths=(16,)), lambda: items_of(16)])
def test_too_long_sample_is_named(source):
    with pytest.raises((UserError, tf.errors.InvalidArgumentError), match=r"lengths="):
        list(source().read(Part(0, 300, 0), 16))


def items_of(length):
    return Indexed.from_items([np.arange(n + 1) for n in range(300)], lengths=(length,))


class Pairs:
    """Samples of two parts, which are alike in the first 100."""

    def __len__(self):
        return 300

    def __getitem__(self, index):
        return {"age": np.ones(5), "ids": np.ones(5 if index < 100 else 7)}


def test_items_are_padded_where_they_vary():
    """Also if another part is the first one by name, and if the first samples are alike."""
    data = Indexed.from_items(Pairs(), lengths=[6, 8])
    widths = {tuple(leaf.shape[1] for leaf in batch.x.values()) for batch in data.read(Part(0, 300, 0), 16)}
    assert widths == {(5, 6), (5, 8)}


def test_bytes_are_padded_with_empty_ones():
    """TensorFlow has no array of bytes and numbers."""
    x = Indexed.from_items([([b"a\0"], 1.0), ([b"c", b"dd"], 1.0)], lengths=(3,)).example(2).x
    assert tf.convert_to_tensor(x).numpy().tolist() == [[b"a\0", b"", b""], [b"c", b"dd", b""]]

    def batches():
        yield np.array([[b"a"]], object)
        yield np.array([[b"c", b"dd"]], object)

    stream = Stream(batches, samples=2, lengths=(3,)).read(Part(0, 2), 1)
    found = [tf.convert_to_tensor(batch.x).numpy().tolist() for batch in stream]
    assert found == [[[b"a", b"", b""]], [[b"c", b"dd", b""]]]


def test_no_sample_is_cut_to_the_kind_of_another_one():
    words = Indexed.from_items([(["a"], 1.0), (["hello", "world"], 0.0)], lengths=(2,)).example(2).x
    assert words.tolist() == [["a", ""], ["hello", "world"]]
    values = Indexed.from_items([([1, 2], 1.0), ([1.5, 2.5, 3.5], 0.0)], lengths=(3,)).example(2).x
    assert values.tolist() == [[1, 2, 0], [1.5, 2.5, 3.5]]
    none = Indexed.from_items([([], 1.0), ([1, 2], 0.0)], lengths=(2,)).example(2).x
    assert none.dtype.kind == "i"


def test_a_part_that_was_not_seen_to_vary_is_named_with_what_to_do():
    class Rare(Pairs):
        def __getitem__(self, index):
            return super().__getitem__(index) | {"rare": np.ones(4 if index == 1 else 3)}

    with pytest.raises(UserError, match=r"different shapes: \(3,\), \(4,\). Pad them"):
        Indexed.from_items(Rare(), lengths=[8]).example(8)


def test_batches_of_a_stream_are_padded():
    data = dataset().padded_batch(10)
    stream = Stream(data, samples=300, lengths=LENGTHS)
    widths = set()
    for batch in stream.read(Part(0, 300), 10):
        x, _, weights = batch.as_given()
        assert x["ids"].shape == weights.shape
        widths.add(x["ids"].shape[1])
    assert widths <= set(LENGTHS)


def test_arrays_of_one_width_are_left_as_they_are():
    """Also where it is that of a batch, or the first one by name."""

    def batches():
        for width in (10, 12, 5):
            yield (
                {"age": np.ones((4, 5)), "ids": np.ones((4, width)), "mask": np.ones((4, width))},
                np.eye(10)[:4],
            )

    stream = Stream(batches, samples=12, lengths=[8, 16])
    shapes = [[leaf.shape[1] for leaf in (*batch.x.values(), batch.y)] for batch in stream.whole(4)]
    assert shapes == [[5, 16, 16, 10], [5, 16, 16, 10], [5, 8, 8, 10]]
    assert stream.example(4).x["age"].shape == (4, 5)


def test_arrays_that_are_never_seen_to_vary_are_padded_like_the_first():
    stream = Stream(lambda: [(np.ones((4, 5)), np.ones((4, 5)), np.ones(4))], samples=4, lengths=[8])
    batch = stream.example(4)
    assert batch.x.shape == batch.y.shape == (4, 8)


def test_lengths_need_tensors_of_unknown_length():
    with pytest.raises(UserError, match=r"shape \(None"):
        Indexed(8, tf.data.Dataset.range, lengths=(4,)).example(4)
