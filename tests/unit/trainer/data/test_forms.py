"""`Training(data=…)` takes what users of Keras hold."""

import functools

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from shoal_trainer import Indexed, Stream, Training, UserError
from shoal_trainer.data.source import Part

X, Y = np.arange(40, dtype=np.float32)[:, None], np.arange(40) % 3


class Table:
    """A Hugging Face dataset as far as it is used: rows are dicts of Python values, got many at once."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return {"value": [float(index)], "label": index % 3}

    def __getitems__(self, rows):
        return [self[row] for row in rows]


class Source:
    """A Grain source."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return X[index], Y[index]


class Sequence(keras.utils.PyDataset):
    def __init__(self, x=X, y=Y, batch=16, **options):
        super().__init__(**options)
        self.x, self.y, self.batch = x, y, batch

    def __len__(self):
        return (len(self.x) + self.batch - 1) // self.batch

    def __getitem__(self, index):
        rows = slice(index * self.batch, (index + 1) * self.batch)
        return self.x[rows], self.y[rows]


class Endless(keras.utils.PyDataset):
    num_batches = None

    def __getitem__(self, index):
        return X[:8], Y[:8]


def training(data, **options):
    return Training(model=lambda: None, data=data, **options)


FORMS = {
    "arrays": lambda: (X, Y),
    "grain": Source,
    "pydataset": Sequence,
    "pydataset with threads": lambda: Sequence(workers=3),
    "hugging face": lambda: Indexed.from_items(Table(), lambda row: (row["value"], row["label"])),
    "dataset": lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(8),
    "unbatched dataset": lambda: tf.data.Dataset.from_tensor_slices((X, Y)),
    "shuffled dataset": lambda: tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(40, seed=1).batch(8),
    "function of a data set": lambda: Stream(lambda: tf.data.Dataset.from_tensor_slices((X, Y)), samples=40),
    "iterator of a data set": lambda: Stream(
        lambda: iter(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)), samples=40
    ),
    "function": lambda: Stream(lambda: ((X[n : n + 4], Y[n : n + 4]) for n in range(0, 40, 4)), samples=40),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_sample_is_read_once_in_an_epoch(form):
    data = training(FORMS[form]()).data
    assert data.describe().size == 40
    orders = []
    for epoch in range(2):
        seen = []
        for start, stop in ((0, 17), (17, 40)):
            for batch in data.read(Part(start, stop, epoch), 7):
                x, y = batch.as_given()
                assert np.array_equal(np.ravel(x) % 3, np.ravel(y))
                seen += np.ravel(x).astype(int).tolist()
        assert sorted(seen) == list(range(40))
        orders.append(seen)
    kept = {"dataset", "unbatched dataset", "function", "function of a data set", "iterator of a data set"}
    assert (orders[0] != orders[1]) == (form not in kept)


@pytest.mark.parametrize("form", ["pydataset", "iterable"])
def test_a_batch_may_be_a_list_of_its_parts(form):
    class Lists(Sequence):
        def __getitem__(self, index):
            return [*super().__getitem__(index)]

    data = training(Lists() if form == "pydataset" else Stream([[X[:16], Y[:16]]], samples=16)).data
    batch = data.example(16)
    assert np.array_equal(batch.x, X[:16])
    assert np.array_equal(batch.y, Y[:16])


@pytest.mark.parametrize("form", FORMS)
def test_validation_takes_the_same_forms(form):
    found = training((X, Y), validation=FORMS[form]()).validation
    seen = [int(n) for batch in found.whole(16) for n in np.ravel(batch.as_given()[0])]
    assert sorted(seen) == list(range(40))


def test_example_has_the_shape_of_a_batch():
    for form in FORMS.values():
        batch = training(form()).data.example(16)
        assert np.shape(batch.x) == (16, 1)
        assert np.shape(batch.weights) == (16,)


@pytest.mark.parametrize("form", [dict, pd.DataFrame])
def test_a_table_alone_is_the_inputs(form):
    frame = pd.DataFrame({"a": X[:, 0], "b": X[:, 0]})
    batch = training(frame if form is pd.DataFrame else {"one": frame, "other": frame}).data.example(8)
    np.testing.assert_array_equal(batch.x if form is pd.DataFrame else batch.x["other"], np.tile(X[:8], 2))


def test_a_data_set_of_dicts_is_the_inputs():
    batch = training(Table()).data.example(4)
    assert np.shape(batch.x["value"]) == (4, 1)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (lambda: tf.data.Dataset.from_tensor_slices((X, Y)).repeat().batch(8), "because it never ends"),
        (lambda: tf.data.Dataset.from_generator(lambda: iter(()), output_types=tf.int32), "how many samples"),
        (lambda: ((X, Y) for _ in range(3)), r"Stream\(data, samples=N\)"),
        (Endless, "PyDataset that never ends"),
        (lambda: [1, 2], "cannot be of the type list"),
        (lambda: {"train": Table(), "test": Table()}, r"Pass one: data\['train'\]"),
        (lambda: Indexed.from_items([]), "at least one sample"),
        (lambda: Stream(Endless(), samples=0), "at least one sample"),
        (lambda: Indexed(4, tf.data.Dataset.range, shuffle=-1), "must be a number of samples"),
        (lambda: Indexed(4, tf.data.Dataset.range, lengths=[0]), "positive integers"),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_to_do(data, words):
    with pytest.raises(UserError, match=words):
        training(data())


def filtered():
    return tf.data.Dataset.from_tensor_slices((X, Y)).filter(lambda x, _: x[0] >= 10).batch(8)


@pytest.mark.parametrize(
    "form", [filtered, lambda: Stream(filtered()), lambda: Stream(lambda: iter([(X[10:], Y[10:])]))]
)
def test_validation_of_unknown_length_is_read_to_its_end(form):
    found = training((X, Y), validation=form()).validation
    assert [int(n) for batch in found.whole(16) for n in np.ravel(batch.as_given()[0])] == list(range(10, 40))
    with pytest.raises(UserError, match="unknown how many samples"):
        training(form())


@pytest.mark.parametrize("form", [lambda: filtered().repeat(), Endless, lambda: Stream(Endless())])
def test_validation_that_never_ends_needs_a_number_of_samples(form):
    with pytest.raises(UserError, match=r"never ends.*samples=N"):
        training((X, Y), validation=form())


@pytest.mark.parametrize(("samples", "cut"), [(20, True), (24, True), (30, False), (50, False)])
def test_an_evaluation_of_a_part_of_the_data_is_told_once(samples, cut, caplog):
    found = training((X, Y), validation=Stream(filtered(), samples=samples)).validation
    for _ in range(2):
        assert sum(batch.samples for batch in found.whole(8)) == min(samples, 30)
    told = [each.getMessage() for each in caplog.records]
    assert told == [f"an evaluation reads samples={samples}, and the data set has more"] * cut


def test_batches_of_a_pydataset_must_be_alike():
    class Uneven(Sequence):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return (x[:9], y[:9]) if index == 1 else (x, y)

    with pytest.raises(UserError, match=r"The batch 1 of the PyDataset has .* Stream\(data, samples=N\)"):
        list(training(Uneven()).data.read(Part(0, 40, 0), 8))


@pytest.mark.parametrize("lengths", [(3, 4, 5), (3, 3, 4), (3, 4, 3)])
def test_batches_that_are_padded_to_their_longest_sample_are_found_when_they_are_counted(lengths):
    """As `check` does, not in the first epoch of a job."""

    class Padded(Sequence):
        def __getitem__(self, index):
            _, y = super().__getitem__(index)
            return np.ones((len(y), lengths[index])), y

    with pytest.raises(UserError, match=r"The batch \d of the PyDataset has .* Stream\(data, samples=N\)"):
        training(Padded()).data.describe()


def test_threads_that_parse_at_once_do_not_end_the_job():
    failed = set()

    class Parsing(Sequence):
        def __getitem__(self, index):
            if index not in failed:
                failed.add(index)
                raise SystemError("AST constructor recursion depth mismatch (before=45, after=42)")
            return super().__getitem__(index)

    batches = list(training(Parsing(workers=2)).data.read(Part(0, len(X), 0), 16))
    assert sum(batch.samples for batch in batches) == len(X)
    assert len(failed) == len(Parsing())


def test_items_of_different_shapes_need_lengths():
    items = [np.arange(n) for n in (1, 2, 3)]
    with pytest.raises(UserError, match=r"lengths=\["):
        Indexed.from_items(items).example(3)


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (
            [({"id": 1.0, "celsius": 20.0}, 0.0), ({"id": 2.0, "fahrenheit": 68.0}, 1.0)],
            "x.fahrenheit, x.id, y",
        ),
        ([(1.0, 0.0), (2.0, 1.0, 5.0)], "x, y, sample_weight, and another one x, y"),
        ([{"a": 1.0}, ({"a": 2.0}, 1.0)], "x.a, y, and another one x.a"),
        ([{"a": 1.0, "b": None}, {"a": None, "b": 2.0}], "x.b, and another one x.a"),
        ([{"a": 1.0, "b": 2.0}, {"a": 1.0, "b": None}], "x.a, and another one x.a, x.b"),
    ],
)
@pytest.mark.parametrize("lengths", [(), (4,)])
def test_samples_with_other_parts_than_the_first_are_named(items, words, lengths):
    """Else one column would be trained under another one's name, or weights would be lost."""
    vectors = [
        keras.tree.map_structure(lambda value: value if value is None else [value], item) for item in items
    ]
    with pytest.raises(UserError, match=f"A sample has .*{words}.* Make all samples alike"):
        Indexed.from_items(vectors, lengths=lengths).example(2)


def test_bytes_keep_their_zeros():
    rows = [np.float32(1).tobytes(), np.float32(0).tobytes()]
    assert tf.convert_to_tensor(Indexed.from_items(rows).example(2).x).numpy().tolist() == rows
    pair = Indexed.from_items([([row, b"a"], 1) for row in rows]).example(2).x
    assert tf.convert_to_tensor(pair).numpy().tolist() == [[row, b"a"] for row in rows]


def test_a_pydataset_that_begins_with_an_empty_batch_says_so():
    class Empty(Sequence):
        def __getitem__(self, index):
            return super().__getitem__(index - 1) if index else (X[:0], Y[:0])

    with pytest.raises(UserError, match="The first batch of the PyDataset has no rows"):
        training(Empty()).data.describe()


class Renamed(keras.utils.PyDataset):
    """Its later batches have another key."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"a": X[:8], "b" if index < 2 else "c": X[:8]}, Y[:8]


def test_batches_with_other_keys_are_named():
    data = training(Renamed()).data
    with pytest.raises(UserError, match=r"The batch \d of the PyDataset has .*x\.a, x\.c, y.*x\.a, x\.b, y"):
        list(data.read(Part(0, data.describe().size), 8))
    stream = Stream(lambda: map(Renamed().__getitem__, range(4)), samples=32, lengths=[4])
    with pytest.raises(UserError, match=r"A sample has x\.a, x\.c, y"):
        list(stream.read(Part(0, 32), 8))


# --- streams ----------------------------------------------------------------------------------------------------------


def numbers():
    return tf.data.Dataset.range(1000).batch(10)


def read(stream, start, stop):
    return [int(n) for batch in stream.read(Part(start, stop), 8) for n in batch.x[: batch.samples]]


def test_a_stream_continues_between_leases_and_repeats():
    stream = Stream(numbers())
    assert read(stream, 0, 13) + read(stream, 500, 520) == list(range(33))
    assert read(stream, 0, 980)[-13:] == list(range(13))


@pytest.mark.parametrize("worker", [(0, 0), (1, 0), (2, 1)])
def test_a_worker_takes_whole_batches_wherever_its_stream_begins_or_ends(worker):
    """Not a short one per lease, which costs a step as well."""
    stream = Stream(tf.data.Dataset.range(100).batch(8), samples=100).placed(0, worker)
    leases = [(start, min(start + 16, 100)) for start in range(0, 100, 16)]
    read = [batch for _ in range(3) for lease in leases for batch in stream.read(Part(*lease), 8)]
    assert [batch.samples for batch in read] == 3 * [*[8] * 12, 4]
    rows = [int(n) for batch in read for n in batch.x[: batch.samples]]
    assert rows == [(rows[0] + n) % 100 for n in range(300)]


def test_workers_of_large_data_begin_with_a_whole_batch_of_them():
    """Which is a view: at any other place each batch is copied from two."""
    for slot in range(4):
        stream = Stream(tf.data.Dataset.range(8000).batch(8)).placed(0, (slot, 0))
        first = next(stream.read(Part(0, 8), 8)).x
        assert int(first[0]) % 8 == 0


def test_a_run_that_continues_another_one_reads_on():
    """From the epoch in which it begins: of data of unknown length nobody would ever train the rest."""

    def first(data, worker, epoch=3, samples=100):
        batch = next(Stream(data, samples=samples).placed(0, worker).read(Part(0, 8, epoch), 8))
        return int(batch.x[0])

    endless = numbers().repeat()
    assert first(endless, (0, 0)) == 0
    assert first(endless, (0, 0, 5)) == 300
    assert first(numbers, (0, 0, 5)) == 300
    assert first(numbers(), (0, 0, 5), epoch=13) == 300
    assert first(numbers(), (1, 0, 5)) == first(numbers(), (1, 0)) + 300


def test_workers_begin_at_different_places_and_each_gets_everything():
    places = [read(Stream(numbers()).placed(0, (slot, 0)), 0, 1)[0] for slot in range(8)]
    gaps = np.diff(sorted([*places, 1000]))
    assert min(gaps) >= 50
    assert sorted(read(Stream(numbers()).placed(0, (3, 1)), 0, 1000)) == list(range(1000))


def test_an_epoch_that_is_a_part_of_the_data_begins_in_any_part_of_them():
    def firsts(data, samples):
        return [
            read(Stream(data, samples=samples).placed(0, (slot, incarnation)), 0, 1)[0]
            for slot in range(4)
            for incarnation in range(5)
        ]

    gaps = np.diff(sorted([0, *firsts(numbers(), 10), 1000]))
    assert gaps.max() <= 150
    assert max(firsts(numbers().repeat(), 10)) < 10  # of unknown length: no longer than the user says


def test_a_worker_skips_no_longer_than_it_may(monkeypatch):
    times = iter(range(0, 1000, 9))
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    stream = Stream(numbers()).placed(0, (1, 0))
    first = read(stream, 0, 1)[0]
    monkeypatch.undo()
    assert 0 < first < 50


def test_a_function_with_an_argument_gets_another_number_on_each_worker():
    def fn(seed):
        return tf.data.Dataset.range(seed, seed + 100).batch(4)

    firsts = [
        read(Stream(fn, samples=100).placed(0, (slot, inc)), 0, 1)[0] for slot in range(3) for inc in (0, 1)
    ]
    assert len(set(firsts)) == 6


def test_a_pydataset_that_is_a_stream_is_told_of_the_end_of_each_pass():
    class Shuffled(Sequence):
        def on_epoch_end(self):
            self.x = self.x[::-1]

    stream = training(Stream(Shuffled(np.arange(40)), samples=40)).data.placed(0)
    forth, back = list(range(40)), list(range(39, -1, -1))
    assert [read(stream, 40 * n, 40 * n + 40) for n in range(3)] == [forth, back, forth]


def test_a_pydataset_that_is_a_stream_is_told_of_the_beginning_of_each_pass():
    class Turned(Sequence):
        def on_epoch_begin(self):
            self.x = self.x[::-1]

    stream = training(Stream(Turned(np.arange(40)), samples=40)).data.placed(0)
    forth, back = list(range(40)), list(range(39, -1, -1))
    assert [read(stream, 40 * n, 40 * n + 40) for n in range(3)] == [back, forth, back]


def test_generator_that_ends_is_named():
    once = (np.ones(4) for _ in range(2))
    stream = Stream(lambda: once, samples=100)
    with pytest.raises(UserError, match=r"ends at once\. A generator can be read only once"):
        read(stream, 0, 100)


@pytest.mark.parametrize(
    ("drop_remainder", "samples", "told"), [(False, None, True), (True, None, False), (False, 100, False)]
)
def test_number_of_samples_that_is_rounded_up_is_said_to_be(drop_remainder, samples, told):
    dataset = tf.data.Dataset.range(100).batch(8, drop_remainder=drop_remainder)
    stream = Stream(dataset, samples=samples)
    assert stream.describe().size == (96 if drop_remainder else samples or 104)
    assert ("its batches times the rows of the first two" in stream.remark) == told


def uneven(*sizes):
    """Batches with so many rows."""

    def rows():
        end = 0
        for size in sizes:
            yield np.arange(end, end + size, dtype=np.float32)
            end += size

    spec = tf.TensorSpec((None,), tf.float32)
    return tf.data.Dataset.from_generator(rows, output_signature=spec).apply(
        tf.data.experimental.assert_cardinality(len(sizes))
    )


@pytest.mark.parametrize("sizes", [(4, 32, 32, 32), (0, 32, 4, 32), (32, 32, 4)])
def test_one_pass_has_all_samples_whatever_the_sizes_of_batches(sizes):
    stream = Stream(uneven(*sizes))
    seen = [value for batch in stream.whole(16) for value in batch.as_given()]
    assert seen == list(range(sum(sizes)))
    assert stream.example(16).samples == min(16, next(filter(None, sizes)))


def test_only_the_asked_samples_are_in_a_pass_if_they_are_given():
    stream = Stream(uneven(4, 32, 32), samples=40)
    assert [value for batch in stream.whole(16) for value in batch.as_given()] == list(range(40))


def test_batches_without_samples_are_no_data():
    with pytest.raises(UserError, match="The data are empty"):
        Stream(uneven(0, 0)).describe()


def test_errors_of_a_data_set_do_not_call_validation_data_training_data():
    for wrong in (uneven(4).take(0), uneven(4).repeat()):
        with pytest.raises(UserError) as refused:
            training((X, Y), validation=wrong)
        assert not any(words in str(refused.value) for words in ("Training(data=", "training data"))


@pytest.mark.parametrize("batches", [1, 0])
def test_pipeline_does_not_run_before_its_samples_are_counted(batches):
    """Not when the module of the job is imported, and never for validation."""
    read = []

    def noted(row):
        read.append(row)
        return row

    dataset = tf.data.Dataset.range(40).map(
        lambda row: tf.py_function(noted, [row], tf.int64), num_parallel_calls=1
    )
    dataset = dataset.map(lambda row: tf.ensure_shape(row, ()))
    stream = training((X, Y), validation=dataset.batch(8) if batches else dataset).validation
    assert sum(batch.samples for batch in stream.whole(8)) == 40
    assert len(read) == 40


@pytest.mark.parametrize(
    "parts",
    [tf.ragged.constant([[1], [1, 2]] * 4), tf.sparse.from_dense(np.eye(8))],
    ids=["ragged", "sparse"],
)
def test_data_set_of_batches_that_are_not_dense_is_refused(parts):
    with pytest.raises(UserError, match=r"The data set yields a \w+Tensor. Yield dense tensors"):
        training(tf.data.Dataset.from_tensor_slices((parts, np.ones(8))).batch(4))


@pytest.mark.parametrize("form", FORMS)
def test_data_that_come_in_batches_say_of_which_size(form):
    own = {"dataset": 8, "shuffled dataset": 8, "function": 4, "iterator of a data set": 8}
    own |= {"pydataset": 16, "pydataset with threads": 16}
    assert training(FORMS[form]()).data.batch_size == own.get(form)


def test_the_first_batches_are_read_once():
    read = []

    def batches():
        for n in range(4):
            read.append(n)
            yield X[:8], Y[:8]

    data = training(Stream(batches, samples=32)).data
    assert (data.batch_size, data.example(16).samples, data.placed(0).batch_size) == (8, 8, 8)
    assert read == [0, 1]


def test_what_is_special_of_a_form_is_said():
    assert "not each of them exactly once" in training(numbers()).data.remark
    assert "on_epoch_begin() and on_epoch_end() are not called" in training(Sequence()).data.remark
    assert training((X, Y)).data.remark == ""


def test_the_seed_of_a_stream_follows_that_of_the_job_and_differs_by_worker_and_pass():
    seeds = []

    def fn(seed):
        seeds.append(seed)
        return [np.ones(4)]

    for job, worker in (
        (0, (0, 0)),
        (7, (0, 0)),
        (7, (1, 0)),
        (7, (1, 0, 9)),  # in a run that continues another one
        (7, (1, 1)),
        (7, (1, 1)),
    ):
        read(Stream(fn, samples=8).placed(job, worker), 0, 12)
    assert len(seeds) == 18
    assert len(set(seeds[:15])) == 15
    assert seeds[15:] == seeds[12:15]
    assert all(0 <= seed < 2**32 for seed in seeds)


def seeded(number, /):
    yield np.full(4, number)


def named(size=4, *, seed=None):
    yield np.full(size, seed)


def with_default(value=3, *rest, size=4, **options):
    yield np.full(size, value + len(rest) + len(options))


@pytest.mark.parametrize(
    ("function", "gets"),
    [
        (seeded, True),
        (lambda number: [np.full(4, number)], True),
        (named, True),
        (functools.partial(named, 8), True),
        (functools.partial(seeded, 3), False),
        (with_default, False),
    ],
)
def test_a_seed_goes_into_an_argument_that_wants_one(function, gets):
    firsts = {read(Stream(function, samples=8).placed(0, (slot, 0)), 0, 1)[0] for slot in range(3)}
    assert len(firsts) == 3 if gets else firsts == {3}


@pytest.mark.parametrize("labels", ["of their own", "the images", "none"])
@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
def test_rows_of_arrays_are_samples_also_if_their_parts_are_alike(labels, batches, mapped):
    images = np.arange(50 * 28 * 28, dtype=np.float32).reshape(50, 28, 28)
    arrays = {"of their own": (images, np.zeros(50)), "the images": (images, images), "none": images}[labels]
    dataset = tf.data.Dataset.from_tensor_slices(arrays).shuffle(50, seed=1)
    if mapped:
        dataset = dataset.map(lambda *row: row if len(row) > 1 else row[0])
    if batches:
        dataset = dataset.batch(10, drop_remainder=True)
    stream = Stream(dataset)
    assert stream.describe().size == 50
    assert stream.example(8).x.shape == (8, 28, 28)


def test_batches_of_a_generator_or_of_files_that_say_how_many_rows_they_have_are_batches():
    spec = tf.TensorSpec((10, 28), tf.float32)
    made = tf.data.Dataset.from_generator(lambda: [np.ones((10, 28))] * 5, output_signature=spec)
    loaded = tf.data.Dataset.from_tensor_slices(["a", "b"]).map(lambda _name: tf.ones((10, 28)))
    for dataset in (made, loaded, tf.data.Dataset.from_tensors(np.ones((10, 28), np.float32))):
        assert Stream(dataset, samples=50).example(10).x.shape == (10, 28)


@pytest.mark.parametrize("kind", ["batches", "samples", "windows"])
def test_a_size_that_one_part_of_a_batch_does_not_tell_is_that_of_the_others(kind):
    """A layer that vectorizes text forgets how many rows it had."""

    def forget(rows, labels):
        return tf.ensure_shape(
            tf.py_function(np.asarray, [rows], tf.float64), (None, *rows.shape[1:])
        ), labels

    rows = tf.data.Dataset.from_tensor_slices((np.ones((40, 3)), np.arange(40.0)))
    dataset, size = {
        "batches": (rows.batch(8, drop_remainder=True).map(forget), 8),
        "samples": (rows.map(forget), None),
        "windows": (rows.batch(8, drop_remainder=True).map(lambda x, y: forget(x, y[-1])), None),
    }[kind]
    assert Stream(dataset.prefetch(1)).batch_size == size
