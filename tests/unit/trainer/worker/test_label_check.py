"""Labels and ids that only a CPU would refuse are refused on the host, and data that train are not."""

from contextlib import closing

import keras
import numpy as np
import pytest

from shoal_trainer import Indexed, Training, UserError
from shoal_trainer.worker.flat_model import FlatModel
from shoal_trainer.worker.label_check import LabelCheck
from shoal_trainer.worker.tasks import Tasks
from tests.unit.trainer.worker.fakes import FakeCoordinator
from tests.unit.trainer.worker.models import DATA, compiled, job
from tests.unit.trainer.worker.running import Running

L = keras.layers
as_on_gpu = pytest.mark.parametrize("engine", ["gpu"], indirect=True)
both = pytest.mark.parametrize("engine", ["host", "gpu"], indirect=True)


def checked(model, x, y):
    data = Indexed.from_arrays(x, y)
    flat_model = FlatModel(model, data.example(8), "fp32")
    flat_model.trace()
    return LabelCheck(flat_model), data


def text_model(**options):
    words, kind = (
        keras.Input((3,), dtype="int32", name="words"),
        keras.Input((1,), dtype="int32", name="kind"),
    )
    h = L.Flatten()(L.Embedding(10, 4, name="of_words")(words))
    h = L.Concatenate()([h, L.Flatten()(L.Embedding(5, 2)(kind))])
    model = keras.Model({"words": words, "kind": kind}, {"a": L.Dense(3)(h), "b": L.Dense(1)(h)})
    sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)
    model.compile("sgd", {"a": sparse, "b": "mse"})
    return model


def text(words=9, kind=4, label=2):
    x = {"words": np.full((8, 3), words, np.int32), "kind": np.full((8, 1), kind, np.int32)}
    return x, {"a": np.full(8, label), "b": np.full(8, 77.0)}


@pytest.mark.by_day(2)
@both
@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        (text(), {}, None),
        (text(label=3), {}, r"Labels of a are outside the loss's range: 3, but .* 3 classes, 0 to 2"),
        (text(label=-1), {}, "outside the loss's range: -1"),
        (text(label=-1), {"ignore_class": -1}, None),
        (
            text(words=10),
            {},
            "Ids are outside the Embedding 'of_words': 10, but its input_dim is 10, for 0 to 9",
        ),
        (text(kind=-6), {}, "Ids are outside the Embedding.*: -6"),
        (text(kind=-5), {}, None),
    ],
)
def test_labels_and_ids_are_checked_on_the_host(data, options, words):
    check, source = checked(text_model(**options), *text())
    batch = Indexed.from_arrays(*data).example(8)
    assert source.size == 8
    if words is None:
        check.check(batch)
        return
    with pytest.raises(UserError, match=words):
        check.check(batch)


def test_labels_and_ids_of_an_evaluation_are_checked():
    """On a GPU its loss would be NaN, which is told to nobody, or an id's values would be 0."""
    source = Indexed.from_arrays(*text())
    for bad, words in ((text(label=3), "Labels of a are outside"), (text(words=10), "Ids are outside")):
        validation = Indexed.from_arrays(*bad)
        job = Training(model=text_model, data=source, validation=validation)
        flat_model = FlatModel(text_model(), source.example(8), "fp32")
        flat_model.trace()
        with closing(Tasks(job, flat_model, 4)) as tasks, pytest.raises(UserError, match=words):
            tasks.evaluate(flat_model.initial())


class Masked(keras.losses.SparseCategoricalCrossentropy):
    """Ignores tokens with the label -100."""

    def call(self, y_true, y_pred):
        kept = keras.ops.cast(y_true >= 0, "float32")
        return super().call(keras.ops.maximum(y_true, 0), y_pred) * kept


def test_a_loss_of_its_own_may_give_labels_a_meaning_that_its_base_class_does_not_know():
    inputs = keras.Input((5,))
    model = keras.Model(inputs, L.Dense(3, activation="softmax")(L.Reshape((5, 1))(inputs)))
    model.compile("sgd", Masked())
    check, data = checked(model, np.ones((8, 5), np.float32), np.array([[-100, 0, 1, 2, 1]] * 8))
    check.check(data.example(8))


@pytest.mark.parametrize(
    "loss", ["sparse_categorical_crossentropy", keras.losses.sparse_categorical_crossentropy]
)
def test_labels_of_a_loss_that_is_given_by_name_are_checked(loss):
    inputs = keras.Input((2,))
    model = keras.Model(inputs, L.Dense(3, activation="softmax")(inputs))
    model.compile("sgd", loss)
    check, _ = checked(model, np.ones((8, 2)), np.arange(8) % 3)
    with pytest.raises(UserError, match="outside the loss's range: 3"):
        check.check(Indexed.from_arrays(np.ones((8, 2)), np.full(8, 3)).example(8))


def test_models_without_such_limits_are_not_checked():
    inputs = keras.Input((2,))
    model = keras.Model(inputs, L.Dense(1)(inputs))
    model.compile("sgd", "mse")
    check, data = checked(model, np.ones((8, 2)), np.full(8, 99.0))
    check.check(data.example(8))


@pytest.mark.nightly
@as_on_gpu
def test_wrong_label_ends_the_worker_with_its_place(start_servers):
    coordinator = FakeCoordinator(DATA.size, tasks=())
    labels = DATA.y.copy()
    labels[100] = 7
    training = job(wire="fp32")
    running = Running(
        type(training)(model=training.model, data=(DATA.x, labels)), start_servers(coordinator), coordinator
    )
    end = running.start().join()
    assert isinstance(end, UserError)
    assert "outside the loss's range: 7" in str(end)


# --- ids, wherever the Embedding is -----------------------------------------------------------------------------------

IDS = np.arange(40, dtype=np.int32).reshape(8, 5) % 10
"""Of an Embedding of 10. A remainder of them is they themselves: their values do not tell that a model takes it."""
WRONG = np.where(IDS == 7, 12, IDS)
LABELS = np.arange(8) % 4


class Inside(L.Layer):
    """A layer of one's own: the sum of Embeddings, each of what becomes of the ids first."""

    def __init__(self, *parts, first=lambda ids: ids):
        super().__init__()
        self.parts, self.changes = list(parts), [first, *[lambda ids: ids] * (len(parts) - 1)]

    def call(self, ids):
        return sum(part(change(ids)) for part, change in zip(self.parts, self.changes, strict=True))


class Words(keras.Model):
    def __init__(self, layer):
        super().__init__()
        self.words, self.pool, self.dense = layer, L.GlobalAveragePooling1D(), L.Dense(4)

    def call(self, x):
        return self.dense(self.pool(self.words(x)))


class WithOwnStep(Words):
    def train_step(self, data):
        return super().train_step(data)


class TakesRemainderInItsStep(Words):
    def train_step(self, data):
        x, y = data
        return super().train_step((x % 10, y))


def in_functional(layer, dtype="int64"):
    inputs = keras.Input((5,), dtype=dtype)
    return keras.Model(inputs, L.Dense(4)(L.GlobalAveragePooling1D()(layer(inputs))))


def nested(layer):
    inputs = keras.Input((5,), dtype="int32")
    return keras.Model(inputs, L.Dense(4)(in_functional(layer)(inputs)))


def in_sequential(layer):
    return keras.Sequential([layer, L.GlobalAveragePooling1D(), L.Dense(4)])


def embedding(dim=10, name="words"):
    return L.Embedding(dim, 4, name=name)


def refused(model, ids=WRONG, words="Ids are outside the Embedding 'words': 12, but its input_dim is 10"):
    check, source = checked(compiled(model), IDS, LABELS)
    check.check(source.example(8))
    with pytest.raises(UserError, match=words):
        check.check(Indexed.from_arrays(ids, LABELS).example(8))


def accepted(model):
    check, _ = checked(compiled(model), IDS, LABELS)
    check.check(Indexed.from_arrays(WRONG, LABELS).example(8))


@pytest.mark.by_day(4)
@both
@pytest.mark.parametrize("form", [Words, in_functional, nested, in_sequential, WithOwnStep])
def test_ids_are_checked_wherever_the_embedding_is(form):
    refused(form(Inside(embedding())))


class Hashed(L.Embedding):
    """Takes any number for an id."""

    def call(self, inputs):
        return super().call(keras.ops.mod(inputs, self.input_dim))


class Scaled(L.Embedding):
    """Has a `call` of its own, and looks the ids up as they are."""

    def call(self, inputs):
        return super().call(inputs) * 2.0


@pytest.mark.parametrize("kind", [Scaled, L.ReversibleEmbedding])
def test_a_subclass_that_looks_ids_up_as_they_are_has_the_limit_of_its_base_class(kind):
    refused(in_functional(kind(10, 4, name="words"), dtype="float32"))


@pytest.mark.by_day(2)
@pytest.mark.parametrize(
    "change",
    [
        lambda ids: ids % 10,
        lambda ids: ids[:, :1],  # the other columns need not be ids
        lambda ids: ids - 3,
        lambda ids: keras.ops.minimum(ids, 9),
        lambda ids: keras.ops.cast(keras.ops.cast(ids, "bool"), "int32"),
    ],
)
def test_ids_that_the_model_changes_first_may_be_any_numbers(change):
    accepted(in_functional(Inside(embedding(), first=change)))


@pytest.mark.parametrize(
    "model", [lambda: Words(Hashed(10, 4)), lambda: TakesRemainderInItsStep(embedding())]
)
def test_a_subclass_may_give_ids_a_meaning_that_its_base_class_does_not_know(model):
    accepted(model())


def test_of_two_embeddings_the_smaller_one_counts_if_both_look_the_ids_up_as_they_are():
    def both(**options):
        return Words(Inside(embedding(), embedding(20, "more_words"), **options))

    refused(both())
    words = "Ids are outside the Embedding 'more_words': 22, but its input_dim is 20"
    refused(both(first=lambda ids: ids % 10), np.where(IDS == 7, 22, WRONG), words)


def test_ids_of_an_evaluation_are_checked_wherever_the_embedding_is():
    source, validation = (Indexed.from_arrays(ids, LABELS) for ids in (IDS, WRONG))
    training = Training(model=lambda: None, data=source, validation=validation)
    flat_model = FlatModel(compiled(Words(embedding())), source.example(8), "fp32")
    flat_model.trace()
    words = r"Training\(validation=…\): Ids are outside the Embedding 'words': 12"
    with closing(Tasks(training, flat_model, 4)) as tasks, pytest.raises(UserError, match=words):
        tasks.evaluate(flat_model.initial())
